"""Reads which rows of a party's file are about the same person."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.columns import check_columns_exist
from splitveil.common.data.ids import check_rules, part_ids
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import open_table_source, select_columns
from splitveil.common.errors import SettingsError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule

SETTING = "defense.subject_column"


def read_subjects(
    settings: DataSettings,
    base_dir: Path,
    column: str,
    id_rules: Sequence[IdRule] = AS_WRITTEN,
) -> NDArray[np.object_]:
    """Return the person whom each row of the file is about, (rows,); empty without an entry.

    Entries are compared like ids: by the rules of the column if it is part of the id, and otherwise
    as written.
    """
    source = open_table_source(settings, base_dir)
    selection = select_columns(settings, source)
    if any(column in way for way in selection.chosen):
        raise SettingsError(f"{SETTING}: {column!r} is a feature, too: leave it out there")
    check_columns_exist([column], source.column_names(), source.name)
    check_rules(settings, id_rules)
    is_id = column in settings.id_columns
    rule = id_rules[settings.id_columns.index(column)] if is_id else AS_WRITTEN[0]
    named = settings.model_copy(update={"id_column": column})
    entries = part_ids(named, [rule], source.read([column]), source.name)
    return np.array(CanonicalForm([rule]).of(entries), dtype=object)


def numbered(subjects: NDArray[np.object_]) -> NDArray[np.int64]:
    """Return a number for each row, equal for rows of one person; one without has its own."""
    _, numbers = np.unique(subjects, return_inverse=True)
    without = np.flatnonzero(subjects == "")
    numbers[without] = len(subjects) + np.arange(len(without))
    return numbers.astype(np.int64)
