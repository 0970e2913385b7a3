"""Shows the progress of an alignment that is not followed by a training."""

import logging
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from splitveil.common.text.log_lines import log_fields, writes_json
from splitveil.common.text.output import printing_console

_logger = logging.getLogger(__name__)


class AlignmentProgress:
    """A bar with rate and time left on a terminal, occasional log lines elsewhere."""

    def __init__(
        self, party: str, *, console: Console | None = None, log_every_s: float = 10.0
    ) -> None:
        self._console = console or printing_console(stderr=True, plain=writes_json())
        self._log_every_s = log_every_s
        self._logged = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(f"{party}: aligning", total=None, visible=False, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, done_ids: int, total_ids: int) -> None:
        if self._console.is_terminal:
            speed = self._bar.tasks[0].speed
            rate = "" if speed is None else f"{speed:,.0f} ids/s"
            self._bar.update(
                self._task, completed=done_ids, total=total_ids, rate=rate, visible=True
            )
        elif time.monotonic() - self._logged >= self._log_every_s:
            self._logged = time.monotonic()
            fields = log_fields(ids_done=done_ids, ids=total_ids)
            _logger.info("aligned %d of %d ids", done_ids, total_ids, extra=fields)
