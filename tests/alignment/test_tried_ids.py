"""A peer that guesses ids: aborted exchanges are counted over all starts, and limited."""

import hashlib
import random
import stat
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitveil.common.alignment.channel import AlignChannel, channel_pair
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.tried_ids import TriedIds, file_of_count
from splitveil.common.errors import AlignmentError, PeerError, SplitveilError, StorageError
from splitveil.common.record.run_folder import open_run_folder
from splitveil.common.run.messages import Offer, Opening
from splitveil.library.in_process import InProcessPeer
from tests.support.exchanging import Broken
from tests.support.loopback import peer_of, serving
from tests.support.runs import build_parties, run_in_process

CAP = 600
ROUNDS = 12
SAME_CAP = [f"contract.alignment.max_set_size={CAP}"]
ENGINE = EcdhEngine(min_aligned=1, max_set_size=CAP)


def guesses() -> list[list[str]]:
    """Return the guesses of a peer that knows the form of ids: 7,200 ids, of which 400 exist."""
    every = [f"person-{number:05d}" for number in range(CAP * ROUNDS)]
    random.Random(5).shuffle(every)
    return [every[first : first + CAP] for first in range(0, len(every), CAP)]


def probe(ids: list[str], channel: AlignChannel, run_id: str, nonce: bytes) -> set[str]:
    """Exchange ids as the protocol says, until all tags are there, and hang up."""
    session: EcdhExchange = ENGINE.start(ids, nonce=nonce, run_id=run_id)
    channel.send(session.hello())
    session.receive(channel.receive())
    for frame in session.own_frames():
        channel.send(frame)
    while session._own_done is None:
        for reply in session.receive(channel.receive()):
            if not reply.HasField("done"):
                channel.send(reply)
    channel.close()
    return {ids[row] for rows in session._found for row in rows}


# ---- a passive party that guesses the active party's ids, over localhost ----


def test_a_passive_party_that_breaks_off_and_comes_again_learns_three_sets_and_no_more(
    example: Path, port: int
) -> None:
    parties = build_parties(example, SAME_CAP, SAME_CAP)
    learned: set[str] = set()
    contract, rounds = parties.run.contract, 0
    with serving(parties, port), peer_of(parties, port) as peer:
        for ids in guesses():
            nonce = random.Random(rounds).randbytes(32)
            commitment = hashlib.sha256(nonce).digest()
            try:
                opening = peer.handshake("passive", contract.canonical_json(), commitment)
                learned |= probe(ids, peer.open_alignment(), opening.run_id, nonce)
            except SplitveilError:
                break
            rounds += 1
    expected = {name for ids in guesses()[:3] for name in ids} & set(parties.session.ids)
    assert learned == expected
    assert len(learned) < 0.6 * len(parties.session.ids)
    assert rounds == 3
    assert isinstance(parties.session.lifecycle.error, AlignmentError)
    assert parties.session.lifecycle.error.exit_code == 3
    assert "passive has tried 1,800 ids in 3 exchanges" in str(parties.session.lifecycle.error)


# ---- an active party that guesses the passive party's ids ----


class GuessingPeer(InProcessPeer):
    learned: set[str]
    rounds = 0

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        if self.rounds == ROUNDS:
            raise PeerError("the guesser has what it wanted")
        self.opening = super().handshake(party, contract_json, commitment, offer)
        return self.opening

    def open_alignment(self) -> AlignChannel:
        if self._aligning is not None:  # it may still add to what it has learned
            self._aligning.join(60)
        own, other = channel_pair()
        ids = guesses()[self.rounds]
        self.rounds += 1

        def guess() -> None:
            with suppress(SplitveilError):
                self.learned |= probe(
                    ids, other, self.opening.run_id, self._session.lifecycle.run.nonce
                )

        self._aligning = threading.Thread(target=guess)
        self._aligning.start()
        return own


def test_an_active_party_that_breaks_off_and_comes_again_learns_three_sets_and_no_more(
    example: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parties = build_parties(example, SAME_CAP, SAME_CAP)
    peer = GuessingPeer(parties.session, parties.engine)
    peer.learned = set()
    with pytest.raises(AlignmentError, match="active has tried 1,800 ids in 3 exchanges") as caught:
        parties.run.run(peer)
    assert caught.value.exit_code == 3
    assert peer._aligning is not None
    peer._aligning.join(60)
    expected = {name for ids in guesses()[:3] for name in ids} & set(
        parties.run.aligner.participant.ids
    )
    assert peer.learned == expected
    logged = [r.getMessage() for r in caplog.records if "broke off" in r.getMessage()]
    assert logged == [
        f"the exchange of ids with active broke off; it has now tried {tried} ids in {n} "
        "exchanges, of at most 1,800 in 30"
        for n, tried in ((1, "600"), (2, "1,200"), (3, "1,800"))
    ]


# ---- an honest peer with a bad connection ----


class BadLine(InProcessPeer):
    breaks: list[int]

    def open_alignment(self) -> AlignChannel:
        if self._aligning is not None:
            self._aligning.join(60)
        self._failure = None
        channel = super().open_alignment()
        return Broken(channel, self.breaks.pop(0)) if self.breaks else channel


@pytest.mark.parametrize("breaks", [[3, 3], [1, 1, 2, 3], [0] * 15])
def test_an_honest_repetition_is_no_guess_even_with_the_tightest_cap(
    example: Path, tmp_path: Path, breaks: list[int]
) -> None:
    size = len(build_parties(example).session.ids)
    tight = [f"contract.alignment.max_set_size={size}"]
    parties = build_parties(example, tight, tight)
    tried = TriedIds(size, path=file_of_count(tmp_path / "passive"))
    parties.run.aligner.tried = tried
    peer = BadLine(parties.session, parties.engine)
    peer.breaks = breaks
    parties.run.run(peer)
    assert parties.weights()
    assert tried.of("active").ids <= 3 * size
    tried.forget()
    assert list(tmp_path.iterdir()) == []


# ---- the count ----


def exchange_of(peer_set_size: int, answered_ids: int) -> Any:
    counts = {"peer_set_size": peer_set_size, "answered_ids": answered_ids}
    return SimpleNamespace(**counts, number="", is_complete=False)


def tries(count: TriedIds, announced: int, answered: int) -> None:
    with count.counted("passive", exchange_of(announced, answered)):
        pass


def test_the_count_outlives_the_process_and_a_new_beginning(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path, "run", "active")
    (folder / "metrics.jsonl").write_text("{}")
    path = file_of_count(folder)
    tries(TriedIds(CAP, path=path), CAP, CAP)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for lock in (tmp_path / "run").glob("*.lock"):
        lock.unlink()  # as if that process had ended
    again = open_run_folder(tmp_path, "run", "active", lambda _: False)
    assert again == folder
    assert not (folder / "metrics.jsonl").exists()
    count = TriedIds(CAP, path=file_of_count(again))
    assert count.of("passive") == (CAP, 1)
    tries(count, CAP, CAP)
    tries(count, CAP, CAP)
    with pytest.raises(AlignmentError, match=rf"delete the count: {path}"):
        tries(count, 1, 1)
    count.forget()
    assert TriedIds(CAP, path=path).of("passive") == (0, 0)


def test_an_exchange_is_counted_before_anything_is_answered(tmp_path: Path) -> None:
    """A process that is killed in its middle has counted it."""
    path = tmp_path / "count"
    with TriedIds(CAP, path=path).counted("passive", exchange_of(CAP, 0)):
        assert TriedIds(CAP, path=path).of("passive") == (CAP, 1)
    assert TriedIds(CAP, path=path).of("passive") == (0, 0)


@pytest.mark.parametrize("answered", [0, 2])
def test_an_exchange_that_outlives_its_count_takes_nothing_from_the_next(
    tmp_path: Path, answered: int
) -> None:
    """A stream may end later than the run whose end forgets it."""
    path = tmp_path / "count"
    count = TriedIds(CAP, path=path)
    with count.counted("passive", exchange_of(CAP, answered)):
        count.forget()
    assert count.of("passive") == (0, 0)
    assert TriedIds(CAP, path=path).of("passive") == (0, 0)


def test_small_exchanges_are_bounded_by_their_number() -> None:
    count = TriedIds(10_000_000, attempts=2)
    for _ in range(20):
        tries(count, 5, 1)
    with pytest.raises(AlignmentError, match="20 ids in 20 exchanges"):
        tries(count, 5, 1)
    with count.counted("another", exchange_of(5, 5)):
        pass


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 50_000, '{"passive": 1}', '{"a": [-1, 0]}', '{"a": [1, true]}']
)
def test_a_damaged_count_is_no_count_of_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "count"
    path.write_text(text)
    with pytest.raises(StorageError, match="expected the number of ids"):
        TriedIds(CAP, path=path)


def test_an_exchange_that_cannot_be_counted_is_not_answered(example: Path, tmp_path: Path) -> None:
    parties = build_parties(example)
    parties.run.aligner.tried = TriedIds(CAP, path=tmp_path / "gone" / "count")
    with pytest.raises(StorageError, match="cannot be written"):
        run_in_process(parties)


def test_both_parties_count_what_the_other_has_tried(example: Path, port: int) -> None:
    parties = build_parties(example)
    with serving(parties, port) as service, peer_of(parties, port) as peer:
        parties.run.run(peer)
    assert service.tried.of("passive") == (len(parties.run.aligner.participant.ids), 1)
    assert parties.run.aligner.tried.of("active") == (len(parties.session.ids), 1)


def test_a_count_that_cannot_be_deleted_fails_no_finished_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "count"
    count = TriedIds(CAP, path=path)
    path.mkdir()
    count.forget()
    assert f"{path}: cannot be deleted" in caplog.text
