"""Only the modules of a defense ask which defense it is."""

import re
from pathlib import Path
from typing import get_args

from splitveil.active_party.defenses import DefenseSettings

ROOT = Path(__file__).parents[2]
FOLDERS = ("active_party", "passive_party", "common", "deploy", "experiments", "splitveil")
SETTINGS = get_args(get_args(DefenseSettings)[0])
CLASSES = "|".join(settings.__name__ for settings in SETTINGS)
NAMES = "|".join(
    name for one in SETTINGS if (name := one.model_fields["name"].default) not in ("none", "custom")
)
ASKS = re.compile(
    rf"is(instance|subclass)\([^()]*,[^)]*\b({CLASSES})\b|case ({CLASSES})\(|"
    rf"(==|!=|\bin\b|\bcase\b)[^#\n]*[\"']({NAMES})[\"']"
)


def test_only_the_defense_itself_asks_which_defense_it_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {asked[0]}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "defenses" not in path.parts
        for asked in ASKS.finditer(path.read_text())
    ]
    assert len(found) <= 1, found  # own defenses of programs have a title of their own
