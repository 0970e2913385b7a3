"""Alignment with a peer that breaks the rules, falls silent or goes away."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import pytest

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.channel import QueueChannel, StreamChannel, channel_pair
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.exchange import _transfer, align
from splitveil.common.alignment.ristretto import Ristretto, WorkerPool
from splitveil.common.errors import (
    AlignmentError,
    InvalidMessage,
    OutOfStep,
    PeerUnreachable,
    SplitveilError,
    StorageError,
    TooLarge,
)
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import (
    ENGINE,
    LONG_S,
    NONCES,
    Passing,
    align_both,
    commitment_frame,
    committed,
    common_ids,
    done_frame,
    greeted,
    names,
    peer_hello,
    points,
    points_frame,
    started,
    tags_frame,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


NOT_CANONICAL = bytes.fromhex("ed" + "ff" * 30 + "7f")
IDENTITY = bytes(32)


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        pytest.param(points_frame(0, points(17)), TooLarge, id="more points than a chunk"),
        pytest.param(points_frame(0, points(15)), InvalidMessage, id="fewer points"),
        pytest.param(points_frame(0, b""), InvalidMessage, id="no points"),
        pytest.param(points_frame(0, points(16)[:-1]), InvalidMessage, id="half a point"),
        pytest.param(points_frame(0, points(15) + IDENTITY), InvalidMessage, id="identity"),
        pytest.param(points_frame(0, NOT_CANONICAL + points(15)), InvalidMessage, id="no point"),
        pytest.param(points_frame(1, points(16)), OutOfStep, id="wrong chunk of points"),
        pytest.param(tags_frame(0, bytes(256)), OutOfStep, id="tags for nothing"),
        pytest.param(done_frame(), OutOfStep, id="done too early"),
        pytest.param(pb.AlignFrame(hello=peer_hello()), OutOfStep, id="second hello"),
        pytest.param(pb.AlignFrame(), InvalidMessage, id="empty frame"),
    ],
)
def test_a_bad_frame_after_the_hello_is_rejected(
    frame: pb.AlignFrame, error: type[SplitveilError]
) -> None:
    session = greeted(names(range(20)))
    with pytest.raises(error):
        session.receive(frame)
    assert session.done_ids == 0
    assert not list(session.receive(points_frame(0, points(16))))
    assert session.done_ids == 16


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        pytest.param(tags_frame(0, bytes(2 * 16)), TooLarge, id="too many tags"),
        pytest.param(tags_frame(0, bytes(15)), InvalidMessage, id="too few tags"),
        pytest.param(tags_frame(1, bytes(16)), OutOfStep, id="wrong part of the tags"),
    ],
)
def test_bad_tags_are_rejected(frame: pb.AlignFrame, error: type[SplitveilError]) -> None:
    session = committed(40, bytes(40 * 16), points(40))
    with pytest.raises(error):
        session.receive(frame)
    assert len(list(session.receive(tags_frame(0, bytes(16))))) == 1


def test_no_tag_is_shown_or_taken_before_both_have_committed_to_theirs() -> None:
    session = greeted(names(range(16)), peer_set_size=16)
    sent = [*session.own_frames(), *session.receive(points_frame(0, points(16)))]
    assert [frame.WhichOneof("body") for frame in sent] == ["points", "commitment"]
    with pytest.raises(OutOfStep, match="committed"):
        session.receive(tags_frame(0, bytes(16)))
    shown = session.receive(commitment_frame(points(16), bytes(256)))
    assert [frame.WhichOneof("body") for frame in shown] == ["tags"]
    with pytest.raises(OutOfStep, match="second"):
        session.receive(commitment_frame(points(16), bytes(256)))


def test_a_commitment_before_all_points_or_of_another_length_is_rejected() -> None:
    session = greeted(names(range(16)), peer_set_size=17)
    session.receive(points_frame(0, points(16)))
    frame = commitment_frame(points(17), bytes(256))
    with pytest.raises(OutOfStep, match="before all points"):
        session.receive(frame)
    session.receive(points_frame(1, points(1, first=16)))
    with pytest.raises(InvalidMessage, match="32 bytes"):
        session.receive(pb.AlignFrame(commitment=pb.AlignCommitment(digest=b"short")))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 200), (200, 1), (64, 64), (65, 130)])
def test_tags_are_shown_in_turns_so_that_nobody_is_ahead_by_more_than_a_part(
    sizes: tuple[int, int],
) -> None:
    own, num_peer = sizes
    tags = bytes(own * 16)
    session = greeted(names(range(own)), peer_set_size=num_peer)
    list(session.own_frames())
    for chunk, first in enumerate(range(0, num_peer, 16)):
        count = min(16, num_peer - first)
        session.receive(points_frame(chunk, points(count, first=first)))
    session.receive(commitment_frame(points(num_peer), tags))
    part = min(16, -(-own // 64))
    for number, first in enumerate(range(0, own, part)):
        lead = session.answered_ids / num_peer - first / own
        assert 0 < lead <= min(16, -(-num_peer // 64)) / num_peer + 1e-9
        if first + part < own:  # the last part ends in a check of the commitment
            session.receive(tags_frame(number, bytes(16 * min(part, own - first))))


def test_points_beyond_the_announced_set_are_rejected() -> None:
    session = greeted(names(range(16)), peer_set_size=18)
    session.receive(points_frame(0, points(16)))
    with pytest.raises(TooLarge):
        session.receive(points_frame(1, points(3)))
    session.receive(points_frame(1, points(2, first=16)))
    with pytest.raises(TooLarge, match="announced"):
        session.receive(points_frame(2, points(1)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"set_size": 0}, InvalidMessage),
        ({"set_size": 10_001}, TooLarge),
        ({"nonce": b"short"}, InvalidMessage),
        ({"run_id": "another"}, OutOfStep),
    ],
)
def test_a_bad_hello_is_rejected(
    changes: dict[str, int | bytes | str], error: type[SplitveilError]
) -> None:
    hello = peer_hello()
    for name, value in changes.items():
        setattr(hello, name, value)
    with pytest.raises(error):
        started(names(range(3))).receive(pb.AlignFrame(hello=hello))


@pytest.mark.parametrize(
    "frame", [points_frame(0, points(16)), tags_frame(0, bytes(256)), done_frame()]
)
def test_nothing_is_answered_or_sent_before_the_hello(frame: pb.AlignFrame) -> None:
    session = started(names(range(16)))
    with pytest.raises(OutOfStep):
        session.receive(frame)
    with pytest.raises(OutOfStep, match="hello"):
        next(session.own_frames())


def complete(own: list[str], peer: list[str]) -> tuple[EcdhExchange, pb.AlignFrame]:
    """Bring two sessions to the point where each has its done frame to send; returns the peer's."""
    sessions = started(own), ENGINE.start(peer, nonce=NONCES[1], run_id="run")
    sessions[0].receive(sessions[1].hello())
    sessions[1].receive(sessions[0].hello())
    under_way = [(1, frame) for frame in sessions[0].own_frames()]
    under_way += [(0, frame) for frame in sessions[1].own_frames()]
    done: dict[int, pb.AlignFrame] = {}
    while under_way:
        receiver, frame = under_way.pop(0)
        for reply in sessions[receiver].receive(frame):
            if reply.HasField("done"):
                done[1 - receiver] = reply
            else:
                under_way.append((1 - receiver, reply))
    return sessions[0], done[0]


@pytest.mark.parametrize("field", ["count", "digest"])
def test_a_tampered_done_is_an_alignment_error(field: str) -> None:
    session, done = complete(names(range(20)), names(range(10, 30)))
    if field == "count":
        done.done.count += 1
    else:
        done.done.digest = bytes(32)
    session.receive(done)
    with pytest.raises(AlignmentError, match="disagree"):
        session.result()


def test_a_done_with_a_short_digest_or_twice_is_rejected() -> None:
    session, done = complete(names(range(20)), names(range(10, 30)))
    with pytest.raises(InvalidMessage, match="digest"):
        session.receive(done_frame(10, b"short"))
    session.receive(done)
    with pytest.raises(OutOfStep):
        session.receive(done)


def test_there_is_no_result_before_the_peers_done() -> None:
    session, _ = complete(names(range(20)), names(range(10, 30)))
    with pytest.raises(OutOfStep, match="not complete"):
        session.result()


# ---- a peer that lies about what is common ----


def lie(channel: QueueChannel, kind: str, num_ids: int) -> None:
    """Play the peer that has no id in common, and would have the other believe in all of them.

    With "tags" it sends the tags back that it gets; "copied" also copies the commitment to them;
    "points" sends everything back, points included.
    """
    channel.receive()
    channel.send(pb.AlignFrame(hello=peer_hello(num_ids)))
    own = points(num_ids, first=10_000)
    if kind != "points":
        for chunk, first in enumerate(range(0, len(own), 512)):
            channel.send(points_frame(chunk, own[first : first + 512]))
    if kind == "tags":
        channel.send(commitment_frame(own, bytes(num_ids * 16)))
    with suppress(PeerUnreachable):
        while True:
            frame = channel.receive()
            body = frame.WhichOneof("body")
            is_copied = {"points": kind == "points", "commitment": kind != "tags"}
            if is_copied.get(str(body), True):
                channel.send(frame)


@pytest.mark.parametrize("kind", ["tags", "copied", "points"])
def test_no_peer_makes_500_ids_common_where_none_are(kind: str) -> None:
    """With version 1 of the protocol, which had no commitments, ``tags`` succeeded."""
    here, there = channel_pair(deadline_s=LONG_S)
    ids = [f"somebody else {number}" for number in range(500)]
    with ThreadPoolExecutor(1) as executor:
        liar = executor.submit(lie, there, kind, len(ids))
        with pytest.raises(InvalidMessage, match=r"committed to|own points back"):
            align(ENGINE, ids, here, nonce=NONCES[0], run_id="run")
        liar.result(LONG_S)


def test_a_failure_of_the_sending_side_is_raised_at_once_and_as_it_is() -> None:
    class Failing(Ristretto):
        def mask(self, digests: bytes, scalar: bytes) -> bytes:
            raise StorageError("no more")

    group = WorkerPool(2, Failing(ristretto.load().name))
    failing = EcdhEngine(min_aligned=1, max_set_size=10_000, group=group)
    outcomes = align_both((names(range(50)), names(range(50))), (failing, ENGINE))
    assert type(outcomes[0].error) is StorageError
    assert type(outcomes[1].error) is PeerUnreachable
    assert "silent" not in str(outcomes[1].error)


def test_a_sender_that_cannot_send_wakes_the_receiver() -> None:
    class Mute(Passing):
        def send(self, frame: pb.AlignFrame) -> None:
            if not frame.HasField("hello"):
                raise PeerUnreachable("mute")
            super().send(frame)

    here, there = channel_pair(deadline_s=LONG_S)
    there.send(pb.AlignFrame(hello=peer_hello()))
    with pytest.raises(PeerUnreachable, match="mute"):
        align(ENGINE, names(range(50)), Mute(here), nonce=NONCES[0], run_id="run")


# ---- channels ----


def stream_pair(deadline_s: float, queue_frames: int) -> tuple[StreamChannel, StreamChannel]:
    """Two ends of one stream, as a client and a server see it: each reads the other's frames."""
    ends: list[StreamChannel] = []
    ready = threading.Event()

    def frames_of_server() -> Iterator[pb.AlignFrame]:
        assert ready.wait(LONG_S)
        yield from ends[1].outgoing

    client = StreamChannel(
        lambda _outgoing: frames_of_server(), deadline_s=deadline_s, queue_frames=queue_frames
    )
    server = StreamChannel(
        lambda _outgoing: client.outgoing, deadline_s=deadline_s, queue_frames=queue_frames
    )
    ends += [client, server]
    ready.set()
    return client, server


@pytest.mark.parametrize("pair", [channel_pair, stream_pair])
def test_the_smallest_buffers_do_not_deadlock(pair: Callable[..., Any]) -> None:
    ids = names(range(200)), names(range(100, 350))
    first, second = align_both(ids, channels=pair(deadline_s=LONG_S, queue_frames=1))
    assert common_ids(ids[0], first) == common_ids(ids[1], second)
    assert len(first.alignment.rows) == 100


def test_a_silent_peer_is_unreachable_after_the_deadline() -> None:
    here, _there = channel_pair(deadline_s=0.05)
    with pytest.raises(PeerUnreachable, match=r"silent for 0\.05 s"):
        align(ENGINE, names(range(3)), here, nonce=b"", run_id="")


def test_a_peer_that_takes_nothing_more_is_unreachable_after_the_deadline() -> None:
    here, there = channel_pair(deadline_s=0.3, queue_frames=1)
    there.send(pb.AlignFrame(hello=peer_hello()))
    with pytest.raises(PeerUnreachable, match="silent"):
        align(ENGINE, names(range(100)), here, nonce=NONCES[0], run_id="run")


def test_a_stream_that_ends_early_or_breaks_is_unreachable() -> None:
    def broken() -> Iterator[pb.AlignFrame]:
        yield pb.AlignFrame(hello=peer_hello())
        raise ConnectionResetError

    for incoming in (iter(()), iter([pb.AlignFrame(hello=peer_hello())]), broken()):
        channel = StreamChannel(lambda _outgoing, frames=incoming: frames, deadline_s=LONG_S)  # type: ignore[misc]
        with pytest.raises(PeerUnreachable, match=r"closed|broke off"):
            align(ENGINE, names(range(20)), channel, nonce=NONCES[0], run_id="run")
        # Both ends of the stream end: what iterates over the frames to send is not left waiting.
        assert next(channel.outgoing).HasField("hello")
        assert all(frame.HasField("points") for frame in channel.outgoing)


def test_an_error_of_the_stream_can_be_translated() -> None:
    def refused() -> Iterator[pb.AlignFrame]:
        raise ConnectionRefusedError
        yield

    channel = StreamChannel(
        lambda _outgoing: refused(),
        deadline_s=LONG_S,
        translate=lambda _: AlignmentError("refused"),
    )
    with pytest.raises(AlignmentError, match="refused"):
        channel.receive()


def test_closing_lets_sent_frames_through_and_ends_the_stream() -> None:
    channel = StreamChannel(lambda _outgoing: iter(()), deadline_s=LONG_S)
    channel.send(done_frame(1))
    channel.send(done_frame(2))
    channel.close()
    assert [frame.done.count for frame in channel.outgoing] == [1, 2]
    with pytest.raises(PeerUnreachable):
        channel.send(done_frame(3))


def test_a_peer_s_fault_is_the_reason_though_the_files_of_the_exchange_are_gone() -> None:
    """Where the thread that sends finds them deleted before the other one has raised."""
    failed = threading.Event()

    class Forgotten:
        is_bucket_complete = False

        def own_frames(self) -> Iterator[pb.AlignFrame]:
            raise StorageError("the tags are gone")

        def receive(self, _frame: pb.AlignFrame) -> list[pb.AlignFrame]:
            raise InvalidMessage("two ids have the same tag")

    class Line:
        def receive(self) -> pb.AlignFrame:
            failed.wait()
            return pb.AlignFrame()

        def close(self) -> None:
            failed.set()

    with pytest.raises(InvalidMessage, match="same tag"):
        _transfer(cast("Any", Forgotten()), cast("Any", Line()), lambda *_: None)


# ---- ids as bad as they come ----


LONG = 64 * 1024


def test_ids_of_one_byte_of_64_kib_and_in_any_unicode_align_exactly() -> None:
    short = [chr(code) for code in (*range(33, 127), 0xEB, 0x202E, 0x6F22, 0x10300, 0x10FFFD)]
    long = [character * (LONG - 1) + last for character in "ab" for last in "xyz"]
    mine, theirs = [*short[:60], *long[:4]], [*long[2:], *reversed(short[30:])]
    outcomes = align_both((mine, theirs))
    found = [common_ids(ids, one) for ids, one in zip((mine, theirs), outcomes, strict=True)]
    assert found[0] == found[1]
    assert sorted(found[0]) == sorted({*short[30:60], *long[2:4]})


def test_what_a_peer_sends_after_the_end_is_not_waited_for() -> None:
    class GoesOn(Passing):
        def send(self, frame: pb.AlignFrame) -> None:
            super().send(frame)
            if frame.WhichOneof("body") == "done":
                for _ in range(3):
                    super().send(frame)

    here, there = channel_pair(deadline_s=LONG_S)
    ids = names(range(20))
    honest, _ = align_both((ids, ids), channels=(here, GoesOn(there)))
    assert sorted(common_ids(ids, honest)) == sorted(ids)
