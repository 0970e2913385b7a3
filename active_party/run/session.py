"""The calls of the protocol, as the active party answers them; gRPC and tests use the same object.

A call takes the lock, waits for those of the other parties where it has to, and leaves every
consequence to ``lifecycle``. The other rooms return or raise: ``opening`` judges handshakes,
``parties`` knows each passive party, and ``answering`` turns questions into answers.

With several passive parties every step needs all of them: a question waits until each party has
asked its own, and then one gradient is computed, defended and charged for all. When a party opens
the run again, the others are told to open it again as well, and all resume from the same
checkpoint.

A run that has answered something never starts over. It resumes from a checkpoint that all parties
have, and the steps repeated after it are answered only if the same bytes come again, with the same
noise. So neither a restart nor a peer that claims to have restarted leads to a second answer, nor
takes back the charge of the first one.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.bounds import LeakBounds
from splitveil.active_party.run.answering import Answering
from splitveil.active_party.run.handshake import Handshakes
from splitveil.active_party.run.lifecycle import ActiveStore, Lifecycle
from splitveil.active_party.run.observer import SessionObserver
from splitveil.active_party.run.opening import OpenRun, check_nonce, common_rows
from splitveil.active_party.run.parties import Pair, PassiveParty, Reply, names_of
from splitveil.active_party.run.preparation import OwnRows, OwnRules, Preparation, TrainerFactory
from splitveil.active_party.run.rendezvous import FAREWELL_WAIT_S, Listening, always
from splitveil.active_party.run.stages import Stage
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.alignment import Share
from splitveil.common.errors import (
    AlignmentError,
    NotOpen,
    OthersAwaited,
    OutOfStep,
    PeerLeft,
    SplitveilError,
)
from splitveil.common.record.run_store import NoStore
from splitveil.common.run import messages
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Activation, Answer, Course, LeaveReason
from splitveil.common.run.sample_order import Positions


class ActiveSession:
    """One run with the contract's passive parties.

    Every call names the calling party; a single party need not be named. A call that waits for
    other parties gives up when ``is_listening`` says that its caller is gone.
    """

    lifecycle_type: ClassVar[type[Lifecycle]] = Lifecycle
    """What follows from the calls; ``aligning.py`` has another."""

    def __init__(
        self,
        contract: Contract,
        own: OwnRows,
        build_trainer: TrainerFactory,
        observer: SessionObserver,
        draw_nonce: Callable[[], bytes],
        rules: OwnRules | None = None,
        store: ActiveStore | None = None,
    ) -> None:
        self.contract = contract
        self.ids, self.file_splits = own
        self.preparation = Preparation(contract, own, rules or OwnRules(), build_trainer)
        kept, run = store or NoStore(len(contract.passive_parties)), OpenRun.new(draw_nonce())
        self.lifecycle = self.lifecycle_type(self.preparation, observer, kept, run)
        self.parties = self.lifecycle.parties
        self._rendezvous = self.lifecycle.rendezvous
        self._handshakes = Handshakes(contract, self.lifecycle, draw_nonce)

    @property
    def error(self) -> SplitveilError | None:
        """The error that ended the run early."""
        return self.lifecycle.error

    @property
    def run_id(self) -> str:
        return self.lifecycle.run.run_id

    @property
    def nonce(self) -> bytes:
        """This party's share of the joint seed."""
        return self.lifecycle.run.nonce

    @property
    def stage(self) -> Stage:
        return self.lifecycle.stages.current

    @property
    def over(self) -> bool:
        """Whether nothing more will be answered for the first time."""
        return self.lifecycle.stages.are_over

    @property
    def trainer(self) -> TopTrainer | None:
        """The top model and its labels, once the rows are known."""
        return self.lifecycle.phase.trainer

    @property
    def answering(self) -> Answering:
        """The part of the run after the alignment; an OutOfStep error before it."""
        return self.lifecycle.answering

    @property
    def has_unsent_notice(self) -> bool:
        """Whether a peer that is still there has to hear that the run ended early."""
        return self.lifecycle.has_unsent_notice

    def awaited(self) -> Mapping[str, float]:
        """Return the parties whose message the run waits for, and for how many seconds."""
        return self._rendezvous.awaited()

    def was_met(self, party: str) -> bool:
        """Return whether a party has shaken hands with this process, or no longer needs to."""
        return self.stage is Stage.FINISHED or self.parties.named(party).was_met

    def wait(self, timeout_s: float) -> bool:
        """Wait until the run is over, and return whether it is."""
        with self._rendezvous:
            self.lifecycle.end_on_objection()
            return self._rendezvous.wait(lambda: self.over, timeout_s)

    def wait_for_farewell(self, timeout_s: float) -> bool:
        """Wait until the run is over and no party will come back, and return whether that is so.

        A run that ended early is over at once. One that has finished is over when every party has
        taken its last answer and said goodbye: until then it may return and ask for it again.
        """

        def is_over() -> bool:
            has_finished = self.stage is Stage.FINISHED and self.parties.have_left
            return has_finished or self.stage is Stage.ENDED

        with self._rendezvous:
            self.lifecycle.end_on_objection()
            return self._rendezvous.wait(is_over, timeout_s)

    # ---- opening ----

    def reopen(self) -> bool:
        """Take up the stored run, if there is one, and return whether there is.

        The passive parties have to open it again.

        Raises:
            DataError: this party's data differ from those with which the run began.
            SettingsError: so does the noise key, or what earlier runs have charged.
            StorageError: the answers that the run has given are no longer known.
        """
        with self._rendezvous:
            return self.lifecycle.reopen()

    def handshake(
        self,
        party: str,
        contract_json: str,
        commitment: bytes,
        offer: messages.Offer | None = None,
        is_listening: Listening = always,
    ) -> messages.Opening:
        """Open a new run or resume a stored one. The same request again gets the same reply.

        A peer that was lost before anything was answered may start over; the nonce that it has
        seen is then not used again. With several parties, each is answered once all have asked.

        Raises:
            ContractMismatch: naming the fields that differ; the run goes on waiting.
            OutOfStep: a new run after this one has begun, a resumption of another run, or no
                checkpoint in common.
            OthersAwaited: other parties have not asked yet; worth another attempt.
            RunStartedOver: the run to be resumed has started over before its first answer.
        """
        with self._rendezvous:
            asking = self._handshakes.greet(party, contract_json)
            if offer is None:
                return self._handshakes.open(asking, commitment, is_listening)
            return self._handshakes.resume(asking, commitment, offer, is_listening)

    def require_aligning(self, run_id: str | None = None, party: str | None = None) -> None:
        """Refuse a message of the alignment at any other time.

        Raises:
            NotOpen: this process has not opened the run with the peer yet.
            OutOfStep: the alignment is not due, or is complete.
        """
        with self._rendezvous:
            self.lifecycle.refuse_if_ended()
            self.lifecycle.refuse_if_not_open()
            is_through = self.parties.named(party).is_aligned
            if is_through or run_id not in (None, self.run_id):
                raise self.lifecycle.stages.refusal_of("an alignment")
            self.lifecycle.stages.require(Stage.HANDSHAKEN, message="an alignment")

    def aligned(self, file_rows: Positions, peer_nonce: bytes, party: str | None = None) -> None:
        """Take the rows in common with one party; with those of every party, prepare training.

        Shapes: ``file_rows`` (aligned,).

        Raises:
            OutOfStep: the nonce is not the one to which the handshake committed.
            AlignmentError: too few rows for the splits.
            DataError: the common rows cannot be trained on, whatever their labels.
        """
        with self._rendezvous:
            self.require_aligning(party=party)
            aligned = self.parties.named(party)
            check_nonce(aligned, peer_nonce)
            aligned.take_pair(Pair(file_rows, peer_nonce))
            pairs = self.parties.pairs
            if len(pairs) == len(self.parties):
                self.lifecycle.begin(common_rows(self.contract, pairs))

    def share_of(self, party: str, timeout_s: float) -> Share | None:
        """Wait for the share that ends a party's alignment in a run with several passive parties.

        None if it takes longer.

        Raises:
            NotOpen: the run has to be opened again, because another party does so.
        """
        with self._rendezvous:
            aligned = self.parties.named(party)
            self._rendezvous.wait(
                lambda: (
                    aligned.share is not None
                    or self.lifecycle.stages.are_over
                    or not self.parties.have_opened
                ),
                timeout_s,
            )
            self.lifecycle.refuse_if_ended()
            self.lifecycle.refuse_if_not_open()
            return aligned.share

    # ---- training ----

    def exchange(
        self, activation: Activation, party: str | None = None, is_listening: Listening = always
    ) -> Answer:
        """Answer a training activation with its defended gradient.

        The same bytes again get the stored answer: fresh noise on a repeated step could be averaged
        away.

        Raises:
            OutOfStep: another message than the one expected now, or a repeat with other bytes.
            NotOpen: this process has not opened the run with the peer yet.
            BudgetExhausted: the answer would exceed the budget; it is not given, and the run ends.
            LeakGateClosed: earlier answers told too much; the run is over.
        """
        with self._rendezvous:
            asking = self.parties.named(party)
            reply = self._ask(asking, activation, is_listening, is_training=True)
            if isinstance(reply, Course):
                raise OutOfStep("a training activation where held-out rows are due")
            return reply

    def evaluate(
        self, activation: Activation, party: str | None = None, is_listening: Listening = always
    ) -> Course:
        """Score held-out rows; tell the peer only whether the run continues.

        Raises:
            OutOfStep: as for ``exchange``.
        """
        with self._rendezvous:
            asking = self.parties.named(party)
            reply = self._ask(asking, activation, is_listening, is_training=False)
            if isinstance(reply, Answer):
                raise OutOfStep("held-out rows where a training activation is due")
            return reply

    def audit(self, question: messages.AuditQuestion, party: str | None = None) -> float:
        """Measure the peer's scores of the training rows, to two digits.

        Raises:
            ProtocolError: as for ``AuditDesk.answer``; the run continues.
        """
        with self._rendezvous:
            self.finish_step()
            self.lifecycle.refuse_if_ended()
            self.lifecycle.refuse_if_not_open()
            if question.run_id != self.run_id:
                raise OutOfStep("an audit of another run than this one")
            asking = self.parties.named(party)
            leak_auc = self.answering.audit(asking, question)
            self.lifecycle.note_audit(question, leak_auc, asking)
            return leak_auc

    def _ask(
        self,
        asking: PassiveParty,
        activation: Activation,
        is_listening: Listening,
        *,
        is_training: bool,
    ) -> Reply:
        """Return the reply to a question, which the call of the last party to ask computes for all.

        Raises:
            OutOfStep: another question than the one due, or the same with other bytes.
            NotOpen: the run has to be opened first, or the caller no longer waits for the reply.
            SplitveilError: the error that has ended the run.
        """
        lifecycle = self.lifecycle
        lifecycle.finish_step()
        lifecycle.refuse_if_ended()
        reply = asking.reply_to(activation)
        if reply is not None:
            return reply
        lifecycle.refuse_if_not_open()
        lifecycle.stages.require(Stage.TRAINING, message="a tensor")
        batch = lifecycle.answering.take(asking, activation, is_training=is_training)
        if not self.parties.have_asked:
            return self._wait_for_reply(asking, activation, is_listening)
        return (lifecycle.answer(batch) if is_training else lifecycle.evaluate(batch))[asking.index]

    def _wait_for_reply(
        self, asking: PassiveParty, activation: Activation, is_listening: Listening
    ) -> Reply:
        """Wait until the other parties have asked as well, and the last of them has the answer."""

        def find() -> Reply | None:
            self.lifecycle.refuse_if_ended()
            reply = asking.reply_to(activation)
            if reply is None:
                self.lifecycle.refuse_if_not_open()
                if not asking.waits_for(activation.batch):
                    raise OutOfStep("a question that was overtaken by the party's next one")
            return reply

        reply = self._rendezvous.wait_for_caller(find, is_listening)
        if reply is None:
            raise NotOpen("a party gave up while it waited for others")
        return reply

    def finish_step(self) -> None:
        """Do the work that no peer waits for: the top model's update, figures, a checkpoint."""
        with self._rendezvous:
            self.lifecycle.finish_step()

    @property
    def audits_answered(self) -> int:
        """Number of audits that have been answered, over all processes of the run."""
        return self.lifecycle.phase.audits_answered

    def account_book(self) -> AccountBook:
        """Return the accounts of this run and the runs before it, by example."""
        with self._rendezvous:
            return self.lifecycle.phase.account_book()

    def leak_bounds(self) -> LeakBounds:
        """Bound what all answers that were given may have told about the training examples."""
        with self._rendezvous:
            return self.answering.budget.told()

    # ---- ending ----

    def leave(
        self,
        run_id: str,
        reason: messages.LeaveReason,
        party: str | None = None,
        is_listening: Listening = always,
    ) -> None:
        """Take note that a party leaves.

        With several passive parties, none may leave before every party has its last answer: a party
        that is killed just before the end needs all others to resume with it.

        Raises:
            OutOfStep: it names another run.
            OthersAwaited: other parties have not finished yet; worth another attempt.
            NotOpen: another party resumes from a checkpoint, and this one has to as well.
        """
        with self._rendezvous:
            if run_id != self.run_id:
                raise OutOfStep("a peer leaves another run than this one")
            leaving = self.parties.named(party)
            leaving.say_goodbye()
            self._rendezvous.wake()
            if self.lifecycle.stages.current is Stage.FINISHED:
                self.lifecycle.save()  # a restart must not wait for a party that has finished
                if reason is LeaveReason.FINISHED:
                    self._wait_for_farewells(is_listening)
            who = f"passive party {leaving.name!r}" if self.parties.is_multi_party else "the peer"
            self.lifecycle.end(_error_of(reason, who))

    def _wait_for_farewells(self, is_listening: Listening) -> None:
        def have_left() -> bool | None:
            if self.parties.have_left:
                return True
            is_finished = self.lifecycle.stages.current is Stage.FINISHED
            if not is_finished or any(party.is_returning for party in self.parties):
                raise NotOpen("a leave request while another party is resuming")
            return None

        if not self._rendezvous.wait_for_caller(have_left, is_listening, FAREWELL_WAIT_S):
            missing = [party for party in self.parties if not party.has_left]
            raise OthersAwaited(f"waits for the goodbye of passive party {names_of(missing)}")

    def end(self, error: SplitveilError) -> None:
        """End the run early; every later call of a peer gets this error's status."""
        with self._rendezvous:
            self.lifecycle.end(error)


def _error_of(reason: LeaveReason, who: str) -> SplitveilError:
    match reason:
        case LeaveReason.ALIGNMENT_FAILED:
            return AlignmentError(f"{who} found no usable intersection of the ids")
        case LeaveReason.INTERRUPTED:
            return PeerLeft(f"{who} was stopped by a person or a supervisor")
        case _:
            return PeerLeft(f"{who} ended the run before its last step")
