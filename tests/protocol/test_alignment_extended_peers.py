"""A peer that keeps every byte of earlier exchanges and chooses its own in the next ones."""

import hashlib
import json
from pathlib import Path

import pytest

from splitveil.common.alignment import (
    ExchangeFiles,
    TriedIds,
)
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.known import KeyFiles
from splitveil.common.alignment.list_test import ListTest
from splitveil.common.errors import (
    AlignmentError,
    InvalidMessage,
    OutOfStep,
    ProtocolError,
    TooLarge,
)
from splitveil.protos import split_learning_pb2 as pb
from tests.aligned import (
    ENGINE,
    NONCES,
    Outcome,
    commitment_frame,
    common_ids,
    done_frame,
    names,
    peer_hello,
    points,
    points_frame,
    split,
    tags_frame,
)
from tests.aligned import digests as digests_of
from tests.exchanging import Counting, Pair

pytestmark = pytest.mark.usefixtures("small_chunks")

OWN, PEER = names(range(60)), names(range(40, 100))


def aligned(folder: Path) -> Pair:
    pair = Pair(folder, (OWN, PEER), keeps_keys=True)
    outcomes = pair.attempt()
    assert common_ids(OWN, outcomes[0]) == common_ids(PEER, outcomes[1])
    return pair


def key_of(pair: Pair, index: int) -> KeyFiles:
    key = pair.files[index].key
    assert key is not None
    return key


def tag_of(pair: Pair, index: int, text: str) -> bytes:
    """Return the tag of an id in what a party has kept."""
    key = key_of(pair, index)
    (known,) = key.load()
    hashed = hashlib.blake2b(text.encode(), digest_size=16, key=key.id_key()).digest()
    entries = split(key.lists(known.number).own.read_bytes(), 32)
    (tag,) = [entry[:16] for entry in entries if entry[16:] == hashed]
    return tag


# ---- a peer that gives a new id the tag of another one, which it has learned before ----


class Echoing(Counting):
    """Answers each point with a tag that it knows, instead of a product."""

    def __init__(self, tags: list[bytes]) -> None:
        super().__init__()
        self.tags = tags

    def multiply(self, given: bytes, scalar: bytes) -> bytes:
        return b"".join(self.tags.pop() + bytes(16) for _ in split(given, 32))


def echo(pair: Pair, adds: list[str], as_if: list[str]) -> list[Outcome]:
    """Align again; the victim adds ids, and the liar says that they are some of its own."""
    pair.ids = (OWN + adds, PEER)
    liar = Echoing([tag_of(pair, 1, text) for text in as_if])
    pair.groups = (pair.groups[0], liar)
    pair._engines[1] = EcdhEngine(min_aligned=1, max_set_size=200, group=liar)
    return pair.attempt()


def test_a_tag_that_is_known_from_before_makes_nobody_believe_in_a_common_id(
    tmp_path: Path,
) -> None:
    """Customer 99 is the liar's alone, and it does not know customer 500."""
    pair = aligned(tmp_path)
    for outcome in echo(pair, ["customer 500"], ["customer 99"]):
        assert isinstance(outcome.error, AlignmentError)
        assert "disagree on the intersection" in str(outcome.error)
    assert not key_of(pair, 0).load(), "the victim uses the key again"


def test_without_the_test_of_the_list_that_would_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ListTest, "check", lambda *_: None)
    outcomes = echo(aligned(tmp_path), ["customer 500"], ["customer 99"])
    believed = common_ids([*OWN, "customer 500"], outcomes[0])
    assert "customer 500" in believed
    assert believed.index("customer 500") == common_ids(PEER, outcomes[1]).index("customer 99")


def test_a_tag_of_an_id_that_the_victim_has_is_a_tag_twice(tmp_path: Path) -> None:
    pair = aligned(tmp_path)
    outcomes = echo(pair, ["customer 500"], ["customer 45"])
    assert any(
        isinstance(one.error, InvalidMessage) and "same tag" in str(one.error) for one in outcomes
    )


# ---- a peer that breaks rules ----


class Victim:
    """An exchange that extends an alignment, which a test drives as the peer."""

    def __init__(self, folder: Path, own: list[str] | None = None) -> None:
        self.pair = aligned(folder)
        self.files: ExchangeFiles = self.pair.files[0]
        self.own = own or [*OWN[5:], "customer 500", "customer 501"]
        self.exchange = self.start()

    def start(self) -> EcdhExchange:
        self.exchange = ENGINE.start(self.own, nonce=NONCES[0], run_id="run")
        self.exchange.keep_in(self.files)
        (self.known,) = self.exchange.hello().hello.known
        return self.exchange

    def greet(self, *, new: int = 0, gone: int = 0, size: int | None = None) -> EcdhExchange:
        hello = peer_hello(len(PEER) + new - gone if size is None else size)
        known = pb.AlignKnown(alignment=self.known.alignment, digest=self.known.digest)
        known.new_ids, known.gone_ids = new, gone
        hello.known.append(known)
        self.exchange.receive(pb.AlignFrame(hello=hello))
        return self.exchange

    def peer_tags(self) -> list[bytes]:
        number = self.known.alignment
        return split(key_of(self.pair, 0).lists(number).peer.read_bytes(), 16)


def gone_frame(chunk: int, tags: list[bytes]) -> pb.AlignFrame:
    return pb.AlignFrame(gone=pb.AlignGone(chunk=chunk, tags=b"".join(tags)))


def test_the_hello_says_what_is_new_and_gone_and_no_more(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    assert (victim.known.new_ids, victim.known.gone_ids) == (2, 5)
    sent = list(victim.greet().own_frames())
    assert [frame.WhichOneof("body") for frame in sent] == ["gone", "points", "commitment"]
    assert set(split(sent[0].gone.tags, 16)) == {tag_of(victim.pair, 0, text) for text in OWN[:5]}
    assert len(sent[1].points.points) == 2 * 32


@pytest.mark.parametrize(
    "numbers",
    [
        {"new": 1, "size": 60},
        {"gone": 1, "size": 60},
        {"gone": 61, "size": 1},
        {"new": 2**31, "size": 60},
        {"gone": 2**31, "size": 60},
    ],
)
def test_numbers_that_do_not_add_up_are_refused(tmp_path: Path, numbers: dict[str, int]) -> None:
    victim = Victim(tmp_path)
    with pytest.raises(InvalidMessage, match="do not add up"):
        victim.greet(**numbers)


def test_more_ids_than_the_contract_allows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TooLarge, match="expected at most 10000 ids"):
        Victim(tmp_path).greet(new=9_941)


def test_tags_that_are_gone_have_to_be_those_that_were_there(tmp_path: Path) -> None:
    for number, wrong in enumerate(([bytes(16)], [b"\xff" * 16])):
        victim = Victim(tmp_path / str(number))
        victim.greet(gone=2)
        with pytest.raises(InvalidMessage, match="ids that it did not have"):
            victim.exchange.receive(gone_frame(0, victim.peer_tags()[:1] + wrong))
    victim = Victim(tmp_path / "twice")
    victim.greet(gone=2)
    with pytest.raises(InvalidMessage, match="ids that it did not have"):
        victim.exchange.receive(gone_frame(0, victim.peer_tags()[:1] * 2))


def test_tags_that_are_gone_come_first_whole_and_in_order(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    victim.greet(gone=20, new=1)
    tags = victim.peer_tags()
    wrong: list[tuple[pb.AlignFrame, type[ProtocolError]]] = [
        (points_frame(0, points(1)), OutOfStep),
        (commitment_frame(b"", b""), OutOfStep),
        (gone_frame(1, tags[:16]), OutOfStep),
        (gone_frame(0, tags[:15]), InvalidMessage),
        (gone_frame(0, tags[:17]), TooLarge),
    ]
    for frame, kind in wrong:
        with pytest.raises(kind):
            victim.exchange._receive(frame)
    victim.exchange.receive(gone_frame(0, tags[:16]))
    with pytest.raises(OutOfStep, match="chunk 1"):
        victim.exchange._receive(gone_frame(0, tags[16:20]))
    victim.exchange.receive(gone_frame(1, tags[16:20]))
    with pytest.raises(OutOfStep, match="than were announced"):
        victim.exchange.receive(gone_frame(2, tags[20:21]))


def test_tags_that_are_gone_have_no_place_in_an_exchange_of_all_ids() -> None:
    exchange = ENGINE.start(OWN, nonce=NONCES[0], run_id="run")
    exchange.receive(pb.AlignFrame(hello=peer_hello()))
    with pytest.raises(OutOfStep, match="of none"):
        exchange.receive(gone_frame(0, [bytes(16)]))


def test_a_point_of_an_id_that_is_there_already_is_a_tag_twice(tmp_path: Path) -> None:
    """The peer sends a point again to learn more: its tag is the one that it has."""
    pair = aligned(tmp_path)
    pair.ids = OWN, [*PEER, "customer 45 again"]
    known = names([45])

    class Repeating(Counting):
        def mask(self, digests: bytes, scalar: bytes) -> bytes:
            return super().mask(digests_of(known), scalar)

    liar = Repeating()
    pair._engines[1] = EcdhEngine(min_aligned=1, max_set_size=200, group=liar)
    outcomes = pair.attempt()
    assert any("same tag" in str(outcome.error) for outcome in outcomes)


def finished(victim: Victim) -> EcdhExchange:
    """Bring an exchange of no new ids to the point at which only the peer's words are missing."""
    victim.own = list(OWN)
    victim.start()
    exchange = victim.greet()
    list(exchange.own_frames())
    exchange.receive(commitment_frame(b"", b""))
    return exchange


def test_a_proof_is_due_once_and_after_the_list(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    exchange = finished(victim)
    proof = pb.AlignFrame(list_proof=pb.AlignListProof(digest=bytes(32)))
    with pytest.raises(OutOfStep, match="not due"):
        exchange._receive(proof)
    own = exchange._own_done
    assert own is not None
    for point, kind in ((b"", InvalidMessage), (bytes(32), InvalidMessage), (bytes(33), TooLarge)):
        exchange._peer_done = None
        done = pb.AlignDone(count=own.count, digest=own.digest, list_point=point)
        with pytest.raises(kind, match="list of common ids"):
            exchange._receive(pb.AlignFrame(done=done))
    exchange._peer_done = None
    done = pb.AlignDone(count=own.count, digest=own.digest, list_point=own.list_point)
    (answer,) = exchange._receive(pb.AlignFrame(done=done))
    assert not exchange.is_complete
    with pytest.raises(AlignmentError, match="disagree"):
        exchange.receive(pb.AlignFrame(list_proof=answer.list_proof))  # its own words, sent back
    assert not key_of(victim.pair, 0).load()


def test_a_peer_with_the_same_nonce_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="own nonce"):
        ListTest(bytes(32), NONCES[0], NONCES[0])


def test_the_list_test_tells_equal_lists_from_others() -> None:
    for other, is_equal in ((OWN, True), (OWN[1:], False), (OWN[::-1], False)):
        one, two = ListTest(b"n", *NONCES), ListTest(b"n", *NONCES[::-1])
        dones = [
            pb.AlignDone(list_point=one.point(OWN)),
            pb.AlignDone(list_point=two.point(other)),
        ]
        assert dones[0].list_point != dones[1].list_point
        proofs = one.answer(dones[1]), two.answer(dones[0])
        if is_equal:
            one.check(proofs[1])
            two.check(proofs[0])
            continue
        for test, proof in ((one, proofs[1]), (two, proofs[0])):
            with pytest.raises(AlignmentError, match="disagree"):
                test.check(proof)


def test_a_finished_message_without_the_whole_result_ends_both(tmp_path: Path) -> None:
    exchange = finished(Victim(tmp_path))
    exchange.receive(done_frame(count=3))
    assert exchange.is_complete
    with pytest.raises(AlignmentError, match="disagree on the intersection"):
        exchange.result()


def test_tags_of_the_last_alignment_are_none_of_this_one(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    exchange = victim.greet()
    list(exchange.own_frames())
    exchange.receive(commitment_frame(b"", bytes(32)))
    exchange.receive(tags_frame(0, bytes(16)))
    with pytest.raises(InvalidMessage, match="not those that it committed to"):
        exchange.receive(tags_frame(1, b"\x01" * 16))


# ---- the number of ids that a peer tries ----

CAP = 20


class Guesser:
    """A peer that brings other ids in each exchange, under one key or claiming that it has none."""

    def __init__(self, folder: Path, *, loses_its_key: bool) -> None:
        self.pair = Pair(folder, (names(range(100)), names([0])), keeps_keys=True)
        self.loses_its_key = loses_its_key
        self.count = folder / "tried-ids"

    def tries(self, guesses: list[int]) -> list[Outcome]:
        # The victim's process starts again each time, and its runs end well.
        tried = TriedIds(CAP, path=self.count, outlives_runs=True)
        self.pair.tried = [tried, TriedIds(1000)]
        self.pair.ids = names(range(100)), names(guesses)
        outcomes = self.pair.attempt()
        if outcomes[0].error is None:
            tried.forget()
        if self.loses_its_key:
            key_of(self.pair, 1).discard()
        return outcomes


@pytest.mark.parametrize("loses_its_key", [False, True])
def test_guesses_are_added_up_over_all_alignments_however_the_peer_restarts(
    tmp_path: Path, loses_its_key: bool
) -> None:
    guesser = Guesser(tmp_path, loses_its_key=loses_its_key)
    learned: set[str] = set()
    for first in range(0, 200, 10):
        guesses = list(range(first, first + 10))
        outcomes = guesser.tries(guesses)
        if outcomes[0].error is not None:
            break
        learned |= set(common_ids(names(guesses), outcomes[1]))
    assert isinstance(outcomes[0].error, AlignmentError)
    assert "peer has tried 60 ids in 0 exchanges since its keys are kept" in str(outcomes[0].error)
    assert learned == set(names(range(60)))
    assert json.loads(guesser.count.read_text())["peer"][0] == 60


def test_ids_that_stay_are_tried_once(tmp_path: Path) -> None:
    guesser = Guesser(tmp_path, loses_its_key=False)
    for _ in range(32):  # more exchanges than one run may have
        outcomes = guesser.tries(list(range(15)))
        assert outcomes[0].error is None
    assert json.loads(guesser.count.read_text())["peer"][0] == 15


def test_ids_that_are_removed_and_come_back_are_tried_again(tmp_path: Path) -> None:
    guesser = Guesser(tmp_path, loses_its_key=False)
    for guesses in ([*range(15)], [*range(5)], [*range(15)]):
        assert guesser.tries(guesses)[0].error is None
    assert json.loads(guesser.count.read_text())["peer"][0] == 25
