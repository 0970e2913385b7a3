"""The sizes that keep rooms small enough to be read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("splitveil", "common", "active_party", "passive_party", "deploy", "experiments")

MODULE_LINES = 400
CLASS_LINES = 300
CONSTRUCTOR_PARAMETERS = 7


def modules() -> list[Path]:
    return [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.stem.endswith("_pb2")
    ]


def too_large(code: str) -> Iterator[str]:
    """Yield every excess of a module over the limits."""
    if (lines := len(code.splitlines())) > MODULE_LINES:
        yield f"the module has {lines} lines"
    for found in ast.walk(ast.parse(code)):
        if not isinstance(found, ast.ClassDef):
            continue
        if (lines := (found.end_lineno or 0) - found.lineno + 1) > CLASS_LINES:
            yield f"{found.name} has {lines} lines"
        for method in found.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                given = method.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                if count > CONSTRUCTOR_PARAMETERS:
                    yield f"{found.name} takes {count} parameters"


@pytest.mark.parametrize("module", modules(), ids=str)
def test_no_module_class_or_constructor_is_too_large(module: Path) -> None:
    assert list(too_large((ROOT / module).read_text())) == []


def test_the_limits_notice_what_is_too_large() -> None:
    parameters = ", ".join("abcdefgh")
    code = f"class Large:\n    def __init__(self, {parameters}): ...\n" + 400 * "    x = 1\n"
    assert list(too_large(code)) == [
        "the module has 402 lines",
        "Large has 402 lines",
        "Large takes 8 parameters",
    ]
