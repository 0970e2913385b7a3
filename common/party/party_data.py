"""Loads and checks a party's own rows and canonical ids, for a run and for predictions."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data import source_settings
from splitveil.common.data.canonical_form import CanonicalForm, form_of
from splitveil.common.data.columns import WILDCARDS, are_numbers
from splitveil.common.data.converted import open_converted
from splitveil.common.data.features import FeatureEncoder, Features, MappedFeatures, RowEncoder
from splitveil.common.data.kinds import open_source, text_file, with_advice
from splitveil.common.data.sequences import TokenColumn, token_columns
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.sources import list_rows
from splitveil.common.data.stored_ids import ABSENT, IdIndex
from splitveil.common.data.table import Table, read_table, table_of_ids
from splitveil.common.data.table_files import (
    settings_for,
    source_of,
    unknown_categories,
    unseen_numbers,
)
from splitveil.common.errors import DataError, SettingsError, SplitveilError
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.record.model_files import SETTING, EarlierModel
from splitveil.common.record.progress import ProgressBar
from splitveil.common.run.contract import ColumnSplit, Contract, SplitSettings
from splitveil.common.run.course import HELD_OUT, AlignedRows
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule
from splitveil.common.run.messages import IdForm
from splitveil.common.run.sample_order import SPLITS, Positions

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)

LARGE_FILE_BYTES = 2**30
_IDS_AT_ONCE = 2**16
_ROWS_AT_ONCE = 2**12
_NAMED = 50
"""Columns that a check names where patterns have selected them."""


@dataclass(frozen=True)
class PartyData:
    """A table and its canonical ids, row by row, without the rows that the settings leave out."""

    settings: DataSettings
    table: Table
    sequences: tuple[TokenColumn, ...] = ()

    @property
    def ids(self) -> Sequence[str]:
        return self.table.ids

    @property
    def kept(self) -> NDArray[np.int64] | None:
        """The rows of the file; None for all."""
        return self.table.kept

    @classmethod
    def of(cls, settings: PartySettings) -> "PartyData":
        return cls.load(settings.data, settings.base_dir, settings.split, settings.contract.ids)

    @classmethod
    def load(
        cls,
        settings: DataSettings,
        base_dir: Path,
        split: SplitSettings | None = None,
        id_rules: Sequence[IdRule] = AS_WRITTEN,
    ) -> "PartyData":
        sequences = token_columns(settings.features, base_dir)
        with with_advice(settings.source, base_dir):
            split_column = split.column if isinstance(split, ColumnSplit) else None
            source = settings.source
            if isinstance(source, source_settings.CacheableSource) and source.cache_dir is not None:
                with _conversion_bar(source) as progress:
                    table = open_converted(settings, base_dir, progress, split_column, id_rules)
            else:
                if isinstance(source, source_settings.CacheableSource):
                    _suggest_a_cache(source, base_dir)
                table = read_table(settings, base_dir, split_column, id_rules)
            if isinstance(source, source_settings.CsvSource):
                for doubt in text_file(source, base_dir).doubts():
                    _logger.warning("%s: %s", table.source, doubt)
            _say_almost_numbers(table)
            _say(table, settings)
            return cls(settings, table, sequences)

    def fit(
        self, training_rows: Positions, earlier: EarlierModel | None = None, num_bins: int = 0
    ) -> FeatureEncoder | None:
        if earlier is not None:
            table = None if self.settings.features is None else self.table
            encoder = earlier.encoder_for(table, self.table.source)
            if num_bins and encoder is not None and encoder.numeric and not encoder.bins:
                raise SettingsError(
                    f"{earlier.setting}: {earlier.folder}: that run's model was trained without "
                    f"bins of numbers, and is not of kind tabular"
                )
            return encoder
        if self.settings.features is None:
            return None
        return FeatureEncoder.fit(
            self.settings.features, self.table, training_rows, num_bins, self.sequences
        )

    def rows_without_test(self, rows: AlignedRows) -> Positions:
        """Return all rows of this party's own table that are not held out, ascending."""
        is_kept = np.ones(len(self.ids), dtype=np.bool_)
        if self.table.splits is not None:
            is_kept[self.table.splits != SPLITS.index("train")] = False
        for name in HELD_OUT:
            is_kept[rows.file_rows[rows.splits[name]]] = False
        return np.flatnonzero(is_kept)

    def blocks(self, encoder: FeatureEncoder, file_rows: Positions) -> Iterator[Features]:
        """Yield the features of some rows, part by part."""
        encode = RowEncoder(encoder, self.table)
        for start in range(0, len(file_rows), _ROWS_AT_ONCE):
            yield encode(file_rows[start : start + _ROWS_AT_ONCE])

    def encode(
        self,
        rows: AlignedRows,
        earlier: EarlierModel | None = None,
        num_bins: int = 0,
        fitted_to: Positions | None = None,
    ) -> tuple[FeatureEncoder | None, Features | None]:
        """Encode all rows by what an earlier model was fitted to, or this one is.

        By default these are the training rows.
        """
        if fitted_to is None:
            fitted_to = rows.file_rows[rows.splits["train"]]
        encoder = self.fit(fitted_to, earlier, num_bins)
        if encoder is None:
            return None, None
        return encoder, self.features(encoder, rows.file_rows)

    def features(self, encoder: FeatureEncoder, file_rows: Positions) -> Features:
        """Encode some rows, those of a table on disk when they are asked for."""
        encode = RowEncoder(encoder, self.table)
        if self.table.is_on_disk:
            return MappedFeatures(encode=encode, file_rows=file_rows)
        return encode(file_rows)

    def digest(self, encoder: FeatureEncoder | None, features: Features | None = None) -> str:
        """Return a hexadecimal digest of ids, labels, weights and what ``encode`` returned."""
        found = hashlib.sha256()
        for start in range(0, len(self.ids), _IDS_AT_ONCE):
            joined = "\0".join(self.ids[start : start + _IDS_AT_ONCE])
            found.update(f"{chr(0) if start else ''}{joined}".encode())
        for column in (self.table.labels, self.table.splits, self.table.weights):
            if column is not None:
                found.update(np.ascontiguousarray(column).tobytes())
        if encoder is not None:
            found.update(json.dumps(encoder.state(), sort_keys=True).encode())
        if features is not None:
            for start in range(0, len(features), _ROWS_AT_ONCE):
                for part in features.rows(slice(start, start + _ROWS_AT_ONCE)).parts():
                    found.update(np.ascontiguousarray(part).data)
        return found.hexdigest()

    def training_rows(self, split: SplitSettings) -> int:
        """Return the number of training rows if all rows were aligned; approximate with a hash."""
        if self.table.splits is None:
            share = 1 if isinstance(split, ColumnSplit) else split.train
            return round(share * len(self.ids))
        return int(np.count_nonzero(self.table.splits == SPLITS.index("train")))

    def summary(self, contract: Contract) -> str:
        """Describe the rows and columns; SettingsError if the training rows fill no batch."""
        table, size, rows = self.table, contract.batch_size, self.training_rows(contract.split)
        columns, features = [*table.numeric, *table.coded], self.settings.features
        text = f"{len(self.ids):,} rows in {table.source}"
        if table.splits is not None:
            counts = np.bincount(table.splits, minlength=len(SPLITS))
            parts = (f"{count} {word}" for word, count in zip(SPLITS, counts, strict=True))
            text += f" ({', '.join(parts)})"
        text += f", {len(columns)} feature columns" + " and an image" * (table.image is not None)
        if features is not None and features.patterns and WILDCARDS & {*"".join(features.by_name)}:
            text += f" ({', '.join(columns[:_NAMED])}{', ...' * (len(columns) > _NAMED)})"
        if size <= rows:
            steps = rows // size if contract.drop_last else -(-rows // size)
            return f"{text}, about {steps:,} steps of {size:,} rows per epoch"
        excess = f"contract.batch_size: {size:,} is more than the {rows:,} rows to train on"
        if contract.drop_last:
            raise SettingsError(f"{excess}, and drop_last leaves out every smaller batch")
        return f"{text}; WARNING: {excess}, so that an epoch is one step"

    def labels_at(self, file_rows: Positions) -> "Tensor":
        """Return the labels of some rows of the file, (rows,), float32, or raise DataError."""
        import torch  # noqa: PLC0415 - a party without labels may need none

        if self.table.labels is None:
            raise DataError(f"{self.table.source}: there is no label column")
        return torch.from_numpy(self.table.labels[file_rows])

    def weights_at(self, rows: AlignedRows) -> "Tensor | None":
        """Return weights, (aligned,) float32, of mean 1 in training; None where all count alike."""
        import torch  # noqa: PLC0415 - as above

        if self.table.weights is None:
            return None
        weights = self.table.weights[rows.file_rows]
        return torch.from_numpy((weights / weights[rows.splits["train"]].mean()).astype(np.float32))

    def labels_of(self, ids: Sequence[str]) -> "Tensor":
        """Return the labels of some ids, (ids,), float32, or raise DataError."""
        rows = IdIndex(self.ids).rows_of(ids)
        if missing := int((rows == ABSENT).sum()):
            raise DataError(
                f"{self.table.source}: {missing} of the {len(ids)} aligned ids have no label here"
            )
        return self.labels_at(rows)


def read_ids_alone(
    settings: DataSettings, base_dir: Path, split: SplitSettings | None, id_rules: Sequence[IdRule]
) -> PartyData:
    """Read only the ids of a table and the contract's split column."""
    is_converted = getattr(settings.source, "cache_dir", None) is not None
    if not settings.id_columns or is_converted:
        return PartyData.load(settings, base_dir, split, id_rules)
    split_column = split.column if isinstance(split, ColumnSplit) else None
    source = open_source(settings.source, base_dir)
    with with_advice(settings.source, base_dir):
        table = table_of_ids(settings, source, split_column, id_rules)
    _say(table, settings)
    return PartyData(settings, table)


def form_of_own_ids(settings: PartySettings) -> IdForm | None:
    """Return how a party writes its ids; None if it numbers its rows, or they cannot be read."""
    if settings.data.id_column is None:
        return None
    try:
        data = PartyData.of(settings)
    except SplitveilError:  # a run and a check say it
        return None
    return form_of(data.ids)


def open_earlier_model(settings: PartySettings) -> EarlierModel | None:
    """Open the model that a party's settings start from; None without one. Raises SettingsError."""
    if settings.initial_weights is None:
        return None
    return EarlierModel.open(
        source_settings.expand_path(SETTING, settings.initial_weights, settings.base_dir)
    )


def _say(table: Table, settings: DataSettings) -> None:
    for doubt in filter(None, (table.id_report.losses, *table.id_doubts)):
        _logger.warning("%s: %s: %s", table.source, settings.place_of_ids, doubt)


def _say_almost_numbers(table: Table) -> None:
    for name, column in table.categorical.items():
        is_number = are_numbers(column.categories)
        if is_number.all() or not column.is_nearly_all(is_number):
            continue
        rows = np.flatnonzero(column.rows_of(~is_number))
        _logger.warning(
            "%s: column %r: each text is a category, but %d of %d cells are numbers, those in %s "
            "are not; if they mean no value, name their texts in data.features.missing_texts and "
            "the column in data.features.numeric",
            table.source,
            name,
            (num_cells := (column.codes >= 0).sum()) - len(rows),
            num_cells,
            list_rows((rows if table.kept is None else table.kept[rows]) + 1),
        )


def _suggest_a_cache(source: source_settings.CacheableSource, base_dir: Path) -> None:
    is_remote = isinstance(source, source_settings.ParquetSource) and source.scheme is not None
    if is_remote or not isinstance(source, source_settings.FileSource):
        return
    path = source.resolve(base_dir)
    if path.is_file() and path.stat().st_size > LARGE_FILE_BYTES:
        _logger.warning(
            "%s is large and will be held in memory; set data.source.cache_dir to use "
            "memory-mapped columns instead",
            path,
        )


@contextmanager
def _conversion_bar(source: source_settings.CacheableSource) -> Iterator[Callable[[float], None]]:
    name = source.path if isinstance(source, source_settings.FileSource) else "the query's result"
    has_started = False

    def show(done_fraction: float) -> None:
        nonlocal has_started
        if not has_started:
            has_started = True
            _logger.info("converting %s to columns on disk, which later runs will reuse", name)
        progress.note(round(100 * done_fraction), 100)

    with ProgressBar("converting", "percent") as progress:
        yield show


class ServedRows:
    """A party's rows as predictions need them: found by id, encoded as in the training."""

    def __init__(self, data: PartyData, encoder: FeatureEncoder, form: CanonicalForm) -> None:
        self._form = form
        self.source = data.table.source  # the table, for messages
        self.encoder = encoder
        self._ids = data.ids
        self._index = IdIndex(data.ids)
        self._is_served = np.ones(len(data.ids), np.bool_)
        self._features = data.features(encoder, np.arange(len(data.ids)))

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
        """Return arrays."""
        return self._features.rows(rows)

    def by_column(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        return self.encoder.by_column(self.features_of(rows))
