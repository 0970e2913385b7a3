"""Shows the progress of work that takes long: a bar on a terminal, log lines elsewhere."""

import logging
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from splitveil.common.text.log_lines import log_fields, printing_console, shows_bars
from splitveil.common.text.wording import in_short, label

_logger = logging.getLogger(__name__)

_LEAST_BAR, _LONGEST_BAR = 10, 40  # characters


class ProgressBar:
    """Shows how far some work is, and the time left; whoever opens a second one sees the first."""

    _shown: "ClassVar[ProgressBar | None]" = None  # two would jump between each other's lines

    def __init__(
        self,
        what: str,
        unit: str = "ids",
        total: int | None = None,
        *,
        per_epoch: int = 0,
        shows: bool = True,
        console: Console | None = None,
        log_every_s: float = 60.0,
    ) -> None:
        """Prepare the bar, which without a total only moves.

        Args:
            per_epoch: how much of the work is an epoch, if epochs are what people count.
            shows: whether it and the ones opened meanwhile are seen.
        """
        self.done = self._before = 0
        self._what, self._unit, self._total = what, unit, total
        self._console = console or printing_console(stderr=True, plain=not shows_bars())
        # Asked at every step, and looks it up anew.
        self._has_bar = shows and self._console.is_terminal
        self._log_every_s = log_every_s if shows else math.inf
        self._logged = self._epoch_began = time.monotonic()
        self._first = self._last = (0.0, 0)  # when, and how much was done
        width = max(_LEAST_BAR, min(_LONGEST_BAR, self._console.width // 4))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(width),
            _FiguresColumn(self._console, width, unit, per_epoch),
            console=self._console,
            refresh_per_second=4,
            disable=not self._has_bar,
            transient=total is None,
        )
        self._task = self._bar.add_task(what, total=total, numbers=())

    def __enter__(self) -> Self:
        self._logged = self._epoch_began = time.monotonic()
        if ProgressBar._shown is None:
            ProgressBar._shown = self
            self._bar.start()
        else:
            self._has_bar, self._log_every_s = False, math.inf
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if ProgressBar._shown is self:
            ProgressBar._shown = None
            self._bar.stop()
            if not self._has_bar and self.done:
                self._log({}, logging.DEBUG)

    def end_epoch(self) -> float:
        """Return the seconds that an epoch has taken; a line about it makes one of steps wait."""
        now = time.monotonic()
        taken_s, self._epoch_began, self._logged = now - self._epoch_began, now, now
        return taken_s

    @property
    def per_s(self) -> float:
        """Speed from the first note, which waits for the peer, to the last one so far."""
        seconds, done = (last - first for first, last in zip(self._first, self._last, strict=True))
        return done / max(seconds, 1e-9)

    def resume_at(self, done: int) -> None:
        """Resume where so much is done; the speed is measured from here."""
        self.done, self._first, self._last = done, (0.0, 0), (0.0, 0)
        if self._has_bar:
            self._bar.update(self._task, completed=done)

    def advance(self, more: int = 1, /, **numbers: float | None) -> None:
        """Count work and show numbers such as ``loss``; a narrow terminal gets the first ones."""
        self.note(self.done + more, **numbers)

    def note(self, done: int, total: int | None = None, /, **numbers: float | None) -> None:
        self.done, self._total = done, total or self._total
        self._last = (now, _) = (time.monotonic(), done)
        if not self._first[0]:
            self._first = self._last
        if self._has_bar:
            shown = each_in_words(numbers)
            if self.per_s >= 1:
                shown.insert(1, f"{self.per_s:,.1f} {self._unit}/s")
            self._bar.update(self._task, completed=done, total=self._total, numbers=shown)
        elif now - self._logged >= self._log_every_s:
            self._logged = now
            self._log(numbers)
        if done == self._total:  # what comes at the end may have a bar of its own
            self._close()

    def _log(self, numbers: Mapping[str, float | None], level: int = logging.INFO) -> None:
        shown = [f"{self.per_s:,.1f} {self._unit}/s", *each_in_words(numbers)]
        fields = {
            f"{self._unit}_done": self.done,
            self._unit: self._total,
            f"{self._unit}_per_s": round(self.per_s, 3),
        }
        _logger.log(
            level,
            "%s: %s of %s %s, %s",
            self._what,
            f"{self.done:,}",
            f"{self._total or 0:,}",
            self._unit,
            ", ".join(shown),
            extra=log_fields(**fields, **numbers),
        )


class _FiguresColumn(ProgressColumn):
    """The figures that fit beside the description and a bar of some width."""

    def __init__(self, console: Console, bar_width: int, unit: str, per_epoch: int) -> None:
        self._console, self._bar_width = console, bar_width
        self._unit, self._per_epoch = unit, per_epoch
        super().__init__()

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(str(timedelta(seconds=int(task.elapsed or 0))))
        # A space on either side of the bar.
        room = self._console.width - len(task.description) - self._bar_width - 2
        if self._per_epoch:
            epochs = round(task.total) // self._per_epoch
            epoch = min(round(task.completed) // self._per_epoch + 1, epochs)
            shown = f"epoch {epoch:,}/{epochs:,}"
        else:
            shown = f"{task.completed:,.0f}/{task.total:,.0f} {self._unit}"
        for figure in [f"{TimeRemainingColumn().render(task).plain} left", *task.fields["numbers"]]:
            if len(shown) + len(", ") + len(figure) > room:
                break
            shown += f", {figure}"
        return Text(shown, no_wrap=True)


def each_in_words(numbers: Mapping[str, float | None]) -> list[str]:
    """Return ``loss 0.25`` for each number that there is."""
    shown = {name: number for name, number in numbers.items() if number is not None}
    return [f"{label(name)} {in_short(n)}" for name, n in shown.items()]
