"""Reads files that a command line names: tables for predictions, and lists of ids.

Of a table for predictions, it counts the rows that hold what no training row of the model had.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import CanonicalForm, is_unicode
from splitveil.common.data.columns import (
    WrittenColumn,
    check_columns_exist,
    is_numeric,
    part_name,
    read_ids,
)
from splitveil.common.data.csv_file import CODECS, delimiter_of
from splitveil.common.data.features import FIT_ROWS, FeatureEncoder, Vocabulary, compress
from splitveil.common.data.ids import check_rules, part_ids
from splitveil.common.data.kinds import open_source, text_file, with_advice
from splitveil.common.data.sequences import SEPARATOR
from splitveil.common.data.settings import DataSettings, FeatureSettings
from splitveil.common.data.source_settings import CsvSource, FileSource, ParquetSource, Source
from splitveil.common.data.sources import list_rows, unreadable_is_data_error
from splitveil.common.data.table import Table
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
    if isinstance(source, CsvSource):  # whose delimiter may separate nothing there
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


MANY = 20  # rows that do not all have a new category by chance
_ALIKE = "; some differ from known ones as 1 from 1.0, or in case, and may be written otherwise"
_REMEDY = "; write them as in the training, or leave these cells empty to predict without them"
_FEW = 0.01  # share of rows that new numbers hardly exceed by chance
_NAMED = 10
_NUMBERS_AT_ONCE = 2**22


def unseen_numbers(
    encoder: FeatureEncoder, table: Table, settings: FeatureSettings | None
) -> Iterator[tuple[int, str]]:
    """Yield a sentence on new gaps, and one on numbers beyond the least and largest in training.

    With it comes how serious it is, as a level of logging; an error is to be refused.
    """
    scalers = [one for one in encoder.numeric if one.low is not None]
    lows = np.array([[one.low] for one in scalers], np.float64)
    highs = np.array([[one.high] for one in scalers], np.float64)
    may_lack = np.array([[one.had_gaps] for one in scalers], np.bool_)
    cells, rows = np.zeros((2, len(scalers)), np.int64), [0, 0]
    at_once = max(1, _NUMBERS_AT_ONCE // max(1, len(scalers)))
    for start in range(0, len(table) if scalers else 0, at_once):
        numbers_of = table.numbers_at(np.arange(start, min(start + at_once, len(table))))
        found = np.stack([np.asarray(numbers_of(x.name), np.float64) for x in scalers])
        values = compress(found, signed_log1p=encoder.signed_log1p)
        outside = (values < lows) | (values > highs)
        for kind, is_it in enumerate((np.isnan(values) & ~may_lack, outside)):
            cells[kind] += is_it.sum(axis=1)
            rows[kind] += int(is_it.any(axis=0).sum())
    refuses = settings is not None and settings.new_gaps == "error"
    whats = (
        "a gap in columns of numbers that had none in training"
        + ("; data.features.new_gaps: error refuses them" if refuses else ", filled"),
        "numbers outside of what any training row had",
    )
    levels = (logging.ERROR if refuses else logging.WARNING, logging.WARNING)
    for counts, num_rows, what, level in zip(cells, rows, whats, levels, strict=True):
        if not num_rows:
            continue
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        named = [f"{scalers[j].name!r} ({counts[j]:,})" for j in order[:_NAMED]]
        is_usual = what == whats[1] and counts.max() < _FEW * len(table)
        sentence = (
            f"{table.source}: {num_rows:,} of {len(table):,} rows have {what}: "
            f"{', '.join(named)}{', ...' * (len(order) > _NAMED)}"
        )
        yield logging.INFO if is_usual else level, sentence


def unknown_categories(
    encoder: FeatureEncoder, table: Table, settings: FeatureSettings | None
) -> Iterator[tuple[int, str]]:
    """Yield a sentence on each column with rows whose category, or whole list, is unknown.

    With it comes a level of logging: an error if that is so in all of many rows with a value, and
    not for being rare, otherwise a warning.
    """
    vocabularies, columns = (*encoder.categorical, *encoder.lists), table.coded
    judged = {v.name: _judged(v, table) for v in vocabularies}
    counts = dict.fromkeys(judged, 0)
    # In parts, so that a table on disk is read once, front to back.
    for start in range(0, len(table), FIT_ROWS):
        for name, (is_unknown, _) in judged.items():
            if is_unknown.any():
                counts[name] += int(is_unknown[columns[name].codes[start : start + FIT_ROWS]].sum())
    for vocabulary in vocabularies:
        (is_unknown, is_alike), rows = judged[vocabulary.name], counts[vocabulary.name]
        is_exact = settings is not None and settings.min_count == 1
        if settings is not None and vocabulary.name in table.lists:
            is_exact &= len(vocabulary.categories) < settings.max_list_categories
        is_all = bool(vocabulary.categories) and bool(is_unknown[:-1].all())
        is_whole = is_all and rows >= MANY and (is_exact or is_alike)
        sentence = (
            f"{table.source}: column {vocabulary.name!r}: {rows:,} of {len(table):,} rows have "
            f"categories that no training row had{'' if is_exact else ', or too few'}, and count "
            f"as unknown{_ALIKE if is_alike else ''}{_REMEDY if is_whole else ''}"
        )
        if rows:
            yield logging.ERROR if is_whole else logging.WARNING, sentence


def _judged(vocabulary: Vocabulary, table: Table) -> tuple[NDArray[np.bool_], bool]:
    """Return whether texts are unknown, by code, and whether some are known in another form."""
    texts = words = table.coded[vocabulary.name].categories
    text_of = np.arange(len(texts))
    if vocabulary.name in table.lists:
        split = pc.split_pattern(texts, SEPARATOR)
        words, text_of = pc.list_flatten(split), pc.list_parent_indices(split).to_numpy()
    known = pa.array(vocabulary.categories, pa.string())
    is_known = pc.is_in(words, value_set=known).to_numpy(zero_copy_only=False)
    is_unknown = np.append(np.ones(len(texts), np.bool_), False)  # code -1 is no value
    is_unknown[text_of[is_known]] = False
    some = words.filter(pa.array(~is_known))[:10_000].to_pylist()
    forms = set(map(_less_its_form, vocabulary.categories)) if some else set()
    return is_unknown, any(_less_its_form(text) in forms for text in some)


def _less_its_form(text: str) -> float | str:
    with suppress(ValueError):
        return float(text)
    return text.casefold()
