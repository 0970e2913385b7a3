"""The committed reference of all settings matches the settings classes."""

from pathlib import Path

import pytest

from docs.settings_reference import Reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.fixture(scope="module")
def reference() -> str:
    return Reference().text()


def test_the_committed_reference_is_what_the_generator_writes(reference: str) -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reference, "run `make settings`"


@pytest.mark.parametrize(
    "line",
    [
        "**`batch_size`**: whole number, 1 to 1,048,576; required.",
        "**`split`**: [`hash`](#contract.split.hash) or [`column`](#contract.split.column);",
        "**`listen`**: `HOST:PORT`; default `127.0.0.1:50051`.",
        "**`max_s`**: number of seconds, above 0 and at most 86,400; default `300`.",
        "**`max_cpu_share`**: number, above 0 and at most 1, or `null`; default `0.03`.",
        '**`missing_texts`**: list of entries (text); default `[""]`.',
        "  Passes over the training rows.",
    ],
)
def test_types_bounds_units_and_defaults_are_given(reference: str, line: str) -> None:
    assert line in reference


def test_no_anchor_stands_twice(reference: str) -> None:
    anchors = [line.split('"')[1] for line in reference.splitlines() if '<a id="' in line]
    assert len(anchors) == len(set(anchors)) > 150
