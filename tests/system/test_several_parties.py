"""Four processes of one run: one active party and three passive ones."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.processes import Party
from tests.support.several import NAMES, write_several
from tests.support.simulation import free_address


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
            party = Party(name, folder, *where, *overrides, fast_clock=True)
            processes[name] = stack.enter_context(party)
        yield processes


def test_a_party_that_stays_away_ends_the_run_by_name(tmp_path: Path) -> None:
    with all_parties(tmp_path, "contract.epochs=2000") as processes:
        processes["active"].wait_until_training()
        processes["birch"].kill()
        processes["active"].hurry()
        codes = {name: processes[name].wait() for name in ("active", "ash", "cedar")}
        assert set(codes.values()) == {4}, codes
        message = "nothing came from passive party 'birch' for 300 s"
        assert message in " ".join(processes["active"].output.split())


def test_a_budget_ends_the_run_of_all_parties_for_good(tmp_path: Path) -> None:
    """Each ends with 5, and with 0 when a supervisor has started it again."""
    patience = "reconnect={max_s: 30, first_wait_s: 0.1, longest_wait_s: 0.5}"
    budget = (
        "defense={name: marvell, strength: {power_ratio: 16}}",
        "run_budget={leak_auc: 0.7, adversary: knows class means only}",
    )
    with all_parties(tmp_path, "contract.epochs=12", patience, active=budget) as processes:
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
