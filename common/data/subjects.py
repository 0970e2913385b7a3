"""Reads which rows of a party's file are about the same person."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.columns import WrittenColumn, check_columns_exist, read_ids
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import open_table_source, select_columns
from splitveil.common.errors import SettingsError

SETTING = "defense.subject_column"


def read_subjects(settings: DataSettings, base_dir: Path, column: str) -> NDArray[np.int64]:
    """Return a number for each row of the file, equal for rows of one person, (rows,).

    A row without an entry has a person of its own.

    Args:
        settings: the party's data settings.
        base_dir: folder to which relative paths refer.
        column: the column that names the person.

    Raises:
        DataError: there is no such column.
        SettingsError: the column is a feature, too.
    """
    source = open_table_source(settings, base_dir)
    selection = select_columns(settings, source)
    if any(column in way for way in selection.chosen):
        raise SettingsError(f"{SETTING}: {column!r} is a feature, too: leave it out there")
    check_columns_exist([column], source.column_names(), source.name)
    written = WrittenColumn(source.read([column])[column], f"{source.name}: column {column!r}")
    texts = np.array(read_ids(written), dtype=object)
    _, subjects = np.unique(texts, return_inverse=True)
    without = np.flatnonzero(texts == "")
    subjects[without] = len(texts) + np.arange(len(without))
    return subjects.astype(np.int64)
