"""Answers the questions of a run whose rows are known: one question, one answer, ever.

The answer to a training step is one gradient for all parties: their activations are aggregated, the
top model's gradient is defended, the leak budget admits it, and each party gets its part. Held-out
rows are scored, and every party hears only whether the run continues.

Nothing here ends the run, saves it or reports it: failures are raised to the session.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import LeakBudget
from splitveil.active_party.run.parties import PassivePeer, PassivePeers, Reply
from splitveil.active_party.training.aggregation import aggregate, parts_of
from splitveil.active_party.training.evaluation import Evaluation, Evaluator, HeldOutPredictions
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.errors import OtherAnswer, OutOfStep
from splitveil.common.models.device import to_host
from splitveil.common.privacy.charge import Charge
from splitveil.common.record.answer_log import FIRST_RESUMPTION_NUMBER, AnswerLog
from splitveil.common.run.course import HELD_OUT, Batch, batch_in_words, run_course
from splitveil.common.run.messages import Activation, Answer, Course, DefendedGradient
from splitveil.common.run.progress import Progress, State
from splitveil.common.run.sample_order import Positions

MAX_RESUMPTIONS = 100
"""Times that a run goes back over answers that it has given: a peer that measures how long this
party takes for the same work could average over more of them."""


class AnsweredQuestions:
    """The questions that a run has answered, so that none is ever answered in two ways.

    After a restart, a repeated step is answered only if the same bytes come again, and then with
    the same noise: its key is derived from the questions and a secret of the run. Such an answer
    reveals nothing new and is not charged again.
    """

    def __init__(self, secret: bytes, log: AnswerLog) -> None:
        self.secret = secret
        self.log = log  # fingerprints of questions and replies, and the charges

    def fingerprint(self, batch_number: int, asker: int, values: Tensor) -> bytes:
        """Return 16 bytes for a question; OutOfStep if another one about the batch was answered."""
        key, known = batch_number * self.log.questions + asker, self.log.at(batch_number)
        fingerprint = _tag(self.secret, key, values, b"fingerprint")
        if known and not hmac.compare_digest(known.fingerprints[asker], fingerprint):
            raise OutOfStep("a question that was answered before came again with other bytes")
        return fingerprint

    def answer_key(self, batch_number: int, fingerprints: Sequence[bytes]) -> bytes:
        """Return the key of the noise of the answer to all parties' questions, 32 bytes."""
        question = batch_number.to_bytes(8, "little") + b"".join(fingerprints)
        return _keyed(self.secret, b"answer", question)

    def admission(
        self,
        batch_number: int,
        fingerprints: Sequence[bytes],
        charge: Charge,
        answer: Tensor,
        where: str,
    ) -> tuple[bool, Callable[[], None]]:
        """Return whether this very answer was given before, and a function that logs it.

        Arithmetic that is not repeatable, or another device, gives another answer to the same
        question, possibly at the same charge. Since both carry the same noise, together they would
        reveal their difference without any noise, so that it is refused.
        """
        tag = _tag(self.secret, batch_number, answer, b"reply")
        known = self.log.at(batch_number)
        if known is None:
            return False, partial(self.log.record, batch_number, fingerprints, charge, tag)
        if (known.charge, known.reply) != (charge, tag):
            raise OtherAnswer(
                f"{where}: the same question would get another answer than before: the arithmetic "
                f"has changed, as with another device, torch_threads, autocast, compile or version "
                f"of a library; restore those, or start over with --fresh at both parties"
            )
        return True, lambda: None

    def note_resumption(self) -> None:
        """Note that the run goes back over a batch; OutOfStep after ``MAX_RESUMPTIONS`` times."""
        count = self.log.num_resumptions()
        if count >= MAX_RESUMPTIONS:
            raise OutOfStep(
                f"the run has gone back to a checkpoint {count} times, as often as it may: start "
                f"over with --fresh at both parties"
            )
        self.log.record(FIRST_RESUMPTION_NUMBER + count, [])


class Answering:
    """The part of a run between the alignment and the last answer."""

    questions: AnsweredQuestions
    """Set once the run is stored: that deletes the log of an earlier one."""

    def __init__(
        self,
        run_id: str,
        parties: PassivePeers,
        progress: Progress,
        trainer: TopTrainer,
        budget: LeakBudget,
        evaluator: Evaluator,
    ) -> None:
        self.contract, self.rows = progress.contract, progress.rows
        self.progress = progress
        self.trainer = trainer
        self.budget = budget  # decides whether an answer may leave
        self.phases = self.trainer.phases
        """Charges the time of this party's work."""
        self._run_id = run_id
        self._parties = parties
        self._evaluator = evaluator
        self.unlearned: tuple[Batch, Step] | None = None
        """The step that the top model has still to learn from."""
        self.is_midway = False
        """True if a change of the state has failed, so that it must not be saved."""

    @property
    def test_predictions(self) -> HeldOutPredictions | None:
        """The last predictions of the test rows; None if this process has not made any."""
        return self._evaluator.test_predictions

    @property
    def has_answered(self) -> bool:
        return self.progress.batch_number > 0 or len(self.questions.log) > 0

    @property
    def is_between_steps(self) -> bool:
        due = self.progress.due
        is_transferring = due is not None and due.split == "transfer" and due.step > 0
        return self.trainer.is_between_steps and not (self.is_midway or is_transferring)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change more than one part of a checkpoint's state; if that fails, none is saved."""
        self.is_midway = True
        yield
        self.is_midway = False

    # ---- one question ----

    def take(self, asking: PassivePeer, activation: Activation, *, is_training: bool) -> Batch:
        due = self.progress.due
        if due is None:
            raise OutOfStep("a tensor after the last batch")
        if due.is_answered is not is_training:
            raise OutOfStep(f"expected a batch of {due.split} now")
        wanted, got, rows = due.identity(self._run_id), activation.batch, len(activation.values)
        if due.split in ("transfer", "sums"):  # as many bytes as it takes
            rows = len(due.positions)
        if got != wanted or rows != len(due.positions):
            raise OutOfStep(
                f"expected {batch_in_words(wanted.epoch, wanted.step)} with "
                f"{len(due.positions)} {due.split} rows, got "
                f"{batch_in_words(got.epoch, got.step)} with {rows} rows"
                + ("" if got.rows_digest == wanted.rows_digest else ", other rows")
            )
        number, asked = self.progress.batch_number, activation.values
        log = self.questions.log
        is_first = due.split == "transfer" and due.step == 0
        if is_first and len(log) > log.num_resumptions():
            raise OutOfStep(
                "the noisy sums were released for a transfer, and the passive party has lost its "
                "part of it: it needs a new run, which is charged again (--fresh at both parties)"
            )
        if due.split == "sums":  # the same few bytes, whatever bits came before
            asked = self.trainer.sums.released
        fingerprint = self.questions.fingerprint(number, asking.index, asked)
        asking.ask(activation, fingerprint)
        return due

    def answer(self, batch: Batch) -> Sequence[Reply]:
        """Answer the training step that every party has asked about; each party's part, in order.

        The trainer must not compute a step twice: after an error here the run has to end, and may
        resume from its checkpoint.
        """
        asked, aggregation = self._parties.questions, self.contract.aggregation
        fingerprints = [party.fingerprint for party in self._parties]
        where = batch_in_words(batch.epoch, batch.step)
        if batch.split == "transfer":
            with self.changing():
                answer = self.trainer.sums.transfer(batch, asked[0].values)
                transferred = [Answer(asked[0].batch, answer)]
                self._reply(transferred)
            return transferred
        number = self.progress.batch_number
        key = self.questions.answer_key(number, fingerprints)
        step: Step | None = None
        with self.changing():
            if batch.split in ("labels", "sums"):
                defended = self.trainer.released_labels(batch.positions, key)
                sent = defended.gradient
                parts: Sequence[DefendedGradient] = [sent] * len(asked)
            else:
                cut = aggregate(aggregation, [question.values for question in asked])
                step = self.trainer.gradient(batch.positions, cut, key)
                defended, sent = step.defended, to_host(step.defended.gradient)
                parts = parts_of(aggregation, sent, len(asked))
            charge = defended.charge.narrowed(self.budget.peers)
            is_repeated, log = self.questions.admission(number, fingerprints, charge, sent, where)
            self.budget.admit(batch.positions, charge, where, is_repeated=is_repeated, log=log)
            if batch.split == "sums":  # one release, even after a power failure
                self.questions.log.sync()
            replies = [Answer(q.batch, part) for q, part in zip(asked, parts, strict=True)]
            self._reply(replies)
        if step is not None:
            self.unlearned = batch, step
        return replies

    def evaluate(self, batch: Batch) -> tuple[Evaluation | None, Sequence[Reply]]:
        """Score held-out rows, or note a one-shot run's; figures come with a split's last batch."""
        asked, aggregation = self._parties.questions, self.contract.aggregation
        cut = aggregate(aggregation, [question.values for question in asked])
        fingerprints = [party.fingerprint for party in self._parties]
        # A crash between this and the answer costs nothing: the same questions get the same answer.
        if self.questions.log.at(self.progress.batch_number) is None:
            self.questions.log.record(self.progress.batch_number, fingerprints)
        evaluation, stops = None, False
        with self.changing():
            if self.contract.is_one_shot:
                self.trainer.note(torch.from_numpy(batch.positions.copy()), cut)
            else:
                predicted = self.trainer.predict(batch.positions, cut)
                evaluation = self._evaluator.add(batch, *predicted)
                stops = self._evaluator.ends_training(batch)
            replies = [Course.STOP if stops else Course.CONTINUE] * len(asked)
            self._reply(replies)
            if stops:
                self.progress.finish()
        return evaluation, replies

    def measure_held_out(self) -> Iterator[Evaluation]:
        """Measure the top model on the held-out rows whose activations are remembered."""
        for split in HELD_OUT:
            found = self.trainer.logits(self.rows.splits[split])
            if found is not None:
                yield self._evaluator.measure(split, 0, *found)

    def _reply(self, replies: Sequence[Reply]) -> None:
        for party, reply in zip(self._parties, replies, strict=True):
            party.answer(reply)
        self.progress.advance()
        self._catch_up()
        if not self.progress.store.keeps:
            # They can never come again.
            self.questions.log.forget_before(self.progress.batch_number)

    # ---- checkpoints ----

    def account_book(self) -> AccountBook:
        """Return the accounts of this run and the runs before it, by example."""
        book = self.budget.account_book()
        if book is self.budget.earlier:
            return book
        return book.of_run(self._run_id + self.questions.log.replies.hex())

    def state_dict(self) -> State:
        """Return all state that a step changes, except the observer's."""
        return {
            "trainer": self.trainer.state_dict(),
            "accounts": self.budget.state_dict(),
            "records": len(self.questions.log),
            "evaluation": self._evaluator.state_dict(),
            "is_last": self.progress.is_over,
            "left": [party.name for party in self._parties if party.has_left],
        }

    def load_state_dict(self, batch_number: int, state: State) -> None:
        """Go to the checkpoint after some batches; all answers given since stay charged."""
        self.unlearned = None
        self.progress.go_to(batch_number)
        for party in self._parties:
            party.forget_questions()
        self.trainer.load_state_dict(state["trainer"])
        self.budget.go_back(state["accounts"]["course"])
        self._catch_up()
        self._evaluator.load_state_dict(state["evaluation"])
        if state["is_last"]:
            self.progress.finish()

    def reopen(self, batch_number: int, state: State) -> None:
        """Charge again the answers that an ended process gave after its newest checkpoint."""
        self.trainer.check_device(state["trainer"])
        charged = self._charged_since(state["records"])
        self.budget.reopen(state["accounts"], charged)
        self.progress.go_to(batch_number)
        self._catch_up()

    def _charged_since(self, count: int) -> Iterator[tuple[Positions, Charge]]:
        course: Iterator[Batch] = iter(())
        following: int | None = None
        records = self.questions.log.since(count)
        for record in (one for one in records if one.number < FIRST_RESUMPTION_NUMBER):
            if record.number != following:  # rare: numbers ascend until the run goes back
                course = run_course(self.contract, self.rows, record.number)
            batch, following = next(course), record.number + 1
            if batch.is_answered:
                yield batch.positions, record.charge

    def _catch_up(self) -> None:
        if self.questions.log.at(self.progress.batch_number) is None:
            self.budget.catch_up()


def run_secret(noise_seed: int | None) -> bytes:
    """Return the secret that keys a run's answers and fingerprints, 32 bytes."""
    if noise_seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(b"splitveil test secret %d" % noise_seed).digest()


def _keyed(secret: bytes, purpose: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, key=secret, person=purpose).digest()


def _tag(secret: bytes, number: int, values: Tensor, purpose: bytes) -> bytes:
    key = _keyed(secret, purpose, number.to_bytes(8, "little"))
    return Poly1305.generate_tag(
        key, values.contiguous().view(torch.uint8).numpy().reshape(-1).data
    )
