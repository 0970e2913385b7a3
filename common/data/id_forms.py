"""Finds ids whose written form is probably not the one that the other party writes.

Two parties compare the texts of ids: 7, 007 and 7.0 are three ids. Nothing of that is an error, as
a party cannot know how the other one writes the same id; so it is said, before anything is sent.
Since an id identifies a person, the sentences contain counts and never an id.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_DECIMAL = r"^[+-]?\d+\.0*$"
_EXPONENT = r"^[+-]?\d+(\.\d+)?[eE][+-]?\d+$"
_DIGITS = r"^\d+$"


class IdForms:
    """Counts ids by their form; they may come in parts."""

    def __init__(self) -> None:
        self._num_decimals = 0
        self._num_exponents = 0
        self._num_padded = 0
        self._lengths: set[int] = set()

    def add(self, ids: Iterable[str]) -> None:
        """Count some canonical ids."""
        text = pa.array(ids, pa.string())
        self._num_decimals += _count(pc.match_substring_regex(text, _DECIMAL))
        self._num_exponents += _count(pc.match_substring_regex(text, _EXPONENT))
        digits = text.filter(pc.match_substring_regex(text, _DIGITS))
        lengths = pc.utf8_length(digits)
        self._lengths |= set(np.unique(lengths.to_numpy()).tolist())
        starts_with_zero = pc.starts_with(digits, "0")
        self._num_padded += _count(pc.and_(starts_with_zero, pc.greater(lengths, 1)))

    def doubts(self) -> Sequence[str]:
        """Return a sentence for each doubtful form."""
        found = []
        if self._num_decimals:
            found.append(
                f"{self._num_decimals:,} ids are whole numbers written with a decimal point, such "
                f"as 7.0: they equal no id that the other party writes as 7"
            )
        if self._num_exponents:
            found.append(
                f"{self._num_exponents:,} ids are written like 1.2e+15, as spreadsheets shorten "
                f"long numbers: they equal no id in full"
            )
        if self._num_padded and len(self._lengths) > 1:
            found.append(
                f"{self._num_padded:,} ids of digits begin with 0, but they have "
                f"{min(self._lengths)} to {max(self._lengths)} digits and so no common width: 007 "
                f"and 7 are two ids"
            )
        return found


def _count(is_it: pa.Array) -> int:
    return pc.sum(is_it).as_py() or 0
