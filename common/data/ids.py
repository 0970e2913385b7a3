"""Finds the usable ids of a table and rejects unusable ones before anything is sent.

Since an id identifies a person, messages contain row numbers and counts and never an id.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.canonical_form import (
    CanonicalForm,
    Effects,
    compose,
    decompose,
    is_unicode,
)
from splitveil.common.data.columns import WrittenColumn, read_ids
from splitveil.common.data.id_forms import SHORTENED
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


class Odd(NamedTuple):
    """The rows whose ids cannot be used, from 0."""

    missing: Sequence[int] = ()
    not_text: Sequence[int] = ()
    not_of_kind: Sequence[int] = ()
    duplicates: Sequence[tuple[int, int]] = ()
    """Rows whose id an earlier row has, with that earlier row."""
    alike: Sequence[tuple[int, int]] = ()
    """Rows whose id is equal to that of an earlier row only in canonical form."""
    unlabelled: Sequence[int] = ()
    """Rows without a label, whatever their ids."""

    @property
    def unusable(self) -> list[int]:
        return [*self.missing, *self.not_text, *self.not_of_kind]

    @property
    def repeated(self) -> list[int]:
        """The rows whose id an earlier row has."""
        return [row for row, _ in (*self.duplicates, *self.alike)]


@dataclass(frozen=True)
class IdReport:
    """What became of a table's ids, in numbers."""

    num_rows: int = 0
    changed: Mapping[str, int] = field(default_factory=dict)
    """Ids that a rule has changed, by the rule (and the column, if there are several)."""

    unusable: int = 0
    """Rows left out because they have no id."""

    duplicates: int = 0
    """Rows left out because an earlier row has the same id."""

    alike: int = 0
    """Rows left out because an earlier row has the same id in canonical form."""

    unlabelled: int = 0
    """Rows left out because they have no label."""

    @property
    def left_out(self) -> int:
        """The number of rows that take no part."""
        return self.unusable + self.duplicates + self.alike + self.unlabelled

    def in_words(self) -> str:
        """Describe it in one sentence without an end."""
        changes = ", ".join(f"{rule} changed {count:,}" for rule, count in self.changed.items())
        return f"ids: {changes or 'all in canonical form as written'}{self._losses()}"

    def _losses(self) -> str:
        reasons = (
            (self.unusable, "without a usable id"),
            (self.duplicates, "with the id of an earlier row"),
            (self.alike, "whose id only the rules make equal to that of an earlier row"),
            (self.unlabelled, "without a label"),
        )
        told = ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)
        return f"; {self.left_out:,} of {self.num_rows:,} rows left out: {told}" if told else ""


NOTHING_DONE = IdReport()


class OwnIds(NamedTuple):
    """The usable ids of a table."""

    ids: list[str]
    """Canonical and distinct, in the order of the rows."""

    kept: NDArray[np.int64] | None
    """The rows that they belong to; None for all rows."""

    report: IdReport


def canonical_ids(raw: Sequence[str | None], source: str) -> list[str]:
    """Return ids in canonical form without rules, in the same order, each exactly once."""
    return usable_ids(["" if text is None else text for text in raw], source).ids


def usable_ids(
    raw: Sequence[str],
    source: str,
    form: CanonicalForm | None = None,
    allowed: Allowed = Allowed(),  # noqa: B008 - immutable
    names: Sequence[str] = (),
    labels: NDArray[np.float32] | None = None,
) -> OwnIds:
    """Return the ids of a table in canonical form, each exactly once.

    Rows with a label of NaN are left out. DataError gives the count and the first data rows (from
    1) of each kind of unusable ids, and never an id.
    """
    if not raw:
        raise DataError(f"{source}: there are no ids")
    form, effects = form or _PLAIN, Effects()
    canonical = form.of(raw, effects)
    odd = odd_rows(raw, canonical, form, labels)
    check_allowed(odd, allowed, source, raw)
    left_out = {*odd.unusable, *odd.repeated, *odd.unlabelled}
    if len(left_out) == len(raw):
        raise DataError(f"{source}: none of the {len(raw)} rows has a usable id")
    report = IdReport(
        len(raw),
        changes_in_words(effects, names),
        len(odd.unusable),
        len(odd.duplicates),
        len(odd.alike),
        len(odd.unlabelled),
    )
    if not left_out:
        return OwnIds(canonical, None, report)
    kept = np.array([row for row in range(len(raw)) if row not in left_out], dtype=np.int64)
    return OwnIds([canonical[row] for row in kept.tolist()], kept, report)


def odd_rows(
    raw: Sequence[str],
    canonical: Sequence[str],
    form: CanonicalForm,
    labels: NDArray[np.float32] | None = None,
) -> Odd:
    """Find the rows whose ids cannot be used."""
    without_label = set(() if labels is None else np.flatnonzero(np.isnan(labels)).tolist())
    is_fine = "" not in canonical and all(map(is_unicode, canonical))
    if is_fine and not without_label and len(set(canonical)) == len(canonical):
        return Odd()
    odd = Odd([], [], [], [], [], [])._asdict()
    first_row: dict[str, int] = {}
    for row, (text, found) in enumerate(zip(raw, canonical, strict=True)):
        if row in without_label:
            odd["unlabelled"].append(row)
        elif not is_unicode(text):
            odd["not_text"].append(row)
        elif not found:
            odd["missing" if _is_blank(text, form) else "not_of_kind"].append(row)
        elif (first := first_row.setdefault(found, row)) != row:
            odd["duplicates" if text == raw[first] else "alike"].append((row, first))
    return Odd(**odd)


def check_allowed(odd: Odd, allowed: Allowed, source: str, raw: Sequence[str] = ()) -> None:
    """Check that rows whose ids cannot be used may be left out; DataError otherwise.

    With the ids as written, the message says how two of them differ.
    """
    problems: list[str] = []
    if not allowed.unusable:
        unusable = (
            (odd.missing, "missing or empty ids"),
            (odd.not_text, "ids that are not valid Unicode"),
            (odd.not_of_kind, "ids that are none by the rules of contract.ids"),
        )
        problems += [_problem([f"{row + 1}" for row in rows], kind) for rows, kind in unusable]
    if not allowed.duplicates:
        same = [f"{row + 1} (as {first + 1})" for row, first in odd.duplicates]
        alike = [
            f"{row + 1} (as {first + 1}{_difference(raw[row], raw[first]) if raw else ''})"
            for row, first in odd.alike
        ]
        is_shortened = any(raw and re.match(SHORTENED, raw[row]) for row, _ in odd.duplicates)
        why = ", some shortened by a spreadsheet as in 1.2E+15" * is_shortened
        problems.append(_problem(same, f"duplicate ids{why}"))
        problems.append(_problem(alike, "ids equal to another id once normalised"))
    if any(problems):
        raise DataError("\n".join(f"{source}: {problem}" for problem in problems if problem))


def changes_in_words(effects: Effects, names: Sequence[str]) -> dict[str, int]:
    """Return how many ids each rule has changed, by the rule's name and, of several, the column."""
    if len(names) < 2:
        return {rule: count for (_, rule), count in effects.changed.items()}
    return {
        f"{rule} of {names[column]!r}": count for (column, rule), count in effects.changed.items()
    }


_PLAIN = CanonicalForm()


def _is_blank(text: str, form: CanonicalForm) -> bool:
    parts = (text,) if form.num_columns == 1 else decompose(text, form.num_columns) or ("",)
    return any(not part.strip() for part in parts)


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
