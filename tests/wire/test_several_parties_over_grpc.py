"""Several passive parties over gRPC: each on its own streams, and only under its own name."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.alignment.channel import channel_pair
from splitveil.common.alignment.exchange import Share, receive_share, share_frames
from splitveil.common.errors import (
    InvalidMessage,
    OutOfStep,
    PeerError,
    PeerUntrusted,
    ProtocolError,
)
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.record.transcript import Crossing, Transcript
from splitveil.common.run.messages import Activation, LeaveReason
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.limits import ALIGN_FRAME_BYTES, PARTY_KEY, check_fields
from splitveil.deploy.authority import make_certificates
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.certificates import files
from tests.support.equality import assert_same_weights
from tests.support.loopback import serving
from tests.support.mutations import AtStep, Mutator, Tape, WireSender, send_mutants
from tests.support.runs import (
    EVERY_2,
    MARVELL_2,
    NAMES,
    Parties,
    build_parties,
    finish,
    in_background,
    run_together,
)
from tests.support.waiting import HANGS_AFTER_S, wait_until

HASTY = "reconnect={max_s: 300, deadline_s: 1}"


@pytest.fixture(scope="module")
def undisturbed(three: Path) -> Parties:
    several = build_parties(three, MARVELL_2, [EVERY_2])
    run_together(several)
    return several


def start(
    several: Parties,
    name: str,
    port: int,
    third: Callable[[], None] = lambda: None,
    *,
    credentials: CredentialFiles | None = None,
) -> threading.Thread:
    party = several.peers[name]

    def run() -> None:
        try:
            connection = PeerConnection(f"127.0.0.1:{port}", party.run.contract, credentials)
            with AtStep(connection, party.settings.reconnect, party=name) as peer:
                peer.actions = {3: third}
                party.run.run(peer)
        except BaseException as error:
            several.errors[name] = error

    return in_background(run)


def test_parties_whose_deadlines_pass_while_they_wait_ask_again(
    three: Path, undisturbed: Parties, port: int
) -> None:
    """Their deadline is one second."""
    several, may_go = (
        build_parties(three, [*MARVELL_2, HASTY], [EVERY_2, HASTY]),
        threading.Event(),
    )
    asked, exchange = Counter[str](), several.session.exchange

    def counted(message: Activation, party: str, is_listening: Callable[[], bool]) -> Any:
        asked[party] += 1
        return exchange(message, party, is_listening)

    several.session.exchange = counted  # type: ignore[method-assign, assignment]
    with serving(several, port) as service:
        threads = [start(several, name, port) for name in ("ash", "cedar")]
        threads.append(start(several, "birch", port, lambda: _wait(may_go)))
        wait_until(
            lambda: (
                set(several.session.lifecycle.stages.awaited()) == {"birch"}
                and bool(several.active.losses)
            )
        )
        before = asked.copy()
        wait_until(lambda: all(asked[name] > before[name] + 1 for name in ("ash", "cedar")))
        assert several.errors == {}
        may_go.set()
        finish(threads)
    assert several.errors == {}
    assert_same_weights(several.weights(), undisturbed.weights())
    assert not service.refused


def _wait(event: threading.Event) -> None:
    assert event.wait(HANGS_AFTER_S)


def test_a_handshake_for_another_party_than_the_call_s_is_refused(three: Path, port: int) -> None:
    several = build_parties(three)
    ash = several.peers["ash"]
    connection = PeerConnection(f"127.0.0.1:{port}", ash.run.contract)
    with (
        serving(several, port),
        GrpcPeer(connection, ash.settings.reconnect, party="birch") as peer,
        pytest.raises(ProtocolError),
    ):
        ash.run.run(peer)
    assert several.session.stage is Stage.WAITING


@pytest.mark.parametrize("named", [(), ("elm",), ("ash", "birch")])
def test_a_call_has_to_name_one_party_of_the_contract(
    three: Path, port: int, named: Sequence[str]
) -> None:
    several = build_parties(three)
    request = pb.LeaveRequest(run_id=several.session.run_id, reason=pb.LEAVE_REASON_FAILED)
    metadata = [(PARTY_KEY, name) for name in named]
    with serving(several, port), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        leave: Any = channel.unary_unary(method_path("Leave"))
        with pytest.raises(grpc.RpcError) as caught:
            leave(request.SerializeToString(), metadata=metadata, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert several.session.lifecycle.error is None


def test_a_certificate_lets_its_own_party_in_and_no_other(
    three: Path, tmp_path: Path, port: int
) -> None:
    make_certificates(tmp_path, {name: f"{name}.splitveil" for name in ("active", *NAMES)})
    several = build_parties(three)
    ash = several.peers["ash"]
    connection = PeerConnection(f"127.0.0.1:{port}", ash.run.contract, files(tmp_path, "ash"))
    with serving(several, port, files(tmp_path, "active")):
        with (
            GrpcPeer(connection, ash.settings.reconnect, party="birch") as peer,
            pytest.raises(PeerUntrusted, match="does not accept"),
        ):
            peer.leave(several.session.run_id, LeaveReason.FAILED)
        assert several.session.lifecycle.error is None
        for_all = {name: files(tmp_path, name) for name in several.peers}
        finish([start(several, name, port, credentials=own) for name, own in for_all.items()])
    assert several.errors == {}
    assert several.session.stage is Stage.FINISHED


class Tapes:
    def __init__(self) -> None:
        self.of = {name: Tape() for name in NAMES}

    def note(self, crossing: Crossing) -> None:
        if crossing.party is not None:  # a call that names nobody has none
            self.of[crossing.party].note(crossing)

    def answered(self, name: str) -> dict[str, list[bytes]]:
        """Return a party's requests, and of its activations those of the first two steps."""
        requests = self.of[name].requests()
        return requests | {"Train": requests["Train"][:2]}


def test_mutants_under_any_party_s_name_change_no_bit_of_the_run(
    three: Path, undisturbed: Parties, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each party's own messages under its own name and under the next one's.

    They come while the third step waits for one of the three, and while training goes on.
    """
    several, tapes, statuses = build_parties(three, MARVELL_2, [EVERY_2]), Tapes(), Counter[str]()

    def send(whose: str, under: str, count: int) -> None:
        sender = WireSender(port, under)
        mutator = Mutator(kept[whose], seed=count, run_id=several.session.run_id)
        for (_, status), number in send_mutants(sender, mutator, count).items():
            statuses[status] += number
        sender.close()

    def all_ways(count: int) -> None:
        for whose, under in (*zip(NAMES, NAMES, strict=True), *pairwise((*NAMES, NAMES[0]))):
            send(whose, under, count)

    kept: dict[str, dict[str, list[bytes]]] = {}
    executor, floods = ThreadPoolExecutor(1), list[Future[None]]()

    def third() -> None:
        wait_until(lambda: len(several.session.lifecycle.stages.awaited()) == 1)
        kept.update((name, tapes.answered(name)) for name in NAMES)
        all_ways(300)
        floods.append(executor.submit(all_ways, 101))

    with serving(several, port, transcript=cast("Transcript", tapes)) as service:
        threads = [start(several, name, port) for name in ("ash", "cedar")]
        finish([start(several, "birch", port, third), *threads])
        floods[0].result(HANGS_AFTER_S)
    executor.shutdown()
    assert several.errors == {}
    assert "fault in a handler" not in caplog.text
    assert not {"INTERNAL", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED"} & set(statuses)
    assert service.refused["InvalidMessage"] > 100
    assert service.refused["OutOfStep"] > 100
    assert_same_weights(several.weights(), undisturbed.weights())
    assert several.active.losses == undisturbed.active.losses


COMMITTED = [bytes([number]) * 32 for number in range(3)]


def received(*frames: pb.AlignFrame, num_ids: int = 20) -> Share:
    there, back = channel_pair(deadline_s=60)
    for frame in frames:
        there.send(frame)
    commitments = [hashlib.sha256(nonce).digest() for nonce in COMMITTED]
    return receive_share(back, num_ids, commitments, lambda: None)


def share_frame(**changes: object) -> pb.AlignFrame:
    fields = {"chunk": 0, "mask": b"\x01\x80\x0f", "nonces": COMMITTED} | changes
    return pb.AlignFrame(share=pb.AlignShare(**fields))  # type: ignore[arg-type]


def test_a_share_comes_as_it_was_sent_after_some_waiting() -> None:
    wait = pb.AlignFrame(wait=pb.AlignWait())
    share = received(wait, wait, share_frame())
    assert share.mask.tolist() == [i in (0, 15, 16, 17, 18, 19) for i in range(20)]
    (frame,) = share_frames(share)
    assert frame == share_frame()


def test_a_mask_of_many_ids_comes_in_chunks() -> None:
    share = Share(np.random.default_rng(1).random(1_500_000) < 0.5, tuple(COMMITTED))
    frames = list(share_frames(share))
    assert len(frames) == 2
    for frame in frames:
        check_fields(frame)
        assert frame.ByteSize() <= ALIGN_FRAME_BYTES
    found = received(*frames, num_ids=len(share.mask))
    assert (found.mask == share.mask).all()
    assert found.nonces == share.nonces


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"mask": b"\x01\x80"}, InvalidMessage),
        ({"mask": b"\x01\x80\x0f\x00"}, InvalidMessage),
        ({"mask": b"\x01\x80\x1f"}, InvalidMessage),
        ({"chunk": 1}, OutOfStep),
        ({"nonces": COMMITTED[:2]}, InvalidMessage),
        ({"nonces": COMMITTED[::-1]}, InvalidMessage),
        ({"nonces": [*COMMITTED[:2], bytes(31)]}, InvalidMessage),
    ],
)
def test_a_share_that_cannot_be_is_refused(
    changes: dict[str, object], error: type[PeerError]
) -> None:
    with pytest.raises(error):
        received(share_frame(**changes))
