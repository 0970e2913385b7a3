"""Accumulates the adversary's scores without any label, for the active party to measure.

Every attack becomes one score per training example: the sum over the epochs of its standardised
score of each batch. ``spectral``, ``kmeans`` and ``residual_energy`` are turned by each batch
itself, ``accumulated_spectral`` keeps its sign from batch to batch, and
``accumulated_residual_energy`` agrees with earlier batches.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import AccumulatedScores, ContinuousSign, standardised
from splitveil.common.privacy.attacks import ATTACKS, LABEL_FREE, AttackName, Knowledge
from splitveil.common.privacy.gradient_rows import GradientRows
from splitveil.common.privacy.observation import Observation
from splitveil.common.privacy.residual_energy import residual_energy
from splitveil.common.run.sample_order import Positions


class GatheredScores(NamedTuple):
    attack: AttackName
    layer: str
    scores: Tensor  # (examples,), float32; 0, the mean, for one not seen yet


class LabelFreeAudit:
    """Accumulates scores over a run: 12 bytes per example, attack and layer. Thread-safe."""

    def __init__(self, attacks: Sequence[str], every_steps: int, num_examples: int) -> None:
        self.left_out = 0  # number of batches that should have been attacked and were not
        self._attacks = tuple(name for name in LABEL_FREE if name in attacks)
        self._every_steps = every_steps
        self._num_examples = num_examples
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, AttackName], AccumulatedScores] = {}
        self._signs: dict[str, ContinuousSign] = {}

    def wants(self, step: int) -> bool:
        return step % self._every_steps == 0

    def leave_out(self) -> None:
        with self._lock:
            self.left_out += 1

    def observe(self, observation: Observation) -> None:
        if observation.positions is None or not self.wants(observation.step):
            return
        knowledge = Knowledge(activations=observation.activations)
        for layer in observation.gradients:
            scored = self._score(layer, observation.rows(layer), knowledge)
            for attack, scores in scored.items():
                with self._lock:
                    self._add(layer, attack, observation.positions, standardised(scores))

    def gathered(self, positions: Positions) -> Iterator[GatheredScores]:
        """Yield the scores that every attack on every layer has given to some examples so far."""
        rows = torch.from_numpy(positions)
        with self._lock:
            found = {key: self._sums[key].result() for key in sorted(self._sums)}
        for (layer, attack), (seen, scores) in found.items():
            values = torch.zeros(self._num_examples, dtype=torch.float32)
            values[torch.from_numpy(seen)] = torch.from_numpy(scores).float()
            yield GatheredScores(attack, layer, values[rows])

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            sums: dict[str, dict[str, Any]] = {}
            for (layer, attack), gathered in self._sums.items():
                sums.setdefault(layer, {})[attack] = gathered.state_dict()
            signs = {layer: sign.state_dict() for layer, sign in self._signs.items()}
            return {
                "attacks": list(self._attacks),
                "sums": sums,
                "signs": signs,
                "left_out": self.left_out,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state["attacks"]) != list(self._attacks):
            raise ValueError(
                f"expected scores of {', '.join(self._attacks)}; "
                f"got those of {', '.join(state['attacks'])}"
            )
        sums: dict[tuple[str, AttackName], AccumulatedScores] = {}
        for layer, attacks in state["sums"].items():
            for attack, gathered in attacks.items():
                sums[layer, attack] = AccumulatedScores(self._num_examples)
                sums[layer, attack].load_state_dict(gathered)
        signs = {layer: ContinuousSign() for layer in state["signs"]}
        for layer, sign in signs.items():
            sign.load_state_dict(state["signs"][layer])
        with self._lock:
            self._sums, self._signs = sums, signs
            self.left_out = state["left_out"]

    def _add(self, layer: str, attack: AttackName, positions: Tensor, scores: Tensor) -> None:
        if (layer, attack) not in self._sums:
            self._sums[layer, attack] = AccumulatedScores(self._num_examples)
        sums = self._sums[layer, attack]
        if attack == "accumulated_residual_energy":
            scores = sums.agreeing(positions, scores)
        sums.add(positions, scores)

    def _score(
        self, layer: str, gradients: GradientRows, knowledge: Knowledge
    ) -> Mapping[AttackName, Tensor]:
        scores: dict[AttackName, Tensor] = {}
        if "accumulated_spectral" in self._attacks:
            sign = self._signs.setdefault(layer, ContinuousSign())
            scores["accumulated_spectral"] = sign.turn(gradients.top)
        for name, attack in ATTACKS.items():
            if name in self._attacks and attack.runs_at(layer):
                scores[name] = attack.score(gradients, knowledge)
        if "accumulated_residual_energy" in self._attacks:
            known = scores.get("residual_energy")
            energies = residual_energy(gradients) if known is None else known
            scores["accumulated_residual_energy"] = energies
        return {name: scores[name] for name in self._attacks if name in scores}
