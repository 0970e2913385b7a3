"""Reads untrusted YAML, such as a contract: checks every event before any value is built.

With aliases of aliases, a few lines can expand beyond any memory; they can nest deeper than any
parser can recurse, or contain a number whose digits Python refuses to print. These checks leave
what settings need: mappings, lists, texts, numbers, true, false, null and dates.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from splitveil.common.errors import SettingsError
from splitveil.common.text.files import read_or_refuse


class Extent(NamedTuple):
    max_bytes: int
    max_nodes: int  # number of values, lists and mappings
    may_repeat: bool = False  # whether aliases are allowed, whose values are not counted


AS_WRITTEN = Extent(2**20, 50_000)  # a settings file: tens of thousands of column names
RESOLVED = Extent(2**24, 500_000)  # both files with all defaults, as a run keeps them
OWN_PLAN = Extent(2**20, 50_000, may_repeat=True)  # for a file that nobody else has written

MAX_DEPTH = 32  # nesting depth of lists and mappings; the settings have about eight levels
MAX_NUMBER_CHARACTERS = 128
_SHOWN_CHARACTERS = 200


def load_yaml(text: str, source: str, extent: Extent = AS_WRITTEN) -> Any:
    """Parse the text of one document, whose origin is ``source`` in messages."""
    try:
        if len(text) > extent.max_bytes:
            raise _Refused(f"expected at most {extent.max_bytes:,} characters, got {len(text):,}")
        _check(text, extent)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{_location(error.problem_mark)}{error.problem}"
        else:
            reason = " ".join(str(error).split())
        if len(reason) > _SHOWN_CHARACTERS:
            reason = f"{reason[:_SHOWN_CHARACTERS]}..."
        raise SettingsError(f"{source}: not valid YAML: {reason}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # Raised by the library's own constructors, for instance for February 30.
        raise SettingsError(
            f"{source}: not valid YAML: a value is not of the kind that it looks like"
        ) from error


def read_yaml_file(path: Path, extent: Extent = AS_WRITTEN) -> Any:
    """Parse a YAML file; SettingsError, in one line, as ``load_yaml``."""
    try:
        text = read_or_refuse(path, extent.max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: cannot be read: the text is not UTF-8") from error
    return load_yaml(text, str(path), extent)


class _Refused(yaml.YAMLError):
    """Well-formed YAML that no settings need."""


class _Loader(yaml.SafeLoader):
    """Refuses numbers whose digits Python refuses to print, or that overflow while parsing."""

    def construct_yaml_int(self, node: Any) -> Any:
        _check_number(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node: Any) -> Any:
        _check_number(node)
        return super().construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def _check_number(node: Any) -> None:
    length = len(node.value)
    if length > MAX_NUMBER_CHARACTERS:
        raise _Refused(
            f"{_location(node.start_mark)}expected at most {MAX_NUMBER_CHARACTERS} characters in a "
            f"number, got {length:,}"
        )


def _check(text: str, extent: Extent) -> None:
    nodes = depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = _location(event.start_mark)
        if isinstance(event, yaml.AliasEvent) and not extent.may_repeat:
            raise _Refused(f"{where}no alias is allowed: write the value itself")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            nodes += 1
            if event.tag is not None:
                raise _Refused(f"{where}no setting has the tag {event.tag!r}")
        # NUL, and surrogates, which no file in UTF-8 can hold.
        if isinstance(event, yaml.ScalarEvent) and re.search(r"[\0\ud800-\udfff]", event.value):
            raise _Refused(f"{where}a text with an invalid character")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if nodes > extent.max_nodes:
            raise _Refused(f"expected at most {extent.max_nodes:,} values")
        if depth > MAX_DEPTH:
            raise _Refused(f"{where}expected at most {MAX_DEPTH} levels")


def _location(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: "
