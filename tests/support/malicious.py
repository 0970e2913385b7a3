"""A passive party that chooses its activations, and what anybody may read from the answers.

`PEERS` are the activations that it may send in place of its model's, and `READINGS` the scores that
it may compute from each answer; `attack` sends the ones, computes all of the others in one run, and
holds them against the ledger's bound. A test of another defense needs one call.

The readings know no label: their sign follows from the positives being the smaller class, or from
the predictions. Two of them, `informed` and `targets`, are given the model's predictions and their
slopes, which the bound for every peer grants to it.

Why chosen activations break noise along a line: four long random vectors make the top model certain
about each group of rows, rightly or wrongly. A row with the label of which the model is certain has
almost no gradient, and a row with the other label has a full one, in a direction that all rows of
its group share. Noise along a line hides neither, at any strength: noise of an example does not lie
along the gradient (`off_the_common_line`), and noise along the gap of the class means leaves
everything across the gap bare (`across_the_gap`).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.common.data.features import Features
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.informed import KnownPredictions, informed
from splitveil.common.privacy.leakage import auc
from splitveil.common.privacy.scores import norm, rare_cluster_up, residual_energy, spectral
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.sample_order import Positions
from splitveil.passive_party.bottom_trainer import BottomTrainer
from tests.support.attacked_run import STORE_SLOPES, Sender
from tests.support.runs import Parties, build_parties, run_in_process
from tests.support.simulation import PassiveRecording

NUM_GROUPS = 4
LENGTH = 1e4
"""Of an activation: enough to saturate any top model that is trained from its usual start."""

# ---- the activations that it sends ----


class Choice(NamedTuple):
    """What a peer looks at when it chooses the activations of a batch."""

    positions: Tensor
    """Positions of the rows in the common order, (batch,)."""
    honest: Tensor
    """What its model says, (batch, *cut_shape)."""
    visit: int
    """Number of times that it has sent the first of these rows before."""

    @property
    def groups(self) -> Tensor:
        """Group of each row, the same in every epoch, (batch,)."""
        return _mixed(self.positions) % NUM_GROUPS

    def random(self, number: int) -> Tensor:
        """Return random vectors of length 1, the same in every epoch, (number, row_dim)."""
        shape = (number, self.honest[0].numel())
        vectors = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        return torch.nn.functional.normalize(vectors, dim=1)

    def own_random(self) -> Tensor:
        """Return a random vector of length 1 for each row, the same in every epoch."""
        return self.random(int(self.positions.max()) + 1)[self.positions]


def _groups(choice: Choice) -> Tensor:
    return LENGTH * choice.random(NUM_GROUPS)[choice.groups]


def _subspaces(choice: Choice) -> Tensor:
    planes = choice.random(2 * NUM_GROUPS).reshape(NUM_GROUPS, 2, -1)
    return LENGTH * torch.einsum("nk,nkd->nd", choice.own_random()[:, :2], planes[choice.groups])


def _one_hot(choice: Choice) -> Tensor:
    row_dim = choice.honest[0].numel()
    return LENGTH * torch.eye(row_dim)[_mixed(choice.positions) % row_dim]


PEERS: Mapping[str, Callable[[Choice], Tensor] | None] = {
    "honest": None,
    "groups": _groups,
    "subspaces": _subspaces,
    "one_hot": _one_hot,
    "constant": lambda choice: torch.ones_like(choice.honest),
    "long": lambda choice: LENGTH * choice.own_random(),
    "huge": lambda choice: 1e30 * choice.own_random(),
    "denormal": lambda choice: 1e-40 * choice.own_random(),
    "between_stages": lambda choice: _groups(choice) if choice.visit % 2 else choice.honest,
}
"""What each peer sends; None for the activations of its model."""


def _mixed(positions: Tensor) -> Tensor:
    """Return numbers in which no order of the positions shows."""
    return (positions * 2_654_435_761 % 2**32) >> 7


class ChosenTrainer(BottomTrainer):
    """A bottom model that learns nothing, and whose activations a peer chooses."""

    def __init__(self, honest: BottomTrainer, choose: Callable[[Choice], Tensor]) -> None:
        self.__dict__.update(honest.__dict__)
        self._choose = choose
        self._gathered: list[tuple[Features, Tensor]] = []
        self._visits: Counter[int] = Counter()

    def rows(self, positions: Positions) -> Features:
        features = super().rows(positions)
        self._gathered = [*self._gathered[-1:], (features, torch.from_numpy(positions.copy()))]
        return features

    def forward(self, features: Features, *, stashes_weights: bool = False) -> Tensor:
        return self._chosen(features, super().forward(features, stashes_weights=stashes_weights))

    def embed(self, features: Features) -> Tensor:
        return self._chosen(features, super().embed(features))

    def backward(self, gradient: Tensor) -> dict[str, Tensor]:
        return super().backward(torch.zeros_like(gradient))

    def _chosen(self, features: Features, honest: Tensor) -> Tensor:
        (positions,) = (rows for known, rows in self._gathered if known is features)
        first = int(positions[0])
        choice = Choice(positions, honest, self._visits[first])
        self._visits.update(positions.tolist())
        return self._choose(choice).to(honest).reshape(honest.shape)


# ---- what it reads from an answer ----


class Read(NamedTuple):
    """One answer, and what its reader knows about it."""

    rows: Tensor
    """The gradients received, (batch, row_dim), float64."""
    groups: Tensor
    """The group of each row, (batch,)."""
    known: KnownPredictions


def off_the_common_line(read: Read) -> Tensor:
    """Return the sine between each row and the line on which most rows of its group lie."""
    scores = read.rows.new_zeros(len(read.rows))
    for rows, members in _by_group(read.rows, read.groups):
        lengths = rows.norm(dim=1, keepdim=True)
        units = torch.where(lengths > 0, rows / lengths, 0.0)
        # A row on the line, and not the first singular vector, which lies between two lines.
        line = units[(units @ units.T).abs().median(dim=1).values.argmax()]
        scores[members] = (1 - (units @ line).square()).clamp(min=0).sqrt()
    return scores


def across_the_gap(read: Read) -> Tensor:
    """Return the log energy of each row outside the batch's strongest direction, by group."""
    _, _, directions = torch.linalg.svd(read.rows, full_matrices=False)
    across = read.rows - torch.outer(read.rows @ directions[0], directions[0])
    scores = across.new_zeros(len(across))
    for rows, members in _by_group(across, read.groups):
        energy = rows.square().sum(dim=1)
        found = (energy + 1e-30 * energy.max()).clamp(min=1e-300).log()
        scores[members] = rare_cluster_up(found)
    return scores


def targets(read: Read) -> Tensor:
    """Return p - r, r the row's part along its own slope: the target, where there is no noise."""
    slopes = read.known.slopes.double().flatten(1)
    unit = slopes.abs().amax(dim=1, keepdim=True)  # squares of 1e-30 and less would vanish
    slopes = torch.where(unit > 0, slopes / unit, 0.0)
    power = slopes.square().sum(dim=1)
    residuals = (read.rows / unit * slopes).sum(dim=1) / power
    return (read.known.probabilities.double() - residuals).nan_to_num(0.5, 0.5, 0.5)


READINGS: Mapping[str, Callable[[Read], Tensor]] = {
    "norm": lambda read: norm(read.rows),
    "spectral": lambda read: spectral(read.rows),
    "residual_energy": lambda read: residual_energy(read.rows),
    "off_the_common_line": off_the_common_line,
    "across_the_gap": across_the_gap,
    "informed": lambda read: informed(read.rows, read.known),
    "targets": targets,
}


def _by_group(rows: Tensor, groups: Tensor) -> list[tuple[Tensor, Tensor]]:
    members = [torch.nonzero(groups == group).squeeze(1) for group in torch.unique(groups)]
    return [(rows[of_group], of_group) for of_group in members]


# ---- a run ----


class Broken(NamedTuple):
    """The AUC that one reading reached."""

    first_batch: float
    """On the run's first batch alone."""
    last_batch: float
    """On its last one alone."""
    last_epoch: float
    """Of the last epoch's scores."""
    whole_run: float
    """Of each example's scores, added up over the epochs."""


class Attacked(NamedTuple):
    readings: dict[str, Broken]
    bound: float
    """The ledger's for the whole run, of the example with the largest account and for the peers
    whom the charges describe."""
    adversary: Adversary
    """The strongest adversary class for whom there is that bound."""
    standard_error: float
    """Of the AUC of scores that have nothing to do with the labels, over all training rows."""

    def beyond(self, bound: float, errors: float = 4.0) -> dict[str, float]:
        """Return the readings of whole epochs that exceed a bound by more than chance does.

        Either sign counts: a peer that knows a single label can turn a score round.
        """
        limit = bound + errors * self.standard_error
        largest = {
            name: max(found.last_epoch, 1 - found.last_epoch, found.whole_run, 1 - found.whole_run)
            for name, found in self.readings.items()
        }
        return {name: value for name, value in largest.items() if value > limit}


def attack(
    peer: str, example: Path, active: Sequence[str], passive: Sequence[str] = ()
) -> Attacked:
    """Let a peer go through a run, in this process."""
    owner = Sender()
    reader = _Reader(owner)
    parties = build_parties(
        example,
        [*active, STORE_SLOPES],
        [*passive, "adversary=null"],
        active_seen=owner,
        passive_seen=reader,
    )
    choose = PEERS[peer]
    if choose is not None:
        _replace_trainer(parties, choose)
    run_in_process(parties)
    return reader.result(parties)


def _replace_trainer(parties: Parties, choose: Callable[[Choice], Tensor]) -> None:
    build = parties.run._build_trainer

    def chosen(rows: AlignedRows) -> BottomTrainer:
        honest = build(rows)
        assert isinstance(honest, BottomTrainer)
        return ChosenTrainer(honest, choose)

    parties.run._build_trainer = chosen


class _Reader(PassiveRecording):
    """Scores every received gradient."""

    def __init__(self, owner: Sender) -> None:
        super().__init__()
        self._owner = owner
        self._epochs: list[int] = []
        self._positions: list[Tensor] = []
        self._scores: dict[str, list[Tensor]] = {name: [] for name in READINGS}

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        result = self._owner.latest
        assert result is not None
        assert result.slopes is not None
        positions = torch.from_numpy(batch.positions.copy())
        groups = _mixed(positions) % NUM_GROUPS
        known = KnownPredictions(result.probabilities, result.slopes)
        read = Read(received.flatten(1).double(), groups, known)
        self._epochs.append(batch.epoch)
        self._positions.append(positions)
        for name, reading in READINGS.items():
            self._scores[name].append(reading(read))

    def result(self, parties: Parties) -> Attacked:
        trainer = parties.session.lifecycle.trainer
        assert trainer is not None
        trained = torch.unique(torch.cat(self._positions))
        labels = trainer.labels_of(trained.numpy())
        positives = int(labels.sum())
        of_class = positives * (len(labels) - positives)
        found = {name: self._broken(name, trained, labels) for name in READINGS}
        bounds = parties.session.leak_bounds()
        bound = bounds.against(Adversary.CLASS_MEANS).max
        return Attacked(
            found,
            bound,
            next(p for p in Adversary if bounds.against(p).max == bound),
            math.sqrt((len(labels) + 1) / (12 * of_class)),
        )

    def _broken(self, name: str, trained: Tensor, labels: Tensor) -> Broken:
        scores = self._scores[name]
        numbers = torch.searchsorted(trained, torch.cat(self._positions))
        every = torch.cat(scores)
        epochs = np.repeat(self._epochs, [len(batch) for batch in scores])
        last = torch.from_numpy(epochs == epochs[-1])

        def measured(chosen: Tensor) -> float:
            sums = torch.zeros(len(trained), dtype=torch.float64)
            sums.index_add_(0, numbers[chosen], every[chosen])
            seen = torch.unique(numbers[chosen])
            return auc(sums[seen], labels[seen])

        of_first, of_last = torch.arange(len(scores[0])), len(every) - len(scores[-1])
        return Broken(
            auc(scores[0], labels[numbers[of_first]]),
            auc(scores[-1], labels[numbers[of_last:]]),
            measured(last),
            measured(torch.ones_like(last)),
        )
