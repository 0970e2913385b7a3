"""Attacks that accumulate over a run: many epochs together show what noise hides in one batch.

    accumulated_spectral         sum of the batches' standardised projections on their top
                                 direction, its sign kept from batch to batch; with more than two
                                 classes, on one direction that follows the batches
    accumulated_residual_energy  sum of the batches' standardised residual energies, each batch with
                                 the sign that agrees with what earlier ones said of its examples
    accumulated_cosine           sum of the batches' standardised cosines; where the reference
                                 carries noise, which may flip its sign, that sign is kept, too
    accumulated_kmeans           sum of the batches' standardised distances to two clusters, its
                                 sign kept from batch to batch
    accumulated_nearest_hint     sum of the batches' standardised differences of cosines with one
                                 example of each class
    accumulated_informed         sum of the log-likelihood ratios; answers that say more count more
    hint_combiner_k              logistic regression on an example's scores in up to four stretches
                                 of the run, fitted to k examples of known label

A standardised score has mean 0 and variance 1 over its batch, so that every batch counts alike.
Fresh noise averages out of the sums like one over the root of the epochs; persistent noise, which
is the same in every epoch, does not.

Each of them keeps at most 16 bytes per example of the run. Attacks on the trained bottom model's
activations are in `splitveil.common.privacy.final_attacks`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.gradient_rows import TopDirection, skewness, standardised, unit_vector
from splitveil.common.privacy.observation import AttackScores, LabelClasses, LayerScores

_Floats: TypeAlias = npt.NDArray[np.float64]

_STRETCHES = 4
_MEMORY = 0.9  # weight of earlier batches' directions, which a new one must agree with

_LARGEST_HALF = 6e4


class RunScores(NamedTuple):
    positions: npt.NDArray[np.int64]  # positions of the examples in the common order, ascending
    scores: npt.NDArray[np.float64]


class ContinuousSign:
    """Chooses the sign of each batch's top or reference direction to agree with earlier batches.

    Skewness, which decides the sign of a single batch, errs in some batches under noise: their
    scores would cancel other batches' scores in a sum. It remains open which of the two signs means
    positive.
    """

    def __init__(self) -> None:
        self._direction: Tensor | None = None

    def turn(self, top: TopDirection) -> Tensor:
        """Return the projections of a batch with their sign chosen."""
        direction = top.direction
        if self._direction is not None:
            self._direction = self._direction.to(direction.device)
        if self._direction is None or self._direction.shape != direction.shape:
            turns = skewness(top.projections) < 0
            self._direction = torch.zeros_like(direction)
        else:
            turns = bool(self._direction @ direction < 0)
        sign = -1.0 if turns else 1.0
        self._direction = torch.add(sign * direction, self._direction, alpha=_MEMORY)
        return -top.projections if turns else top.projections

    def follow(self, rows: Tensor, top: TopDirection) -> Tensor:
        """Return a batch's projections on the direction of earlier batches, a power step on.

        More than two classes differ in several directions of much the same strength: the top one is
        now one of them and now another, and a sum over batches would mix them.
        """
        before = top.direction if self._direction is None else self._direction.to(rows.device)
        after = unit_vector(rows.T @ (rows @ before))
        self._direction = after if bool(after.any()) else before
        return rows @ self._direction

    def state_dict(self) -> dict[str, Any]:
        direction = self._direction
        return {"direction": None if direction is None else direction.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._direction = state["direction"]


class AccumulatedScores:
    """Sums standardised scores per example: 12 bytes for each."""

    def __init__(self, num_examples: int) -> None:
        self._sums = torch.zeros(num_examples, dtype=torch.float64)
        self._counts = torch.zeros(num_examples, dtype=torch.int32)

    def add(self, positions: Tensor, scores: Tensor) -> None:
        """Add a batch's standardised scores at the examples' positions in the common order."""
        rows = positions.numpy()
        # The same memory, at a fraction of the cost of torch's indexing.
        self._sums.numpy()[rows] += scores.cpu().numpy()
        self._counts.numpy()[rows] += 1

    def agreeing(self, positions: Tensor, scores: Tensor) -> Tensor:
        """Return a batch's scores with the sign that agrees with the sums of its examples."""
        return -scores if self._sums.numpy()[positions.numpy()] @ scores.numpy() < 0 else scores

    def result(self) -> RunScores:
        """Return the sums of the examples that had a score."""
        seen = np.flatnonzero(self._counts.numpy())
        return RunScores(seen, self._sums.numpy()[seen])

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone(), "counts": self._counts.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_shape(state["sums"], self._sums)
        self._sums = state["sums"].clone()
        self._counts = state["counts"].clone()


class ScoreHistory:
    """Sums two standardised scores per example in up to four stretches of the run: 16 bytes.

    A stretch is one epoch at first. When a fifth stretch is needed, neighbouring stretches are
    merged in pairs, and stretches are twice as long from then on.
    """

    def __init__(self, num_examples: int) -> None:
        self._sums = torch.zeros(num_examples, 2, _STRETCHES, dtype=torch.float16)
        self._epochs_per_stretch = 1

    def add(self, epoch: int, positions: Tensor, scores: tuple[Tensor, Tensor]) -> None:
        """Add two standardised scores for each of a batch's examples."""
        while epoch // self._epochs_per_stretch >= _STRETCHES:
            merged = _to_half(self._sums[..., ::2].float() + self._sums[..., 1::2])
            self._sums.zero_()
            self._sums[..., : _STRETCHES // 2] = merged
            self._epochs_per_stretch *= 2
        stretch = epoch // self._epochs_per_stretch
        sums = self._sums[positions, :, stretch] + torch.stack(scores, dim=1).cpu()
        self._sums[positions, :, stretch] = _to_half(sums)

    def features(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the sums of some examples, (examples, 8)."""
        rows = self._sums[torch.from_numpy(positions)]
        return rows.flatten(start_dim=1).double().numpy()

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone(), "epochs_per_stretch": self._epochs_per_stretch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_shape(state["sums"], self._sums)
        self._sums = state["sums"].clone()
        self._epochs_per_stretch = state["epochs_per_stretch"]


def combine_with_hints(
    features: npt.NDArray[np.float64],
    labels: npt.NDArray[np.int64],
    num_hints: int,
    generator: np.random.Generator,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]] | None:
    """Fit a logistic regression to some examples with known labels, and score the others with it.

    Only the labels of the hints are read. Returns the scores, and a mask of the examples that are
    not hints; None if the hints are all of one class, or if all examples are hints.
    """
    # Importing it takes a second, which only a run with this attack should pay.
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    if num_hints >= len(labels):
        return None
    hints = generator.choice(len(labels), num_hints, replace=False)
    if len(np.unique(labels[hints])) < 2:
        return None
    spread = features.std(axis=0)
    values = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    model = LogisticRegression(max_iter=1000).fit(values[hints], labels[hints])
    others = np.ones(len(labels), dtype=np.bool_)
    others[hints] = False
    return model.decision_function(values), others


def _check_shape(loaded: Tensor, own: Tensor) -> None:
    if loaded.shape != own.shape:
        raise ValueError(f"expected sums of {len(own)} examples, got {len(loaded)}")


def _to_half(values: Tensor) -> Tensor:
    return values.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()


class GatheredLayer:
    def __init__(self, attacks: Sequence[str], num_examples: int, classes: LabelClasses) -> None:
        def num_scores(source: str) -> int:
            return 1 if ATTACKS[source].is_free else len(classes.targets)

        self.combining = tuple(attack for attack in attacks if RUN_ATTACKS[attack].combines)
        self.sums: dict[str, list[AccumulatedScores]] = {}
        """Attack -> one sum for all classes, or one for each target."""
        for name in attacks:
            attack = RUN_ATTACKS[name]
            if not attack.combines and not attack.is_final:
                num_sums = num_scores(attack.sources[0])
                self.sums[name] = [AccumulatedScores(num_examples) for _ in range(num_sums)]
        self._is_multi_class = classes.is_multi_class
        # One history serves all numbers of hints, and all classes.
        self.history = ScoreHistory(num_examples if self.combining else 0)
        # Only of these: once a batch had a positive, the sign of cosines enlarges a checkpoint.
        self._signs = {
            source: [ContinuousSign() for _ in range(num_scores(source))]
            for name in attacks
            for source in RUN_ATTACKS[name].sources
            if ATTACKS[source].direction is not None
        }

    def add(self, epoch: int, positions: Tensor, layer: LayerScores) -> None:
        """Add the scores of one batch."""
        signed = dict(layer.scores) | {
            source: layer.scores[source]._replace(
                by_target=[
                    None
                    if direction is None
                    else sign.follow(layer.rows, direction)
                    if self._is_multi_class and ATTACKS[source].follows_batches
                    else sign.turn(direction)
                    for sign, direction in zip(signs, directions, strict=True)
                ]
            )
            for source, signs in self._signs.items()
            if (directions := layer.directions.get(source)) is not None
        }
        for name, by_target in self.sums.items():
            (source,) = RUN_ATTACKS[name].sources
            if source in signed:
                for sums, scores, known in zip(by_target, *signed[source], strict=True):
                    if scores is None:
                        continue
                    rows = np.ones(len(positions), dtype=np.bool_)
                    rows[list(known)] = False
                    values = torch.from_numpy(scores.cpu().numpy()[rows])
                    if RUN_ATTACKS[name].standardises:
                        values = standardised(values)
                    others = torch.from_numpy(positions.numpy()[rows])
                    if RUN_ATTACKS[name].agrees_with_sums:
                        values = sums.agreeing(others, values)
                    sums.add(others, values)
        for name in self.combining[:1]:
            sources = RUN_ATTACKS[name].sources
            first, second = (signed[source].by_target[0] for source in sources)
            if first is not None and second is not None:
                self.history.add(epoch, positions, (standardised(first), standardised(second)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {name: [one.state_dict() for one in sums] for name, sums in self.sums.items()},
            "history": self.history.state_dict(),
            "signs": {
                name: [one.state_dict() for one in signs] for name, signs in self._signs.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["sums"].keys() != self.sums.keys():
            raise ValueError("expected what the same attacks have gathered")
        self.history.load_state_dict(state["history"])
        for name, by_target in self.sums.items():
            for sums, stored in zip(by_target, state["sums"][name], strict=True):
                sums.load_state_dict(stored)
        for source, signs in self._signs.items():
            for sign, stored in zip(signs, state["signs"][source], strict=True):
                sign.load_state_dict(stored)


class LatestScores:
    """Keeps each example's latest scores of one layer: standardised ones take 2 bytes each."""

    def __init__(
        self, attacks: Sequence[str], num_examples: int, *, standardises: bool = True
    ) -> None:
        self._attacks = tuple(attacks)
        self._num_examples = num_examples
        self._standardises = standardises
        self._scores: dict[str, Tensor] = {}
        """Attack -> (scores, examples); NaN for an example without a score."""

    def add(self, positions: Tensor, attacks: Mapping[str, AttackScores]) -> None:
        """Replace the scores of one batch's examples."""
        rows = positions.numpy()
        dtype = torch.float16 if self._standardises else torch.float32
        for name in self._attacks:
            if name not in attacks:
                continue
            if name not in self._scores:
                shape = (len(attacks[name].by_target), self._num_examples)
                self._scores[name] = torch.full(shape, torch.nan, dtype=dtype)
            for latest, scores, known in zip(self._scores[name], *attacks[name], strict=True):
                if scores is not None:
                    values = standardised(scores) if self._standardises else scores.cpu()
                    as_kept = values.to(dtype).numpy()
                    as_kept[list(known)] = np.nan
                    latest.numpy()[rows] = as_kept

    def result(self) -> dict[str, list[RunScores]]:
        """Return attack -> its scores, one for all classes or one for each target."""
        return {
            name: [
                RunScores(np.flatnonzero(~np.isnan(one)), one[~np.isnan(one)])
                for one in by_target.double().numpy()
            ]
            for name, by_target in self._scores.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: scores.clone() for name, scores in self._scores.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, scores in state.items():
            if name not in self._attacks or scores.shape[1] != self._num_examples:
                raise ValueError(f"expected scores of {self._num_examples} examples by {name}")
        self._scores = {name: scores.clone() for name, scores in state.items()}
