"""Brings ids into the canonical form that all parties compare, by the rules of the contract.

An id of several columns is one text: each part after its length in characters and a colon, such as
``5:Maier10:1980-02-29``. Because the lengths say where each part ends, ``ab`` and ``c`` are another
id than ``a`` and ``bc``, whatever characters the parts hold. The rules of a column are applied to
its part; an id is in canonical form if they change nothing, and applying them again never does.

Of what no rule changes, ``IdForms`` says what the other party probably writes otherwise: 7, 007 and
7.0 are three ids. Nothing of that is an error, as a party cannot know how the other one writes the
same id; so it is said, before anything is sent. Since an id identifies a person, the sentences
contain counts and never an id.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from splitveil.common.errors import DataError, SettingsError
from splitveil.common.run.id_rules import AS_WRITTEN, EmailId, IdRule, PhoneId
from splitveil.common.run.messages import ID_CHARACTERS, IdForm
from splitveil.common.text.imports import extra_missing

_LENGTH = re.compile(r"(0|[1-9][0-9]{0,6}):")
_WHOLE = re.compile(r"\A([+-]?[0-9]+)\.0*\Z")
_LEADING_ZEROS = re.compile(r"\A(?=[0-9]+\Z)0+(?=[0-9])")
_MOST_CHARACTERS = 1024  # ordering marks in a row takes time by the square of their number
_SURROGATE = re.compile("[\ud800-\udfff]")

_NamedRule = tuple[str, Callable[[str], str]]


Effects = Counter[tuple[int, str]]
"""Ids that a rule has changed, by the index of the column and the rule's name."""


class CanonicalForm:
    """The canonical form of a contract's ids.

    SettingsError if a library for a rule is not installed.
    """

    def __init__(self, rules: Sequence[IdRule] = AS_WRITTEN) -> None:
        self.rules = tuple(rules)
        self._steps = [list(_steps_of(rule)) for rule in rules]

    @property
    def num_columns(self) -> int:
        return len(self._steps)

    def of(self, texts: Sequence[str], effects: Effects | None = None) -> list[str]:
        """Return ids in canonical form, empty for those that are none.

        See ``compose`` for several columns.
        """
        if self.num_columns == 1:
            return self._column(0, texts, effects)
        split = (decompose(text, self.num_columns) for text in texts)
        rows = [parts or ("",) * self.num_columns for parts in split]
        columns = [
            self._column(index, column, effects)
            for index, column in enumerate(zip(*rows, strict=True))
        ]
        return [compose(parts) if all(parts) else "" for parts in zip(*columns, strict=True)]

    def columns_of(self, ids: Sequence[str]) -> list[list[str]]:
        """Return the parts of canonical ids, by column."""
        if self.num_columns == 1:
            return [list(ids)]
        split = (decompose(text, self.num_columns) for text in ids)
        rows = [parts for parts in split if parts is not None]
        return [list(column) for column in zip(*rows, strict=True)]

    def _column(self, index: int, texts: Sequence[str], effects: Effects | None) -> list[str]:
        after = list(texts)
        for name, apply in self._steps[index]:
            before, after = after, list(map(apply, after))
            if effects is not None and before != after:
                effects[index, name] += sum(map(operator.ne, before, after))
        return after


def compose(parts: Sequence[str]) -> str:
    """Return the text of an id that several columns make up."""
    return "".join(f"{len(part)}:{part}" for part in parts)


def decompose(text: str, num_parts: int) -> tuple[str, ...] | None:
    """Return the parts of such a text; None if it does not consist of that many."""
    parts: list[str] = []
    at = 0
    while at < len(text) and len(parts) < num_parts:
        length = _LENGTH.match(text, at)
        if length is None:
            return None
        end = length.end() + int(length[1])
        if end > len(text):
            return None
        parts.append(text[length.end() : end])
        at = end
    return tuple(parts) if at == len(text) and len(parts) == num_parts else None


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: it has no half of a surrogate pair."""
    return text.isascii() or not _SURROGATE.search(text)


def _steps_of(rule: IdRule) -> Iterator[_NamedRule]:
    match rule:
        case EmailId(fold_case=fold_case):
            yield "email", partial(_if_any, _email_reader(fold_case=fold_case))
            return
        case PhoneId(region=region):
            yield "phone", partial(_if_any, _phone_reader(region))
            return
    form: Any = rule.unicode.upper()
    yield "unicode", partial(_normalised, form=form)
    if rule.fold_case:
        yield "fold_case", partial(_folded, form=form)
    # A mark that stood alone may find a letter before it: hence normalised again.
    if rule.drop_characters:
        dropped = str.maketrans("", "", rule.drop_characters)
        yield "drop_characters", lambda text: _normalised(text.translate(dropped), form)
    match rule.space:
        case "trim":
            yield "space", str.strip
        case "collapse":
            yield "space", lambda text: " ".join(text.split())
        case "remove":
            yield "space", lambda text: _normalised("".join(text.split()), form)
    if rule.whole_numbers:
        yield "whole_numbers", lambda text: _WHOLE.sub(r"\1", text)
    if rule.leading_zeros == "drop":
        yield "leading_zeros", lambda text: _LEADING_ZEROS.sub("", text)


def _normalised(text: str, form: Any) -> str:
    # ASCII text is already normalised; testing for it is ten times faster than normalising.
    if text.isascii():
        return text
    if len(text) > _MOST_CHARACTERS:
        raise DataError(f"ids: one beyond ASCII has more than {_MOST_CHARACTERS:,} characters")
    return normalize(form, text)


def _folded(text: str, form: Any) -> str:
    if text.isascii():
        return text.lower()
    # Unicode's caseless matching, definitions D145 and D146: decomposed before it is folded.
    decomposed = normalize("NFD" if form == "NFC" else "NFKD", text)
    if form == "NFC":
        return normalize(form, decomposed.casefold())
    return normalize(form, normalize("NFKD", decomposed.casefold()).casefold())


def _if_any(read: Callable[[str], str | None], text: str) -> str:
    text = _normalised(text, "NFC").strip()
    return (read(text) or "") if text and is_unicode(text) else ""


def _email_reader(*, fold_case: bool) -> Callable[[str], str | None]:
    try:
        # The party that names no e-mail addresses need not have the library.
        from email_validator import EmailNotValidError, validate_email  # noqa: PLC0415
    except ImportError as error:
        raise extra_missing("contract.ids: kind email", "ids") from error

    def read(text: str) -> str | None:
        try:
            found = validate_email(
                text, check_deliverability=False, globally_deliverable=False
            ).normalized
        except EmailNotValidError:
            return None
        return _folded(found, "NFC") if fold_case else found

    return read


def _phone_reader(region: str | None) -> Callable[[str], str | None]:
    try:
        import phonenumbers  # noqa: PLC0415
    except ImportError as error:
        raise extra_missing("contract.ids: kind phone", "ids") from error
    if region is not None and region not in phonenumbers.SUPPORTED_REGIONS:
        raise SettingsError(f"contract.ids: region: the library phonenumbers knows no {region}")

    def once(text: str) -> str | None:
        try:
            number = phonenumbers.parse(text, region)
        except phonenumbers.NumberParseException:
            return None
        if not phonenumbers.is_possible_number(number):
            return None
        plain = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
        return f"{plain};ext={number.extension}" if number.extension else str(plain)

    def read(text: str) -> str | None:
        found = once(text)
        # Superfluous zeros are dropped one by one: what reads differently again is no number.
        return found if found is not None and once(found) == found else None

    return read


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
