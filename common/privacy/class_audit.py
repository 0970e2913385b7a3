"""Audits of a run with several classes: every attack, each class against the rest and in pairs.

The figure that stands for an attack is the leak AUC of its worst pair: of the two classes that it
tells apart best. It is never below that of the worst class against the rest, and it is what the
ledger bounds. The largest of several figures rises by chance, the more so the fewer examples a
class has in a batch; random scores, which stand beside it, are measured in the same way.

An attack that needs no label scores a batch once for all classes. One that is told something of the
positives has a score for each class, with that class for the positives: for ``cosine`` a gradient
of each, for the hint attacks some of each, for the class oracles the class against the rest. A pair
is then judged by either class's score. What does not depend on labels (rows in float64, their
norms, their top direction) is computed once for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.attacks import (
    ATTACKS,
    CUT,
    AttackName,
    BatchAttackName,
    GradientRows,
    Knowledge,
    SideInformation,
)
from splitveil.common.privacy.audit import (
    BatchLeak,
    BatchRecord,
    LeakByAttack,
    Observation,
    cross_scores,
    pick_hint_rows,
    pick_reference_row,
    random_scores,
)
from splitveil.common.privacy.class_aucs import ClassAucs, Floats, Places, class_aucs
from splitveil.common.privacy.class_run import (
    ClassRunAudit,
    ClassRunLeak,
    ClassScores,
    LayerClassScores,
    joined,
)
from splitveil.common.privacy.leakage import OneClass
from splitveil.common.privacy.run_level import RunLevelLeak

_LABEL_FREE = frozenset({SideInformation.POSITIVES_ARE_FEWER, SideInformation.ACTIVATIONS})


@dataclass(frozen=True, slots=True)
class ClassObservation(Observation):
    """What the audit sees of one step of a run with several classes; labels are their places."""

    class_rows: Sequence[int | None] = ()
    """For each class the row whose gradient ``cosine`` is told; None where it has no examples."""

    class_references: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)
    """Layer name -> for each class the gradient of that row."""

    class_hint_rows: Sequence[tuple[int, ...]] = ()
    """For each class the rows that hint attacks know."""


class ClassLeak(TypedDict):
    """One attack on one layer, class by class: means over the batches of a run."""

    worst_pair: list[str]
    """The two classes told apart best on average."""

    worst_pair_auc: float
    """Their leak AUC. At most the mean of the batches' worst pairs, which differ."""

    worst_pair_random: float
    """That of random scores on the same pair."""

    classes: dict[str, float]
    """Leak AUC of each class against the rest."""

    random: dict[str, float]
    """That of random scores."""


class ClassLeakAudit(BatchRecord):
    """The leak AUCs of every attack on every layer and batch of a run with several classes.

    Has what `LeakAudit` has, with the worst pair's figures.

    Args:
        class_names: in the order of their places.
        attacks: which attacks to run.
        every_steps: which steps of an epoch to audit.
        num_examples: aligned examples of the run, for the attacks that gather over it.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        attacks: Sequence[AttackName] = ("norm", "cosine", "spectral"),
        every_steps: int = 1,
        num_examples: int = 0,
    ) -> None:
        super().__init__(attacks, every_steps)
        self._names = tuple(class_names)
        self._run = ClassRunAudit(self._run_attacks, num_examples, self._names)
        self._by_class: dict[tuple[str, str], _ClassMeans] = {}

    def observe(self, observation: Observation) -> BatchLeak | None:
        """Attack one batch and remember the leak AUCs.

        Returns:
            None if the batch has one class only, or its step is not to be audited.
        """
        if not isinstance(observation, ClassObservation):
            raise TypeError("expected the observation of a run with several classes")
        if not self.wants(observation.step):
            return None
        labels = observation.labels.detach().reshape(-1)
        scored = {
            layer: self._score(observation.rows(layer), observation, labels, layer)
            for layer in observation.gradients
        }
        if observation.positions is not None:
            self._run.add(observation.epoch, observation.positions, labels, scored)
        places = labels.cpu().numpy().astype(np.int64)
        if len(np.unique(places)) < 2:
            self._skip()
            return None
        random = class_aucs(random_scores(observation).numpy(), places, len(self._names))
        measured: dict[tuple[str, str], ClassAucs] = {
            (layer, name): self._aucs(found.scores[name], places)
            for layer, found in scored.items()
            for name in self._attacks
            if name in found.scores
        }
        with self._lock:
            return self._note(observation, measured, random)

    def classes(self) -> dict[str, dict[str, ClassLeak]]:
        """Return what every attack told class by class: layer -> attack -> figures."""
        result: dict[str, dict[str, ClassLeak]] = {}
        with self._lock:
            for (layer, attack), found in self._by_class.items():
                result.setdefault(layer, {})[attack] = found.result(self._names)
        return result

    def observation(
        self,
        observation: Observation,
        seed: bytes,
        sources: Mapping[str, Tensor],
    ) -> ClassObservation:
        """Add what attacks are told of each class to an observation, the same on both sides.

        Args:
            observation: of one step, its labels the places of the classes.
            seed: from which both parties pick the same rows.
            sources: layer -> gradients from which references are taken.
        """
        epoch, step = observation.epoch, observation.step
        members = [observation.labels == place for place in range(len(self._names))]
        rows = [pick_reference_row(one, seed, epoch, step) for one in members]
        return ClassObservation(
            epoch,
            step,
            observation.gradients,
            observation.labels,
            references_are_clean=observation.references_are_clean,
            positions=observation.positions,
            activations=observation.activations,
            class_rows=rows,
            class_references={
                layer: [None if row is None else values[row] for row in rows]
                for layer, values in sources.items()
            },
            class_hint_rows=[
                pick_hint_rows(one, seed, epoch, step, self.num_hints) for one in members
            ],
        )

    def end_run(self) -> None:
        """Measure what was gathered up to the end of the last epoch."""
        self._run.close_epoch()

    def after_epoch(self, epoch: int) -> LeakByAttack:
        """Return the worst pairs' leak AUCs of what was gathered up to the end of an epoch."""
        return self._run.after_epoch(epoch)

    def run_level(
        self,
    ) -> tuple[dict[str, dict[str, RunLevelLeak]], dict[str, dict[str, ClassRunLeak]]]:
        """Return the leak of the run so far: that of the worst pairs, and class by class."""
        return self._run.result()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all that was measured and gathered so far."""
        with self._lock:
            by_class: dict[str, dict[str, Any]] = {}
            for (layer, attack), means in self._by_class.items():
                by_class.setdefault(layer, {})[attack] = means.state_dict()
            return self._recorded() | {
                "num_classes": len(self._names),
                "run": self._run.state_dict(),
                "by_class": by_class,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` left off.

        Raises:
            ValueError: the state is of other attacks or classes, or another number of examples.
        """
        self._check_attacks(state)
        if state.get("num_classes", 2) != len(self._names):
            raise ValueError(
                f"expected figures of {len(self._names)} classes, "
                f"got those of {state.get('num_classes', 2)}"
            )
        with self._lock:
            self._run.load_state_dict(state["run"])
            self._record_again(state)
            self._by_class = {}
            for layer, attacks in state["by_class"].items():
                for attack, stored in attacks.items():
                    self._by_class[layer, attack] = means = _ClassMeans(len(self._names))
                    means.load_state_dict(stored)

    def _score(
        self, gradients: GradientRows, observation: ClassObservation, labels: Tensor, layer: str
    ) -> LayerClassScores:
        scores: dict[BatchAttackName, ClassScores] = {}
        for name in self._scored:
            attack = ATTACKS[name]
            if layer != CUT and not attack.reads_gradients:
                continue
            if SideInformation.ACTIVATIONS in attack.needs and observation.activations is None:
                continue
            if attack.needs <= _LABEL_FREE:
                found = attack.score(gradients, Knowledge(activations=observation.activations))
                scores[name] = ClassScores([found], [()])
            else:
                scores[name] = self._score_classes(name, gradients, observation, labels, layer)
        top = gradients.top if "spectral" in self._scored else None
        references = observation.class_references.get(layer, ())
        noisy = () if observation.references_are_clean else references
        return LayerClassScores(scores, top, noisy)

    def _score_classes(
        self,
        name: BatchAttackName,
        gradients: GradientRows,
        observation: ClassObservation,
        labels: Tensor,
        layer: str,
    ) -> ClassScores:
        """Score a batch once for each class, which is taken for the positives."""
        attack = ATTACKS[name]
        scores: list[Tensor | None] = []
        left_out: list[tuple[int, ...]] = []
        for place in range(len(self._names)):
            found, told = None, tuple[int, ...]()
            if SideInformation.CLASSES in attack.needs:
                found = cross_scores(attack, gradients.gradients, (labels == place).long())
            elif SideInformation.HINTS in attack.needs:
                told = tuple(observation.class_hint_rows[place][: attack.num_hints])
                if len(told) == attack.num_hints:
                    hints = gradients.gradients[list(told)]
                    found = attack.score(gradients, Knowledge(hints=hints))
            else:
                row = observation.class_rows[place]
                reference = observation.class_references[layer][place]
                if row is not None and reference is not None:
                    told = (row,)
                    found = attack.score(gradients, Knowledge(positive_gradient=reference))
            scores.append(found)
            left_out.append(told)
        return ClassScores(scores, left_out)

    def _aucs(self, found: ClassScores, places: Places) -> ClassAucs:
        measured = []
        for place, (scores, told) in enumerate(zip(found.by_class, found.left_out, strict=True)):
            if scores is None:
                measured.append(ClassAucs.none(len(self._names)))
                continue
            kept = np.ones(len(places), dtype=np.bool_)
            kept[list(told)] = False
            values = scores.double().cpu().numpy()
            of_class = place if len(found.by_class) > 1 else None
            measured.append(class_aucs(values[kept], places[kept], len(self._names), of_class))
        return joined(measured, len(self._names))

    def _note(
        self,
        observation: ClassObservation,
        measured: Mapping[tuple[str, str], ClassAucs],
        random: ClassAucs,
    ) -> BatchLeak:
        leak: LeakByAttack = {layer: {} for layer in observation.gradients}
        for (layer, attack), aucs in measured.items():
            try:
                leak[layer][attack] = aucs.worst()
            except OneClass:  # the attack was told all there is of some class
                continue
            means = self._by_class.setdefault((layer, attack), _ClassMeans(len(self._names)))
            means.add(aucs.leak(), random.leak())
        found = BatchLeak(observation.epoch, observation.step, leak, random.worst())
        self._remember(found)
        return found


class _Means:
    """Sums of figures that some batches lack."""

    def __init__(self, *shape: int) -> None:
        self._sums, self._counts = np.zeros(shape), np.zeros(shape)

    def add(self, values: Floats) -> None:
        present = ~np.isnan(values)
        self._sums[present] += values[present]
        self._counts[present] += 1

    def means(self) -> Floats:
        with np.errstate(invalid="ignore"):
            means: Floats = self._sums / self._counts
        return means

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "sums": torch.from_numpy(self._sums.copy()),
            "counts": torch.from_numpy(self._counts.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums, self._counts = state["sums"].numpy().copy(), state["counts"].numpy().copy()


class _ClassMeans:
    """What one attack on one layer told of each class and pair, on average so far."""

    def __init__(self, num_classes: int) -> None:
        pairs, classes = (num_classes, num_classes), (num_classes,)
        self._means = {
            "pairs": _Means(*pairs),
            "classes": _Means(*classes),
            "random_pairs": _Means(*pairs),
            "random_classes": _Means(*classes),
        }

    def add(self, leak: ClassAucs, random: ClassAucs) -> None:
        values = (leak.pairs, leak.one_vs_rest, random.pairs, random.one_vs_rest)
        for means, value in zip(self._means.values(), values, strict=True):
            means.add(value)

    def result(self, names: Sequence[str]) -> ClassLeak:
        pairs, classes, random_pairs, random = (one.means() for one in self._means.values())
        worst = ClassAucs(pairs, classes).worst_pair()
        return ClassLeak(
            worst_pair=[names[place] for place in worst],
            worst_pair_auc=float(pairs[worst]),
            worst_pair_random=float(random_pairs[worst]),
            classes=dict(zip(names, classes.tolist(), strict=True)),
            random=dict(zip(names, random.tolist(), strict=True)),
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._means.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, one in self._means.items():
            one.load_state_dict(state[name])
