"""The leak of a whole run: what the attacks that gather over its epochs know in the end."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import (
    NUM_HINTS,
    AccumulatedScores,
    ContinuousSign,
    ScoreHistory,
    combine_with_hints,
    standardised,
)
from splitveil.common.privacy.attacks import (
    BatchAttackName,
    RunAttackName,
    TopDirection,
    unit_vector,
)
from splitveil.common.privacy.leakage import OneClass, leak_auc, leak_auc_interval
from splitveil.common.privacy.tally import REMEMBERED_EPOCHS

SEED = 0
"""Of hints and bootstrap: the same scores always give the same figures."""

UNSEEN = -1
"""Label of an example that no batch has held so far."""


_Floats = npt.NDArray[np.float64]
_Labels = npt.NDArray[np.int8]


class LayerScores(NamedTuple):
    """What the attacks found in one layer's gradients of one batch."""

    scores: Mapping[BatchAttackName, Tensor]
    left_out: Mapping[BatchAttackName, tuple[int, ...]]
    """Rows that an attack was told the label of."""

    top: TopDirection | None
    """Where a spectral score is among the scores."""

    noisy_reference: Tensor | None = None
    """The positive's gradient behind the cosines, where noise may have turned it around."""


class RunLevelLeak(TypedDict):
    """One attack on one layer over a whole run."""

    auc: float
    """The leak AUC."""
    low: float
    """Lower end of its 95 % bootstrap interval; below 1/2 where the leak may be chance."""
    high: float
    examples: int
    """Examples that were scored and whose label the attack was not told."""


class GatheringLayer(Protocol):
    """What is gathered of one layer."""

    def add(self, epoch: int, positions: Tensor, found: Any) -> None:
        """Gather what the attacks on one batch found."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` left off."""


LayerT = TypeVar("LayerT", bound=GatheringLayer)
FoundT = TypeVar("FoundT")


class GatheredRun(ABC, Generic[LayerT, FoundT]):
    """What gathers over a run, layer by layer, and what the end of each epoch found of it.

    Safe to use from several threads.

    Args:
        attacks: which attacks to run.
        num_examples: aligned examples of the run.
    """

    def __init__(self, attacks: Sequence[RunAttackName], num_examples: int) -> None:
        self.attacks = tuple(attacks)
        self._num_examples = num_examples
        self._lock = threading.Lock()
        size = num_examples if attacks else 0
        self._labels = torch.full((size,), UNSEEN, dtype=torch.int8)
        self._layers: dict[str, LayerT] = {}
        self._epoch: int | None = None
        self._after_epoch: dict[int, dict[str, dict[str, float]]] = {}

    def add(
        self, epoch: int, positions: Tensor, labels: Tensor, layers: Mapping[str, FoundT]
    ) -> None:
        """Gather one batch.

        Args:
            epoch: of the batch, not before that of the batch before.
            positions: places in the common order, (batch,), each at most once.
            labels: or places of classes, (batch,), for the measurement alone.
            layers: layer -> what the attacks on a batch found.
        """
        if not self.attacks:
            return
        with self._lock:
            places = self._begin_batch(epoch, positions, labels)
            for name, found in layers.items():
                self._layer(name).add(epoch, places, found)

    def close_epoch(self) -> None:
        """Measure the sums after the last epoch; before others this happens by itself."""
        with self._lock:
            self._close_epoch()

    def after_epoch(self, epoch: int) -> dict[str, dict[str, float]]:
        """Return layer -> attack -> leak AUC of the sums after one of the last epochs."""
        with self._lock:
            return self._after_epoch.get(epoch, {})

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what is gathered and measured so far."""
        with self._lock:
            return {
                "labels": self._labels.clone(),
                "layers": {name: layer.state_dict() for name, layer in self._layers.items()},
                "epoch": self._epoch,
                "after_epoch": {
                    str(epoch): {layer: dict(found) for layer, found in layers.items()}
                    for epoch, layers in self._after_epoch.items()
                },
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` left off.

        Raises:
            ValueError: the state is of other attacks, or of another number of examples.
        """
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
            self._epoch = state["epoch"]
            self._after_epoch = {
                int(epoch): {layer: dict(found) for layer, found in measured.items()}
                for epoch, measured in state["after_epoch"].items()
            }

    @abstractmethod
    def _new_layer(self) -> LayerT:
        """Return a layer of which nothing is gathered yet."""

    @abstractmethod
    def _measure_sums(self) -> dict[str, dict[str, float]]:
        """Return layer -> attack -> leak AUC of the sums so far; called with the lock."""

    def _begin_batch(self, epoch: int, positions: Tensor, labels: Tensor) -> Tensor:
        """Note a batch's labels, and return its places on the CPU; call it with the lock."""
        if epoch != self._epoch:
            self._close_epoch()
            self._epoch = epoch
        places = positions.cpu()
        self._labels.numpy()[places.numpy()] = labels.cpu().to(torch.int8).numpy()
        return places

    def _layer(self, name: str) -> LayerT:
        if name not in self._layers:
            self._layers[name] = self._new_layer()
        return self._layers[name]

    def _close_epoch(self) -> None:
        if self._epoch is None:
            return
        self._after_epoch[self._epoch] = self._measure_sums()
        for earlier in sorted(self._after_epoch)[:-REMEMBERED_EPOCHS]:
            del self._after_epoch[earlier]


class RunAudit(GatheredRun["_Layer", LayerScores]):
    """Gathers scores over a run, and measures them. Safe to use from several threads.

    Keeps, per layer, at most 16 bytes per example and attack, and once per example its label.
    """

    @property
    def num_bytes(self) -> int:
        """Memory of what is gathered."""
        return self._labels.nbytes + sum(layer.num_bytes for layer in self._layers.values())

    def result(self) -> dict[str, dict[str, RunLevelLeak]]:
        """Measure every attack over the run so far; what has one class only is absent."""
        result: dict[str, dict[str, RunLevelLeak]] = {}
        with self._lock:
            for layer, attack, scores, labels in self._found(hinted=True):
                try:
                    measured = leak_auc_interval(scores, labels, np.random.default_rng(SEED))
                except OneClass:
                    continue
                result.setdefault(layer, {})[attack] = RunLevelLeak(
                    auc=measured.auc,
                    low=measured.low,
                    high=measured.high,
                    examples=len(scores),
                )
        return result

    def _new_layer(self) -> "_Layer":
        return _Layer(self.attacks, self._num_examples)

    def _measure_sums(self) -> dict[str, dict[str, float]]:
        measured: dict[str, dict[str, float]] = {}
        for layer, attack, scores, labels in self._found(hinted=False):
            with suppress(OneClass):
                measured.setdefault(layer, {})[attack] = leak_auc(scores, labels)
        return measured

    def _found(self, *, hinted: bool) -> Iterator[tuple[str, RunAttackName, _Floats, _Labels]]:
        """Yield the scores of each attack with the labels that it was not told."""
        for layer, state in self._layers.items():
            for attack, sums in state.sums.items():
                found = sums.result()
                yield layer, attack, found.scores, self._labels.numpy()[found.positions]
            if hinted:
                yield from self._combined(layer, state)

    def _combined(
        self, layer: str, state: "_Layer"
    ) -> Iterator[tuple[str, RunAttackName, _Floats, _Labels]]:
        labels = self._labels.numpy()
        seen = np.flatnonzero(labels != UNSEEN)
        for attack, history in state.histories.items():
            combined = combine_with_hints(
                history.features(seen),
                labels[seen],
                NUM_HINTS[attack],
                np.random.default_rng(SEED),
            )
            if combined is not None:
                scores, others = combined
                yield layer, attack, scores[others], labels[seen][others]


class _Layer:
    """What is gathered of one layer."""

    def __init__(self, attacks: Sequence[RunAttackName], num_examples: int) -> None:
        self.sums: dict[RunAttackName, AccumulatedScores] = {}
        self.histories: dict[RunAttackName, ScoreHistory] = {}
        self._history: ScoreHistory | None = None  # serves however many hints there are
        for attack in attacks:
            if attack in NUM_HINTS:
                self._history = self._history or ScoreHistory(num_examples)
                self.histories[attack] = self._history
            else:
                self.sums[attack] = AccumulatedScores(num_examples)
        self._sign = ContinuousSign()
        self._reference_sign = ContinuousSign()

    @property
    def num_bytes(self) -> int:
        of_sums = sum(state.num_bytes for state in self.sums.values())
        return of_sums + (0 if self._history is None else self._history.num_bytes)

    def add(self, epoch: int, positions: Tensor, found: LayerScores) -> None:
        scores = dict(found.scores)
        if found.top is not None:
            scores["spectral"] = self._sign.turn(found.top)
        if "accumulated_spectral" in self.sums and "spectral" in scores:
            self.sums["accumulated_spectral"].add(positions, standardised(scores["spectral"]))
        if "accumulated_cosine" in self.sums and "cosine" in scores:
            cosines = scores["cosine"]
            if found.noisy_reference is not None:
                direction = unit_vector(found.noisy_reference)
                cosines = self._reference_sign.turn(TopDirection(cosines, direction))
            told = found.left_out.get("cosine", ())
            others, places = _without(cosines.cpu(), told), _without(positions, told)
            self.sums["accumulated_cosine"].add(places, standardised(others))
        if self._history is not None:
            both = standardised(scores["spectral"]), standardised(scores["norm"])
            self._history.add(epoch, positions, both)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {attack: sums.state_dict() for attack, sums in self.sums.items()},
            "history": None if self._history is None else self._history.state_dict(),
            "sign": self._sign.state_dict(),
            "reference_sign": self._reference_sign.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["sums"].keys() != self.sums.keys() or (state["history"] is None) != (
            self._history is None
        ):
            raise ValueError("expected what the same attacks have gathered")
        for attack, sums in self.sums.items():
            sums.load_state_dict(state["sums"][attack])
        if self._history is not None:
            self._history.load_state_dict(state["history"])
        self._sign.load_state_dict(state["sign"])
        self._reference_sign.load_state_dict(state["reference_sign"])


def _without(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return values but for those of some rows."""
    return torch.from_numpy(np.delete(values.numpy(), rows)) if rows else values
