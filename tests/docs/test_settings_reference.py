"""The committed reference of all settings matches the settings classes."""

from pathlib import Path

from docs.settings_reference import Reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_committed_reference_is_what_the_generator_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == Reference().text(), "run `make settings`"
