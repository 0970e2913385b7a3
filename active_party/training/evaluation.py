"""Evaluates held-out splits after each epoch, decides on early stopping, and stores predictions.

checkpoint/test_predictions.safetensors holds, for each test row, a digest of its id, the logits and
the label, and a digest of the ids of the training rows, so that two runs can be compared row by
row. It is as private as the labels are.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind
from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.data.stored_ids import ids_at
from splitveil.common.errors import SettingsError
from splitveil.common.party.drift import reference_bins
from splitveil.common.privacy.adjusted_auc import placements
from splitveil.common.privacy.figures import Estimate, GroupFigures, Groups, PredictionFigures
from splitveil.common.record.model_files import save_tensors
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions, SplitName

_FILE = "test_predictions.safetensors"

_DIGEST_BYTES = 16

_LEAST_ROWS = 50  # of a group by itself
_MOST_GROUPS = 50
_LEAST_OF_CLASS = 30  # of both, for an AUC
_OTHERS = f"other: of fewer than {_LEAST_ROWS} rows, or beyond {_MOST_GROUPS} groups"
_NORMAL_975 = 1.959963984540054


class Evaluation(NamedTuple):
    """Figures about one split after one epoch. They stay with the active party."""

    epoch: int
    split: SplitName
    figures: PredictionFigures


class HeldOutPredictions(NamedTuple):
    """The model on the test rows, in the order of their positions."""

    logits: Tensor  # (test rows,) or (test rows, classes)
    labels: Tensor  # (test rows,), float: 0 or 1, class indices, or shares of the range


def score_bins(kind: LabelKind, test: HeldOutPredictions | None) -> dict[str, str]:
    """Return a model's metadata with the bins of its scores of the test rows, if there are some."""
    if test is None:
        return {}
    return reference_bins(by_score(kind.in_units(kind.predicted(test.logits).numpy())))


def by_score(predictions: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Return each class's probabilities by its number, or the only prediction; not by its name."""
    scores = predictions.reshape(len(predictions), -1).T
    return {str(number): score for number, score in enumerate(scores)}


class EarlyStop:
    """Watches a score of the validation rows, epoch by epoch.

    It is an AUC, or for labels that are numbers an error with a minus sign.
    """

    def __init__(self, patience_epochs: int) -> None:
        self._patience_epochs = patience_epochs
        self._best = -math.inf
        self._epochs_without_gain = 0

    def state_dict(self) -> State:
        return {"best": self._best, "epochs_without_gain": self._epochs_without_gain}

    def load_state_dict(self, state: State) -> None:
        self._best = state["best"]
        self._epochs_without_gain = state["epochs_without_gain"]

    def should_stop(self, reached: float) -> bool:
        """Take in one epoch's score and return whether the patience is used up."""
        if reached > self._best:
            self._best = reached
            self._epochs_without_gain = 0
        else:
            self._epochs_without_gain += 1
        return self._epochs_without_gain >= self._patience_epochs


class Evaluator:
    """Collects the predictions for held-out rows, batch by batch, and measures whole splits."""

    def __init__(self, early_stop: EarlyStop | None = None, kind: LabelKind = CLASS_LABELS) -> None:
        self._early_stop = early_stop
        self._kind = kind
        self._scores: list[tuple[Tensor, Tensor]] = []
        self._validation_score: float | None = None
        self.test_predictions: HeldOutPredictions | None = None
        """Of the last epoch whose test rows this process has evaluated; not in checkpoints."""

    def add(self, batch: Batch, logits: Tensor, labels: Tensor) -> Evaluation | None:
        """Take in the predictions for one batch; return the split's figures if it is the last."""
        if batch.split not in ("validation", "test"):
            raise ValueError(f"{batch.split} rows are not evaluated")
        self._scores.append((logits, labels))
        if not batch.closes_split:
            return None
        every_logit = torch.cat([logits for logits, _ in self._scores])
        every_label = torch.cat([labels for _, labels in self._scores])
        self._scores.clear()
        return self.measure(batch.split, batch.epoch, every_logit, every_label)

    def measure(self, split: SplitName, epoch: int, logits: Tensor, labels: Tensor) -> Evaluation:
        """Measure the predictions of a whole split."""
        if split == "test":
            self.test_predictions = HeldOutPredictions(logits, labels)
        figures = self._kind.measure(logits, labels)
        if split == "validation":
            self._validation_score = figures.score
        return Evaluation(epoch, split, figures)

    def ends_training(self, batch: Batch) -> bool:
        """Return whether training is over after held-out rows; call it once, after `add`."""
        if not batch.closes_epoch or self._early_stop is None:
            return False
        reached = self._validation_score
        if reached is None or math.isnan(reached):  # of validation rows of one class
            return False
        return self._early_stop.should_stop(reached)

    def state_dict(self) -> State:
        return {
            "early_stop": None if self._early_stop is None else self._early_stop.state_dict(),
            "validation_score": self._validation_score,
            "scores": self._scores,
        }

    def load_state_dict(self, state: State) -> None:
        if self._early_stop is not None:
            self._early_stop.load_state_dict(state["early_stop"])
        self._validation_score = state["validation_score"]
        self._scores = [(logits, labels) for logits, labels in state["scores"]]


def measure_groups(
    groups: CategoricalColumn | None, file_rows: Positions, test: HeldOutPredictions | None
) -> Groups:
    """Measure predictions of two classes by group, all rows first; small groups are joined.

    Selected are the rows whose scores are highest: as many as there are rows with label 1, and
    those with the same score as the last of them. Intervals of shares are Wilson's (JASA 22, 1927),
    those of AUCs are of DeLong et al. (Biometrics 44, 1988) on the logit scale. They take rows for
    independent, and the threshold for fixed.
    """
    if groups is None or test is None:
        return None
    scores, positive = test.logits.double().numpy(), test.labels.numpy() == 1
    probabilities = test.logits.double().sigmoid().numpy()
    threshold = np.sort(scores)[-positive.sum()] if positive.any() else math.inf

    def share_of(chosen: npt.NDArray[np.bool_]) -> Estimate:
        share, squared = float(chosen.mean()), _NORMAL_975**2 / len(chosen)
        half = math.sqrt(squared * (share * (1 - share) + squared / 4))
        low, high = ((share + squared / 2 + one) / (1 + squared) for one in (-half, half))
        return Estimate(share, low, high)

    def measured(name: str, rows: npt.NDArray[np.bool_]) -> GroupFigures:
        labels, auc = positive[rows], None
        if len(labels) < _LEAST_ROWS:
            return GroupFigures(name, len(labels))
        if min(labels.sum(), (~labels).sum()) >= _LEAST_OF_CLASS:
            placed, least = placements(scores[rows], labels), min(labels.sum(), (~labels).sum())
            # Half a pair in the wrong order: at an area of 1 the variance found is 0.
            inside = min(max(placed.auc, 0.25 / least), 1 - 0.25 / least)
            deviation = math.sqrt(max(placed.variance, inside * (1 - inside) / (3 * least)))
            reach = _NORMAL_975 * deviation / (inside * (1 - inside))
            odds = [inside / (1 - inside) * math.exp(one) for one in (-reach, reach)]
            auc = Estimate(placed.auc, *(one / (1 + one) for one in odds))
        mean, selected = float(probabilities[rows].mean()), share_of(scores[rows] >= threshold)
        return GroupFigures(name, len(labels), mean, share_of(labels), selected, auc)

    names = [*groups.categories.to_pylist(), "no entry"]
    codes = groups.codes[file_rows] % len(names)  # -1 is the last
    counts = np.bincount(codes, minlength=len(names))
    largest = np.argsort(-counts, kind="stable")[:_MOST_GROUPS]
    own = largest[counts[largest] >= _LEAST_ROWS]
    found = [measured("all rows", np.ones(len(codes), np.bool_))]
    found += [measured(names[at], codes == at) for at in own]
    if (others := ~np.isin(codes, own)).any():
        found.append(measured(_OTHERS, others))
    return tuple(found)


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
    digests = _digests(ids_at(ids, rows.file_rows[rows.splits["test"]]))
    tensors = {
        "ids": torch.from_numpy(digests.view(np.uint8).reshape(-1, _DIGEST_BYTES).copy()),
        "logits": predictions.logits,
        "labels": predictions.labels,
        "training_rows": torch.frombuffer(
            bytearray(_digest_of(ids, rows, rows.splits["train"])), dtype=torch.uint8
        ),
    }
    save_tensors(folder, _FILE, tensors)


def read_predictions(folder: Path) -> StoredPredictions | None:
    path = folder / "checkpoint" / _FILE
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
    digests = _digests(ids_at(ids, rows.file_rows[positions]))
    # Adding up modulo 2^64, lane by lane, needs no sorting; the sum of random words is a digest
    # against mix-ups, not against somebody who chooses ids.
    lanes = np.frombuffer(digests.tobytes(), dtype="<u8").reshape(-1, _DIGEST_BYTES // 8)
    return bytes(lanes.sum(axis=0, dtype=np.uint64).tobytes())
