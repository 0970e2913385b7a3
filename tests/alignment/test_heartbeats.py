"""Signs of life within an exchange of ids."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from splitveil.common.alignment.channel import (
    AlignChannel,
    Heartbeats,
    QueueChannel,
    channel_pair,
    wait_frame,
)
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.exchange import align
from splitveil.common.errors import PeerUnreachable, TooLarge
from splitveil.common.run.sample_order import Splits
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    ENGINE,
    LONG_S,
    NONCES,
    Outcome,
    Passing,
    align_both,
    common_ids,
    done_frame,
    names,
)

OFTEN_S = 0.001
OWN, PEER = names(range(100)), names(range(60, 190))


@pytest.fixture
def ends() -> Iterator[tuple[QueueChannel, QueueChannel]]:
    pair = channel_pair(deadline_s=LONG_S)
    yield pair
    for end in pair:
        end.close()


def test_signs_of_life_end_before_what_follows_the_exchange(
    ends: tuple[QueueChannel, QueueChannel],
) -> None:
    with Heartbeats(ends[0], OFTEN_S) as line:
        ends[1].receive()
    assert not line._thread.is_alive()


def test_an_error_ends_them_also_if_the_peer_takes_nothing() -> None:
    end, _ = channel_pair(deadline_s=LONG_S, queue_frames=1)
    end.send(done_frame())  # the queue is full
    with pytest.raises(ZeroDivisionError), Heartbeats(end, OFTEN_S):
        raise ZeroDivisionError


class Slow(EcdhEngine):
    has_waited = threading.Event()

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> EcdhExchange:
        assert self.has_waited.wait(LONG_S)
        return super().start(ids, nonce=nonce, run_id=run_id, splits=splits)


@pytest.mark.usefixtures("small_chunks")
def test_a_party_that_is_busy_for_longer_than_the_peer_waits_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slow one goes on only after the other would have given it up several times."""
    monkeypatch.setattr(Heartbeats.__init__, "__defaults__", (OFTEN_S, 10**6))
    slow, heard = Slow(min_aligned=1, max_set_size=1000), 0
    ends = channel_pair(deadline_s=LONG_S)

    class Patient:
        send, close = ends[1].send, ends[1].close

        def receive(self) -> pb.AlignFrame:
            nonlocal heard
            frame = ends[1].receive()
            heard += frame.WhichOneof("body") == "wait"
            if heard == 10:
                slow.has_waited.set()
            return frame

    outcomes = align_both((OWN, PEER), (slow, ENGINE), (ends[0], Patient()))
    assert heard >= 10
    assert set(common_ids(OWN, outcomes[0])) == set(OWN) & set(PEER)
    assert common_ids(OWN, outcomes[0]) == common_ids(PEER, outcomes[1])


@pytest.mark.usefixtures("small_chunks")
def test_parties_that_are_both_busy_before_their_hello_do_not_fill_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each goes on only after the other has sent more signs of life than the line holds."""
    monkeypatch.setattr(Heartbeats.__init__, "__defaults__", (OFTEN_S, 10**6))
    ends = channel_pair(deadline_s=LONG_S)
    slow = [Slow(min_aligned=1, max_set_size=1000) for _ in ends]

    class Noting(Passing):
        sent = 0

        def send(self, frame: pb.AlignFrame) -> None:
            super().send(frame)
            self.sent += 1
            if all(line.sent > 20 for line in lines):
                for one in slow:
                    one.has_waited.set()

    for one in slow:
        one.has_waited = threading.Event()
    lines = [Noting(end) for end in ends]
    outcomes = align_both((OWN, PEER), (slow[0], slow[1]), (lines[0], lines[1]))
    assert common_ids(OWN, outcomes[0]) == common_ids(PEER, outcomes[1])


def test_a_peer_that_only_lives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeats.__init__, "__defaults__", (LONG_S, 20))
    ends = channel_pair(deadline_s=LONG_S)

    def live(channel: AlignChannel) -> None:
        try:
            channel.receive()
            while True:
                channel.send(wait_frame())
        except PeerUnreachable:
            return

    thread = threading.Thread(target=live, args=(ends[1],))
    thread.start()
    outcome = Outcome(lambda: align(ENGINE, OWN, ends[0], nonce=NONCES[0], run_id="run"))
    thread.join()
    assert isinstance(outcome.error, TooLarge)
