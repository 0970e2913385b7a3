"""Predicts many ids: questions in flight, retries where a passive party was away, parts.

Finished predictions are stored in parts, so that an interrupted command goes on where it stopped:

    predictions.parquet.parts/00000000.splitveil-part  the rows asked for first, and so on

A part begins with the SHA-256 of its plan, its place and its rows: one that is damaged, or of
another prediction, is computed again. Files with this ending, and no others, are deleted once the
output is written. Predictions are about labels: the files are readable by their owner only.
"""

import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.active_party.predict.predictor import Asked, Predictions, Predictor, asking_order
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind
from splitveil.common.errors import DataError, PeerUnreachable, StorageError
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.record.table_output import refusing_to_write, replacing, writer_of
from splitveil.common.run.contract import Contract
from splitveil.common.wire.connection import Retrying
from splitveil.common.wire.inference_codec import portions
from splitveil.common.wire.limits import ID_BYTES

logger = logging.getLogger(__name__)

PART_ROWS = 2**17  # rows of a part: the most that an interrupted command computes again

_ENDING = ".splitveil-part"


class PredictionPlan(NamedTuple):
    """The source of predictions. Parts of another plan are not continued."""

    model: str
    source: str  # where the rows come from
    labels: LabelKind = CLASS_LABELS

    def schema(self, ids: pa.Schema) -> pa.Schema:
        columns = [pa.field(name, pa.float32()) for name in self.labels.columns]
        kinds = {"canonical_id": pa.string(), "found": pa.bool_()}
        canonical, found = (pa.field(name, kind, nullable=False) for name, kind in kinds.items())
        return pa.schema([*ids, canonical, *columns, found])


class Parts:
    def __init__(
        self,
        output: Path,
        plan: PredictionPlan,
        ids: Sequence[str],
        written: pa.Table | None = None,
    ) -> None:
        """Read the parts of an interrupted command, or begin without any; ids are canonical."""
        self.folder = output.with_name(f"{output.name}.parts")
        self.ids = ids
        self._written = written or pa.table({"id": pa.array(ids, pa.string())})
        self._output = output
        self._schema = plan.schema(self._written.schema)
        digest = hashlib.sha256(repr(plan).encode())
        for start in range(0, len(ids), PART_ROWS):
            digest.update("\0".join(["", *ids[start : start + PART_ROWS]]).encode())
        self._plan_digest = digest.digest()
        self._order = asking_order(ids)
        num_values = len(self._schema) - self._written.num_columns - 2
        of_row = [("values", "<f4", (num_values,)), ("found", "?")]
        self._rows = np.zeros(len(ids), np.dtype(of_row))
        with refusing_to_write(self.folder):
            self.folder.mkdir(0o700, exist_ok=True)
            if self.folder.is_symlink() or not all(map(_is_ours, self.folder.iterdir())):
                raise StorageError(
                    f"{self.folder}: expected a folder with only parts of predictions: move it "
                    f"away, or give --output another name"
                )
            starts = range(0, len(ids), PART_ROWS)
            parts = [slice(start, min(start + PART_ROWS, len(ids))) for start in starts]
            self.missing = [part for part in parts if not self._restored(part)]

    def ids_of(self, part: slice) -> list[str]:
        return [self.ids[row] for row in self._order[part]]

    def write(
        self, part: slice, probabilities: NDArray[np.float32], found: NDArray[np.bool_]
    ) -> None:
        """Write a part. Shapes: ``probabilities`` (rows,) or (rows, classes), ``found`` (rows,)."""
        rows = np.empty(len(found), self._rows.dtype)
        rows["values"] = probabilities[:, None] if probabilities.ndim == 1 else probabilities
        rows["found"] = found
        data = rows.tobytes()
        write_bytes_atomically(self._path(part), self._digest(part, data) + data)
        self._rows[self._order[part]] = rows

    def num_found(self) -> int:
        """Return the number of rows with a prediction; every part has to be finished."""
        return int(np.count_nonzero(self._rows["found"]))

    def join(self) -> None:
        """Write the output, and delete the parts; every part has to be finished."""
        with replacing(self._output) as file, writer_of(self._output, file, self._schema) as writer:
            for start in range(0, len(self.ids), PART_ROWS):
                writer.write_table(self._table(slice(start, start + PART_ROWS)))
        with refusing_to_write(self.folder):
            for path in filter(_is_ours, self.folder.iterdir()):
                path.unlink()
            self.folder.rmdir()

    def _table(self, lines: slice) -> pa.Table:
        rows = self._rows[lines]
        arrays = [column[lines] for column in self._written.columns]
        arrays += [pa.array(self.ids[lines], pa.string())]
        arrays += [pa.array(c, pa.float32(), mask=~rows["found"]) for c in rows["values"].T]
        return pa.table([*arrays, pa.array(rows["found"])], schema=self._schema)

    def _restored(self, part: slice) -> bool:
        path = self._path(part)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return False
        digest, data = stored[:32], stored[32:]
        if digest != self._digest(part, data):
            logger.warning("%s: damaged, or of another prediction: computed again", path)
            return False
        self._rows[self._order[part]] = np.frombuffer(data, self._rows.dtype)
        return True

    def _digest(self, part: slice, data: bytes) -> bytes:
        place = f"{part.start} {part.stop} ".encode()
        return hashlib.sha256(self._plan_digest + place + data).digest()

    def _path(self, part: slice) -> Path:
        return self.folder / f"{part.start // PART_ROWS:08d}{_ENDING}"


def _is_ours(path: Path) -> bool:
    return _ENDING in path.name  # also a temporary file that a killed process has left


IN_FLIGHT = 4  # questions: a passive party computes while an answer travels

_LOOK_EVERY_S = 0.2

Advance = Callable[[int], None]  # called with the number of rows newly finished


class BatchResult(NamedTuple):
    rows: int
    found: int
    missing_at: dict[str, int]  # party -> rows asked for now that it lacks
    asked_rows: int  # rows that were asked for now, and not by an earlier command
    seconds: float


class BatchPrediction:
    def __init__(
        self,
        predictor: Predictor,
        contract: Contract,
        reconnect: ReconnectSettings,
        interruption: Interruption,
    ) -> None:
        self._predictor = predictor
        self._contract = contract
        self._interruption = interruption
        where = ", ".join(client.connection.where for client in predictor.clients)
        self._retrying = Retrying(reconnect, interruption, where, self._renew)

    def run(self, parts: Parts, advance: Advance) -> BatchResult:
        began = time.monotonic()
        num_ids = len(parts.ids)
        asked_rows = sum(part.stop - part.start for part in parts.missing)
        advance(num_ids - asked_rows)
        missing_at: Counter[str] = Counter()
        if parts.missing:
            self._retrying.until_answered(self._predictor.check_models)
            self._retrying.until_answered(
                partial(self._predictor.take_tables, parts.ids, self._interruption)
            )
        for part in parts.missing:
            finished = list(self._predicted(parts.ids_of(part), advance))
            for predictions in finished:
                missing_at.update(predictions.missing_at)
            parts.write(
                part,
                np.concatenate([predictions.probabilities for predictions in finished]),
                np.concatenate([predictions.found for predictions in finished]),
            )
        found = parts.num_found()
        parts.join()
        seconds = time.monotonic() - began
        return BatchResult(num_ids, found, dict(missing_at), asked_rows, seconds)

    def _predicted(self, ids: Sequence[str], advance: Advance) -> Iterator[Predictions]:
        waiting: deque[Asked] = deque()
        for portion in portions(ids, self._predictor.max_ids, self._contract):
            waiting.append(self._predictor.ask(ids[portion]))
            if len(waiting) >= IN_FLIGHT:
                yield self._finished(waiting.popleft(), advance)
        while waiting:
            yield self._finished(waiting.popleft(), advance)

    def _finished(self, asked: Asked, advance: Advance) -> Predictions:
        try:
            while wait(asked.answers, timeout=_LOOK_EVERY_S).not_done:
                self._interruption.check()
            self._interruption.check()
            predictions = self._predictor.finish(asked)
        except PeerUnreachable:
            predictions = self._retrying.until_answered(partial(self._again, asked.ids))
        advance(len(asked.ids))
        return predictions

    def _again(self, ids: Sequence[str]) -> Predictions:
        self._predictor.check_models()  # a party that was restarted may serve another model
        return self._predictor.predict(ids)

    def _renew(self) -> bool:
        changed = [client.connection.renew() for client in self._predictor.clients]
        return any(changed)


def check_lengths(ids: Sequence[str], where: str) -> None:
    """Refuse ids that do not fit into a message; the error has their number, and never an id."""
    long = [1 for text in ids if 4 * len(text) > ID_BYTES and len(text.encode()) > ID_BYTES]
    if long:
        raise DataError(f"{where}: {len(long)} ids have more than {ID_BYTES:,} bytes")
