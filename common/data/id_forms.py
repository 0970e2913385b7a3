"""Finds ids whose written form is probably not the one that the other party writes.

Two parties compare the texts of ids: 7, 007 and 7.0 are three ids. Nothing of that is an error, as
a party cannot know how the other one writes the same id; so it is said, before anything is sent.
Since an id identifies a person, the sentences contain counts and never an id.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from splitveil.common.run.messages import ID_CHARACTERS, IdForm

_DECIMAL = r"^([+-]?\d+)\.0*$"
_PADDED = r"^0\d+$"
_DIGITS = r"^\d+$"
_HEXADECIMAL = r"^[0-9a-fA-F]{16,}$"

SHORTENED = r"^[+-]?\d+(\.\d+[eE][+-]?|[eE][+-])\d+$"
"""Numbers such as 1.2E+15; 12e5 may be hexadecimal."""
_DOUBTFUL = {
    _DECIMAL: "are whole numbers written with a decimal point, such as 7.0: they equal no id that "
    "the other party writes as 7, unless contract.ids says whole_numbers: true",
    SHORTENED: "are written like 1.2e+15, as spreadsheets shorten long numbers: they equal no id "
    "in full",
    r"^(=\".*\"|'.*)$": 'are written like ="007" or \'007, as spreadsheets protect zeros: they '
    "equal no id that the other party writes as 007, unless contract.ids says drop_characters: "
    '"=\\"\'"',
    r"[\p{Cf}\p{Cc}\x{a0}\x{2000}-\x{200a}\x{202f}\x{3000}]": "hold a character that cannot be "
    "seen, such as U+200B, U+FEFF or a soft hyphen: they equal no id without it, and no rule of "
    "contract.ids drops it",
    r"^\{.*\}$": "stand in braces, as Windows writes GUIDs: they equal no id without them, unless "
    'contract.ids says drop_characters: "{}"',
    r"^\{?[0-9A-F]{8}-?([0-9A-F]{4}-?){3}[0-9A-F]{12,}\}?$": "are hexadecimal digits in capitals: "
    "they equal no id in small letters, unless contract.ids says fold_case: true",
    r"^(?i:null|none|nan|nat|nil|n/?a|n\.a\.|<na>|\(null\)|\\n|k\.a\.|-+|\?|\.)$": "are texts such "
    "as NULL, which mean that there is none: rows of several persons may seem to be of one",
}
"""Forms of some ids, each with its meaning."""
_HASH_DIGITS = {32: "MD5", 40: "SHA-1", 56: "SHA-224", 64: "SHA-256", 96: "SHA-384", 128: "SHA-512"}
_FRACTION = r"^[+-]?\d*\.\d*[1-9]\d*$"
LOOKED_AT = 20_000
"""Ids that decide about the form of all, at equal distances over the table."""
_LEAST_ROW_NUMBERS = 20
"""Least number of rows for ids that count the rows to be no coincidence."""
_LEAST = 10
"""Ids of one form before the other party learns that there are any; and one in a hundred."""


class IdForms:
    """Counts ids by their form; they may come in parts."""

    def __init__(self, *, may_count_rows: bool = True) -> None:
        self._may_count_rows = may_count_rows
        self._counts = Counter[str]()
        self._num_ids = 0
        self._first_number: int | None = None
        self._lengths: set[int] = set()
        self._hashes = Counter[int]()

    def add(self, ids: Iterable[str]) -> None:
        text = pa.array(ids, pa.string())
        self._count_rows(text)
        self._num_ids += len(text)
        for form in (*_DOUBTFUL, _FRACTION, _PADDED):
            self._counts[form] += _count(text, form)
        lengths = pc.utf8_length(text.filter(pc.match_substring_regex(text, _DIGITS)))
        self._lengths |= set(np.unique(lengths.to_numpy()).tolist())
        hashes = pc.utf8_length(text.filter(pc.match_substring_regex(text, _HEXADECIMAL)))
        self._hashes.update(hashes.to_pylist())

    def doubts(self) -> Sequence[str]:
        """Return a sentence for each doubtful form."""
        counts = self._counts
        found = [f"{counts[form]:,} ids {why}" for form, why in _DOUBTFUL.items() if counts[form]]
        if self._num_ids and counts[_FRACTION] == self._num_ids:
            found.append(
                "all ids are numbers with a fraction, such as 7.35: that is how measurements look, "
                "and rarely ids"
            )
        if counts[_PADDED] and len(self._lengths) > 1:
            found.append(
                f"{counts[_PADDED]:,} ids of digits begin with 0, but they have "
                f"{min(self._lengths)} to {max(self._lengths)} digits and so no common width: 007 "
                f"and 7 are two ids, unless contract.ids says leading_zeros: drop"
            )
        hashes = {n: rows for n, rows in self._hashes.items() if n in _HASH_DIGITS}
        if hashes and sum(hashes.values()) == self._num_ids:
            what = " and ".join(
                f"{rows:,} of {n} ({_HASH_DIGITS[n]})" for n, rows in hashes.items()
            )
            found.append(
                f"all ids are hexadecimal digits, {what}: they name the same examples only if the "
                f"other party hashes the same texts by the same function"
            )
        counts_rows = self._may_count_rows and self._first_number is not None
        if counts_rows and self._num_ids >= _LEAST_ROW_NUMBERS:
            found.append(
                "the ids are the numbers of the rows: they name the same examples at both parties "
                "only if both tables were numbered in the same order"
            )
        return found

    def _count_rows(self, text: pa.Array) -> None:
        if not len(text):
            return
        if not self._num_ids:
            first = text[0].as_py()
            self._first_number = int(first) if first in {"0", "1"} else None
        if self._first_number is None:
            return
        start = self._first_number + self._num_ids
        counted = pc.cast(pa.array(range(start, start + len(text))), pa.string())
        if not text.equals(counted):
            self._first_number = None


def form_of(ids: Sequence[str]) -> IdForm | None:
    """Return how canonical ids are written; None for too few to say it."""
    step = -(-len(ids) // LOOKED_AT)
    text = pa.array([ids[row] for row in range(0, len(ids), max(step, 1))], pa.string())
    few = max(_LEAST, -(-len(text) // 100))
    nearly_all = -(-len(text) * 9 // 10)
    if len(text) < few:
        return None
    whole = pc.replace_substring_regex(text, _DECIMAL, r"\1")
    bare = pc.replace_substring_regex(whole, "[[:punct:] ]", "")
    counts = {kind: _count(whole, pattern) for kind, pattern in ID_CHARACTERS.items()}
    lengths, rows = np.unique(pc.utf8_length(bare).to_numpy(), return_counts=True)
    length = int(lengths[rows.argmax()]) if len(text) - rows.max() < few else 0
    form = IdForm(
        "".join(sorted(kind for kind, count in counts.items() if count >= nearly_all)),
        "".join(sorted(kind for kind, count in counts.items() if few <= count < nearly_all)),
        length,
        decimal_point=_count(text, _DECIMAL) >= few,
        shortened=_count(text, SHORTENED) >= few,
    )
    return form._replace(
        hexadecimal=form.has_letters and _count(bare, _HEXADECIMAL) >= nearly_all,
        leading_zeros=_count(bare, _DIGITS) >= nearly_all and _count(bare, _PADDED) >= few,
    )


def _count(text: pa.Array, pattern: str) -> int:
    return pc.sum(pc.match_substring_regex(text, pattern)).as_py() or 0
