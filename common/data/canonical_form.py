"""Brings ids into the canonical form that all parties compare, by the rules of the contract.

An id of several columns is one text: each part after its length in characters and a colon, such as
``5:Maier10:1980-02-29``. Because the lengths say where each part ends, ``ab`` and ``c`` are another
id than ``a`` and ``bc``, whatever characters the parts hold. The rules of a column are applied to
its part; an id is in canonical form if they change nothing, and applying them again never does.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unicodedata import normalize

from splitveil.common.errors import DataError, SettingsError
from splitveil.common.run.id_rules import AS_WRITTEN, EmailId, IdRule, PhoneId, TextId
from splitveil.common.text.imports import extra_missing

_LENGTH = re.compile(r"(0|[1-9][0-9]{0,6}):")
_WHOLE = re.compile(r"([+-]?[0-9]+)\.0*")
_MOST_CHARACTERS = 1024  # ordering marks in a row takes time by the square of their number
_DIGITS = re.compile(r"[0-9]+")
_SURROGATE = re.compile("[\ud800-\udfff]")

_Rule = Callable[[str], str]


class _NamedRule(NamedTuple):
    name: str
    apply: _Rule


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
        for step in self._steps[index]:
            before, after = after, list(map(step.apply, after))
            if effects is not None and before != after:
                effects[index, step.name] += sum(map(operator.ne, before, after))
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
        case TextId():
            yield from _steps_of_text(rule)
        case EmailId(fold_case=fold_case):
            yield _NamedRule("email", partial(_if_any, _email_reader(fold_case=fold_case)))
        case PhoneId(region=region):
            yield _NamedRule("phone", partial(_if_any, _phone_reader(region)))


def _steps_of_text(rule: TextId) -> Iterator[_NamedRule]:
    form: Any = rule.unicode.upper()
    yield _NamedRule("unicode", partial(_normalised, form=form))
    if rule.fold_case:
        yield _NamedRule("fold_case", partial(_folded, form=form))
    # A mark that stood alone may find a letter before it: hence normalised again.
    if rule.drop_characters:
        dropped = str.maketrans("", "", rule.drop_characters)
        yield _NamedRule("drop_characters", lambda text: _normalised(text.translate(dropped), form))
    match rule.space:
        case "trim":
            yield _NamedRule("space", str.strip)
        case "collapse":
            yield _NamedRule("space", lambda text: " ".join(text.split()))
        case "remove":
            yield _NamedRule("space", lambda text: _normalised("".join(text.split()), form))
    if rule.whole_numbers:
        yield _NamedRule("whole_numbers", _without_point)
    if rule.leading_zeros == "drop":
        yield _NamedRule("leading_zeros", _without_zeros)


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


def _without_point(text: str) -> str:
    found = _WHOLE.fullmatch(text)
    return found[1] if found else text


def _without_zeros(text: str) -> str:
    return text.lstrip("0") or "0" if _DIGITS.fullmatch(text) else text


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
