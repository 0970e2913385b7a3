"""The files of a run, written by the schema of its record and without a run."""

import json
from collections.abc import Iterable
from pathlib import Path

from splitveil.common.record.lines import Line, to_json
from splitveil.common.record.run_record import METRICS


def append_lines(folder: Path, *lines: Line, time_s: float = 0.1) -> None:
    """Write lines behind those in a party's metrics."""
    with (folder / METRICS).open("a", encoding="utf-8") as metrics:
        metrics.writelines(text_of(lines, time_s))


def text_of(lines: Iterable[Line], time_s: float = 0.1) -> Iterable[str]:
    return (json.dumps(to_json(line, time_s)) + "\n" for line in lines)
