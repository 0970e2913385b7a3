"""On the same bytes, the label owner's leak monitor and the peer's adversary measure the same leak.

Every attack that both can run, no batch left out. The leak monitor's default reference is a clean
gradient, which the adversary has not: here it is the one sent.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from splitveil.common.privacy.attacks import ATTACKS, BUILT_IN_NAMES, SideInformation
from tests.support.recorders import Recorded, record

MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"
OF_ONE_PARTY = {SideInformation.ACTIVATIONS, SideInformation.PREDICTIONS}
ATTACKS_OF_BOTH = [
    name
    for name in BUILT_IN_NAMES
    if name not in ("accumulated_informed", "completion_400")  # too few rows for the latter
    and (name not in ATTACKS or ATTACKS[name].needs.isdisjoint(OF_ONE_PARTY))
]
AUDITED = f"{{max_cpu_share: null, attacks: [{', '.join(ATTACKS_OF_BOTH)}]"
LABELS = "{source: {kind: csv, path: active.csv}, id_column: id, label_column: label}"
SECTIONS = ("leak", "leak_worst_epoch", "leak_run_level", "leak_batches")
TOLERANCE = 1e-12


Figures = tuple[dict[tuple[str, int, int | None], dict[str, float]], dict[str, float]]
"""Of one party at the cut layer: lines by kind, epoch and step; the summary by dotted names."""


def figures_of(party: Recorded) -> Figures:
    """Return a party's metrics and summary, without what only one of them has."""
    lines = {}
    for line in (*party.of_kind("leak"), *party.of_kind("epoch_leak")):
        place = line.pop("kind"), line.pop("epoch"), line.pop("step")
        assert place not in lines
        del line["time_s"]
        lines[place] = {name: x for name, x in line.items() if not name.startswith("first/")}
    named = dict(leaves("", {section: party.summary[section] for section in SECTIONS}))
    # Only the passive party compares completion with its features.
    ours = {n: x for n, x in named.items() if ".first." not in n and ".over_features." not in n}
    return lines, ours


def leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings that were measured, by their dotted names."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(f"{name}.{key}", part)
    elif value is not None:
        yield name, value


def run_both(folder: Path, *active: str) -> tuple[Figures, Figures]:
    audited = f"adversary={AUDITED}, labels: {LABELS}}}"
    long = "contract.epochs=3"
    first, second = record(folder, [long, *active], [long, audited])
    return figures_of(first), figures_of(second)


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    assert first.keys() == second.keys()
    return max(abs(first[name] - second[name]) for name in first)


@pytest.mark.parametrize("defense", ["defense={name: none}", MARVELL])
def test_both_parties_find_the_same_on_the_same_bytes(tmp_path: Path, defense: str) -> None:
    monitor = f"leak_monitor={AUDITED}, reference: sent}}"
    (lines, active), (others, passive) = run_both(tmp_path, monitor, defense)
    assert lines.keys() == others.keys()
    kinds = [kind for kind, _, _ in lines]
    assert kinds.count("leak") > 6
    assert kinds.count("epoch_leak") == 3
    num_batch_attacks = sum(name in ATTACKS for name in ATTACKS_OF_BOTH)
    for place, line in lines.items():
        assert difference(line, others[place]) <= TOLERANCE, place
    num_sums = sum(name.startswith("accumulated_") for name in ATTACKS_OF_BOTH)
    lengths = {"leak": num_batch_attacks + 1, "epoch_leak": num_batch_attacks + num_sums}
    for kind, enough in lengths.items():
        assert max(len(line) for (k, _, _), line in lines.items() if k == kind) == enough
    assert difference(active, passive) <= TOLERANCE
    assert active[".leak_batches.left_out"] == 0
    for attack in ATTACKS_OF_BOTH:
        figures = (
            [f".leak.cut.{attack}.q95", f".leak_worst_epoch.cut.{attack}"]
            if attack in ATTACKS
            else [f".leak_run_level.cut.{attack}.{end}" for end in ("auc", "low", "high")]
        )
        assert all(math.isfinite(active[name]) for name in figures)


def test_the_default_reference_tells_the_monitor_something_else(tmp_path: Path) -> None:
    """So the figures above are not equal whatever is compared; those of other attacks are."""
    (_, active), (_, passive) = run_both(tmp_path, f"leak_monitor={AUDITED}}}", MARVELL)
    others = [name for name in active if not re.search(r"\.(accumulated_)?cosine\b", name)]
    assert len(others) > len(active) / 2
    assert all(abs(active[n] - passive[n]) <= TOLERANCE for n in others)
    name = ".leak.cut.cosine.mean"
    assert abs(active[name] - passive[name]) > 1e-3
