"""The rules of one run, as the active party holds them. No I/O: gRPC and tests use the same object.

waiting -> handshaken -> training -> finished
              any state -> ended, by an error of this party or by the peer leaving

A run that has answered something never begins anew: it goes on from a checkpoint that both parties
have, and what is done again after it is answered only where the same bytes come again, with the
same noise. So neither a restart nor a peer that says it was restarted leads to a second answer.
"""

import hashlib
import hmac
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from active_party.audit_desk import AuditDesk
from active_party.defenses.report import LeakCharge
from active_party.defenses.sum_kl import leak_auc_bound
from active_party.early_stopping import EarlyStop
from active_party.ledger import ROUNDING, LeakBounds, LeakLedger
from active_party.top_trainer import StepResult, TopTrainer
from common.calibration import adaptive_calibration_error
from common.checkpoint import AnswerLog, RunStore, State, as_whole_state
from common.contract import Contract
from common.errors import (
    AlignmentError,
    BudgetExhausted,
    ContractMismatch,
    DataError,
    NotOpen,
    OutOfStep,
    PeerError,
    PeerLeft,
    SplitveilError,
    StorageError,
)
from common.privacy.leakage import auc
from common.run_course import AlignedRows, Batch, SplitName, is_checkpoint, run_course
from common.sample_order import Positions, joint_seed
from common.wire.audit_codec import AuditQuestion
from common.wire.tensor_codec import BatchHeader, TensorMessage
from common.wire.words import SPLIT_ON_WIRE
from protos import split_learning_pb2 as pb


class Stage(Enum):
    """Where a run is."""

    WAITING = "waiting for the peer"
    REJOINING = "waiting for the peer to come back"
    HANDSHAKEN = "aligning"
    TRAINING = "training"
    FINISHED = "finished"
    ENDED = "ended early"


@dataclass(frozen=True)
class Evaluation:
    """Figures of one split after one epoch. They stay on this side."""

    epoch: int
    split: SplitName
    loss: float
    auc: float
    calibration_error: float


class Offer(NamedTuple):
    """A run that the peer wants to go on with."""

    run_id: str
    places: frozenset[int]
    """Where it can go on from: numbers of batches."""


class Opening(NamedTuple):
    """What the peer is told when a run is opened."""

    run_id: str
    nonce: bytes
    resumes_at: int | None
    """Where both go on from; None for a new run."""


class SessionObserver(Protocol):
    """Who is told what happens. Called under the session's lock, off the peer's waiting time."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Both parties hold the same rows; told again where a run begins anew."""

    def on_resumed(self, epoch: int | None) -> None:
        """The run goes on from a checkpoint, in an epoch, or None where there is nothing left."""

    def on_step(self, batch: Batch, result: StepResult) -> None:
        """A training step was answered and learned from."""

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        """An epoch's training rows are through, or the run's budget is used up."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A split was evaluated."""

    def on_audit(self, question: AuditQuestion, leak_auc: float) -> None:
        """Scores of the peer were measured, and the figure is about to be sent."""

    def objection(self) -> SplitveilError | None:
        """Say why the run must not go on, if there is a reason; asked before every answer."""

    def state_dict(self) -> State:
        """Return what was seen so far, for a checkpoint."""

    def load_state_dict(self, state: State) -> None:
        """Forget what was seen since."""


TrainerFactory = Callable[[AlignedRows], TopTrainer]


class ActiveSession:
    """One run with one passive party.

    Args:
        contract: what both parties hold.
        ids: this party's canonical ids, by row of its file.
        build_trainer: makes the trainer once the common rows are known.
        observer: is told of steps and evaluations.
        draw_nonce: gives this party's share of the joint seed, 32 bytes, anew for each alignment.
        early_stop: decides after each epoch whether to go on, or None for never stopping early.
        max_sum_kl: divergence that no example may pass over the whole run.
        allow_audits: whether scores of the peer are measured, if the contract allows it, too.
        store: where checkpoints go, and come from; None for a run that cannot be gone on with.
        noise_seed: for tests only: makes fresh noise predictable.
    """

    def __init__(
        self,
        contract: Contract,
        ids: Sequence[str],
        build_trainer: TrainerFactory,
        observer: SessionObserver,
        draw_nonce: Callable[[], bytes],
        early_stop: EarlyStop | None = None,
        max_sum_kl: float = math.inf,
        *,
        allow_audits: bool = False,
        store: RunStore | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.contract = contract
        self.run_id = secrets.token_hex(8)
        self.ids = ids
        self.nonce = draw_nonce()
        self.trainer: TopTrainer | None = None
        self.ledger = LeakLedger(0)
        self.error: SplitveilError | None = None
        self._draw_nonce = draw_nonce
        self._store = store
        self._secret = _secret(noise_seed)
        self._answers = AnswerLog()
        self._rows: AlignedRows | None = None
        self._place = 0
        self._checkpoint_due = False
        self._build_trainer = build_trainer
        self._observer = observer
        self._early_stop = early_stop
        self._max_sum_kl = max_sum_kl
        self._audits = AuditDesk(is_open=allow_audits and contract.audits_allowed)
        self._audited: set[tuple[int, str, str]] = set()
        self._training_positions = np.empty(0, dtype=np.int64)
        self._stage = Stage.WAITING
        self._commitment = b""
        self._course: Iterator[Batch] = iter(())
        self._expected: Batch | None = None
        self._answered: _Answered | None = None
        self._unobserved: tuple[Batch, StepResult] | None = None
        self._scores: list[tuple[Tensor, Tensor]] = []
        self._validation_auc: float | None = None
        self._is_open = False
        self._peer_has_left = False
        self._changed = threading.Condition(threading.RLock())

    @property
    def stage(self) -> Stage:
        """Where the run is."""
        return self._stage

    @property
    def over(self) -> bool:
        """Whether nothing more will be answered."""
        return self._stage in (Stage.FINISHED, Stage.ENDED)

    @property
    def has_last_words(self) -> bool:
        """Whether a peer that is still there has to hear that the run ended early."""
        return self._is_open and self.error is not None and not isinstance(self.error, PeerError)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the run is over and say whether it is."""
        with self._changed:
            self._end_on_objection()
            return self._changed.wait_for(lambda: self.over, timeout_s)

    def wait_for_farewell(self, timeout_s: float) -> bool:
        """Wait until the run is over and say whether it is.

        A run that ended early is over at once; one that has finished when the peer has taken its
        last answer and said goodbye, for until then it may come back and ask for it again.
        """
        with self._changed:
            self._end_on_objection()
            return self._changed.wait_for(
                lambda: self._stage is Stage.ENDED or (self.over and self._peer_has_left),
                timeout_s,
            )

    # ---- opening ----

    def reopen(self) -> bool:
        """Take up the run in the store, if there is one, and say so; the peer has to come back.

        Raises:
            DataError: this party's data are not those that the run began with.
        """
        with self._changed:
            stored = None if self._store is None else self._store.run()
            if self._store is None or stored is None or not self._store.places():
                return False
            self.run_id, self.nonce = stored["run_id"], stored["nonce"]
            self._secret = stored["secret"]
            self._commitment = hashlib.sha256(stored["peer_nonce"]).digest()
            file_rows = stored["file_rows"].numpy()
            if len(file_rows) and int(file_rows.max()) >= len(self.ids):
                raise _other_data()
            self._prepare(file_rows, joint_seed(self.nonce, stored["peer_nonce"]))
            if self.trainer is None or self.trainer.data_digest != stored["data"]:
                raise _other_data()
            self._answers = self._store.answers()
            self._move_to(Stage.REJOINING)
            newest = self._store.places()[-1]
            state = self._store.load(newest)
            if state["is_last"]:  # the peer may have all that it needs, and never come back
                self._restore(newest, state)
            return True

    def handshake(
        self, party: str, canonical_contract: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        """Open a run, or go on with one. The same request again gets the same answer.

        A peer that was lost before anything was answered may begin anew; the nonce that it has
        seen is then not used again.

        Raises:
            ContractMismatch: naming the fields that differ; the run then ends on both sides.
            OutOfStep: another peer asks for a run that has begun, or this one for another run, or
                from where this party has no checkpoint.
        """
        with self._changed:
            self._refuse_if_ended()
            differing = self.contract.fields_differing_from(canonical_contract)
            if not differing and party not in self.contract.passive_parties:
                differing = ["passive_parties"]
            if differing:
                error = ContractMismatch(differing)
                if self._stage is Stage.WAITING:
                    self.end(error)
                raise error
            known = hmac.compare_digest(self._commitment, commitment)
            if offer is not None:
                return self._go_on(offer, known=known)
            if self._stage is Stage.HANDSHAKEN and known:
                return Opening(self.run_id, self.nonce, None)
            if self._place or len(self._answers):
                raise OutOfStep("a handshake for a new run, where one has begun")
            if self._stage is not Stage.WAITING:
                self.run_id, self.nonce = secrets.token_hex(8), self._draw_nonce()
            self._commitment = commitment
            self._is_open = True
            self._move_to(Stage.HANDSHAKEN)
            return Opening(self.run_id, self.nonce, None)

    def begin_alignment(self, run_id: str | None = None) -> None:
        """Make sure that it is time to align.

        Args:
            run_id: the run that is being aligned, once that is known.

        Raises:
            NotOpen: this process has not opened the run with the peer yet.
            OutOfStep: it is not, or not any more.
        """
        with self._changed:
            self._refuse_if_ended()
            self._refuse_if_not_open()
            if self._stage is not Stage.HANDSHAKEN or run_id not in (None, self.run_id):
                raise OutOfStep(f"an alignment while {self._stage.value}")

    def aligned(self, file_rows: Positions, peer_nonce: bytes) -> None:
        """Take the common rows, in any order, and get ready to train.

        Args:
            file_rows: this party's rows of the common ids, (aligned,).
            peer_nonce: the peer's share of the joint seed, opened in its hello.

        Raises:
            OutOfStep: the nonce is not the one that the handshake committed to.
            AlignmentError: too few rows for the splits.
            DataError: the common rows cannot be trained on, for instance for want of a class.
        """
        with self._changed:
            self.begin_alignment()
            committed = hashlib.sha256(peer_nonce).digest()
            if len(peer_nonce) != 32 or not hmac.compare_digest(committed, self._commitment):
                raise OutOfStep("the peer's nonce is not the one it committed to")
            rows = self._prepare(file_rows, joint_seed(self.nonce, peer_nonce))
            self._take_place(0)
            if self._store is not None and self.trainer is not None:
                self._store.save_run(
                    {
                        "run_id": self.run_id,
                        "nonce": self.nonce,
                        "peer_nonce": peer_nonce,
                        "secret": self._secret,
                        "file_rows": torch.from_numpy(rows.file_rows),
                        "data": self.trainer.data_digest,
                    }
                )
                self._answers = self._store.answers()
                self._save()
            self._move_to(Stage.TRAINING)

    # ---- training ----

    def exchange(self, message: TensorMessage) -> TensorMessage:
        """Answer a training activation with its defended gradient.

        Asked again with the same bytes, the stored answer comes back: fresh noise on a repeated
        step could be averaged away.

        Raises:
            OutOfStep: any other message than the one expected now, or a repeat with other bytes.
            NotOpen: this process has not opened the run with the peer yet.
            BudgetExhausted: the answer would tell too much; it is not given, and the run is over.
            LeakGateClosed: earlier ones told too much; the run is over.
        """
        with self._changed:
            self.finish_step()
            stored = self._stored_answer(message)
            if isinstance(stored, TensorMessage):
                return stored
            batch, trainer = self._take(message, training=True)
            answer_key = self._note_question(self._place, message.values)
            result = trainer.gradient(batch.positions, message.values, answer_key)
            self._charge(batch, result.report.charge)
            reply = TensorMessage(message.header, result.defended)
            self._answer(message, reply)
            self._unobserved = (batch, result)
            return reply

    def finish_step(self) -> None:
        """Do what the peer need not wait for: the top model's update, figures, checkpoint."""
        with self._changed:
            if self._unobserved is not None and self.trainer is not None:
                (batch, result), self._unobserved = self._unobserved, None
                self.trainer.learn()
                self._observer.on_step(batch, result)
                if batch.closes_split:
                    self._observer.on_ledger(batch.epoch, self.leak_bounds())
            if self._checkpoint_due:
                self._save()

    def leak_bounds(self) -> LeakBounds:
        """Bound what the answers so far may have told of the training examples."""
        with self._changed:
            return self.ledger.bounds(self._training_positions)

    def evaluate(self, message: TensorMessage) -> "pb.Course":
        """Score held-out rows; tell the peer only whether the run goes on.

        Raises:
            OutOfStep: as for ``exchange``.
        """
        with self._changed:
            self.finish_step()
            stored = self._stored_answer(message)
            if stored is not None and not isinstance(stored, TensorMessage):
                return stored
            batch, trainer = self._take(message, training=False)
            self._note_question(self._place, message.values)
            self._scores.append(trainer.predict(batch.positions, message.values))
            if batch.closes_split:
                self._close_split(batch)
            course = self._course_after(batch)
            self._answer(message, course)
            if batch.closes_epoch:
                self._audits.open_epoch(batch.epoch)
            if course == pb.COURSE_STOP or self._expected is None:
                self._expected = None
                # Before the answer leaves: a peer that has it may never come back.
                self._save()
                self._move_to(Stage.FINISHED)
            return course

    def audit(self, question: AuditQuestion) -> float:
        """Measure the peer's scores of the training rows, to two digits.

        Raises:
            ProtocolError: as for ``AuditDesk.answer``; the run goes on.
        """
        with self._changed:
            self.finish_step()
            self._refuse_if_ended()
            self._refuse_if_not_open()
            if question.run_id != self.run_id or self.trainer is None:
                raise OutOfStep("an audit of another run than this one")
            positions = self._training_positions
            leak_auc = self._audits.answer(
                question, positions, self.trainer.labels_of, self._note_question
            )
            asked = (question.epoch, question.attack, question.layer)
            if asked not in self._audited:
                self._audited.add(asked)
                self._observer.on_audit(question, leak_auc)
            return leak_auc

    # ---- ending ----

    def leave(self, run_id: str, reason: "pb.LeaveReason") -> None:
        """Take note that the peer ends its part.

        Raises:
            OutOfStep: it speaks of another run.
        """
        with self._changed:
            if run_id != self.run_id:
                raise OutOfStep("a peer leaves another run than this one")
            self._peer_has_left = True
            self._changed.notify_all()
            if self._stage is Stage.FINISHED:
                self._save()  # a restart must not wait for a peer that is through
            if self.over:
                return
            if reason == pb.LEAVE_REASON_ALIGNMENT_FAILED:
                self.end(AlignmentError("the peer found no usable intersection of the ids"))
            elif reason == pb.LEAVE_REASON_INTERRUPTED:
                self.end(PeerLeft("the peer was stopped by a person or a supervisor"))
            else:
                self.end(PeerLeft("the peer ended the run before its last step"))

    def end(self, error: SplitveilError) -> None:
        """End the run early; every later call of the peer gets this error's status."""
        with self._changed:
            if self.over:
                return
            self.error = error
            try:
                self.finish_step()
                if self._stage is Stage.TRAINING and self._is_between_steps:
                    self._save()
            except StorageError as unsaved:
                if not isinstance(error, StorageError):
                    unsaved.__context__ = error
                    self.error = unsaved
            self._move_to(Stage.ENDED)

    # ---- inside ----

    def _move_to(self, stage: Stage) -> None:
        self._stage = stage
        self._changed.notify_all()

    def _end_on_objection(self) -> None:
        # Asked here, so that an observer's own thread neither waits for the training nor does any.
        objection = None if self.over else self._observer.objection()
        if objection is None:
            return
        self.finish_step()
        if self._expected is not None:
            self._observer.on_ledger(self._expected.epoch, self.leak_bounds())
        self.end(objection)

    # ---- going on ----

    @property
    def _is_between_steps(self) -> bool:
        return self.trainer is not None and self.trainer.is_between_steps

    def _prepare(self, file_rows: Positions, seed: bytes) -> AlignedRows:
        """Make all that the common rows are needed for."""
        rows = AlignedRows.derive(self.contract, seed, self.ids, file_rows)
        self.trainer = self._build_trainer(rows)
        self.ledger = LeakLedger(len(rows))
        self._training_positions = rows.splits["train"]
        self._rows = rows
        self._observer.on_aligned(rows, seed)
        return rows

    def _take_place(self, place: int) -> None:
        if self._rows is None:
            raise RuntimeError("no place in a run before its rows are known")
        self._place = place
        self._course = run_course(self.contract, self._rows, place)
        self._expected = next(self._course, None)
        self._answered = None
        self._unobserved = None
        self._checkpoint_due = False

    def _go_on(self, offer: Offer, *, known: bool) -> Opening:
        opened = self._stage in (Stage.REJOINING, Stage.TRAINING, Stage.FINISHED)
        if not opened or self._store is None or offer.run_id != self.run_id or not known:
            raise OutOfStep("a peer wants to go on with another run than this one")
        self.finish_step()
        common = offer.places & set(self._store.places())
        if not common:
            raise OutOfStep("the parties have no checkpoint in common")
        place = max(common)
        self._restore(place, self._store.load(place))
        self._peer_has_left = False
        self._is_open = True
        return Opening(self.run_id, self.nonce, place)

    def _save(self) -> None:
        self._checkpoint_due = False
        if self._store is None or self.trainer is None:
            return
        state: State = {
            "trainer": self.trainer.state_dict(),
            "ledger": self.ledger.state_dict(),
            "early_stop": None if self._early_stop is None else self._early_stop.state_dict(),
            "validation_auc": self._validation_auc,
            "scores": self._scores,
            "audits": self._audits.state_dict(),
            "is_last": self._expected is None,
            "peer_has_left": self._peer_has_left,
            "observer": self._observer.state_dict(),
        }
        self._store.save(self._place, state)

    def _restore(self, place: int, state: State) -> None:
        if self.trainer is None:
            raise RuntimeError("no state without a trainer")
        with as_whole_state():
            self._load(place, state)
        self._observer.on_resumed(None if self._expected is None else self._expected.epoch)
        self._move_to(Stage.FINISHED if self._expected is None else Stage.TRAINING)

    def _load(self, place: int, state: State) -> None:
        if self.trainer is None:
            raise RuntimeError("no state without a trainer")
        self._take_place(place)
        self.trainer.load_state_dict(state["trainer"])
        self.ledger.load_state_dict(state["ledger"])
        if self._early_stop is not None:
            self._early_stop.load_state_dict(state["early_stop"])
        self._validation_auc = state["validation_auc"]
        self._scores = [(logits, labels) for logits, labels in state["scores"]]
        self._audits.load_state_dict(state["audits"])
        self._audited.clear()  # what the observer forgets now, it is told of again
        self._observer.load_state_dict(state["observer"])
        self._peer_has_left = state["peer_has_left"]
        if state["is_last"]:
            self._expected = None

    def _note_question(self, number: int, values: Tensor) -> bytes:
        """Make sure that no other question was answered here, and return the key of the answer.

        Written before anything is computed: a crash between the two costs nothing, for the same
        question gives the same answer.
        """
        place = number.to_bytes(8, "little")
        key = _keyed(self._secret, b"fingerprint", place)
        fingerprint = Poly1305.generate_tag(key, _bytes_of(values))
        earlier = self._answers.fingerprint(number)
        if earlier is None:
            self._answers.record(number, fingerprint)
        elif not hmac.compare_digest(earlier, fingerprint):
            raise OutOfStep("what was answered before came again with other bytes")
        return _keyed(self._secret, b"answer", place + fingerprint)

    def _refuse_if_not_open(self) -> None:
        if not self._is_open and self._store is not None:
            raise NotOpen(f"a message while {self._stage.value}")

    def _refuse_if_ended(self) -> None:
        self._end_on_objection()
        if self._stage is Stage.ENDED and self.error is not None:
            # Raised again for every call: its traceback would hold the frames of all of them.
            raise self.error.with_traceback(None)

    def _stored_answer(self, message: TensorMessage) -> "TensorMessage | pb.Course | None":
        self._refuse_if_ended()
        answered = self._answered
        if answered is None or message.header != answered.header:
            return None
        if not _same_bytes(message.values, answered.values):
            raise OutOfStep("a repeated step came with other bytes")
        return answered.reply

    def _take(self, message: TensorMessage, *, training: bool) -> tuple[Batch, TopTrainer]:
        expected, header = self._expected, message.header
        self._refuse_if_not_open()
        if self._stage is not Stage.TRAINING or expected is None or self.trainer is None:
            raise OutOfStep(f"a tensor while {self._stage.value}")
        if (expected.split == "train") is not training:
            raise OutOfStep(f"expected the {expected.split} rows now")
        wanted = BatchHeader(
            self.run_id,
            expected.epoch,
            expected.step,
            SPLIT_ON_WIRE[expected.split],
            expected.digest,
        )
        if header != wanted or len(message.values) != len(expected.positions):
            raise OutOfStep(
                f"expected epoch {wanted.epoch} step {wanted.step} with "
                f"{len(expected.positions)} {expected.split} rows, got epoch {header.epoch} "
                f"step {header.step} with {len(message.values)} rows"
                + ("" if header.positions_digest == wanted.positions_digest else ", other rows")
            )
        return expected, self.trainer

    def _charge(self, batch: Batch, charge: LeakCharge) -> None:
        """Enter an answer in the ledger before it leaves, or end the run instead."""
        budget = self._max_sum_kl
        reached = self.ledger.after(batch.positions, charge)
        if reached <= budget * (1 + ROUNDING):
            self.ledger.charge(batch.positions, charge)
            return
        self._observer.on_ledger(batch.epoch, self.leak_bounds())
        error = BudgetExhausted(
            f"run_budget: epoch {batch.epoch} step {batch.step} would take an example to sum_kl "
            f"{reached:.4g}, a guaranteed leak AUC of {leak_auc_bound(reached):.4f}; the budget "
            f"is sum_kl {budget:.4g}, a guaranteed leak AUC of {leak_auc_bound(budget):.4f}"
        )
        self.end(error)
        raise error

    def _answer(self, message: TensorMessage, reply: "TensorMessage | pb.Course") -> None:
        answered, self._expected = self._expected, next(self._course, None)
        self._answered = _Answered(message.header, message.values, reply)
        self._place += 1
        if self._store is None:
            self._answers.forget_before(self._place)
        if answered is not None and self._rows is not None:
            self._checkpoint_due = is_checkpoint(self.contract, self._rows, answered)

    def _close_split(self, batch: Batch) -> None:
        logits = torch.cat([logits for logits, _ in self._scores])
        labels = torch.cat([labels for _, labels in self._scores])
        self._scores.clear()
        loss = float(binary_cross_entropy_with_logits(logits, labels))
        calibration_error = adaptive_calibration_error(logits.sigmoid(), labels)
        evaluation = Evaluation(
            batch.epoch, batch.split, loss, auc(logits, labels), calibration_error
        )
        if batch.split == "validation":
            self._validation_auc = evaluation.auc
        self._observer.on_evaluation(evaluation)

    def _course_after(self, batch: Batch) -> "pb.Course":
        if (
            batch.closes_epoch
            and self._early_stop is not None
            and self._validation_auc is not None
            and self._early_stop.should_stop(self._validation_auc)
        ):
            return pb.COURSE_STOP
        return pb.COURSE_CONTINUE


@dataclass(frozen=True)
class _Answered:
    """The last question of the peer, and what it was told."""

    header: BatchHeader
    values: Tensor
    reply: "TensorMessage | pb.Course"


def _secret(noise_seed: int | None) -> bytes:
    """Return what the run's answers and fingerprints are keyed with, 32 bytes."""
    if noise_seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(b"splitveil test secret %d" % noise_seed).digest()


def _keyed(secret: bytes, purpose: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, key=secret, person=purpose).digest()


def _bytes_of(values: Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data.cast("B")


def _other_data() -> DataError:
    return DataError(
        "this party's data are not those that the run began with; put them back, or begin anew "
        "with --fresh"
    )


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    # By bits, not by value: 0.0 and -0.0 are different bytes.
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
