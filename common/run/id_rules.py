"""The rules that bring ids into canonical form: part of the contract, one entry per id column.

Ids of two tables are the same if their canonical forms are. All parties apply the same rules in the
order of the settings below, by ``splitveil.common.data.canonical_form``.
"""

import json
import string
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, TypeAdapter, model_validator

from splitveil.common.settings import Section, kind_by_field

MAX_ID_COLUMNS = 8

_DROPPABLE = frozenset(string.punctuation)


class _IdColumn(Section):
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Content of the column, such as ``surname``: only compared, so that both parties bring the
    same columns in the same order. The columns themselves may be named differently."""


class TextId(_IdColumn):
    """An id that is any text. The rules are applied in this order."""

    kind: Literal["text"] = "text"

    unicode: Literal["nfc", "nfkc"] = "nfc"
    """Unicode normalisation. ``nfkc`` also unifies characters that only look different, such as
    full-width digits and ligatures."""

    fold_case: bool = False
    """Treat capital and small letters as the same."""

    drop_characters: str = Field(default="", max_length=32)
    """Punctuation marks that do not count wherever they stand, such as ``"-./"``."""

    space: Literal["trim", "collapse", "remove"] = "trim"
    """White space that does not count: that at both ends (``trim``), also all but one of several
    between words (``collapse``), or all (``remove``)."""

    whole_numbers: bool = False
    """Write whole numbers without a decimal point: 7.0 becomes 7. A column
    of floating-point numbers is refused otherwise."""

    leading_zeros: Literal["keep", "drop"] = "keep"
    """Remove leading zeros from ids of digits: 007 becomes 7, and 000 becomes 0."""

    @model_validator(mode="after")
    def _drops_only_punctuation(self) -> "TextId":
        if not _DROPPABLE.issuperset(self.drop_characters):
            raise ValueError(
                f"drop_characters: expected punctuation marks, some of {string.punctuation}"
            )
        if self.whole_numbers and "." in self.drop_characters:
            raise ValueError("drop_characters: whole_numbers needs the point: 7.0 would become 70")
        return self


class EmailId(_IdColumn):
    """An e-mail address, by the rules of the library email-validator (``splitveil[ids]``).

    The domain is written in small letters and in Unicode; nothing is looked up. Anything else than
    an address is no id.
    """

    kind: Literal["email"]

    fold_case: bool = True
    """Treat capital and small letters before the @ as the same, too."""


class PhoneId(_IdColumn):
    """A telephone number, by the rules of the library phonenumbers (``splitveil[ids]``).

    It becomes the international form, such as ``+390236618300``. Anything else than a possible
    number is no id.
    """

    kind: Literal["phone"]

    region: str | None = Field(default=None, pattern=r"^[A-Z]{2}$")
    """Country of the numbers that are written without a country code, such as ``IT``. Without it,
    such numbers are no ids."""


IdRule = Annotated[
    Annotated[TextId, Tag("text")]
    | Annotated[EmailId, Tag("email")]
    | Annotated[PhoneId, Tag("phone")],
    kind_by_field("kind", "text", "email", "phone", error_type="id_kind"),
]


# Rules for each column of ids, in the order of the columns; those for a single one need no list.
IdRules = Annotated[
    tuple[IdRule, ...],
    Field(min_length=1, max_length=MAX_ID_COLUMNS),
    BeforeValidator(
        lambda value: (value,) if isinstance(value, dict | _IdColumn) else value,
        json_schema_input_type=IdRule | tuple[IdRule, ...],
    ),
]
AS_WRITTEN: Sequence[IdRule] = (TextId(),)
"""The rules without any setting: NFC, and no white space at the ends."""


def rules_as_plain(rules: Sequence[IdRule]) -> list[dict[str, Any]]:
    """Return the rules as plain values, without the names, which decide nothing."""
    return [rule.model_dump(mode="json", exclude={"name"}) for rule in rules]


def rules_as_bytes(rules: Sequence[IdRule]) -> bytes:
    """Return the rules as files of examples hold them; empty for ``AS_WRITTEN``."""
    plain = rules_as_plain(rules)
    if plain == rules_as_plain(AS_WRITTEN):
        return b""
    return json.dumps(plain, sort_keys=True).encode()


def rules_of_bytes(written: bytes) -> Sequence[IdRule]:
    """Return the rules that ``rules_as_bytes`` has written; ValueError for anything else."""
    if not written:
        return AS_WRITTEN
    rules: tuple[IdRule, ...] = TypeAdapter(IdRules).validate_json(written)
    return rules
