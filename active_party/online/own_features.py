"""Encodes own features that a program sends, as those of the party's file were."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from splitveil.active_party.online.errors import Unusable
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import table_of
from splitveil.common.data.table_files import settings_for
from splitveil.common.errors import DataError

_KINDS = {
    frozenset({str}): pa.string(),
    frozenset({list}): pa.list_(pa.string()),
    frozenset({int}): pa.int64(),
}


class GivenFeatures:
    """Turns columns of values into features.

    Args:
        settings: of the party's data in the training.
        encoder: of the trained model; None if it has no features of this party.
    """

    def __init__(self, settings: DataSettings, encoder: FeatureEncoder | None) -> None:
        self._encoder = encoder
        # No id is read: the request names the rows.
        self._settings = settings_for(settings, settings.source, encoder).model_copy(
            update={"id_column": None}
        )
        chosen = self._settings.features
        self.columns: tuple[str, ...] = ()
        if encoder is not None and chosen is not None:
            kinds = (chosen.numeric, chosen.categorical, chosen.timestamps, chosen.lists)
            self.columns = tuple(name for columns in kinds for name in columns)
        """The names of all columns that a request has to give."""

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> Features:
        """Encode rows, each with a value or None by column.

        Raises:
            Unusable: a column is missing, unknown, or has a value of another kind.
        """
        given = {name for row in rows for name in row}
        return self.of_columns({name: [row.get(name) for row in rows] for name in given})

    def of_columns(self, columns: Mapping[str, Sequence[Any]]) -> Features:
        """Encode columns, all of the same length.

        Raises:
            Unusable: a column is missing, unknown, or has a value of another kind.
        """
        if self._encoder is None:
            raise Unusable("features: the model has no features of this party")
        if missing := [name for name in self.columns if name not in columns]:
            raise Unusable(f"features: columns are missing: {', '.join(missing)}")
        if len(columns) > len(self.columns):
            raise Unusable(f"features: expected these columns alone: {', '.join(self.columns)}")
        cells = {name: _cells(name, columns[name]) for name in self.columns}
        try:
            table = table_of(_GivenRows(cells), self._settings)
            return self._encoder.transform(table, np.arange(len(table)))
        except DataError as error:
            raise Unusable(str(error)) from error


class _GivenRows:
    """The columns of a request as a source of rows."""

    name = "features"

    def __init__(self, cells: Mapping[str, Any]) -> None:
        self._cells = cells

    def column_names(self) -> list[str]:
        return list(self._cells)

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        return {name: self._cells[name] for name in names}


def _cells(name: str, values: Sequence[Any]) -> Any:
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds <= {int, float} and kinds not in ({str}, {list}):
        raise Unusable(f"features: column {name!r}: expected numbers, texts, or lists of texts")
    try:
        return pa.chunked_array([pa.array(values, _KINDS.get(frozenset(kinds), pa.float64()))])
    except (pa.ArrowException, OverflowError) as error:
        raise Unusable(f"features: column {name!r}: a number is too large") from error
