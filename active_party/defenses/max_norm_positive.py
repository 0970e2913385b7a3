"""Noise along each gradient that brings it to the norm of the least expected positive.

Like ``max_norm``, with the target and the norms taken from the predicted probabilities p: for a
binary cross entropy on |w|, a positive's gradient is (1-p)|w| long and a negative's p|w|. With q
the smallest p of a positive (Sun et al., "Label Leakage and Protection in Two-party Split
Learning", technical report, Algorithm 5), the row g becomes g (1 + s n) with n ~ N(0, 1) and

    positives  s^2 = ((1-q)/(1-p))^2 - 1        negatives  s^2 = max(((1-q)/p)^2 - 1, 0)

In a batch without positives, q is the smallest p of all rows, as if the least expected row were a
positive; the negatives then have the same length as they would beside that positive.
"""

from typing import Literal

import torch
from torch import Tensor

from splitveil.active_party.defenses.build_inputs import BuildInputs, DefenseContext
from splitveil.active_party.defenses.interface import Defense, RawBatch
from splitveil.active_party.defenses.max_norm import MaxNorm, NormAligningDefense
from splitveil.active_party.defenses.section import two_classes_alone


class MaxNormPositiveDefense(NormAligningDefense):
    """Noise along each gradient that brings it to the norm of the least expected positive."""

    name: Literal["max_norm_positive"] = "max_norm_positive"

    def _build(self, given: BuildInputs, /) -> Defense:
        noise = self.keyed_noise_source(given.secrets)
        return MaxNormPositive(noise, is_persistent=self.noise == "persistent")

    def refusal(self, context: DefenseContext, /) -> str | None:
        """Explain why the defense cannot be used with more than two classes."""
        return two_classes_alone(self.name) if context.num_classes > 2 else None


class MaxNormPositive(MaxNorm):
    """Aligns every row to the norm that the least expected positive of the batch has.

    A row without a direction of its own is answered as by ``max_norm``.
    """

    def noise_norms(self, batch: RawBatch, rows: Tensor, norms: Tensor) -> Tensor:
        """Return the root-mean-square noise norm of each row, (batch,) float64.

        Raises:
            ValueError: there are no probabilities, or they are not between 0 and 1.
        """
        predicted = _as_probabilities(batch.probabilities, rows)
        positive = batch.labels.detach().to(rows.device).reshape(len(norms)) == 1
        return norms * _deviations(predicted, positive)


def _deviations(predicted: Tensor, positive: Tensor) -> Tensor:
    """Return s of each row, (batch,) float64."""
    of_positives = torch.where(positive, predicted, 1.0)
    has_positive = positive.any()
    smallest = torch.where(has_positive, of_positives.min(), predicted.min())
    own = torch.where(positive, 1 - predicted, predicted)
    ratios = (1 - smallest) / own
    return ((ratios - 1) * (ratios + 1)).clamp_(min=0).sqrt_()


def _as_probabilities(probabilities: Tensor | None, rows: Tensor) -> Tensor:
    """Return the predictions as (batch,) float64, slightly away from 0 and 1.

    A row that is predicted with certainty has a gradient of zero, to which a ratio is undefined.
    """
    if probabilities is None:
        raise ValueError("max_norm_positive needs the predicted probabilities, got none")
    batch = rows.shape[0]
    if probabilities.numel() != batch:
        raise ValueError(f"expected {batch} probabilities, got {tuple(probabilities.shape)}")
    predicted = probabilities.detach().to(rows.device, torch.float64).reshape(batch)
    if not bool(((predicted >= 0) & (predicted <= 1)).all()):
        raise ValueError("probabilities must be between 0 and 1")
    return predicted.clamp(1e-30, 1 - 1e-15)
