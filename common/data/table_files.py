"""Reads files that a command line names: tables for predictions, and lists of ids."""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from splitveil.common.data.canonical_form import CanonicalForm, is_unicode
from splitveil.common.data.columns import (
    WrittenColumn,
    check_columns_exist,
    is_numeric,
    part_name,
    read_ids,
)
from splitveil.common.data.csv_file import CODECS
from splitveil.common.data.features import FeatureEncoder
from splitveil.common.data.ids import check_rules, part_ids
from splitveil.common.data.kinds import open_source, text_file, with_advice
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.source_settings import CsvSource, FileSource, ParquetSource, Source
from splitveil.common.data.sources import list_rows, unreadable_is_data_error
from splitveil.common.data.text_forms import delimiter_of
from splitveil.common.errors import DataError
from splitveil.common.run.id_rules import AS_WRITTEN, IdRule

_logger = logging.getLogger(__name__)

_KINDS: dict[str, Callable[[str], Source]] = {
    ".csv": lambda path: CsvSource(kind="csv", path=path),
    ".tsv": lambda path: CsvSource(kind="csv", path=path),
    ".parquet": lambda path: ParquetSource(kind="parquet", path=path),
}


def source_of(path: Path, like: Source | None = None) -> Source:
    """Return the source that reads a file, which its ending decides.

    One of the same kind as ``like`` is read like that.
    """
    ending = _ending(path)
    if ending not in _KINDS:
        raise DataError(f"{path}: expected a file ending in {', '.join(_KINDS)}")
    # Settings replace variables in paths; a dollar sign of the command line is meant.
    text = str(path.resolve()).replace("$", "$$")
    if not is_unicode(text):
        raise DataError(f"{path}: expected a path in UTF-8")
    source = _KINDS[ending](text)
    if isinstance(like, FileSource) and type(like) is type(source):
        source = like.model_copy(update={"path": text})
    return _with_its_delimiter(source) if isinstance(source, CsvSource) else source


def _with_its_delimiter(source: CsvSource) -> CsvSource:
    """Return the source with the delimiter of its file if the other one separates nothing there."""
    with suppress(DataError):
        file = text_file(source, Path())
        found, names = delimiter_of(file.beginning()), file.column_names()
        if found is not None and len(names) == 1 and found in names[0]:
            return source.model_copy(update={"delimiter": found})
    return source


def settings_for(
    settings: DataSettings, source: Source, encoder: FeatureEncoder | None
) -> DataSettings:
    """Return the settings that read from another table what a trained model needs, and no label."""
    features = settings.features
    if features is not None and encoder is not None:
        parts = {
            part_name(name, part)
            for name in encoder.timestamps
            for part in features.timestamp_parts
        }
        numbers = (column.name for column in encoder.numeric)
        chosen: dict[str, Any] = {
            "numeric": tuple(name for name in numbers if name not in parts),
            "categorical": tuple(column.name for column in encoder.categorical),
            "timestamps": encoder.timestamps,
            "lists": tuple(column.name for column in encoder.lists),
            "exclude": (),
            "patterns": False,
            "missing_texts_of": {
                name: texts
                for name, texts in features.missing_texts_of.items()
                if name in encoder.columns | {*encoder.timestamps}
            },
        }
        if features.missing_numeric == "error" != features.new_gaps:
            chosen["missing_numeric"] = "mean"
        features = features.model_copy(update=chosen)
    return settings.without_labels(source=source, features=features)


class IdList(NamedTuple):
    """The ids that a file lists, in its order, possibly repeated."""

    ids: list[str]
    """In canonical form."""

    written: pa.Table
    """As they are in the file, numbers as such and everything else as text: a column ``id``, or the
    columns that make up the id."""


def read_id_list(
    path: Path, settings: DataSettings, id_rules: Sequence[IdRule] = AS_WRITTEN
) -> IdList:
    """Read a text with one id per line, or a table with the columns of ids.

    If rows are known by their number, only a text can name them, and if several columns make up an
    id, only a table can.
    """
    check_rules(settings, id_rules)
    form, columns = CanonicalForm(id_rules), settings.id_columns
    if _ending(path) not in _KINDS:
        if len(columns) > 1:
            raise DataError(
                f"{path}: expected a table ({', '.join(_KINDS)}) with the {settings.place_of_ids}: "
                f"a line of text holds no id of several columns"
            )
        with unreadable_is_data_error(path):
            lines = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
        if all(re.fullmatch(r'\s*"[^"]+"\s*', line) for line in lines if line.strip()):
            lines = [line.strip().strip('"') for line in lines]
        written, where = {"id": pa.array(lines, pa.string())}, str(path)
        ids = form.of(lines)
    else:
        if not columns:
            raise DataError(f"{path}: expected a text file with one row number per line")
        named = source_of(path)
        source = open_source(named, Path())
        where = f"{source.name}: {settings.place_of_ids}"
        with with_advice(named, Path()):
            check_columns_exist(columns, source.column_names(), source.name)
            cells = source.read(columns)
            ids = form.of(part_ids(settings, id_rules, cells, source.name))
        written = {
            name if len(columns) > 1 else "id": own
            if is_numeric(own.type)
            else pa.array(read_ids(WrittenColumn(own, where)), pa.string())
            for name, own in ((name, cells[name]) for name in columns)
        }
    missing = [row for row, text in enumerate(ids, start=1) if not text]
    if len(missing) == len(ids):
        raise DataError(f"{where}: there are no ids")
    if missing and settings.unusable_ids == "error":
        raise DataError(f"{where}: no id in {list_rows(missing)}")
    if missing:
        _logger.warning("%s: %s rows without a usable id are left out", where, f"{len(missing):,}")
    is_id = pa.array([bool(text) for text in ids])
    return IdList([text for text in ids if text], pa.table(written).filter(is_id))


def _ending(path: Path) -> str:
    endings = [ending.lower() for ending in path.suffixes]
    if len(endings) > 1 and endings[-1] in CODECS:
        endings.pop()
    return endings[-1] if endings else ""
