"""The rows of an audit, in the order they were sent: checked, and cut into batches."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.attacks import CUT
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.figures import RunFigures
from splitveil.common.privacy.observation import LabelClasses, Observation
from splitveil.common.privacy.run_level import aucs_of, run_level_leak
from splitveil.common.privacy.stored_row_attacks import Received, attack_stored_rows


class AuditedRows(NamedTuple):
    """The rows in the order they were sent."""

    gradients: Tensor
    labels: Tensor
    starts: npt.NDArray[np.int64]
    """First row of each batch, and the number of rows."""
    positions: npt.NDArray[np.int64]
    """Which example each row is about, from 0."""
    activations: Tensor | None

    @classmethod
    def of(
        cls, gradients: Any, labels: Any, batches: Any, examples: Any, activations: Any
    ) -> "AuditedRows":
        """Check the arguments of ``audit``; ValueError if they do not fit, or are not finite."""
        of_labels = _tensor(labels, "labels").reshape(-1)
        rows = len(of_labels)
        if not rows:
            raise ValueError("labels: expected at least one row")
        sent = _of_rows(gradients, "gradients", rows)
        own = None if activations is None else _of_rows(activations, "activations", rows)
        starts = _starts(batches, rows)
        positions = np.arange(rows)
        if examples is not None:
            named = np.asarray(examples).reshape(-1)
            if len(named) != rows:
                raise ValueError(f"examples: expected {rows}, got {len(named)}")
            positions = np.unique(named, return_inverse=True)[1].astype(np.int64)
        for start, end in itertools.pairwise(starts):
            if len(np.unique(positions[start:end])) < end - start:
                raise ValueError("examples: expected each at most once in a batch; see batches")
        return cls(sent, of_labels, starts, positions, own)

    @property
    def num_examples(self) -> int:
        return int(self.positions.max()) + 1

    def attack_as_stored(self, attack: str, classes: LabelClasses) -> RunFigures | None:
        """Run one of `STORED_ROW_ATTACKS`; None if no two classes have examples that it scores."""
        own = self.gradients if self.activations is None else self.activations
        labels = np.zeros(self.num_examples, dtype=np.int64)
        labels[self.positions] = self.labels.numpy()
        positions = torch.from_numpy(self.positions)
        received = Received(self.gradients, own, positions, self.starts)
        scores = attack_stored_rows(attack, received, labels, classes)
        return run_level_leak(scores, aucs_of(scores, labels, classes), labels, classes)

    def observations(self) -> Iterator[Observation]:
        """Yield the batches; a batch with an example that was seen before begins an epoch."""
        epoch, seen = 0, np.zeros(self.num_examples, dtype=bool)
        first = 0
        for number, (start, end) in enumerate(itertools.pairwise(self.starts)):
            rows = slice(int(start), int(end))
            positions = self.positions[rows]
            if seen[positions].any():
                epoch, first = epoch + 1, number
                seen[:] = False
            seen[positions] = True
            yield Observation(
                epoch,
                number - first,
                {CUT: self.gradients[rows]},
                self.labels[rows],
                positions=torch.from_numpy(positions),
                activations=None if self.activations is None else self.activations[rows],
                references_are_clean=False,  # they are among the gradients that were sent
            )

    def covariates(self, covariates: Any, predictions: Any) -> Covariates:
        """Return each example's covariates, from the last row about it."""
        last = np.zeros(self.num_examples, dtype=np.int64)
        last[self.positions] = np.arange(len(self.positions))
        rows = len(self.positions)

        def values(given: Any, name: str) -> npt.NDArray[np.float32]:
            if given is None:
                return np.zeros((len(last), 0), dtype=np.float32)
            found = _of_rows(given, name, rows).reshape(rows, -1).numpy()[last]
            return found.astype(np.float32)

        return Covariates(
            np.arange(len(last)),
            values(covariates, "covariates"),
            values(predictions, "predictions"),
            np.zeros((len(last), 0), dtype=np.float32),
            self.labels.numpy()[last].astype(np.int64),
        )


def _tensor(values: Any, name: str) -> Tensor:
    tensor = values.detach().cpu() if isinstance(values, Tensor) else None
    if tensor is None:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name}: expected numbers, got {array.dtype}")
        tensor = torch.from_numpy(np.array(array))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: expected finite numbers")
    return tensor


def _of_rows(values: Any, name: str, rows: int) -> Tensor:
    tensor = _tensor(values, name)
    if not tensor.ndim or len(tensor) != rows:
        raise ValueError(f"{name}: expected {rows} rows, got shape {tuple(tensor.shape)}")
    tensor = tensor if tensor.is_floating_point() else tensor.double()
    return tensor.reshape(rows, -1) if tensor.ndim == 1 else tensor


def _starts(batches: Any, rows: int) -> npt.NDArray[np.int64]:
    if batches is None:
        return np.array([0, rows])
    if isinstance(batches, int):
        if batches < 1:
            raise ValueError(f"batches: expected a size of at least 1, got {batches}")
        return np.unique([*range(0, rows, batches), rows]).astype(np.int64)
    numbers = np.asarray(batches).reshape(-1)
    if len(numbers) != rows or (np.diff(numbers) < 0).any():
        raise ValueError(f"batches: expected {rows} ascending numbers, or a size")
    return np.array([0, *(np.flatnonzero(np.diff(numbers)) + 1), rows])
