"""The record that a run leaves in each party's folder: metrics, summary, and an earlier ledger.

    metrics.jsonl       one line per step, batch, epoch or event, written while the run trains
    summary.json        written when the run has ended
    ledger_ahead.json   bounds on all answers, written when a run resumes before some of them

A record names its format unless it is the first: ``"format": 2`` in a JSON object, or a line
``{"kind": "format", "format": 2}``. A file without it has format 1, which is written here.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record import lines
from splitveil.common.record.lines import Line, LineT
from splitveil.common.record.run_folder import write_json_atomically
from splitveil.common.record.summary import Summary
from splitveil.common.text.values import as_mapping, as_number, from_form

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LEDGER_AHEAD = "ledger_ahead.json"

_FORMAT, _FORMAT_KEY = 1, "format"


class TimedLine(NamedTuple):
    time_s: float | None  # since the run's start, while the party was running
    line: Line


class Metrics:
    def __init__(self, timed_lines: list[TimedLine]) -> None:
        self.timed = timed_lines

    def of(self, kind: type[LineT]) -> list[LineT]:
        return [line for _, line in self.timed if isinstance(line, kind)]


def write_summary(folder: Path, written: Summary) -> None:
    write_json_atomically(folder / SUMMARY, written.form())


def read_summary(folder: Path) -> Summary:
    found = find_summary(folder)
    if found is None:
        raise SettingsError(f"{folder / SUMMARY}: expected the summary of a run that has ended")
    return found


def find_summary(folder: Path) -> Summary | None:
    found = _read_object(folder / SUMMARY)
    return from_form(Summary, found) if found else None


def has_summary(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def read_metrics(folder: Path) -> Metrics:
    """Read a party's metrics, without lines cut off or unknown; empty without any.

    Raises SettingsError.
    """
    return Metrics(list(_timed_lines(folder / METRICS)))


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}: line {line:,} is damaged: it is not UTF-8") from error
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error


def write_ledger_ahead(folder: Path, bounds: LeakBounds) -> None:
    write_json_atomically(folder / LEDGER_AHEAD, bounds.form())


def find_ledger_ahead(folder: Path) -> LeakBounds | None:
    found = _read_object(folder / LEDGER_AHEAD)
    return from_form(LeakBounds, found) if found else None


def _timed_lines(path: Path) -> Iterator[TimedLine]:
    for text in text_of(path).splitlines():
        try:
            document = as_mapping(json.loads(text))
        except (ValueError, RecursionError):
            continue
        _check_format(path, document)
        line = lines.from_json(document)
        if line is not None:
            yield TimedLine(as_number(document.get("time_s")), line)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        document = as_mapping(json.loads(text_of(path) or "{}"))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid JSON") from error
    _check_format(path, document)
    return document


def _check_format(path: Path, document: Mapping[str, Any]) -> None:
    written = document.get(_FORMAT_KEY, _FORMAT)
    if written != _FORMAT:
        raise SettingsError(
            f"{path}: written in format {written!r}, by another version of splitveil; expected "
            f"format {_FORMAT}"
        )
