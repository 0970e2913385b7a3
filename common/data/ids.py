"""Finds the usable ids of a table and rejects unusable ones before anything is sent.

Since an id identifies a person, messages contain row numbers and counts and never an id.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data import stored_ids
from splitveil.common.data.canonical_form import (
    SHORTENED,
    CanonicalForm,
    Effects,
    IdForms,
    compose,
    decompose,
    is_unicode,
)
from splitveil.common.data.columns import (
    WrittenColumn,
    check_columns_exist,
    read_ids,
    select_columns,
)
from splitveil.common.data.kinds import open_source
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import DataError, SettingsError
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


NORMALISATION = "NFC, strip"
"""Name of the rule that all texts of ids undergo; the parties compare it before they compare any
ids. What the contract adds to it is compared at the handshake."""

_ROWS_NAMED = 5


class Allowed(NamedTuple):
    """Rows that are left out instead of being an error."""

    duplicates: bool = False
    unusable: bool = False

    @classmethod
    def by(cls, settings: DataSettings) -> "Allowed":
        return cls(settings.duplicate_ids == "first", settings.unusable_ids == "leave_out")


class UnusableRows(NamedTuple):
    """The rows whose ids cannot be used, from 0."""

    missing: Sequence[int] = ()
    not_text: Sequence[int] = ()
    not_of_kind: Sequence[int] = ()
    duplicates: Sequence[tuple[int, int]] = ()
    """Rows whose id an earlier row has, with that earlier row."""
    alike: Sequence[tuple[int, int]] = ()
    """Rows whose id equals an earlier row's only in canonical form."""
    unlabelled: Sequence[int] = ()

    @property
    def without_id(self) -> list[int]:
        return [*self.missing, *self.not_text, *self.not_of_kind]

    @property
    def repeated(self) -> list[int]:
        """The rows whose id an earlier row has."""
        return [row for row, _ in (*self.duplicates, *self.alike)]


@dataclass(frozen=True)
class IdReport:
    """Counts of what became of a table's ids."""

    num_rows: int = 0
    changed: Mapping[str, int] = field(default_factory=dict)
    """Ids that a rule has changed, by the rule (and the column, if there are several)."""

    unusable: int = 0
    duplicates: int = 0
    """Rows left out because an earlier row has the same id."""

    alike: int = 0
    """Rows left out because an earlier row has the same id in canonical form."""

    unlabelled: int = 0
    contradicting: int = 0
    """Of the rows left out for their id, those with another label than the row that stays."""

    @property
    def left_out(self) -> int:
        """The number of rows that take no part."""
        return self.unusable + self.duplicates + self.alike + self.unlabelled

    def in_words(self) -> str:
        changes = ", ".join(f"{rule} changed {count:,}" for rule, count in self.changed.items())
        return f"ids: {changes or 'all in canonical form as written'}"

    @property
    def losses(self) -> str:
        """Say how many rows are left out, and why; empty if none are."""
        reasons = (
            (self.unusable, "without a usable id"),
            (self.duplicates, "with the id of an earlier row"),
            (self.alike, "whose id only the rules make equal to that of an earlier row"),
            (self.unlabelled, "without a label"),
        )
        losses = ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)
        if self.contradicting:
            losses += f"; {self.contradicting:,} of these {CONTRADICTING}"
        return f"{self.left_out:,} of {self.num_rows:,} rows left out: {losses}" if losses else ""


NOTHING_DONE = IdReport()
CONTRADICTING = "have another label than the earlier row, whose label counts"


class UsableIds(NamedTuple):
    """The usable ids of a table."""

    ids: stored_ids.StoredIds | stored_ids.RowNumbers
    """Of all rows, in canonical form."""

    kept: NDArray[np.int64] | None
    """The rows whose ids are usable and distinct; None for all rows."""

    report: IdReport
    doubts: Sequence[str]
    """A sentence for each form that the other party probably writes otherwise."""


def canonical_ids(
    raw: Sequence[str],
    source: str,
    form: CanonicalForm = CanonicalForm(),  # noqa: B008 - immutable
) -> list[str]:
    """Return ids in canonical form, in the same order; DataError unless all of them are usable."""
    if not raw:
        raise DataError(f"{source}: there are no ids")
    reader = IdReader(form, source)
    reader.add(raw)
    return list(reader.finish().ids)


class IdReader:
    """Brings ids into canonical form part by part, and finds the rows that are left out.

    DataError gives the count and the first data rows (from 1) of each kind of unusable ids, and
    never an id.
    """

    def __init__(
        self,
        form: CanonicalForm,
        where: str,
        allowed: Allowed = Allowed(),  # noqa: B008 - immutable
        columns: Sequence[str] = (),
        arrays: stored_ids.GrowingArrays | None = None,
    ) -> None:
        self._form, self._where, self._allowed, self._columns = form, where, allowed, columns
        self._arrays = arrays or stored_ids.GrowingArrays()
        self._forms = [IdForms(may_count_rows=len(columns) == 1) for _ in columns]
        self._effects = Effects()
        self._num_bytes = self._num_rows = self._unlabelled = 0
        self._arrays.append(stored_ids.ID_OFFSETS, np.zeros(1, np.int64))

    def add(self, raw: Sequence[str], labels: NDArray[np.float32] | None = None) -> None:
        """Take the ids of the next rows; rows with a label of NaN are left out."""
        before = self._num_rows
        offset = f" (data rows counted after row {before})" if before else ""
        ids = self._form.of(raw, self._effects)
        unusable = unusable_rows(raw, ids, self._form, labels)
        check_allowed(unusable, self._allowed, f"{self._where}{offset}", raw)
        for row in (*unusable.without_id, *unusable.unlabelled):
            ids[row] = ""
        self._unlabelled += len(unusable.unlabelled)
        self._num_rows += len(ids)
        columns = self._form.columns_of([text for text in ids if text])
        for forms, column in zip(self._forms, columns, strict=False):
            forms.add(column)
        encoded = [text.encode() for text in ids]
        ends = self._num_bytes + np.cumsum([len(text) for text in encoded], dtype=np.int64)
        self._num_bytes = int(ends[-1]) if len(ends) else self._num_bytes
        self._arrays.append(stored_ids.IDS, np.frombuffer(b"".join(encoded), np.uint8))
        self._arrays.append(stored_ids.ID_OFFSETS, ends)
        for name, texts in ((_HASHES, ids), (_RAW_HASHES, raw)):
            self._arrays.append(name, np.fromiter(map(hash, texts), np.int64, len(texts)))

    def finish(self, labels: NDArray[np.float32] | None = None) -> UsableIds:
        """Return the ids of the rows that are kept; ``labels`` covers all rows."""
        text, offsets = (
            self._arrays.array(stored_ids.IDS, np.uint8),
            self._arrays.array(stored_ids.ID_OFFSETS, np.int64),
        )
        ids = stored_ids.StoredIds(text, offsets)
        raw_hashes = self._arrays.array(_RAW_HASHES, np.int64)
        twins = stored_ids.repeated_rows(ids, self._arrays.array(_HASHES, np.int64))
        same = [(row, first) for row, first in twins if raw_hashes[row] == raw_hashes[first]]
        alike = [(row, first) for row, first in twins if raw_hashes[row] != raw_hashes[first]]
        check_allowed(UnusableRows(duplicates=same, alike=alike), self._allowed, self._where)
        for name in (_HASHES, _RAW_HASHES):
            self._arrays.discard(name)
        is_kept = np.diff(offsets) > 0
        unusable = len(ids) - int(np.count_nonzero(is_kept)) - self._unlabelled
        is_kept[[row for row, _ in twins]] = False
        if not is_kept.any():
            raise DataError(f"{self._where}: none of the {len(ids)} rows has a usable id")
        several = len(self._columns) > 1
        changes = {
            f"{rule} of {self._columns[column]!r}" if several else rule: count
            for (column, rule), count in self._effects.items()
        }
        report = IdReport(
            len(ids),
            changes,
            unusable,
            len(same),
            len(alike),
            self._unlabelled,
            0 if labels is None else sum(bool(labels[x] != labels[y]) for x, y in twins),
        )
        doubts = [
            f"{name!r}: {doubt}" if several else doubt
            for name, forms in zip(self._columns, self._forms, strict=True)
            for doubt in forms.doubts()
        ]
        kept = np.flatnonzero(is_kept) if report.left_out else None
        return UsableIds(ids, kept, report, doubts)


_HASHES, _RAW_HASHES = "part-id-hashes", "part-raw-id-hashes"


def unusable_rows(
    raw: Sequence[str],
    canonical: Sequence[str],
    form: CanonicalForm,
    labels: NDArray[np.float32] | None = None,
) -> UnusableRows:
    """Find the rows whose ids cannot be used."""
    without_label = set(() if labels is None else np.flatnonzero(np.isnan(labels)).tolist())
    is_fine = "" not in canonical and all(map(is_unicode, canonical))
    if is_fine and not without_label and len(set(canonical)) == len(canonical):
        return UnusableRows()
    found = UnusableRows([], [], [], [], [], [])._asdict()
    first_row: dict[str, int] = {}
    for row, (text, own) in enumerate(zip(raw, canonical, strict=True)):
        if row in without_label:
            found["unlabelled"].append(row)
        elif not is_unicode(text):
            found["not_text"].append(row)
        elif not own:
            parts = decompose(text, form.num_columns) if form.num_columns > 1 else (text,)
            is_blank = parts is None or not all(part.strip() for part in parts)
            found["missing" if is_blank else "not_of_kind"].append(row)
        elif (first := first_row.setdefault(own, row)) != row:
            found["duplicates" if text == raw[first] else "alike"].append((row, first))
    return UnusableRows(**found)


def check_allowed(
    rows: UnusableRows, allowed: Allowed, source: str, raw: Sequence[str] = ()
) -> None:
    """Check that rows whose ids cannot be used may be left out; DataError otherwise.

    With the ids as written, the message says how two of them differ.
    """
    problems: list[str] = []
    if not allowed.unusable:
        unusable = (
            (rows.missing, "missing or empty ids"),
            (rows.not_text, "ids that are not valid Unicode"),
            (rows.not_of_kind, "ids that are none by the rules of contract.ids"),
        )
        problems += [_problem([f"{row + 1}" for row in some], kind) for some, kind in unusable]
    if not allowed.duplicates:
        same = [f"{row + 1} (as {first + 1})" for row, first in rows.duplicates]
        alike = [
            f"{row + 1} (as {first + 1}{_difference(raw[row], raw[first]) if raw else ''})"
            for row, first in rows.alike
        ]
        is_shortened = any(raw and re.match(SHORTENED, raw[row]) for row, _ in rows.duplicates)
        why = ", some shortened by a spreadsheet as in 1.2E+15" * is_shortened
        problems.append(_problem(same, f"duplicate ids{why}"))
        problems.append(_problem(alike, "ids equal to another id once normalised"))
    if any(problems):
        raise DataError("\n".join(f"{source}: {problem}" for problem in problems if problem))


def _problem(rows: Sequence[str], kind: str) -> str:
    if not rows:
        return ""
    more = ", ..." if len(rows) > _ROWS_NAMED else ""
    return f"{len(rows)} {kind}: data rows {', '.join(rows[:_ROWS_NAMED])}{more}"


def _difference(text: str, other: str) -> str:
    if text.strip() == other.strip():
        return ", differs in white space"
    if normalize("NFC", text) == normalize("NFC", other):
        return ", differs in Unicode form"
    if normalize("NFC", text).strip() == normalize("NFC", other).strip():
        return ", differs in white space and Unicode form"
    return ", made equal by contract.ids"


# ---- which rows are about the same person ----

SUBJECTS = "defense.subject_column"


def read_subjects(
    settings: DataSettings, base_dir: Path, column: str, id_rules: Sequence[IdRule] = AS_WRITTEN
) -> NDArray[np.object_]:
    """Return the person whom each row of the file is about, (rows,); empty without an entry.

    Entries are compared like ids: by the rules of the column if it is part of the id, and otherwise
    as written.
    """
    source = open_source(settings.source, base_dir)
    selection = select_columns(settings, source)
    if any(column in way for way in selection.chosen):
        raise SettingsError(f"{SUBJECTS}: {column!r} is a feature, too: leave it out there")
    where = f"{SUBJECTS}: {source.name}"
    check_columns_exist([column], source.column_names(), where)
    check_rules(settings, id_rules)
    is_id = column in settings.id_columns
    rule = id_rules[settings.id_columns.index(column)] if is_id else AS_WRITTEN[0]
    named = settings.model_copy(update={"id_column": column})
    entries = part_ids(named, [rule], source.read([column]), where)
    return np.array(CanonicalForm([rule]).of(entries), dtype=object)
