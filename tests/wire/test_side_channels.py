"""Side channels: only the gradients may differ between two sets of labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np

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


def sent(folder: Path) -> list[dict[str, Any]]:
    """Run, and return the active party's messages as its transcript notes them."""
    run_noted(folder, folder / "run", MARVELL)
    lines = (folder / "run" / "active" / FILE).read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry.get("direction") == "sent"]


def test_only_the_gradients_depend_on_the_labels(tmp_path: Path) -> None:
    """Handshake and alignment come before any label is used, and hold random numbers."""
    for name in ("one", "other"):
        write_example(tmp_path / name)
    with_other_labels(tmp_path / "other")
    one, other = sent(tmp_path / "one"), sent(tmp_path / "other")
    assert len(one) > 10
    for field in ("kind", "epoch", "step", "bytes"):
        assert [entry[field] for entry in one] == [entry[field] for entry in other]
    kinds = set()
    for a, b in zip(one, other, strict=True):
        if not a["kind"].startswith(("Handshake", "Align")):
            assert (a["digest"] != b["digest"]) is (a["kind"] == "Train reply")
            kinds.add(a["kind"])
    assert kinds == {"Train reply", "Evaluate reply", "Leave reply"}
