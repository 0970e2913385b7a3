"""Noise along each gradient that brings it, on average, to a norm that does not reveal its label.

``max_norm`` takes the largest norm of the batch. Row g becomes g (1 + s n) with n ~ N(0, 1) and
s^2 = |g_max|^2/|g|^2 - 1, one scalar per row, so that E|row|^2 = |g_max|^2 for every row (Li et
al., ICLR 2022, section 4.1). g_max is the largest row, not the whole batch: noise up to the batch's
norm, spread over all directions, leaves a smaller row with more of it, and the norm leaks with the
opposite sign.

``max_norm_positive`` takes the norm of the least expected positive, with the target and the norms
from the predicted probabilities p: for a binary cross entropy on |w|, a positive's gradient is
(1-p)|w| long and a negative's p|w|. With q the smallest p of a positive (Sun et al., "Label Leakage
and Protection in Two-party Split Learning", technical report, Algorithm 5), the scalars are

    positives  s^2 = ((1-q)/(1-p))^2 - 1        negatives  s^2 = max(((1-q)/p)^2 - 1, 0)

In a batch without positives, q is the smallest p of all rows, as if the least expected row were a
positive; the negatives then have the same length as they would beside that positive.

Persistent noise draws n once per example. It protects only against a peer that adds up answers
(see ``persistent``), and is charged without bound.
"""

from typing import Literal

import torch
from torch import Tensor

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.class_statistics import GapMemory, RowNoise
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.persistent import checked_probabilities, own_scalars
from splitveil.active_party.defenses.rows import as_rows
from splitveil.active_party.defenses.section import (
    ChargeModel,
    NoisyDefense,
    refusal_of_several_classes,
)
from splitveil.common.privacy.charge import UNBOUNDED


class _NormAligningDefense(NoisyDefense):
    def noise_key_strength(self, _context: interface.DefenseContext, /) -> str | None:
        return f"{self.title} to the largest norm" if self.noise == "persistent" else None

    def charge_model(self, _context: interface.DefenseContext, /) -> ChargeModel:
        if self.noise == "fresh":
            return ChargeModel.of_gradients(self.title)
        return ChargeModel.exact(
            UNBOUNDED,
            f"The ledger gives persistent {self.title} no credit.",
            "persistent",
            f"the ledger gives persistent {self.title} no credit, and the first answer would "
            "pass every budget; expected noise: fresh, or another defense",
        )


class MaxNormDefense(_NormAligningDefense):
    """Noise along each gradient that brings it to the batch's largest norm."""

    name: Literal["max_norm"] = "max_norm"

    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        noise = self._noise_source(secrets)
        return MaxNorm(noise, context.num_classes, is_persistent=self.noise == "persistent")


class MaxNormPositiveDefense(_NormAligningDefense):
    """Noise along each gradient that brings it to the norm of the least expected positive."""

    name: Literal["max_norm_positive"] = "max_norm_positive"

    def _build(
        self, _context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        noise = self._noise_source(secrets)
        return MaxNormPositive(noise, is_persistent=self.noise == "persistent")

    def _refusal(self, context: interface.DefenseContext, /) -> str | None:
        return refusal_of_several_classes(self.name, context)


class MaxNorm(interface.RememberingDefense):
    """Aligns every row to the batch's largest norm.

    A row too small for a direction of its own gets a random one and exactly that norm. The labels
    only decide the charge. Persistent scalars come from the examples' keys, charged without bound.
    """

    def __init__(
        self, noise: NoiseSource, num_classes: int = 2, *, is_persistent: bool = False
    ) -> None:
        self._gaps = GapMemory(num_classes)
        super().__init__(self._gaps)
        self._noise = noise
        self._is_persistent = is_persistent

    def defend(self, batch: interface.Step) -> interface.Defended:
        rows = as_rows(batch.gradients)
        gaps = self._gaps.measure(rows, batch.labels)
        missing = self._noise_norms(batch, rows, gaps.batch.norms)
        if self._is_persistent:
            scalars = own_scalars(batch.example_keys, rows).to(rows.dtype)
        else:
            scalars = self._noise.standard_normal((rows.shape[0], 1), rows)
        noise = _stretch_rows(rows, gaps.batch.norms, missing, scalars, self._noise)
        charge = UNBOUNDED if self._is_persistent else gaps.charge(noise)
        defended = noise.directions.mul_(noise.scalars).add_(rows)
        sent = interface.release(defended, batch.gradients)
        return interface.Defended(sent, charge, float(noise.norms.square().mean()))

    def _noise_norms(self, _batch: interface.Step, _rows: Tensor, norms: Tensor) -> Tensor:
        # The root-mean-square noise norm that takes each row to the largest.
        largest = norms.max()
        shares = norms / torch.where(largest > 0, largest, 1.0)
        return ((1 - shares) * (1 + shares)).clamp_(min=0).sqrt_().mul_(largest)


class MaxNormPositive(MaxNorm):
    """Aligns every row to the norm that the least expected positive of the batch has."""

    def _noise_norms(self, batch: interface.Step, rows: Tensor, norms: Tensor) -> Tensor:
        # A row that is predicted with certainty has a gradient of zero, to which a ratio is
        # undefined.
        predicted = checked_probabilities(batch.probabilities, rows).double()
        predicted = predicted.clamp(1e-30, 1 - 1e-15)
        positive = batch.labels.detach().to(rows.device).reshape(len(norms)) == 1
        of_positives = torch.where(positive, predicted, 1.0)
        smallest = torch.where(positive.any(), of_positives.min(), predicted.min())
        own = torch.where(positive, 1 - predicted, predicted)
        ratios = (1 - smallest) / own
        return norms * ((ratios - 1) * (ratios + 1)).clamp_(min=0).sqrt_()


def _stretch_rows(
    rows: Tensor, norms: Tensor, noise_norms: Tensor, scalars: Tensor, noise: NoiseSource
) -> RowNoise:
    """Draw noise along each row, (batch, cut_dim); a row without a direction gets the largest norm.

    Norms, of rows and noise, are (batch,) float64. Scalars, (batch, 1) normal, are overwritten.
    """
    scalars *= noise_norms[:, None].to(rows.dtype)
    directions = rows / norms[:, None].to(rows.dtype)
    bare = (norms < torch.finfo(rows.dtype).tiny).nonzero().squeeze(1)
    if len(bare):
        largest = norms.max()
        random = noise.standard_normal((len(bare), rows.shape[1]), rows)
        directions[bare] = random.div_(torch.linalg.vector_norm(random, dim=1, keepdim=True))
        scalars[bare] = largest.to(rows.dtype)
        noise_norms = noise_norms.index_fill(0, bare, float(largest))
    return RowNoise(directions, scalars, noise_norms, bare)
