"""A party's rows as predictions need them: found by id, encoded as in the training."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.features import FeatureEncoder, Features, MappedFeatures, RowEncoder
from splitveil.common.data.stored_ids import ABSENT, IdIndex
from splitveil.common.data.table_files import (
    settings_for,
    source_of,
    unknown_categories,
    unseen_numbers,
)
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import PartySettings

_logger = logging.getLogger(__name__)


class ServedRows:
    def __init__(self, data: PartyData, encoder: FeatureEncoder, form: CanonicalForm) -> None:
        self._form = form
        self.source = data.table.source  # the table, for messages
        self.encoder = encoder
        self._ids = data.ids
        self._index = IdIndex(data.ids)
        self._is_served = np.ones(len(data.ids), np.bool_)
        everything = np.arange(len(data.ids), dtype=np.int64)
        self._features: Features = (
            MappedFeatures(encode=RowEncoder(encoder, data.table), file_rows=everything)
            if data.table.is_on_disk
            else encoder.transform(data.table, everything)
        )

    @classmethod
    def load(
        cls, settings: PartySettings, encoder: FeatureEncoder | None, table: Path | None = None
    ) -> "ServedRows":
        if encoder is None:
            raise SettingsError("data.features: the model was trained without features here")
        own = settings.data.source
        data, has_copy = None, getattr(own, "cache_dir", None) is not None
        if table is None and has_copy and settings.data.unlabelled_rows == "error":
            with suppress(DataError):  # of labels or columns that predictions do not need
                data = PartyData.of(settings)  # the training's copy on disk
        if data is None:
            source = own if table is None else source_of(table, own)
            chosen = settings_for(settings.data, source, encoder)
            data = PartyData.load(chosen, settings.base_dir, id_rules=settings.contract.ids)
        served = cls(data, encoder, CanonicalForm(settings.contract.ids))
        ways = (unknown_categories, unseen_numbers)
        found = [one for way in ways for one in way(encoder, data.table, settings.data.features)]
        if refused := [sentence for level, sentence in found if level == logging.ERROR]:
            raise DataError("\n".join(refused))
        for level, sentence in found:
            _logger.log(level, "%s", sentence)
        return served

    def __len__(self) -> int:
        return int(self._is_served.sum())

    def serve_only(self, ids: Sequence[str]) -> None:
        """Keep only the rows of some ids, in canonical form; ids without a row are fine."""
        rows = self._index.rows_of(ids)
        self._is_served[:] = False
        self._is_served[rows[rows != ABSENT]] = True

    def served(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._is_served)

    def ids_at(self, rows: NDArray[np.int64]) -> list[str]:
        return [self._ids[row] for row in rows.tolist()]

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the row of each id, in any form; ``ABSENT`` for one without a served row."""
        rows = self._index.rows_of(self._form.of(ids))
        return np.where((rows != ABSENT) & self._is_served[rows], rows, ABSENT)

    def features_of(self, rows: NDArray[np.int64]) -> Features:
        return self._features.rows(torch.from_numpy(rows))
