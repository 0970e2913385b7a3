"""Going on after one party, or both, were lost: what is refused, what is kept, and in which files.

That the run then has the bits of an undisturbed one is shown in `test_same_bits.py`.
"""

import hashlib
import logging
import pickle
import re
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.errors import (
    DataError,
    InvalidMessage,
    NotOpen,
    OutOfStep,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
    StorageError,
)
from splitveil.common.record import run_folder
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.messages import Activation, Answer, BatchId, Course, LeaveReason, Offer
from splitveil.common.text.wording import VERSION
from splitveil.common.wire.connection import MAX_DAMAGED
from splitveil.library.in_process import InProcessPeer
from tests.support.equality import assert_same, assert_same_weights
from tests.support.peers import MARVELL, Lost, answered, dying, go_back
from tests.support.runs import (
    EVERY_2,
    Parties,
    build_parties,
    run_in_process,
    run_over_grpc,
    write_example,
)
from tests.support.waiting import HANGS_AFTER_S, wait_until


def run_on(parties: Parties) -> None:
    parties.session.reopen()
    run_in_process(parties)


def ran(folder: Path, active: Sequence[str] = (EVERY_2,)) -> Parties:
    whole = build_parties(folder, active, [EVERY_2])
    run_in_process(whole)
    return whole


def killed(
    folder: Path,
    runs: Path,
    active: Sequence[str] = (EVERY_2,),
    at: int = 4,
    *,
    after: bool = True,
    passive: Sequence[str] = (EVERY_2,),
) -> tuple[Parties, Parties]:
    """Return a run whose passive party was killed, and new parties that can resume it."""
    first = build_parties(folder, active, passive, runs=runs)
    with pytest.raises(Lost):
        run_in_process(first, dying(at, after=after))
    return first, build_parties(folder, active, passive, runs=runs)


@pytest.mark.parametrize("defense", ["{name: none}", "{name: marvell, insecure_noise_seed: 7}"])
def test_with_both_parties_killed_the_run_goes_back_and_ends_alike(
    example: Path, tmp_path: Path, defense: str
) -> None:
    active = [EVERY_2, f"defense={defense}"]
    whole, (_, second) = ran(example, active), killed(example, tmp_path, active, 3)
    run_on(second)
    assert second.active.resumed != []
    assert_same(second, whole)


class ForgetsTheActive(InProcessPeer):
    anew: Parties
    at = 3
    _calls = 0

    def receive_gradient(self) -> Answer:
        self._calls += 1
        if self._calls == self.at:
            self.anew.session.reopen()
            self._session = self.anew.session
        try:
            return super().receive_gradient()
        except NotOpen as error:
            raise PeerRestarted from error  # as the status of this error means on the other side


def test_with_the_active_party_killed_the_passive_one_goes_back_with_it_once(
    example: Path, tmp_path: Path
) -> None:
    active = [EVERY_2, "defense={name: marvell, insecure_noise_seed: 7}"]
    whole = ran(example, active)
    parties = build_parties(example, active, [EVERY_2], runs=tmp_path)
    ForgetsTheActive.anew = build_parties(example, active, [EVERY_2], runs=tmp_path)
    run_in_process(parties, ForgetsTheActive)
    parties.session, parties.active = ForgetsTheActive.anew.session, ForgetsTheActive.anew.active
    assert parties.passive.resumed == [0]
    assert_same(parties, whole)


def test_a_step_done_again_with_other_bytes_is_refused_for_good(
    example: Path, tmp_path: Path
) -> None:
    """Another activation with the same noise would give the noise away, and fresh noise a copy."""
    active = [EVERY_2, "defense={name: marvell, insecure_noise_seed: 7}"]
    killed(example, tmp_path, active)
    second = build_parties(example, active, [EVERY_2, "model_seed=5"], runs=tmp_path)
    training = second.run.reopen()
    assert training is not None
    with torch.no_grad():
        next(training.trainer.model.parameters()).add_(1e-3)
    training.save()
    second.session.reopen()
    with pytest.raises(OutOfStep, match="other bytes"):
        run_in_process(second)
    assert second.active.sent == []


@pytest.mark.parametrize("defense", ["marvell", "gafm"])
def test_without_seeds_the_noise_of_a_step_done_again_is_the_same(
    example: Path, tmp_path: Path, defense: str
) -> None:
    active = [EVERY_2, f"defense={{name: {defense}}}"]
    first, second = killed(example, tmp_path, active)
    run_on(second)
    # Step 2, after the checkpoint at 2, was answered by both processes.
    assert torch.equal(first.active.sent[2], second.active.sent[0])
    assert not torch.equal(first.active.sent[1], second.active.sent[0])
    other = ran(example, active)
    assert not torch.equal(other.active.sent[2], second.active.sent[0])


def test_a_peer_cannot_resume_a_run_that_is_not_its_own(example: Path, tmp_path: Path) -> None:
    parties, _ = killed(example, tmp_path)
    session, contract = parties.session, parties.run.contract.canonical_json()
    places = frozenset({0, 2})
    with pytest.raises(OutOfStep, match="another run"):
        session.handshake("passive", contract, b"c" * 32, Offer(session.run_id, places))
    commitment = session.parties.named("passive").commitment
    with pytest.raises(OutOfStep, match="another run"):
        session.handshake("passive", contract, commitment, Offer("another", places))
    with pytest.raises(OutOfStep, match="no checkpoint in common"):
        session.handshake("passive", contract, commitment, Offer(session.run_id, frozenset({1})))
    assert session.handshake("passive", contract, commitment, Offer(session.run_id, places))


def test_other_data_than_the_run_began_with_are_refused(tmp_path: Path) -> None:
    write_example(tmp_path)
    killed(tmp_path, tmp_path / "runs")
    header, first, *rows = (tmp_path / "active.csv").read_text().splitlines()
    flipped = first.replace(",0,", ",1,", 1)
    assert flipped != first
    for table in ([flipped, *rows], rows[:100]):
        (tmp_path / "active.csv").write_text("\n".join([header, *table]) + "\n")
        changed = build_parties(tmp_path, [EVERY_2], [EVERY_2], runs=tmp_path / "runs")
        with pytest.raises(DataError, match="--fresh"):
            changed.session.reopen()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("party", ["active", "passive"])
def test_features_of_two_rows_that_were_swapped_are_other_data(
    tmp_path: Path, party: str, *, cached: bool
) -> None:
    """Ids, labels, scalers and vocabularies are what they were; only rows of one split differ."""
    write_example(tmp_path)
    both = [EVERY_2, *(["data.source.cache_dir=cache"] if cached else [])]
    parties, _ = killed(tmp_path, tmp_path / "runs", both, passive=both)
    rows, file = parties.active.rows, tmp_path / f"{party}.csv"
    assert rows is not None
    header, *lines = file.read_text().splitlines()
    tested = rows.file_rows[rows.splits["test"][:2]]
    ids = {parties.session.ids[row] for row in tested}
    one, other = (at for at, line in enumerate(lines) if line.split(",")[0] in ids)
    first = 2 if party == "active" else 1
    swapped = lines[one].split(","), lines[other].split(",")
    for cells, features in zip(swapped, [cells[first:] for cells in swapped][::-1], strict=True):
        cells[first:] = features
    lines[one], lines[other] = map(",".join, swapped)
    file.write_text("\n".join([header, *lines]) + "\n")
    changed = build_parties(tmp_path, both, both, runs=tmp_path / "runs")
    starts: list[Callable[[], object]] = [changed.session.reopen, lambda: run_in_process(changed)]
    if party == "passive":
        starts.pop(0)()
    with pytest.raises(DataError, match="--fresh"):
        starts[0]()


def test_a_way_back_that_fails_leaves_the_checkpoints_as_they_are(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("no room")

    session = answered(example, tmp_path, MARVELL, messages=5).session
    oldest = tmp_path / "active" / "checkpoint" / "at-0000000000.state"
    before = oldest.read_bytes()
    monkeypatch.setattr(session.lifecycle.observer, "load_state_dict", fail)
    with pytest.raises(StorageError) as raised:
        go_back(session)
    session.end(raised.value)
    assert oldest.read_bytes() == before


def test_a_fault_of_any_kind_ends_the_session(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault() -> None:
        raise RuntimeError("a fault")

    session = answered(example, tmp_path, MARVELL, messages=3).session
    monkeypatch.setattr(session.lifecycle, "finish_step", fault)
    with pytest.raises(RuntimeError, match="a fault"):
        session.end(SplitveilError("stopped"))
    assert session.stage is Stage.ENDED


# ---- the files ----


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = ran(example)
    killed(example, tmp_path, at=5)
    newest = max((tmp_path / "active" / "checkpoint").glob("at-*.state"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    second = build_parties(example, [EVERY_2], [EVERY_2], runs=tmp_path)
    with caplog.at_level(logging.WARNING):
        run_on(second)
    assert f"{newest}: is damaged" in caplog.text
    assert_same(second, whole)


def test_a_store_keeps_the_newest_few_readable_by_their_owner_alone(tmp_path: Path) -> None:
    store = RunStore(tmp_path, keep=2)
    store.save_run({"secret": b"s"})
    for place in (0, 5, 7):
        store.save(place, {"place": place, "values": [torch.tensor([float(place)])]})
    assert store.checkpoints() == [5, 7]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "checkpoint").iterdir()} == {0o600}
    assert store.load(5)["values"][0].item() == 5.0
    assert store.checkpoints() == [5]  # what came after it will come again
    store.forget()
    assert store.checkpoints() == []
    assert store.run() is None
    with pytest.raises(StorageError, match="cannot be read"):
        store.load(5)


def test_a_state_saved_soon_is_the_one_at_the_call_and_is_there_for_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = write_bytes_atomically

    def write_later(path: Path, *data: bytes, mode: int) -> None:
        assert may_write.wait(HANGS_AFTER_S) or not path.name.startswith("at-")
        write(path, *data, mode=mode)

    with RunStore(tmp_path, keep=2, in_background=True) as store:
        store.save_run({})
        monkeypatch.setattr(run_folder, "write_bytes_atomically", write_later)
        values = torch.tensor([1.0])
        store.save_soon(3, {"values": values})
        values += 1
        assert not list(tmp_path.glob("checkpoint/at-*"))  # training went on meanwhile
        may_write.set()
        assert store.checkpoints() == [3]
        assert store.load(3)["values"].item() == 1.0
        for place in (4, 5, 6):
            store.save_soon(place, {"values": values})
    assert RunStore(tmp_path, keep=2).checkpoints() == [5, 6]


def test_a_state_being_saved_is_in_memory_once(tmp_path: Path) -> None:
    values = torch.zeros(2**20)
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    tracemalloc.start()  # which counts bytes, but not tensors
    try:
        store.save(3, {"values": values})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * values.nbytes


def test_a_disk_that_fills_up_in_the_background_is_told_at_the_next_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_data: bytes, mode: int) -> None:
        raise StorageError(f"{path}: cannot be written: disk full ({mode:o})")

    store = RunStore(tmp_path, keep=2, in_background=True)
    store.save_run({})
    monkeypatch.setattr(run_folder, "write_bytes_atomically", fail)
    store.save_soon(3, {})
    with pytest.raises(StorageError, match=r"at-0000000003\.state: cannot be written: disk full"):
        store.save_soon(4, {})
    store.save_soon(5, {})
    with pytest.raises(StorageError, match="0000000005"):
        store.close()
    store.close()


def test_a_folder_that_is_deleted_under_a_store_is_missed_in_words(tmp_path: Path) -> None:
    store = RunStore(tmp_path, keep=2, in_background=True)
    store.save_run({})
    store.new_answers()
    store.save_soon(3, {})
    wait_until(lambda: store._pending is None or store._pending.done())
    shutil.rmtree(tmp_path / "checkpoint")
    store.save_soon(4, {})
    with pytest.raises(StorageError, match=r"answered\.log: cannot be written: No such file"):
        store.close()


def test_a_state_that_is_not_plain_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    store.save(3, {"place": 3})
    harmful = pickle.dumps(InvalidMessage("called when loaded"), protocol=2)
    path = tmp_path / "checkpoint" / "at-0000000009.state"
    path.write_bytes(hashlib.sha256(harmful).digest() + harmful)
    with caplog.at_level(logging.WARNING):
        assert store.checkpoints() == [3]
    assert "is not the state of a run" in caplog.text


@pytest.mark.parametrize(
    ("party", "section", "part"),
    [
        ("active", "trainer", "random"),
        ("passive", "trainer", "random"),
        ("active", "observer", "covariates"),
    ],
)
def test_a_state_of_another_version_is_refused_by_the_missing_part(
    example: Path, tmp_path: Path, party: str, section: str, part: str
) -> None:
    def watched() -> tuple[Parties, ActiveRecorder]:
        parties = build_parties(example, [EVERY_2], [EVERY_2], runs=tmp_path)
        recorder = ActiveRecorder(parties.active_settings, tmp_path / "active")
        parties.session.lifecycle.observer = recorder
        return parties, recorder

    parties, recorder = watched()
    with recorder, pytest.raises(Lost):
        run_in_process(parties, dying(4, after=True))
    store = RunStore(tmp_path / party, keep=3)
    for place in reversed(store.checkpoints()):
        state = store.load(place)
        del state[section][part]
        store.save(place, state)
    again, recorder = watched()
    said = f"another version of splitveil than this one, {re.escape(VERSION)} .it has no '{part}'"
    with recorder, pytest.raises(StorageError, match=said):
        run_on(again)


# ---- lost at the edges of a run: before the first step, and around the last answer ----


def build(example: Path, runs: Path | None = None) -> Parties:
    return build_parties(example, [EVERY_2], [EVERY_2], runs=runs)


class Silent(InProcessPeer):
    """Says no goodbye: it is lost, or the active party is by then."""

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        raise PeerUnreachable


class LostAfterTheLast(Silent):
    def evaluate(self, activation: Activation) -> Course:
        course = self._session.evaluate(activation)
        if self._session.stage is not Stage.FINISHED:
            self._session.finish_step()
        return course


# ---- around the last answer ----


def test_an_active_party_that_was_lost_after_its_last_answer_has_all_of_the_run(
    example: Path, tmp_path: Path
) -> None:
    """The passive party has what it needs by then, and may never come back."""
    parties = build(example, tmp_path)
    run_in_process(parties, LostAfterTheLast)
    again = build(example, tmp_path)
    assert again.session.reopen()
    assert again.session.stage is Stage.FINISHED
    assert not again.session.wait_for_farewell(0)
    again.run = parties.run
    assert_same_weights(again.weights(), parties.weights())
    again.session.leave(again.session.run_id, LeaveReason.FINISHED)
    assert again.session.wait_for_farewell(0)
    assert again.session.lifecycle.error is None


def test_an_active_party_that_was_lost_after_the_goodbye_does_not_wait(
    example: Path, tmp_path: Path
) -> None:
    run_in_process(build(example, tmp_path))
    again = build(example, tmp_path)
    assert again.session.reopen()
    assert again.session.wait_for_farewell(0)


def test_a_finished_run_that_was_reopened_still_wants_a_handshake(
    example: Path, tmp_path: Path
) -> None:
    """So that a passive party that is in its last steps opens it again, and ends it."""
    run_in_process(build(example, tmp_path), Silent)
    again = build(example, tmp_path)
    again.session.reopen()
    header = BatchId(again.session.run_id, 1, 0, "test", b"d" * 16)
    with pytest.raises(NotOpen):
        again.session.evaluate(Activation(header, torch.zeros(50, 4)))


# ---- before the first step ----


class ReplacedBeforeAligning(InProcessPeer):
    anew: Parties

    def open_alignment(self) -> AlignChannel:
        if self._session is not self.anew.session:
            self._session = self.anew.session
            try:
                self._session.require_aligning()
            except NotOpen as error:
                raise PeerRestarted from error  # as this error's status means on the other side
        return super().open_alignment()


def test_with_the_active_party_killed_between_handshake_and_alignment_both_start_over(
    example: Path, tmp_path: Path
) -> None:
    parties, whole = build(example, tmp_path), build(example)
    anew = build(example, tmp_path / "anew")
    ReplacedBeforeAligning.anew = anew
    run_in_process(parties, ReplacedBeforeAligning)
    run_in_process(whole)
    anew.run = parties.run
    assert_same_weights(anew.weights(), whole.weights())


def test_a_run_that_the_active_party_has_lost_is_said_so(example: Path, tmp_path: Path) -> None:
    parties = build(example, tmp_path)
    run_in_process(parties, Silent)
    RunStore(tmp_path / "active", keep=3).forget()
    again = build(example, tmp_path)
    store = RunStore(tmp_path / "passive", keep=3)
    store.load(store.checkpoints()[0])  # as if it had been lost there
    assert not again.session.reopen()
    with pytest.raises(ProtocolError, match="--fresh"):
        run_in_process(again)


# ---- messages that come damaged ----


def damaged_gradients(
    parties: Parties, times: int, error: OutOfStep | None = None
) -> Callable[[], int]:
    exchange, asked = parties.session.exchange, 0

    def answer(activation: Activation, *_: object) -> Answer:
        nonlocal asked
        asked += 1
        if error is not None:
            raise error
        reply = exchange(activation)
        if asked > times:
            return reply
        return Answer(reply.batch._replace(step=reply.batch.step + 1), reply.values)

    parties.session.exchange = answer  # type: ignore[method-assign, assignment]
    return lambda: asked


def test_a_damaged_answer_is_asked_for_again(example: Path, port: int) -> None:
    parties, whole = build(example), build(example)
    damaged_gradients(parties, MAX_DAMAGED)
    run_over_grpc(parties, port)
    run_in_process(whole)
    assert_same_weights(parties.weights(), whole.weights())


@pytest.mark.parametrize("refuses", [False, True])
def test_what_stays_wrong_is_asked_a_few_times_more_and_ends_the_run(
    example: Path, port: int, *, refuses: bool
) -> None:
    parties = build(example)
    asked = damaged_gradients(parties, 100, OutOfStep("not now") if refuses else None)
    with pytest.raises(ProtocolError if refuses else InvalidMessage):
        run_over_grpc(parties, port)
    assert asked() == MAX_DAMAGED + 1


def test_half_a_checkpoint_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    """There are secrets in it."""
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    half = tmp_path / "checkpoint" / ".at-0000000002.state.4711.tmp"
    half.write_bytes(b"half")
    store.save(2, {"place": 2})
    assert not half.exists()
    assert store.checkpoints() == [2]


def test_a_finished_run_that_is_forgotten_fails_in_nothing_more(tmp_path: Path) -> None:
    """A party that ended with an error would be restarted, and would train again."""
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    store.save(2, {"place": 2})
    (tmp_path / "checkpoint" / "answered.log").mkdir()
    store.forget_finished()
    assert store.run() is None
    assert store.checkpoints() == []


def test_a_finished_run_that_cannot_be_forgotten_can_be_gone_on_with(tmp_path: Path) -> None:
    store = RunStore(tmp_path, keep=2)
    store.save_run({})
    store.save(2, {"place": 2})
    run = tmp_path / "checkpoint" / "run.state"
    run.unlink()
    run.mkdir()
    with pytest.raises(StorageError, match=r"run\.state: cannot be deleted"):
        store.forget_finished()
    assert store.checkpoints() == [2]
