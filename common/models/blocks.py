"""Computes predictions in blocks of a fixed number of rows, so that they do not depend on company.

The bits of a matrix product depend on how many rows it has: libraries choose another order of
summation for other sizes. Those of a sigmoid depend on whether a value is at the end of an odd
number of values, which is computed apart. On the CPU, every prediction is therefore computed in a
block of one fixed size, whose last row is repeated where there are fewer rows. A row then gets the
same bits in the evaluation of a run, in a batch of predictions and in a request of a single row,
with the same libraries, processor and number of threads. Other devices compute all rows at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features

BLOCK_ROWS = 256
"""Rows of a block: few enough for a single row to be cheap, enough for a matrix product."""
LARGE_ROW_VALUES = 4096
LARGE_BLOCK_ROWS = 32
"""Rows of a block of inputs with more values than this per row, such as images."""


def predict_in_blocks(
    model: nn.Module,
    *inputs: Tensor | Features | None,
    link: Callable[[Tensor], Tensor] = lambda output: output,
) -> Tensor:
    """Return the output of a model in evaluation mode for some rows, without a graph.

    Args:
        model: its output for a row depends on this row alone; left in evaluation mode.
        inputs: as the model takes them, all for the same rows, at least one; None is passed on.
        link: computes of the model's output what is returned, within the blocks.
    """
    model.eval()
    given = [part for part in inputs if part is not None]
    num_rows = len(given[0])
    with torch.no_grad():
        if _device_of(given[0]).type != "cpu" or not num_rows:
            return link(model(*inputs))
        block_rows = block_rows_for(given)
        parts = [
            link(model(*(_block(part, start, num_rows, block_rows) for part in inputs)))[
                : num_rows - start
            ]
            for start in range(0, num_rows, block_rows)
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def block_rows_for(inputs: "list[Tensor | Features]") -> int:
    """Return the number of rows in a block; it depends on the form of a row alone."""
    values = sum(_values_per_row(part) for part in inputs)
    return LARGE_BLOCK_ROWS if values > LARGE_ROW_VALUES else BLOCK_ROWS


def _values_per_row(rows: Tensor | Features) -> int:
    parts = [rows] if isinstance(rows, Tensor) else rows.parts()
    return sum(part[:1].numel() for part in parts if part is not None)


def _device_of(rows: Tensor | Features) -> torch.device:
    parts = [rows] if isinstance(rows, Tensor) else rows.parts()
    return next(part.device for part in parts if part is not None)


def _block(
    rows: Tensor | Features | None, start: int, num_rows: int, block_rows: int
) -> Tensor | Features | None:
    """Return the rows of a block in memory of its own, whose alignment is always the same."""
    if rows is None:
        return None
    index = torch.arange(start, start + block_rows).clamp_(max=num_rows - 1)
    return rows[index] if isinstance(rows, Tensor) else rows.rows(index)
