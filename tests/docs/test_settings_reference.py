"""The committed reference of all settings matches the settings classes."""

from pathlib import Path

from docs.settings_reference import Reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_committed_reference_is_what_the_generator_writes() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == Reference().text(), "run `make settings`"


def test_types_bounds_units_and_defaults_are_given_and_no_anchor_twice() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for start in (
        "**`batch_size`**: whole number, 1 to 1,048,576; required.",
        "**`split`**: [`hash`](#contract.split.hash) or [`column`](#contract.split.column);",
        "**`max_cpu_share`**: number, above 0 and at most 1, or `null`; default `0.03`.",
        '**`missing_texts`**: list of entries (text); default `[""]`.',
        "  Passes over the training rows.",
    ):
        assert any(start in line for line in lines), start
    anchors = [line.split('"')[1] for line in lines if '<a id="' in line]
    assert len(anchors) == len(set(anchors)) > 150
