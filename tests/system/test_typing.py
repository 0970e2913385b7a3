"""Types as a wall: mypy refuses code that would send a gradient that no defense has seen."""

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SNIPPET = """
from collections.abc import Iterator

from torch import Tensor

from splitveil.active_party.defenses.interface import release
from splitveil.common.run.messages import Activation, Answer, BatchId
from splitveil.common.wire.tensor_codec import TensorLimits, encode_activation, encode_answer
from splitveil.common.wire.tensor_codec import Frame


def send(batch: BatchId, raw: Tensor, limits: TensorLimits) -> Iterator[Frame]:
    {body}
"""

MAY_MAKE_DEFENDED = ("active_party/defenses/", "active_party/training/aggregation.py")
"""The defenses, and the parts of what one of them returned."""
DECODER = "common/wire/tensor_codec.py"
"""What it reads has left the active party already."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\nnamespace_packages = true\n"
        "explicit_package_bases = true\nplugins = pydantic.mypy\n"
        "[mypy-splitveil.protos.*]\nignore_errors = true\n"
    )
    return folder


def complaints(source: Path, bodies: Sequence[str]) -> list[str]:
    """Return mypy's messages about functions with these bodies, which send a raw gradient."""
    names = [f"snippet_{number}.py" for number in range(len(bodies))]
    for name, body in zip(names, bodies, strict=True):
        (source / name).write_text(SNIPPET.format(body=body))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *names],
        cwd=source,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return ["\n".join(line for line in lines if line.startswith(name)) for name in names]


def test_mypy_refuses_to_encode_a_raw_gradient(source: Path) -> None:
    accepted = [
        "return encode_answer(Answer(batch, release(raw, raw)), limits)",
        "return encode_activation(Activation(batch, raw), limits)",
    ]
    refused = {
        "return encode_answer(raw, limits)": '"Tensor"; expected "Answer"',
        "return encode_answer(Answer(batch, raw), limits)": '"Tensor"; expected "DefendedGradient"',
        "return encode_answer(Activation(batch, raw), limits)": '"Activation"; expected "Answer"',
        "return encode_answer(Answer(batch, release(raw, raw) * 2), limits)": (
            '"Tensor"; expected "DefendedGradient"'
        ),
    }
    heard = complaints(source, [*accepted, *refused])
    assert heard[: len(accepted)] == [""] * len(accepted)
    for body, why, complaint in zip(refused, refused.values(), heard[len(accepted) :], strict=True):
        assert why in complaint, body


def test_only_defenses_and_the_decoder_call_a_gradient_defended() -> None:
    """The type is a name only: this is what it stands for."""
    makers = {
        path.relative_to(ROOT).as_posix()
        for folder in (
            "splitveil",
            "common",
            "active_party",
            "passive_party",
            "deploy",
            "experiments",
        )
        for path in (ROOT / folder).rglob("*.py")
        if _makes_defended(ast.parse(path.read_text()))
    }
    assert makers
    assert all(path.startswith(MAY_MAKE_DEFENDED) or path == DECODER for path in makers), makers


def _makes_defended(tree: ast.Module) -> bool:
    """Tell whether a module turns a tensor into a defended gradient, or casts to one."""
    return any(
        isinstance(node, ast.Call)
        and any("DefendedGradient" in ast.dump(part) for part in (node.func, *node.args[:1]))
        and _called(node) in {"DefendedGradient", "cast"}
        for node in ast.walk(tree)
    )


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
