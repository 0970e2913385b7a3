"""Isotropic noise: every row gets N(0, (t/d) max|g|^2 I), whatever its label, with t = r^2.

The forecast of the charge of fresh noise is an estimate: 4 d/t bounds the charge of a batch that
holds all classes, because its class means are at most twice its largest norm apart. The last rows
of an epoch, small batches and rare classes make batches that do not hold all of them; there a mean
of earlier batches is used instead, which may lie anywhere, or none exists and the charge is
infinite.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from splitveil.active_party.defenses import interface, section
from splitveil.active_party.defenses.class_statistics import GapMemory
from splitveil.active_party.defenses.example_keys import key_name
from splitveil.active_party.defenses.noise import NoiseSource, isotropic_noise
from splitveil.active_party.defenses.persistent import moves_of, noisy_rows, repeated_answer
from splitveil.active_party.defenses.rows import as_rows
from splitveil.active_party.defenses.section import ChargeModel
from splitveil.active_party.defenses.sum_kl import sum_kl_along_gap
from splitveil.common.privacy.charge import UNBOUNDED, Charge, noise_digest


class IsoDefense(section.LabelMoveDefense):
    """The same Gaussian noise on every example, whatever its label."""

    name: Literal["iso"] = "iso"

    noise_ratio: float = Field(default=1.0, ge=0, le=1e6)
    """Root-mean-square noise norm r, in units of the batch's largest gradient norm: the square root
    of the papers' t."""

    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        noise = self._noise_source(secrets)
        if self.noise == "fresh":
            return Isotropic(self.noise_ratio, noise, context.num_classes)
        key = section.require_key(secrets.noise_key, self.name)
        identity = noise_digest(f"iso {self.noise_ratio!r} {key_name(key)}")
        charge = replace(self.charge_model(context).charge, noise_identity=identity)
        return PersistentIsotropic(self.noise_ratio, noise, charge)

    def noise_key_strength(self, context: interface.DefenseContext, /) -> str | None:
        if self.noise == "fresh":
            return None
        return f"iso {self.noise_ratio!r} in {context.cut_dim}"

    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        ratio, cut_dim = self.noise_ratio, context.cut_dim
        if not (ratio**2):
            said = "Answers without noise reveal the label outright."
            refusal = "the first answer without noise would pass every budget; set noise_ratio"
            return ChargeModel.exact(UNBOUNDED, said, self.noise, f"{refusal} above 0")
        if self.noise == "persistent":
            return self._repeated(cut_dim / ratio / ratio)
        said = (
            "An estimate, and no bound. The charge of fresh noise depends on the gradients. "
            "The upper figure holds for every batch that holds all classes, and is far too "
            "high for most. A batch that lacks one is charged by earlier batches, and may be "
            "charged more, up to infinity."
        )
        return ChargeModel(0.0, Charge(4 * cut_dim / ratio**2), "estimate", said)


class Isotropic(interface.RememberingDefense):
    """Adds the same amount of Gaussian noise to every example.

    The labels only decide the charge for an answer; the answer itself does not depend on them. The
    norm ratio is r, in units of the batch's largest gradient norm.
    """

    def __init__(self, norm_ratio: float, noise: NoiseSource, num_classes: int = 2) -> None:
        self._gaps = GapMemory(num_classes)
        super().__init__(self._gaps)
        self._norm_ratio = norm_ratio
        self._noise = noise

    def defend(self, batch: interface.Step) -> interface.Defended:
        rows = as_rows(batch.gradients)
        gaps = self._gaps.measure(rows, batch.labels)
        noise_norm = self._norm_ratio * gaps.batch.largest
        defended = isotropic_noise(rows, noise_norm, self._noise).add_(rows)
        gap, sum_kl = gaps.longest(), 0.0
        if gap or gaps.batch.largest:  # else a batch of zeros
            deviation = noise_norm / math.sqrt(rows.shape[1])
            sum_kl = sum_kl_along_gap(deviation, deviation, gap)
        sent = interface.release(defended, batch.gradients)
        return interface.Defended(sent, Charge(sum_kl), noise_norm * noise_norm)


class PersistentIsotropic(interface.Defense):
    """Adds noise in all directions: persistent along the label's move and fresh across it.

    Across it, the gradient does not depend on the label, and repeated noise would have no benefit.
    The norm ratio is r, in units of the move by one unit of label.
    """

    def __init__(self, norm_ratio: float, noise: NoiseSource, charge: Charge) -> None:
        self._norm_ratio = norm_ratio
        self._noise = noise
        self._charge = charge

    def defend(self, batch: interface.Step) -> interface.Defended:
        moves, norms = moves_of(batch)
        deviation = self._norm_ratio / moves.shape[1] ** 0.5
        defended = noisy_rows(batch, moves, deviation)
        lengths = norms[:, None]
        directions = moves.double() / torch.where(lengths > 0, lengths, 1.0)
        fresh = self._noise.standard_normal(tuple(defended.shape), moves).double()
        fresh -= (fresh * directions).sum(dim=1, keepdim=True) * directions
        defended.addcmul_(fresh, lengths, value=deviation)
        return repeated_answer(batch, defended, norms, self._norm_ratio, self._charge)
