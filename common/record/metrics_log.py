"""Writes a run's figures to disk: ``metrics.jsonl`` and TensorBoard events.

Numbers here are about batches, epochs and runs, never about one example.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_folder import open_to_append, storage_errors
from splitveil.common.record.run_record import METRICS, AlignmentLine, Line, parts_of
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows
from splitveil.common.text.files import OWNER_ONLY, Closing
from splitveil.common.text.log_lines import log_fields
from splitveil.common.text.wording import seconds_in_words

_logger = logging.getLogger(__name__)

_SOUGHT_BYTES = 2**16  # at the end of a file, searched for a line's end at a time


CHARTED_EVERY_S = (
    0.5  # least time between charted batches: a point costs as much CPU as some attacks
)


_EVENTS = "events.out.tfevents.*"
_GROUPS = {"epoch_leak": "leak/epoch", "epoch_leak_of_numbers": "leak/epoch"}
_GROUPS |= {"leak_alarm": "leak/alarm"}
"""Kind of line -> what its tags begin with, if that is not the kind: TensorBoard shows the tags up
to the first slash in one section."""


OF_MONITOR = ("leak", "epoch_leak", "leak_alarm")  # kinds of a leak monitor's lines


class ChartClock:
    """Says which lines about single batches TensorBoard gets: it shows no more than a thousand."""

    def __init__(self) -> None:
        self._last_s = -CHARTED_EVERY_S

    def is_due(self) -> bool:
        """Return whether the next line is to be charted, which then counts as charted."""
        now_s = time.monotonic()
        is_due = now_s - self._last_s >= CHARTED_EVERY_S
        if is_due:
            self._last_s = now_s
        return is_due


class MetricsLog(Closing):
    """Writes ``metrics.jsonl`` and the same numbers for TensorBoard; any thread may write."""

    def __init__(
        self, folder: Path, steps_per_epoch: int = 1, on_line: Callable[[Line], None] | None = None
    ) -> None:
        """Open both files; ``steps_per_epoch`` puts the epochs on TensorBoard's single axis."""
        self.steps_per_epoch = steps_per_epoch
        self._on_line = on_line
        self._next_chart_step = 0
        self._path = folder / METRICS
        self._lock = threading.Lock()
        self._start = time.monotonic()
        with self._storage_errors():
            _cut_to_whole_lines(self._path)
            # Line by line, so that a reader sees each line at once and a crash does not lose it.
            self._file = open_to_append(self._path)
            self._charts = _open_charts(folder)

    def write(self, line: Line, *, charted: bool = True) -> None:
        """Write one line of plain numbers, to TensorBoard too if charted. Raises TypeError."""
        head, numbers = parts_of(line, time.monotonic() - self._start)
        for name, number in numbers.items():
            if not isinstance(number, int | float | None):
                raise TypeError(f"{name}: expected a number, got {type(number).__name__}")
        with self._lock:
            if self._file.closed:
                return
            with self._storage_errors():
                self._file.write(_encoded(head | numbers) + "\n")
                chart_step = self._chart_step(head["epoch"], head["step"])
                if self._charts is not None and charted:
                    # One event per line: an event per number takes several times as much of a core.
                    section = _GROUPS.get(head["kind"], head["kind"])
                    found = {f"{section}/{n}": x for n, x in numbers.items() if x is not None}
                    # Also if there is none: how many figures can be measured depends on labels.
                    self._charts.file_writer.add_summary(_charted(found), chart_step)
        if self._on_line is not None:
            self._on_line(line)

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file, the time and the step that it has reached."""
        with self._lock:
            with self._storage_errors():
                self._file.flush()
                written = self._path.stat().st_size
            seconds = time.monotonic() - self._start
            return {"bytes": written, "seconds": seconds, "chart_step": self._next_chart_step}

    def load_state_dict(self, state: Mapping[str, Any], kept: Collection[str] = ()) -> None:
        """Drop the lines and charts written after ``state_dict``, and resume from there.

        Lines of the kinds ``kept`` stay, but not their charts.
        """
        with self._lock:
            with self._storage_errors():
                self._close_charts()
                self._file.close()
                with self._path.open("rb") as file:
                    file.seek(state["bytes"])
                    later = [one for one in file if json.loads(one)["kind"] in kept]
                _cut_to_whole_lines(self._path, state["bytes"])
                self._file = open_to_append(self._path)
                self._file.writelines(one.decode() for one in later)
                self._charts = _open_charts(self._path.parent, purge_step=state["chart_step"])
            self._start = time.monotonic() - state["seconds"]
            self._next_chart_step = state["chart_step"]

    def close(self) -> None:
        with self._lock:
            if self._file.closed:
                return
            with self._storage_errors():
                try:
                    self._close_charts()
                finally:
                    self._file.close()

    def _close_charts(self) -> None:
        if self._charts is not None:
            self._charts.close()

    def _chart_step(self, epoch: int | None, step: int | None) -> int:
        if epoch is None:
            return step or 0
        within = self.steps_per_epoch - 1 if step is None else step
        chart_step = epoch * self.steps_per_epoch + within
        self._next_chart_step = max(self._next_chart_step, chart_step + 1)
        return chart_step

    def _storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(self._path, "cannot be written")


_encoded = json.JSONEncoder(allow_nan=False).encode  # json.dumps would make one for every line


def _cut_to_whole_lines(path: Path, most_bytes: int | None = None) -> None:
    """Truncate a file after the last whole line within its first bytes: a crash may cut a line."""
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
    if "torch" not in sys.modules:  # a party without a network draws no curve
        return None
    try:
        # Importing it takes seconds, which other commands should not pay.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:
        return None

    charts = SummaryWriter(str(folder), flush_secs=1, purge_step=purge_step)
    for path in folder.glob(_EVENTS):
        path.chmod(OWNER_ONLY)  # the library cannot set a mode
    return charts


def chart_outcome(folder: Path, settings: Mapping[str, Any], figures: Mapping[str, object]) -> None:
    """Make a run a row of TensorBoard's HParams tab, of all scalars of a folder of its own."""
    with storage_errors(folder, "cannot be written"):
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.glob(_EVENTS):
            path.unlink()
        if (charts := _open_charts(folder)) is None:
            return
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415

        numbers = {f"run/{name}": x for name, x in figures.items() if isinstance(x, float)}
        # No description of the experiment: its first run would fix the columns.
        _, *row = hparams(dict(_leaves(settings)), {})
        with closing(charts):
            for written in (*row, _charted(numbers)):
                charts.file_writer.add_summary(written)


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, value if isinstance(value, bool | int | float) else str(value)


def _charted(numbers: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # noqa: PLC0415

    return Summary(value=[Summary.Value(tag=n, simple_value=x) for n, x in numbers.items()])


class RunRecorder:
    """Writes metrics and shows progress; a party's recorder adds what that party observes."""

    def __init__(self, folder: Path, on_line: Callable[[Line], None] | None = None) -> None:
        self.aligned_rows = 0
        self.console: Console | None = None  # None for the standard error stream
        self._folder = folder
        self._resources = ExitStack()
        self._of_run = ExitStack()
        """Closed when the run is aligned again, and with the recorder."""
        self._metrics = self._resources.enter_context(MetricsLog(folder, on_line=on_line))
        self._progress: ProgressBar | None = None
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _begin_run(self, rows: AlignedRows) -> None:
        self._of_run.close()
        self._of_run = self._resources.enter_context(ExitStack())
        self.aligned_rows = len(rows)
        self._metrics.steps_per_epoch = rows.order.steps_per_epoch
        self._metrics.write(AlignmentLine(len(rows), rows.own_rows))
        splits = (f"{len(one):,} {split}" for split, one in rows.splits.items() if len(one))
        _logger.info("%s rows are aligned: %s", f"{len(rows):,}", ", ".join(splits))

    def _log_epoch(self, epoch: int, contract: Contract, figures: Sequence[str]) -> None:
        taken_s = 0.0 if self._progress is None else self._progress.end_epoch()
        shown = ", ".join([*figures, seconds_in_words(taken_s)])
        fields = log_fields(epoch=epoch + 1, seconds=round(taken_s, 3))
        done = (
            "all rows exchanged" if contract.is_one_shot else f"epoch {epoch + 1}/{contract.epochs}"
        )
        _logger.info("%s: %s", done, shown, extra=fields)

    def _show_progress(self, rows: AlignedRows, contract: Contract) -> None:
        steps, per_epoch = rows.total_steps(contract), rows.order.steps_per_epoch
        of_epochs = ("one pass",) if contract.is_one_shot else ("training", "steps", steps)
        bar = ProgressBar(*of_epochs, per_epoch=per_epoch, console=self.console)
        self._progress = self._of_run.enter_context(bar)
