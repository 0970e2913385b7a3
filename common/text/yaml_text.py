"""Reads untrusted YAML, such as a contract: checks every event before any value is built.

With aliases of aliases, a few lines can expand beyond any memory; they can nest deeper than any
parser can recurse, or contain a number whose digits Python refuses to print. These checks leave
what settings need: mappings, lists, texts, numbers, true, false, null and dates.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from splitveil.common.errors import SettingsError
from splitveil.common.text.files import read_bytes


class Extent(NamedTuple):
    """Limits on the size of a text."""

    max_bytes: int
    max_nodes: int
    """Number of values, lists and mappings, each counted as often as aliases repeat it."""


AS_WRITTEN = Extent(2**20, 50_000)
"""For a settings file: enough for tens of thousands of column names."""
RESOLVED = Extent(2**24, 500_000)
"""For both files with every default filled in, as each party keeps them with its results."""

MAX_DEPTH = 32
"""Nesting depth of lists and mappings; the settings have about eight levels."""
MAX_NUMBER_CHARACTERS = 128
_SHOWN_CHARACTERS = 200
_TAG = "tag:yaml.org,2002:"
_TAGS: frozenset[str | None] = frozenset(
    {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null")}
)
_TAGS |= {None, "!", f"{_TAG}seq", f"{_TAG}map"}


def load_yaml(text: str, source: str, extent: Extent = AS_WRITTEN) -> Any:
    """Parse a YAML text.

    Args:
        text: the text of one document.
        source: the origin of the text, for messages.
        extent: limits on its size.

    Raises:
        SettingsError: the text is not YAML or exceeds the limits; the message is one line.
    """
    try:
        if len(text) > extent.max_bytes:
            raise _Refused(f"expected at most {extent.max_bytes:,} characters, got {len(text):,}")
        _check(yaml.parse(text, Loader=yaml.SafeLoader), extent.max_nodes)
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SettingsError(f"{source}: not valid YAML: {_in_one_line(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # Raised by the library's own constructors, for February 30 and for ``!!bool maybe``.
        raise SettingsError(
            f"{source}: not valid YAML: a value is not of the kind that it looks like"
        ) from error


def read_yaml_file(path: Path, extent: Extent = AS_WRITTEN) -> Any:
    """Parse a YAML file.

    Args:
        path: the file.
        extent: limits on its size.

    Raises:
        SettingsError: the file cannot be read, is not YAML or exceeds the limits; the message is
            one line.
    """
    try:
        text = read_bytes(path, extent.max_bytes).decode("utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
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


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_yaml_float)


def _check_number(node: Any) -> None:
    length = len(node.value)
    if length > MAX_NUMBER_CHARACTERS:
        raise _Refused(
            f"{_location(node.start_mark)}expected at most {MAX_NUMBER_CHARACTERS} characters in a "
            f"number, got {length:,}"
        )


class _Node(NamedTuple):
    """The size of one node, with its aliases expanded."""

    nodes: int
    height: int
    """Number of nested levels of lists and mappings."""


class _Unfinished:
    """A list or a mapping that is not complete yet."""

    def __init__(self, anchor: str | None = None) -> None:
        self.anchor = anchor
        self.node = _Node(1, 1)

    def add(self, part: _Node) -> None:
        nodes, height = self.node
        self.node = _Node(nodes + part.nodes, max(height, part.height + 1))


def _check(events: Iterator[Any], max_nodes: int) -> None:
    """Check the events of a text and stop at the first that exceeds a limit."""
    above = [_Unfinished()]
    named: dict[str | None, _Node] = {}
    seen = 0
    for event in events:
        part, anchor = _Node(0, 0), None
        match event:
            case yaml.AliasEvent():
                if event.anchor not in named:
                    raise _Refused(f"{_location(event.start_mark)}an alias without an anchor")
                part = named[event.anchor]
            case yaml.ScalarEvent():
                _check_tag(event)
                _check_text(event)
                part, anchor = _Node(1, 0), event.anchor
            case yaml.CollectionStartEvent():
                _check_tag(event)
                above.append(_Unfinished(event.anchor))
                seen += 1
            case yaml.CollectionEndEvent():
                ended = above.pop()
                part, anchor = ended.node, ended.anchor
                seen -= part.nodes  # already counted one by one
        above[-1].add(part)
        if anchor is not None:
            named[anchor] = part
        seen += part.nodes
        if seen > max_nodes:
            raise _Refused(f"expected at most {max_nodes:,} values, aliases included")
        if len(above) - 1 + part.height > MAX_DEPTH:
            raise _Refused(f"{_location(event.start_mark)}expected at most {MAX_DEPTH} levels")


def _check_tag(event: Any) -> None:
    if event.tag not in _TAGS:
        raise _Refused(f"{_location(event.start_mark)}no setting has the tag {event.tag!r}")


def _check_text(event: Any) -> None:
    try:
        is_storable = b"\0" not in event.value.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        is_storable = False
    if not is_storable:
        raise _Refused(f"{_location(event.start_mark)}a text with an invalid character")


def _in_one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        reason = f"{_location(error.problem_mark)}{error.problem}"
    else:
        reason = " ".join(str(error).split())
    return reason if len(reason) <= _SHOWN_CHARACTERS else f"{reason[:_SHOWN_CHARACTERS]}..."


def _location(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: "
