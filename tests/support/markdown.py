"""The repository's Markdown, read for tests: prose, links, anchors, and fenced blocks."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)$")
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*)$")


class Block(NamedTuple):
    language: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> Iterator[Block]:
    language, lines = None, list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        fence = _FENCE.match(line)
        if language is not None and line == "```":
            yield Block(language, tuple(lines))
            language, lines = None, []
        elif fence and language is None:
            language = fence[1]
        elif language is not None:
            lines.append(line)
    assert language is None, f"{name_of(path)}: a fence is not closed"


def prose(path: Path) -> Iterator[str]:
    """Yield the lines outside fenced blocks."""
    is_code = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield line


def tables(path: Path) -> Iterator[list[str]]:
    for is_row, lines in groupby(prose(path), lambda line: line.startswith("|")):
        if is_row:
            yield [_CODE.sub("`code`", line) for line in lines]


def links(path: Path) -> Iterator[str]:
    for line in prose(path):
        for target in _LINK.findall(_CODE.sub("`code`", line)):
            if "://" not in target:
                yield target


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document, derived from its headings as on GitHub."""
    found: set[str] = set()
    for line in prose(path):
        found |= set(re.findall(r'<a id="([^"]+)">', line))
        heading = _HEADING.match(line)
        if heading:
            found.add(_slug(heading[1]))
    return found


def _slug(heading: str) -> str:
    text = re.sub(r"<[^>]*>", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
