"""The log of answers: its content, and that damage is detected before anything is answered."""

import errno
import hashlib
import math
import os
import struct
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
import torch

from splitveil.active_party.run.answering import AnsweredQuestions
from splitveil.common.errors import OtherAnswer, OutOfStep, StorageError
from splitveil.common.privacy.charge import NO_CHARGE, Adversary, Charge
from splitveil.common.record.answer_log import FIRST_RESUMPTION_NUMBER, AnswerLog
from splitveil.common.record.model_files import delete_saved
from splitveil.common.record.run_store import RunStore
from splitveil.common.run.state_bytes import state_from_bytes, state_to_bytes
from tests.support.peers import MARVELL, answered, parties_in
from tests.support.runs import Parties, run_in_process

FRESH = Charge(0.25)
REPEATED = Charge(
    0.5, b"i" * 32, 1.0, Adversary.HONEST_BUT_CURIOUS, leak_auc=0.7, dominating_mu=1.5
)
HEADER_BYTES, RECORD_BYTES = 19, 114


def log_of_three(path: Path) -> AnswerLog:
    log = AnswerLog.create(path)
    log.record(0, [b"f" * 16], FRESH)
    log.record(1, [b"g" * 16], REPEATED)
    log.record(FIRST_RESUMPTION_NUMBER + 7, [b"h" * 16])
    return log


def test_it_outlives_its_process_and_half_a_record(tmp_path: Path) -> None:
    path = tmp_path / "answered.log"
    log_of_three(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == HEADER_BYTES + 3 * RECORD_BYTES
    for torn in (b"t", b"torn", b"t" * (RECORD_BYTES - 1)):
        with path.open("ab") as file:
            file.write(torn)
        again = AnswerLog(path)
        assert len(again) == 3
        assert [record.charge for record in again.since(0)] == [FRESH, REPEATED, NO_CHARGE]
        assert again.at(5) is None
    again.record(2, [b"i" * 16], FRESH)
    found = AnswerLog(path)
    assert [record.number for record in found.since(1)] == [1, FIRST_RESUMPTION_NUMBER + 7, 2]
    assert found.num_resumptions() == 1


def test_what_can_no_more_be_asked_again_stays_in_the_file(tmp_path: Path) -> None:
    log = log_of_three(tmp_path / "answered.log")
    log.forget_before(1)
    later = AnswerLog(tmp_path / "answered.log", first_batch=1)
    for one in (log, later):
        assert one.at(0) is None
        assert one.at(1) is not None
        assert one.at(FIRST_RESUMPTION_NUMBER + 7) is not None
        assert len(list(one.since(0))) == len(one) == 3


def test_noise_is_keyed_by_the_secret_the_batch_and_every_question(tmp_path: Path) -> None:
    """Otherwise two answers have the same noise, and their difference has none."""
    log = AnswerLog.create(tmp_path / "answered.log", questions=2)

    def key(secret: bytes, batch: int, *prints: bytes) -> bytes:
        return AnsweredQuestions(secret, log).answer_key(batch, prints)

    asked = (b"s" * 32, 4, b"f" * 16, b"g" * 16)
    others = [
        (b"t" * 32, *asked[1:]),
        (asked[0], 5, *asked[2:]),
        (*asked[:2], b"h" * 16, asked[3]),
        (*asked[:3], b"h" * 16),
    ]
    assert key(*asked) == key(*asked)
    assert len({key(*asked), *(key(*other) for other in others)}) == 5


def test_a_question_has_one_answer_and_the_same_answer_one_charge(tmp_path: Path) -> None:
    log = AnswerLog.create(tmp_path / "answered.log", questions=2)
    questions = AnsweredQuestions(b"s" * 32, log)
    asked = [torch.ones(3), torch.zeros(3)]
    prints = [questions.fingerprint(4, asker, values) for asker, values in enumerate(asked)]

    def admit(charge: Charge = FRESH, answer: torch.Tensor = asked[0]) -> bool:
        is_repeated, record = questions.admission(4, prints, charge, answer, "step 5")
        record()
        return is_repeated

    assert [admit(), admit()] == [False, True]
    assert len(log) == 1
    with pytest.raises(OutOfStep, match="other bytes"):
        questions.fingerprint(4, 1, torch.tensor([0.0, 0.0, -0.0]))
    assert questions.fingerprint(4, 1, asked[1]) == prints[1]
    for other in ((REPEATED, asked[0]), (FRESH, asked[1])):  # arithmetic that is not repeatable
        with pytest.raises(OtherAnswer, match="step 5: the same question would get another answer"):
            admit(*other)
    assert [record.charge for record in log.since(0)] == [FRESH]
    with pytest.raises(ValueError, match="2 questions"):
        log.record(5, [b"f" * 16] * 3)


def test_a_full_disk_leaves_no_part_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answered.log"
    log = log_of_three(path)
    whole = path.read_bytes()

    class Filling(FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if len(data) < RECORD_BYTES:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:30])

    with monkeypatch.context() as patched:
        patched.setattr("splitveil.common.record.answer_log.FileIO", Filling)
        with pytest.raises(StorageError, match="cannot be written: No space left"):
            log.record(2, [b"i" * 16], FRESH)
    assert path.read_bytes() == whole
    assert len(log) == 3
    log.record(2, [b"i" * 16], FRESH)
    assert len(AnswerLog(path)) == 4


@pytest.mark.parametrize("soon", [False, True])
def test_what_a_checkpoint_counts_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, soon: bool
) -> None:
    """Otherwise a power failure could leave a log with fewer answers, which is refused."""
    sync, synced = os.fsync, list[int]()

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    with RunStore(tmp_path, keep=2, in_background=True) as store:
        store.save_run({"run_id": "a"})
        store.new_answers().record(0, [b"f" * 16], FRESH)
        monkeypatch.setattr("os.fsync", note)
        (store.save_soon if soon else store.save)(1, {"records": 1})
    folder = tmp_path / "checkpoint"
    log, state = ((folder / name).stat().st_ino for name in ("answered.log", "at-0000000001.state"))
    assert synced.index(log) < synced.index(state)


def test_a_ledger_that_cannot_be_deleted_is_an_error_of_the_disk(tmp_path: Path) -> None:
    delete_saved(tmp_path, "ledger.safetensors")
    (tmp_path / "checkpoint" / "ledger.safetensors").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"ledger\.safetensors: cannot be deleted"):
        delete_saved(tmp_path, "ledger.safetensors")


# ---- damage ----


def test_a_charge_is_read_from_its_own_bytes_alone() -> None:
    """A figure that is no number would pass every budget, and a cut name would be another noise."""
    for charge in (FRESH, REPEATED, NO_CHARGE, Charge(math.inf)):
        assert Charge.from_bytes(charge.to_bytes()) == charge
    whole, nan = REPEATED.to_bytes(), struct.pack("<d", math.nan)
    for damaged in (
        nan + whole[8:],
        whole[:16] + nan + whole[24:],
        whole[:64] + b"\3" + whole[65:],
    ):
        with pytest.raises(ValueError, match="a charge"):
            Charge.from_bytes(damaged)
    with pytest.raises(ValueError, match="noise_digest"):
        Charge(0.5, b"a name that is no digest")


FIRST, SECOND = (
    slice(HEADER_BYTES + place * RECORD_BYTES, HEADER_BYTES + (place + 1) * RECORD_BYTES)
    for place in range(2)
)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a byte inserted": lambda data: data[:100] + b"x" + data[100:],
    "a byte lost": lambda data: data[:100] + data[101:],
    "a bit flipped": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "a record lost": lambda data: data[: SECOND.start] + data[SECOND.stop :],
    "records swapped": lambda data: (
        data[:HEADER_BYTES] + data[SECOND] + data[FIRST] + data[SECOND.stop :]
    ),
    "empty": lambda data: b"",
    "half of it zeros": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "fewer records than the checkpoint counts": lambda data: data[: FIRST.stop],
}


def log_of_killed(example: Path, runs: Path) -> Path:
    answered(example, runs, MARVELL, messages=4)
    return runs / "active" / "checkpoint" / "answered.log"


def started_again(example: Path, runs: Path) -> Parties:
    return parties_in(example, runs, MARVELL)


def test_a_damaged_log_is_refused_in_one_line_that_says_how_to_recover(
    example: Path, tmp_path: Path
) -> None:
    path = log_of_killed(example, tmp_path)
    whole = path.read_bytes()
    for name, damage in DAMAGE.items():
        path.write_bytes(damage(whole))
        with pytest.raises(StorageError, match="--fresh at both parties") as caught:
            started_again(example, tmp_path).session.reopen()
        assert "\n" not in str(caught.value), name
        assert "answered.log" in str(caught.value), name


def test_so_is_a_missing_one_and_that_of_another_run(example: Path, tmp_path: Path) -> None:
    path = log_of_killed(example, tmp_path / "one")
    other = log_of_killed(example, tmp_path / "two").read_bytes()
    path.unlink()
    with pytest.raises(
        StorageError, match="is missing: the answers already given are no longer known"
    ):
        started_again(example, tmp_path / "one").session.reopen()
    path.write_bytes(other)
    with pytest.raises(StorageError, match="record 1 is damaged"):
        started_again(example, tmp_path / "one").session.reopen()


def test_a_record_that_a_crash_left_half_written_is_cut_off(example: Path, tmp_path: Path) -> None:
    path = log_of_killed(example, tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    again = started_again(example, tmp_path)
    assert again.session.reopen()
    run_in_process(again)
    assert again.session.stage.value == "finished"


def test_answers_of_which_no_checkpoint_is_left_are_not_given_a_second_time(
    example: Path, tmp_path: Path
) -> None:
    log = log_of_killed(example, tmp_path)
    for state in log.parent.glob("at-*.state"):
        state.write_bytes(b"")
    with pytest.raises(
        StorageError, match=r"no checkpoint can be read.*no ledger.*--fresh at both parties"
    ):
        started_again(example, tmp_path).session.reopen()
    log.write_bytes(log.read_bytes()[:HEADER_BYTES])  # killed before it had answered anything
    assert not started_again(example, tmp_path).session.reopen()


def rewritten(path: Path, version: int) -> None:
    found = state_from_bytes(path.read_bytes()[32:])
    content = state_to_bytes({"version": version, "state": found["state"]})
    path.write_bytes(hashlib.sha256(content).digest() + content)


@pytest.mark.parametrize("party", ["active", "passive"])
def test_a_damaged_run_state_says_what_is_lost_and_how_to_recover(
    example: Path, tmp_path: Path, party: str
) -> None:
    log_of_killed(example, tmp_path)
    path = tmp_path / party / "checkpoint" / "run.state"
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], bytes(len(whole)), whole[:40] + b"x" + whole[41:]):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"is damaged.*no ledger.*--fresh at both parties"):
            RunStore(tmp_path / party, keep=3).run()
    path.write_bytes(whole)
    assert RunStore(tmp_path / party, keep=3).run() is not None
    rewritten(path, version=1)
    with pytest.raises(StorageError, match=r"another version of splitveil; resume.*--fresh"):
        RunStore(tmp_path / party, keep=3).run()
