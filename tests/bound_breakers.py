"""Attacks that exceed the ledger's bound, each by a peer that does not know any label.

They show for which peers a bound does not hold, and `docs/attacks.md` names them.

One peer follows the protocol and keeps what it receives. Fresh ``marvell`` gives its noise across
the gap of the class means to one class only, which `residual_energy` of the library sees.

Another peer chooses its activations: one long random vector for each of four groups of rows. The
top model is then certain about each group, rightly or wrongly. A row with the label of which the
model is certain has almost no gradient, and a row with the other label has a full one, in a
direction that all rows of its group share. Noise along a line hides neither, at any strength: noise
of an example does not lie along the gradient (`off_the_common_line`), and noise along the gap of
the class means leaves everything across the gap bare (`across_the_gap`).

The sign of every score follows from the positives being the smaller class.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment import AlignmentEngine
from splitveil.common.privacy.attacks import residual_energy
from splitveil.common.privacy.covers import Covers
from splitveil.common.privacy.leakage import auc
from splitveil.common.privacy.residual_energy import rare_cluster_up
from splitveil.common.run.course import Batch
from splitveil.common.run.messages import Activation
from tests.peers import InProcessPeer
from tests.runs import PassiveRecording, build_parties, run_in_process

NUM_GROUPS = 4
LENGTH = 1e4
"""Of an activation: enough to saturate any top model that is trained from its usual start."""

AttackName = Literal["residual_energy", "off_the_common_line", "across_the_gap"]
Score = Callable[[Tensor], Tensor]


class Broken(NamedTuple):
    """The AUC that one peer reached without labels, and the ledger's figures."""

    first_batch: float
    """AUC on the run's first batch alone."""
    last_batch: float
    """AUC on its last one alone."""
    whole_run: float
    """AUC of each example's scores, added up over the epochs."""
    bound: float
    """The ledger's for the whole run, for the peers whom its charges describe, of the example with
    the largest account."""


def off_the_common_line(rows: Tensor) -> Tensor:
    """Return the sine between each row and the line on which most rows of its group lie."""
    scores = rows.new_zeros(len(rows))
    for members in _groups(len(rows)):
        lengths = rows[members].norm(dim=1, keepdim=True)
        units = torch.where(lengths > 0, rows[members] / lengths, 0.0)
        # A row on the line, and not the first singular vector, which lies between two lines.
        line = units[(units @ units.T).abs().median(dim=1).values.argmax()]
        scores[members] = (1 - (units @ line).square()).clamp(min=0).sqrt()
    return scores


def across_the_gap(rows: Tensor) -> Tensor:
    """Return the log energy of each row outside the batch's strongest direction, by group."""
    _, _, directions = torch.linalg.svd(rows, full_matrices=False)
    across = rows - torch.outer(rows @ directions[0], directions[0])
    scores = rows.new_zeros(len(rows))
    for members in _groups(len(rows)):
        scores[members] = rare_cluster_up(_log_energy(across[members]))
    return scores


ATTACKS: dict[AttackName, Score] = {
    "residual_energy": residual_energy,
    "off_the_common_line": off_the_common_line,
    "across_the_gap": across_the_gap,
}


def run_attack(
    attack: AttackName, example: Path, active: Sequence[str], passive: Sequence[str] = ()
) -> Broken:
    """Let the peer of an attack go through a run, in this process.

    Args:
        attack: ``residual_energy`` has an honest peer; the peers of the others choose activations.
        example: folder of the settings.
        active: overrides of the active party's settings.
        passive: overrides of the passive party's settings.
    """
    observer = _Observer(ATTACKS[attack])
    parties = build_parties(example, active, passive, passive_seen=observer)
    run_in_process(parties, InProcessPeer if attack == "residual_energy" else _ChoosesActivations)
    trainer = parties.session.trainer
    assert trainer is not None
    positions = [batch.numpy() for batch in observer.positions]
    batches = [
        auc(scores, trainer.labels_of(rows))
        for scores, rows in zip(observer.scores, positions, strict=True)
    ]
    trained, numbers = np.unique(np.concatenate(positions), return_inverse=True)
    sums = torch.zeros(len(trained), dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(numbers), torch.cat(observer.scores))
    bound = parties.session.leak_bounds().against(Covers.CLASS_MEANS).leak_auc.max
    return Broken(batches[0], batches[-1], auc(sums, trainer.labels_of(trained)), bound)


class _Observer(PassiveRecording):
    """Scores every received gradient."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self._score = score
        self.positions: list[Tensor] = []
        self.scores: list[Tensor] = []

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.positions.append(torch.from_numpy(batch.positions.copy()))
        self.scores.append(self._score(received.flatten(1).double()))


class _ChoosesActivations(InProcessPeer):
    """Sends the groups' vectors instead of the bottom model's activations."""

    def __init__(self, session: ActiveSession, engine: AlignmentEngine) -> None:
        super().__init__(session, engine)
        shape = (NUM_GROUPS, *session.contract.aggregate_shape)
        vectors = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        lengths = vectors.flatten(1).norm(dim=1).reshape(-1, *[1] * (vectors.dim() - 1))
        self._vectors = LENGTH * vectors / lengths

    def send_activation(self, activation: Activation) -> None:
        chosen = torch.empty_like(activation.values)
        for vector, members in zip(self._vectors, _groups(len(chosen)), strict=True):
            chosen[members] = vector.to(chosen.dtype)
        super().send_activation(Activation(activation.batch, chosen))


def _groups(num_rows: int) -> list[slice]:
    """Return the rows of a batch that send the same vector, for each group."""
    ends = [group * num_rows // NUM_GROUPS for group in range(NUM_GROUPS + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _log_energy(rows: Tensor) -> Tensor:
    energy = rows.square().sum(dim=1)
    return (energy + 1e-30 * energy.max()).clamp(min=1e-300).log()
