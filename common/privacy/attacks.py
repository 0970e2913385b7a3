"""Attacks: from the gradients of one batch to one score per example, higher meaning "positive".

    norm       |g|
    cosine     cos(g, g+), g+ the clean gradient of one random positive       (oracle)
    spectral   <g, v>, v the batch's top right-singular vector, turned so that the scores' long
               tail points up: positives are the minority

No attack reads labels: what it needs to know besides the gradients is an explicit argument, and
`ATTACKS` names it. Scores are float64 on the gradients' device, and finite for finite gradients.

``spectral`` does not centre the batch. With a logistic loss g = (p - y) w: centring takes away the
part of w that the mean carries, which costs most where the classes are unbalanced and noise
covers the gradients (Li et al., "Label Leakage and Protection in Two-Party Split Learning", ICLR
2022, for the norm and cosine attacks; Sun et al., "Label Leakage and Protection from Forward
Embedding in Vertical Federated Learning", 2022, for the spectral one).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

AttackName: TypeAlias = Literal["norm", "cosine", "spectral"]


class SideInformation(StrEnum):
    """What an attacker must know besides the gradients."""

    POSITIVE_GRADIENT = "one clean gradient of a positive per batch (evaluation only)"
    POSITIVES_ARE_FEWER = "positives are the minority"


class Knowledge(NamedTuple):
    """The side information at hand for one batch; None where there is none."""

    positive_gradient: Tensor | None = None


class Attack(NamedTuple):
    """One row of the table of attacks."""

    score: Callable[[Tensor, Knowledge], Tensor]
    needs: frozenset[SideInformation]


def norm(gradients: Tensor) -> Tensor:
    """Score each example by the Euclidean norm of its gradient.

    Args:
        gradients: (batch, ...).
    """
    rows, unit = _rows(gradients)
    return _in_unit(torch.linalg.vector_norm(rows, dim=1), unit)


def cosine(gradients: Tensor, reference: Tensor) -> Tensor:
    """Score each example by the cosine between its gradient and a positive's.

    Args:
        gradients: (batch, ...).
        reference: one gradient of the same shape as a row of ``gradients``.

    Returns:
        Values in [-1, 1]; 0 where either gradient is zero.
    """
    rows, _ = _rows(gradients)
    direction, _ = _rows(reference.to(gradients.device).reshape(1, -1))
    lengths = torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(direction)
    inner = rows @ direction[0]
    return torch.where(lengths > 0, inner / lengths, 0.0).clamp(-1.0, 1.0)


def spectral(gradients: Tensor) -> Tensor:
    """Score each example by its projection on the batch's top right-singular vector.

    The sign is chosen by skewness: the minority, taken for the positives, is the long tail.

    Args:
        gradients: (batch, ...).
    """
    rows, unit = _rows(gradients)
    projections = _top_projections(rows)
    centred = projections - projections.mean()
    turned = torch.where(centred.pow(3).sum() < 0, -projections, projections)
    return _in_unit(turned, unit)


def _top_projections(rows: Tensor) -> Tensor:
    """Return the rows' coordinates along their top right-singular vector, of arbitrary sign.

    Through the smaller of the two Gram matrices: what is read off is the leading direction, which
    loses nothing by squaring, and the cost is that of one product instead of a full SVD.
    """
    num_rows, row_dim = rows.shape
    if num_rows >= row_dim:
        return rows @ _top_eigenpair(rows.T @ rows)[1]
    power, direction = _top_eigenpair(rows @ rows.T)
    return direction * power.clamp(min=0.0).sqrt()


def _top_eigenpair(gram: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values[-1], vectors[:, -1]


def _rows(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten to float64 rows, in a unit in which no square leaves the range of float64.

    Gradients of a smaller dtype are safe as they are, and spared the pass over the batch.
    """
    rows = gradients.detach().flatten(start_dim=1).double()
    unit = rows.new_ones(())
    if gradients.dtype == torch.float64 and rows.numel():
        largest = rows.abs().amax()
        unit = torch.where(largest > 0, largest, unit)
        rows = rows / unit
    return rows, unit


def _in_unit(scores: Tensor, unit: Tensor) -> Tensor:
    largest = torch.finfo(scores.dtype).max
    return (scores * unit).clamp(-largest, largest)


def _score_cosine(gradients: Tensor, knowledge: Knowledge) -> Tensor:
    if knowledge.positive_gradient is None:
        raise ValueError(f"cosine needs {SideInformation.POSITIVE_GRADIENT}")
    return cosine(gradients, knowledge.positive_gradient)


ATTACKS: Mapping[AttackName, Attack] = MappingProxyType(
    {
        "norm": Attack(lambda gradients, _: norm(gradients), frozenset()),
        "cosine": Attack(_score_cosine, frozenset({SideInformation.POSITIVE_GRADIENT})),
        "spectral": Attack(
            lambda gradients, _: spectral(gradients),
            frozenset({SideInformation.POSITIVES_ARE_FEWER}),
        ),
    }
)
