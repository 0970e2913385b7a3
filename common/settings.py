"""Reads settings from YAML files and command-line overrides, and reports all problems at once."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from splitveil.common.errors import SettingsError
from splitveil.common.text.addresses import may_hold_secret
from splitveil.common.text.visible_text import visible
from splitveil.common.text.wording import suggest
from splitveil.common.text.yaml_text import AS_WRITTEN, Extent, load_yaml, read_yaml_file

_SHOWN_CHARACTERS = 200
"""Number of characters of a value or an override that a message shows."""
_SHOWN_PROBLEMS = 50

SectionT = TypeVar("SectionT", bound="Section")


Place: TypeAlias = tuple[str, ...]
"""The names of a setting and of the sections around it; ``*`` for any key of a mapping."""


class Mark(Enum):
    """A mark on a setting's type beside its values, as in ``Annotated[str, Mark.PATH]``."""

    PATH = auto()  # one or several, relative to the settings file
    LIBRARY = auto()  # a path if it has a slash, otherwise a name
    HIDDEN = auto()  # it may hold a secret, which no message repeats
    SEED = auto()  # whoever knows it can repeat what is otherwise drawn in secret
    MAY_CHANGE = auto()  # when a run is resumed; all others affect its results
    ABOUT_LABELS = auto()  # of no use in a table without labels
    SAME_ROWS = auto()  # whatever it is, row n of a source is the same example
    UNCACHED = auto()  # columns kept in ``cache_dir`` are the same whatever it is
    PER_RUN = auto()  # runs that are compared differ in it
    KIND = auto()  # it chooses the section's class: every field of one text only


class Section(BaseModel):
    """A section of the settings: immutable, and with an error for misspelt names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def read_yaml(path: Path, extent: Extent = AS_WRITTEN) -> dict[str, Any]:
    """Read one settings file into plain values; SettingsError if that fails or it is no mapping."""
    values = read_yaml_file(path, extent)
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected names and values, got {type(values).__name__}")
    return values


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``values`` with each override ``dotted.name=yaml`` applied."""
    result = deepcopy(values)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise SettingsError(f"--set {_short(override)}: expected NAME=VALUE")
        value = load_yaml(text, f"--set {_short(override)}")
        section, (*parents, last) = result, name.split(".")
        for parent in parents:
            if not isinstance(section.setdefault(parent, {}), dict):
                raise SettingsError(
                    f"--set {_short(override)}: {parent!r} holds a plain value, not a section"
                )
            section = section[parent]
        section[last] = value
    return result


def validate(section: type[SectionT], values: Mapping[str, Any], source: str) -> SectionT:
    """Build a section from plain values.

    SettingsError has one line per problem: where it is, what was expected, what was found.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        problems = list(_problems(section, error, source))
        if len(problems) > _SHOWN_PROBLEMS:
            more = len(problems) - _SHOWN_PROBLEMS
            problems[_SHOWN_PROBLEMS:] = [f"{source}: and {more:,} more problems"]
        raise SettingsError(problems) from None  # it says the same, in more words


def kind_by_key(*keys: str, error_type: str, advice: str = "") -> Discriminator:
    """Return the discriminator of a union whose kinds have one key each that no other kind has.

    A kind may have further keys. ``advice`` ends the message that there is not exactly one of them.
    """

    def kind_of(value: object) -> str | None:
        given = value if isinstance(value, dict) else getattr(value, "model_fields_set", ())
        found = [key for key in keys if key in given]
        return found[0] if len(found) == 1 else None

    return Discriminator(
        kind_of,
        custom_error_type=error_type,
        custom_error_message=f"expected exactly one of {', '.join(keys)}{advice}",
    )


def kind_by_field(field: str, *kinds: str, error_type: str) -> Discriminator:
    """Return the discriminator of a union whose kind stands in a field, the first by default."""

    def kind_of(value: object) -> str | None:
        if isinstance(value, dict):
            kind = value.get(field, kinds[0])
        else:
            kind = getattr(value, field, None)
        return kind if kind in kinds else None

    return Discriminator(
        kind_of,
        custom_error_type=error_type,
        custom_error_message=f"expected {field} {' or '.join(kinds)}",
    )


_EXPECTED = {
    "bool": "true or false",
    "dict": "a section with names and values",
    "float": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "missing": "a value",
    "model": "a section with names and values",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a text, in quotes where YAML reads it as something else",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
    "tuple": "a list",
    "union_tag_invalid": "a {discriminator} of {expected_tags}",
    "union_tag_not_found": "a {discriminator}",
}
"""The expected value, by pydantic's type of error, or its first word."""
_TYPE = re.compile(r".*\[.*\]|constrained-\w+|str|int|float|bool")
"""The part of a place that names a type of a union, and no setting."""


def _problems(section: type[Section], error: ValidationError, source: str) -> Iterator[str]:
    found = dict[str, list[ErrorDetails]]()
    for problem in error.errors():
        where = ".".join(str(one) for one in problem["loc"] if not _TYPE.fullmatch(str(one)))
        # A list of wrong entries only is too short as well.
        if not any(one.startswith(f"{where}.") for one in found):
            found.setdefault(where, []).append(problem)
    for where, (first, *others) in found.items():  # each type of a union has its own
        if first["type"] == "extra_forbidden":
            yield f"{source}: {where}: unknown setting{_hint(section, first['loc'])}"
        else:
            message = " or ".join(map(_in_words, (first, *others))).replace(" or expected", ", or")
            yield f"{source}: {where + ': ' if where else ''}{message}{_given(first)}"


def _in_words(problem: ErrorDetails) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    expected = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    if expected is None:
        message = (
            problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        )
    else:
        message = f"expected {expected.format_map(context)}"
    if kind in {"literal_error", "union_tag_invalid"}:
        given = str(context.get("tag", problem["input"]))
        message += suggest(given, re.findall(r"'([^']*)'", message))
    return message


def _given(problem: ErrorDetails) -> str:
    given = problem.get("ctx", {}).get("tag", problem["input"])
    # A problem with a whole section would repeat all of it.
    whole = problem["type"] == "missing" or isinstance(given, dict)
    if given is None or isinstance(given, bool):
        given = {None: "null", True: "true", False: "false"}[given]
    else:
        given = repr(given)
    return "" if whole else f" (got {_short(given)})"


def _short(text: str) -> str:
    if "@" in text or may_hold_secret(text):
        return "[not shown: it may hold a password]"
    more = "..." if len(text) > _SHOWN_CHARACTERS else ""
    return visible(text[:_SHOWN_CHARACTERS]) + more


def closest_setting(section: type[Section], where: Sequence[str | int]) -> str | None:
    """Return the dotted name of the setting that a misspelt or misplaced one may mean, or None.

    A setting of this very name elsewhere comes first, then a similar one of the same section, then
    a similar one elsewhere.
    """
    tags = set(map(str, where[:-1]))
    paths = sorted(_field_paths(section, tags=tags), key=lambda path: (len(path), path))
    parent, wrong = _parent(where, paths), str(where[-1])
    paths.sort(key=lambda path: path[: len(parent)] != parent)
    beside = [path for path in paths if path[:-1] == parent]
    same = [path for path in paths if path[-1] == wrong and path[:-1] != parent]
    for candidates, cutoff in ((same, 1.0), (beside, 0.6), (paths, 0.6)):
        close = difflib.get_close_matches(wrong, {path[-1] for path in candidates}, 1, cutoff)
        if close:
            return ".".join(next(path for path in candidates if path[-1] == close[0]))
    return None


def full_name(section: type[Section], name: str) -> str:
    """Return the dotted name of the only setting whose last part is ``name``, else ``name``."""
    paths = _field_paths(section)
    found = [path for path in paths if path[-1] == name]
    return ".".join(found[0]) if len(found) == 1 and (name,) not in paths else name


def _hint(section: type[Section], where: Sequence[str | int]) -> str:
    """Return the end of the message: a bare name within the same section, else a dotted one."""
    close = closest_setting(section, where)
    if close is None:
        return ""
    paths = _field_paths(section)
    *parent, name = close.split(".")
    return f"; did you mean {(name if tuple(parent) == _parent(where, paths) else close)!r}?"


def _parent(where: Sequence[str | int], paths: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    parent: tuple[str, ...] = ()
    for part in where[:-1]:
        if (inner := (*parent, str(part))) in paths:
            parent = inner
    return parent


@cache
def marked(section: type[Section], mark: Mark) -> frozenset[Place]:
    """Return the places of all fields that have this mark."""
    return frozenset(_field_paths(section, mark=mark))


def change_at(places: Collection[Place], values: Any, change: Callable[[Any], Any]) -> Any:
    """Return plain settings with each value at one of these places changed."""
    if isinstance(values, list | tuple):
        return [change_at(places, one, change) for one in values]
    if not isinstance(values, Mapping):
        return change(values) if () in places else values
    return {name: change_at(below(places, name), value, change) for name, value in values.items()}


def without(places: Collection[Place], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain settings without what stands at these places."""
    inner = {name: below(places, name) for name in values}
    return {
        name: without(inner[name], value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if () not in inner[name]
    }


def below(places: Collection[Place], name: str) -> set[Place]:
    """Return the places in a section, as they are called there; the section's own is ``()``."""
    return {place[1:] for place in places if place[:1] in {(), (name,), ("*",)}}


def _field_paths(
    annotation: Any,
    path: Place = (),
    within: tuple[Any, ...] = (),
    tags: Collection[str] = (),
    mark: Mark | None = None,
) -> set[Place]:
    """Collect the paths of all fields reachable from a type; the types around it may recur.

    Of a union of sections, only those that ``tags`` name are followed, if it names any; ``mark``
    leaves only the fields that have it.
    """
    if annotation in within:
        return set()
    around = (*within, annotation)
    found: set[tuple[str, ...]] = set()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            inner = (*path, name)
            is_kind = mark is Mark.KIND and isinstance(only_value(field), str)
            if mark is None or mark in field.metadata or is_kind:
                found.add(inner)
            found |= _field_paths(field.annotation, inner, around, tags, mark)
    kinds = get_args(annotation)
    if mark is not None and get_origin(annotation) is dict:
        path = (*path, "*")
    for argument in [kind for kind in kinds if tag_of(kind) in tags] or kinds:
        if isinstance(argument, type) or get_args(argument):
            found |= _field_paths(argument, path, around, tags, mark)
    return found


def only_value(field: FieldInfo) -> Any:
    """Return the only value that a field can have; None if it can have several."""
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return values[0] if len(values) == 1 else None


def tag_of(kind: Any) -> str | None:
    """Return the word for a section's kind; None if it does not have one."""
    values = map(only_value, getattr(kind, "model_fields", {}).values())
    return next((value for value in values if isinstance(value, str)), None)
