"""Attacks that search a whole run in the gradients and activations that a party has stored.

    exploit            searches labels and a surrogate of the top model, such that the surrogate's
                       gradients at the activations are the received ones (Kariyappa and Qureshi,
                       "ExPLoit", arXiv 2112.01299)
    gramssat_k         the same, knowing k labels of each class, with which the surrogate begins and
                       which name the classes (after Zhang et al., "GRAMSSAT", JISA 93, 2025)
    unsplit            fits a surrogate to the gradient of each row's nearest label (Erdogan, Kupcu
                       and Cicek, "UnSplit", WPES 2022, section on label inference)
    lea                maps clusters of the first activations to labels by the first gradients
                       (Jiang et al., "LEA", arXiv 2603.03777), by an assignment in n^3 steps
    gradient_clusters  clusters the sums of each example's gradients

They read no label; any other knowledge is an argument. The first three minimise the distance of
each received gradient g from that of a cross entropy with labels q,

    |g - s sum_k (p_k - q_k) J_k|^2,    p the surrogate's predictions, J_k the slopes of its logits,

s a free scale, with Adam over the batches in the order of their arrival, so that the surrogate
follows the top model. ``exploit`` and ``gramssat_k`` add the cross entropy of p and q and the
divergence of each batch's mean q from the classes' shares. Without known labels, of several random
surrogates to begin with, that with the smallest loss in the last pass counts.

A top model with two outputs exchanged sends the same gradients. Without labels or the top model's
first weights, the names of the classes are therefore a guess; `attack_stored_rows` measures such an
attack with the names that suit it best, as an AUC below 1/2 is turned. All that ``lea`` takes from
the gradients are the names, log2(n!) bits in a whole run: its clusters are what features reveal.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.final_attacks import Hints, one_against_rest, pick_labelled
from splitveil.common.privacy.gradient_rows import unit_rows
from splitveil.common.privacy.observation import LabelClasses

STORED_ROW_ATTACKS: Mapping[str, str] = MappingProxyType(
    {
        "exploit": "the classes' shares",
        "gramssat_1": "the classes' shares, 1 label of each",
        "gramssat_2": "the classes' shares, 2 labels of each",
        "gramssat_5": "the classes' shares, 5 labels of each",
        "unsplit": "nothing",
        "lea": "nothing",
        "gradient_clusters": "nothing",
    }
)
"""Name -> the attack's knowledge besides gradients and activations."""

_STARTS = 3
_PASSES = 12
_STEPS_WITH_HINTS = 5  # enough to name classes; more would learn a few rows' noise
_HIDDEN = 32
_LEARNING_RATE = 0.01
_LABEL_LEARNING_RATE = 0.1
_CROSS_ENTROPY_WEIGHT = 0.1
_SMALLEST = 1e-12


class Received(NamedTuple):
    """A party's data of a run: one row per example and batch, in the order of arrival."""

    gradients: Tensor  # (rows, ...)
    activations: Tensor  # (rows, ...)
    positions: Tensor  # which example each row is about, from 0, (rows,) int64
    starts: npt.NDArray[np.int64]  # first row of each batch, and the number of rows

    @property
    def num_examples(self) -> int:
        return int(self.positions.max()) + 1

    def prepared(self) -> "Received":
        """Return float32 rows: gradients of mean square 1, activations of variance 1."""
        rows, values = self.gradients.flatten(1).float(), self.activations.flatten(1).float()
        length = rows.square().sum(dim=1).mean().sqrt().clamp(min=_SMALLEST)
        return self._replace(
            gradients=rows / length, activations=values / values.std().clamp(min=_SMALLEST)
        )

    def batches(self) -> Iterator[slice]:
        for start, end in itertools.pairwise(self.starts):
            yield slice(int(start), int(end))


def exploit(received: Received, shares: Sequence[float], seed: int = 0) -> Tensor:
    """Search labels and a surrogate, knowing the classes' shares. Log-probabilities by class."""
    return _best_start(seed, lambda start: _search(received, shares, None, start))


def gramssat(received: Received, hints: Hints, shares: Sequence[float], seed: int = 0) -> Tensor:
    """Search labels and a surrogate, knowing shares and some labels.

    Returns log-probabilities of all examples, also of those with known labels.
    """
    likely, _ = _search(received, shares, hints, seed)
    return likely[:, _best_names(likely[torch.from_numpy(hints.rows)], hints.labels)]


def unsplit(received: Received, num_classes: int, seed: int = 0) -> Tensor:
    """Fit a surrogate to each row's nearest label's gradient. Log-probabilities by class."""
    labels = torch.eye(num_classes)

    def search(start: int) -> tuple[Tensor, float]:
        distances = torch.zeros(received.num_examples, num_classes)

        def loss(batch: _Fitted) -> Tensor:
            each = torch.stack([batch.distances(label) for label in labels], dim=1)
            # Earlier passes, of a worse surrogate, count ever less.
            distances.index_add_(0, batch.positions, each.detach())
            distances.mul_(0.5 ** (len(each) / len(received.positions)))
            return each.amin(dim=1).mean()

        left = _fit(received, num_classes, loss, start)
        return _memberships(distances), left

    return _best_start(seed, search)


def lea(received: Received, top: nn.Module, num_classes: int, seed: int = 0) -> Tensor:
    """Cluster each example's first activation, and name the clusters by their first gradients.

    ``top`` maps activations to logits with the top model's first weights; with others, the names
    are a guess. Log-probabilities, (examples, classes).
    """
    rows = received.prepared()
    first = torch.from_numpy(np.unique(rows.positions.numpy(), return_index=True)[1])
    members = _clusters(rows.activations[first], num_classes, seed)
    logits, slopes = _logits_and_slopes(top, received.activations[first].flatten(1).float())
    of_cluster = one_hot(members.argmax(dim=1), num_classes).float().T
    simulated = [
        of_cluster @ torch.einsum("nc,ncd->nd", logits.softmax(dim=1) - label, slopes)
        for label in torch.eye(num_classes)
    ]
    means = (of_cluster @ rows.gradients[first])[None]
    alike = torch.cosine_similarity(means, torch.stack(simulated), dim=2)
    return members[:, _assigned(alike)]


def gradient_clusters(received: Received, num_classes: int, seed: int = 0) -> Tensor:
    """Cluster the sums of each example's gradients, scaled to length 1. Log-probabilities."""
    rows = received.prepared()
    sums = torch.zeros(received.num_examples, rows.gradients.shape[1])
    return _clusters(
        sums.index_add_(0, rows.positions, unit_rows(rows.gradients)), num_classes, seed
    )


def surrogate(row_dim: int, num_classes: int, seed: int) -> nn.Module:
    """Return a top model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(row_dim, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, num_classes)
        )


def attack_stored_rows(
    attack: str, received: Received, labels: npt.NDArray[np.int64], classes: LabelClasses
) -> list[RunScores]:
    """Run one of `STORED_ROW_ATTACKS`, and score rows it did not know: one score per target class.

    Labels are of all examples, for the side information, and for the names of the classes where the
    attack has to guess them. Scores of no examples where a class has too few to be known.
    """
    seed, num_classes = 0, classes.num_classes
    shares = np.bincount(labels, minlength=num_classes) / len(labels)
    hints = Hints(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    if received.num_examples < num_classes:
        return [RunScores(hints.rows, np.empty(0)) for _ in classes.targets]
    if attack.startswith("gramssat"):
        number = num_classes * int(attack.rpartition("_")[2])
        picked = pick_labelled(labels, number, np.random.default_rng(seed))
        if picked is None:
            return [RunScores(hints.rows, np.empty(0)) for _ in classes.targets]
        hints = picked
        likely = gramssat(received, hints, shares.tolist(), seed)
    elif attack == "exploit":
        likely = exploit(received, shares.tolist(), seed)
    elif attack == "lea":
        row_dim = received.activations[0].numel()
        likely = lea(received, surrogate(row_dim, num_classes, seed), num_classes, seed)
    else:
        likely = {"unsplit": unsplit, "gradient_clusters": gradient_clusters}[attack](
            received, num_classes, seed
        )
    if not len(hints.rows):
        likely = likely[:, _best_names(likely, labels)]
    others = np.setdiff1d(np.arange(len(labels)), hints.rows)
    scores = one_against_rest(likely.double())[others].numpy()
    return [RunScores(others, scores[:, target]) for target in classes.targets]


class _Fitted(NamedTuple):
    gradients: Tensor
    positions: Tensor
    logits: Tensor
    slopes: Tensor  # (batch, classes, row_dim), scaled

    def distances(self, labels: Tensor) -> Tensor:
        errors = self.logits.softmax(dim=1) - labels
        sent = torch.einsum("nc,ncd->nd", errors, self.slopes)
        return (self.gradients - sent).square().sum(dim=1)

    def cross_entropy(self, labels: Tensor) -> Tensor:
        negative: Tensor = -(labels * self.logits.log_softmax(dim=1)).sum(dim=1).mean()
        return negative


def _best_start(seed: int, search: Callable[[int], tuple[Tensor, float]]) -> Tensor:
    starts = map(search, range(seed, seed + _STARTS))
    return min(starts, key=itemgetter(1))[0]


def _search(
    received: Received, shares: Sequence[float], hints: Hints | None, seed: int
) -> tuple[Tensor, float]:
    of_class = torch.tensor(shares)
    entropy = -torch.special.xlogy(of_class, of_class).sum().clamp(max=-_SMALLEST)
    searched = nn.Embedding(received.num_examples, len(shares), sparse=True)
    nn.init.zeros_(searched.weight)

    def loss(batch: _Fitted) -> Tensor:
        labels = searched(batch.positions).softmax(dim=1)
        agreement = batch.cross_entropy(labels) / entropy
        means = labels.mean(dim=0).clamp(min=1e-9)
        divergence = (torch.special.xlogy(of_class, of_class) - of_class * means.log()).sum()
        mean: Tensor = batch.distances(labels).mean()
        return mean.add(divergence).add(agreement, alpha=_CROSS_ENTROPY_WEIGHT)

    known = None
    if hints is not None:
        place = torch.full((received.num_examples,), -1)
        place[torch.from_numpy(hints.rows)] = torch.from_numpy(hints.labels)
        rows = torch.nonzero(place[received.positions] >= 0)[:, 0]
        known = rows, one_hot(place[received.positions[rows]], len(shares)).float()
    left = _fit(received, len(shares), loss, seed, searched, known)
    return searched.weight.data.log_softmax(dim=1), left


def _fit(
    received: Received,
    num_classes: int,
    loss: Callable[[_Fitted], Tensor],
    seed: int,
    searched: nn.Module | None = None,
    known: tuple[Tensor, Tensor] | None = None,
) -> float:
    """Minimise a loss over the batches, several times; return its sum over the last pass."""
    rows = received.prepared()
    top = surrogate(rows.activations.shape[1], num_classes, seed)
    _, slopes = _logits_and_slopes(top, rows.activations[next(rows.batches())])
    # Slopes begin half as long as the received gradients: far smaller ones would stay small.
    length = slopes.detach().square().sum(dim=2).mean().sqrt()
    scale = (0.5 / length.clamp(min=_SMALLEST)).log().requires_grad_()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam([*top.parameters(), scale], lr=_LEARNING_RATE)
    ]
    if searched is not None:
        optimizers.append(torch.optim.SparseAdam(searched.parameters(), lr=_LABEL_LEARNING_RATE))

    def step(chosen: slice | Tensor, loss: Callable[[_Fitted], Tensor]) -> float:
        with torch.enable_grad():
            logits, slopes = _logits_and_slopes(top, rows.activations[chosen])
            gradients, positions = rows.gradients[chosen], rows.positions[chosen]
            value = loss(_Fitted(gradients, positions, logits, slopes * scale.exp()))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(value)
        for optimizer in optimizers:
            optimizer.step()
        return float(value.detach())

    if known is not None:
        known_rows, truth = known
        for _ in range(_STEPS_WITH_HINTS):
            step(
                known_rows,
                lambda hinted: hinted.distances(truth).mean() + hinted.cross_entropy(truth),
            )
    left = 0.0
    for _ in range(_PASSES):
        left = math.fsum(step(chosen, loss) for chosen in rows.batches())
    return left


def _logits_and_slopes(top: nn.Module, activations: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits, (rows, classes), and their slopes, (rows, classes, row_dim)."""
    with torch.enable_grad():
        inputs = activations.detach().requires_grad_()
        logits = top(inputs)
        slopes = [
            torch.autograd.grad(each.sum(), inputs, create_graph=True)[0] for each in logits.T
        ]
    return logits, torch.stack(slopes, dim=1)


def _clusters(rows: Tensor, num_clusters: int, seed: int) -> Tensor:
    # Importing it takes a second.
    from sklearn.cluster import KMeans  # noqa: PLC0415

    fitted = KMeans(num_clusters, n_init=10, random_state=seed).fit(rows.numpy())
    return _memberships(torch.from_numpy(fitted.transform(rows.numpy())).float().square())


def _memberships(squared_distances: Tensor) -> Tensor:
    unit = squared_distances.amin(dim=1).mean().clamp(min=_SMALLEST)
    return (-squared_distances / unit).log_softmax(dim=1)


def _best_names(likely: Tensor, labels: npt.NDArray[np.int64]) -> Tensor:
    """Return the columns in the order of the classes that fits the labels best."""
    truth = one_hot(torch.from_numpy(labels), likely.shape[1]).float()
    return _assigned(truth.T @ likely.exp())


def _assigned(alike: Tensor) -> Tensor:
    """Return a column for each row, each once, with the largest total similarity."""
    # Importing it takes time that only these attacks should pay.
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415

    return torch.from_numpy(linear_sum_assignment(alike.detach().numpy(), maximize=True)[1])
