"""Makes untrusted text safe for a terminal: escapes control characters and disables markup.

A file, a peer or a certificate may contain an escape sequence that clears the screen, a line break
that starts a new line in the log, a mark that changes the reading direction, or a surrogate that no
stream can encode.
"""

from rich.text import Text


def visible(text: str) -> str:
    """Return a text with every nonprintable character as an ASCII escape sequence."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )


def visible_lines(text: str) -> str:
    """Escape the nonprintable characters of a message, except its line breaks."""
    return "\n".join(map(visible, text.split("\n")))


def cell(value: object) -> Text:
    """Return a value for a rich table, which would take a plain ``[...]`` in text for markup."""
    return Text(visible(str(value)))
