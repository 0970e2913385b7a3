"""Wraps text between words, and longer words at their separators, never within a part of a name.

A name such as ``accumulated_spectral`` goes on after its underscore, a path after a slash. What has
no separator and still does not fit, such as a digest, is divided into parts of one length, so that
no single character is left over.
"""

import math
import re

from rich.cells import cell_len, chop_cells

_WORD = re.compile(r"\S+\s*")
_SEPARATOR = re.compile(r"(?<=\w[_/=:,-])(?=\w)|(?<=\w\.)(?=[^\W\d])|(?<=[=:,])(?=[\[{(/])")
"""Where a word may be divided. A point divides names and not numbers."""


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, none of them wider than ``width`` cells, at least one.

    Args:
        text: without control characters other than line breaks.
        width: of a line, in cells of a terminal.
    """
    return [line for own in text.split("\n") for line in _lines(own, max(width, 1))]


def longest_word(text: str) -> int:
    """Return the width of the longest word: wrapped to it, no word is divided."""
    return max(map(cell_len, text.split()), default=0)


def longest_part(text: str) -> int:
    """Return the width of the longest part between separators: wrapped to it, none is divided."""
    words = text.split()
    return max((cell_len(part) for word in words for part in _SEPARATOR.split(word)), default=0)


def _lines(text: str, width: int) -> list[str]:
    lines = [""]
    for word in _WORD.findall(text):
        bare = word.rstrip()
        parts = [word] if cell_len(bare) <= width else _parts(bare, word[len(bare) :], width)
        for part in parts:
            if lines[-1] and cell_len(lines[-1]) + cell_len(part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
    return [line.rstrip() for line in lines]


def _parts(word: str, spaces: str, width: int) -> list[str]:
    """Divide a word that is too long at its separators, and what is still too long evenly."""
    found: list[str] = []
    for part in _SEPARATOR.split(word):
        size = cell_len(part)
        found += chop_cells(part, math.ceil(size / math.ceil(size / width)))
    return [*found[:-1], found[-1] + spaces]
