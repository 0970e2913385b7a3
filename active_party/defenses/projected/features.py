"""Columns for the design: functions of a row that need no label.

A peer chooses its activations, and with them almost every column. So no column may turn into
something that is not a number, and one huge row must not make all others equal: values are cut off
at 1e15, centred and scaled by a sample's winsorised mean and standard deviation, and clipped.

    constant | activations | own features | hidden units | logits | J | s | s x the first two

with J_i the slopes of a row's logit, d logit / d activation, and s_i = J_i . mean J. Gradients are
(p_i - y_i) J_i, so a step of the bottom model asks for sums of (y - p) J and of its products with
what the bottom model sees. Slopes may be given for each of several classes, (rows, classes,
cut_dim): then s has one column for each class, and there are neither J nor products.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = 1e15
"""Cut-off of raw values: squares and products of two of them are finite in float32."""

_CLIP = 4.0
_TAIL = 0.01
"""Share of the sample on either side that does not influence centre and scale."""

_MOST_MULTIPLIED = 64
"""Own features beyond which their products with s are left out: the design takes m^2 N steps."""

_SAMPLE_ROWS = 65_536
"""Rows that the design's directions are chosen from; its weights are those of all rows."""

_SCALED_ROWS = 16_384
"""Of them, rows that centre and scale are chosen from."""


class RowChunk(NamedTuple):
    """Facts about consecutive training rows that do not depend on any label."""

    activations: Tensor
    """(rows, cut_dim) float32."""

    own: Tensor | None
    """Dense own features of the active party, (rows, features)."""

    hidden: Tensor | None
    """Hidden units of the top model, (rows, units)."""

    logits: Tensor
    """(rows,), or (rows, classes)."""

    slopes: Tensor
    """d logit / d activation, (rows, cut_dim), or (rows, classes, cut_dim)."""


Chunks = Callable[[], Iterator[RowChunk]]
"""Yields the training rows in the same order and with the same values at every call."""


class Columns(NamedTuple):
    """The way from a chunk to its columns."""

    mean_slope: Tensor
    """(cut_dim,), or (classes, cut_dim), float32."""

    centre: Tensor
    """(raw columns,) float32."""

    scale: Tensor
    """Factor after centring, (raw columns,) float32; 0 for a column that is constant."""

    num_multiplied: int
    """The first so many raw columns are multiplied by s, the last one."""

    def of(self, chunk: RowChunk) -> Tensor:
        """Return the columns of some rows, (rows, columns) float32, within -4 to 4."""
        raw = _raw(chunk, self.mean_slope)
        scaled = raw.sub_(self.centre).mul_(self.scale).clamp_(-_CLIP, _CLIP)
        products = scaled[:, -1:] * scaled[:, : self.num_multiplied]
        products.clamp_(-_CLIP, _CLIP)
        return torch.cat([scaled.new_ones(len(scaled), 1), scaled, products], dim=1)


class Sample(NamedTuple):
    """Rows at equal distances, from the first on."""

    rows: RowChunk
    stride: int


def sample_of(chunks: Chunks, num_rows: int) -> Sample:
    """Collect at most 65,536 rows at equal distances."""
    stride = max(1, -(-num_rows // _SAMPLE_ROWS))
    kept: list[RowChunk] = []
    start = 0
    for chunk in chunks():
        rows = slice((-start) % stride, None, stride)
        kept.append(RowChunk(*(None if part is None else _tame(part[rows]) for part in chunk)))  # type: ignore[arg-type]
        start += len(chunk.activations)
    if start != num_rows or num_rows < 1:
        raise ValueError(f"expected chunks of {num_rows} rows, at least 1, got {start}")
    together = [_joined(parts) for parts in zip(*kept, strict=True)]
    return Sample(RowChunk(*together), stride)  # type: ignore[arg-type]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all chunks, or None if there are none."""
    given = [part for part in parts if part is not None]
    if given and len(given) != len(parts):
        raise ValueError("expected chunks of the same kinds of facts")
    return torch.cat(given) if given else None


def columns_of(rows: RowChunk) -> Columns:
    """Choose centre and scale of every column from a sample of the rows."""
    mean_slope = rows.slopes.double().mean(dim=0).float()
    few = slice(None, None, max(1, len(rows.slopes) // _SCALED_ROWS))
    raw = _raw(RowChunk(*(None if part is None else part[few] for part in rows)), mean_slope)  # type: ignore[arg-type]
    raw = raw.double()
    low, high = _quantile(raw, _TAIL), _quantile(raw, 1 - _TAIL)
    # A column of few non-zero values has equal quantiles and is not constant.
    spread = torch.where(high > low, high - low, raw.amax(dim=0) - raw.amin(dim=0))
    low, high = low - 0.5 * spread, high + 0.5 * spread
    kept = raw.clamp(low, high)
    centre, std = kept.mean(dim=0), kept.std(dim=0, correction=0)
    tiny = 1e-6 * centre.abs() + 1e-30
    scale = torch.where(std > tiny, 1 / std.clamp_min(1e-30), 0.0)
    return Columns(mean_slope, centre.float(), scale.float(), _num_multiplied(rows))


def _num_multiplied(rows: RowChunk) -> int:
    """Return the number of columns to be multiplied by s: many own features are left out."""
    if rows.slopes.ndim == 3:
        return 0
    own = 0 if rows.own is None else rows.own.shape[1]
    return rows.activations.shape[1] + (own if own <= _MOST_MULTIPLIED else 0)


def _raw(chunk: RowChunk, mean_slope: Tensor) -> Tensor:
    """Return all columns before centring, (rows, raw columns); those of the slope come last."""
    slopes = _tame(chunk.slopes)
    along = (slopes * mean_slope).sum(dim=-1)
    one_logit = slopes.ndim == 2
    parts = [chunk.activations, chunk.own, chunk.hidden, chunk.logits]
    parts += [slopes, along] if one_logit else [along]
    return torch.cat(
        [_tame(part).reshape(len(slopes), -1) for part in parts if part is not None], dim=1
    )


def _tame(values: Tensor) -> Tensor:
    """Return values within the cut-off; what is not a number becomes 0."""
    finite = torch.nan_to_num(values.detach().float(), nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    return finite.clamp_(-_LARGEST, _LARGEST)


def _quantile(values: Tensor, share: float) -> Tensor:
    """Return a quantile of each column; torch's own refuses large tables."""
    place = 1 + round(share * (len(values) - 1))
    return values.kthvalue(place, dim=0).values
