"""The rules of one run, as the active party holds them. No I/O: gRPC and tests use the same object.

waiting -> handshaken -> training -> finished
              any state -> ended, by an error of this party or by a peer leaving

With several passive parties every step needs all of them: a question waits until each has asked its
own, and then one gradient is computed, defended and charged for all. Whoever opens the run again
takes the others with it: they are told to open it again, too, and all go on from one place.

A run that has answered something never begins anew: it goes on from a checkpoint that both parties
have, and what is done again after it is answered only where the same bytes come again, with the
same noise. So neither a restart nor a peer that says it was restarted leads to a second answer.
Nor does it take back what the first one was charged.
"""

import hashlib
import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.ledger import ROUNDING, LeakBounds, LeakLedger, logged
from splitveil.active_party.ledger.run_ledger import RunLedger
from splitveil.active_party.run.common_rows import intersect
from splitveil.active_party.run.parties import PassiveParties, PassiveParty, Question, names_of
from splitveil.active_party.run.questions import AnsweredQuestions, run_secret
from splitveil.active_party.training.aggregation import aggregate, parts_of
from splitveil.active_party.training.early_stopping import EarlyStop
from splitveil.active_party.training.evaluation import Evaluation, Evaluator
from splitveil.active_party.training.top_trainer import StepResult, TopTrainer
from splitveil.common.alignment import Share, Splits
from splitveil.common.errors import (
    AlignmentError,
    BudgetExhausted,
    ContractMismatch,
    NothingBegun,
    NotOpen,
    OtherAnswer,
    OthersAwaited,
    OutOfStep,
    PeerError,
    PeerLeft,
    SplitveilError,
    StorageError,
)
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import (
    AlignedRows,
    Batch,
    is_checkpoint,
    place_in_words,
    run_course,
)
from splitveil.common.run.messages import (
    Activation,
    Answer,
    AuditQuestion,
    Course,
    LeaveReason,
    Offer,
    Opening,
)
from splitveil.common.run.progress import State, other_data, refusing_other_versions
from splitveil.common.run.sample_order import Positions, joint_seed
from splitveil.common.storage.answer_log import AnswerLog, ChargedAnswer
from splitveil.common.storage.run_store import RunStore
from splitveil.common.text.upper_bounds import at_most, auc_at_most

HANDSHAKE_WAIT_S = 10.0
"""How long a handshake waits for those of the other parties; then it is asked for again."""

FAREWELL_WAIT_S = 3.0
"""How long a goodbye waits for those of the other parties; then it is said again."""

_POLL_S = 0.2
"""How often a call that waits for other parties looks whether its caller is still there."""


class Stage(Enum):
    """Where a run is."""

    WAITING = "waiting for the peer"
    REJOINING = "waiting for the peer to come back"
    HANDSHAKEN = "aligning"
    TRAINING = "training"
    FINISHED = "finished"
    ENDED = "ended early"


def _always() -> bool:
    """Stand in for the question whether a caller still listens."""
    return True


class SessionObserver(Protocol):
    """Who is told what happens. Called under the session's lock, off the peer's waiting time."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Both parties hold the same rows; told again where a run begins anew."""

    def on_resumed(self, epoch: int | None) -> None:
        """The run goes on from a checkpoint, in an epoch, or None where there is nothing left."""

    def on_step(self, batch: Batch, result: StepResult) -> None:
        """A training step was answered and learned from."""

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        """So many training examples were answered about in earlier runs, which told so much."""

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        """An epoch's training rows are through, or the run's budget is used up.

        The bounds are of the answers up to there, also where more was answered before the run went
        back.
        """

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        """The run goes on from before some of its answers; all of them together told so much."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A split was evaluated."""

    def on_audit(self, question: AuditQuestion, leak_auc: float, party: str) -> None:
        """Scores of a passive party were measured, and the figure is about to be sent."""

    def on_audits_answered(self, count: int) -> None:
        """So many audits were answered, over all processes of the run and wherever it went back."""

    def objection(self) -> SplitveilError | None:
        """Say why the run must not go on, if there is a reason; asked before every answer."""

    def state_dict(self) -> State:
        """Return what was seen so far, for a checkpoint."""

    def load_state_dict(self, state: State) -> None:
        """Forget what was seen since."""


TrainerFactory = Callable[[AlignedRows], TopTrainer]


class ActiveSession:
    """One run with the contract's passive parties.

    Every call says which of them is calling; where there is one, it need not. A call that waits for
    the others ends when ``is_listening`` says that nobody waits for it any more.

    Args:
        contract: what all parties hold.
        ids: this party's canonical ids, by row of its file.
        build_trainer: makes the trainer once the common rows are known.
        observer: is told of steps and evaluations.
        draw_nonce: gives this party's share of the joint seed, 32 bytes, anew for each alignment.
        early_stop: decides after each epoch whether to go on, or None for never stopping early.
        max_sum_kl: divergence that no example may pass over the whole run.
        allow_audits: whether scores of the peer are measured, if the contract allows it, too.
        store: where checkpoints go, and come from; None for a run that cannot be gone on with.
        noise_seed: for tests only: makes fresh noise predictable.
        file_splits: split of each row of this party's file, where the contract splits by a column.
        earlier: what earlier runs may have told of some of the ids.
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
        file_splits: Splits | None = None,
        earlier: AccountBook | None = None,
    ) -> None:
        self.contract = contract
        self.file_splits = file_splits
        self.run_id = secrets.token_hex(8)
        self.ids = ids
        self.nonce = draw_nonce()
        self.trainer: TopTrainer | None = None
        self.accounts = RunLedger(LeakLedger(0))
        self.error: SplitveilError | None = None
        self._draw_nonce = draw_nonce
        self._store = store
        self._questions = AnsweredQuestions(
            run_secret(noise_seed), AnswerLog(questions=len(contract.passive_parties))
        )
        self._rows: AlignedRows | None = None
        self._place = 0
        self._checkpoint_due = False
        self._is_midway = False
        self._build_trainer = build_trainer
        self._observer = observer
        self._evaluator = Evaluator(early_stop)
        self._max_sum_kl = max_sum_kl
        self._earlier = earlier or AccountBook.empty()
        allows = allow_audits and contract.audits_allowed
        self.parties = PassiveParties(contract.passive_parties, allow_audits=allows)
        self._moved_at = time.monotonic()
        self._training_positions = np.empty(0, dtype=np.int64)
        self._stage = Stage.WAITING
        self._course: Iterator[Batch] = iter(())
        self._expected: Batch | None = None
        self._unobserved: tuple[Batch, StepResult] | None = None
        self._resumed_at: int | None = None
        self._dropped_runs: set[str] = set()
        self._changed = threading.Condition(threading.RLock())

    @property
    def stage(self) -> Stage:
        """Where the run is."""
        return self._stage

    @property
    def ledger(self) -> LeakLedger:
        """The accounts of the answers up to where the run is; ``accounts`` has those beyond."""
        return self.accounts.course

    @property
    def over(self) -> bool:
        """Whether nothing more will be answered."""
        return self._stage in (Stage.FINISHED, Stage.ENDED)

    @property
    def has_last_words(self) -> bool:
        """Whether a peer that is still there has to hear that the run ended early."""
        if self.error is None or not any(party.has_opened for party in self.parties):
            return False
        # Of a peer that ended the run only the others have to be told.
        return self.parties.are_several or not isinstance(self.error, PeerError)

    def awaited(self) -> Mapping[str, float]:
        """Return the parties whose message the run waits for, and for how many seconds."""
        with self._changed:
            waited_s = time.monotonic() - self._moved_at
            return {party.name: waited_s for party in self.parties if self._awaits(party)}

    def was_met(self, party: str) -> bool:
        """Tell whether a party has shaken hands with this process, as far as it had to."""
        return self._stage is Stage.FINISHED or self.parties.named(party).was_met

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
                lambda: (
                    self._stage is Stage.ENDED
                    or (self.over and all(party.has_left for party in self.parties))
                ),
                timeout_s,
            )

    # ---- opening ----

    def reopen(self) -> bool:
        """Take up the run in the store, if there is one, and say so; the peer has to come back.

        Raises:
            DataError: this party's data are not those that the run began with.
            StorageError: what the run has answered is not known any more.
        """
        with self._changed:
            stored = None if self._store is None else self._store.run()
            if self._store is None or stored is None:
                return False
            if not self._store.checkpoints():
                self._store.refuse_if_answered()
                return False
            self.run_id, self.nonce = stored["run_id"], stored["nonce"]
            nonces = self.parties.take_nonces(stored["peer_nonce"])
            file_rows = stored["file_rows"].numpy()
            if len(file_rows) and int(file_rows.max()) >= len(self.ids):
                raise other_data()
            self._prepare(file_rows, joint_seed(self.nonce, *nonces))
            if self.trainer is None or self.trainer.data_digest != stored["data"]:
                raise other_data()
            self._questions = AnsweredQuestions(stored["secret"], self._store.answers())
            self._move_to(Stage.REJOINING)
            newest = self._store.checkpoints()[-1]
            state = self._store.load(newest)
            self._reopen_accounts(newest, state)
            if state["is_last"]:  # the peer may have all that it needs, and never come back
                self._restore(newest, state)
            return True

    def handshake(
        self,
        party: str,
        canonical_contract: str,
        commitment: bytes,
        offer: Offer | None = None,
        is_listening: Callable[[], bool] = _always,
    ) -> Opening:
        """Open a run, or go on with one. The same request again gets the same answer.

        A peer that was lost before anything was answered may begin anew; the nonce that it has
        seen is then not used again. Of several peers each is answered when all have asked.

        Raises:
            ContractMismatch: naming the fields that differ; the run then ends on both sides.
            OutOfStep: another peer asks for a run that has begun, or this one for another run, or
                from where this party has no checkpoint.
            OthersAwaited: other peers have not asked yet; worth another attempt.
            NothingBegun: the run to go on with was begun anew before its first answer.
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
            asking = self.parties.named(party)
            known = hmac.compare_digest(asking.commitment, commitment)
            if offer is not None:
                return self._go_on(asking, offer, is_listening, known=known)
            return self._open(asking, commitment, is_listening, known=known)

    def begin_alignment(self, run_id: str | None = None, party: str | None = None) -> None:
        """Make sure that it is time to align.

        Args:
            run_id: the run that is being aligned, once that is known.
            party: who aligns.

        Raises:
            NotOpen: this process has not opened the run with the peer yet.
            OutOfStep: it is not, or not any more.
        """
        with self._changed:
            self._refuse_if_ended()
            self._refuse_if_not_open()
            is_through = self.parties.named(party).pair_rows is not None
            is_other = run_id not in (None, self.run_id)
            if self._stage is not Stage.HANDSHAKEN or is_other or is_through:
                raise OutOfStep(f"an alignment while {self._stage.value}")

    def aligned(self, file_rows: Positions, peer_nonce: bytes, party: str | None = None) -> None:
        """Take the rows that are common with one party; with those of all, get ready to train.

        Args:
            file_rows: this party's rows of the common ids, (aligned,), in any order; where there
                are several parties, in the order of the pair's tags.
            peer_nonce: the peer's share of the joint seed, opened in its hello.
            party: whose they are.

        Raises:
            OutOfStep: the nonce is not the one that the handshake committed to.
            AlignmentError: too few rows for the splits.
            DataError: the common rows cannot be trained on, for instance for want of a class.
        """
        with self._changed:
            self.begin_alignment(party=party)
            asking = self.parties.named(party)
            committed = hashlib.sha256(peer_nonce).digest()
            if len(peer_nonce) != 32 or not hmac.compare_digest(committed, asking.commitment):
                raise OutOfStep("the peer's nonce is not the one it committed to")
            asking.nonce, asking.pair_rows = peer_nonce, file_rows
            pairs = [each.pair_rows for each in self.parties if each.pair_rows is not None]
            if len(pairs) < len(self.parties):
                return
            masks = intersect(pairs) if self.parties.are_several else []
            common = pairs[0][masks[0]] if masks else pairs[0]
            if masks and len(common) < self.contract.alignment.min_aligned:
                raise AlignmentError(
                    f"too few ids to train on: {len(common)} that all parties have, "
                    f"needed {self.contract.alignment.min_aligned}"
                )
            nonces = tuple(each.nonce for each in self.parties)
            self._begin(common, nonces)
            for each, mask in zip(self.parties, masks, strict=False):
                each.share = Share(mask, nonces)
            self._move_to(Stage.TRAINING)

    def share_of(self, party: str, timeout_s: float) -> Share | None:
        """Wait for what ends a party's alignment where there are several, None if it takes longer.

        Raises:
            NotOpen: the run has to be opened again, as another party does.
        """
        with self._changed:
            asking = self.parties.named(party)
            self._changed.wait_for(
                lambda: asking.share is not None or self.over or not self.parties.have_opened,
                timeout_s,
            )
            self._refuse_if_ended()
            self._refuse_if_not_open()
            return asking.share

    # ---- training ----

    def exchange(
        self,
        activation: Activation,
        party: str | None = None,
        is_listening: Callable[[], bool] = _always,
    ) -> Answer:
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
            asking = self.parties.named(party)
            stored = self._stored_answer(asking, activation)
            if isinstance(stored, Answer):
                return stored
            batch, trainer = self._take(activation, training=True)
            if not self._is_last_to_ask(asking, activation):
                reply = self._wait_for_answer(asking, activation, is_listening)
            else:
                self._answer_all(batch, trainer)
                reply = asking.reply()
            if not isinstance(reply, Answer):
                raise OutOfStep("a training activation where held-out rows are due")
            return reply

    def finish_step(self) -> None:
        """Do what the peer need not wait for: the top model's update, figures, checkpoint."""
        with self._changed:
            if self._unobserved is not None and self.trainer is not None:
                (batch, result), self._unobserved = self._unobserved, None
                with self._changing_state():
                    self.trainer.learn()
                    self._observer.on_step(batch, result)
                    if batch.closes_split:
                        self._observer.on_ledger(batch.epoch, self._course_bounds())
            if self._checkpoint_due and not self._is_midway:
                self._save(soon=True)

    def account_book(self) -> AccountBook:
        """Return what this run and those before it may have told, by example."""
        with self._changed:
            if self._rows is None:
                return self._earlier
            return self._earlier.closed(self._ids_in_order(self._rows), self.accounts.told)

    def leak_bounds(self) -> LeakBounds:
        """Bound what all answers that were given may have told of the training examples."""
        with self._changed:
            return self.accounts.told.bounds(self._training_positions)

    def _course_bounds(self) -> LeakBounds:
        return self.accounts.course.bounds(self._training_positions)

    def evaluate(
        self,
        activation: Activation,
        party: str | None = None,
        is_listening: Callable[[], bool] = _always,
    ) -> Course:
        """Score held-out rows; tell the peer only whether the run goes on.

        Raises:
            OutOfStep: as for ``exchange``.
        """
        with self._changed:
            self.finish_step()
            asking = self.parties.named(party)
            stored = self._stored_answer(asking, activation)
            if stored is not None and not isinstance(stored, Answer):
                return stored
            batch, trainer = self._take(activation, training=False)
            if not self._is_last_to_ask(asking, activation):
                course = self._wait_for_answer(asking, activation, is_listening)
            else:
                self._tell_all(batch, trainer)
                course = asking.reply()
            if isinstance(course, Answer):
                raise OutOfStep("held-out rows where a training activation is due")
            return course

    def audit(self, question: AuditQuestion, party: str | None = None) -> float:
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
            asking = self.parties.named(party)
            leak_auc = asking.audits.answer(
                question,
                positions,
                self.trainer.labels_of,
                self._questions.note,
                self.trainer.num_classes,
            )
            self._observer.on_audits_answered(self.audits_answered)
            asked = (question.epoch, question.attack, question.layer)
            if asked not in asking.audited:
                asking.audited.add(asked)
                self._observer.on_audit(question, leak_auc, asking.name)
            return leak_auc

    @property
    def audits_answered(self) -> int:
        """How many audits were answered, over all processes of the run."""
        return len(self._questions.noted())

    # ---- ending ----

    def leave(
        self,
        run_id: str,
        reason: LeaveReason,
        party: str | None = None,
        is_listening: Callable[[], bool] = _always,
    ) -> None:
        """Take note that the peer ends its part.

        Of several, none is let go before the last has its last answer: a party that is killed just
        before the end needs all others to go back with it.

        Raises:
            OutOfStep: it speaks of another run.
            OthersAwaited: other peers are not through yet; worth another attempt.
            NotOpen: another peer goes back, and this one has to, as well.
        """
        with self._changed:
            if run_id != self.run_id:
                raise OutOfStep("a peer leaves another run than this one")
            leaving = self.parties.named(party)
            leaving.has_left = True
            self._changed.notify_all()
            if self._stage is Stage.FINISHED:
                self._save()  # a restart must not wait for a peer that is through
                if reason == LeaveReason.FINISHED:
                    self._wait_for_farewells(is_listening)
            if self.over:
                return
            who = f"passive party {leaving.name!r}" if self.parties.are_several else "the peer"
            if reason == LeaveReason.ALIGNMENT_FAILED:
                self.end(AlignmentError(f"{who} found no usable intersection of the ids"))
            elif reason == LeaveReason.INTERRUPTED:
                self.end(PeerLeft(f"{who} was stopped by a person or a supervisor"))
            else:
                self.end(PeerLeft(f"{who} ended the run before its last step"))

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
            finally:
                self._move_to(Stage.ENDED)

    # ---- inside ----

    def _awaits(self, party: PassiveParty) -> bool:
        if self.over:
            return not party.has_left
        if not self.parties.have_opened:
            return not party.has_opened
        if self._stage is Stage.HANDSHAKEN:
            return party.pair_rows is None
        return party.question is None

    def _move_to(self, stage: Stage) -> None:
        self._stage = stage
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Let every call that waits look again."""
        self._moved_at = time.monotonic()
        self._changed.notify_all()

    def _end_on_objection(self) -> None:
        # Asked here, so that an observer's own thread neither waits for the training nor does any.
        objection = None if self.over else self._observer.objection()
        if objection is None:
            return
        self.finish_step()
        if self._expected is not None:
            self._observer.on_ledger(self._expected.epoch, self._course_bounds())
        self.end(objection)

    # ---- opening, inside ----

    def _open(
        self,
        asking: PassiveParty,
        commitment: bytes,
        is_listening: Callable[[], bool],
        *,
        known: bool,
    ) -> Opening:
        """Open a new run, as soon as all parties want to."""
        if not (self._stage is Stage.HANDSHAKEN and known):
            if self._place or len(self._questions):
                raise OutOfStep("a handshake for a new run, where one has begun")
            if self._stage is not Stage.WAITING:
                self._begin_anew()
            asking.commitment = commitment
            self._note_opening(asking)
            if self.parties.have_opened:
                self._move_to(Stage.HANDSHAKEN)
            self._wait_for_others(asking, Stage.HANDSHAKEN, is_listening=is_listening)
        commitments = tuple(party.commitment for party in self.parties)
        return self._opening(None, commitments if self.parties.are_several else ())

    def _begin_anew(self) -> None:
        """Drop a run of which nothing was answered, with the nonce that a party has seen."""
        self._dropped_runs.add(self.run_id)
        self.run_id, self.nonce = secrets.token_hex(8), self._draw_nonce()
        self._resumed_at = None
        for party in self.parties:
            party.forget_alignment()
        self._move_to(Stage.WAITING)

    def _note_opening(self, asking: PassiveParty) -> None:
        asking.has_opened = asking.was_met = True
        asking.calls += 1
        self._tell_waiting()

    def _wait_for_others(
        self, asking: PassiveParty, *stages: Stage, is_listening: Callable[[], bool]
    ) -> None:
        """Wait until all have opened the run.

        Raises:
            OthersAwaited: some have not come, or this call is not its party's newest any more.
        """
        call, until = asking.calls, time.monotonic() + HANDSHAKE_WAIT_S
        while not (self.parties.have_opened and self._stage in stages):
            self._refuse_if_ended()
            is_newest = asking.has_opened and asking.calls == call
            if not is_newest or time.monotonic() > until or not is_listening():
                missing = [party for party in self.parties if not party.has_opened]
                raise OthersAwaited(f"waits for passive party {names_of(missing)}")
            self._changed.wait(_POLL_S)

    def _wait_for_farewells(self, is_listening: Callable[[], bool]) -> None:
        until = time.monotonic() + FAREWELL_WAIT_S
        while missing := [party for party in self.parties if not party.has_left]:
            if self._stage is not Stage.FINISHED or any(p.is_going_back for p in self.parties):
                raise NotOpen("a goodbye while another party goes back")
            if time.monotonic() > until or not is_listening():
                raise OthersAwaited(f"waits for the goodbye of passive party {names_of(missing)}")
            self._changed.wait(_POLL_S)

    def _begin(self, file_rows: Positions, nonces: Sequence[bytes]) -> None:
        """Get ready to train on the common rows."""
        rows = self._prepare(file_rows, joint_seed(self.nonce, *nonces))
        self._take_place(0)
        if self._store is None or self.trainer is None:
            return
        self._store.save_run(
            {
                "run_id": self.run_id,
                "nonce": self.nonce,
                "peer_nonce": b"".join(nonces),
                "secret": self._questions.secret,
                "file_rows": torch.from_numpy(rows.file_rows),
                "data": self.trainer.data_digest,
            }
        )
        self._questions = AnsweredQuestions(self._questions.secret, self._store.new_answers())
        self._save()

    # ---- going on ----

    @property
    def _is_between_steps(self) -> bool:
        is_learned = self.trainer is not None and self.trainer.is_between_steps
        return is_learned and not self._is_midway

    @contextmanager
    def _changing_state(self) -> Iterator[None]:
        """Change several parts of what a checkpoint holds; where that fails, none is saved."""
        self._is_midway = True
        yield
        self._is_midway = False

    def _prepare(self, file_rows: Positions, seed: bytes) -> AlignedRows:
        """Make all that the common rows are needed for."""
        rows = AlignedRows.derive(self.contract, seed, self.ids, file_rows, self.file_splits)
        self.trainer = self._build_trainer(rows)
        self._training_positions = rows.splits["train"]
        self._rows = rows
        self.accounts = RunLedger(self._earlier.begun(self._ids_in_order(rows), len(rows)))
        self._observer.on_aligned(rows, seed)
        if len(self._earlier):
            charged = self.ledger.num_charged(self._training_positions)
            self._observer.on_earlier_answers(charged, self.leak_bounds())
        return rows

    def _ids_in_order(self, rows: AlignedRows) -> Iterator[str]:
        return (self.ids[row] for row in rows.file_rows)

    def _take_place(self, place: int) -> None:
        if self._rows is None:
            raise RuntimeError("no place in a run before its rows are known")
        self._place = place
        self._course = run_course(self.contract, self._rows, place)
        self._expected = next(self._course, None)
        for party in self.parties:
            party.at_place()
        self._unobserved = None
        self._checkpoint_due = False

    def _go_on(
        self,
        asking: PassiveParty,
        offer: Offer,
        is_listening: Callable[[], bool],
        *,
        known: bool,
    ) -> Opening:
        """Go on with this run, as soon as all parties want to."""
        stages = (Stage.REJOINING, Stage.TRAINING, Stage.FINISHED)
        opened = self._stage in stages
        if self.parties.are_several and offer.run_id in self._dropped_runs:
            raise NothingBegun("a peer wants to go on with a run that was begun anew")
        if not opened or self._store is None or offer.run_id != self.run_id or not known:
            raise OutOfStep("a peer wants to go on with another run than this one")
        if not offer.batch_numbers & set(self._store.checkpoints()):
            raise OutOfStep("the parties have no checkpoint in common")
        self.finish_step()
        if self.parties.have_opened and not self._is_where_it_was_opened(offer):
            for party in self.parties:
                party.forget_opening()
        if not self.parties.have_opened:
            asking.offer, asking.is_going_back = offer.batch_numbers, True
            self._note_opening(asking)
            if self.parties.have_opened:
                self._resume(asking)
        self._wait_for_others(asking, *stages[1:], is_listening=is_listening)
        return self._opening(self._resumed_at)

    def _opening(self, resumes_at: int | None, commitments: tuple[bytes, ...] = ()) -> Opening:
        return Opening(self.run_id, self.contract.digest(), self.nonce, resumes_at, commitments)

    def _is_where_it_was_opened(self, offer: Offer) -> bool:
        """Tell whether a peer asks again for the answer that it was given before."""
        return self.parties.are_several and self._place == self._resumed_at in offer.batch_numbers

    def _resume(self, asking: PassiveParty) -> None:
        """Go to the newest place that all have."""
        places = set() if self._store is None else set(self._store.checkpoints())
        common = places.intersection(*(party.offer for party in self.parties))
        if not common or self._store is None:
            asking.has_opened = False
            raise OutOfStep("the parties have no checkpoint in common")
        place = max(common)
        self._resumed_at = place
        self._restore(place, self._store.load(place))
        for party in self.parties:
            party.has_left = party.is_going_back = False

    def _save(self, *, soon: bool = False) -> None:
        self._checkpoint_due = False
        if self._store is None or self.trainer is None:
            return
        state: State = {
            "trainer": self.trainer.state_dict(),
            "accounts": self.accounts.state_dict(),
            "records": len(self._questions),
            "evaluation": self._evaluator.state_dict(),
            "audits": [party.audits.state_dict() for party in self.parties],
            "is_last": self._expected is None,
            "left": [party.name for party in self.parties if party.has_left],
            "observer": self._observer.state_dict(),
        }
        save = self._store.save_soon if soon else self._store.save
        save(self._place, state)

    def _restore(self, place: int, state: State) -> None:
        if self.trainer is None:
            raise RuntimeError("no state without a trainer")
        with refusing_other_versions(), self._changing_state():
            self._load(place, state)
        self._observer.on_audits_answered(self.audits_answered)
        if self.accounts.is_behind:
            self._observer.on_answers_ahead(self.leak_bounds())
        self._observer.on_resumed(None if self._expected is None else self._expected.epoch)
        self._move_to(Stage.FINISHED if self._expected is None else Stage.TRAINING)

    def _load(self, place: int, state: State) -> None:
        if self.trainer is None:
            raise RuntimeError("no state without a trainer")
        self._take_place(place)
        self.trainer.load_state_dict(state["trainer"])
        self.accounts.go_back(state["accounts"]["course"])
        self._catch_up()
        self._evaluator.load_state_dict(state["evaluation"])
        for party, audits in zip(self.parties, state["audits"], strict=True):
            party.audits.load_state_dict(audits)
            party.audited.clear()  # what the observer forgets now, it is told of again
            party.has_left = party.name in state["left"]
        self._observer.load_state_dict(state["observer"])
        if state["is_last"]:
            self._expected = None

    def _reopen_accounts(self, place: int, state: State) -> None:
        """Charge again what was answered after a checkpoint, by a process that is no more."""
        with refusing_other_versions():
            self.accounts.reopen(state["accounts"], self._charged_since(state["records"]))
        self._place = place
        self._catch_up()
        for party in self.parties:
            party.audits.remember(self._questions.noted())

    def _charged_since(self, count: int) -> Iterator[tuple[Positions, ChargedAnswer]]:
        if self._rows is None:
            raise RuntimeError("no charges before the rows are known")
        course: Iterator[Batch] = iter(())
        following: int | None = None
        for record in self._questions.since(count):
            if record.number != following:  # rarely: places come in order until the run goes back
                course = run_course(self.contract, self._rows, record.number)
            batch, following = next(course), record.number + 1
            if batch.split == "train":
                yield batch.positions, record.charge

    def _catch_up(self) -> None:
        if not self._questions.is_answered(self._place):
            self.accounts.catch_up()

    def _refuse_if_not_open(self) -> None:
        if not self.parties.have_opened and (self._store is not None or self.parties.are_several):
            raise NotOpen(f"a message while {self._stage.value}")

    def _refuse_if_ended(self) -> None:
        self._end_on_objection()
        if self._stage is Stage.ENDED and self.error is not None:
            # Raised again for every call: its traceback would hold the frames of all of them.
            raise self.error.with_traceback(None)

    def _stored_answer(
        self, asking: PassiveParty, activation: Activation
    ) -> Answer | Course | None:
        self._refuse_if_ended()
        return asking.stored_reply(activation)

    def _is_last_to_ask(self, asking: PassiveParty, activation: Activation) -> bool:
        """Take a question that is due, and tell whether all parties have asked now."""
        fingerprint = self._questions.fingerprint(self._place, asking.index, activation.values)
        asking.ask(Question(activation, fingerprint))
        return self.parties.have_asked

    def _wait_for_answer(
        self, asking: PassiveParty, activation: Activation, is_listening: Callable[[], bool]
    ) -> Answer | Course:
        """Wait until the other parties have asked, too, and the last of them computes the answer.

        Raises:
            NotOpen: the run has to be opened again, as another party does; or the caller has given
                up, which nobody hears any more.
        """
        while True:
            stored = self._stored_answer(asking, activation)
            if stored is not None:
                return stored
            self._refuse_if_not_open()
            if asking.question is None or asking.question.activation.batch != activation.batch:
                raise OutOfStep("a question that was overtaken by the party's next one")
            if not is_listening():
                raise NotOpen("a party gave up while it waited for others")
            self._changed.wait(_POLL_S)

    def _take_questions(self) -> tuple[Tensor, list[bytes]]:
        """Return the aggregate of what all ask, and the fingerprints of their questions."""
        questions = [party.question for party in self.parties if party.question is not None]
        values = [question.activation.values for question in questions]
        fingerprints = [question.fingerprint for question in questions]
        return aggregate(self.contract.aggregation, values), fingerprints

    def _answer_all(self, batch: Batch, trainer: TopTrainer) -> None:
        """Compute one gradient, and give each party its part of what the defense makes of it."""
        activation, fingerprints = self._take_questions()
        answer_key = self._questions.answer_key(self._place, fingerprints)
        with self._changing_state():
            result = trainer.gradient(batch.positions, activation, answer_key)
            reply = self._questions.reply_tag(self._place, result.defended)
            self._charge(batch, result.report.charge, fingerprints, reply)
            parts = parts_of(self.contract.aggregation, result.defended, len(self.parties))
            for party, part in zip(self.parties, parts, strict=True):
                if party.question is not None:
                    party.answer(Answer(party.question.activation.batch, part))
            self._go_to_next()
        self._unobserved = (batch, result)

    def _tell_all(self, batch: Batch, trainer: TopTrainer) -> None:
        """Score held-out rows, and tell every party whether the run goes on."""
        activation, fingerprints = self._take_questions()
        self._questions.record(self._place, fingerprints)
        with self._changing_state():
            evaluation = self._evaluator.add(batch, *trainer.predict(batch.positions, activation))
            if evaluation is not None:
                self._observer.on_evaluation(evaluation)
            is_over = self._evaluator.ends_training(batch)
            course = Course.STOP if is_over else Course.CONTINUE
            for party in self.parties:
                party.answer(course)
            self._go_to_next()
        if batch.closes_epoch:
            for party in self.parties:
                party.audits.open_epoch(batch.epoch)
        if is_over or self._expected is None:
            self._expected = None
            # Before the answer leaves: a peer that has it may never come back.
            self._save()
            self._move_to(Stage.FINISHED)

    def _take(self, activation: Activation, *, training: bool) -> tuple[Batch, TopTrainer]:
        expected, got = self._expected, activation.batch
        self._refuse_if_not_open()
        if self._stage is not Stage.TRAINING or expected is None or self.trainer is None:
            raise OutOfStep(f"a tensor while {self._stage.value}")
        if (expected.split == "train") is not training:
            raise OutOfStep(f"expected the {expected.split} rows now")
        wanted = expected.identity(self.run_id)
        if got != wanted or len(activation.values) != len(expected.positions):
            raise OutOfStep(
                f"expected {place_in_words(wanted.epoch, wanted.step)} with "
                f"{len(expected.positions)} {expected.split} rows, got "
                f"{place_in_words(got.epoch, got.step)} with {len(activation.values)} rows"
                + ("" if got.positions_digest == wanted.positions_digest else ", other rows")
            )
        return expected, self.trainer

    def _charge(
        self, batch: Batch, charge: LeakCharge, fingerprints: Sequence[bytes], reply: bytes
    ) -> None:
        """Enter an answer in log and ledger before it leaves, or end the run instead.

        The trainer has computed it by now, and must not compute it again: whatever goes wrong ends
        the run, which may go on from its checkpoint.
        """
        entry, told = logged(charge), self.accounts.told
        is_repeated = self._questions.is_repeated(self._place, entry, reply)
        if self._questions.is_answered(self._place) and not is_repeated:
            self._end_over_other_answer(batch)
        reached = told.most(batch.positions) if is_repeated else told.after(batch.positions, charge)
        if reached > self._max_sum_kl * (1 + ROUNDING):
            self._end_over_budget(batch, reached)
        try:
            self._questions.record(self._place, fingerprints, entry, reply)
        except StorageError as error:
            self.end(error)
            raise
        self.accounts.enter(batch.positions, entry)

    def _end_over_other_answer(self, batch: Batch) -> NoReturn:
        error = OtherAnswer(
            f"{place_in_words(batch.epoch, batch.step)}: the same question would get another "
            f"answer than before: arithmetic is not what it was, as with another device, "
            f"torch_threads or version of a library; go back to those, or begin anew with --fresh, "
            f"and let the other party do so, too"
        )
        self.end(error)
        raise error

    def _end_over_budget(self, batch: Batch, reached: float) -> NoReturn:
        budget = self._max_sum_kl
        self._observer.on_ledger(batch.epoch, self._course_bounds())
        error = BudgetExhausted(
            f"run_budget: {place_in_words(batch.epoch, batch.step)} would take an example to "
            f"sum_kl {at_most(reached)}, a guaranteed leak AUC of "
            f"{auc_at_most(leak_auc_bound(reached))}; the budget is sum_kl {at_most(budget)}, a "
            f"guaranteed leak AUC of {auc_at_most(leak_auc_bound(budget))}"
        )
        self.end(error)
        raise error

    def _go_to_next(self) -> None:
        answered, self._expected = self._expected, next(self._course, None)
        self._place += 1
        self._tell_waiting()
        self._catch_up()
        if self._store is None:
            self._questions.forget_before(self._place)
        if answered is not None and self._rows is not None:
            self._checkpoint_due = is_checkpoint(self.contract, self._rows, answered)
