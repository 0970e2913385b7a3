"""A party's own rows with their canonical ids, checked before anything is sent."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.alignment import canonical_ids
from common.data.features import FeatureEncoder, Features
from common.data.settings import DataSettings
from common.data.table import Table, read_table
from common.errors import DataError
from common.run_course import AlignedRows
from common.sample_order import Positions


@dataclass(frozen=True)
class PartyData:
    """A table and its ids, row by row as in the file."""

    settings: DataSettings
    table: Table
    ids: list[str]

    @classmethod
    def load(cls, settings: DataSettings, base_dir: Path) -> "PartyData":
        """Read a party's file.

        Raises:
            DataError: with file, column, rows and count of what is wrong.
        """
        table = read_table(settings, base_dir)
        where = f"{table.source}: column {settings.id_column!r}"
        return cls(settings, table, canonical_ids(table.ids, where))

    def fit(self, training_rows: Positions) -> FeatureEncoder | None:
        """Fit scalers and vocabularies on some rows of the file; None without features."""
        if self.settings.features is None:
            return None
        return FeatureEncoder.fit(self.settings.features, self.table, training_rows)

    def encode(self, rows: AlignedRows) -> tuple[FeatureEncoder | None, Features | None]:
        """Fit on the training rows and return the features of all rows in the common order."""
        encoder = self.fit(rows.file_rows[rows.splits["train"]])
        if encoder is None:
            return None, None
        return encoder, encoder.transform(self.table, rows.file_rows)

    def digest(self, encoder: FeatureEncoder | None) -> str:
        """Return a digest of ids, labels and what was fitted to the features, in hexadecimal."""
        found = hashlib.sha256("\0".join(self.ids).encode())
        if self.table.labels is not None:
            found.update(np.ascontiguousarray(self.table.labels).tobytes())
        if encoder is not None:
            found.update(json.dumps(encoder.state(), sort_keys=True).encode())
        return found.hexdigest()

    def labels_of(self, ids: list[str]) -> Tensor:
        """Look up the labels of some ids, (ids,) float32.

        Raises:
            DataError: some of the ids have no label here.
        """
        if self.table.labels is None:
            raise DataError(f"{self.table.source}: there is no label column")
        row_of = {name: row for row, name in enumerate(self.ids)}
        rows = np.array([row_of.get(name, -1) for name in ids], dtype=np.int64)
        missing = int((rows < 0).sum())
        if missing:
            raise DataError(
                f"{self.table.source}: {missing} of the {len(ids)} aligned ids have no label here"
            )
        return torch.from_numpy(self.table.labels[rows])
