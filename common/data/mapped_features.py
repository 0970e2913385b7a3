"""Encodes the features of a table on disk batch by batch, so that they need not fit into memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitveil.common.data.category_lists import SetMembers
from splitveil.common.data.converted import MappedTable
from splitveil.common.data.features import (
    MISSING_SLOT,
    FeatureEncoder,
    Features,
    slots_of,
)
from splitveil.common.data.fitting import compress

CPU = torch.device("cpu")


class RowEncoder:
    """Encodes rows of a table on disk as ``FeatureEncoder.transform`` does, bit for bit."""

    def __init__(self, encoder: FeatureEncoder, table: MappedTable) -> None:
        encoder.check_same_columns(table)
        self._table = table
        self._signed_log1p = encoder.signed_log1p
        self._numeric = _indices_of(table.numeric, [scaler.name for scaler in encoder.numeric])
        self._fill = _fills(encoder)
        self._indicators = [
            j for j, scaler in enumerate(encoder.numeric) if scaler.name in encoder.indicators
        ]
        self._shift = np.array([scaler.shift for scaler in encoder.numeric])
        self._scale = np.array([scaler.scale for scaler in encoder.numeric])
        coded = [*table.categorical, *table.lists]
        self._codes = _indices_of(coded, [v.name for v in encoder.categorical])
        self._members = [
            (coded.index(v.name), SetMembers(table.lists[v.name].categories, v.categories))
            for v in encoder.lists
        ]
        # One list of slots for all columns. Code -1, no value, selects the entry before a column's
        # own entries.
        slots = [
            np.append(MISSING_SLOT, slots_of(v, table.categorical[v.name].categories))
            for v in encoder.categorical
        ]
        self._slots = np.concatenate([np.empty(0, np.int64), *slots])
        lengths = [len(column) for column in slots]
        self._starts = np.cumsum([1, *lengths])[: len(slots)]

    def __call__(self, rows: NDArray[np.int64]) -> Features:
        categorical = image = None
        numbers = self._numbers(rows) if len(self._shift) else []
        if self._members:
            all_codes = self._table.code_rows[rows]
            numbers += [members(all_codes[:, j]) for j, members in self._members]
        numeric = torch.from_numpy(_side_by_side(numbers)) if numbers else None
        if len(self._starts):
            codes = self._table.code_rows[rows][:, self._codes]
            categorical = torch.from_numpy(self._slots[codes + self._starts])
        if self._table.image is not None:
            image = torch.from_numpy(np.ascontiguousarray(self._table.image[rows]))
        return Features(numeric, categorical, image)

    def _numbers(self, rows: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Return the scaled numbers and, if there are some, the indicators of gaps."""
        values = self._table.numeric_rows[rows][:, self._numeric]
        values = compress(values, signed_log1p=self._signed_log1p)
        if self._fill is None:
            return [((values - self._shift) / self._scale).astype(np.float32)]
        is_gap = np.isnan(values)
        scaled = (np.where(is_gap, self._fill, values) - self._shift) / self._scale
        found = [scaled.astype(np.float32)]
        if self._indicators:
            found.append(is_gap[:, self._indicators].astype(np.float32))
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class MappedFeatures(Features):
    """Features of many rows, of which only the requested rows are read and encoded."""

    encode: RowEncoder
    """Encodes rows of the table."""

    file_rows: NDArray[np.int64]
    """Rows of the table, in the order of these features, (rows,)."""

    device: torch.device = CPU
    """The device for the tensors of requested rows."""

    def __len__(self) -> int:
        return len(self.file_rows)

    def rows(self, index: Tensor) -> Features:
        """Return the rows with these positions, (count,) int64, in this order."""
        return self.encode(self.file_rows[index.cpu().numpy()]).to(self.device)

    def to(self, device: torch.device) -> "MappedFeatures":
        return replace(self, device=device)


def _fills(encoder: FeatureEncoder) -> NDArray[np.float64] | None:
    """Return the number in place of a gap of each column; None if no column has any."""
    fills = [scaler.fill for scaler in encoder.numeric]
    if all(fill is None for fill in fills):
        return None
    return np.array([np.nan if fill is None else fill for fill in fills])


def _side_by_side(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _indices_of(columns: Iterable[str], names: Sequence[str]) -> slice | NDArray[np.int64]:
    """Return the columns' indices; a slice, which copies nothing, for all columns in order."""
    known = list(columns)
    if known == list(names):
        return slice(None)
    return np.array([known.index(name) for name in names], np.int64)
