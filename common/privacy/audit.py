"""Audits of a run: the leak AUC of every attack on every batch.

Both parties use them: the passive party on what it received, the active party on what it sent.
"""

import math
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import SOURCES, standardised
from splitveil.common.privacy.attacks import (
    ATTACKS,
    CUT,
    Attack,
    AttackName,
    BatchAttackName,
    GradientRows,
    Knowledge,
    KnownClasses,
    SideInformation,
)
from splitveil.common.privacy.leakage import has_both_classes, leak_auc_many
from splitveil.common.privacy.run_level import LayerScores, RunAudit, RunLevelLeak
from splitveil.common.privacy.tally import AttackTally

LeakByAttack = dict[str, dict[str, float]]
"""Layer name -> attack name -> leak AUC."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the audit sees of one step. Its tensors must not be changed afterwards."""

    epoch: int
    step: int
    gradients: Mapping[str, Tensor]
    """Layer name -> gradients, (batch, ...)."""
    labels: Tensor
    references: Mapping[str, Tensor] = field(default_factory=dict)
    """Layer name -> gradient of one positive; without one, ``cosine`` is not measured."""
    reference_row: int | None = None
    """Row of that positive; its cosine tells nothing and is left out."""
    positions: Tensor | None = None
    """Places of the rows in the common order, (batch,), each at most once; without them nothing is
    gathered over the run."""
    hint_rows: tuple[int, ...] = ()
    """Rows of positives that hint attacks know; they are left out of those attacks' AUC."""
    activations: Tensor | None = None
    """The passive party's, at the cut layer, (batch, ...); without them, attacks that use them are
    not measured."""
    references_are_clean: bool = True
    """Whether the references carry no noise, which may turn them around."""
    prepared: Mapping[str, GradientRows] = field(default_factory=dict)
    """Layer name -> the same gradients, prepared once for all audits of this observation."""

    def rows(self, layer: str) -> GradientRows:
        """Return the gradients of a layer, prepared for attacks."""
        found = self.prepared.get(layer)
        return GradientRows(self.gradients[layer]) if found is None else found


class BatchLeak(NamedTuple):
    """The leak AUCs of one batch."""

    epoch: int
    step: int
    leak: LeakByAttack
    random: float


class AttackSummary(TypedDict):
    """One attack on one layer over a run."""

    q95: float
    """The 95 % quantile over batches."""
    mean: float
    last_epoch: float
    """Mean over the batches of the last observed epoch."""
    random_q95: float
    """The 95 % quantile of random scores on the same batches: the floor."""


class AuditCounts(NamedTuple):
    """How many batches went which way."""

    observed: int
    skipped_one_class: int
    left_out: int


def pick_reference_row(labels: Tensor, seed: bytes, epoch: int, step: int) -> int | None:
    """Pick one positive of a batch, the same on both sides of the wire.

    Returns:
        Its row, or None if the batch has no positive.
    """
    positives = torch.nonzero(labels.detach().reshape(-1) == 1).reshape(-1)
    if not len(positives):
        return None
    return int(positives[_draw(b"reference row", seed, epoch, step) % len(positives)])


def pick_hint_rows(
    labels: Tensor, seed: bytes, epoch: int, step: int, num_hints: int
) -> tuple[int, ...]:
    """Pick positives of a batch that hint attacks know, the same on both sides of the wire.

    Returns:
        As many different rows as there are, at most ``num_hints``; fewer hints are the first ones.
    """
    if not num_hints:
        return ()
    positives = torch.nonzero(labels.detach().reshape(-1) == 1).reshape(-1).cpu().numpy()
    place = _draw(b"hint rows", seed, epoch, step) % 2**64
    order = np.random.default_rng(place).permutation(len(positives))
    return tuple(int(row) for row in positives[order[:num_hints]])


class BatchRecord:
    """What an audit found in a run's batches: how many there were, and a tally of each attack.

    Safe to read while another thread observes.

    Args:
        attacks: which attacks to run.
        every_steps: which steps of an epoch to audit.
    """

    def __init__(self, attacks: Sequence[AttackName], every_steps: int) -> None:
        self._attacks = tuple(name for name in ATTACKS if name in attacks)
        self._run_attacks = tuple(name for name in SOURCES if name in attacks)
        sources = {source for name in self._run_attacks for source in SOURCES[name]}
        self._scored = tuple(name for name in ATTACKS if name in {*self._attacks, *sources})
        self._every_steps = every_steps
        self._lock = threading.Lock()
        self._observed = 0
        self._tallies: dict[tuple[str, str], AttackTally] = {}
        self._skipped_one_class = 0
        self._left_out = 0
        self._latest: BatchLeak | None = None

    def wants(self, step: int) -> bool:
        """Tell whether a step of an epoch is to be audited at all."""
        return step % self._every_steps == 0

    def leave_out(self) -> None:
        """Count a batch that was to be audited and was not."""
        with self._lock:
            self._left_out += 1

    def summary(self) -> dict[str, dict[str, AttackSummary]]:
        """Summarise the run so far; an attack that was never measured is absent."""
        result: dict[str, dict[str, AttackSummary]] = {}
        with self._lock:
            for (layer, attack), tally in self._tallies.items():
                result.setdefault(layer, {})[attack] = AttackSummary(
                    q95=tally.quantile(0.95),
                    mean=tally.mean,
                    last_epoch=tally.epoch_mean(tally.last_epoch) or tally.mean,
                    random_q95=tally.random_quantile(0.95),
                )
        return result

    def epoch_means(self, epoch: int) -> LeakByAttack:
        """Return the mean leak AUCs over the batches of one epoch, absent where there is none.

        Known of the last 64 epochs in which an attack was measured.
        """
        result: LeakByAttack = {}
        with self._lock:
            for (layer, attack), tally in self._tallies.items():
                mean = tally.epoch_mean(epoch)
                if mean is not None:
                    result.setdefault(layer, {})[attack] = mean
        return result

    def worst_epochs(self) -> LeakByAttack:
        """Return each attack's mean leak AUC over the batches of the epoch in which it is largest.

        An attack that was never measured is absent.
        """
        worst: LeakByAttack = {}
        with self._lock:
            for (layer, attack), tally in self._tallies.items():
                worst.setdefault(layer, {})[attack] = tally.worst_epoch
        return worst

    @property
    def num_hints(self) -> int:
        """How many positives of each batch the attacks want to be told."""
        return max((ATTACKS[name].num_hints for name in self._scored), default=0)

    def latest(self) -> BatchLeak | None:
        """Return the leak AUCs of the batch audited last."""
        return self._latest

    def counts(self) -> AuditCounts:
        """Return how many batches were measured, had one class, and were left out."""
        with self._lock:
            return AuditCounts(self._observed, self._skipped_one_class, self._left_out)

    def _skip(self) -> None:
        """Count a batch of one class, which has no AUC."""
        with self._lock:
            self._skipped_one_class += 1

    def _remember(self, measured: BatchLeak) -> None:
        """Add a batch's figures; call it with the lock."""
        self._observed += 1
        for layer, attacks in measured.leak.items():
            for attack, value in attacks.items():
                tally = self._tallies.setdefault((layer, attack), AttackTally())
                tally.add(measured.epoch, value, measured.random)
        self._latest = measured

    def _recorded(self) -> dict[str, Any]:
        """Return a copy of all that was found; call it with the lock."""
        tallies: dict[str, dict[str, Any]] = {}
        for (layer, attack), tally in self._tallies.items():
            tallies.setdefault(layer, {})[attack] = tally.state_dict()
        return {
            "attacks": list(self._attacks),
            "observed": self._observed,
            "tallies": tallies,
            "skipped_one_class": self._skipped_one_class,
            "left_out": self._left_out,
            "latest": None if self._latest is None else self._latest._asdict(),
        }

    def _record_again(self, state: Mapping[str, Any]) -> None:
        """Go on from what was found by then; call it with the lock."""
        self._observed = state["observed"]
        self._tallies = {}
        for layer, attacks in state["tallies"].items():
            for attack, stored in attacks.items():
                self._tallies[layer, attack] = tally = AttackTally()
                tally.load_state_dict(stored)
        self._skipped_one_class = state["skipped_one_class"]
        self._left_out = state["left_out"]
        self._latest = None if state["latest"] is None else BatchLeak(**state["latest"])

    def _check_attacks(self, state: Mapping[str, Any]) -> None:
        if list(state["attacks"]) != list(self._attacks):
            raise ValueError(
                f"expected figures of {', '.join(self._attacks)}; "
                f"got those of {', '.join(state['attacks'])}"
            )


class LeakAudit(BatchRecord):
    """The leak AUC of every attack on every layer and batch of a run, and of the run as a whole.

    Args:
        attacks: which attacks to run.
        every_steps: which steps of an epoch to audit.
        num_examples: aligned examples of the run, for the attacks that gather over it.
    """

    def __init__(
        self,
        attacks: Sequence[AttackName] = ("norm", "cosine", "spectral"),
        every_steps: int = 1,
        num_examples: int = 0,
    ) -> None:
        super().__init__(attacks, every_steps)
        self._run = RunAudit(self._run_attacks, num_examples)

    def observe(self, observation: Observation) -> BatchLeak | None:
        """Attack one batch and remember the leak AUCs.

        Returns:
            None if the batch has one class only, or its step is not to be audited.
        """
        if not self.wants(observation.step):
            return None
        labels = observation.labels.detach().reshape(-1)
        if not has_both_classes(labels):
            self._skip()
            if self._run.attacks:  # what they gather has a use whatever the batch's labels
                self._gather(observation, self._score_layers(observation, labels), labels)
            return None
        scored = self._score_layers(observation, labels)
        self._gather(observation, scored, labels)
        random, leak = self._leak_aucs(random_scores(observation), scored, labels)
        measured = BatchLeak(observation.epoch, observation.step, leak, random)
        with self._lock:
            self._remember(measured)
        return measured

    def end_run(self) -> None:
        """Measure what was gathered up to the end of the last epoch."""
        self._run.close_epoch()

    def after_epoch(self, epoch: int) -> LeakByAttack:
        """Return the leak AUCs of what was gathered up to the end of an epoch."""
        return self._run.after_epoch(epoch)

    def run_level(self) -> dict[str, dict[str, RunLevelLeak]]:
        """Return the leak of the run so far: layer -> attack -> leak AUC with its interval."""
        return self._run.result()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that was measured and gathered so far."""
        with self._lock:
            return self._recorded() | {"run": self._run.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` left off.

        Raises:
            ValueError: the state is of other attacks, or of another number of examples.
        """
        self._check_attacks(state)
        with self._lock:
            self._run.load_state_dict(state["run"])
            self._record_again(state)

    def _score_layers(self, observation: Observation, labels: Tensor) -> dict[str, LayerScores]:
        return {
            layer: self._score(observation.rows(layer), observation, labels, layer)
            for layer in observation.gradients
        }

    def _score(
        self, gradients: GradientRows, observation: Observation, labels: Tensor, layer: str
    ) -> LayerScores:
        knowledge = Knowledge(
            positive_gradient=observation.references.get(layer),
            hints=gradients.gradients[list(observation.hint_rows)]
            if observation.hint_rows
            else None,
            activations=observation.activations,
        )
        scores: dict[BatchAttackName, Tensor] = {}
        left_out: dict[BatchAttackName, tuple[int, ...]] = {}
        for name in self._scored:
            attack = ATTACKS[name]
            if layer != CUT and not attack.reads_gradients:
                continue
            if SideInformation.CLASSES in attack.needs:
                crossed = cross_scores(attack, gradients.gradients, labels)
                if crossed is not None:
                    scores[name] = crossed
            elif _can_score(attack, knowledge):
                scores[name] = attack.score(gradients, knowledge)
            if SideInformation.HINTS in attack.needs:
                left_out[name] = observation.hint_rows[: attack.num_hints]
            elif name == "cosine" and observation.reference_row is not None:
                left_out[name] = (observation.reference_row,)
        top = gradients.top if "spectral" in self._scored else None
        noisy_reference = None if observation.references_are_clean else knowledge.positive_gradient
        return LayerScores(scores, left_out, top, noisy_reference)

    def _gather(
        self, observation: Observation, scored: Mapping[str, LayerScores], labels: Tensor
    ) -> None:
        if observation.positions is not None:
            self._run.add(observation.epoch, observation.positions, labels, scored)

    def _leak_aucs(
        self, random: Tensor, scored: Mapping[str, LayerScores], labels: Tensor
    ) -> tuple[float, LeakByAttack]:
        """Measure random scores and all attacks on all layers at once."""
        measured = [
            (layer, name, found)
            for layer, found in scored.items()
            for name in self._attacks
            if name in found.scores
        ]
        leak: LeakByAttack = {layer: {} for layer in scored}
        found_scores = [found.scores[name] for _, name, found in measured]
        device = found_scores[0].device if found_scores else random.device
        scores = torch.stack([random.to(device), *found_scores])
        kept = np.ones(scores.shape, dtype=np.bool_)
        for number, (_, name, found) in enumerate(measured, start=1):
            kept[number, list(found.left_out.get(name, ()))] = False
        of_random, *values = leak_auc_many(scores, labels, torch.from_numpy(kept)).tolist()
        for (layer, name, _), value in zip(measured, values, strict=True):
            if not math.isnan(value):  # else the attack was told the only positives
                leak[layer][name] = value
        return of_random, leak


def _can_score(attack: Attack, knowledge: Knowledge) -> bool:
    available = {
        SideInformation.POSITIVE_GRADIENT: knowledge.positive_gradient is not None,
        SideInformation.HINTS: len(knowledge.hints) >= attack.num_hints
        if knowledge.hints is not None
        else False,
        SideInformation.ACTIVATIONS: knowledge.activations is not None,
    }
    return all(available.get(need, True) for need in attack.needs)


def cross_scores(attack: Attack, gradients: Tensor, labels: Tensor) -> Tensor | None:
    """Score each half of a batch knowing the labels of the other half.

    The AUC of scores that know nothing then strays further from 1/2 than that of random ones, by
    the root of 2: what moves one half by chance moves the other the same way.

    Returns:
        Scores, standardised within the halves, which hold as many of each class; None where a
        class has fewer than two examples.
    """
    positive = (labels == 1).to(gradients.device)
    if int(positive.sum()) < 2 or int((~positive).sum()) < 2:
        return None
    place = torch.where(positive, positive.cumsum(0), (~positive).cumsum(0))
    scores = gradients.new_empty(len(labels), dtype=torch.float64)
    for half in (place % 2 == 0, place % 2 == 1):
        classes = KnownClasses(gradients[~half & ~positive], gradients[~half & positive])
        found = attack.score(gradients[half], Knowledge(classes=classes))
        scores[half] = standardised(found).to(scores.device)
    return scores


def random_scores(observation: Observation) -> Tensor:
    """Draw scores that know nothing, from the batch's place alone: an audit can be repeated."""
    seed = _draw(b"random scores", b"", observation.epoch, observation.step)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(observation.labels.numel(), generator=generator, dtype=torch.float64)


def _draw(purpose: bytes, seed: bytes, epoch: int, step: int) -> int:
    message = b"splitveil audit " + purpose + struct.pack("<qq", epoch, step) + seed
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little", signed=True)
