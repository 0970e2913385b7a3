"""Figures as JSON holds them: written by their fields, and read by pydantic.

A record may have been written by another company's program, or cut off by a crash: an entry of
another form is read as None, or left out of the object that it stands in.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BeforeValidator,
    OnErrorOmit,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

ValueT = TypeVar("ValueT")

_LARGEST_NUMBER = 1e300  # JSON allows numbers of any size; larger ones are not figures of a run
_LARGEST_COUNT = 2**63


def as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST_NUMBER else None


def as_count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _LARGEST_COUNT else None


def as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _or_none(value: object, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        return None


Number: TypeAlias = Annotated[float | None, BeforeValidator(as_number)]
Known: TypeAlias = Annotated[float, BeforeValidator(as_number)]
"""A number that its object is meaningless without."""
Count: TypeAlias = Annotated[int | None, BeforeValidator(as_count)]
KnownCount: TypeAlias = Annotated[int, BeforeValidator(as_count)]
Text: TypeAlias = Annotated[str | None, BeforeValidator(as_text)]
Object: TypeAlias = Annotated[Mapping[str, ValueT], BeforeValidator(as_mapping)]
Maybe: TypeAlias = Annotated[ValueT | None, WrapValidator(_or_none)]
"""Something that is as good as absent where it has another form."""
Table: TypeAlias = Object[OnErrorOmit[ValueT]]  # name -> value
ByAttack: TypeAlias = Table[Table[ValueT]]  # layer -> attack -> value


class Key(NamedTuple):
    """Marks a field that has another name in the file."""

    name: str


class Flat(NamedTuple):
    """Marks a field whose entries stand among its owner's, between a prefix and a suffix."""

    prefix: str = ""
    suffix: str = ""
    write: Callable[[Any], Mapping[str, Any]] | None = None
    """Returns the entries; without it, the field's own form makes them."""

    def name(self, entry: str) -> str:
        return f"{self.prefix}{entry}{self.suffix}"

    def of(self, values: Mapping[str, Any], entries: frozenset[str] | None) -> dict[str, Any]:
        """Return the entries among some values; without known names, all between the two."""
        if entries is not None:
            return {one: values[self.name(one)] for one in entries if self.name(one) in values}
        return {
            name.removeprefix(self.prefix).removesuffix(self.suffix): value
            for name, value in values.items()
            if name.startswith(self.prefix) and name.endswith(self.suffix)
        }


IF_ANY = "if any"  # marks a field that is not written where it is None or empty


class Form:
    """A dataclass whose fields are entries of a JSON object, as the marks in their types say."""

    def form(self) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for entry in _entries(type(self)):
            value = getattr(self, entry.name)
            if entry.flat is None:
                if not entry.is_left_out or value not in (None, {}):
                    written[entry.key] = to_form(value)
            elif value is not None:
                inner = (entry.flat.write or to_form)(value)
                written |= {entry.flat.name(name): one for name, one in inner.items()}
        return written

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: object) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, got {type(values).__name__}")
        found = {}
        for entry in _entries(cls):
            if entry.flat is not None:
                inner = entry.flat.of(values, entry.entries)
                if inner or not entry.is_optional:
                    found[entry.name] = inner
            elif entry.key in values:
                found[entry.name] = values[entry.key]
        return found


def to_form(value: object) -> Any:
    """Return a value as a JSON document holds it; numbers stay as they are, finite or not."""
    if isinstance(value, Form):
        return value.form()
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: to_form(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_form(one) for one in value]
    return value


def from_form(kind: type[ValueT], document: object) -> ValueT:
    """Return what `to_form` has written, or a decoded JSON document holds. Raises ValueError."""
    found: ValueT = _adapter(kind).validate_python(document)
    return found


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


class _Entry(NamedTuple):
    name: str
    key: str
    is_left_out: bool
    is_optional: bool
    flat: Flat | None
    entries: frozenset[str] | None  # of a flat field; None where they are not known beforehand


def _entries_of(kind: Any) -> tuple[_Entry, ...]:
    hints = get_type_hints(kind, include_extras=True)
    entries = []
    for field in fields(kind):
        name, hint = field.name, hints[field.name]
        plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        choices = get_args(plain) if isinstance(plain, UnionType) else (plain,)
        flat = next((mark for mark in marks if isinstance(mark, Flat)), None)
        key = next((mark.name for mark in marks if isinstance(mark, Key)), name)
        inner = None if flat is None or flat.write is not None else _names(choices[0])
        entries.append(_Entry(name, key, IF_ANY in marks, type(None) in choices, flat, inner))
    return tuple(entries)


_entries: Callable[[Any], tuple[_Entry, ...]] = cache(_entries_of)


def _names(kind: Any) -> frozenset[str] | None:
    if not isinstance(kind, type) or not issubclass(kind, Form):
        return frozenset(kind._fields) if hasattr(kind, "_fields") else None
    names: set[str] = set()
    for entry in _entries(kind):
        flat = entry.flat
        names |= {entry.key} if flat is None else {flat.name(one) for one in entry.entries or ()}
    return frozenset(names)
