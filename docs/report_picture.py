"""Prints the picture of a report's first screen as an SVG that needs no page, for the README.

python docs/report_picture.py runs/NAME > docs/images/report.svg
"""

import sys
from importlib.resources import files
from pathlib import Path

from splitveil.active_party.report import read_run
from splitveil.active_party.report.page import scales
from splitveil.common.party.report_parts import picture

STANDALONE = (
    "svg.chart.scale { max-width: none; background: var(--card); "
    "font: 14px system-ui, sans-serif; }"
)


def main() -> None:
    run = read_run(Path(sys.argv[1]))
    drawn = str(picture([*scales(run, run.assessment).values()]))
    style = files("splitveil.common.party").joinpath("templates/style.css").read_text("utf-8")
    head, _, rest = drawn.partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    print(f"{head}><style>{style}{STANDALONE}</style>{rest}")


if __name__ == "__main__":
    main()
