"""The lifecycle of a run: it begins, is saved, resumes, steps forward and ends.

Every consequence is here: the run changes its stage, checkpoints are written and the observer is
informed. The modules below return or raise. The stages of a run, and the transitions between them:

    waiting    -> handshaken  rejoining  ended
    rejoining  -> waiting  training  finished  ended
    handshaken -> waiting  training  ended
    training   -> waiting  training  finished  ended
    finished   -> training  finished

A run waits, shakes hands, aligns, trains and finishes. A process that finds a stored run rejoins it
instead. From every stage before the last answer the run can end early, by an error of this party
or because a passive party leaves. As long as nothing has been answered, a passive party may start
over, which leads back to waiting. A passive party that resumes leads back to training, even after
the last answer: it may have lost it.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import LeakBudget, Limit
from splitveil.active_party.run.answering import AnsweredQuestions, Answering, run_secret
from splitveil.active_party.run.parties import (
    JointRows,
    PartyStage,
    PassivePeer,
    PassivePeers,
    Reply,
)
from splitveil.active_party.training.evaluation import EarlyStop, Evaluation, Evaluator
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common import errors
from splitveil.common.errors import OutOfStep
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record.answer_log import AnswerLog
from splitveil.common.run import progress
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import Phase, State
from splitveil.common.run.sample_order import NONCE_BYTES, Positions, Splits, joint_seed

_POLL_S = 0.2
"""Interval at which a waiting call checks whether its caller is still connected."""

ResultT = TypeVar("ResultT")

Listening = Callable[[], bool]
"""Returns whether the caller of a call is still connected."""


class Stage(Enum):
    """The stage of a run; the value completes the sentence "a message while …"."""

    WAITING = "waiting for the peer"
    REJOINING = "waiting for the peer to come back"
    HANDSHAKEN = "aligning"
    TRAINING = "training"
    FINISHED = "finished"
    ENDED = "ended early"

    @property
    def is_over(self) -> bool:
        """True if nothing more will be answered for the first time."""
        return self in (Stage.FINISHED, Stage.ENDED)


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.HANDSHAKEN, Stage.REJOINING, Stage.ENDED}),
    Stage.REJOINING: frozenset({Stage.WAITING, Stage.TRAINING, Stage.FINISHED, Stage.ENDED}),
    Stage.HANDSHAKEN: frozenset({Stage.WAITING, Stage.TRAINING, Stage.ENDED}),
    Stage.TRAINING: frozenset({Stage.WAITING, Stage.TRAINING, Stage.FINISHED, Stage.ENDED}),
    Stage.FINISHED: frozenset({Stage.TRAINING, Stage.FINISHED}),
    Stage.ENDED: frozenset(),
}
"""The stages that may follow each stage; the drawing above is this table."""


class RunStages:
    """The stage of one run, which changes only along the table, and the lock of the run.

    It is held as a context; calls wait in it for the stage to change, and for each other.
    """

    def __init__(self, parties: PassivePeers) -> None:
        self.current = Stage.WAITING
        self._parties = parties
        lock = threading.RLock()
        self._progressed = threading.Condition(lock)
        """For calls, which wait for each other."""
        self._moved = threading.Condition(lock)
        """For what waits for the end of a stage, and need not wake at every answer."""
        self._moved_at = time.monotonic()

    def __enter__(self) -> None:
        self._moved.acquire()

    def __exit__(self, *_: object) -> None:
        self._moved.release()

    def refusal_of(self, message: str) -> OutOfStep:
        """Return the error for a message that came at the wrong stage."""
        return OutOfStep(f"{message} while {self.current.value}")

    def move_to(self, stage: Stage) -> None:
        """Change the stage, and wake every waiting call."""
        with self:
            if stage not in TRANSITIONS[self.current]:
                raise RuntimeError(f"no run goes from {self.current.name} to {stage.name}")
            self.current = stage
            self.note_progress()
            self._moved.notify_all()

    def wake(self) -> None:
        """Wake every waiting call, to check its condition again; the caller holds the lock."""
        self._progressed.notify_all()
        self._moved.notify_all()

    def note_progress(self) -> None:
        """Note that the run has moved on: the waiting time of its parties is counted from now."""
        self._moved_at = time.monotonic()
        self._progressed.notify_all()

    def awaited(self) -> Mapping[str, float]:
        """Return the parties whose message the run waits for, and for how many seconds."""
        with self:
            waited_s = time.monotonic() - self._moved_at
            return {party.name: waited_s for party in self._parties if self._awaits(party)}

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition that only another stage or a goodbye can bring about."""
        with self:
            return self._moved.wait_for(until, timeout_s)

    def wait_for_caller(
        self,
        find: Callable[[], ResultT],
        is_listening: Listening,
        patience_s: float = math.inf,
    ) -> ResultT | None:
        """Wait until something is found; None if the caller is gone or out of patience."""
        deadline = time.monotonic() + patience_s
        while (found := find()) is None:
            if time.monotonic() > deadline or not is_listening():
                return None
            self._progressed.wait(_POLL_S)
        return found

    def _awaits(self, party: PassivePeer) -> bool:
        if self.current.is_over:
            return not party.has_left
        if not self._parties.have_opened:
            return not party.has_opened
        if self.current is Stage.HANDSHAKEN:
            return party.pair is None
        return party.question is None


class SessionObserver(Protocol):
    """Receives the events of a run, under the session's lock and while no party waits for it."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """All parties hold the same rows; called again if the run starts over."""

    def on_resumed(self, epoch: int | None) -> None:
        """Note a resume from a checkpoint, in an epoch, or at the run's end if that is None."""

    def on_step(self, batch: Batch, step: Step) -> None:
        """Note that a training step was answered, and that the top model has learned from it."""

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        """Earlier runs have answered about some of the training examples, within these bounds."""

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        """Note that an epoch's training rows have been handled, or that the run ends within it.

        Answers from before the run resumed, to questions still to come, are not in these bounds.
        """

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        """Note a resume from before some of the answers; the bounds are for all answers."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Note the evaluation of a held-out split."""

    def on_epoch(self, epoch: int) -> None:
        """Note that an epoch is over, including its evaluation."""

    def state_dict(self) -> State:
        """Return the observer's state, for a checkpoint."""

    def load_state_dict(self, state: State) -> None:
        """Restore a state, and forget everything seen since."""


class Unobserved:
    """Receives the events of a run and does nothing about them."""

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    on_aligned = on_resumed = on_step = on_epoch = on_evaluation = _ignore
    on_earlier_answers = on_ledger = on_answers_ahead = _ignore
    load_state_dict = _ignore

    def state_dict(self) -> State:
        return {}


TrainerFactory = Callable[[AlignedRows], TopTrainer]

Counting = Callable[[AccountBook], AbstractContextManager[AccountBook]]
"""Counts earlier runs again, given those counted before; no other run begins in this context."""


class OwnRows(NamedTuple):
    ids: Sequence[str]
    """Canonical id of each row."""

    splits: Splits | None = None


@dataclass(frozen=True)
class OwnRules:
    """The label owner's own decisions about a run."""

    early_stop: EarlyStop | None = None
    """Decides after each epoch whether training continues; None never stops early."""

    earlier: AccountBook = field(default_factory=AccountBook.empty)
    """The accounts of earlier runs."""

    limit: Limit | None = None
    """What no example may exceed over the whole run; None for no limit."""

    peers: Adversary = Adversary.ANYBODY
    """The strongest adversary class that a charge may describe in this run."""

    noise_seed: int | None = None
    """For tests only: makes fresh noise predictable."""

    counting: Counting = nullcontext


class ActiveStore(progress.CheckpointStore, Protocol):
    """Keeps checkpoints, and the log of answers."""

    def refuse_if_answered(self) -> None:
        """Raise a StorageError if a run without a checkpoint has answered something."""

    def new_answers(self) -> AnswerLog: ...

    def answers(self) -> AnswerLog: ...


class OpenRun(NamedTuple):
    run_id: str
    nonce: bytes
    """This party's share of the joint seed."""

    dropped: frozenset[str] = frozenset()
    """Ids of earlier runs of this process, about which nothing was answered."""

    resumed_at: int | None = None
    """Number of batches after which the run was last resumed in this process."""

    @classmethod
    def new(cls, nonce: bytes, dropped: frozenset[str] = frozenset()) -> "OpenRun":
        return cls(secrets.token_hex(8), nonce, dropped)


class Lifecycle:
    """The lifecycle of one run. Callers hold the lock of ``stages``."""

    def __init__(
        self,
        contract: Contract,
        own: OwnRows,
        rules: OwnRules,
        build_trainer: TrainerFactory | None,
        observer: SessionObserver,
        store: ActiveStore,
        run: OpenRun,
    ) -> None:
        self.build_trainer = build_trainer
        self.observer = observer
        self.run = run
        self.error: errors.SplitveilError | None = None
        self.parties = PassivePeers(contract)
        self.stages = RunStages(self.parties)
        self.common: JointRows | None = None  # of a run that only aligns, once they are known
        self._answering: Answering | None = None
        self._contract, self._own, self._rules = contract, own, rules
        self._store = store

    @property
    def answering(self) -> Answering:
        """The part of the run after the alignment; an OutOfStep error before it."""
        if self._answering is None:
            raise self.stages.refusal_of("a tensor")
        return self._answering

    @property
    def trainer(self) -> TopTrainer | None:
        """What trains the top model; None before the alignment."""
        return None if self._answering is None else self._answering.trainer

    @property
    def batch_number(self) -> int:
        """Number of batches that have been answered up to the run's present position."""
        return 0 if self._answering is None else self._answering.progress.batch_number

    @property
    def has_answered(self) -> bool:
        return self._answering is not None and self._answering.has_answered

    def account_book(self) -> AccountBook:
        """Return the accounts of this run and the runs before it, by example."""
        answering = self._answering
        return self._rules.earlier if answering is None else answering.account_book()

    @property
    def checkpoints(self) -> frozenset[int]:
        """Numbers of the batches after which the run could resume."""
        return frozenset(self._store.checkpoints())

    @property
    def has_unsent_notice(self) -> bool:
        """True if a remaining peer has to hear that the run ended early."""
        if self.error is None or not any(party.has_opened for party in self.parties):
            return False
        # If a peer ended the run, only the others have to hear of it.
        return self.parties.is_multi_party or not isinstance(self.error, errors.PeerError)

    # ---- refusals ----

    def refuse_if_not_open(self) -> None:
        """Refuse a message while this process has not opened the run with every party."""
        can_resume = self._store.keeps or self.parties.is_multi_party
        if can_resume and not self.parties.have_opened:
            raise errors.NotOpen(f"a message while {self.stages.current.value}")

    def refuse_if_ended(self) -> None:
        """Raise the error that has ended the run."""
        if self.stages.current is Stage.ENDED and self.error is not None:
            # Raised again for every call: its traceback would keep the frames of all calls.
            raise self.error.with_traceback(None)

    # ---- beginning ----

    def start_over(self, nonce: bytes) -> None:
        """Drop a run about which nothing was answered, with the nonce that a party has seen."""
        self.run, self.common = OpenRun.new(nonce, self.run.dropped | {self.run.run_id}), None
        # A run that only aligns is finished before each party has heard of it.
        if self.build_trainer is None and self.stages.current is Stage.FINISHED:
            self.stages.move_to(Stage.TRAINING)
        for party in self.parties:
            party.forget_alignment()
        self.stages.move_to(Stage.WAITING)

    def begin(self, common: JointRows) -> None:
        """Begin to train on the rows that all parties have, or finish a run that only aligns."""
        if self.build_trainer is None:
            self.common = common
        else:
            self._begin_training(common, self.build_trainer)
        for party, share in zip(self.parties, common.shares, strict=False):
            party.share = share
        self.stages.move_to(Stage.TRAINING)
        if self.common is not None:  # callers hold the lock: nobody sees the stage in between
            self.stages.move_to(Stage.FINISHED)

    def _begin_training(self, common: JointRows, build_trainer: TrainerFactory) -> None:
        seed, run = joint_seed(self.run.nonce, *common.nonces), self.run
        secret = run_secret(self._rules.noise_seed)
        # What other runs have charged while this one waited for its peer counts as well. From the
        # stored state on, another run that begins finds this one.
        with self._rules.counting(self._rules.earlier) as earlier:
            self._rules = replace(self._rules, earlier=earlier)
            answering = self._prepare(build_trainer, common.file_rows, seed)
            self._store.save_run(
                {
                    "run_id": run.run_id,
                    "nonce": run.nonce,
                    "peer_nonce": b"".join(common.nonces),
                    "secret": secret,
                    "file_rows": torch.from_numpy(answering.rows.file_rows),
                    "data": answering.trainer.data_digest,
                    "noise_key": answering.trainer.noise_key,
                    "earlier": answering.budget.earlier.state_dict(),
                }
            )
        self._announce(answering, seed)
        answering.questions = AnsweredQuestions(secret, self._store.new_answers())
        self._answering = answering
        self.save()

    def reopen(self) -> bool:
        """Take up the stored run, if there is one, and return whether there is."""
        stored = self._store.run()
        if stored is None or self.build_trainer is None:
            return False
        checkpoints = self._store.checkpoints()
        if not checkpoints:
            self._store.refuse_if_answered()
            return False
        nonces, length = stored["peer_nonce"], NONCE_BYTES
        identity = progress.RunIdentity(
            stored["run_id"],
            stored["nonce"],
            tuple(nonces[at : at + length] for at in range(0, len(nonces), length)),
            stored["file_rows"].numpy(),
            stored["data"],
        )
        self.run = OpenRun(identity.run_id, identity.active_nonce)
        self.parties.recall(identity.passive_nonces)
        identity.check_rows(len(self._own.ids))
        with progress.refusing_other_versions():
            earlier = AccountBook.from_state(stored["earlier"])
        if not self._rules.earlier.runs <= earlier.runs:
            raise errors.SettingsError(
                "other runs have charged answers about the same labels since this one began, and "
                "its accounts and budget would not count them: expected earlier_ledgers as they "
                "were; --fresh at both parties starts over and counts all"
            )
        self._rules = replace(self._rules, earlier=earlier)
        answering = self._prepare(self.build_trainer, identity.file_rows, identity.seed)
        self._announce(answering, identity.seed)
        identity.check_data(answering.trainer.data_digest)
        if stored["noise_key"] != answering.trainer.noise_key:
            raise errors.SettingsError(
                "noise_key_path: this is not the noise key with which the run began; restore that "
                "one, or start over with --fresh at both parties: what a new key draws is charged "
                "on top"
            )
        answering.questions = AnsweredQuestions(stored["secret"], self._store.answers())
        self._answering = answering
        self.stages.move_to(Stage.REJOINING)
        state = self._store.load(checkpoints[-1])
        with progress.refusing_other_versions():
            answering.reopen(checkpoints[-1], state)
        if state["is_last"]:  # a peer may have everything that it needs, and never return
            for name in state["left"]:
                self.parties.named(name).say_goodbye()
            self._restore(checkpoints[-1], state)
        return True

    def _prepare(self, build: TrainerFactory, file_rows: Positions, seed: bytes) -> Answering:
        """Put the common rows in order, and build the trainer and the accounts for them."""
        contract, rules, (ids, splits) = self._contract, self._rules, self._own
        rows = AlignedRows.derive(contract, seed, ids, file_rows, splits)
        course = progress.Progress(contract, rows, self._store)
        trainer = build(rows)
        budget = LeakBudget(
            ids,
            rows,
            trainer.persons,
            rules.earlier,
            rules.limit,
            rules.peers,
            reveals_validation=rules.early_stop is not None,
        )
        evaluator = Evaluator(rules.early_stop, trainer.kind)
        return Answering(self.run.run_id, self.parties, course, trainer, budget, evaluator)

    def _announce(self, answering: Answering, seed: bytes) -> None:
        self.observer.on_aligned(answering.rows, seed)
        if len(answering.budget.earlier):
            budget = answering.budget
            self.observer.on_earlier_answers(budget.num_charged(), budget.bounds())

    # ---- checkpoints ----

    def resume_at(self, batch_number: int) -> None:
        """Resume from a checkpoint with every party."""
        questions = self.answering.questions
        is_answered = questions.log.at(batch_number) is not None
        if is_answered or batch_number < self.batch_number:
            questions.note_resumption()
        self.run = self.run._replace(resumed_at=batch_number)
        self._restore(batch_number, self._store.load(batch_number))
        for party in self.parties:
            party.stage = PartyStage.OPEN

    def _restore(self, batch_number: int, state: progress.State) -> None:
        answering = self.answering
        with progress.refusing_other_versions(), answering.changing():
            answering.load_state_dict(batch_number, state)
            self.observer.load_state_dict(state["observer"])
        if answering.budget.is_behind:
            self.observer.on_answers_ahead(answering.budget.bounds())
        self.observer.on_resumed(answering.progress.epoch)
        self.stages.move_to(Stage.FINISHED if answering.progress.is_over else Stage.TRAINING)

    def save(self, *, soon: bool = False) -> None:
        """Write a checkpoint; ``soon``: another thread may write it. A mere alignment has none."""
        answering = self._answering
        if answering is None:
            return
        with answering.phases(Phase.CHECKPOINT):
            answering.progress.save(
                lambda: answering.state_dict() | {"observer": self.observer.state_dict()}, soon=soon
            )

    # ---- steps ----

    def answer(self, batch: Batch) -> Sequence[Reply]:
        """Answer a training step about which every party has asked; an error here ends the run."""
        try:
            with self.answering.phases(Phase.ANSWER):
                replies = self.answering.answer(batch)
        except (
            errors.BudgetExhausted,
            errors.OtherAnswer,
            errors.StorageError,
            errors.ProtocolError,  # of a transfer: no other message may be tried
        ) as error:
            if isinstance(error, errors.BudgetExhausted):
                self._report_ledger(batch.epoch)
            self.end(error)
            raise
        self.stages.note_progress()
        return replies

    def evaluate(self, batch: Batch) -> Sequence[Reply]:
        """Score held-out rows about which every party has asked."""
        answering = self.answering
        with answering.phases(Phase.EVALUATION):
            evaluation, replies = answering.evaluate(batch)
        self.stages.note_progress()
        with answering.changing():
            if evaluation is not None:
                self.observer.on_evaluation(evaluation)
            if batch.closes_epoch:
                if answering.contract.is_one_shot:
                    self._report_ledger(batch.epoch)
                self.observer.on_epoch(batch.epoch)
        if answering.progress.is_over:
            # Before the answer leaves: a peer that has it may never return.
            self.save()
            self.stages.move_to(Stage.FINISHED)
        return replies

    def finish_step(self) -> None:
        """Do the work that no peer waits for: the top model's update, figures, a checkpoint."""
        answering = self._answering
        if answering is None:
            return
        if answering.unlearned is not None:
            batch, step = answering.unlearned
            with answering.changing():
                answering.unlearned = None
                answering.trainer.learn()
                self.observer.on_step(batch, step)
                if batch.closes_split:
                    self._report_ledger(batch.epoch)
        if answering.progress.checkpoint_due and not answering.is_midway:
            self.save(soon=True)
        answering.progress.ahead(1)  # its rows are known before a peer waits for an answer

    def _report_ledger(self, epoch: int) -> None:
        self.observer.on_ledger(epoch, self.answering.budget.bounds_on_course())

    # ---- ending ----

    def end(self, error: errors.SplitveilError) -> None:
        """End the run early, with a checkpoint if its state is whole."""
        if self.stages.current.is_over:
            return
        self.error = error
        try:
            self.finish_step()
            if self.stages.current is Stage.TRAINING and self.answering.is_between_steps:
                self.save()
        except errors.StorageError as unsaved:
            if not isinstance(error, errors.StorageError):
                unsaved.__context__ = error
                self.error = unsaved
        finally:
            self.stages.move_to(Stage.ENDED)
