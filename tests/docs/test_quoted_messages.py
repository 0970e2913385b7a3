"""Messages that the guide quotes are the ones that the programs print."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, prose

GUIDE = ROOT / "docs" / "guide"
CODE = ("splitveil", "common", "active_party", "passive_party", "deploy", "experiments")
TABLES = ("| line | when |", "| what you see |", "| message or symptom |")
OF_GRPC = "Handshake failed with error"


def quoted(page: Path) -> set[str]:
    """Return the text in code style in the first column of a page's tables of messages."""
    found: set[str] = set()
    is_table = False
    for line in prose(page):
        is_table = line.startswith(TABLES) or (is_table and line.startswith("|"))
        if is_table and not line.startswith((*TABLES, "|---")):
            found |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def fixed_parts(message: str) -> list[str]:
    """Return the constant parts of a message, without names, numbers and paths."""
    parts = re.split(r"\.\.\.|\d+|\(defense\)|\w+\.\w+:", message)
    return [part.strip(" :") for part in parts if len(part.split()) > 1]


@pytest.fixture(scope="module")
def code() -> str:
    """Return all source, with string literals that span several lines joined."""
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("page", ["operations.md", "own-data.md"])
def test_every_quoted_message_is_in_the_code(code: str, page: str) -> None:
    messages = quoted(GUIDE / page)
    assert len(messages) > 3
    parts = {part for message in messages for part in fixed_parts(message)} - {OF_GRPC}
    assert {part for part in parts if part not in code} == set()
