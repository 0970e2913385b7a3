"""The lifecycle of a run: it begins, is saved, resumes, steps forward and ends.

Every consequence is here: the run changes its stage, checkpoints are written and the observer is
informed. The modules below return or raise.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import LeakBudget, Limit
from splitveil.active_party.run.answering import (
    AnsweredQuestions,
    Answering,
    TrainingSetup,
    Unaligned,
    run_secret,
)
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.run.parties import JointRows, PartyStage, PassivePeers, Reply
from splitveil.active_party.run.stages import RunStages, Stage
from splitveil.active_party.training.evaluation import EarlyStop, Evaluator
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common import errors
from splitveil.common.privacy.charge import Adversary
from splitveil.common.record.answer_log import AnswerLog
from splitveil.common.run import progress
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.phases import Phase
from splitveil.common.run.sample_order import NONCE_BYTES, Positions, Splits, joint_seed

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
        build_trainer: TrainerFactory,
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
        self.phase: Unaligned | Answering = Unaligned(rules.earlier)
        self._contract, self._own, self._rules = contract, own, rules
        self._store = store

    @property
    def answering(self) -> Answering:
        """The part of the run after the alignment; an OutOfStep error before it."""
        if isinstance(self.phase, Unaligned):
            raise self.stages.refusal_of("a tensor")
        return self.phase

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
        self.run = OpenRun.new(nonce, self.run.dropped | {self.run.run_id})
        for party in self.parties:
            party.forget_alignment()
        self.stages.move_to(Stage.WAITING)

    def begin(self, common: JointRows) -> None:
        """Store the run, and prepare to train on the rows that all parties have in common."""
        seed, run = joint_seed(self.run.nonce, *common.nonces), self.run
        secret = run_secret(self._rules.noise_seed)
        # What other runs have charged while this one waited for its peer counts as well. From the
        # stored state on, another run that begins finds this one.
        with self._rules.counting(self._rules.earlier) as earlier:
            self._rules = replace(self._rules, earlier=earlier)
            setup = self._prepare(common.file_rows, seed)
            self._store.save_run(
                {
                    "run_id": run.run_id,
                    "nonce": run.nonce,
                    "peer_nonce": b"".join(common.nonces),
                    "secret": secret,
                    "file_rows": torch.from_numpy(setup.rows.file_rows),
                    "data": setup.trainer.data_digest,
                    "noise_key": setup.trainer.noise_key,
                    "earlier": setup.budget.earlier.state_dict(),
                }
            )
        self._announce(setup, seed)
        self._answer_with(setup, AnsweredQuestions(secret, self._store.new_answers()))
        self.save()
        for party, share in zip(self.parties, common.shares, strict=False):
            party.share = share
        self.stages.move_to(Stage.TRAINING)

    def reopen(self) -> bool:
        """Take up the stored run, if there is one, and return whether there is."""
        stored = self._store.run()
        if stored is None:
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
        setup = self._prepare(identity.file_rows, identity.seed)
        self._announce(setup, identity.seed)
        identity.check_data(setup.trainer.data_digest)
        if stored["noise_key"] != setup.trainer.noise_key:
            raise errors.SettingsError(
                "noise_key_path: this is not the noise key with which the run began; restore that "
                "one, or start over with --fresh at both parties: what a new key draws is charged "
                "on top"
            )
        questions = AnsweredQuestions(stored["secret"], self._store.answers())
        answering = self._answer_with(setup, questions)
        self.stages.move_to(Stage.REJOINING)
        state = self._store.load(checkpoints[-1])
        with progress.refusing_other_versions():
            answering.reopen(checkpoints[-1], state)
        if state["is_last"]:  # a peer may have everything that it needs, and never return
            for name in state["left"]:
                self.parties.named(name).say_goodbye()
            self._restore(checkpoints[-1], state)
        return True

    def _prepare(self, file_rows: Positions, seed: bytes) -> TrainingSetup:
        """Put the common rows in order, and build the trainer and the accounts for them."""
        contract, rules, (ids, splits) = self._contract, self._rules, self._own
        rows = AlignedRows.derive(contract, seed, ids, file_rows, splits)
        course = progress.Progress(contract, rows, self._store)
        trainer = self.build_trainer(rows)
        budget = LeakBudget(
            ids,
            rows,
            trainer.persons,
            rules.earlier,
            rules.limit,
            rules.peers,
            reveals_validation=rules.early_stop is not None,
        )
        return TrainingSetup(contract, rows, course, trainer, budget)

    def _announce(self, setup: TrainingSetup, seed: bytes) -> None:
        self.observer.on_aligned(setup.rows, seed)
        if len(setup.budget.earlier):
            self.observer.on_earlier_answers(setup.budget.num_charged(), setup.budget.bounds())

    def _answer_with(self, setup: TrainingSetup, questions: AnsweredQuestions) -> Answering:
        evaluator = Evaluator(self._rules.early_stop, setup.trainer.kind)
        self.phase = Answering(self.run.run_id, self.parties, setup, questions, evaluator)
        return self.phase

    # ---- checkpoints ----

    def resume_at(self, batch_number: int) -> None:
        """Resume from a checkpoint with every party."""
        questions = self.answering.questions
        is_answered = questions.log.at(batch_number) is not None
        if is_answered or batch_number < self.answering.batch_number:
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
        """Write a checkpoint; ``soon``: another thread may write it."""
        answering = self.answering
        with answering.phases(Phase.CHECKPOINT):
            answering.progress.save(self._state, soon=soon)

    def _state(self) -> progress.State:
        return self.answering.state_dict() | {"observer": self.observer.state_dict()}

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
        answering = self.phase
        if isinstance(answering, Unaligned):
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
