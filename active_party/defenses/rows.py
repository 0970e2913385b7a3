"""Batches of gradients in the form that the mathematics needs: rows, with sizes in float64."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from splitveil.common.data.settings import ONE_NUMBER

_SMALLEST_UNIT = 1e-307  # below it the reciprocal of a float64 overflows


def as_rows(gradients: Tensor) -> Tensor:
    """View a raw gradient as (batch, cut_dim), or raise ValueError if it cannot be one."""
    if gradients.dtype not in {torch.float32, torch.float64}:
        raise ValueError(f"gradients must be float32 or float64, got {gradients.dtype}")
    if gradients.ndim < 2 or gradients.numel() == 0:
        raise ValueError(f"expected (batch, *cut_shape) gradients, got {tuple(gradients.shape)}")
    rows = gradients.detach().flatten(start_dim=1)
    if not all_finite(rows):
        raise ValueError("the raw gradient holds NaN or infinity: training has diverged")
    return rows


def _one_per_row(labels: Tensor, rows: Tensor) -> Tensor:
    batch = rows.shape[0]
    if labels.shape not in {(batch,), (batch, 1)}:
        raise ValueError(f"expected {batch} labels, got shape {tuple(labels.shape)}")
    return labels.detach().to(rows.device).reshape(batch)


def as_positive(labels: Tensor, rows: Tensor) -> Tensor:
    """Turn labels of 0 and 1 into a (batch,) bool tensor on the rows' device."""
    labels = _one_per_row(labels, rows)
    positive = labels == 1
    if not torch.equal(labels, positive.to(labels.dtype)):
        raise ValueError("labels must be 0 or 1")
    return positive


def as_classes(labels: Tensor, rows: Tensor, num_classes: int) -> Tensor:
    """Turn labels into class indices, (batch,) int64 on the rows' device."""
    if num_classes == 2:
        return as_positive(labels, rows).long()
    labels = _one_per_row(labels, rows)
    classes = labels.long()
    if not bool(((classes == labels) & (classes >= 0) & (classes < num_classes)).all()):
        raise ValueError(f"labels must be class indices from 0 to {num_classes - 1}")
    return classes


def check_labels(labels: Tensor, rows: Tensor, num_classes: int) -> None:
    """Check the labels of a batch, of classes or numbers, whose values a defense does not use."""
    if num_classes != ONE_NUMBER:
        as_classes(labels, rows, num_classes)
        return
    labels = _one_per_row(labels, rows)
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise ValueError("labels must be shares of their range, within 0 and 1")


def all_finite(rows: Tensor) -> bool:
    """Return whether no value is NaN or infinite."""
    # A sum takes a fifth of the time. It may overflow, but is never finite if one value is not.
    return math.isfinite(rows.sum()) or math.isfinite(_largest_size(rows))


def _largest_size(rows: Tensor) -> Tensor:
    low, high = rows.aminmax()
    return torch.maximum(-low, high).double()


class RowsInDouble:
    """The rows of a batch in float64, in pieces that fit into the processor's cache.

    They are divided by ``unit``, so that neither their squares nor sums of these overflow. Squares
    of float32 are far from that in float64: their unit is 1, which saves two passes.

    An iteration yields each slice of the batch with a copy of its rows. A batch of one piece is
    converted once, so only the last iteration may change the copies.
    """

    def __init__(self, rows: Tensor) -> None:
        largest = 0.0 if rows.dtype == torch.float32 else float(_largest_size(rows))
        self.unit = max(largest, _SMALLEST_UNIT) if largest > 0 else 1.0
        self.cut_dim = rows.shape[1]
        self._rows = rows
        self._only: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        rows = self._rows
        step = max(1, (2**24 if rows.is_cuda else 2**17) // self.cut_dim)
        if len(rows) <= step:
            if self._only is None:
                self._only = self._in_double(slice(None))
            yield slice(None), self._only
            return
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            yield part, self._in_double(part)

    def to_size(self, values: Tensor) -> Tensor:
        """Return values that were computed from these rows in the units of the batch."""
        return values if self.unit == 1 else values * self.unit

    def _in_double(self, part: slice) -> Tensor:
        chunk = self._rows[part].to(torch.float64, copy=True)
        # Division takes three times as long.
        return chunk if self.unit == 1 else chunk.mul_(1 / self.unit)


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norms, (batch,) float64, exact for values of any size."""
    chunks = RowsInDouble(rows)
    norms = [torch.linalg.vector_norm(chunk, dim=1) for _, chunk in chunks]
    return chunks.to_size(torch.cat(norms))
