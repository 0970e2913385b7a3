"""The gradients of one batch as rows of numbers, prepared once for all attacks.

Rows are float64, in a unit in which no square leaves the range of float64.
"""

from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.top_direction import TopDirection, top_direction_of_rows, two_clusters


class GradientRows:
    """The gradients of one batch, (batch, ...), with quantities that several attacks need."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients.detach()
        self.rows, self.unit = _flat_rows(self.gradients)

    @cached_property
    def lengths(self) -> Tensor:
        """Norms of the rows, (batch,)."""
        if self.rows.device.type == "cpu":  # numpy takes half of torch's time
            rows = self.rows.numpy()
            return torch.from_numpy(np.sqrt(np.vecdot(rows, rows)))
        lengths: Tensor = torch.linalg.vector_norm(self.rows, dim=1)
        return lengths

    @cached_property
    def top(self) -> TopDirection:
        top = top_direction_of_rows(self.rows)
        return top._replace(projections=in_unit(top.projections, self.unit))

    @cached_property
    def clusters(self) -> TopDirection:
        """The two clusters of the gradients' directions; scores are higher in the smaller one."""
        directions = unit_rows(self.rows)
        return two_clusters(directions, directions @ self.top.direction)


Gradients: TypeAlias = Tensor | GradientRows  # (batch, ...), prepared or not


def prepared(gradients: Gradients) -> GradientRows:
    """Return gradients as rows; gradients that are prepared already are returned unchanged."""
    return gradients if isinstance(gradients, GradientRows) else GradientRows(gradients)


def direction_of(gradient: Tensor, device: torch.device) -> Tensor:
    """Return one gradient as a float64 row, scaled to a unit of its own, (row_dim,)."""
    row, _ = _flat_rows(gradient.to(device).reshape(1, -1))
    return row[0]


def rows_together(gradients: Gradients, *others: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Flatten several batches to float64 rows in one common unit; None for a unit of 1."""
    first = gradients.gradients if isinstance(gradients, GradientRows) else gradients
    every = [first, *(known.to(first.device) for known in others)]
    sizes = [len(known) for known in every]
    rows, unit = _flat_rows(torch.cat([known.detach().flatten(start_dim=1) for known in every]))
    return list(torch.split(rows, sizes)), unit


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows of length 1, (rows, row_dim); zeros for a row of zeros."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths.clamp(min=torch.finfo(rows.dtype).tiny)


def unit_vector(values: Tensor) -> Tensor:
    """Return a tensor's direction in float64, (values,); zeros for a tensor of zeros."""
    flat, _ = scaled(values.detach().double().reshape(-1))
    length = torch.linalg.vector_norm(flat)
    return torch.where(length > 0, flat / length, 0.0)


def scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values scaled to a largest magnitude of 1, and their unit; zeros remain zeros."""
    unit = values.new_ones(())
    if values.numel():
        largest = values.abs().amax()
        unit = torch.where(largest > 0, largest, unit)
    return values / unit, unit


def in_unit(scores: Tensor, unit: Tensor | None) -> Tensor:
    """Return scores in the gradients' unit, clamped to the range of their dtype."""
    if unit is None:
        return scores
    largest = torch.finfo(scores.dtype).max
    return (scores * unit).clamp(-largest, largest)


def _flat_rows(gradients: Tensor) -> tuple[Tensor, Tensor | None]:
    """Flatten to float64 rows, in a unit in which no square leaves the range of float64.

    Gradients of a smaller dtype are safe without a unit, which saves a pass over the batch.
    """
    rows = gradients.detach().flatten(start_dim=1).double()
    return scaled(rows) if gradients.dtype == torch.float64 else (rows, None)
