"""A run's figures on disk: ``metrics.jsonl`` and TensorBoard events.

Numbers here are about batches, epochs and runs, never about one example.
"""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from splitveil.common.errors import StorageError
from splitveil.common.storage.run_folder import OWNER_ONLY, finite_or_null, open_to_append

_SOUGHT_BYTES = 2**16
"""How much of the end of a metrics file is searched for the end of a line at a time."""


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
