"""Describes the types, bounds and defaults of settings for the reference of all settings."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, ByteSize, Tag
from pydantic.fields import FieldInfo

from splitveil.common.settings import Section
from splitveil.common.text.addresses import usable

_WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    ByteSize: "bytes, such as `128MB` or `1GiB`",
    Path: "path",
    Any: "any value",
}
_COMPARISONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def sections_of(
    annotation: Any, tag: str | None = None
) -> Iterator[tuple[type[Section], str | None]]:
    """Yield the sections that a type may hold, each with the tag that distinguishes it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        named = [item.tag for item in metadata if isinstance(item, Tag)]
        yield from sections_of(inner, named[0] if named else tag)
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, tag
    else:
        parts = [part for part in get_args(annotation) if part is not NoneType]
        found = [one for part in parts for one in sections_of(part)]
        alternatives = origin in {Union, UnionType} and len(found) > 1
        for section, own_tag in found:
            yield section, own_tag or (literal_tag(section) if alternatives else None)


def literal_tag(section: type[Section]) -> str | None:
    """Return the word by which a section names its kind; None if it does not have one."""
    values = (only_value(info) for info in section.model_fields.values())
    return next((str(value) for value in values if isinstance(value, str)), None)


def only_value(info: FieldInfo) -> Any:
    """Return the only value that a field can have; None if it can have several."""
    values = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    return values[0] if len(values) == 1 else None


def scalar(annotation: Any, metadata: Sequence[Any]) -> str:
    """Describe the values of a type that does not contain other types."""
    if annotation is NoneType:
        return "`null`"
    if get_origin(annotation) is Literal:
        return joined([_value(value) for value in get_args(annotation)])
    if any(isinstance(item, AfterValidator) and item.func is usable for item in metadata):
        return "`HOST:PORT`"
    return _bounded(_WORDS.get(annotation, "text"), metadata)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(item.metadata)
        elif isinstance(item, annotated_types.GroupedMetadata):
            yield from item
        else:
            yield item


def _bounded(words: str, metadata: Sequence[Any]) -> str:
    bounds: dict[str, str] = {}
    for item in _flat(metadata):
        for word in _COMPARISONS:
            if getattr(item, word, None) is not None:
                bounds[word] = _amount(getattr(item, word))
        if getattr(item, "pattern", None):
            words += f" that matches `{item.pattern}`"
    if bounds.keys() == {"ge", "le"}:
        return f"{words}, {bounds['ge']} to {bounds['le']}"
    limits = " and ".join(f"{_COMPARISONS[word]} {amount}" for word, amount in bounds.items())
    characters = lengths(metadata, "characters")
    return ", ".join(filter(None, (words, limits, characters)))


def lengths(metadata: Sequence[Any], unit: str = "entries") -> str:
    """Describe the allowed number of entries or characters; empty if it is not bounded."""
    fewest = most = None
    for item in _flat(metadata):
        fewest = getattr(item, "min_length", None) or fewest
        most = getattr(item, "max_length", None) or most
    if most is not None:
        return f"{fewest or 0:,} to {most:,} {unit}"
    return "" if fewest is None or unit == "characters" else f"at least {fewest:,} {unit}"


def _amount(bound: Any) -> str:
    if bound == 2**63:
        return "2^63"
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def joined(words: Sequence[str]) -> str:
    """Join alternatives with commas and *or*."""
    *others, last = dict.fromkeys(words)
    comma = "," if any(", " in word for word in others) else ""
    return f"{', '.join(others)}{comma} or {last}" if others else last


def default_of(info: FieldInfo) -> str:
    """Describe the value of a field that is not set."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Section):
        changed = {name: getattr(value, name) for name in sorted(value.model_fields_set)}
        if not changed:
            tag = literal_tag(type(value))
            kind = [n for n, i in type(value).model_fields.items() if only_value(i) == tag]
            changed = {kind[0]: tag} if tag is not None and kind else {}
        return (
            f"default {_value(changed)}"
            if changed
            else "default: that section with its own defaults"
        )
    return f"default {_value(value)}"


def _value(value: Any) -> str:
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    """Return a value as YAML would show it in a line."""
    match value:
        case Section():
            return _plain({name: getattr(value, name) for name in sorted(value.model_fields_set)})
        case dict():
            return "{" + ", ".join(f"{n}: {_plain(one)}" for n, one in value.items()) + "}"
        case tuple():
            return "[" + ", ".join(_plain(one) for one in value) + "]"
        case None | bool():
            return json.dumps(value)
        case float():
            return f"{value:g}"
        case _:
            return str(value) or '""'
