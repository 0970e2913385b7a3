"""Computes predictions in blocks of a fixed number of rows, whatever rows are beside them.

The bits of a matrix product depend on how many rows it has: libraries choose another order of
summation for other sizes. The bits of a sigmoid depend on whether a value ends an odd number of
values, because it is then computed apart. On the CPU, every prediction is therefore computed in a
block of one fixed size, padded with its last row. A row then gets the same bits in the evaluation
of a run, in a batch of predictions and in a request of a single row, with the same libraries,
processor and number of threads. Other devices compute all rows at once.

Some libraries compute a row otherwise in some places of a block than in others: MKL on AMD EPYC
gives every fourth row of a product with few columns other bits than the three between. A model's
first block is therefore preceded by trials with one row in every place of a block. Only the places
that give it the same bits as the first place are used.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features

_logger = logging.getLogger(__name__)

BLOCK_ROWS = 256
"""Rows of a block: few enough for a single row to be cheap, enough for a matrix product."""
LARGE_ROW_VALUES = 4096
LARGE_BLOCK_ROWS = 32
"""Rows of a block of inputs with more values than this per row, such as images."""
_SMALLER_BLOCKS = (32, 8, 1)
"""Tried where less than an eighth of the places can be used."""
_LEAST_SHARE = 1 / 8
_TRIED_VALUES = 64
"""Outputs that a place must have in common with the first one; about half of them differ."""
_LEAST_TRIALS = 4


class _Layout(NamedTuple):
    """Places of rows in a block."""

    size: int
    places: Tensor
    """(usable places,), int64, ascending, the first one 0."""


Inputs: TypeAlias = Sequence[Tensor | Features | None]

_layouts: WeakKeyDictionary[nn.Module, dict[tuple[int, str], _Layout]] = WeakKeyDictionary()
"""By model, and by what may differ between its calls."""


def _unchanged(output: Tensor) -> Tensor:
    return output


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors that a model's inputs consist of, in order."""
    parts = ([one] if isinstance(one, Tensor) else one.parts() for one in inputs if one is not None)
    return [tensor for part in parts for tensor in part]


def predict_in_blocks(
    model: nn.Module,
    *inputs: Tensor | Features | None,
    link: Callable[[Tensor], Tensor] = _unchanged,
) -> Tensor:
    """Return the output of a model in evaluation mode for some rows, without a graph.

    The model's output for a row depends only on this row. ``link`` computes of it what is returned,
    within the blocks. An input of None is passed on.
    """
    model.eval()
    given = [part for part in inputs if part is not None]
    num_rows = len(given[0])
    with torch.no_grad():
        if tensors_of(given)[0].device.type != "cpu" or not num_rows:
            return link(model(*inputs))
        values = sum(values[:1].numel() for values in tensors_of(inputs))
        key = values, getattr(link, "__qualname__", type(link).__qualname__)
        known = _layouts.setdefault(model, {})
        if key not in known:
            most = LARGE_BLOCK_ROWS if values > LARGE_ROW_VALUES else BLOCK_ROWS
            for size in (most, *(size for size in _SMALLER_BLOCKS if size < most)):
                known[key] = _Layout(size, _equal_places(model, inputs, link, size))
                if len(known[key].places) >= _LEAST_SHARE * size:
                    break
            _logger.debug("%d of %d places of a block are used", len(known[key].places), size)
        layout = known[key]
        at_once = len(layout.places)
        parts = []
        for start in range(0, num_rows, at_once):
            block = [_block(part, start, num_rows, layout) for part in inputs]
            outputs = link(model(*block))
            if at_once < layout.size:
                outputs = outputs[layout.places]
            parts.append(outputs[: num_rows - start])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _equal_places(
    model: nn.Module, inputs: Inputs, link: Callable[[Tensor], Tensor], size: int
) -> Tensor:
    """Return the places that give a row the same bits as the first place, ascending."""
    every_place = _Layout(size, torch.arange(size))
    generator = torch.Generator().manual_seed(0)
    equal = torch.ones(size, dtype=torch.bool)
    values, trials = 0, 0
    while trials < _LEAST_TRIALS or values < _TRIED_VALUES:
        row = [_drawn(part, generator) for part in inputs]
        output = model(*(_block(part, 0, 1, every_place) for part in row))
        for values_of in (output, link(output)):
            # A model that answers with NaN does so in every place.
            same = (values_of == values_of[:1]) | values_of.isnan()
            equal &= same.flatten(1).all(1) if same.dim() > 1 else same
        values += output[0].numel()
        trials += 1
    return equal.nonzero().squeeze(1)


def _drawn(rows: Tensor | Features | None, generator: torch.Generator) -> Tensor | Features | None:
    if rows is None:
        return None
    if isinstance(rows, Features):
        first = rows.rows(torch.zeros(1, dtype=torch.int64))
        return first.changed(partial(_drawn_tensor, generator=generator))
    return _drawn_tensor(rows[:1], generator)


def _drawn_tensor(values: Tensor, generator: torch.Generator) -> Tensor:
    if not values.is_floating_point():
        return values
    return torch.randn(values.shape, generator=generator).to(values.dtype)


def _block(
    rows: Tensor | Features | None, start: int, num_rows: int, layout: _Layout
) -> Tensor | Features | None:
    """Return the rows of a block in memory of its own, whose alignment is always the same."""
    if rows is None:
        return None
    index = torch.full((layout.size,), num_rows - 1)
    index[layout.places] = torch.arange(start, start + len(layout.places)).clamp_(max=num_rows - 1)
    return rows.index_select(0, index) if isinstance(rows, Tensor) else rows.rows(index)
