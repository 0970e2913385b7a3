"""Batches of gradients in the form that the mathematics needs: rows, with sizes in float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from splitveil.common.data.label_range import ONE_NUMBER

_SMALLEST_UNIT = 1e-307
"""Below it the reciprocal of a float64 overflows."""


def as_rows(gradients: Tensor) -> Tensor:
    """View a raw gradient as (batch, cut_dim).

    Raises:
        ValueError: it has no rows or no columns, is not float32 or float64, or is not finite.
    """
    if gradients.dtype not in {torch.float32, torch.float64}:
        raise ValueError(f"gradients must be float32 or float64, got {gradients.dtype}")
    if gradients.ndim < 2 or gradients.numel() == 0:
        raise ValueError(f"expected (batch, *cut_shape) gradients, got {tuple(gradients.shape)}")
    rows = gradients.detach().flatten(start_dim=1)
    if not torch.isfinite(largest_size(rows)):
        raise ValueError("the raw gradient holds NaN or infinity: training has diverged")
    return rows


def as_positive(labels: Tensor, rows: Tensor) -> Tensor:
    """Turn labels into a (batch,) bool tensor on the rows' device.

    Raises:
        ValueError: their number is not the batch's, or one is neither 0 nor 1.
    """
    batch = rows.shape[0]
    if labels.shape not in {(batch,), (batch, 1)}:
        raise ValueError(f"expected {batch} labels, got shape {tuple(labels.shape)}")
    labels = labels.detach().to(rows.device).reshape(batch)
    positive = labels == 1
    if not bool((positive | (labels == 0)).all()):
        raise ValueError("labels must be 0 or 1")
    return positive


def as_classes(labels: Tensor, rows: Tensor, num_classes: int) -> Tensor:
    """Turn labels into class indices, (batch,) int64 on the rows' device.

    Raises:
        ValueError: their number is not the batch's, or one is not a class index.
    """
    if num_classes == 2:
        return as_positive(labels, rows).long()
    batch = rows.shape[0]
    if labels.shape not in {(batch,), (batch, 1)}:
        raise ValueError(f"expected {batch} labels, got shape {tuple(labels.shape)}")
    labels = labels.detach().to(rows.device).reshape(batch)
    classes = labels.long()
    if not bool(((classes == labels) & (classes >= 0) & (classes < num_classes)).all()):
        raise ValueError(f"labels must be class indices from 0 to {num_classes - 1}")
    return classes


def check_labels(labels: Tensor, rows: Tensor, num_classes: int) -> None:
    """Check the labels of a batch whose values a defense does not use.

    Args:
        labels: 0 or 1, class indices, or shares of the range if they are numbers.
        rows: the batch's gradients.
        num_classes: ``ONE_NUMBER`` if they are numbers.

    Raises:
        ValueError: their number is not the batch's, or one is out of range.
    """
    if num_classes != ONE_NUMBER:
        as_classes(labels, rows, num_classes)
        return
    if labels.shape not in {(len(rows),), (len(rows), 1)}:
        raise ValueError(f"expected {len(rows)} labels, got shape {tuple(labels.shape)}")
    if not bool(((labels >= 0) & (labels <= 1)).all()):
        raise ValueError("labels must be shares of their range, within 0 and 1")


def largest_size(rows: Tensor) -> Tensor:
    """Return the largest absolute value, as a float64 scalar on the same device."""
    low, high = rows.aminmax()
    return torch.maximum(-low, high).double()


def as_unit(largest: Tensor) -> Tensor:
    """Return the unit in which to measure values, given their largest size: 1 if it is 0.

    The unit is never so small that its reciprocal overflows.
    """
    return torch.where(largest > 0, largest.clamp(min=_SMALLEST_UNIT), 1.0)


def in_chunks(rows: Tensor, unit: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the batch with their rows in float64, divided by ``unit``.

    The batch is processed in pieces, because a float64 copy of a large batch would not fit into the
    processor's cache.
    """
    inverse = unit.clamp(min=_SMALLEST_UNIT).reciprocal()  # division takes three times as long
    elements = 2**24 if rows.is_cuda else 2**17
    step = max(1, elements // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        yield part, rows[part].to(torch.float64, copy=True).mul_(inverse)


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norms, (batch,) float64, exact for values of any size."""
    unit = as_unit(largest_size(rows))
    norms = [torch.linalg.vector_norm(chunk, dim=1) for _, chunk in in_chunks(rows, unit)]
    return torch.cat(norms).mul_(unit)
