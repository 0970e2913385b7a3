"""The sizes that keep modules and classes small enough to be read."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("splitveil", "common", "active_party", "passive_party", "deploy", "experiments")

MODULE_LINES = 500
"""Lines of code: without docstrings, comments and blank lines."""
CLASS_LINES = 250
PUBLIC_METHODS = 19
CONSTRUCTOR_PARAMETERS = 7


def modules() -> list[Path]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [path for path in found if not path.stem.endswith("_pb2")]


def code_lines(source: str) -> list[int]:
    """Return the numbers of the lines that hold code."""
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    return [
        number
        for number, line in enumerate(source.splitlines(), start=1)
        if number not in documented and line.strip() and not line.strip().startswith("#")
    ]


def too_large(source: str) -> Iterator[str]:
    lines = code_lines(source)
    if len(lines) > MODULE_LINES:
        yield f"the module has {len(lines)} lines"
    for found in ast.walk(ast.parse(source)):
        if not isinstance(found, ast.ClassDef):
            continue
        own = sum(found.lineno <= line <= (found.end_lineno or 0) for line in lines)
        if own > CLASS_LINES:
            yield f"{found.name} has {own} lines"
        methods = [part for part in found.body if isinstance(part, ast.FunctionDef)]
        public = {part.name for part in methods if not part.name.startswith("_")}
        if len(public) > PUBLIC_METHODS:
            yield f"{found.name} has {len(public)} public methods"
        for method in methods:
            arguments = method.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if method.name == "__init__" and len(given) - 1 > CONSTRUCTOR_PARAMETERS:
                yield f"{found.name} takes {len(given) - 1} parameters"


def test_no_module_class_or_constructor_is_too_large() -> None:
    found = {path.relative_to(ROOT): list(too_large(path.read_text())) for path in modules()}
    assert {path: excess for path, excess in found.items() if excess} == {}


def test_the_limits_notice_what_is_too_large() -> None:
    parameters = ", ".join("abcdefgh")
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(29))
    code = (
        f"class Large:\n    def __init__(self, {parameters}): ...\n{methods}" + 500 * "    x = 1\n"
    )
    assert list(too_large(code + 300 * "\n    # a comment\n")) == [
        "the module has 531 lines",
        "Large has 531 lines",
        "Large has 29 public methods",
        "Large takes 8 parameters",
    ]
