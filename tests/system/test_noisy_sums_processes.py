"""Noisy sums with the real commands over mutual TLS, each party killed in the exchange."""

import json
from functools import partial
from pathlib import Path

import pytest

from splitveil.active_party.defenses.dp_bounds import leak_auc_of_mu
from tests.support import runs
from tests.support.certificates import make, use
from tests.support.processes import Party
from tests.support.simulation import free_address


def write(folder: Path) -> None:
    runs.write_example(folder, rows=2000)
    released = {"exchange": "one_shot", "release": "noisy_sums", "cut_shape": [1]}
    contract = runs.CONTRACT | released
    passive = {**runs.PASSIVE, "bottom_model": {"kind": "score"}, "adversary": None}
    runs.write_yaml(folder, contract=contract, active=runs.ACTIVE, passive=passive)
    use(make(folder / "certificates"), folder)


def is_beyond(party: Party) -> bool:
    """Return whether a party has stored its part of the sums."""
    states = (party.folder / "checkpoint").glob("at-*.state")
    return party.is_done or any(path.name >= "at-0000000002" for path in states)


def test_killed_parties_end_with_two_reports_and_a_single_charge(tmp_path: Path) -> None:
    write(tmp_path)
    address = free_address()
    defense = "defense={name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2.8}}"
    with (
        Party("active", tmp_path, f"listen={address}", defense) as active,
        Party("passive", tmp_path, f"connect={address}") as passive,
    ):
        # Both have stored their parts of the sums; one is killed after the other.
        for killed in (passive, active):
            killed.wait_until(partial(is_beyond, killed), "its part of the sums")
            killed.kill()
            if not killed.is_done:
                killed.start()
        assert passive.wait() == 0, passive.output
        assert active.wait() == 0, active.output
    summary = json.loads((active.folder / "summary.json").read_text())
    (bound,) = [one for one in summary["bounds"] if one["adversary"] == "anybody"]
    assert bound["leak_auc"] == pytest.approx(leak_auc_of_mu(1 / 2.8))
    assert summary["test_auc"] > 0.8
    page = (active.folder / "report.html").read_text()
    assert "for anybody, computationally" in page
    assert (passive.folder / "report.html").exists()
