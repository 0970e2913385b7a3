"""The committed references of all settings match the settings classes."""

import re
from pathlib import Path

import pytest

from docs.settings_reference import documents

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["settings.md", "experiment-settings.md"])
def test_the_committed_reference_is_what_the_generator_writes(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == documents()[name], "run `make settings`"


@pytest.mark.parametrize("name", ["settings.md", "experiment-settings.md"])
def test_links_within_a_reference_lead_to_one_anchor_each(name: str) -> None:
    text = documents()[name]
    anchors = re.findall(r'id="([^"]+)"', text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)
