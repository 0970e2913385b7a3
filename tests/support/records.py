"""Writes the files of a run with the types of its record, without a run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from splitveil.common.record.run_record import METRICS, Line, Summary, parts_of
from splitveil.common.text.values import from_form


def append_lines(folder: Path, *lines: Line, time_s: float = 0.1) -> None:
    with (folder / METRICS).open("a", encoding="utf-8") as metrics:
        metrics.writelines(text_of(lines, time_s))


def summary_of(form: dict[str, Any]) -> Summary:
    return from_form(Summary, form)


def text_of(lines: Iterable[Line], time_s: float = 0.1) -> Iterable[str]:
    parts = (parts_of(line, time_s) for line in lines)
    return (json.dumps(head | figures) + "\n" for head, figures in parts)
