"""Types as a wall: mypy, which `make check` runs, refuses to send a gradient without a defense."""

import ast
from pathlib import Path
from typing import get_type_hints

from torch import Tensor

from splitveil.active_party.defenses.interface import Defended, release
from splitveil.common.run.messages import Answer, DefendedGradient
from splitveil.common.wire.tensor_codec import encode_answer

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("splitveil", "common", "active_party", "passive_party", "deploy", "experiments")
MAY_MAKE_DEFENDED = ("active_party/defenses/", "active_party/training/aggregation.py")
"""The defenses, and the parts of what one of them returned."""
DECODER = "common/wire/tensor_codec.py"
"""What it reads has left the active party already."""


def test_only_a_defended_gradient_can_be_encoded_as_an_answer() -> None:
    """A new type of tensors: mypy takes neither a tensor for one, nor what is computed from one."""
    assert get_type_hints(encode_answer)["answer"] is Answer
    assert get_type_hints(Answer)["values"] is DefendedGradient
    assert get_type_hints(Defended)["gradient"] is DefendedGradient
    assert get_type_hints(release)["return"] is DefendedGradient
    assert vars(DefendedGradient)["__supertype__"] == Tensor.__name__  # mypy alone imports torch


def test_only_defenses_and_the_decoder_call_a_gradient_defended() -> None:
    """The type is a name only: this is what it stands for."""
    makers = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if _makes_defended(ast.parse(path.read_text()))
    }
    assert makers
    assert all(path.startswith(MAY_MAKE_DEFENDED) or path == DECODER for path in makers), makers


def _makes_defended(tree: ast.Module) -> bool:
    """Return whether a module turns a tensor into a defended gradient, or casts to one."""
    return any(
        isinstance(node, ast.Call)
        and any("DefendedGradient" in ast.dump(part) for part in (node.func, *node.args[:1]))
        and ast.unparse(node.func).rpartition(".")[2] in {"DefendedGradient", "cast"}
        for node in ast.walk(tree)
    )
