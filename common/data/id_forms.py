"""Finds out how ids are written, and says what may keep two parties' ids from being equal.

The same person may stand in one table as 7, in another as 007 or 7.0: spreadsheets and numeric
columns drop leading zeros, and a numeric column with gaps adds a decimal point. Such ids are
compared as texts and are not equal. No message holds an id.
"""

import re
from collections.abc import Iterator, Sequence

from splitveil.common.run.messages import IdForm

LOOKED_AT = 200_000
"""Ids that are looked at, at equal distances over the table."""

_WHOLE = re.compile(r"[+-]?\d+")
_LEADING_ZEROS = re.compile(r"[+-]?0\d+")
_DECIMAL_POINT = re.compile(r"[+-]?\d*[.,]\d*([eE][+-]?\d+)?")
_ROW_NUMBERS_FROM = 20
"""Rows from which ids that count the rows are no coincidence."""


def form_of(ids: Sequence[str]) -> IdForm:
    """Return how ids are written, by those that ``LOOKED_AT`` leaves."""
    seen = set(map(_form_of_one, _some(ids)))
    return next(
        form
        for form in (IdForm.TEXT, IdForm.DECIMAL_POINT, IdForm.LEADING_ZEROS, IdForm.WHOLE)
        if form in seen or form is IdForm.WHOLE
    )


def doubts_about(ids: Sequence[str], where: str) -> list[str]:
    """Say what makes it doubtful that another party writes the same ids.

    Args:
        ids: canonical ids, row by row.
        where: file and column, for the sentences.
    """
    return [f"{where}: {doubt}" for doubt in _doubts(ids)]


def _doubts(ids: Sequence[str]) -> Iterator[str]:
    some = _some(ids)
    forms = [_form_of_one(text) for text in some]
    points = forms.count(IdForm.DECIMAL_POINT)
    zeros = forms.count(IdForm.LEADING_ZEROS)
    whole = forms.count(IdForm.WHOLE)
    in_all = "" if len(some) == len(ids) else f" of {len(some):,} that were looked at"
    if points and points + zeros + whole == len(some):
        yield (
            f"{points:,} ids{in_all} have a decimal point, as in 7.0: ids are compared as texts, "
            f"and 7.0 is not 7; write the column as text or as whole numbers"
        )
    if zeros and zeros + whole == len(some):
        widths = {len(text) for text in some}
        fixed = " (all are equally long)" if len(widths) == 1 else ""
        yield (
            f"{zeros:,} ids{in_all} have leading zeros{fixed}, as in 007: the other party has to "
            f"write them, too, because 007 is not 7; spreadsheets and numeric columns drop them"
        )
    alike = _differing_in_form_only(some, forms)
    if alike:
        yield f"{alike:,} ids{in_all} are equal to another one as numbers, but not as texts"
    if len(some) == len(ids) >= _ROW_NUMBERS_FROM and whole == len(some) and _count_rows(ids):
        yield (
            "the ids are the numbers of the rows: they name the same examples at both parties only "
            "if both tables were numbered in the same order"
        )


def _some(ids: Sequence[str]) -> Sequence[str]:
    step = -(-len(ids) // LOOKED_AT)
    return ids if step <= 1 else [ids[row] for row in range(0, len(ids), step)]


def _form_of_one(text: str) -> IdForm:
    if _WHOLE.fullmatch(text):
        return IdForm.LEADING_ZEROS if _LEADING_ZEROS.fullmatch(text) else IdForm.WHOLE
    is_number = _DECIMAL_POINT.fullmatch(text) and any(map(str.isdigit, text))
    return IdForm.DECIMAL_POINT if is_number else IdForm.TEXT


def _differing_in_form_only(ids: Sequence[str], forms: Sequence[IdForm]) -> int:
    """Count the ids that are another one's number, such as 7 and 007, or 7 and 7.0."""
    if len(set(forms) - {IdForm.TEXT}) < 2 and IdForm.LEADING_ZEROS not in forms:
        return 0
    numbers = [
        text.partition(".")[0].lstrip("+").lstrip("0")
        for text, form in zip(ids, forms, strict=True)
        if form is not IdForm.TEXT and not text.partition(".")[2].strip("0")
    ]
    return len(numbers) - len(set(numbers))


def _count_rows(ids: Sequence[str]) -> bool:
    return ids[0] in {"0", "1"} and all(
        text == str(number) for number, text in enumerate(ids, start=int(ids[0]))
    )
