"""Brings ids into canonical form and rejects unusable columns of ids before anything is sent.

Two texts are the same id if they are equal after Unicode normalisation to NFC and removal of white
space at both ends. Since an id identifies a person, messages contain row numbers and never an id.
"""

import re
from collections.abc import Iterator, Sequence
from unicodedata import normalize

from splitveil.common.errors import DataError

NORMALISATION = "NFC, strip"
"""Name of the rule; the parties compare it before they compare any ids."""

_ROWS_NAMED = 5
_SURROGATE = re.compile("[\ud800-\udfff]")


def canonical_ids(raw: Sequence[str | None], source: str) -> list[str]:
    """Return the ids in canonical form, in the same order, each exactly once.

    Args:
        raw: one id per data row; None if the row has no id.
        source: file and column, for messages.

    Raises:
        DataError: there are no ids, or some are missing, empty, not text, or equal to another id;
            gives the count and the first data rows (from 1) of each kind, and never an id.
    """
    if not raw:
        raise DataError(f"{source}: there are no ids")
    canonical = [_canonical(text) for text in raw]
    if len(set(canonical)) < len(canonical) or "" in canonical or _any_surrogate(canonical):
        raise DataError("\n".join(f"{source}: {problem}" for problem in _problems(raw, canonical)))
    return canonical


def canonical_texts(raw: Sequence[str]) -> list[str]:
    """Return ids in canonical form, without any check: they are only looked up."""
    return [_canonical(text) for text in raw]


def _canonical(text: str | None) -> str:
    if text is None:
        return ""
    # ASCII text is already in NFC; testing for it is ten times faster than normalising.
    return text.strip() if text.isascii() else normalize("NFC", text).strip()


def _any_surrogate(ids: Sequence[str]) -> bool:
    return any(not text.isascii() and _SURROGATE.search(text) for text in ids)


def _problems(raw: Sequence[str | None], canonical: Sequence[str]) -> Iterator[str]:
    """Describe each kind of problem in one line."""
    missing: list[str] = []
    not_text: list[str] = []
    duplicates: list[str] = []
    lookalikes: list[str] = []
    first_row: dict[str, int] = {}
    for row, (text, form) in enumerate(zip(raw, canonical, strict=True)):
        if text is None or not form:
            missing.append(f"{row + 1}")
            continue
        if _SURROGATE.search(form):
            not_text.append(f"{row + 1}")
        first = first_row.setdefault(form, row)
        if first == row:
            continue
        other = raw[first] or ""
        if text == other:
            duplicates.append(f"{row + 1} (as {first + 1})")
        else:
            lookalikes.append(f"{row + 1} (as {first + 1}, {_difference(text, other)})")
    kinds = (
        (missing, "missing or empty ids"),
        (not_text, "ids that are not valid Unicode"),
        (duplicates, "duplicate ids"),
        (lookalikes, "ids equal to another id once normalised"),
    )
    for rows, kind in kinds:
        if rows:
            more = ", ..." if len(rows) > _ROWS_NAMED else ""
            yield f"{len(rows)} {kind}: data rows {', '.join(rows[:_ROWS_NAMED])}{more}"


def _difference(text: str, other: str) -> str:
    if text.strip() == other.strip():
        return "differs in white space"
    if normalize("NFC", text) == normalize("NFC", other):
        return "differs in Unicode form"
    return "differs in white space and Unicode form"
