"""Reads a table's columns of ids as one text per row."""

from collections.abc import Mapping, Sequence
from typing import Any

from splitveil.common.data.canonical_form import compose
from splitveil.common.data.columns import WrittenColumn, read_ids
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import SettingsError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule, TextId


def part_ids(
    settings: DataSettings,
    rules: Sequence[IdRule],
    columns: Mapping[str, Any],
    source: str,
    first_row: int = 1,
) -> list[str]:
    """Return the ids of some rows as written in the file, several columns in one text."""
    texts = [
        read_ids(
            WrittenColumn(columns[name], f"{source}: column {name!r}", (), first_row),
            may_be_floats=isinstance(rule, TextId) and rule.whole_numbers,
        )
        for name, rule in zip(settings.id_columns, rules, strict=True)
    ]
    return texts[0] if len(texts) == 1 else [compose(p) for p in zip(*texts, strict=True)]


def check_rules(settings: DataSettings, rules: Sequence[IdRule]) -> None:
    columns = len(settings.id_columns)
    if not columns and tuple(rules) != tuple(AS_WRITTEN):
        raise SettingsError(
            "data.id_column: contract.ids has rules for ids, but this party's ids are the numbers "
            "of its rows: name the column"
        )
    if columns and columns != len(rules):
        raise SettingsError(
            f"data.id_column: {columns} column{'s' * (columns > 1)} make up the id here, and "
            f"contract.ids has rules for {len(rules)}: expected one entry for each column, in the "
            f"same order at all parties, such as ids: [{', '.join(['{}'] * columns)}]"
        )
