"""Four processes of one run: one active party and three passive ones, of which some are killed."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors.torch import load_file

from tests.support.processes import Party
from tests.support.several import NAMES, write_several
from tests.support.simulation import free_address

OVERRIDES = ("contract.epochs=12", "contract.checkpoints.every_steps=3")


@contextmanager
def all_parties(
    folder: Path, *overrides: str, active: Sequence[str] = ()
) -> Iterator[dict[str, Party]]:
    write_several(folder, 3)
    address = free_address()
    own = {"active": (f"listen={address}", *active)}
    with ExitStack() as stack:
        processes = {}
        for name in ("active", *NAMES):
            where = own.get(name, (f"connect={address}",))
            party = Party(name, folder, *where, *OVERRIDES, *overrides, fast_clock=True)
            stack.callback(party.kill)
            processes[name] = party
        yield processes


def ended_well(processes: dict[str, Party]) -> dict[str, dict[str, bytes]]:
    """Wait for the end of all and return their weights, byte by byte."""
    codes = {name: process.wait() for name, process in processes.items()}
    assert set(codes.values()) == {0}, "\n".join(one.output for one in processes.values())
    found = {}
    for name, process in processes.items():
        weights = load_file(process.folder / "checkpoint" / "model.safetensors")
        found[name] = {key: value.numpy().tobytes() for key, value in weights.items()}
    return found


def test_parties_that_are_killed_and_restarted_do_not_change_a_bit(tmp_path: Path) -> None:
    with all_parties(tmp_path / "whole") as processes:
        undisturbed = ended_well(processes)
    with all_parties(tmp_path / "killed") as processes:
        for victim in ("ash", "active", "cedar"):
            before = processes["active"].lines
            processes["active"].wait_until(
                lambda: processes["active"].lines > before + 12,  # noqa: B023
                "more steps",
            )
            processes[victim].kill()
            processes[victim].start()
        assert ended_well(processes) == undisturbed
    summary = json.loads(
        (tmp_path / "killed" / "runs" / "small" / "active" / "summary.json").read_text()
    )
    assert summary["epochs"] == 12


def test_a_party_that_stays_away_ends_the_run_by_name(tmp_path: Path) -> None:
    with all_parties(tmp_path, "contract.epochs=2000") as processes:
        processes["active"].wait_until_training()
        processes["birch"].kill()
        processes["active"].hurry()
        codes = {name: processes[name].wait() for name in ("active", "ash", "cedar")}
        assert set(codes.values()) == {4}, codes
        told = "nothing came from passive party 'birch' for 300 s"
        assert told in " ".join(processes["active"].output.split())


def test_a_budget_ends_the_run_of_all_parties_for_good(tmp_path: Path) -> None:
    """Each ends with 5, and with 0 when a supervisor has started it again."""
    patience = "reconnect={max_s: 30, first_wait_s: 0.1, longest_wait_s: 0.5}"
    budget = (
        "defense={name: marvell, strength: {power_ratio: 16}}",
        "run_budget={leak_auc: 0.7, adversary: knows class means only}",
    )
    with all_parties(tmp_path, patience, active=budget) as processes:
        for code in (5, 0):
            codes = {name: process.wait() for name, process in processes.items()}
            outputs = "\n".join(one.output for one in processes.values())
            assert codes == dict.fromkeys(processes, code), outputs
            if code:
                for process in processes.values():
                    process.start()
    metrics = (processes["active"].folder / "metrics.jsonl").read_text().splitlines()
    last = max(line["epoch"] for line in map(json.loads, metrics) if line["kind"] == "train")
    assert last < 11
    for process in processes.values():
        assert (process.folder / "ended.json").is_file()
