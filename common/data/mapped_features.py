"""Encodes the features of a table on disk batch by batch, so that they need not fit into memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitveil.common.data.converted import MappedTable
from splitveil.common.data.features import (
    MISSING_SLOT,
    FeatureEncoder,
    Features,
    compress,
    slots_of,
)

CPU = torch.device("cpu")


class RowEncoder:
    """Encodes rows of a table on disk as ``FeatureEncoder.transform`` does, bit for bit.

    Args:
        encoder: the encoder fitted on this table's training rows.
        table: the table on disk.

    Raises:
        DataError: the table lacks a column that the encoder was fitted on, or has other images.
    """

    def __init__(self, encoder: FeatureEncoder, table: MappedTable) -> None:
        encoder.check_same_columns(table)
        self._table = table
        self._signed_log1p = encoder.signed_log1p
        self._numeric = _indices_of(table.numeric, [scaler.name for scaler in encoder.numeric])
        self._shift = np.array([scaler.shift for scaler in encoder.numeric])
        self._scale = np.array([scaler.scale for scaler in encoder.numeric])
        self._codes = _indices_of(table.categorical, [v.name for v in encoder.categorical])
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
        """Return some rows of the table as tensors."""
        numeric = categorical = image = None
        if len(self._shift):
            values = self._table.numeric_rows[rows][:, self._numeric]
            values = compress(values, signed_log1p=self._signed_log1p)
            scaled = (values - self._shift) / self._scale
            numeric = torch.from_numpy(scaled.astype(np.float32))
        if len(self._starts):
            codes = self._table.code_rows[rows][:, self._codes]
            categorical = torch.from_numpy(self._slots[codes + self._starts])
        if self._table.image is not None:
            image = torch.from_numpy(np.ascontiguousarray(self._table.image[rows]))
        return Features(numeric, categorical, image)


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
        """Return the same features, with requested rows going to a device."""
        return replace(self, device=device)


def _indices_of(columns: Mapping[str, object], names: Sequence[str]) -> slice | NDArray[np.int64]:
    """Return the columns' indices; a slice, which copies nothing, for all columns in order."""
    known = list(columns)
    if known == list(names):
        return slice(None)
    return np.array([known.index(name) for name in names], np.int64)
