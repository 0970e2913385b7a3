"""Runs that begin with noisy sums: what a peer gets of one label, asked in whatever way."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from splitveil.active_party.defenses import AnswerKeys, Charge, Secrets, noisy_sums
from splitveil.active_party.defenses.dp_bounds import leak_auc_of_mu
from splitveil.active_party.defenses.interface import DefenseContext
from splitveil.active_party.defenses.noisy_sums import NoisySums
from splitveil.active_party.ledger.account_book import LEDGER, AccountBook
from splitveil.active_party.planned import plan_of
from splitveil.active_party.run.parties import Reply
from splitveil.common.errors import (
    BudgetExhausted,
    OutOfStep,
    ProtocolError,
    SettingsError,
    StorageError,
)
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.answer_log import AnswerLog
from splitveil.common.record.model_files import save_tensors
from splitveil.common.run import course
from splitveil.common.run.messages import Activation, Answer, DefendedGradient, bytes_of, tensor_of
from splitveil.library.in_process import InProcessPeer
from splitveil.library.simulating import simulate
from splitveil.passive_party import components_trainer
from tests.run.test_one_shot import ONE_SHOT, RELEASE, SCORE, assert_goes_on
from tests.support.peers import DiesAt, Lost, dying, go_back, leave
from tests.support.runs import Parties, build_parties, run_in_process, write_example
from tests.support.tables import write_classes, write_numbers

SUMS = (*ONE_SHOT, "contract.release=noisy_sums")
RATIO = 1 / (np.sqrt(2) * stats.norm.ppf(0.6))  # a leak AUC of .60


def with_sums(folder: Path, runs: Path | None = None, *active: str) -> Parties:
    return build_parties(
        folder, [*SUMS, RELEASE, *active], [*SUMS, SCORE, "adversary=null"], runs=runs
    )


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "TRANSFER_ROWS", 50)


# ---- a transfer in the clear ----


class ClearSender:
    """Sees all bits, and has no part of the sums: the same course, and the same bits in each."""

    request = b"request"

    def __init__(self, width: int, targets: int) -> None:
        self.sums = np.zeros((width, targets), np.uint32)
        self.reply = b""

    def accept(self, reply: bytes) -> None:
        self.reply = reply

    def answer(self, extension: bytes, values: NDArray[np.uint32]) -> bytes:
        bits = np.frombuffer(extension, np.uint8).reshape(len(values), len(self.sums))
        return (bits.T.astype(np.uint32) @ values).tobytes()


class ClearReceiver:
    reply = b"reply"

    def __init__(self, width: int, request: bytes, targets: int) -> None:
        assert request == ClearSender.request
        self.sums = np.zeros((width, targets), np.uint32)

    def extend(self, bits: NDArray[np.bool_]) -> bytes:
        return bits.astype(np.uint8).tobytes()

    def take(self, answer: bytes) -> None:
        self.sums += np.frombuffer(answer, np.uint32).reshape(self.sums.shape)


@pytest.fixture
def in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_sums, "Sender", ClearSender)
    monkeypatch.setattr(components_trainer, "Receiver", ClearReceiver)


# ---- what one label moves ----


def defense_of(
    labels: Sequence[float], num_classes: int = 2, ratio: float = RATIO, rows_of_person: int = 1
) -> NoisySums:
    """Return the label owner's side for some rows, with the same draws for the same answer key."""
    context = DefenseContext(
        (4,), num_classes, is_one_shot=True, releases_sums=True, rows_of_person=rows_of_person
    )
    secrets = Secrets(None, AnswerKeys(), labels=torch.tensor(labels))
    return NoisySums(ratio, Charge(1.0), context, secrets)


def key_of(defense: NoisySums, key: int) -> None:
    keys = AnswerKeys()
    keys.begin(key.to_bytes(32, "little"))
    defense._noise._keys = keys


def transferred(defense: NoisySums, bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Transfer all rows at once, and return the peer's part of the sums, (width, values)."""
    rows, width = np.arange(len(bits)), bits.shape[1]
    begins, ends = (
        course.Batch(0, "transfer", step, rows, b"", bool(step), closes_epoch=False)
        for step in (0, 1)
    )
    begun = bytes_of(defense.transfer(begins, tensor_of(width.to_bytes(4, "little"))))
    receiver = vars(components_trainer)["Receiver"](width, begun, defense._values.shape[1])
    reply, extension = receiver.reply, receiver.extend(bits)
    question = len(reply).to_bytes(4, "little") + reply + extension
    receiver.take(bytes_of(defense.transfer(ends, tensor_of(question))))
    own: NDArray[np.int64] = receiver.sums.astype(np.int64)
    return own


def noisy(defense: NoisySums, own: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """Return the noisy sums, as the peer reads them from the last message."""
    key_of(defense, key)
    message = bytes_of(defense.released_labels(torch.empty(0)).gradient)
    theirs = np.frombuffer(message[16:], "<u4").reshape(own.shape)
    steps = (own - theirs + 2**31) % 2**32 - 2**31
    return np.asarray(steps / np.frombuffer(message[8:16], "<f8"))


def auc_of(ones: NDArray[np.float64], zeros: NDArray[np.float64]) -> float:
    return float(stats.mannwhitneyu(ones, zeros).statistic / len(ones) / len(zeros))


@pytest.mark.parametrize(
    ("num_classes", "releases", "tolerance"),
    [(2, 1000, 0.026), (3, 1000, 0.026), pytest.param(2, 10_000, 0.0082, marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("in_the_clear")
def test_all_bits_for_one_row_meet_the_bound_of_its_label_and_do_not_pass_it(
    num_classes: int, releases: int, tolerance: float
) -> None:
    """The sums are then that label and noise alone: without the noise, the AUC is 1.

    The tolerance is two standard errors of an AUC of so many releases for each value of the label.
    """
    bits = np.zeros((5, 7), np.bool_)
    bits[2] = True
    scores = []
    for label, seeds in ((1, range(releases)), (0, range(releases, 2 * releases))):
        defense = defense_of([1, 0, label, 1, 0], num_classes)
        own = transferred(defense, bits)
        found = np.array([noisy(defense, own, seed) for seed in seeds])
        # The score of the best test: the sums along what the label moves.
        scores.append(found[:, :, -1].sum(1) - (found[:, :, 0].sum(1) if num_classes > 2 else 0))
    assert auc_of(*scores) == pytest.approx(0.6, abs=tolerance)


def test_of_tables_that_differ_in_one_label_the_peer_sees_the_same_but_for_the_mechanism() -> None:
    """Its part of the sums is random, and the noisy sums have one law, which a shift moves."""
    bits = np.ones((3, 64), np.bool_)
    bits[0, :32] = bits[2, 32:63] = False
    own, found = [], []
    for label in (0, 1):
        several = [defense_of([0, label, 1], ratio=0.5) for _ in range(4)]
        parts = [transferred(defense, bits) for defense in several]
        own.append(np.array(parts)[:, :, 0] / 2**32)
        sums = [
            noisy(one, part, 100 * label + key)
            for key, (one, part) in enumerate(zip(several, parts, strict=True))
        ]
        found.append(np.array(sums)[:, :, 0])
    for part in own:
        assert stats.kstest(part.ravel(), "uniform").pvalue > 1e-4  # other ones in every process
    of_zero, of_one = ((sums - bits[2]) / 4 for sums in found)
    assert stats.kstest(of_zero.ravel(), "norm").pvalue > 0.01
    assert stats.kstest(of_one.ravel() - 1 / 4, "norm").pvalue > 0.01
    assert stats.ks_2samp(of_zero.ravel(), of_one.ravel()).pvalue < 0.05


@pytest.mark.parametrize("num_classes", [1, 2, 4])
def test_sums_are_those_of_the_values_and_noise_of_the_stated_deviation(num_classes: int) -> None:
    generator = np.random.default_rng(1)
    labels = generator.random(300) if num_classes == 1 else generator.integers(0, num_classes, 300)
    bits = generator.random((300, 40)) < 0.3
    defense = defense_of(labels.tolist(), num_classes, ratio=2)
    own = transferred(defense, bits)
    values = labels[:, None] * 1.0
    if num_classes > 2:
        values = (labels[:, None] == np.arange(num_classes - 1)) * 1.0
    noise = np.array([noisy(defense, own, key) for key in range(30)]) - bits.T @ values
    deviation = 2 * np.sqrt(40 * (2 if num_classes > 2 else 1))
    stated = bytes_of(defense.released_labels(torch.empty(0)).gradient)[:8]
    assert np.frombuffer(stated, "<f8") == pytest.approx(deviation, rel=1e-12)
    assert noise.std() == pytest.approx(deviation, rel=0.06)
    assert abs(noise.mean()) < 0.1 * deviation


# ---- one release, whatever the peer does ----


class Notes(InProcessPeer):
    """Keeps what comes down, by pass and step."""

    seen: ClassVar[dict[tuple[str, int], bytes]]

    def receive_gradient(self) -> Answer:
        found = super().receive_gradient()
        self.seen[found.batch.split, found.batch.step] = bytes_of(found.values)
        return found


def noting(*kinds: type[InProcessPeer], **members: Any) -> type[Notes]:
    return type("Noting", (*kinds, Notes), {"seen": {}, **members})


@pytest.mark.usefixtures("in_the_clear")
def test_a_run_that_ends_at_every_message_ends_with_the_same_bits(tmp_path: Path) -> None:
    write_example(tmp_path, rows=160)
    assert_goes_on(tmp_path, lambda runs: with_sums(tmp_path, runs), messages=8)


def test_a_peer_that_lost_the_answer_gets_the_same_bytes(tmp_path: Path) -> None:
    """Both parties are killed after the label owner has answered."""
    write_example(tmp_path, rows=160)
    runs = tmp_path / "kept"
    first = with_sums(tmp_path, runs)
    dying = noting(DiesAt, at=4, after=True)
    with pytest.raises(Lost):
        run_in_process(first, dying)
    again = with_sums(tmp_path, runs)
    again.session.reopen()
    second = noting()
    run_in_process(again, second)
    assert list(second.seen) == [("sums", 0)]
    assert second.seen["sums", 0] == dying.seen["sums", 0]
    assert again.session.leak_bounds().sum_kl.max == 0.25


def test_a_party_s_part_of_the_sums_is_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    """It is stored before the rest is asked for."""
    write_example(tmp_path, rows=160)
    runs = tmp_path / "kept"
    with pytest.raises(Lost):
        run_in_process(with_sums(tmp_path, runs), dying(4, after=False))
    stored = sorted(runs.glob("*/checkpoint/at-0000000003.state"))
    assert [path.parent.parent.name for path in stored] == ["active", "passive"]
    assert [path.stat().st_mode & 0o777 for path in stored] == [0o600, 0o600]


def test_after_a_restart_the_bits_are_those_that_were_transferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eigenvectors are not the same to the last digit elsewhere, and a row may lie between."""
    write_example(tmp_path, rows=160)
    whole = with_sums(tmp_path, tmp_path / "whole")
    run_in_process(whole)
    runs = tmp_path / "kept"
    with pytest.raises(Lost):
        run_in_process(with_sums(tmp_path, runs), dying(4, after=False))
    found = ComponentsBottom.before_labels

    def elsewhere(model: ComponentsBottom, *given: Any) -> Any:
        moments = found(model, *given)
        model.of_bits = -model.of_bits
        return moments

    monkeypatch.setattr(ComponentsBottom, "before_labels", elsewhere)
    again = with_sums(tmp_path, runs)
    again.session.reopen()
    run_in_process(again)
    first, second = (one.run.trainer for one in (whole, again))
    assert first is not None
    assert second is not None
    assert np.array_equal(first.score.of_bits, second.score.of_bits)


def test_a_peer_that_lost_its_part_of_the_sums_needs_a_new_run(tmp_path: Path) -> None:
    """Neither another release for other bits, nor the same noise for them."""
    write_example(tmp_path, rows=160)
    runs = tmp_path / "kept"
    first = with_sums(tmp_path, runs)
    with pytest.raises(Lost):
        run_in_process(first, dying(4, after=True))
    for path in (runs / "passive" / "checkpoint").glob("at-*.state"):
        if path.name != "at-0000000000.state":
            path.unlink()
    again = with_sums(tmp_path, runs)
    again.session.reopen()
    asked = noting()
    with pytest.raises(OutOfStep, match="it needs a new run, which is charged again"):
        run_in_process(again, asked)
    assert asked.seen == {}
    assert again.session.leak_bounds().sum_kl.max == 0.25


def test_a_run_that_is_put_back_by_a_backup_draws_other_noise_for_another_transfer(
    tmp_path: Path,
) -> None:
    """The same noise on the sums of other bits would give a label exactly by a difference."""
    write_example(tmp_path, rows=160)
    runs = tmp_path / "kept"
    with pytest.raises(Lost):  # before anything was transferred
        run_in_process(with_sums(tmp_path, runs), dying(1, after=False))
    drawn, books = [], []
    for part in ("one", "other"):
        folder = tmp_path / part
        shutil.copytree(runs, folder)
        parties = with_sums(tmp_path, folder)
        parties.session.reopen()
        peer = noting()
        run_in_process(parties, peer)
        trainer = parties.session.lifecycle.answering.trainer
        theirs = torch.tensor(
            np.frombuffer(peer.seen["sums", 0], "<u4", offset=16).astype(np.int64)
        )
        drawn.append((trainer.sums.own.flatten() - theirs) % 2**32)
        books.append(parties.session.lifecycle.account_book())
        again = with_sums(tmp_path, folder)
        again.session.reopen()  # the same book, read from the files
        books.append(again.session.lifecycle.account_book())
    assert (drawn[0] != drawn[1]).all()
    # Both copies count for a later run that is given their books.
    assert AccountBook.together(books, b"").worst().sum_kl == 0.5


def test_a_run_that_is_put_back_by_a_backup_draws_other_noise_at_another_strength(
    tmp_path: Path,
) -> None:
    """The same normal numbers at two deviations would give the sums exactly."""
    write_example(tmp_path, rows=160)
    runs = tmp_path / "kept"
    with pytest.raises(Lost):  # all is transferred, and nothing is released
        run_in_process(with_sums(tmp_path, runs), dying(4, after=False))
    drawn = []
    for ratio in (2.79, 2.5):
        shutil.copytree(runs, folder := tmp_path / str(ratio))
        parties = with_sums(tmp_path, folder, f"defense.mechanism.noise_ratio={ratio}")
        parties.session.reopen()
        peer = noting()
        run_in_process(parties, peer)
        deviation, grid = np.frombuffer(peer.seen["sums", 0], "<f8", count=2)
        theirs = np.frombuffer(peer.seen["sums", 0], "<u4", offset=16).astype(np.int64)
        own = parties.session.lifecycle.answering.trainer.sums.own.flatten().numpy()
        steps = (own - theirs + 2**31) % 2**32 - 2**31
        drawn.append(steps / (deviation * grid))
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1


def test_nothing_leaves_before_its_charge_survives_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A charge that is lost would let another transfer have a second release."""
    write_example(tmp_path, rows=160)
    sync = AnswerLog.sync

    def fails_with_a_charge(log: AnswerLog) -> None:
        if len(log):
            raise StorageError("the disk is full")
        sync(log)

    monkeypatch.setattr(AnswerLog, "sync", fails_with_a_charge)
    parties = with_sums(tmp_path, tmp_path / "kept")
    (peer,), left = parties.session.parties, []
    answer = peer.answer

    def answers(reply: Reply) -> None:
        left.append(reply)
        answer(reply)

    monkeypatch.setattr(peer, "answer", answers)
    with pytest.raises(StorageError):
        run_in_process(parties)
    assert len(left) == 3  # the answers of the transfer


def test_no_checkpoint_is_of_the_middle_of_a_transfer(tmp_path: Path) -> None:
    """A process that began there would have no part in it."""
    write_example(tmp_path, rows=160)
    parties = with_sums(tmp_path, tmp_path / "kept")
    with pytest.raises(Lost):
        run_in_process(parties, dying(2, after=True))
    leave(parties.session)
    assert parties.session.lifecycle.checkpoints == {0}
    stray = course.Batch(0, "transfer", 2, np.arange(50), b"", False, closes_epoch=False)
    with pytest.raises(OutOfStep, match="no transfer has begun"):
        defense_of([0, 1]).transfer(stray, tensor_of(bytes(8)))


def test_returns_to_before_a_transfer_are_counted(tmp_path: Path) -> None:
    """They have the same work done again, though nothing was released; then the run goes on."""
    write_example(tmp_path, rows=160)
    parties = with_sums(tmp_path, tmp_path / "kept")
    with pytest.raises(Lost):
        run_in_process(parties, dying(2, after=True))
    go_back(parties.session)
    log = parties.session.lifecycle.answering.questions.log
    assert log.num_resumptions() == 1
    again = with_sums(tmp_path, tmp_path / "kept")
    again.session.reopen()
    run_in_process(again)
    assert again.session.leak_bounds().sum_kl.max == 0.25


class Alters(Notes):
    """Sends something else in place of a question."""

    of_pass: ClassVar[tuple[str, int]]
    altered: ClassVar[Callable[[Activation], Sequence[Activation]]]

    def _exchange(self, activation: Activation) -> Answer:
        batch = activation.batch
        is_meant = (batch.split, batch.step) == self.of_pass
        sent = type(self).altered(activation) if is_meant else [activation]
        return [super(Alters, self)._exchange(one) for one in sent][-1]


def once_more(sent: Activation) -> Activation:
    return sent


def message(change: Callable[[bytes], bytes]) -> Callable[[Activation], Activation]:
    return lambda sent: replace(sent, values=tensor_of(change(bytes_of(sent.values))))


def of_batch(**changes: Any) -> Callable[[Activation], Activation]:
    return lambda sent: replace(sent, batch=sent.batch._replace(**changes))


def flipped(sent: bytes) -> bytes:
    return bytes([sent[0]]) + sent[1:-1] + bytes([sent[-1] ^ 1])


STRAY: dict[str, tuple[tuple[str, int], Sequence[Callable[[Activation], Activation]]]] = {
    "a transfer of no bits": (("transfer", 0), [message(lambda _: bytes(4))]),
    "one of too many": (("transfer", 0), [message(lambda _: b"\xff" * 4)]),
    "one of a width in other bytes": (("transfer", 0), [message(lambda sent: sent + b"0")]),
    "another width afterwards": (
        ("transfer", 0),
        [once_more, message(lambda sent: bytes([sent[0] + 1]) + sent[1:])],
    ),
    "a shorter reply": (
        ("transfer", 1),
        [message(lambda sent: (8).to_bytes(4, "little") + sent[4:])],
    ),
    "a shorter extension": (("transfer", 1), [message(lambda sent: sent[:-1])]),
    "a longer one": (("transfer", 2), [message(lambda sent: sent + b"0")]),
    "one that does not fit together": (("transfer", 2), [message(flipped)]),
    "nothing": (("transfer", 2), [message(lambda _: bytes(1))]),
    "other bits of the same rows": (("transfer", 2), [once_more, message(flipped)]),
    "the same rows as the next": (("transfer", 1), [once_more, of_batch(step=2)]),
    "other rows": (("transfer", 2), [of_batch(rows_digest=bytes(16))]),
    "a transfer for sums": (("transfer", 2), [of_batch(split="sums", step=0)]),
    "sums of other rows": (("sums", 0), [of_batch(rows_digest=bytes(16))]),
    "sums twice in other words": (("sums", 0), [once_more, message(lambda sent: sent + b"0")]),
    "noisy labels besides": (("sums", 0), [once_more, of_batch(split="labels")]),
}


@pytest.mark.parametrize("what", STRAY)
def test_a_question_that_is_not_due_is_refused(tmp_path: Path, what: str) -> None:
    """Its labels are charged at most once, and no second message of noisy sums comes."""
    write_example(tmp_path, rows=160)
    where, sent = STRAY[what]
    parties = with_sums(tmp_path)
    altered = staticmethod(lambda one: [change(one) for change in sent])
    peer = noting(Alters, of_pass=where, altered=altered)
    with pytest.raises(ProtocolError) as refused:
        run_in_process(parties, peer)
    assert "person-" not in str(refused.value)
    is_released = where[0] == "sums" and sent[0] is once_more
    assert parties.session.leak_bounds().sum_kl.max == (0.25 if is_released else 0)
    assert ("sums", 0) not in peer.seen


def stated(what: str, number: float, sent: bytes) -> bytes:
    place = 0 if what == "noise" else 8
    return sent[:place] + np.array(number, "<f8").tobytes() + sent[place + 8 :]


ANSWERS: dict[str, tuple[tuple[str, int], Callable[[bytes], bytes]]] = {
    "a shorter request": (("transfer", 0), lambda sent: sent[:-1]),
    "a shorter answer": (("transfer", 1), lambda sent: sent[:-4]),
    "an answer of more values than scores": (("transfer", 1), lambda sent: 2 * sent),
    "sums of more": (("sums", 0), lambda sent: sent + sent[16:]),
    "fewer sums": (("sums", 0), lambda sent: sent[:-4]),
    "noise that is not a number": (
        ("sums", 0),
        lambda sent: np.array(np.nan, "<f8").tobytes() + sent[8:],
    ),
    "no grid": (("sums", 0), lambda sent: sent[:8] + bytes(8) + sent[16:]),
    **{
        f"{what} of {number}": (("sums", 0), partial(stated, what, number))
        for what, number in [
            ("noise", 1e160),
            ("noise", 1e154),
            ("noise", 1e-3),
            ("noise", 2.0**31),
            ("grid", 1e-160),
            ("grid", 0.5),
            ("grid", 3.0),
            ("grid", 2.0**21),
        ]
    },
}


@pytest.mark.parametrize("what", ANSWERS)
def test_a_label_owner_s_message_that_does_not_fit_ends_the_run(tmp_path: Path, what: str) -> None:
    write_example(tmp_path, rows=160)
    where, change = ANSWERS[what]

    class Receives(InProcessPeer):
        def receive_gradient(self) -> Answer:
            found = super().receive_gradient()
            if (found.batch.split, found.batch.step) != where:
                return found
            return Answer(found.batch, DefendedGradient(tensor_of(change(bytes_of(found.values)))))

    with pytest.raises(ProtocolError):
        run_in_process(with_sums(tmp_path), Receives)


# ---- charges and refusals ----


def test_each_run_with_noisy_sums_is_charged_besides(tmp_path: Path) -> None:
    write_example(tmp_path, rows=160)
    first = with_sums(tmp_path)
    run_in_process(first)
    bounds = first.session.leak_bounds()
    assert bounds.sum_kl.max == bounds.sum_kl.mean == 0.25
    assert bounds.guarantee.max == pytest.approx(leak_auc_of_mu(0.5))
    save_tensors(tmp_path, LEDGER, first.session.lifecycle.account_book().state_dict())
    again = with_sums(tmp_path, None, f"earlier_ledgers=[{tmp_path}/checkpoint]")
    run_in_process(again)
    assert again.session.leak_bounds().guarantee.max == pytest.approx(leak_auc_of_mu(0.5**0.5))


def test_a_budget_forbids_noisy_sums_above_it(tmp_path: Path) -> None:
    write_example(tmp_path, rows=160)
    asked = noting()
    refused = with_sums(tmp_path, None, "run_budget={leak_auc: 0.6}")
    with pytest.raises(BudgetExhausted, match="epoch 1 step 1"):
        run_in_process(refused, asked)
    assert ("sums", 0) not in asked.seen
    assert refused.session.leak_bounds().sum_kl.max == 0


def test_a_plan_says_that_the_bound_is_computational(tmp_path: Path) -> None:
    write_example(tmp_path, rows=160)
    settings = with_sums(tmp_path).active_settings
    planned = plan_of(settings, PartyData.of(settings))
    assert planned.bounds_in_short().endswith(": 0.639 for anybody")
    assert any("cannot break the oblivious transfer" in one for one in planned.brief)


REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "too many classes": (
        ["contract.cut_shape=[70]", "contract.scores=64"],
        "scores: noisy_sums has at most 63: expected noisy_labels",
    ),
    "a run with gradients": (["contract.exchange=gradients"], "release: only a run with"),
    "several passive parties": (
        ["contract.passive_parties=[passive, other]"],
        "release: noisy_sums needs a single passive party",
    ),
    "rows that only one party knows": (
        ["contract.alignment.kind=one_sided"],
        "noisy_sums would name the common rows",
    ),
    "no defense": (["defense={name: none}"], "expected noisy_label by gaussian noise, as contract"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_do_not_fit_are_refused(example: Path, what: str) -> None:
    changed, reads = REFUSED[what]
    agreed = [one for one in changed if one.startswith("contract.")]
    with pytest.raises(SettingsError, match=reads):
        build_parties(example, [*SUMS, RELEASE, *changed], [*SUMS, SCORE, *agreed])


def test_a_bottom_model_that_cannot_use_noisy_sums_is_refused(example: Path) -> None:
    with pytest.raises(SettingsError, match="charged for noisy_sums that nobody uses"):
        build_parties(example, [*SUMS, RELEASE], [*SUMS, "bottom_model={kind: pca}"])


KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "two classes": (partial(write_example, rows=1500), {"contract.cut_shape": [1]}),
    "classes": (partial(write_classes, rows=3000), {"contract.scores": 3}),
    "numbers": (partial(write_numbers, rows=3000), {"contract.cut_shape": [2]}),
}


@pytest.mark.parametrize("what", KINDS)
def test_a_run_leaves_models_figures_and_a_report(tmp_path: Path, what: str) -> None:
    write, changed = KINDS[what]
    write(tmp_path)
    settings = {
        "contract.exchange": "one_shot",
        "contract.release": "noisy_sums",
        "passive.bottom_model": {"kind": "score"},
        "active.serving.fallback": True,
        "active.optimizer.learning_rate": 0.02,
    } | changed
    (run,) = simulate(tmp_path, defense="noisy_label", settings=settings, threads=1)
    assert run.bounds["anybody"] == pytest.approx(leak_auc_of_mu(0.5))
    figures = run.summary
    if what == "numbers":
        assert figures["test_rmse"] < figures["test_rmse_alone"]
    else:
        assert figures["test_auc"] > figures["test_auc_alone"]
    exposure = json.loads((Path(run.path) / "passive" / "exposure.json").read_text())
    assert bool(exposure["values"]) == (what != "classes")
    page = run.report().read_text()
    assert "Sums of the training rows' labels with noise were sent" in page.replace("&#39;", "'")
    assert "As long as its cryptography holds, whatever the other company does" in page
    assert "cannot break the oblivious transfer" in page
