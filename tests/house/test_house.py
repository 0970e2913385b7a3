"""Rules for the whole repository that no import contract can express."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitveil.protos import split_learning_pb2 as pb

ROOT = Path(__file__).parents[2]
SERVICE = pb.DESCRIPTOR.services_by_name["SplitLearning"]
INFERENCE = pb.DESCRIPTOR.services_by_name["SplitInference"]
PREDICTED = ("predict", "probab", "logit", "class", "output", "value", "data")
"""Names that a prediction could have; a request of joint inference has no field of numbers at all.
"""
TELLTALE = ("label", "target", "loss", "accuracy", "auc", "metric", "score", "release", "noisy")


def fields_reachable_from(message_name: str, seen: set[str] | None = None) -> Iterator[str]:
    seen = set() if seen is None else seen
    if message_name in seen:
        return
    seen.add(message_name)
    for field in pb.DESCRIPTOR.message_types_by_name[message_name].fields:
        yield f"{message_name}.{field.name}"
        if field.message_type is not None:
            yield from fields_reachable_from(field.message_type.name, seen)


def unstamped(path: Path) -> str:
    return re.sub(
        r"^(# Protobuf Python Version: .*|    \d+,)$", "", path.read_text(), flags=re.MULTILINE
    )


def test_generated_wire_code_is_what_protoc_makes_of_the_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=."]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    subprocess.run([*command, *files], cwd=ROOT, check=True)
    made = {path.name: unstamped(path) for path in (tmp_path / "protos").iterdir()}
    kept = {name: unstamped(ROOT / "protos" / name) for name in made}
    assert sorted(made) == ["split_learning_pb2.py", "split_learning_pb2.pyi"]
    assert kept == made, "run `make protos` and commit the result"


@pytest.mark.parametrize("method", SERVICE.methods_by_name)
def test_nothing_towards_the_passive_party_is_named_like_a_label_or_a_loss(method: str) -> None:
    fields = list(fields_reachable_from(SERVICE.methods_by_name[method].output_type.name))
    assert not {name for name in fields if any(word in name.lower() for word in TELLTALE)}


@pytest.mark.parametrize("method", INFERENCE.methods_by_name)
def test_no_question_of_joint_inference_has_a_place_for_labels_or_predictions(method: str) -> None:
    """There, requests are what goes to the passive party."""
    fields = list(fields_reachable_from(INFERENCE.methods_by_name[method].input_type.name))
    assert fields
    assert not [name for name in fields if any(w in name.lower() for w in TELLTALE + PREDICTED)]


def test_the_search_for_telltale_fields_sees_nested_messages() -> None:
    assert "MaskedPoints.points" in set(fields_reachable_from("AlignFrame"))


def test_no_file_has_a_mark_of_an_unfinished_merge() -> None:
    command = ["git", "grep", "-I", "--line-number", "--extended-regexp", "^(<{7} |>{7} )"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, ""), found.stderr
