"""Parties that are killed, stopped, and restarted with the same command, and their results.

The run that they are compared with takes place in this process, without a fault.
"""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save

from splitveil.active_party.assembly import build_session
from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder as TopBuilder
from splitveil.active_party.watch.recorder import ActiveRecorder
from splitveil.common.alignment import build_engine
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.record.run_record import write_summary
from splitveil.common.storage.model_files import save_model
from splitveil.common.storage.run_store import RunStore
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.assembly import TrainerBuilder as BottomBuilder
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from splitveil.simulation import free_address
from tests import certificates
from tests.runs import CPU
from tests.system.processes import Party, PartyName
from tests.waiting import HANGS_AFTER_S


class Settings(NamedTuple):
    """Overrides of one run's settings."""

    both: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    passive: tuple[str, ...] = ()

    def of(self, party: PartyName) -> tuple[str, ...]:
        own = self.active if party == "active" else self.passive
        return (*self.both, *own)


# ---- what a run leaves ----


class Outcome(NamedTuple):
    """All that must not depend on faults."""

    weights: dict[str, bytes]
    metrics: dict[str, list[str]]
    summary: dict[str, Any]


def outcome(runs: Path) -> Outcome:
    """Read what both parties have written."""
    folders = {party: runs / "small" / party for party in ("active", "passive")}
    summary = json.loads((folders["active"] / "summary.json").read_text())
    return Outcome(
        # Without the metadata, which only a process writes.
        {p: save(load_file(at / "checkpoint/model.safetensors")) for p, at in folders.items()},
        {party: metrics_of(at) for party, at in folders.items()},
        {name: summary[name] for name in ("steps", "epochs", "test_auc", "test_loss", "ledger")},
    )


def metrics_of(folder: Path) -> list[str]:
    """Return the lines of a party's metrics without their times, in an order of their own.

    The attacks write theirs when they are ready, beside the training; an alignment that did not
    come to its end on both sides is noted again when it does.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] != "alignment"]
    plain = [{k: v for k, v in line.items() if k != "time_s"} for line in lines]
    return sorted(json.dumps(line, sort_keys=True) for line in plain)


def assert_same(found: Outcome, expected: Outcome, told: str = "") -> None:
    """Compare two runs bit for bit."""
    for party in ("active", "passive"):
        one, other = Counter(found.metrics[party]), Counter(expected.metrics[party])
        assert one == other, f"{told}\n{party}: {one - other} instead of {other - one}"
        assert found.weights[party] == expected.weights[party], f"{told}\n{party}'s weights"
    assert found.summary == expected.summary, told


# ---- processes ----


class Restarted:
    """One party as a supervisor keeps it: whenever it was killed, started with the same command."""

    def __init__(
        self, party: PartyName, folder: Path, address: str, settings: Settings, log: str
    ) -> None:
        self.party: PartyName = party
        self._log = log
        self.starts = 0
        self._folder = folder
        where = f"{'listen' if party == 'active' else 'connect'}={address}"
        self._overrides = (where, *settings.of(party))
        self._process: Party
        self._outputs: list[str] = []

    def start(self, *overrides: str, options: Sequence[str] = (), fast_clock: bool = False) -> None:
        """Start it, once its process before has ended; ``hurry`` needs a fast clock."""
        if self.starts:
            self._outputs.append(self._process.output)
        self.starts += 1
        self._process = Party(
            self.party,
            self._folder,
            *self._overrides,
            *overrides,
            options=options,
            log=self._log,
            fast_clock=fast_clock,
        )

    def kill(self) -> None:
        """End it as a power failure would; also after its end."""
        self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.signal(number)

    def limit_files(self, max_bytes: int) -> None:
        """Let every write beyond this size of a file fail from now on, as on a full disk."""
        self._process.limit_files(max_bytes)

    def hurry(self) -> None:
        """Let its clock go a minute a second from now on."""
        self._process.hurry()

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(HANGS_AFTER_S)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative after a kill; None while it runs."""
        return self._process.exit_code

    @property
    def folder(self) -> Path:
        """The folder of its results."""
        return self._process.results()

    @property
    def is_done(self) -> bool:
        """Whether its results are complete: to start it again would begin another run."""
        if self.exit_code == 0:
            return True
        written = (self.folder / "summary.json").is_file()
        return written and not (self.folder / "checkpoint" / "run.state").exists()

    @property
    def lines(self) -> int:
        """The number of lines in its metrics."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    @property
    def is_saving(self) -> bool:
        """Whether it is writing a checkpoint at this moment."""
        return any((self.folder / "checkpoint").glob(".at-*.tmp"))

    @property
    def said(self) -> str:
        """Its output since its last start."""
        return self._process.output

    @property
    def output(self) -> str:
        """Its complete output."""
        return "\n-- started again\n".join([*self._outputs, self.said])


class Both(NamedTuple):
    """Both parties."""

    active: Restarted
    passive: Restarted

    def start(self, *overrides: str, options: Sequence[str] = (), fast_clock: bool = False) -> None:
        """Start both; ``hurry`` needs a fast clock."""
        for party in self:
            party.start(*overrides, options=options, fast_clock=fast_clock)

    def wait(self) -> tuple[int, int]:
        """Wait for both ends and return the exit codes, the active party's first."""
        return self.active.wait(), self.passive.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something, at most until one of the two ends of itself."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while not condition():
            if any(party.exit_code is not None for party in self):
                return
            assert time.monotonic() < deadline, f"hangs\n{self.outputs}"
            time.sleep(0.002)

    @property
    def outputs(self) -> str:
        """The output of both parties, for the message of a failed test."""
        return "\n".join(f"--- {party.party}\n{party.output}" for party in self)


@contextmanager
def kept_up(folder: Path, settings: Settings, log: str = "run") -> Iterator[Both]:
    """Yield both parties at a free port, not started; one that still runs in the end is killed.

    Args:
        folder: as ``write_example`` leaves it.
        settings: overrides.
        log: what names the files of their output.
    """
    address = free_address()
    both = Both(
        Restarted("active", folder, address, settings, log),
        Restarted("passive", folder, address, settings, log),
    )
    try:
        yield both
    finally:
        for party in both:
            if party.starts:
                party.kill()


# ---- both parties in this process ----


class Wire(NamedTuple):
    """The connection of the two parties of one run."""

    between: Callable[[str], AbstractContextManager[Any]] | None = None
    """Puts something before the active party's address; what it gives has an ``address``."""

    certificates: Path | None = None

    def credentials(self, party: str) -> CredentialFiles | None:
        return None if self.certificates is None else certificates.files(self.certificates, party)


DIRECT = Wire()


def run_here(example: Path, runs: Path, settings: Settings, wire: Wire = DIRECT) -> Outcome:
    """Let both parties, recorders and checkpoints and all, meet over a wire in this process."""
    folders = [runs / "small" / party for party in ("active", "passive")]
    for folder in folders:
        (folder / "checkpoint").mkdir(parents=True)
    failures: list[BaseException] = []
    with _active(example, runs, settings, wire) as (session, recorder, address):
        run = partial(_passive, example, runs, settings, wire, address)
        passive = threading.Thread(target=lambda: _noted(failures, run), daemon=True)
        passive.start()
        passive.join(HANGS_AFTER_S)
        assert not passive.is_alive(), f"hangs: the active party is {session.stage.value}"
        if failures:
            raise failures[0]
        assert session.wait_for_farewell(HANGS_AFTER_S)
        if session.error is not None:
            raise session.error
        assert session.trainer is not None
        save_model(folders[0], session.trainer.model, None)
    write_summary(folders[0], recorder.summary({}))
    return outcome(runs)


def _noted(failures: list[BaseException], action: Callable[[], None]) -> None:
    try:
        action()
    except BaseException as error:
        failures.append(error)


@contextmanager
def _active(
    example: Path, runs: Path, settings: Settings, wire: Wire
) -> Iterator[tuple[ActiveSession, ActiveRecorder, str]]:
    """Serve the active party; give the address at which the passive one finds it, too."""
    own = load_party_settings(
        ActiveSettings, example / "active.yaml", [*settings.of("active"), f"runs_dir={runs}"]
    )
    data = PartyData.load(own.data, own.base_dir)
    folder, address = runs / "small" / "active", free_address()
    engine = build_engine(own.contract.alignment)
    with ExitStack() as stack:
        recorder = stack.enter_context(ActiveRecorder(own, folder))
        build, nonces = TopBuilder(own, data, CPU), partial(draw_nonce, own)
        store = RunStore(folder, own.contract.checkpoints.keep)
        session = build_session(own, data, build, recorder, nonces, store)
        service = ActiveService(session, engine, own.reconnect.deadline_s)
        server = start_server(service, own.contract, address, wire.credentials("active"))
        stack.callback(lambda: server.stop(0).wait())
        if wire.between is not None:
            address = stack.enter_context(wire.between(address)).address
        yield session, recorder, address


def _passive(example: Path, runs: Path, settings: Settings, wire: Wire, address: str) -> None:
    own = load_party_settings(PassiveSettings, example / "passive.yaml", settings.of("passive"))
    data = PartyData.load(own.data, own.base_dir)
    assert own.adversary is not None
    assert own.adversary.labels is not None
    labels = PartyData.load(own.adversary.labels, own.base_dir)
    folder = runs / "small" / "passive"
    with PassiveRecorder(own, folder, data.ids, labels) as recorder:
        engine = build_engine(own.contract.alignment)
        run = PassiveRun(
            Aligner(
                Participant(own.contract, own.party, data.ids), engine, partial(draw_nonce, own)
            ),
            BottomBuilder(own, data, CPU),
            recorder,
            RunStore(folder, own.contract.checkpoints.keep),
        )
        credentials = wire.credentials("passive")
        with GrpcPeer(
            PeerConnection(address, own.contract, credentials=credentials), own.reconnect
        ) as peer:
            run.run(peer)
    assert run.trainer is not None
    save_model(folder, run.trainer.model, None)
