"""Keeps a run's predictions of its test rows, from which two runs can be compared row by row.

checkpoint/test_predictions.safetensors holds, for each test row, a digest of its id, the logits and
the label, and a digest of the ids of the training rows. It is as private as the labels are.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from splitveil.active_party.training.evaluation import HeldOutPredictions
from splitveil.common.errors import SettingsError
from splitveil.common.record.model_files import save_tensors
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.sample_order import Positions

FILE = "test_predictions.safetensors"

_DIGEST_BYTES = 16


class StoredPredictions(NamedTuple):
    """The predictions of a run's test rows, sorted by the digests of their ids."""

    ids: npt.NDArray[np.void]
    """Digest of each row's id, (rows,), ascending."""
    logits: npt.NDArray[np.float64]
    """(rows,) or (rows, classes)."""
    labels: npt.NDArray[Any]
    """0 or 1, or class indices, (rows,) int64; or shares of the range, (rows,) float64."""
    training_rows: bytes


def save_predictions(
    folder: Path, ids: Sequence[str], rows: AlignedRows, predictions: HeldOutPredictions
) -> None:
    """Write the predictions of the test rows into a run's folder."""
    digests = _digests(ids[row] for row in rows.file_rows[rows.splits["test"]])
    tensors = {
        "ids": torch.from_numpy(digests.view(np.uint8).reshape(-1, _DIGEST_BYTES).copy()),
        "logits": predictions.logits,
        "labels": predictions.labels,
        "training_rows": torch.frombuffer(
            bytearray(_digest_of(ids, rows, rows.splits["train"])), dtype=torch.uint8
        ),
    }
    save_tensors(folder, FILE, tensors)


def read_predictions(folder: Path) -> StoredPredictions | None:
    path = folder / "checkpoint" / FILE
    if not path.is_file():
        return None
    try:
        found = load_file(path)
        digests = np.ascontiguousarray(found["ids"]).view(f"V{_DIGEST_BYTES}").reshape(-1)
        order = np.argsort([bytes(one) for one in digests])
        return StoredPredictions(
            digests[order],
            found["logits"].astype(np.float64)[order],
            _labels(found["labels"])[order],
            found["training_rows"].tobytes(),
        )
    except (OSError, SafetensorError, KeyError, ValueError, IndexError) as error:
        raise SettingsError(f"{path}: the predictions of the test rows cannot be read") from error


def _labels(written: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    is_whole = np.array_equal(written, np.rint(written))
    return written.astype(np.int64) if is_whole else written.astype(np.float64)


def _digests(ids: Iterable[str]) -> npt.NDArray[np.void]:
    joined = b"".join(
        hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest() for text in ids
    )
    return np.frombuffer(joined, dtype=f"V{_DIGEST_BYTES}")


def _digest_of(ids: Sequence[str], rows: AlignedRows, positions: Positions) -> bytes:
    """Return a digest of the ids of some rows that does not depend on their order."""
    digests = _digests(ids[row] for row in rows.file_rows[positions])
    # Adding up modulo 2^64, lane by lane, needs no sorting; the sum of random words is a digest
    # against mix-ups, not against somebody who chooses ids.
    lanes = np.frombuffer(digests.tobytes(), dtype="<u8").reshape(-1, _DIGEST_BYTES // 8)
    return bytes(lanes.sum(axis=0, dtype=np.uint64).tobytes())
