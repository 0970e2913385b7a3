"""Runs that end with the alignment, of one to eight passive parties in one process."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from splitveil.active_party.run.lifecycle import OwnRows, Stage, Unobserved
from splitveil.active_party.run.session import ActiveSession
from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.ristretto import GroupOperations, load
from splitveil.common.errors import ContractMismatch, OutOfStep
from splitveil.common.run.contract import AlignmentContract, Contract
from splitveil.common.run.messages import Activation, BatchId, LeaveReason
from splitveil.common.run.sample_order import CommonOrder
from splitveil.library.in_process import InProcessPeer
from splitveil.passive_party.commands.align import AlignmentObserver, AlignmentRun
from splitveil.passive_party.opening import Aligner, Participant
from tests.support.exchanging import Broken
from tests.support.peers import Lost
from tests.support.runs import finish
from tests.support.waiting import HANGS_AFTER_S, wait_until

SEEDS = itertools.count(1)
NAMES = ("ash", "birch", "cedar", "dill", "elm", "fir", "gum", "hop")


def contract_of(parties: int) -> AlignmentContract:
    settings = {
        "run_name": "orders",
        "passive_parties": NAMES[:parties],
        "cut_shape": [1],
        "batch_size": 1,
        "epochs": 1,
        "alignment": {"min_aligned": 1},
    }
    return AlignmentContract.of(Contract.model_validate(settings))


def engine(group: GroupOperations | None = None) -> EcdhEngine:
    return EcdhEngine(min_aligned=1, max_set_size=10_000, group=group)


def nonces(seed: int) -> Callable[[], bytes]:
    draw = random.Random(seed)
    return lambda: draw.randbytes(32)


@dataclass
class Meeting:
    active_ids: Sequence[str]
    passive_ids: dict[str, Sequence[str]]
    errors: dict[str, BaseException] = field(default_factory=dict)
    runs: dict[str, AlignmentRun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contract = contract_of(len(self.passive_ids))
        own = OwnRows(self.active_ids)
        self.session = ActiveSession(self.contract, own, None, Unobserved(), nonces(next(SEEDS)))
        self.engine = engine()

    def run_of(self, name: str) -> AlignmentRun:
        participant = Participant(self.contract, name, self.passive_ids[name])
        aligner = Aligner(participant, engine(), nonces(next(SEEDS)))
        observer = AlignmentObserver(lambda _: None, lambda done, total: None)
        return AlignmentRun(aligner, observer)

    def start(self, name: str, peer: Callable[..., InProcessPeer]) -> threading.Thread:
        run = self.runs[name] = self.run_of(name)
        several = len(self.passive_ids) > 1

        def go() -> None:
            try:
                run.run(peer(self.session, self.engine, name if several else None, HANGS_AFTER_S))
            except BaseException as error:
                self.errors[name] = error

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        return thread

    def meet(self, peers: dict[str, Callable[..., InProcessPeer]] | None = None) -> None:
        made = peers or {}
        threads = [self.start(name, made.get(name, InProcessPeer)) for name in self.passive_ids]
        finish(threads)

    def orders(self) -> dict[str, list[str]]:
        found = {"active": ordered(self.active_ids, self.session.common_order())}
        for name, run in self.runs.items():
            found[name] = ordered(self.passive_ids[name], run.common_order())
        return found

    def fingerprints(self) -> set[tuple[str, str]]:
        all_orders = [self.session.common_order(), *(r.common_order() for r in self.runs.values())]
        return {(one.run_id, one.fingerprint) for one in all_orders}


def ordered(ids: Sequence[str], order: CommonOrder) -> list[str]:
    return [ids[row] for row in order.file_rows]


def some_ids(parties: int, seed: int = 1) -> Meeting:
    """Each party lacks other ids of a hundred, and lists its own in another order."""
    draw = random.Random(seed)
    everybody = [f"person-{number}" for number in range(100)]

    def of_one() -> list[str]:
        return draw.sample(everybody, 95)

    return Meeting(of_one(), {name: of_one() for name in NAMES[:parties]})


def common_to(meeting: Meeting) -> set[str]:
    found = set(meeting.active_ids)
    for ids in meeting.passive_ids.values():
        found &= set(ids)
    return found


def assert_agreed(meeting: Meeting) -> None:
    assert not meeting.errors
    assert len({tuple(order) for order in meeting.orders().values()}) == 1
    assert set(meeting.orders()["active"]) == common_to(meeting)
    assert len(meeting.fingerprints()) == 1


@pytest.mark.parametrize("parties", [1, 2, 8])
def test_one_to_eight_parties_get_exactly_the_ids_of_all_in_one_order(parties: int) -> None:
    meeting = some_ids(parties)
    meeting.meet()
    assert_agreed(meeting)
    assert len(meeting.orders()) == parties + 1
    assert len(meeting.orders()["active"]) == len(common_to(meeting))
    assert meeting.session.stage is Stage.FINISHED
    assert meeting.session.wait_for_farewell(0)


class Together:
    """The group's operations, the first of which needs two alignments at the same time."""

    def __init__(self) -> None:
        self._group = load()
        self._both = threading.Barrier(2, timeout=HANGS_AFTER_S)
        self._known: set[bytes] = set()
        self._lock = threading.Lock()

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        with self._lock:
            is_first = scalar not in self._known
            self._known.add(scalar)
        if is_first:
            self._both.wait()
        return self._group.mask(digests, scalar)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        return self._group.multiply(points, scalar)


def test_two_parties_are_aligned_at_a_time() -> None:
    meeting = some_ids(2)
    meeting.engine = engine(Together())
    meeting.meet()
    assert_agreed(meeting)


class BreaksOff(InProcessPeer):
    breaks = 2

    def open_alignment(self) -> AlignChannel:
        channel = super().open_alignment()
        if not self.breaks:
            return channel
        self.breaks -= 1
        return Broken(channel, 2)


@pytest.mark.parametrize("parties", [1, 3])
def test_a_line_that_breaks_in_mid_alignment_leads_to_the_same_ids_for_all(parties: int) -> None:
    meeting = some_ids(parties)
    meeting.meet({NAMES[parties - 1]: BreaksOff})
    assert_agreed(meeting)


class DiesAligned(InProcessPeer):
    """A process that is killed as soon as the active party has its rows."""

    def close_alignment(self) -> None:
        super().close_alignment()
        raise Lost

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """Say nothing: the process is gone."""


@pytest.mark.parametrize("parties", [1, 3])
def test_a_party_that_was_killed_after_its_alignment_comes_back_and_all_agree(parties: int) -> None:
    meeting = some_ids(parties)
    last = NAMES[parties - 1]
    others = [meeting.start(name, InProcessPeer) for name in NAMES[: parties - 1]]
    finish([meeting.start(last, DiesAligned)])
    assert isinstance(meeting.errors.pop(last), Lost)
    finish([*others, meeting.start(last, InProcessPeer)])
    assert_agreed(meeting)


class LeavesLate(InProcessPeer):
    """A party whose first goodbye comes when another one has already begun to align again."""

    may_leave: threading.Event
    ready: threading.Event

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        self.ready.set()
        assert self.may_leave.wait(HANGS_AFTER_S)
        super().leave(run_id, reason)


def test_a_goodbye_to_a_run_that_another_party_has_replaced_leads_to_that_run() -> None:
    meeting = some_ids(2)
    may_leave, ready = threading.Event(), threading.Event()
    late = type("Late", (LeavesLate,), {"may_leave": may_leave, "ready": ready})
    first = meeting.start("ash", late)
    finish([meeting.start("birch", DiesAligned)])
    assert isinstance(meeting.errors.pop("birch"), Lost)
    assert ready.wait(HANGS_AFTER_S)
    before = meeting.session.run_id
    second = meeting.start("birch", InProcessPeer)
    wait_until(lambda: meeting.session.run_id != before)
    may_leave.set()
    finish([first, second])
    assert_agreed(meeting)


def test_nothing_is_trained_after_the_alignment() -> None:
    meeting = some_ids(1)
    with pytest.raises(OutOfStep, match="not known yet"):
        meeting.session.common_order()
    meeting.meet()
    batch = BatchId(meeting.session.run_id, 0, 0, "train", b"")
    with pytest.raises(OutOfStep):
        meeting.session.exchange(Activation(batch, torch.zeros(1, 1)))


@pytest.mark.parametrize("trains", ["active", "passive"])
def test_training_and_mere_alignment_are_no_common_purpose(trains: str) -> None:
    aligns = contract_of(1)
    training = Contract.model_validate(aligns.model_dump(exclude={"purpose"}))
    own, other = (training, aligns) if trains == "active" else (aligns, training)
    assert own.fields_differing_from(other.canonical_json()) == ["purpose"]
    assert training.digest() != aligns.digest()
    if own is aligns:
        session = ActiveSession(own, OwnRows(["a"]), None, Unobserved(), nonces(0))
        with pytest.raises(ContractMismatch, match="purpose"):
            session.handshake("ash", other.canonical_json(), bytes(32))
