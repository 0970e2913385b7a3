"""Side channels: only the gradients may differ between two sets of labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitveil.common.record.transcript import FILE
from tests.record.test_transcript import run_noted
from tests.support.runs import write_example

MARVELL = "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 1}"


def with_other_labels(folder: Path) -> None:
    """Give the same people other labels: another share of positives, unrelated to the features."""
    lines = (folder / "active.csv").read_text().splitlines()
    generator = np.random.default_rng(5)
    changed = []
    for line in lines[1:]:
        person, _, *own = line.split(",")
        changed.append(",".join([person, str(int(generator.random() < 0.6)), *own]))
    (folder / "active.csv").write_text("\n".join([lines[0], *changed]) + "\n")


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], ...]:
    """Return the active party's messages in two runs that differ only in their labels."""
    folder = tmp_path_factory.mktemp("two label sets")
    found = []
    for name in ("one", "other"):
        write_example(folder / name)
        if name == "other":
            with_other_labels(folder / name)
        run_noted(folder / name, folder / f"{name} run", MARVELL)
        lines = (folder / f"{name} run" / "active" / FILE).read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        found.append([entry for entry in entries if entry.get("direction") == "sent"])
    return tuple(found)


def shape(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kind"], entry["epoch"], entry["step"], entry["bytes"]


def test_number_order_and_size_of_the_messages_do_not_depend_on_the_labels(
    sent: tuple[list[dict[str, Any]], ...],
) -> None:
    one, other = sent
    assert [shape(entry) for entry in one] == [shape(entry) for entry in other]
    assert len(one) > 10


def test_of_all_messages_about_rows_only_the_gradients_differ(
    sent: tuple[list[dict[str, Any]], ...],
) -> None:
    """Handshake and alignment come before any label is used, and hold random numbers."""
    one, other = sent
    pairs = [
        (a, b)
        for a, b in zip(one, other, strict=True)
        if not a["kind"].startswith(("Handshake", "Align"))
    ]
    gradients = [(a, b) for a, b in pairs if a["kind"] == "Train reply"]
    others = [(a, b) for a, b in pairs if a["kind"] != "Train reply"]
    assert all(a["digest"] != b["digest"] for a, b in gradients)
    assert {a["kind"] for a, _ in others} == {"Evaluate reply", "Leave reply"}
    assert all(a["digest"] == b["digest"] for a, b in others)
