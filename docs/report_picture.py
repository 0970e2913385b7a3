"""Prints the picture of a report's first screen as an SVG that needs no page, for the README.

python docs/report_picture.py runs/NAME > docs/images/report.svg
"""

import sys
from importlib.resources import files
from pathlib import Path

from splitveil.active_party.report import read_run
from splitveil.active_party.report.answer import drawn
from splitveil.active_party.report.bounds import assessment_of
from splitveil.active_party.report.verdict import target_of

STANDALONE = (
    "svg.chart.scale { max-width: none; background: var(--card); "
    "font: 14px system-ui, sans-serif; }"
)


def main() -> None:
    run = read_run(Path(sys.argv[1]))
    picture = str(drawn(assessment_of(run), {}, target_of(run)[0], run.passives))
    style = files("splitveil.common.party").joinpath("templates/style.css").read_text("utf-8")
    head, _, rest = picture.partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    print(f"{head}><style>{style}{STANDALONE}</style>{rest}")


if __name__ == "__main__":
    main()
