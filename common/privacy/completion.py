"""Model completion: a head on the trained bottom model, learned from a few known labels.

After training, the bottom model separates the classes as far as the top model's gradients have
taught it to. Fu et al. ("Label Inference Attacks Against Vertical Federated Learning", USENIX
Security 2022, section 4.1) put a head on it, and train both on a few labelled and all other
examples by MixMatch (Berthelot et al., "MixMatch: A Holistic Approach to Semi-Supervised Learning",
NeurIPS 2019). Here as there:

    labelled rows repeat, unlabelled rows are guessed by the head itself, and guesses are sharpened
    to the power 1/T, T = 0.8; all rows are mixed in pairs with weights from Beta(.75, .75);
    the loss is the cross entropy of mixed labelled rows, and, with a weight that grows to 50, the
    squared error of mixed unlabelled rows; the result is the moving average of the weights.

Two things are simpler. The bottom model is not trained further, so that its activations are all
that the attack needs: whoever receives them can run it, too. The guesses are not averaged over
distorted copies of an example, because rows of a table have none. The head is linear, on
standardised activations, and its weights are penalised: with a few dozen labels this found more
than heads with a hidden layer. On a party's features in place of its activations, the same function
tells what the same labels reveal without any gradient.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import one_hot

_STEPS = 300
_LABELLED = _UNLABELLED = 128
_LEARNING_RATE = 0.02
_TEMPERATURE = 0.8
_MIXING = 0.75
_UNLABELLED_WEIGHT = 50.0
_PENALTY = 4.0
"""Weight of half the head's squared norm."""
_AVERAGED = 0.02
"""Share of the newest weights in their moving average."""
_ROWS_AT_ONCE = 65_536


class Hints(NamedTuple):
    """Examples whose labels the attacker knows."""

    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    """Their classes."""


def pick_labelled(
    labels: npt.NDArray[np.int64], num_hints: int, generator: np.random.Generator
) -> Hints | None:
    """Draw examples with known labels, equally many of each class as far as there are as many.

    Args:
        labels: class indices, (examples,).
        num_hints: number of examples; what does not divide evenly goes to the first classes.

    Returns:
        None if there is only one class, or no example would be left to score.
    """
    classes = np.unique(labels)
    if len(classes) < 2 or num_hints >= len(labels):
        return None
    each, more = divmod(num_hints, len(classes))
    rows = [
        generator.permutation(np.flatnonzero(labels == one))[: each + (place < more)]
        for place, one in enumerate(classes)
    ]
    chosen = np.concatenate(rows)
    return Hints(chosen, labels[chosen])


def complete_model(activations: Tensor, hints: Hints, num_classes: int, seed: int) -> Tensor:
    """Train a head on activations with some known labels, and classify all examples with it.

    Args:
        activations: of the examples, (examples, ...), finite, of any floating dtype.
        hints: at least one example.
        seed: of batches and mixing; the same seed gives the same result.

    Returns:
        The head's logits, (examples, classes), float64.
    """
    rows = activations.detach().flatten(start_dim=1).cpu()
    centre, unit = _moments(rows)
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
    return torch.cat([head.logits(_standardised(part, centre, unit)) for part in _parts(rows)])


def one_against_rest(logits: Tensor) -> Tensor:
    """Return the log-odds of each class against all others, (examples, classes)."""
    everything = logits.logsumexp(dim=1, keepdim=True)
    others = [
        torch.cat([logits[:, :one], logits[:, one + 1 :]], dim=1).logsumexp(dim=1)
        for one in range(logits.shape[1])
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
            found = (rows @ self._weight + self._bias).log_softmax(dim=1)
            labelled = -(targets[: len(known)] * found[: len(known)]).sum(dim=1).mean()
            unlabelled = (found[len(known) :].exp() - targets[len(known) :]).square().mean()
            penalty = _PENALTY / 2 * self._weight.square().sum()
            loss = labelled + _UNLABELLED_WEIGHT * progress * unlabelled + penalty
            self._optimizer.zero_grad()
            torch.autograd.backward(loss)
        self._optimizer.step()
        for average, newest in zip(self._averages, (self._weight, self._bias), strict=True):
            average.lerp_(newest.data, _AVERAGED)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column, the latter 1 where all are equal."""
    parts = _parts(rows)
    centre = torch.stack([part.double().sum(dim=0) for part in parts]).sum(dim=0) / len(rows)
    squares = [(part.double() - centre).square().sum(dim=0) for part in parts]
    spread = (torch.stack(squares).sum(dim=0) / len(rows)).sqrt()
    return centre, torch.where(spread > 0, spread, 1.0)


def _standardised(rows: Tensor, centre: Tensor, unit: Tensor) -> Tensor:
    return (rows.double() - centre) / unit


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, _ROWS_AT_ONCE)
