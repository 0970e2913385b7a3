"""What a run tells its user: metrics files, progress, log lines and the final tables.

Numbers here are about batches, epochs and runs, never about one example.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.errors import StorageError
from common.output import UNPRINTED, printing_console
from common.run_folder import OWNER_ONLY, finite_or_null, open_to_append
from common.upper_bounds import at_most, auc_at_most
from common.visible_text import cell, visible, visible_lines

_logger = logging.getLogger(__name__)

_LEAST_BAR, _LONGEST_BAR = 10, 40  # characters

_TABLES_OF_THEIR_OWN = {
    "leak",
    "leak_classes",
    "leak_run_level_classes",
    "ledger",
    "leak_worst_epoch",
    "leak_run_level",
    "audit",
    "transcript",
}

_SOUGHT_BYTES = 2**16
"""How much of the end of a metrics file is searched for the end of a line at a time."""

_OWN_PACKAGES = ("active_party", "passive_party", "common", "deploy")


class MetricsLog:
    """Writes ``metrics.jsonl``, one object per line, and the same numbers for TensorBoard.

    A line has ``time_s`` since the start, ``kind``, ``epoch``, ``step`` and the named numbers, null
    where one is not finite; a histogram's line has ``figure``, ``edges`` and ``counts`` instead.
    Any thread may write.
    """

    def __init__(self, folder: Path, steps_per_epoch: int = 1) -> None:
        """Open both files.

        Args:
            folder: an existing folder.
            steps_per_epoch: places the epochs on TensorBoard's one axis; may be set later.

        Raises:
            StorageError: the files cannot be made.
        """
        self.steps_per_epoch = steps_per_epoch
        self._next_chart_step = 0
        self._path = folder / "metrics.jsonl"
        self._lock = threading.Lock()
        self._start = time.monotonic()
        try:
            _cut_to_whole_lines(self._path)
            # Line by line: a reader, or a crash, never sees a line later than it was written.
            self._file = open_to_append(self._path)
            self._charts = _open_charts(folder)
        except OSError as error:
            raise self._storage_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self,
        kind: str,
        numbers: Mapping[str, float | None],
        *,
        epoch: int | None = None,
        step: int | None = None,
        charted: bool = True,
    ) -> None:
        """Write one line; after `close` nothing more is written.

        Args:
            kind: what the line is about, for instance ``train`` or ``leak``.
            numbers: named plain numbers; tensors and arrays are refused.
            epoch: counted from 0.
            step: within the epoch, from 0; None for a line about the whole epoch.
            charted: whether TensorBoard gets the numbers, too.

        Raises:
            TypeError: a value is not a plain number.
            StorageError: the line cannot be written.
        """
        for name, number in numbers.items():
            if not isinstance(number, int | float | None):
                raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
        place = self._place(kind, epoch, step)
        finite = {name: finite_or_null(number) for name, number in numbers.items()}
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(json.dumps(place | finite, allow_nan=False) + "\n")
                chart_step = self._chart_step(epoch, step)
                if charted:
                    self._chart(kind, finite, chart_step)
            except OSError as error:
                raise self._storage_error(error) from error

    def write_histogram(
        self,
        figure: str,
        edges: Sequence[float],
        counts: Mapping[str, Sequence[int]],
        *,
        epoch: int,
        step: int,
    ) -> None:
        """Write one line of kind ``histogram``, and one histogram per series for TensorBoard.

        Args:
            figure: what was counted.
            edges: rising, one more than there are bins.
            counts: series -> a count per bin.
            epoch: counted from 0.
            step: within the epoch, from 0.

        Raises:
            ValueError: a series has another number of counts than there are bins.
            StorageError: the line cannot be written.
        """
        for name, series in counts.items():
            if len(series) != len(edges) - 1:
                raise ValueError(f"{name}: expected {len(edges) - 1} counts, got {len(series)}")
        line = self._place("histogram", epoch, step) | {"figure": figure}
        line |= {"edges": list(edges), "counts": {n: list(series) for n, series in counts.items()}}
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
                for name, series in counts.items():
                    tag, at = f"{figure}/{name}", self._chart_step(epoch, step)
                    self._chart_histogram(tag, edges, series, at)
            except OSError as error:
                raise self._storage_error(error) from error

    def state_dict(self) -> dict[str, Any]:
        """Return how far the file has come.

        Raises:
            StorageError: something cannot be written.
        """
        with self._lock:
            try:
                self._file.flush()
                written = self._path.stat().st_size
            except OSError as error:
                raise self._storage_error(error) from error
            seconds = time.monotonic() - self._start
            return {"bytes": written, "seconds": seconds, "chart_step": self._next_chart_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop the lines and charts after ``state_dict``, and go on from there.

        Raises:
            StorageError: the files cannot be changed.
        """
        with self._lock:
            try:
                self._charts.close()
                self._file.close()
                _cut_to_whole_lines(self._path, state["bytes"])
                self._file = open_to_append(self._path)
                self._charts = _open_charts(self._path.parent, purge_step=state["chart_step"])
            except OSError as error:
                raise self._storage_error(error) from error
            self._start = time.monotonic() - state["seconds"]
            self._next_chart_step = state["chart_step"]

    def close(self) -> None:
        """Write out what is pending; closing twice does nothing more.

        Raises:
            StorageError: something cannot be written.
        """
        with self._lock:
            if self._file.closed:
                return
            try:
                try:
                    self._charts.close()
                finally:
                    self._file.close()
            except OSError as error:
                raise self._storage_error(error) from error

    def _place(self, kind: str, epoch: int | None, step: int | None) -> dict[str, Any]:
        time_s = round(time.monotonic() - self._start, 6)
        return {"time_s": time_s, "kind": kind, "epoch": epoch, "step": step}

    def _chart(self, kind: str, numbers: Mapping[str, float | None], chart_step: int) -> None:
        # One event per line: an event per number takes several times as much of a core.
        found = {f"{kind}/{name}": number for name, number in numbers.items() if number is not None}
        if found:
            self._charts.file_writer.add_summary(_charted(found), chart_step)

    def _chart_histogram(
        self, tag: str, edges: Sequence[float], counts: Sequence[int], chart_step: int
    ) -> None:
        centres = [(low + high) / 2 for low, high in pairwise(edges)]
        self._charts.add_histogram_raw(
            tag,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(n * x for n, x in zip(counts, centres, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(counts, centres, strict=True)),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=chart_step,
        )

    def _chart_step(self, epoch: int | None, step: int | None) -> int:
        if epoch is None:
            return step or 0
        within = self.steps_per_epoch - 1 if step is None else step
        chart_step = epoch * self.steps_per_epoch + within
        self._next_chart_step = max(self._next_chart_step, chart_step + 1)
        return chart_step

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path}: cannot be written: {error.strerror}")


class TrainingProgress:
    """Shows how far training is: a bar on a terminal, a log line now and then elsewhere."""

    def __init__(
        self,
        party: str,
        total_steps: int,
        *,
        console: Console | None = None,
        log_every_s: float = 10.0,
    ) -> None:
        """Prepare the display; it starts with the ``with`` block.

        Args:
            party: name before the bar.
            total_steps: steps of the whole run.
            console: where to show it; the standard error stream by default.
            log_every_s: least seconds between two log lines where there is no terminal.
        """
        self.steps_done = 0
        self._steps_before = 0
        self._total_steps = total_steps
        self._console = console or printing_console(stderr=True)
        self._log_every_s = log_every_s
        self._logged = time.monotonic()
        self._end: float | None = None
        self._first_step: float | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            _BarColumn(self._console),
            _FiguresColumn(self._console),
            console=self._console,
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(party, total=total_steps, numbers=())

    def __enter__(self) -> Self:
        self._logged = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = time.monotonic()
        self._bar.stop()
        if not self._console.is_terminal:
            self._log("")

    @property
    def steps_per_s(self) -> float:
        """Steps per second after the first one, to now or to the end of the ``with`` block.

        The first step is left out: it waits for the peer to get ready.
        """
        steps = self.steps_done - self._steps_before
        if self._first_step is None or steps < 2:
            return 0.0
        end = time.monotonic() if self._end is None else self._end
        return (steps - 1) / max(end - self._first_step, 1e-9)

    def go_on_at(self, steps: int) -> None:
        """Start again at a step; the speed is that from here."""
        self.steps_done = self._steps_before = steps
        self._first_step = None
        if self._console.is_terminal:
            self._bar.update(self._task, completed=steps)

    def advance(self, steps: int = 1, /, **numbers: float | None) -> None:
        """Count finished steps and show numbers such as ``loss``; None is not shown.

        A narrow terminal has no room for all numbers: the last ones are left out first.
        """
        self.steps_done += steps
        now = time.monotonic()
        if self._first_step is None:
            self._first_step = now
        if self._console.is_terminal:
            self._bar.update(self._task, advance=steps, numbers=_each_in_words(numbers))
        elif now - self._logged >= self._log_every_s:
            self._logged = now
            self._log(", ".join(_each_in_words(numbers)))

    def _log(self, numbers: str) -> None:
        _logger.info(
            "step %d/%d, %.1f steps/s%s",
            self.steps_done,
            self._total_steps,
            self.steps_per_s,
            f", {numbers}" if numbers else "",
        )


class _BarColumn(ProgressColumn):
    """The bar: it takes what the figures leave, and they leave it its least width."""

    def __init__(self, console: Console) -> None:
        self._console = console
        super().__init__()

    def render(self, task: Task) -> ProgressBar:
        figures = _figures_that_fit(task, self._console.width)
        left = self._console.width - len(task.description) - len(figures) - 2
        width = max(_LEAST_BAR, min(_LONGEST_BAR, left))
        return ProgressBar(task.total, task.completed, width, pulse=not task.started)


class _FiguresColumn(ProgressColumn):
    """As many figures as the line has room for, the most important ones first."""

    def __init__(self, console: Console) -> None:
        self._console = console
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(_figures_that_fit(task, self._console.width), no_wrap=True)


def _figures_that_fit(task: Task, width: int) -> str:
    room = width - len(task.description) - _LEAST_BAR - 2  # a space on either side of the bar
    shown = f"{task.completed:.0f}/{task.total:.0f}"
    for figure in _figures(task):
        if len(shown) + len(", ") + len(figure) > room:
            break
        shown += f", {figure}"
    return shown


def _figures(task: Task) -> list[str]:
    """Return what may stand behind the count of steps; what comes last is left out first."""
    numbers: list[str] = [*task.fields["numbers"]]
    speed = task.finished_speed or task.speed
    return [
        f"{TimeRemainingColumn().render(task).plain} left",
        *numbers[:1],
        *([] if speed is None else [f"{speed:.1f} steps/s"]),
        *numbers[1:],
    ]


class _StderrHandler(logging.Handler):
    """Writes to whatever the standard error stream is now: a progress bar puts itself there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except UNPRINTED:
            return  # nobody reads it, and a run goes on without
        except Exception:
            self.handleError(record)


class _VisibleFormatter(logging.Formatter):
    """Keeps what a file or the peer chose from steering the terminal or passing for log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return visible_lines(super().formatException(ei))


def configure_logging(party: str, verbosity: int = 0) -> None:
    """Log short lines with the party's name to the standard error stream.

    Args:
        party: for instance ``active``.
        verbosity: below 0 warnings only, 0 the course of the run, above 0 everything.
    """
    handler = _StderrHandler()
    form = f"%(asctime)s {party.replace('%', '%%')} %(levelname)s %(message)s"
    handler.setFormatter(_VisibleFormatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    threading.excepthook = partial(_on_failed_thread, threading.excepthook)
    level = logging.INFO if verbosity == 0 else logging.DEBUG if verbosity > 0 else logging.WARNING
    for package in _OWN_PACKAGES:
        logging.getLogger(package).setLevel(level)


def _on_failed_thread(
    otherwise: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Say nothing of a full disk in TensorBoard's thread: whoever writes next is told of it."""
    is_charting = type(failed.thread).__module__.startswith("tensorboard.")
    if not (is_charting and isinstance(failed.exc_value, OSError)):
        otherwise(failed)


def leak_table(
    leak: Mapping[str, Mapping[str, Mapping[str, float]]], title: str = "Leak AUC"
) -> Table:
    """Return the table of a leak summary: one row per layer and attack.

    Args:
        leak: layer -> attack -> ``q95``, ``mean``, ``last_epoch``, ``random_q95``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("layer")
    table.add_column("attack")
    columns = ("q95", "mean", "last_epoch", "random_q95")
    for heading in ("95 % of batches", "mean", "last epoch", "random scores"):
        table.add_column(heading, justify="right")
    for layer, attacks in leak.items():
        for attack, values in attacks.items():
            table.add_row(
                cell(layer), cell(attack), *(f"{values[column]:.3f}" for column in columns)
            )
    return table


def class_table(leak: Mapping[str, Mapping[str, Mapping[str, Any]]], title: str) -> Table:
    """Return the table of which classes attacks tell apart best: one row per layer and attack.

    Args:
        leak: layer -> attack -> ``worst_pair``, ``worst_pair_auc``, ``worst_pair_random``,
            ``classes``, ``random``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "attack", "pair told apart best", "class told best from the rest"):
        table.add_column(heading)
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            first, second = found["worst_pair"]
            pair = f"{first} and {second}: {found['worst_pair_auc']:.3f}"
            measured = {name: auc for name, auc in found["classes"].items() if not math.isnan(auc)}
            worst = max(measured, key=lambda name: measured[name], default="-")
            one = f"{worst}: {measured.get(worst, math.nan):.3f}"
            table.add_row(
                cell(layer),
                cell(attack),
                cell(f"{pair} ({found['worst_pair_random']:.3f})"),
                cell(f"{one} ({found['random'].get(worst, math.nan):.3f})"),
            )
    return table


def ledger_table(ledger: Mapping[str, float | None], title: str = "Leak ledger") -> Table:
    """Return the table of a ledger: what all answers together may have told of one example.

    Args:
        ledger: ``sum_kl_max``, ``estimate_q95``, ``guarantee_mean`` and so on, ``epsilon``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("over all answers")
    for heading in ("largest", "95 % of examples", "mean"):
        table.add_column(heading, justify="right")
    for name, meaning, written in (
        ("sum_kl", "sum_kl", at_most),
        ("estimate", "leak AUC, estimated", _in_short),
        ("guarantee", "leak AUC, guaranteed", auc_at_most),
    ):
        numbers = (ledger[f"{name}_{part}"] for part in ("max", "q95", "mean"))
        table.add_row(meaning, *("inf" if n is None else written(n) for n in numbers))
    epsilon = ledger.get("epsilon")
    if epsilon is not None:
        table.add_row("epsilon", at_most(epsilon))
    return table


def run_level_table(
    leak: Mapping[str, Mapping[str, Mapping[str, float]]], title: str = "Leak AUC of the whole run"
) -> Table:
    """Return the table of what attacks gathered over a run.

    Args:
        leak: layer -> attack -> ``auc``, ``low``, ``high``, ``examples``.
        title: stands above it.
    """
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "attack"):
        table.add_column(heading)
    for heading in ("leak AUC", "95 % interval", "examples"):
        table.add_column(heading, justify="right")
    for layer, attacks in leak.items():
        for attack, found in attacks.items():
            interval = f"{found['low']:.3f} .. {found['high']:.3f}"
            auc, examples = f"{found['auc']:.3f}", f"{found['examples']:,}"
            table.add_row(cell(layer), cell(attack), auc, interval, examples)
    return table


def print_summary(
    party: str, summary: Mapping[str, Any], *, console: Console | None = None
) -> None:
    """Print a run's summary to the standard output stream: its numbers, then its leak table.

    Args:
        party: stands above the table.
        summary: as in ``summary.json``; ``leak`` and ``ledger`` may be absent.
        console: prints elsewhere.
    """
    console = console or printing_console()
    table = Table(title=f"{party}: summary", title_justify="left", show_header=False)
    for name, value in summary.items():
        if name not in _TABLES_OF_THEIR_OWN:
            table.add_row(cell(_label(name)), cell(in_words(value)))
    console.print(table)
    if summary.get("ledger"):
        console.print(ledger_table(summary["ledger"], f"{party}: leak ledger"))
    pair = ", worst pair of classes" if summary.get("leak_classes") else ""
    if summary.get("leak"):
        console.print(leak_table(summary["leak"], f"{party}: leak AUC{pair}"))
    if summary.get("leak_classes"):
        title = f"{party}: leak AUC class by class, mean over batches (random scores)"
        console.print(class_table(summary["leak_classes"], title))
    if summary.get("leak_run_level"):
        title = f"{party}: leak AUC of the whole run{pair}"
        console.print(run_level_table(summary["leak_run_level"], title))


def _cut_to_whole_lines(path: Path, most_bytes: int | None = None) -> None:
    """Cut a file off behind the last line that ends within its first bytes.

    Half a line is what a crash or a full disk leaves; the next line would be written behind it.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size if most_bytes is None else min(most_bytes, size)
        while end > 0:
            begin = max(end - _SOUGHT_BYTES, 0)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(end)


def _open_charts(folder: Path, purge_step: int | None = None) -> Any:
    # Importing it takes seconds, which no other command should pay.
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    charts = SummaryWriter(str(folder), flush_secs=1, purge_step=purge_step)
    for path in folder.glob("events.out.tfevents.*"):
        path.chmod(OWNER_ONLY)  # the library knows no mode
    return charts


def _charted(numbers: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # noqa: PLC0415

    return Summary(value=[Summary.Value(tag=n, simple_value=x) for n, x in numbers.items()])


def _each_in_words(numbers: Mapping[str, float | None]) -> list[str]:
    shown = {name: number for name, number in numbers.items() if number is not None}
    return [f"{_label(name)} {_in_short(n)}" for name, n in shown.items()]


def in_words(value: object) -> str:
    """Write a value of a summary as people do: four digits, and none of Python's own notation."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return _in_short(value)
        case Mapping():
            return ", ".join(_parts_in_words(value)) or "none"
        case list() | tuple():
            return ", ".join(map(in_words, value)) or "none"
        case _:
            return str(value)


def _parts_in_words(values: Mapping[str, object]) -> Iterator[str]:
    """Yield what a mapping holds, its name first; what is not set is left out."""
    if isinstance(values.get("name"), str):
        yield str(values["name"])
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _parts_in_words(value)
        elif value is not None and (name != "name" or not isinstance(value, str)):
            yield f"{_label(name)} {in_words(value)}"


def _label(name: str) -> str:
    """Return the name of a figure without its underscores: ``test AUC``, ``steps/s``."""
    words = ["AUC" if word == "auc" else word for word in name.split("_")]
    return " ".join(words).replace(" per s", "/s")


def _in_short(value: float) -> str:
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
