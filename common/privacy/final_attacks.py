"""Attacks on the trained bottom model's activations.

    final_kmeans           distance to the larger less distance to the smaller of two clusters
    final_nearest_hint     distance to an example of another class less that to one of the class,
                           one example of each class being known
    completion_k           a head on the activations, trained with k known labels

What these attacks find is partly what features reveal: `final_scores` of the features themselves
says how much. Each example counts with the activation of its last
visit. Of a long run, evenly spaced examples are kept, so that all of them take 64 MiB at most.

``completion_k`` is the model completion of Fu et al. ("Label Inference Attacks Against Vertical
Federated Learning", USENIX Security 2022, section 4.1): they put a head on the bottom model, and
train both on a few labelled and all other examples by MixMatch (Berthelot et al., "MixMatch: A
Holistic Approach to Semi-Supervised Learning", NeurIPS 2019). Here as there:

    labelled rows repeat, unlabelled rows are guessed by the head itself, and guesses are sharpened
    to the power 1/T, T = 0.8; all rows are mixed in pairs with weights from Beta(.75, .75);
    the loss is the cross entropy of mixed labelled rows, and, with a weight that grows to 50, the
    squared error of mixed unlabelled rows; the result is the moving average of the weights.

Two things are simpler: the bottom model is not trained further, so that whoever receives its
activations can run the attack, and the guesses are not averaged over distorted copies of an
example. The head is linear, on standardised activations, and its weights are penalised: with a few
dozen labels this found more than heads with a hidden layer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.attacks import RUN_ATTACKS
from splitveil.common.privacy.observation import LabelClasses
from splitveil.common.privacy.scores import activation_kmeans, activation_nearest_hint

_MAX_VALUES = 2**25
_LARGEST_HALF = 6e4

_STEPS = 300
_LABELLED = _UNLABELLED = 128
_LEARNING_RATE = 0.02
_TEMPERATURE = 0.8
_MIXING = 0.75
_UNLABELLED_WEIGHT = 50.0
_PENALTY = 4.0  # weight of half the head's squared norm
_AVERAGED = 0.02  # share of the newest weights in their moving average
_ROWS_AT_ONCE = 65_536


class LastActivations:
    """Keeps the latest activation of each example, in half precision."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._rows: Tensor | None = None

    def add(self, positions: Tensor, activations: Tensor) -> None:
        """Add one batch: positions in the common order, (batch,), and activations, (batch, ...)."""
        rows = activations.detach().flatten(start_dim=1).cpu()
        if self._rows is None:
            number = -(-self._num_examples // self._every(rows.shape[1]))
            self._rows = torch.full((number, rows.shape[1]), torch.nan, dtype=torch.float16)
        every = self._every(rows.shape[1])
        chosen = positions % every == 0
        values = rows[chosen].clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
        self._rows[positions[chosen] // every] = values

    def seen(self) -> tuple[npt.NDArray[np.int64], Tensor]:
        """Return the positions of the stored examples, ascending, and their activations."""
        if self._rows is None:
            return np.empty(0, dtype=np.int64), torch.empty(0, 0)
        seen = torch.nonzero(~self._rows[:, 0].isnan())[:, 0]
        return seen.numpy() * self._every(self._rows.shape[1]), self._rows[seen]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": None if self._rows is None else self._rows.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows = None if state["rows"] is None else state["rows"].clone()

    def _every(self, row_dim: int) -> int:
        return max(1, -(-self._num_examples * row_dim // _MAX_VALUES))


def final_scores(
    attack: str,
    positions: npt.NDArray[np.int64],
    activations: Tensor,
    labels: npt.NDArray[np.int64],
    classes: LabelClasses,
    seed: int,
) -> list[RunScores]:
    """Run one attack on the last activations, and score the examples whose labels it did not know.

    One score for all classes, or one for each target class; of no examples where it cannot be run.
    """
    nothing, known = RunScores(np.empty(0, dtype=np.int64), np.empty(0)), RUN_ATTACKS[attack]
    if not known.num_hints and not known.one_of_each_class:
        if not len(positions):
            return [nothing]
        return [RunScores(positions, activation_kmeans(activations.float()).numpy())]
    num_hints = known.num_hints or len(np.unique(labels))
    hints = pick_labelled(labels, num_hints, np.random.default_rng(seed))
    if hints is None:
        return [nothing for _ in classes.targets]
    if known.num_hints:
        logits = complete_model(activations, hints, classes.num_classes, seed)
        scores = one_against_rest(logits)[:, list(classes.targets)]
    else:
        rows = activations.float()
        scores = torch.zeros(len(rows), len(classes.targets), dtype=torch.float64)
        for place, target in enumerate(classes.targets):
            if (own := hints.labels == target).any():  # else no example of it has been seen
                known_rows = (rows[torch.from_numpy(hints.rows[mask])] for mask in (own, ~own))
                scores[:, place] = activation_nearest_hint(rows, *known_rows)
    others = np.setdiff1d(np.arange(len(labels)), hints.rows)
    return [RunScores(positions[others], one[others]) for one in scores.numpy().T]


class Hints(NamedTuple):
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]  # their classes


def pick_labelled(
    labels: npt.NDArray[np.int64], num_hints: int, generator: np.random.Generator
) -> Hints | None:
    """Draw examples, equally many of each class if possible; None for one class, or for all."""
    classes = np.unique(labels)
    if len(classes) < 2 or num_hints >= len(labels):
        return None
    each, more = divmod(num_hints, len(classes))
    rows = [
        generator.permutation(np.flatnonzero(labels == label))[: each + (number < more)]
        for number, label in enumerate(classes)
    ]
    chosen = np.concatenate(rows)
    return Hints(chosen, labels[chosen])


def complete_model(activations: Tensor, hints: Hints, num_classes: int, seed: int) -> Tensor:
    """Train a head with some known labels, and return its logits, (examples, classes) float64."""
    rows = activations.detach().flatten(start_dim=1).cpu()
    parts = torch.split(rows, _ROWS_AT_ONCE)
    centre = torch.stack([part.double().sum(dim=0) for part in parts]).sum(dim=0) / len(rows)
    squares = [(part.double() - centre).square().sum(dim=0) for part in parts]
    spread = (torch.stack(squares).sum(dim=0) / len(rows)).sqrt()
    unit = torch.where(spread > 0, spread, 1.0)
    head = _Head(rows.shape[1], num_classes, seed)
    known = _standardised(rows[torch.from_numpy(hints.rows)], centre, unit)
    truth = one_hot(torch.from_numpy(hints.labels), num_classes).double()
    generator = torch.Generator().manual_seed(seed)
    for step in range(_STEPS):
        drawn = torch.randint(len(rows), (_UNLABELLED,), generator=generator)
        others = _standardised(rows[drawn], centre, unit)
        again = torch.randint(len(known), (_LABELLED,), generator=generator)
        order = torch.randperm(_LABELLED + _UNLABELLED, generator=generator)
        head.learn(known[again], truth[again], others, order, step / _STEPS)
    return torch.cat([head.logits(_standardised(part, centre, unit)) for part in parts])


def one_against_rest(logits: Tensor) -> Tensor:
    """Return the log-odds of each class against all others, (examples, classes)."""
    everything = logits.logsumexp(dim=1, keepdim=True)
    others = [
        torch.cat([logits[:, :column], logits[:, column + 1 :]], dim=1).logsumexp(dim=1)
        for column in range(logits.shape[1])
    ]
    return (logits - everything) - (torch.stack(others, dim=1) - everything)


class _Head:
    """A linear head, trained by MixMatch from weights of zero."""

    def __init__(self, row_dim: int, num_classes: int, seed: int) -> None:
        self._weight = torch.zeros(row_dim, num_classes, dtype=torch.float64, requires_grad=True)
        self._bias = torch.zeros(num_classes, dtype=torch.float64, requires_grad=True)
        self._averages = [torch.zeros_like(one) for one in (self._weight.data, self._bias.data)]
        self._optimizer = torch.optim.Adam([self._weight, self._bias], lr=_LEARNING_RATE)
        self._mixing = np.random.default_rng(seed)

    def logits(self, rows: Tensor) -> Tensor:
        weight, bias = self._averages
        return rows @ weight + bias

    def learn(
        self, known: Tensor, truth: Tensor, others: Tensor, order: Tensor, progress: float
    ) -> None:
        guesses = (others @ self._weight.data + self._bias.data).softmax(dim=1)
        sharpened = guesses ** (1 / _TEMPERATURE)
        sharpened = sharpened / sharpened.sum(dim=1, keepdim=True)
        share = self._mixing.beta(_MIXING, _MIXING)
        share = max(share, 1 - share)
        rows, targets = torch.cat([known, others]), torch.cat([truth, sharpened])
        rows = share * rows + (1 - share) * rows[order]
        targets = share * targets + (1 - share) * targets[order]
        with torch.enable_grad():
            shares = (rows @ self._weight + self._bias).log_softmax(dim=1)
            labelled = -(targets[: len(known)] * shares[: len(known)]).sum(dim=1).mean()
            unlabelled = (shares[len(known) :].exp() - targets[len(known) :]).square().mean()
            penalty = _PENALTY / 2 * self._weight.square().sum()
            loss = labelled + _UNLABELLED_WEIGHT * progress * unlabelled + penalty
            self._optimizer.zero_grad()
            torch.autograd.backward(loss)
        self._optimizer.step()
        for average, newest in zip(self._averages, (self._weight, self._bias), strict=True):
            average.lerp_(newest.data, _AVERAGED)


def _standardised(rows: Tensor, centre: Tensor, unit: Tensor) -> Tensor:
    return (rows.double() - centre) / unit
