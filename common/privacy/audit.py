"""Audits of a run: the leak AUC of every attack on every batch, and of the run as a whole.

Both parties use them: the passive party on the gradients that it received, the active party on the
gradients that it sent.

With more than two classes, an attack is represented by the leak AUC of its worst pair: the two
classes that it separates best. It is never below the leak AUC of the worst class against the
rest, and it is the figure that the ledger bounds. The largest of several figures is raised by
chance, the more so the fewer examples a class has in a batch; random scores are measured in the
same way for comparison.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from splitveil.common.privacy.accumulation import LatestScores
from splitveil.common.privacy.attacks import ATTACKS, CUT, RUN_ATTACKS, Attack
from splitveil.common.privacy.beyond_features import Covariates, measure_beyond_features
from splitveil.common.privacy.figures import (
    BatchCounts,
    BatchFigures,
    BeyondFigures,
    ClassFigures,
    LeakFigures,
    NumberLeak,
)
from splitveil.common.privacy.leakage import Score
from splitveil.common.privacy.number_attacks import (
    BATCH_ATTACKS,
    COMPARABLE,
    GradientSums,
    LabelNumbers,
)
from splitveil.common.privacy.observation import (
    TWO_CLASSES,
    AttackScores,
    Clues,
    LabelClasses,
    LayerScores,
    Observation,
    pick_clues,
    random_scores,
    score_batch,
)
from splitveil.common.privacy.run_level import FeaturesOf, RunAudit
from splitveil.common.privacy.tally import AttackTally, MultiClassTally, by_layer

LeakByAttack = dict[str, dict[str, float]]  # layer name -> attack name -> leak AUC


class AuditedBatch(NamedTuple):
    epoch: int
    step: int
    leak: LeakByAttack
    random: float

    def mirrored(self) -> "AuditedBatch":
        """Return it with max(AUC, 1 - AUC), unlike figures of ``convention: paper``."""
        leak = {
            layer: {attack: max(value, 1 - value) for attack, value in attacks.items()}
            for layer, attacks in self.leak.items()
        }
        return self._replace(leak=leak, random=max(self.random, 1 - self.random))


class LeakAudit:
    """The leak AUC of every attack on every layer and batch of a run, and of the run as a whole.

    Attacks that accumulate need ``num_examples``, the aligned ones. ``labels`` decide how attacks
    are measured; those on numbers are always the same. ``keeps_scores`` keeps each example's latest
    scores at the cut layer, too.
    """

    def __init__(
        self,
        attacks: Sequence[str] = ("norm", "cosine", "spectral"),
        num_examples: int = 0,
        labels: LabelClasses | LabelNumbers = TWO_CLASSES,
        custom: Mapping[str, Attack] = MappingProxyType({}),
        *,
        keeps_scores: bool = False,
        convention: Literal["leak", "paper"] = "leak",
    ) -> None:
        self._labels = labels
        table = {**ATTACKS, **custom}
        self.has_numbers = isinstance(labels, LabelNumbers)
        if self.has_numbers:
            table, attacks = BATCH_ATTACKS, tuple(BATCH_ATTACKS)
        self._is_plain = convention == "paper" and not labels.is_multi_class
        self._attacks = tuple(name for name in table if name in attacks)
        run_attacks = tuple(name for name in RUN_ATTACKS if name in attacks)
        scored = {*self._attacks, *(of for name in run_attacks for of in RUN_ATTACKS[name].sources)}
        self._scored = {name: attack for name, attack in table.items() if name in scored}
        self._lock = threading.Lock()
        self._observed = 0
        self._tallies: dict[tuple[str, str], AttackTally] = {}
        self._skipped_one_class = 0
        self._left_out = 0
        self._left_out_lock = threading.Lock()  # the training must not wait for the other one
        self._latest: AuditedBatch | None = None
        self.run = (
            GradientSums(num_examples)
            if isinstance(labels, LabelNumbers)
            else RunAudit(run_attacks, num_examples, labels)
        )
        """The attacks over the run."""
        kept = COMPARABLE if self.has_numbers else self._attacks
        self._latest_scores = LatestScores(
            kept if keeps_scores else (), num_examples, standardises=not self.has_numbers
        )
        self._by_class: dict[tuple[str, str], MultiClassTally] = {}

    def leave_out(self) -> None:
        with self._left_out_lock:
            self._left_out += 1

    def summary(self) -> dict[str, dict[str, BatchFigures]]:
        """Summarise the run so far; an attack that was never measured is absent."""
        with self._lock:
            return by_layer(
                (
                    layer,
                    attack,
                    BatchFigures(
                        tally.quantile(0.95),
                        tally.mean,
                        tally.epoch_mean(tally.last_epoch) or tally.mean,
                        tally.random_quantile(0.95),
                    ),
                )
                for layer, attack, tally in self._measured()
            )

    def epoch_means(self, epoch: int) -> LeakByAttack:
        """Return the means over one epoch's batches, of the last 64; an attack may be absent."""
        with self._lock:
            return by_layer(
                (layer, attack, mean)
                for layer, attack, tally in self._measured()
                if (mean := tally.epoch_mean(epoch)) is not None
            )

    def worst_epochs(self) -> LeakByAttack:
        """Return each attack's mean leak AUC in its worst epoch; absent if never measured."""
        with self._lock:
            return by_layer(
                (layer, attack, tally.worst_epoch) for layer, attack, tally in self._measured()
            )

    def latest(self) -> AuditedBatch | None:
        return self._latest

    def counts(self) -> BatchCounts:
        with self._lock:
            return BatchCounts(self._observed, self._skipped_one_class, self._left_out)

    @property
    def num_hints(self) -> int:
        """The number of positives of each batch that the attacks need to know."""
        return max((attack.num_hints for attack in self._scored.values()), default=0)

    def clues(
        self, observation: Observation, seed: bytes, sources: Mapping[str, Tensor]
    ) -> dict[int, Clues]:
        """Pick the attacks' clues about each target class, the same on both sides of the wire.

        References are taken from ``sources``, layer -> gradients; clues in the observation are not
        read.
        """
        return {
            target: pick_clues(observation, sources, seed, self.num_hints, target)
            for target in self._labels.targets
        }

    def observe(self, observation: Observation) -> AuditedBatch | None:
        """Attack one batch and remember the leak AUCs; None if it has one class.

        Raises ValueError if a label is not the index of a class, or a score is NaN.
        """
        labels = self._labels.indices(observation.labels)
        # A batch of a single class, too: a checkpoint, and so the peer, waits for this.
        layers = score_batch(self._scored, self._labels.targets, observation, labels)
        if observation.positions is not None:
            if CUT in layers:
                with self._lock:
                    self._latest_scores.add(observation.positions, layers[CUT].scores)
            self.run.add(
                observation.epoch, observation.positions, labels, layers, observation.activations
            )
        measured = self._measure(observation, layers, labels)
        with self._lock:
            if not self._labels.is_mixed(labels):
                self._skipped_one_class += 1
                return None
            self._observed += 1
            self._latest = measured
            for layer, attacks in measured.leak.items():
                for attack, value in attacks.items():
                    self._tallies[layer, attack].add(measured.epoch, value, measured.random)
        return measured

    def classes(self) -> dict[str, dict[str, ClassFigures]]:
        """Return layer -> attack -> its figures class by class; empty for two classes."""
        if not self._labels.is_multi_class:
            return {}
        with self._lock:
            return by_layer(
                (layer, attack, self._by_class[layer, attack].result(self._labels.names))
                for layer, attack, _ in self._measured()
            )

    def figures(
        self, covariates: Covariates | None = None, features: FeaturesOf | None = None
    ) -> LeakFigures:
        """Return everything measured, also beyond features where there are covariates."""
        if isinstance(self.run, GradientSums):
            with self._lock:
                found = {
                    attack: NumberLeak(
                        tally.mean,
                        tally.quantile(0.95),
                        tally.epoch_mean(tally.last_epoch),
                        tally.random_mean,
                    )
                    for _, attack, tally in self._measured()
                }
            numbers = self.run.numbers(found, self._latest_scores.result(), covariates)
            return LeakFigures(of_numbers=numbers, counts=self.counts())
        # Side by side, as a run's end waits for both.
        with ThreadPoolExecutor(1) as executor:
            measured = None
            if covariates is not None:
                measured = executor.submit(self.beyond_features, covariates)
            leak, by_class = self.run.result(features)
            beyond = None if measured is None else measured.result()
        return LeakFigures(
            beyond=beyond,
            batches=self.summary(),
            worst_epoch=self.worst_epochs(),
            run_level=leak,
            by_class=self.classes(),
            run_level_by_class=by_class,
            counts=self.counts(),
        )

    def beyond_features(self, covariates: Covariates) -> BeyondFigures | None:
        """Measure attacks on the cut beyond features; None if too few rows of a class are known."""
        know_classes = [name for name, attack in self._scored.items() if attack.needs_classes]
        return measure_beyond_features(
            covariates,
            self._latest_scores.result(),
            self.run.scores(CUT),
            self.run.classes,
            know_classes,
        )

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "attacks": list(self._attacks),
                "observed": self._observed,
                "tallies": _states(self._tallies),
                "skipped_one_class": self._skipped_one_class,
                "left_out": self._left_out,
                "latest": None if self._latest is None else self._latest._asdict(),
                "run": self.run.state_dict(),
                "latest_scores": self._latest_scores.state_dict(),
                "num_classes": self._labels.num_classes,
                "by_class": _states(self._by_class),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; ValueError for other attacks, classes or number of examples."""
        if list(state["attacks"]) != list(self._attacks):
            raise ValueError(
                f"expected figures of {', '.join(self._attacks)}; "
                f"got those of {', '.join(state['attacks'])}"
            )
        stored, expected = state["num_classes"], self._labels.num_classes
        if stored != expected:
            raise ValueError(f"expected figures of {expected} classes, got those of {stored}")
        with self._lock:
            self.run.load_state_dict(state["run"])
            self._latest_scores.load_state_dict(state["latest_scores"])
            self._observed = state["observed"]
            self._skipped_one_class = state["skipped_one_class"]
            self._left_out = state["left_out"]
            latest = state["latest"]
            self._latest = None if latest is None else AuditedBatch(**latest)
            self._tallies, self._by_class = {}, {}
            for layer, attack, of_attack in _stored(state["tallies"]):
                self._tallies[layer, attack] = AttackTally(self._labels.floor)
                self._tallies[layer, attack].load_state_dict(of_attack)
            for layer, attack, of_attack in _stored(state["by_class"]):
                self._by_class[layer, attack] = MultiClassTally(expected)
                self._by_class[layer, attack].load_state_dict(of_attack)

    def _measured(self) -> Iterator[tuple[str, str, AttackTally]]:
        """Yield layer, attack and tally of each measurement; the caller holds the lock."""
        for (layer, attack), tally in self._tallies.items():
            if tally.batches:
                yield layer, attack, tally

    def _measure(
        self, observation: Observation, layers: Mapping[str, LayerScores], labels: Tensor
    ) -> AuditedBatch:
        places = [
            (layer, name)
            for layer in layers
            for name in self._attacks
            if name in layers[layer].scores
        ]
        scores = [self._scores_of(layers[layer].scores[name]) for layer, name in places]
        random = [Score(random_scores(observation), (), of) for of in self._labels.of_scores(1)]
        (of_random, *worst), by_class = self._labels.measure(
            [random, *scores], labels, is_plain=self._is_plain
        )
        leak: LeakByAttack = {layer: {} for layer in layers}
        with self._lock:
            # The size of a state must not depend on what can be measured, and so on labels.
            for place in product(layers, self._attacks):
                if place not in self._tallies:
                    self._tallies[place] = AttackTally(self._labels.floor)
                    if by_class is not None:
                        self._by_class[place] = MultiClassTally(self._labels.num_classes)
            for number, ((layer, attack), value) in enumerate(zip(places, worst, strict=True), 1):
                if math.isnan(value):  # the attack knew too little, or every row of a class
                    continue
                leak[layer][attack] = value
                if by_class is not None:
                    self._by_class[layer, attack].add(by_class.of(number), by_class.of(0))
        return AuditedBatch(observation.epoch, observation.step, leak, of_random)

    def _scores_of(self, attack: AttackScores) -> list[Score]:
        by_target, left_out = attack
        of_scores = self._labels.of_scores(len(by_target))
        return [
            Score(values, () if self._is_plain else known, of_class)
            for values, known, of_class in zip(by_target, left_out, of_scores, strict=True)
            if values is not None
        ]


def _states(
    tallies: Mapping[tuple[str, str], AttackTally | MultiClassTally],
) -> dict[str, dict[str, Any]]:
    return by_layer((*place, tally.state_dict()) for place, tally in tallies.items())


def _stored(states: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for layer, attacks in states.items():
        for attack, state in attacks.items():
            yield layer, attack, state
