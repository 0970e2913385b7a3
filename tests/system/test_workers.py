"""Parties of several processes: the course of one process each, and a process that is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file

from splitveil.common.party.workers import RANKS_FOLDER
from tests.support import certificates
from tests.support.forked import Forked
from tests.support.loopback import listening
from tests.support.processes import Party, PartyName
from tests.support.programs import ROOT
from tests.support.restarts import Settings, assert_same, outcome, run_once
from tests.support.runs import write_example
from tests.support.simulation import free_address
from tests.support.waiting import HANGS_AFTER_S, wait_until

SHORT = ("contract.epochs=2", "contract.batch_size=63", "contract.checkpoint_steps=2")
"""Batches of an odd number of rows, whose last one is shorter."""

LABELS = "{name: noisy_label, insecure_noise_seed: 7}"
"""Answers without noise of their own: that of other defenses follows from the bits of a question,
and sums in another order have other bits."""


def rendezvous() -> dict[str, str]:
    host, port = free_address().rsplit(":", 1)
    return {"MASTER_ADDR": host, "MASTER_PORT": port}


def sets_of(overrides: Sequence[str]) -> list[str]:
    return [word for text in overrides for word in ("--set", text)]


class Ranks:
    def __init__(
        self,
        party: PartyName,
        folder: Path,
        overrides: Sequence[str],
        size: int,
        of_ranks: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.logs = [folder / f"{party}.{rank}.log" for rank in range(size)]
        words = ["run", str(folder / f"{party}.yaml"), "--runs", str(folder / "runs")]
        shared = rendezvous() | {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        shared[RANKS_FOLDER] = tempfile.mkdtemp(dir=folder)
        self.processes = [
            Forked(
                f"splitveil.{party}_party",
                [*words, *sets_of([*overrides, *of_ranks.get(rank, ())])],
                log,
                variables={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, log in enumerate(self.logs)
        ]

    def wait(self) -> list[int]:
        return [process.wait(HANGS_AFTER_S) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    @property
    def output(self) -> str:
        return "\n".join(log.read_text(encoding="utf-8") for log in self.logs)


@contextmanager
def ranks(folder: Path, settings: Settings, active: int, passive: int) -> Iterator[list[Ranks]]:
    address, found = free_address(), []
    sizes: tuple[tuple[PartyName, int], ...] = (("active", active), ("passive", passive))
    try:
        for party, size in sizes:
            where = f"{'listen' if party == 'active' else 'connect'}={address}"
            found.append(Ranks(party, folder, (where, *settings.of(party)), size))
        yield found
    finally:
        for processes in found:
            processes.kill()


def assert_close(runs: Path, expected: Path) -> None:
    for party in ("active", "passive"):
        weights, others = (
            load_file(folder / "small" / party / "checkpoint/model.safetensors")
            for folder in (runs, expected)
        )
        torch.testing.assert_close(weights, others, atol=1e-4, rtol=1e-3)
    found, other = (
        json.loads((folder / "small/active/summary.json").read_text())
        for folder in (runs, expected)
    )
    for name in ("steps", "epochs"):
        assert found[name] == other[name]
    for name in ("test_auc", "test_loss"):
        assert found[name] == pytest.approx(other[name], abs=5e-3)
    assert found["train_loss"] == pytest.approx(other["train_loss"], abs=1e-4)
    assert found["ledger"] == pytest.approx(other["ledger"], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(("active", "passive"), [(2, 1), (1, 4), (2, 2)])
def test_several_processes_follow_the_course_of_one(
    active: int, passive: int, tmp_path: Path
) -> None:
    """With certificates, and gradients of an inner layer, which the adversary looks at."""
    write_example(tmp_path)
    settings = Settings(SHORT, active=(f"defense={LABELS}",))
    folder = certificates.make(tmp_path / "certificates")
    certificates.use(folder, tmp_path)
    run_once(tmp_path / "alone", settings, trusted=folder)
    with ranks(tmp_path, settings, active, passive) as both:
        codes = [code for processes in both for code in processes.wait()]
        assert not any(codes), "\n".join(one.output for one in both)
    assert_close(tmp_path / "runs", tmp_path / "alone" / "runs")
    lines = (tmp_path / "runs/small/passive/metrics.jsonl").read_text().splitlines()
    leaks = [line for line in map(json.loads, lines) if line["kind"] == "leak"]
    assert all("first/norm_leak_auc" in line for line in leaks)
    assert leaks


def test_torchrun_s_exit_code_is_that_of_rank_0(tmp_path: Path) -> None:
    """Which alone reads the data, and lets the other one end with 0."""
    write_example(tmp_path)
    party = Supervised("passive", tmp_path, ("data.id_column=missing",), restarts=0)
    assert party.wait() == 3, party.output


def test_a_rank_with_other_settings_is_named(tmp_path: Path) -> None:
    write_example(tmp_path)
    party = Ranks("passive", tmp_path, ("model_seed=1",), 2, {1: ("model_seed=2",)})
    assert party.wait() == [2, 2], party.output
    assert "model_seed: rank 1 differs from rank 0: give all ranks the same" in party.output


def stranger(address: str) -> socket.socket:
    """Connect to such an address, and say something."""
    port = int(address.rpartition(":")[2], 16)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(bytes(200))
    connection.setblocking(False)
    return connection


@pytest.mark.skipif(sys.platform != "linux", reason="looks sockets up in /proc")
def test_no_other_machine_reaches_the_processes_and_a_signal_to_all_is_a_goodbye(
    tmp_path: Path,
) -> None:
    """As torchrun sends it when a person stops it: the workers live, so nobody has to restart.

    Another process of this machine that connects reads nothing, and disturbs nothing.
    """
    write_example(tmp_path)
    settings = Settings(("contract.epochs=60",))
    with ranks(tmp_path, settings, active=1, passive=2) as both:
        active, passive = both
        metrics = tmp_path / "runs/small/active/metrics.jsonl"
        wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") > 30)
        addresses = [listening(process.pid) for process in passive.processes]
        strangers = [stranger(each) for own in addresses for each in own]
        lines = metrics.read_bytes().count(b"\n")
        wait_until(lambda: metrics.read_bytes().count(b"\n") > lines + 30)
        for connection in strangers:
            with connection, suppress(BlockingIOError):
                assert connection.recv(1) == b""
        for process in passive.processes:
            process.send_signal(signal.SIGTERM)
        codes = passive.wait(), active.wait()
    assert addresses[0]
    assert all(each.startswith("0100007F:") for own in addresses for each in own), addresses
    assert codes == ([128 + signal.SIGTERM, 0], [4]), f"{passive.output}\n{active.output}"
    assert "ending at once" not in passive.output
    assert (tmp_path / "runs/small/passive/checkpoint/model.safetensors").exists()
    with ranks(tmp_path, settings, active=2, passive=1) as both:
        codes = both[0].wait(), both[1].wait()
    assert codes == ([0, 0], [0]), "\n".join(one.output for one in both)
    assert "2 process(es) of this party have come this far and 1 go on" in both[1].output


class Supervised:
    """A party of two processes under our ``torchrun``, which starts them again."""

    def __init__(
        self, party: PartyName, folder: Path, overrides: Sequence[str], restarts: int = 2
    ) -> None:
        self._log = folder / f"{party}.torchrun.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "splitveil.common.party.torchrun"),
                    *("--nproc-per-node", "2", "--max-restarts", str(restarts)),
                    *("-m", f"splitveil.{party}_party", "run", str(folder / f"{party}.yaml")),
                    *("--runs", str(folder / "runs"), *sets_of(overrides)),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def kill_rank(self, rank: int) -> None:
        number = self._process.pid
        found = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        os.kill(int(found[rank]), signal.SIGKILL)

    def wait(self) -> int:
        return self._process.wait(HANGS_AFTER_S)

    def end(self) -> None:
        """End torchrun, which ends its processes; also after its end."""
        self._process.terminate()
        self._process.wait(HANGS_AFTER_S)


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_killed_ranks_end_in_a_resumed_run_with_the_same_course(tmp_path: Path) -> None:
    """A worker, then rank 0; each rank goes on with its own masks of dropout."""
    lasting = ("contract.epochs=40", "contract.batch_size=63", "contract.checkpoint_steps=7")
    noisy = "defense={name: marvell, insecure_noise_seed: 7}"
    settings = Settings(lasting, active=(noisy, "top_model.dropout=0.1"))
    for name in ("whole", "killed"):
        write_example(tmp_path / name)
    with ranks(tmp_path / "whole", settings, active=2, passive=1) as both:
        assert sum(sum(one.wait()) for one in both) == 0, "\n".join(one.output for one in both)
    folder, address = tmp_path / "killed", free_address()
    metrics = folder / "runs/small/active/metrics.jsonl"
    with ExitStack() as stack:
        supervised = Supervised("active", folder, (f"listen={address}", *settings.of("active")))
        stack.callback(supervised.end)
        alone = Party("passive", folder, f"connect={address}", *settings.of("passive"))
        stack.callback(alone.kill)
        for rank, lines in ((1, 30), (0, 60)):
            wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") > lines)  # noqa: B023
            supervised.kill_rank(rank)
            wait_until(lambda: supervised.output.count("resuming the unfinished run") == 2 - rank)  # noqa: B023
        codes = supervised.wait(), alone.wait()
        said = f"{supervised.output}\n{alone.output}"
        assert codes == (0, 0), said
    assert_same(outcome(folder / "runs"), outcome(tmp_path / "whole/runs"), said)
