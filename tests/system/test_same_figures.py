"""On the same bytes, the label owner's leak monitor and the peer's adversary measure the same leak.

Two real processes, every attack that both can run, no batch left out. The leak monitor's default
reference is a clean gradient, which the adversary has not: here it is the one sent.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from splitveil.common.privacy.attacks import ATTACKS, AttackName, SideInformation
from tests.support.processes import started
from tests.support.runs import write_example

MARVELL = "defense={name: marvell, insecure_noise_seed: 7}"
OF_ONE_PARTY = {SideInformation.ACTIVATIONS, SideInformation.PREDICTIONS}
ATTACKS_OF_BOTH = [
    name
    for name in get_args(AttackName)
    if name not in ("accumulated_informed", "completion_400")  # too few rows for the latter
    and (name not in ATTACKS or ATTACKS[name].needs.isdisjoint(OF_ONE_PARTY))
]
AUDITED = f"{{queue_batches: 1024, max_cpu_share: null, attacks: [{', '.join(ATTACKS_OF_BOTH)}]"
LABELS = "{source: {kind: csv, path: active.csv}, id_column: id, label_column: label}"
SECTIONS = ("leak", "leak_worst_epoch", "leak_run_level", "leak_batches")
TOLERANCE = 1e-12


class Figures(NamedTuple):
    """The figures of one party at the cut layer."""

    lines: Mapping[tuple[str, int, int | None], Mapping[str, Any]]
    """Kind, epoch, step -> the numbers of a line."""

    summary: Mapping[str, float]
    """Dotted name -> figure."""


def figures_of(results: Path) -> Figures:
    """Read a party's metrics and summary, without what only one of them has."""
    lines = {}
    for text in (results / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] in ("leak", "epoch_leak"):
            place = line.pop("kind"), line.pop("epoch"), line.pop("step")
            assert place not in lines
            del line["time_s"]
            lines[place] = {name: x for name, x in line.items() if not name.startswith("first/")}
    summary = json.loads((results / "summary.json").read_text())
    named = dict(leaves("", {section: summary[section] for section in SECTIONS}))
    # Only the passive party compares completion with its features.
    both_have = {
        n: x for n, x in named.items() if ".first." not in n and ".over_features." not in n
    }
    return Figures(lines, both_have)


def leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested mappings that were measured, by their dotted names."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(f"{name}.{key}", part)
    elif value is not None:
        yield name, value


def run_both(folder: Path, *active: str) -> tuple[Figures, Figures]:
    """Run both parties and return what each found, the active party's first."""
    write_example(folder)
    options = ("insecure_nonce_seed=1", *active), (f"adversary={AUDITED}, labels: {LABELS}}}",)
    with started(folder, "contract.epochs=3", active=options[0], passive=options[1]) as pair:
        assert pair.wait() == (0, 0), pair.outputs
        first, second = (figures_of(party.results()) for party in pair)
    return first, second


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return the largest difference of figures of the same names."""
    assert first.keys() == second.keys()
    return max(abs(first[name] - second[name]) for name in first)


@pytest.mark.parametrize("defense", ["defense={name: none}", MARVELL])
def test_both_parties_find_the_same_on_the_same_bytes(tmp_path: Path, defense: str) -> None:
    monitor = f"leak_monitor={AUDITED}, reference: sent}}"
    active, passive = run_both(tmp_path, monitor, defense)
    assert active.lines.keys() == passive.lines.keys()
    kinds = [kind for kind, _, _ in active.lines]
    assert kinds.count("leak") > 6
    assert kinds.count("epoch_leak") == 3
    num_batch_attacks = sum(name in ATTACKS for name in ATTACKS_OF_BOTH)
    for place, line in active.lines.items():
        assert difference(line, passive.lines[place]) <= TOLERANCE, place
    num_sums = sum(name.startswith("accumulated_") for name in ATTACKS_OF_BOTH)
    lengths = {"leak": num_batch_attacks + 1, "epoch_leak": num_batch_attacks + num_sums}
    for kind, enough in lengths.items():
        assert max(len(line) for (k, _, _), line in active.lines.items() if k == kind) == enough
    assert difference(active.summary, passive.summary) <= TOLERANCE
    assert active.summary[".leak_batches.left_out"] == 0
    for attack in ATTACKS_OF_BOTH:
        figures = (
            [f".leak.cut.{attack}.q95", f".leak_worst_epoch.cut.{attack}"]
            if attack in ATTACKS
            else [f".leak_run_level.cut.{attack}.{end}" for end in ("auc", "low", "high")]
        )
        assert all(math.isfinite(active.summary[name]) for name in figures)


def test_the_default_reference_tells_the_monitor_something_else(tmp_path: Path) -> None:
    """So the figures above are not equal whatever is compared; those of other attacks are."""
    active, passive = run_both(tmp_path, f"leak_monitor={AUDITED}}}", MARVELL)
    others = [name for name in active.summary if not re.search(r"\.(accumulated_)?cosine\b", name)]
    assert len(others) > len(active.summary) / 2
    assert all(abs(active.summary[n] - passive.summary[n]) <= TOLERANCE for n in others)
    name = ".leak.cut.cosine.mean"
    assert abs(active.summary[name] - passive.summary[name]) > 1e-3
