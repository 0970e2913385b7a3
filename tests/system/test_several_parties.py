"""Four processes of one run: one active party and three passive ones, of which some are killed."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

from tests.several import NAMES, write_several
from tests.system.forked import Forked
from tests.waiting import HANGS_AFTER_S

OVERRIDES = ("contract.epochs=12", "contract.checkpoints.every_steps=3")


class Process:
    """One party's process, started with the same command whenever it was killed."""

    def __init__(self, folder: Path, name: str, address: str, *overrides: str) -> None:
        where = f"{'listen' if name == 'active' else 'connect'}={address}"
        self._program = f"splitveil.{'active' if name == 'active' else 'passive'}_party"
        self._words = ["run", str(folder / f"{name}.yaml"), "--runs", str(folder / "runs")]
        self._words += [
            word for text in (where, *OVERRIDES, *overrides) for word in ("--set", text)
        ]
        self._log = folder / f"{name}.log"
        self.results = folder / "runs" / "small" / name
        self.start()

    def start(self) -> None:
        self._process = Forked(self._program, self._words, self._log, has_fast_clock=True)

    def kill(self) -> None:
        self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def hurry(self) -> None:
        """Let its clock go a minute a second from now on."""
        self.signal(signal.SIGUSR1)

    def wait(self) -> int:
        return self._process.wait(HANGS_AFTER_S)

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def lines(self) -> int:
        path = self.results / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0


@contextmanager
def all_parties(
    folder: Path, *overrides: str, active: Sequence[str] = ()
) -> Iterator[dict[str, Process]]:
    write_several(folder, 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    own = {"active": active}
    processes = {
        name: Process(folder, name, address, *overrides, *own.get(name, ()))
        for name in ("active", *NAMES)
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()


def wait_until(condition: Callable[[], bool], processes: dict[str, Process]) -> None:
    until = time.monotonic() + HANGS_AFTER_S
    while not condition():
        outputs = "\n".join(f"--- {name}\n{one.output}" for name, one in processes.items())
        assert time.monotonic() < until, outputs
        assert any(process.is_running for process in processes.values()), outputs
        time.sleep(0.02)


def ended_well(processes: dict[str, Process]) -> dict[str, dict[str, bytes]]:
    """Wait for the end of all and return their weights, byte by byte."""
    codes = {name: process.wait() for name, process in processes.items()}
    assert set(codes.values()) == {0}, "\n".join(one.output for one in processes.values())
    found = {}
    for name, process in processes.items():
        weights = load_file(process.results / "checkpoint" / "model.safetensors")
        found[name] = {key: value.numpy().tobytes() for key, value in weights.items()}
    return found


def test_parties_that_are_killed_and_restarted_do_not_change_a_bit(tmp_path: Path) -> None:
    with all_parties(tmp_path / "whole") as processes:
        undisturbed = ended_well(processes)
    with all_parties(tmp_path / "killed") as processes:
        for victim in ("ash", "active", "cedar"):
            before = processes["active"].lines
            wait_until(lambda: processes["active"].lines > before + 12, processes)  # noqa: B023
            processes[victim].kill()
            processes[victim].start()
        assert ended_well(processes) == undisturbed
    summary = json.loads(
        (tmp_path / "killed" / "runs" / "small" / "active" / "summary.json").read_text()
    )
    assert summary["epochs"] == 12


def test_a_party_that_stays_away_ends_the_run_by_name(tmp_path: Path) -> None:
    with all_parties(tmp_path, "contract.epochs=2000") as processes:
        wait_until(lambda: processes["active"].lines > 20, processes)
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
        "run_budget={leak_auc: 0.7, covers: knows class means only}",
    )
    with all_parties(tmp_path, patience, active=budget) as processes:
        for code in (5, 0):
            codes = {name: process.wait() for name, process in processes.items()}
            outputs = "\n".join(one.output for one in processes.values())
            assert codes == dict.fromkeys(processes, code), outputs
            if code:
                for process in processes.values():
                    process.start()
    metrics = (processes["active"].results / "metrics.jsonl").read_text().splitlines()
    last = max(line["epoch"] for line in map(json.loads, metrics) if line["kind"] == "train")
    assert last < 11
    for process in processes.values():
        assert (process.results / "ended.json").is_file()
