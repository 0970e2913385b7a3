"""Decides what each column of a party's table is: id, label, feature, or left out, and says why.

Where the table leaves a question open, the answer comes from the caller; nothing that matters is
guessed among several candidates.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import SHORTENED, CanonicalForm
from splitveil.common.data.columns import (
    NEARLY_ALL,
    WILDCARDS,
    WrittenColumn,
    is_text,
    is_unnamed_index,
    read_ids,
)
from splitveil.common.data.ids import unusable_rows
from splitveil.common.data.settings import MAX_CLASSES
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.run.id_rules import TextId
from splitveil.common.run.sample_order import SPLITS
from splitveil.common.text.wording import suggest
from splitveil.deploy.init.columns import (
    LEAST_REPEATS,
    NO_NAME,
    Column,
    as_text,
    codes_for_gaps,
    describe,
    without_gaps,
    words_of,
)
from splitveil.deploy.init.labels import (
    Label,
    classes_of,
    classes_of_rows,
    gives_label_away,
    is_of_numbers,
    is_of_two,
    label_of,
)

_POINTED = r"[+-]?\d+\.0*"
_IDENTIFIERS = {
    "IBANs": r"[A-Z]{2}\d{2}( ?[A-Z0-9]{4}){2,7}( ?[A-Z0-9]{1,3})?",
    "UUIDs": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "hashes": r"[0-9a-fA-F]{32,}",
    "e-mail addresses": r"[^@\s]+@[^@\s]+\.\w+",
    "telephone or account numbers": r"(\+|0)\d[\d ()/-]{6,20}",
}
_EPOCHS_S = (0.9e9, 2.2e9)  # times since 1970 have as many digits as telephone numbers


class OwnIds(NamedTuple):
    """A run's reading of a column of ids."""

    num_rows: int
    without_id: int = 0
    repeated: int = 0  # rows with the id of an earlier row
    doubt: str = ""  # why the column is taken only if it is named
    rule: TextId = TextId()
    """The contract's rule for them: for whole numbers with a decimal point, and for letters all of
    one case, which the other party may write in the other case."""

    @property
    def num_ids(self) -> int:
        return self.num_rows - self.without_id - self.repeated

    @property
    def losses(self) -> str:
        """Say how many rows are left out; empty if none is."""
        lost = {"without an id": self.without_id, "with the id of an earlier row": self.repeated}
        words = [f"{n:,} row{'s' * (n > 1)} {why}" for why, n in lost.items() if n]
        return f"left out: {', '.join(words)}" if words else ""


def identifiers_in(column: Column) -> str:
    """Say that a column's cells identify persons or things; empty if they do not, or are codes."""
    if column.present >= LEAST_REPEATS * column.distinct:
        return ""
    texts = column.values
    found = next(
        (
            what
            for what, form in (_IDENTIFIERS.items() if column.kind in {"text", "whole"} else ())
            if sum(bool(re.fullmatch(form, x)) for x in texts) >= NEARLY_ALL * len(texts)
        ),
        None,
    )
    if found is None and _is_long_number(column):
        found = f"numbers of {len(str(int(column.low)))} digits, such as telephone or card numbers"
    found = found or column.identifies * (column.kind in {"text", "whole", "number"})
    return f"{found}: they identify, and are neither quantities nor categories" if found else ""


def _is_long_number(column: Column) -> bool:
    if column.kind not in {"whole", "number"} or column.almost or column.low < 1:
        return False
    digits = len(str(int(column.low)))
    unit = 10.0 ** (digits - 10)
    is_time = digits in {10, 13, 16, 19} and (
        _EPOCHS_S[0] <= column.low / unit and column.high / unit <= _EPOCHS_S[1]
    )
    is_whole = all(float(value).is_integer() for value in column.values)
    return digits >= 9 and digits == len(str(int(column.high))) and is_whole and not is_time


def judge(column: Column, cells: Any) -> OwnIds:
    """Return a run's reading of a column; DataError if it cannot read it as ids."""
    if column.kind == "whole" and {*column.gaps} <= {""}:  # spares a look at each row
        return OwnIds(column.num_rows, column.missing, column.present - column.distinct)
    raw = read_ids(WrittenColumn(cells, "ids"), may_be_floats=True)
    form = CanonicalForm()
    rows = unusable_rows(raw, form.of(raw), form)
    doubt = _doubt(column, cells)
    is_floating = doubt is _POINTS
    # Case is folded if no id has letters of both cases, and no two differ only in case.
    texts = {text for text in raw if text != text.upper() or text != text.lower()}
    folds = bool(texts) and all(text in {text.upper(), text.lower()} for text in texts)
    folds = folds and len({text.casefold() for text in texts}) == len(texts)
    rule = TextId(fold_case=folds and not is_floating, whole_numbers=is_floating)
    return OwnIds(len(raw), len(rows.without_id), len(rows.repeated), doubt, rule)


_POINTS = (
    "whole numbers with a decimal point: the contract says ids: {whole_numbers: true} if "
    "--id-column names it"
)


def _doubt(column: Column, cells: Any) -> str:
    if column.kind == "number" and (
        pa.types.is_floating(cells.type) or all(re.fullmatch(_POINTED, x) for x in column.values)
    ):
        return _POINTS
    if any(map(re.compile(SHORTENED).match, column.values)):
        return "some are written like 1.2E+15, as spreadsheets shorten long numbers"
    return ""


def likely_ids(columns: Sequence[Column], cells: Mapping[str, Any]) -> dict[str, OwnIds]:
    """Return the columns that have distinct ids for more than half of the rows."""
    found = {}
    for column in columns:
        own = cells[column.name]
        if is_text(own.type) and column.kind == "other":
            if len(own.unique()) == len(own):
                why = "bytes that are no text: write them as text, such as hexadecimal digits"
                found[column.name] = OwnIds(len(own), doubt=why)
            continue
        is_index = is_unnamed_index(column.name) and column.kind == "whole"
        may_be = column.kind in {"whole", "text", "number"} and not is_index
        if not may_be or column.distinct <= column.num_rows // 2:
            continue
        if column.kind == "number" and not _doubt(column, own):
            continue
        try:
            judged = judge(column, own)
        except DataError:
            continue
        if judged.num_ids > column.num_rows // 2:
            found[column.name] = judged
    return found


LABEL_WORDS = words_of(
    "y label target class outcome churn churned default defaulted fraud click clicked converted "
    "conversion income response survived"
)
NUMBER_LABEL_WORDS = frozenset(["y", "label", "target"])
"""Words in the names of columns whose numbers are labels; others are often features."""

ID_WORDS = words_of("id ids key uuid guid identifier customer client patient person user")
_MOST_CATEGORIES_SHARE = 0.5
_YEARS_AHEAD = 20


class Choices(NamedTuple):
    id_column: str | None
    label: Label | None
    numeric: tuple[Column, ...]
    categorical: tuple[Column, ...]
    timestamps: tuple[Column, ...]
    left_out: Mapping[str, str]  # columns that are not used, with the reasons
    split_column: str | None  # a column that says train, validation or test
    no_gaps: tuple[str, ...] = ()  # columns in which only empty cells mean "no value"
    time_format: str | None = None  # how texts of times are written; None for ISO 8601
    first_year: int | None = None  # of the hundred that two digits stand for
    units: Mapping[str, Sequence[str]] = {}  # texts beside the numbers of features and labels

    @property
    def decided(self) -> list[str]:
        """Say what may be read otherwise, and how: a line for each kind of doubt."""
        found: dict[tuple[str, str], list[str]] = {}
        for column in self.features:
            if column.doubt[0]:
                found.setdefault(column.doubt, []).append(column.name)
        for name, units in self.units.items():
            what = f"numbers, read without {' and '.join(map(repr, units))} beside them"
            found.setdefault((what, "--categorical"), []).append(name)
        if self.first_year is not None:
            names = [x.name for x in self.timestamps if x.time_formats]
            what = f"years of two digits are {self.first_year} to {self.first_year + 99}"
            found[what, "--first-year YEAR says otherwise"] = names
        return [
            f"{', '.join(names)}: {what}; "
            + " ".join([option, *map(quote, () if " " in option else names)])
            for (what, option), names in found.items()
        ]

    @property
    def said(self) -> list[tuple[str, str]]:
        """Return the lines that tell the user the decisions and what is left out."""
        lines = [("decided", decision) for decision in self.decided]
        lines += [("left out", f"{name}: {why}") for name, why in self.left_out.items()]
        hint = "(--numeric NAME or --categorical NAME uses such a column)"
        return [*lines, *[("", hint)] * bool(self.left_out)]

    @property
    def gaps(self) -> tuple[str, ...]:
        """The texts that mean "no value" in any of the features, or "no label"."""
        found = {gap for column in self.features for gap in column.gaps}
        found |= set(self.label.gaps if self.label else ())
        return tuple(sorted(found | {""}))

    @property
    def features(self) -> tuple[Column, ...]:
        return (*self.numeric, *self.categorical, *self.timestamps)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns of features and labels."""
        label = () if self.label is None else (self.label.column,)
        return (*label, *(column.name for column in self.features))

    def settings(self) -> dict[str, Any]:
        """Return ``data.features`` and ``data.units``, as the templates write them."""
        ways = {"numeric": self.numeric, "categorical": self.categorical}
        ways["timestamps"] = self.timestamps
        features: dict[str, Any] = {
            way: [column.name for column in columns] for way, columns in ways.items() if columns
        }
        if self.time_format:
            features["timestamp_format"] = self.time_format
        if self.first_year:
            features["first_year"] = self.first_year
        if self.has_wildcards:
            features["patterns"] = False
        if self.gaps != ("",):
            features["missing_texts"] = [*self.gaps]
        if self.has_numeric_gaps:
            features |= {"missing_numeric": "mean", "missing_indicator": True}
        units = {name: [*texts] for name, texts in self.units.items()}
        return {name: one for name, one in {"features": features, "units": units}.items() if one}

    @property
    def has_wildcards(self) -> bool:
        return any(WILDCARDS & set(column.name) for column in self.features)

    @property
    def has_numeric_gaps(self) -> bool:
        return any(column.missing for column in (*self.numeric, *self.timestamps))


class Wishes(NamedTuple):
    id_column: str | None = None
    has_id: bool = True  # without, equal row numbers mean the same example
    label_column: str | None = None  # of a passive party: the label owner's, no feature
    positive_label: tuple[str, ...] = ()
    leave_out_unlabelled: bool = False
    as_written: bool = False  # labels that look alike, rare classes and rows of sums are meant so
    label_range: tuple[float, float] | None = None
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    first_year: int | None = None  # of the hundred that two digits of a year stand for
    missing_texts: tuple[str, ...] = ()  # texts that mean "no value", beside those that are known
    no_gaps: tuple[str, ...] = ()  # columns in which only empty cells mean "no value"


def described(cells: Mapping[str, Any], wishes: Wishes) -> list[Column]:
    return [
        describe(name, own, *([(), ("",)] if name in wishes.no_gaps else [wishes.missing_texts]))
        for name, own in cells.items()
    ]


def judged(
    cells: Mapping[str, Any], wishes: Wishes
) -> tuple[list[Column], tuple[str, ...], Wishes]:
    """Describe the columns, and find the texts that mean "no value" as columns of numbers show.

    The wishes that are returned name these texts, too.
    """
    columns = described(cells, wishes)
    codes = codes_for_gaps(columns, cells)
    wishes = wishes._replace(missing_texts=(*wishes.missing_texts, *codes))
    return described(cells, wishes) if codes else columns, codes, wishes


def _is_id_word(name: str) -> bool:
    return bool(words_of(name) & ID_WORDS)


def label_candidates(columns: Sequence[Column], *, with_gaps: bool = False) -> list[Column]:
    """Return the columns that may hold labels, those that are named like one first."""
    columns = [c for c in columns if with_gaps or not c.missing]
    few = [c for c in columns if c.kind in {"whole", "text", "number"} and is_of_two(c)]
    named = [c for c in columns if words_of(c.name) & LABEL_WORDS]
    named = [c for c in named if 2 <= len(classes_of(c)) <= MAX_CLASSES]
    numbers = [c for c in columns if words_of(c.name) & NUMBER_LABEL_WORDS and is_of_numbers(c)]
    return list(dict.fromkeys([*(named or numbers), *few]))


def choose_id(
    columns: Sequence[Column], cells: Mapping[str, Any], wishes: Wishes
) -> tuple[str | None, OwnIds]:
    """Return the column with the ids, and how they are; None if the rows are numbered instead.

    Rows without an id of their own are no obstacle if the column is named, or named like ids and
    nearly all rows have one.
    """
    if not wishes.has_id:
        return None, OwnIds(0)
    if wishes.id_column is not None:
        column = _named(columns, wishes.id_column, "--id-column")
        try:
            judged, why = judge(column, cells[column.name]), ""
        except DataError as error:
            judged, why = OwnIds(0), f"; {error}"
        if judged.num_ids <= judged.num_rows // 2:
            raise SettingsError(
                f"--id-column {column.name}: expected a text or whole number in every row, each "
                f"once, found {column.in_words()} in {column.num_rows:,} rows{why}"
            )
        return column.name, judged
    likely = likely_ids(columns, cells)
    likely = dict(sorted(likely.items(), key=lambda x: (bool(x[1].doubt), not _is_id_word(x[0]))))
    sure = {name: one for name, one in likely.items() if not one.doubt}
    named = {
        name: one
        for name, one in sure.items()
        if _is_id_word(name) and one.num_ids >= NEARLY_ALL * one.num_rows
    }
    unnamed = {name: one for name, one in sure.items() if not one.losses}
    if len(named) == 1:
        return next(iter(named.items()))
    if len(unnamed) == 1 and not any(map(_is_id_word, likely)):
        return next(iter(unnamed.items()))
    found = ", ".join(named or unnamed) or "none"
    nearly = "; ".join(
        f"{name} ({', '.join(filter(None, [one.losses, one.doubt]))})"
        for name, one in likely.items()
        if one.losses or one.doubt
    )
    raise SettingsError(
        f"--id-column: name the column by which both parties know an example (columns with a text "
        f"or whole number of its own in every row: {found}"
        f"{nearly and f'; in many rows: {nearly}'}); or --no-id-column, if both files have "
        f"the same examples in the same order"
    )


def choose_label(columns: Sequence[Column], wishes: Wishes) -> Label:
    """Return the label column, and how it is read; SettingsError if there are several or none."""
    if wishes.label_column is not None:
        return _read(_named(columns, wishes.label_column, "--label-column"), wishes)
    candidates = label_candidates(columns, with_gaps=wishes.leave_out_unlabelled)
    named = [column for column in candidates if words_of(column.name) & LABEL_WORDS]
    if len(named) == 1:
        return _read(named[0], wishes)
    if len(candidates) == 1:
        return _read(candidates[0], wishes)._replace(is_guessed=True)
    found = ", ".join(column.name for column in named or candidates) or "none"
    if not candidates:
        near = [c for c in columns if words_of(c.name) & LABEL_WORDS]
        near = list(dict.fromkeys([*near, *label_candidates(columns, with_gaps=True)]))
        found += "".join(f"; {column.name} has {column.in_words()}" for column in near[:8])
        if any(column.missing for column in near):
            found += "; --unlabelled-rows leave_out leaves rows without a label out"
    raise SettingsError(
        f"--label-column: name the column with the labels (columns that may be it: {found})"
    )


def _read(column: Column, wishes: Wishes) -> Label:
    return label_of(
        column,
        wishes.positive_label,
        wishes.label_range,
        leave_out=wishes.leave_out_unlabelled,
        as_written=wishes.as_written,
    )


def choose_features(
    columns: Sequence[Column],
    cells: Mapping[str, Any],
    wishes: Wishes,
    id_column: str | None,
    label: Label | None,
    index_columns: Sequence[str] = (),
    units: Mapping[str, Sequence[str]] = {},
) -> Choices:
    """Decide which of the remaining columns the model reads; only the label owner's meet labels."""
    as_numbers = {*wishes.numeric}
    decided = as_numbers | {*wishes.categorical}
    named = {*decided, *wishes.exclude, *wishes.no_gaps} - {column.name for column in columns}
    for name in sorted(named - {None if label is None else label.column}):
        _named(columns, name, "--numeric, --categorical, --no-gaps and --exclude")
    classes, written = None, cells
    if label is not None:
        labels = without_gaps(as_text(cells[label.column]), label.gaps)
        if labels.null_count:
            cells = {name: column.filter(labels.is_valid()) for name, column in cells.items()}
        classes = classes_of_rows(labels.drop_null(), label)
    columns = [x._replace(doubt=("", "")) if x.name in decided else x for x in columns]
    own = {id_column, None if label is None else label.column}
    numeric, categorical, timestamps = list[Column](), list[Column](), list[Column]()
    left_out, split = dict[str, str](), None
    asked = dict.fromkeys(
        {wishes.label_column} - decided, "the label owner's label, as active.yaml says"
    ) | dict.fromkeys(wishes.exclude, "left out on request")
    time_format = _time_format([c for c in columns if c.name not in (*own, *wishes.exclude)])
    for column in columns:
        if column.name in own:
            continue
        is_index = column.name in index_columns or is_unnamed_index(column.name)
        why = asked.get(column.name, "")
        if not why and (column.name not in decided or "\0" in column.name):
            why = _reason_to_leave_out(column, cells, classes, time_format, is_index=is_index)
        if why:
            left_out[column.name] = why
            split = split or (column.name if why is _SPLIT else None)
        elif column.name in as_numbers:
            numeric.append(column)
        elif column.name in decided or column.looks_like_codes or column.kind == "text":
            categorical.append(column)
        else:
            is_time = column.kind in {"time", "other time"}
            (timestamps if is_time else numeric).append(column)
    _check_no_question_is_open([*numeric, *categorical], wishes)
    times = [written[x.name] for x in timestamps if x.time_formats]
    numbers = {column.name for column in numeric}
    numbers |= {label.column} if label is not None and label.within is not None else set()
    return Choices(
        id_column,
        label,
        tuple(numeric),
        tuple(categorical),
        tuple(timestamps),
        left_out,
        split,
        wishes.no_gaps,
        time_format if times else None,
        _first_year(times, time_format, wishes),
        units={name: found for name, found in units.items() if name in numbers},
    )


def _first_year(columns: Sequence[Any], time_format: str | None, wishes: Wishes) -> int | None:
    """Return the first of the hundred years that two digits stand for; None if none have two.

    The last is this year, or the last of those in the columns that follow it without a gap.
    """
    if not columns or "%y" not in str(time_format) or wishes.first_year is not None:
        return wishes.first_year if columns else None
    this = last = datetime.now(tz=UTC).year
    found = set[int]()
    for texts in map(pc.unique, map(as_text, columns)):
        times = pc.strptime(texts, format=time_format, unit="s", error_is_null=True)
        found |= {year % 100 for year in pc.year(times).drop_null().to_pylist()}
    while last % 100 in found and last <= this + _YEARS_AHEAD:
        last += 1
    return (last - 1 if this < last <= this + _YEARS_AHEAD else this) - 99


def _time_format(columns: Sequence[Column]) -> str | None:
    """Return the form that most columns of times surely have; None if one is of ISO 8601."""
    formats = [column.time_formats for column in columns if column.time_formats]
    if any(None in found for found in formats):
        return None
    sure = Counter(found[0] for found in formats if len(found) == 1)
    return max(sure, key=lambda form: sure[form], default=None)


def _check_no_question_is_open(chosen: Sequence[Column], wishes: Wishes) -> None:
    questions = [
        f"column {column.name!r}: {column.almost.in_words}: "
        f"{column.almost.remedy.replace('NAME', quote(column.name))}"
        f"{f' --categorical {column.name}, or' * (column.kind == 'text')} --exclude {column.name}"
        for column in chosen
        if column.almost is not None and column.name not in wishes.categorical
    ]
    if questions:
        raise SettingsError("\n".join(questions))


_SPLIT = "says train, validation or test: see split in contract.yaml"


def _reason_to_leave_out(
    column: Column,
    cells: Mapping[str, Any],
    classes: NDArray[np.int64] | None,
    time_format: str | None,
    *,
    is_index: bool,
) -> str:
    if "\0" in column.name:
        return "its name has a NUL character, which settings cannot hold"
    if is_index:
        return NO_NAME
    if classes is not None and gives_label_away(cells[column.name], column, classes):
        return "gives the label away almost by itself: is it known before the label is?"
    return _reason_in_its_cells(column, time_format)


def _reason_in_its_cells(column: Column, time_format: str | None) -> str:
    if column.kind in {"empty", "constant", "other"}:
        return column.in_words()
    if column.kind == "other time" and time_format not in column.time_formats:
        return f"{column.in_words()}: see timestamp_format in docs/settings.md"
    if column.kind == "text" and set(column.values) <= set(SPLITS):
        return _SPLIT
    if found := identifiers_in(column):
        return found
    is_text = column.kind == "text" and column.almost is None
    if is_text and column.distinct > _MOST_CATEGORIES_SHARE * column.present:
        return "texts of which most rows have their own: another id, or free text"
    is_code = column.looks_like_codes and column.is_unique
    return "a value of its own in every row: another id" if is_code else ""


def _named(columns: Sequence[Column], name: str, option: str) -> Column:
    found = next((column for column in columns if column.name == name), None)
    if found is None:
        names = [column.name for column in columns]
        raise SettingsError(f"{option}: there is no column {name!r}{suggest(name, names)}")
    return found
