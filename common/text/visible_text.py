"""Text of others on a terminal: what would steer it is written out, and nothing is markup.

A file, a peer or a certificate may hold an escape sequence that clears the screen, a line break
that begins a line of its own in the log, a mark that turns the reading direction, or a surrogate
that no stream can encode.
"""

from rich.text import Text


def visible(text: str) -> str:
    """Return a text with every character that is not printed as such written out in ASCII."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def visible_lines(text: str) -> str:
    """Return a message of several lines with all but its line breaks written out."""
    return "\n".join(map(visible, text.split("\n")))


def cell(value: object) -> Text:
    """Return a value for a table of rich's, which takes a plain ``[...]`` in text for markup."""
    return Text(visible(str(value)))
