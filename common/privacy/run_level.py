"""Measures the leak of a whole run by attacks that accumulate over its epochs.

``accumulated_spectral`` keeps one sum per example for all classes, ``accumulated_cosine`` one for
each target class, because it knows a reference of each class. The combining attacks fit each
target class in turn against the rest, on the same hints. The attacks on the last activations belong
to the cut layer.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy import leakage
from splitveil.common.privacy.accumulation import GatheredLayer, RunScores, combine_with_hints
from splitveil.common.privacy.adjusted_auc import advantage_over, operating_points
from splitveil.common.privacy.attacks import CUT, RUN_ATTACKS
from splitveil.common.privacy.figures import ClassFigures, RunFigures
from splitveil.common.privacy.final_attacks import LastActivations, final_scores
from splitveil.common.privacy.observation import TWO_CLASSES, LabelClasses, LayerScores
from splitveil.common.privacy.tally import REMEMBERED_EPOCHS, by_layer
from splitveil.common.text.values import as_number

SEED = 0  # seed of hints and bootstrap: the same scores always give the same figures

UNSEEN = -1  # label of an example that no batch has held so far

FeaturesOf: TypeAlias = Callable[[npt.NDArray[np.int64]], Tensor | None]
"""Positions in the common order -> the values of their features, (rows, values), or None."""


class RunAudit:
    """Accumulates scores over a run, and measures them. Safe to use from several threads.

    Keeps, per layer, at most 16 bytes per example and attack (and target class), a label for each,
    and the last activations for attacks on them.
    """

    def __init__(
        self,
        attacks: Sequence[str],
        num_examples: int,
        classes: LabelClasses = TWO_CLASSES,
    ) -> None:
        self.attacks = tuple(attacks)
        self._num_examples = num_examples
        self.classes = classes
        self._lock = threading.Lock()
        size = num_examples if attacks else 0
        self._labels = torch.full((size,), UNSEEN, dtype=torch.int8)  # a byte each: runs are long
        self._layers: dict[str, GatheredLayer] = {}
        self._final = tuple(attack for attack in self.attacks if RUN_ATTACKS[attack].is_final)
        self._last = LastActivations(num_examples)
        self._epoch: int | None = None
        self._after_epoch: dict[int, dict[str, dict[str, float]]] = {}

    def add(
        self,
        epoch: int,
        positions: Tensor,
        labels: Tensor,
        layers: Mapping[str, LayerScores],
        activations: Tensor | None = None,
    ) -> None:
        """Add the scores of one batch, with class indices; epochs do not go back.

        Without activations at the cut, attacks on the last ones find nothing.
        """
        if not self.attacks:
            return
        with self._lock:
            self._enter(epoch)
            rows = positions.cpu()
            self._labels.numpy()[rows.numpy()] = labels.cpu().numpy()
            for name, layer in layers.items():
                if name not in self._layers:
                    self._layers[name] = self._new_layer()
                self._layers[name].add(epoch, rows, layer)
            if self._final and activations is not None:
                self._last.add(rows, activations)

    def close_epoch(self) -> None:
        """Measure the sums after the last epoch; for earlier epochs this is done automatically."""
        with self._lock:
            self._close_epoch()

    def after_epoch(self, epoch: int) -> dict[str, dict[str, float]]:
        """Return layer -> attack -> figure of the sums after one of the last epochs."""
        with self._lock:
            return self._after_epoch.get(epoch, {})

    @property
    def needs_activations(self) -> bool:
        """True if an attack looks at the last activations."""
        return bool(self._final)

    def result(
        self, features: FeaturesOf | None = None
    ) -> tuple[dict[str, dict[str, RunFigures]], dict[str, dict[str, ClassFigures]]]:
        """Measure every attack over the run so far, model completion on features as well.

        Returns layer -> attack -> figures, and for more than two classes those by class. An attack
        is absent without two classes. Intervals are of the worst pair.
        """
        with self._lock:
            all_scores = list(self._scores(hinted=True))
            positions, _ = self._last.seen()  # batches may still be added
        figures: dict[str, dict[str, RunFigures]] = {}
        by_class: dict[str, dict[str, ClassFigures]] = {}
        values = features(positions) if self._final and features else None
        for layer, attack, scores in all_scores:
            aucs = self._aucs(scores)
            final = RUN_ATTACKS[attack].is_final and RUN_ATTACKS[attack].num_hints
            alone = (
                self._final_scores(attack, positions, values)
                if final and values is not None
                else None
            )
            leak = run_level_leak(scores, aucs, self._labels.numpy(), self.classes, alone)
            if leak is None:
                continue
            figures.setdefault(layer, {})[attack] = leak
            if self.classes.is_multi_class:
                names, leaks = self.classes.names, aucs.leak().one_vs_rest.tolist()
                by_class.setdefault(layer, {})[attack] = ClassFigures(
                    tuple(names[index] for index in aucs.worst_pair()),
                    classes=dict(zip(names, map(as_number, leaks), strict=True)),
                )
        return figures, by_class

    def scores(self, layer: str) -> dict[str, list[RunScores]]:
        """Return attack -> its scores of one layer, one for all classes or one per target."""
        with self._lock:
            return {
                attack: scores
                for of_layer, attack, scores in self._scores(hinted=True)
                if of_layer == layer
            }

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "labels": self._labels.clone(),
                "layers": {name: layer.state_dict() for name, layer in self._layers.items()},
                "last": self._last.state_dict(),
                "epoch": self._epoch,
                "after_epoch": {str(epoch): aucs for epoch, aucs in self._after_epoch.items()},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["labels"].shape != self._labels.shape:
            raise ValueError(
                f"expected scores of {len(self._labels)} examples, got {len(state['labels'])}"
            )
        layers = {name: self._new_layer() for name in state["layers"]}
        for name, layer in layers.items():
            layer.load_state_dict(state["layers"][name])
        with self._lock:
            self._labels = state["labels"].clone()
            self._layers = layers
            self._last.load_state_dict(state["last"])
            self._epoch = state["epoch"]
            self._after_epoch = {int(epoch): aucs for epoch, aucs in state["after_epoch"].items()}

    def _new_layer(self) -> GatheredLayer:
        return GatheredLayer(self.attacks, self._num_examples, self.classes)

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._close_epoch()
            self._epoch = epoch

    def _figures(self) -> Iterator[tuple[str, str, float]]:
        """Yield layer, attack and figure of the sums so far; NaN where there is none."""
        for layer, attack, scores in self._scores(hinted=False):
            yield layer, attack, float(self._aucs(scores).worst())

    def _close_epoch(self) -> None:
        if self._epoch is None:
            return
        self._after_epoch[self._epoch] = by_layer(
            one for one in self._figures() if not math.isnan(one[-1])
        )
        for earlier in sorted(self._after_epoch)[:-REMEMBERED_EPOCHS]:
            del self._after_epoch[earlier]

    def _labels_at(self, positions: npt.NDArray[np.int64]) -> leakage.ClassIndices:
        return self._labels.numpy()[positions].astype(np.int64)

    def _aucs(self, scores: Sequence[RunScores]) -> leakage.PairAucs:
        return aucs_of(scores, self._labels.numpy(), self.classes)

    def _scores(self, *, hinted: bool) -> Iterator[tuple[str, str, list[RunScores]]]:
        """Yield the scores of examples with labels unknown to an attack: one, or by target."""
        for layer, gathered in self._layers.items():
            for attack, sums in gathered.sums.items():
                yield layer, attack, [one.result() for one in sums]
            if hinted:
                for attack in gathered.combining:
                    yield layer, attack, self._combined(attack, gathered)
        if hinted:
            for attack in self._final:
                yield CUT, attack, self._final_scores(attack, *self._last.seen())

    def _final_scores(
        self, attack: str, positions: npt.NDArray[np.int64], rows: Tensor
    ) -> list[RunScores]:
        """Run an attack on the last activations, or on features, with the same known labels."""
        labels = self._labels_at(positions)
        return final_scores(attack, positions, rows, labels, self.classes, SEED)

    def _combined(self, attack: str, gathered: GatheredLayer) -> list[RunScores]:
        """Fit a combining attack to each target class against the rest."""
        seen = np.flatnonzero(self._labels.numpy() != UNSEEN)
        labels = self._labels_at(seen)
        features = gathered.history.features(seen)
        scores = []
        for target in self.classes.targets:
            combined = combine_with_hints(
                features,
                (labels == target).astype(np.int64),
                RUN_ATTACKS[attack].num_hints,
                np.random.default_rng(SEED),
            )
            if combined is None:
                scores.append(RunScores(np.empty(0, dtype=np.int64), np.empty(0)))
            else:
                values, others = combined
                scores.append(RunScores(seen[others], values[others]))
        return scores


def aucs_of(
    scores: Sequence[RunScores], labels: npt.NDArray[np.integer], classes: LabelClasses
) -> leakage.PairAucs:
    """Measure one score for all classes, or one for each target; labels are of all examples."""
    aucs = leakage.PairAucs.none(classes.num_classes)
    for of_class, scored in zip(classes.of_scores(len(scores)), scores, strict=True):
        of_scored = labels[scored.positions].astype(np.int64)
        aucs.put(
            leakage.pair_aucs(scored.scores, of_scored, classes.num_classes, of_class), of_class
        )
    return aucs


def run_level_leak(
    scores: Sequence[RunScores],
    aucs: leakage.PairAucs,
    labels: npt.NDArray[np.integer],
    classes: LabelClasses,
    alone: Sequence[RunScores] | None = None,
) -> RunFigures | None:
    """Return the leak of the pair separated best, if any; ``alone`` are the scores on features."""
    try:
        first, second = aucs.worst_pair()
    except leakage.OneClass:
        return None
    number = first if classes.is_multi_class and len(scores) > 1 else 0
    scored = scores[number]
    of_scored = labels[scored.positions]
    of_pair = (of_scored == first) | (of_scored == second)
    chosen, positive = scored.scores[of_pair], of_scored[of_pair] == first
    measured = leakage.leak_auc_interval(chosen, positive, np.random.default_rng(SEED))
    of_features = None if alone is None else alone[number].scores[of_pair]
    over = None if of_features is None else advantage_over(of_features, chosen, positive)
    points = operating_points(chosen, positive)
    return RunFigures(*measured, int(of_pair.sum()), *points, over)
