"""A defense is one room: no other module asks which defense it is.

A dispatch site is a place outside a defense's own module that matches on, compares with, or asks by
isinstance for one particular defense.
"""

import ast
from pathlib import Path
from typing import get_args

import pytest

from splitveil.active_party.defenses import DefenseSettings

ROOT = Path(__file__).parents[2]
FOLDERS = ("active_party", "passive_party", "common", "deploy", "experiments", "splitveil")
MOST = 5

SETTINGS = get_args(get_args(DefenseSettings)[0])
NAMES = {settings.model_fields["name"].default for settings in SETTINGS}
CLASSES = {settings.__name__: settings.__module__.rpartition(".")[2] for settings in SETTINGS} | {
    "Undefended": "none",
    "Isotropic": "iso",
    "PersistentIsotropic": "iso",
    "MaxNorm": "max_norm",
    "MaxNormPositive": "max_norm_positive",
    "Marvell": "marvell",
    "PersistentMarvell": "marvell",
    "MultiClassMarvell": "multi_class_marvell",
    "NoisyLabel": "noisy_label",
    "MixedGradientDefense": "gafm",
    "Adversarial": "gafm",
}


class Dispatch(ast.NodeVisitor):
    """Collects the lines of a module that dispatch on a defense."""

    def __init__(self, module: str) -> None:
        self.lines: list[int] = []
        self._foreign = {name for name, own in CLASSES.items() if own != module}
        self._names = NAMES - {module}

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._note(node, node.cls)
        self.generic_visit(node)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        self._note(node, node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            self._note(node, *node.args[1:])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._note(node, node.left, *node.comparators)
        self.generic_visit(node)

    def _note(self, node: ast.AST, *tested: ast.expr) -> None:
        parts = [part for one in tested for part in ast.walk(one)]
        named = {part.id for part in parts if isinstance(part, ast.Name)}
        said = {part.value for part in parts if isinstance(part, ast.Constant)}
        if named & self._foreign or said & self._names:
            self.lines.append(getattr(node, "lineno", 0))


def dispatch_sites(source: str, module: str) -> list[int]:
    visitor = Dispatch(module)
    visitor.visit(ast.parse(source))
    return visitor.lines


def test_only_the_defense_itself_asks_which_defense_it_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in dispatch_sites(path.read_text(), path.stem)
    ]
    assert len(found) <= MOST, found


@pytest.mark.parametrize(
    "source",
    [
        "match d:\n    case IsoDefense(noise='fresh'):\n        pass",
        "match d:\n    case IsoDefense() | MarvellDefense():\n        pass",
        "match d:\n    case {'name': 'gafm'}:\n        pass",
        "isinstance(d, (NoDefense, GafmDefense))",
        "isinstance(d, IsoDefense | MarvellDefense)",
        "x = d.name == 'marvell'",
        "x = d['name'] in ('iso', 'max_norm')",
    ],
)
def test_every_way_of_asking_is_counted(source: str) -> None:
    assert dispatch_sites(source, "plan")


def test_a_defense_may_ask_about_itself() -> None:
    assert not dispatch_sites("isinstance(d, IsoDefense)", "iso")
