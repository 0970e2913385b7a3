"""The engine rr22: its tunnel, its worker's process, and what is refused.

A script stands in for SecretFlow's spu, whose wheel needs another Python: it does the same task
over the same loopback ports, in the clear. The tests with spu itself run where
``SPLITVEIL_RR22_PYTHON`` names an interpreter that has it.
"""

import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from splitveil.common.alignment import AlignmentResources, align, build_engine, channel_pair
from splitveil.common.alignment.rr22 import Rr22Engine, check_interpreter
from splitveil.common.alignment.rr22 import exchange as rr22_exchange
from splitveil.common.alignment.rr22.exchange import tags_of
from splitveil.common.alignment.rr22.process import Worker, lines_of, tags_in
from splitveil.common.alignment.rr22.tunnel import Tunnel
from splitveil.common.alignment.sorted_tags import Tags
from splitveil.common.errors import (
    AlignmentError,
    InvalidMessage,
    OutOfStep,
    PeerUnreachable,
    SettingsError,
    SplitveilError,
    TooLarge,
)
from splitveil.common.run.contract import Contract, Rr22Alignment
from splitveil.common.settings import validate
from splitveil.common.wire.limits import MOST_LINKS
from splitveil.protos import split_learning_pb2 as pb
from tests.aligned import ENGINE, LONG_S, NONCES, align_both, names
from tests.runs import CONTRACT
from tests.waiting import HANGS_AFTER_S, wait_until

STAND_IN = Path(__file__).with_name("rr22_stand_in.py")
TRACES = Path("/tmp")  # noqa: S108 - spu writes there wherever temporary files belong
SPU = os.environ.get("SPLITVEIL_RR22_PYTHON")
NEEDS_SPU = pytest.mark.skipif(SPU is None, reason="SPLITVEIL_RR22_PYTHON names no interpreter")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let workers have their folders here, to see what they leave behind."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(rr22_exchange, "_BEAT_S", 0.05)
    return folder


Build = Callable[..., Rr22Engine]


@pytest.fixture
def engine(tmp_path: Path, scratch: Path) -> Build:
    """Build an engine whose worker is the stand-in, with some behaviour."""

    def build(behaviour: str = "works", min_aligned: int = 1) -> Rr22Engine:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        script = folder / "worker.py"
        shutil.copy(STAND_IN, script)
        (folder / "behaviour").write_text(behaviour)

        def start(rank: int, ports: Sequence[int], tags: Tags) -> Worker:
            return Worker(Path(sys.executable), rank, ports, tags, script)

        return Rr22Engine(
            python=Path(sys.executable),
            min_aligned=min_aligned,
            max_set_size=10_000,
            start_worker=start,
        )

    assert list(scratch.iterdir()) == []
    return build


def shuffled(numbers: Sequence[int], seed: int) -> list[str]:
    found = names(numbers)
    random.Random(seed).shuffle(found)
    return found


# ---- the outcome ----


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (range(1), range(1)),
        (range(700), range(300, 900)),
        (range(5000), range(4990, 5005)),
    ],
)
def test_both_parties_get_the_common_ids_in_one_order(
    own: range, other: range, engine: Build, scratch: Path
) -> None:
    ids = shuffled(own, 1), shuffled(other, 2)
    outcomes = align_both(ids, (engine(), engine()))
    found = [
        [party[row] for row in outcome.alignment.rows]
        for party, outcome in zip(ids, outcomes, strict=True)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == set(ids[0]) & set(ids[1])
    assert [outcome.alignment.peer_set_size for outcome in outcomes] == [len(other), len(own)]
    assert list(scratch.iterdir()) == []


def test_the_order_is_another_one_in_every_exchange(engine: Build) -> None:
    ids = shuffled(range(50), 1), shuffled(range(50), 2)
    orders = []
    for run in ("one", "two"):
        (outcome, _) = align_both(ids, (engine(), engine()), run_ids=(run, run))
        orders.append([ids[0][row] for row in outcome.alignment.rows])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_hashes_of_an_id_differ_between_exchanges_and_have_one_length() -> None:
    ids = names(range(100))
    found = [tags_of(ids, run, NONCES) for run in ("one", "two")]
    assert len(set(found[0].tolist()) | set(found[1].tolist())) == 200
    assert found[0].dtype == found[1].dtype == np.dtype("S16")


def test_too_few_common_ids_are_refused_at_both_parties(engine: Build, scratch: Path) -> None:
    ids = names(range(20)), names(range(15, 30))
    outcomes = align_both(ids, (engine(min_aligned=6), engine(min_aligned=6)))
    assert all("too few ids" in str(outcome.error) for outcome in outcomes)
    assert list(scratch.iterdir()) == []


def test_no_common_id_at_all_is_an_outcome_like_any_other(engine: Build) -> None:
    outcomes = align_both((names(range(5)), names(range(5, 9))), (engine(), engine()))
    assert all("too few ids" in str(outcome.error) for outcome in outcomes)


# ---- workers that fail ----


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("fails", "exit code 1: RuntimeError: no such protocol"),
        ("invents", "other ids than this party's"),
        ("repeats", "other ids than this party's"),
        ("writes nothing", "without a result"),
        ("writes no column", "no column of ids"),
    ],
)
def test_a_worker_that_fails_ends_the_exchange_at_both_parties(
    behaviour: str, said: str, engine: Build, scratch: Path
) -> None:
    ids = names(range(20)), names(range(10, 30))
    outcomes = align_both(ids, (engine(behaviour), engine()))
    assert said in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, PeerUnreachable)
    assert list(scratch.iterdir()) == []


def test_a_worker_that_misses_an_id_is_found_out_by_both_parties(engine: Build) -> None:
    ids = names(range(20)), names(range(10, 30))
    outcomes = align_both(ids, (engine("misses"), engine()))
    assert all("disagree on the intersection" in str(outcome.error) for outcome in outcomes)


def test_a_worker_that_never_ends_is_ended(
    engine: Build, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone afterwards, and so is its folder."""
    monkeypatch.setattr(rr22_exchange, "_LEAST_TIME_S", 2.0)
    ids = names(range(20)), names(range(10, 30))
    outcomes = align_both(ids, (engine("is silent"), engine("is silent")))
    assert any("took too long" in str(outcome.error) for outcome in outcomes)
    pid = int((scratch / "stand-in.pid").read_text())
    assert not is_running(pid)
    assert [path.name for path in scratch.iterdir()] == ["stand-in.pid"]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_ends_when_its_party_does(tmp_path: Path) -> None:
    """The real script: it ends with its standard input, before it has imported anything."""
    script = Path(rr22_exchange.__file__).with_name("worker.py")
    held, given = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", str(script)],
        {"TMPDIR": str(tmp_path)},
        file_actions=[(os.POSIX_SPAWN_DUP2, held, 0), (os.POSIX_SPAWN_CLOSE, given)],
    )
    os.close(held)
    os.close(given)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) != 0


@pytest.mark.parametrize("ends", [b"", b"\x00", b"\x00" * 16, b"\xff" * 15 + b"\x00"])
def test_tags_come_back_from_their_lines_as_they_were(ends: bytes) -> None:
    tags = np.frombuffer(random.Random(3).randbytes(16 * 999) + ends.rjust(16, b"x"), "S16")
    lines = lines_of(tags)
    assert tags_in(lines).tobytes() == tags.tobytes()
    assert tags_in(b"").tobytes() == lines_of(tags[:0]) == b""
    assert [len(line) for line in lines.splitlines()] == [22] * 1000
    assert not set(lines) & set(b'", ')


@pytest.mark.parametrize(
    "lines",
    [
        b"A" * 22,
        b"A" * 22 + b" ",
        b"A" * 21 + b"B\n",
        b"A" * 21 + b"+\n",
        b"A" * 21 + b"\xff\n",
        b"A" * 45 + b"\n",
        b"A" * 22 + b"\n" * 2,
    ],
)
def test_other_lines_are_no_tags(lines: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        tags_in(lines)


# ---- peers that break the rules ----


@pytest.fixture
def tunnel() -> Iterator[Tunnel]:
    with socket.create_server(("127.0.0.1", 0)) as worker:
        made = Tunnel(worker.getsockname()[1], most_bytes=1000)
        yield made
        made.close()


def test_more_bytes_than_the_sets_can_need_are_refused(tunnel: Tunnel) -> None:
    tunnel.receive(pb.AlignTunnel(link=0, of_dialler=True, data=b"x" * 1000))
    with pytest.raises(TooLarge, match="tunnels more"):
        tunnel.receive(pb.AlignTunnel(link=0, of_dialler=True, data=b"x"))


def test_connections_are_numbered_in_order_and_few(tunnel: Tunnel) -> None:
    with pytest.raises(OutOfStep, match="a connection that there is not"):
        tunnel.receive(pb.AlignTunnel(link=1, of_dialler=True, data=b"x"))
    with pytest.raises(OutOfStep, match="a connection that there is not"):
        tunnel.receive(pb.AlignTunnel(link=0, of_dialler=False, data=b"x"))
    for link in range(MOST_LINKS):
        tunnel.receive(pb.AlignTunnel(link=link, of_dialler=True, data=b"x"))
    with pytest.raises(TooLarge, match="tunnelled connections"):
        tunnel.receive(pb.AlignTunnel(link=MOST_LINKS, of_dialler=True, data=b"x"))


def test_a_sign_of_life_opens_nothing(tunnel: Tunnel) -> None:
    tunnel.receive(pb.AlignTunnel(link=7))
    assert tunnel.next(0.01) == pb.AlignTunnel()


def started(engine: Build, ids: Sequence[str]) -> rr22_exchange.Rr22Exchange:
    return engine().start(ids, nonce=NONCES[0], run_id="run")


def test_frames_before_the_hello_or_of_another_engine_are_refused(
    engine: Build, scratch: Path
) -> None:
    exchange = started(engine, names(range(5)))
    for frame in (pb.AlignFrame(tunnel=pb.AlignTunnel()), pb.AlignFrame(done=pb.AlignDone())):
        with pytest.raises(OutOfStep, match="hello before anything else"):
            exchange.receive(frame)
    peer = engine().start(names(range(5)), nonce=NONCES[1], run_id="run")
    exchange.receive(peer.hello())
    try:
        with pytest.raises(OutOfStep, match="second alignment hello"):
            exchange.receive(peer.hello())
        with pytest.raises(InvalidMessage, match="of another engine"):
            exchange.receive(pb.AlignFrame(points=pb.MaskedPoints()))
        with pytest.raises(InvalidMessage, match="digest of 32 bytes"):
            exchange.receive(pb.AlignFrame(done=pb.AlignDone(digest=b"short")))
    finally:
        exchange.close()
    assert list(scratch.iterdir()) == []


def test_a_hello_that_comes_back_is_refused(engine: Build) -> None:
    """Two workers of the same rank would wait for each other."""
    exchange = started(engine, names(range(5)))
    with pytest.raises(InvalidMessage, match="own nonce"):
        exchange.receive(started(engine, names(range(5))).hello())


def test_a_peer_is_charged_for_all_its_ids_from_the_first_byte(engine: Build) -> None:
    exchange = started(engine, names(range(5)))
    exchange.receive(engine().start(names(range(9)), nonce=NONCES[1], run_id="run").hello())
    try:
        assert exchange.answered_ids == 0
        frames = exchange.own_frames()
        until = time.monotonic() + HANGS_AFTER_S
        while not next(frames).tunnel.data:
            assert time.monotonic() < until
        assert exchange.answered_ids == 9
    finally:
        exchange.close()


def test_a_peer_with_the_other_engine_is_refused_by_both(engine: Build, scratch: Path) -> None:
    outcomes = align_both((names(range(5)), names(range(5))), (engine(), ENGINE))
    assert [type(outcome.error) for outcome in outcomes] == [AlignmentError] * 2
    assert all("differently: engine" in str(outcome.error) for outcome in outcomes)
    assert list(scratch.iterdir()) == []


def test_a_peer_that_leaves_ends_the_worker(engine: Build, scratch: Path) -> None:
    own, other = channel_pair(deadline_s=LONG_S)
    peer = engine().start(names(range(5)), nonce=NONCES[1], run_id="run")
    other.send(peer.hello())

    def leave() -> None:
        wait_until(lambda: any(scratch.iterdir()))
        other.close()

    with ThreadPoolExecutor(2) as executor:
        run = executor.submit(
            align, engine("is silent"), names(range(5)), own, nonce=NONCES[0], run_id="run"
        )
        executor.submit(leave).result()
        assert isinstance(run.exception(), PeerUnreachable)
    assert [path.name for path in scratch.iterdir() if path.is_dir()] == []


# ---- settings ----


def test_the_contract_names_the_engine_and_the_default_is_ecdh() -> None:
    section = {"engine": "rr22", "min_aligned": 5}
    contract = validate(Contract, CONTRACT | {"alignment": section}, "contract.yaml")
    assert isinstance(contract.alignment, Rr22Alignment)
    assert validate(Contract, CONTRACT, "contract.yaml").alignment.engine == "ecdh"
    with pytest.raises(SettingsError, match="expected engine ecdh or rr22"):
        validate(Contract, CONTRACT | {"alignment": {"engine": "kkrt"}}, "contract.yaml")


def test_without_an_interpreter_the_engine_is_refused_with_what_to_do(tmp_path: Path) -> None:
    settings = Rr22Alignment(engine="rr22")
    with pytest.raises(SettingsError, match=r"alignment_rr22_python: .*pip install --no-deps"):
        build_engine(settings, AlignmentResources())
    with pytest.raises(SettingsError, match="cannot be run"):
        check_interpreter(tmp_path / "none")


def test_an_interpreter_without_spu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"has no usable spu .*not installed"):
        check_interpreter(Path(sys.executable))


# ---- with spu itself ----


@NEEDS_SPU
@pytest.mark.parametrize("sizes", [(1, 1), (3000, 40), (20_000, 20_000)])
def test_spu_finds_exactly_the_common_ids(sizes: tuple[int, int], scratch: Path) -> None:
    python = Path(str(SPU))
    assert check_interpreter(python)
    traces = set(TRACES.glob("psi_*.trace"))
    engine = Rr22Engine(python=python, min_aligned=1, max_set_size=100_000)
    own, other = sizes
    start = max(own - other // 2 - 1, 0)
    ids = shuffled(range(own), 1), shuffled(range(start, start + other), 2)
    outcomes = align_both(ids, (engine, engine))
    found = [
        [party[row] for row in outcome.alignment.rows]
        for party, outcome in zip(ids, outcomes, strict=True)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == set(ids[0]) & set(ids[1])
    assert list(scratch.iterdir()) == []
    assert set(TRACES.glob("psi_*.trace")) <= traces


def test_the_worker_takes_what_it_is_given(scratch: Path) -> None:
    """The task and the ids reach the script; its exit code and last words come back."""
    script = scratch.parent / "fails.py"
    script.write_text(
        "import sys, json\n"
        "task = json.loads(sys.stdin.readline())\n"
        "print('Error:', task['rank'], task['ports'], open(task['ids']).read().split())\n"
        "sys.exit(4)\n"
    )
    tags = np.frombuffer(bytes(range(16)) + bytes(range(240, 256)), "S16")
    worker = Worker(Path(sys.executable), 1, [5, 6], tags, script)
    lines = "'AAECAwQFBgcICQoLDA0ODw', '8PHy8_T19vf4-fr7_P3-_w'"
    try:
        with pytest.raises(SplitveilError, match=rf"code 4: Error: 1 \[5, 6\] \['id', {lines}\]"):
            worker.common()
    finally:
        worker.close()
    assert list(scratch.iterdir()) == []
