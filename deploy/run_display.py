"""Shows several parties' output in one terminal: one table of log lines, and one bar beneath it.

A line of the table has the time, the party, and the message, wrapped beneath itself. The bar is the
active party's, which knows the loss.
Where there is no terminal, the lines keep the party's name in front, as they come.
"""

import json
import os
import re
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitveil.common.record.progress import VARIABLE, TrainingProgress
from splitveil.common.text.visible_text import visible

_LOG_LINE = re.compile(r"(\d\d:\d\d:\d\d) \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_TIME_WIDTH = 8
_LONGEST_LINE = 4096


class RunDisplay:
    """The output of some parties on one terminal, with the bar of the first; a context manager."""

    def __init__(self, parties: Sequence[str], console: Console) -> None:
        self._console = console
        self._leader = parties[0]
        self._width = max(map(len, parties))
        self._bar: TrainingProgress | None = None
        self._last_time = ""
        self._lock = threading.Lock()
        self._resources = ExitStack()
        self._told, self.descriptor = os.pipe()
        self._reader = threading.Thread(target=self._read_progress, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self.descriptor)}

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def close_writing(self) -> None:
        """Close this process's own end, once every party has a copy."""
        os.close(self.descriptor)

    def __exit__(self, *_: object) -> None:
        self._reader.join()
        self._resources.close()

    def show(self, party: str, line: str) -> None:
        found = _LOG_LINE.fullmatch(line)
        when, level, message = found.groups() if found else ("", "", line)
        with self._lock:
            shown = "" if when == self._last_time else when
            self._last_time = when or self._last_time
            self._console.print(self._row(shown, party, message, _STYLES.get(level, "")))

    def _row(self, when: str, party: str, message: str, style: str) -> Table:
        row = Table.grid(padding=(0, 1, 0, 0), expand=True)
        row.add_column(width=_TIME_WIDTH, style="dim")
        row.add_column(width=self._width, no_wrap=True, style="cyan")
        row.add_column(ratio=1, overflow="fold")
        row.add_row(when, party, Text(visible(message), style=style))
        return row

    def _read_progress(self) -> None:
        with os.fdopen(self._told, encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(_LONGEST_LINE):
                try:
                    told = json.loads(line)
                    party, done, total = str(told["party"]), int(told["done"]), int(told["total"])
                    numbers = {str(name): float(one) for name, one in told["numbers"].items()}
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # a program of the user's own may write there, too
                if party == self._leader:
                    self._advance(done, total, numbers)

    def _advance(self, done: int, total: int, numbers: dict[str, float]) -> None:
        if self._bar is None:
            bar = TrainingProgress("training", total, console=self._console)
            with self._lock:  # a line that is being printed knows of no bar, and would end in it
                self._bar = self._resources.enter_context(bar)
        if done < self._bar.steps_done:
            self._bar.resume_at(done)
        self._bar.advance(done - self._bar.steps_done, **numbers)
