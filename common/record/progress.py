"""Shows the progress of an alignment or a training: a bar on a terminal, log lines elsewhere."""

import logging
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from splitveil.common.text.log_lines import log_fields, shows_bars
from splitveil.common.text.output import printing_console
from splitveil.common.text.wording import in_short, label

_logger = logging.getLogger(__name__)

_LEAST_BAR, _LONGEST_BAR = 10, 40  # characters


class TrainingProgress:
    def __init__(
        self,
        party: str,
        total_steps: int | None,
        *,
        console: Console | None = None,
        log_every_s: float = 60.0,
    ) -> None:
        self.steps_done = 0
        self._steps_before = 0
        self._total_steps = total_steps or 0  # a one-shot run has none
        self._console = console or printing_console(stderr=True)
        self._has_bar = self._console.is_terminal  # asked at every step, and looks it up anew
        self._log_every_s = log_every_s
        self._logged = self._epoch_began = time.monotonic()
        self._first_step: float | None = None
        self._last_step = 0.0
        width = max(_LEAST_BAR, min(_LONGEST_BAR, self._console.width // 4))
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(width),
            _FiguresColumn(self._console, width),
            console=self._console,
            refresh_per_second=4,
            disable=not self._has_bar,
        )
        self._task = self._bar.add_task(party, total=total_steps, numbers=())

    def __enter__(self) -> Self:
        self._logged = self._epoch_began = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if not self._has_bar:
            self._log({}, logging.DEBUG)

    def end_epoch(self) -> float:
        """Return the seconds that an epoch has taken; a line about it makes one of steps wait."""
        now = time.monotonic()
        taken_s, self._epoch_began, self._logged = now - self._epoch_began, now, now
        return taken_s

    @property
    def steps_per_s(self) -> float:
        """Steps per second from the first one, which waits for the peer, to the last one so far."""
        steps = self.steps_done - self._steps_before
        if self._first_step is None or steps < 2:
            return 0.0
        return (steps - 1) / max(self._last_step - self._first_step, 1e-9)

    def resume_at(self, steps: int) -> None:
        """Resume at a step; the speed is measured from here."""
        self.steps_done = self._steps_before = steps
        self._first_step = None
        if self._has_bar:
            self._bar.update(self._task, completed=steps)

    def advance(self, steps: int = 1, /, **numbers: float | None) -> None:
        """Count steps and show numbers such as ``loss``; a narrow terminal gets the first ones."""
        self.steps_done += steps
        self._last_step = now = time.monotonic()
        if self._first_step is None:
            self._first_step = now
        if self._has_bar:
            shown = each_in_words(numbers)
            shown.insert(1, f"{self.steps_per_s:.1f} steps/s")
            self._bar.update(self._task, advance=steps, numbers=shown)
        elif now - self._logged >= self._log_every_s:
            self._logged = now
            self._log(numbers)

    def _log(self, numbers: Mapping[str, float | None], level: int = logging.INFO) -> None:
        _logger.log(
            level,
            "step %d/%d, %.1f steps/s%s",
            self.steps_done,
            self._total_steps,
            self.steps_per_s,
            "".join(f", {number}" for number in each_in_words(numbers)),
            extra=log_fields(
                steps_done=self.steps_done,
                steps=self._total_steps,
                steps_per_s=round(self.steps_per_s, 3),
                **numbers,
            ),
        )


class _FiguresColumn(ProgressColumn):
    """The figures that fit beside the description and a bar of some width."""

    def __init__(self, console: Console, bar_width: int) -> None:
        self._console = console
        self._bar_width = bar_width
        super().__init__()

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        # A space on either side of the bar.
        room = self._console.width - len(task.description) - self._bar_width - 2
        shown = f"{task.completed:.0f}/{task.total:.0f}"
        for figure in [f"{TimeRemainingColumn().render(task).plain} left", *task.fields["numbers"]]:
            if len(shown) + len(", ") + len(figure) > room:
                break
            shown += f", {figure}"
        return Text(shown, no_wrap=True)


def each_in_words(numbers: Mapping[str, float | None]) -> list[str]:
    """Return ``loss 0.25`` for each number that there is."""
    shown = {name: number for name, number in numbers.items() if number is not None}
    return [f"{label(name)} {in_short(n)}" for name, n in shown.items()]


class CountProgress:
    """A bar with rate and time left on a terminal, occasional log lines elsewhere."""

    def __init__(
        self,
        what: str,
        unit: str = "ids",
        *,
        console: Console | None = None,
        log_every_s: float = 10.0,
    ) -> None:
        self._console = console or printing_console(stderr=True, plain=not shows_bars())
        self._what, self._unit = what, unit
        self._log_every_s = log_every_s
        self._logged, self._done = time.monotonic(), 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=None, visible=False, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, total: int, more: int) -> None:
        self.note(self._done + more, total)

    def note(self, done: int, total: int) -> None:
        self._done = done
        if self._console.is_terminal:
            speed = self._bar.tasks[0].speed
            rate = "" if speed is None else f"{speed:,.0f} {self._unit}/s"
            self._bar.update(self._task, completed=done, total=total, rate=rate, visible=True)
        elif time.monotonic() - self._logged >= self._log_every_s:
            self._logged = time.monotonic()
            fields = log_fields(ids_done=done, ids=total) if self._unit == "ids" else {}
            message = f"{self._what}: {done} of {total} {self._unit}"
            _logger.info("%s", message, extra=fields)
