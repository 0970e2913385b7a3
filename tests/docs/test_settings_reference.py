"""The committed reference of all settings matches the settings classes."""

from pathlib import Path

from docs.settings_reference import Reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_committed_reference_is_what_the_generator_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == Reference().text(), "run `make settings`"


def test_no_anchor_is_there_twice() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    anchors = [line.split('"')[1] for line in lines if '<a id="' in line]
    assert len(anchors) == len(set(anchors)) > 150
