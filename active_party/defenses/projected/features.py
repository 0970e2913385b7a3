"""Facts about rows that no label enters, and the columns for the design that they make.

A peer chooses its activations, and with them almost every column. So no column may turn into
something that is not a number, and one huge row must not make all others equal: values are cut off
at 1e15, centred and scaled by a sample's winsorised mean and standard deviation, and clipped.

    constant | activations | own features | hidden units | logits | J | s | s x the first two

with J_i the slopes of a row's logit, d logit / d activation, and s_i = J_i . mean J. Gradients are
(p_i - y_i) J_i, so a step of the bottom model asks for sums of (y - p) J and of its products with
what the bottom model sees. Slopes may be given for each of several classes, (rows, classes,
cut_dim): then s has one column for each class, and there are neither J nor products.

The facts are computed from the activation of each row's last visit, the active party's own features
and the top model as it is; no label enters them as long as the top model has seen none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from splitveil.active_party.defenses.interface import RowChunk
from splitveil.common.data.features import Features
from splitveil.common.run.progress import State

_LARGEST = 1e15  # cut-off of raw values: squares and products of two of them are finite in float32

_CLIP = 4.0
_TAIL = 0.01  # share of the sample on either side that does not influence centre and scale

_MOST_MULTIPLIED = 64
"""Own features beyond which their products with s are left out: the design takes m^2 N steps."""

SAMPLE_ROWS = 8192
"""Rows that the design's directions are chosen from; its weights are those of all rows."""

_SCALED_ROWS = 2048  # of them, rows that centre and scale are chosen from, or up to twice as many


Chunks = Callable[[int], Iterator[RowChunk]]
"""Yields every so many-th training row from the first on, with the same values at every call."""


class Columns(NamedTuple):
    """The way from a chunk to its columns."""

    mean_slope: Tensor  # (cut_dim,), or (classes, cut_dim), float32
    centre: Tensor  # (raw columns,) float32
    scale: Tensor  # factor after centring, (raw columns,) float32; 0 for a constant column
    num_multiplied: int  # the first so many raw columns are multiplied by s, the last one

    def of(self, chunk: RowChunk) -> Tensor:
        """Return the columns of some rows, (rows, columns) float32, within -4 to 4."""
        raw = _raw(chunk, self.mean_slope)
        scaled = raw.sub_(self.centre).mul_(self.scale).clamp_(-_CLIP, _CLIP)
        products = scaled[:, -1:] * scaled[:, : self.num_multiplied]
        products.clamp_(-_CLIP, _CLIP)
        return torch.cat([scaled.new_ones(len(scaled), 1), scaled, products], dim=1)


def _joined(parts: Sequence[Tensor | None], every: int) -> Tensor | None:
    given = [part for part in parts if part is not None]
    if given and len(given) != len(parts):
        raise ValueError("expected chunks of the same kinds of facts")
    return torch.cat([part[::every] for part in given]) if given else None


def columns_of(sample: Sequence[RowChunk]) -> Columns:
    """Choose centre and scale of every column from some rows of a sample."""
    every = max(1, sum(len(part.logits) for part in sample) // _SCALED_ROWS)
    rows = RowChunk(*(_joined(parts, every) for parts in zip(*sample, strict=True)))  # type: ignore[arg-type]
    mean_slope = _tame(rows.slopes).double().mean(dim=0).float()
    raw = _raw(rows, mean_slope)
    tail = 1 + round(_TAIL * (len(raw) - 1))  # torch's own quantile sorts all values
    low, high = (
        raw.topk(tail, dim=0, largest=False).values[-1].double(),
        raw.topk(tail, dim=0).values[-1].double(),
    )
    raw = raw.double()
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


CHUNK_ROWS = 4096

_MOST_CATEGORIES = 32
"""Categories of a column beyond which it says nothing here: its indicators would be too many."""
_MOST_COLUMNS = 128


class CutMemory:
    """The last activation of each aligned row; NaN for a row that was not visited yet."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._values: Tensor | None = None

    @property
    def is_filled(self) -> bool:
        return self._values is not None

    def note(self, rows: Tensor, activation: Tensor) -> None:
        """Remember the activations of a batch.

        Shapes: ``rows`` (batch,), ``activation`` (batch, *cut_shape).
        """
        if self._values is None:
            shape = (self._num_rows, *activation.shape[1:])
            self._values = torch.full(shape, torch.nan, device=self._device)
        self._values[rows.to(self._device)] = activation.detach().to(self._values)

    def at(self, rows: Tensor) -> Tensor:
        """Return the last activations of some rows, (rows, *cut_shape) float32."""
        if self._values is None:
            raise RuntimeError("no activation was noted yet")
        return self._values[rows.to(self._device)]

    def is_noted(self, rows: Tensor) -> Tensor:
        """Return which rows were visited, (rows,) bool on the CPU; no peer may send NaN."""
        first: Tensor = self.at(rows).flatten(1)[:, 0]
        return ~first.isnan().cpu()

    def state_dict(self) -> State:
        return {} if self._values is None else {"values": self._values}

    def load_state_dict(self, state: State) -> None:
        values = state.get("values")
        if values is not None and len(values) != self._num_rows:
            raise ValueError(f"expected activations of {self._num_rows} rows, got {len(values)}")
        self._values = None if values is None else values.to(self._device, copy=True)


class LabelFreeFacts:
    """Yields facts about the training rows, chunk by chunk."""

    def __init__(
        self,
        model: nn.Module,
        memory: CutMemory,
        features: Features | None,
        training: Tensor,
        device: torch.device,
    ) -> None:
        self._model = model
        self._memory = memory
        self._features = features
        self._training = training
        self._device = device

    def __call__(self, stride: int = 1) -> Iterator[RowChunk]:
        """Yield the facts, in ascending order of the rows; the model is not changed."""
        with self._evaluating():
            for rows in torch.split(self._training[::stride], CHUNK_ROWS):
                yield self._chunk(rows)

    def logits(self) -> Iterator[Tensor]:
        """Yield the model's logits only, (rows,) or (rows, classes)."""
        with self._evaluating():
            for rows in torch.split(self._training, CHUNK_ROWS):
                with torch.no_grad():
                    logits: Tensor = self._model(self._cut(rows), self._own(rows))
                yield logits

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(was_training)

    def _cut(self, rows: Tensor) -> Tensor:
        return self._memory.at(rows).to(self._device)

    def _own(self, rows: Tensor) -> Features | None:
        return None if self._features is None else self._features.rows(rows.to(self._device))

    def _chunk(self, rows: Tensor) -> RowChunk:
        cut = self._cut(rows).requires_grad_()
        own = self._own(rows)
        with _listening_to_last_layer(self._model) as inputs:
            logits = self._model(cut, own)
        hidden = inputs[-1].detach().flatten(1) if inputs else None
        (slopes,) = torch.autograd.grad(_steepest(logits).sum(), cut)
        return RowChunk(
            cut.detach().flatten(1),
            self._as_numbers(own),
            None if hidden is None or len(hidden) != len(rows) else hidden,
            logits.detach(),
            slopes.flatten(1),
        )

    @cached_property  # every step makes these facts, and few use them
    def _num_categories(self) -> list[int]:
        if self._features is None or self._features.categorical is None:
            return []
        found: list[int] = (self._features.categorical.amax(dim=0) + 1).tolist()
        return found

    def _as_numbers(self, own: Features | None) -> Tensor | None:
        if own is None:
            return None
        parts = [] if own.numeric is None else [own.numeric]
        if own.categorical is not None:
            parts += [
                one_hot(slots, count).to(torch.float32)
                for slots, count in zip(own.categorical.T, self._num_categories, strict=True)
                if count <= _MOST_CATEGORIES
            ]
        return torch.cat(parts, dim=1)[:, :_MOST_COLUMNS] if parts else None


def _steepest(logits: Tensor) -> Tensor:
    """Return one number per row whose slope shows where the activation matters most."""
    if logits.ndim == 1:
        return logits
    return logits.max(dim=1).values - logits.mean(dim=1)


@contextmanager
def _listening_to_last_layer(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the model's linear layers; the last is that of the output layer."""
    inputs: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append(given[0])

    hooks = [
        part.register_forward_pre_hook(note)
        for part in model.modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
