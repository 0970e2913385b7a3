"""The calls of the protocol, as the active party answers them; gRPC and tests use the same object.

A call takes the lock, waits for those of the other parties where it has to, and leaves every
consequence to ``lifecycle``. The other modules return or raise: ``parties`` knows each passive
party, and ``answering`` turns questions into answers.

With several passive parties every step needs all of them: a question waits until each party has
asked its own, and then one gradient is computed, defended and charged for all. When a party opens
the run again, the others are asked to open it again as well, and all resume from the same
checkpoint.

A run that has answered something never starts over. It resumes from a checkpoint that all parties
have, and the steps repeated after it are answered only if the same bytes come again, with the same
noise. So neither a restart nor a peer that claims to have restarted leads to a second answer, nor
takes back the charge of the first one.
"""

from collections.abc import Callable, Sequence

from splitveil.active_party.run.lifecycle import (
    ActiveStore,
    Lifecycle,
    Listening,
    OpenRun,
    OwnRows,
    OwnRules,
    SessionObserver,
    Stage,
    TrainerFactory,
)
from splitveil.active_party.run.parties import (
    JointRows,
    Pair,
    PartyStage,
    PassivePeer,
    Reply,
    names_of,
)
from splitveil.common import errors
from splitveil.common.alignment.exchange import Share
from splitveil.common.errors import ContractMismatch, NotOpen, OthersAwaited, OutOfStep, StartedOver
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record.run_store import NoStore
from splitveil.common.run.contract import Contract, check_same_contract
from splitveil.common.run.messages import Activation, Answer, Course, LeaveReason, Offer, Opening
from splitveil.common.run.sample_order import CommonOrder, Positions, joint_seed
from splitveil.common.text.visible_text import visible

HANDSHAKE_WAIT_S = 10.0
"""Longest wait of a handshake for the other parties before the caller has to ask again."""

RESUMABLE = (Stage.REJOINING, Stage.TRAINING, Stage.FINISHED)

FAREWELL_WAIT_S = 3.0
"""Longest wait of a leave request for the other parties before it has to be sent again."""


def always() -> bool:
    """Stand in for ``Listening``: assume that the caller is still connected."""
    return True


class ActiveSession:
    """One run with the contract's passive parties.

    Every call names the calling party; a single party need not be named. A call that waits for
    other parties gives up when ``is_listening`` says that its caller is gone.
    """

    def __init__(
        self,
        contract: Contract,
        own: OwnRows,
        build_trainer: TrainerFactory | None,
        observer: SessionObserver,
        draw_nonce: Callable[[], bytes],
        rules: OwnRules | None = None,
        store: ActiveStore | None = None,
    ) -> None:
        """Open no run yet. Without ``build_trainer`` the run ends with the alignment."""
        self.contract = contract
        self.ids, self.file_splits = own
        store = store or NoStore(len(contract.passive_parties))
        run = OpenRun.new(draw_nonce())
        self.lifecycle = Lifecycle(
            contract, own, rules or OwnRules(), build_trainer, observer, store, run
        )
        self.parties = self.lifecycle.parties
        self._stages = self.lifecycle.stages
        self._draw_nonce = draw_nonce

    @property
    def run_id(self) -> str:
        return self.lifecycle.run.run_id

    @property
    def stage(self) -> Stage:
        return self._stages.current

    def wait_for_farewell(self, timeout_s: float) -> bool:
        """Wait until the run has ended early, or has finished and every party has said goodbye.

        Until then a party may return and ask for its last answer again.
        """

        def is_over() -> bool:
            has_finished = self.stage is Stage.FINISHED and self.parties.have_left
            return has_finished or self.stage is Stage.ENDED

        with self._stages:
            return self._stages.wait(is_over, timeout_s)

    # ---- opening ----

    def reopen(self) -> bool:
        """Take up the stored run, if there is one, and return whether there is.

        The passive parties have to open it again. Raises if this party's data, its noise key or the
        charges of earlier runs are other than they were, or if the answers given are no longer
        known.
        """
        with self._stages:
            return self.lifecycle.reopen()

    def handshake(
        self,
        party: str,
        contract_json: str,
        commitment: bytes,
        offer: Offer | None = None,
        is_listening: Listening = always,
    ) -> Opening:
        """Open a new run or resume a stored one. The same request again gets the same reply.

        A peer that was lost before anything was answered may start over; the nonce that it has seen
        is then not used again. With several parties, each is answered once all have asked, or with
        OthersAwaited.
        """
        with self._stages:
            self.lifecycle.refuse_if_ended()
            check_same_contract(self.contract, contract_json, f"party {visible(party)}")
            if party not in self.contract.passive_parties:
                raise ContractMismatch(["passive_parties"])
            asking = self.parties.named(party)
            if offer is None:
                return self._open(asking, commitment, is_listening)
            return self._resume(asking, commitment, offer, is_listening)

    def _open(self, asking: PassivePeer, commitment: bytes, is_listening: Listening) -> Opening:
        """Open a new run, as soon as every party asks for it; a repeated request changes nothing.

        Raises:
            OutOfStep: the run has answered something, so that it must not start over.
        """
        lifecycle, stages = self.lifecycle, self._stages
        is_known = asking.has_committed_to(commitment)
        if not (stages.current is Stage.HANDSHAKEN and is_known):
            if lifecycle.has_answered:
                raise OutOfStep("a handshake for a new run, where one has begun")
            if stages.current is not Stage.WAITING:
                lifecycle.start_over(self._draw_nonce())
            asking.open(commitment)
            stages.note_progress()
            if self.parties.have_opened:
                stages.move_to(Stage.HANDSHAKEN)
            self._wait_for_openings(asking, (Stage.HANDSHAKEN,), is_listening)
        commitments = tuple(party.commitment for party in self.parties)
        return self._opening(None, commitments if self.parties.is_multi_party else ())

    def _resume(
        self, asking: PassivePeer, commitment: bytes, offer: Offer, is_listening: Listening
    ) -> Opening:
        """Resume the stored run, as soon as every party asks for it."""
        lifecycle, run = self.lifecycle, self.lifecycle.run
        if self.parties.is_multi_party and offer.run_id in run.dropped:
            raise StartedOver("a peer asks to resume a run that has started over")
        is_this_run = offer.run_id == run.run_id and asking.has_committed_to(commitment)
        if self._stages.current not in RESUMABLE or not is_this_run:
            raise OutOfStep("a peer asks to resume another run than this one")
        if not offer.batch_numbers & lifecycle.checkpoints:
            raise _no_common_checkpoint()
        position, have_opened = lifecycle.batch_number, self.parties.have_opened
        is_there = position == run.resumed_at in offer.batch_numbers
        lifecycle.finish_step()
        if not (have_opened and self.parties.is_multi_party and is_there):
            if have_opened:  # every party has to ask again
                for party in self.parties:
                    party.forget_opening()
            asking.ask_to_resume(offer.batch_numbers)
            self._stages.note_progress()
            if self.parties.have_opened:
                self._resume_together(asking)
        self._wait_for_openings(asking, (Stage.TRAINING, Stage.FINISHED), is_listening)
        return self._opening(lifecycle.run.resumed_at)

    def _resume_together(self, last: PassivePeer) -> None:
        offers = (party.offer for party in self.parties)
        common = self.lifecycle.checkpoints.intersection(*offers)
        if not common:
            last.forget_opening()
            raise _no_common_checkpoint()
        self.lifecycle.resume_at(max(common))

    def _opening(self, resumes_at: int | None, commitments: tuple[bytes, ...] = ()) -> Opening:
        run, digest = self.lifecycle.run, self.contract.digest()
        return Opening(run.run_id, digest, run.nonce, resumes_at, commitments)

    def _wait_for_openings(
        self, asking: PassivePeer, stages: Sequence[Stage], is_listening: Listening
    ) -> None:
        handshake = asking.handshakes

        def awaited() -> OthersAwaited:
            missing = [party for party in self.parties if not party.has_opened]
            return OthersAwaited(f"waits for passive party {names_of(missing)}")

        def have_opened() -> bool | None:
            if self.parties.have_opened and self._stages.current in stages:
                return True
            self.lifecycle.refuse_if_ended()
            if not asking.has_opened or asking.handshakes != handshake:
                raise awaited()
            return None

        if not self._stages.wait_for_caller(have_opened, is_listening, HANDSHAKE_WAIT_S):
            raise awaited()

    def require_aligning(self, run_id: str | None = None, party: str | None = None) -> None:
        """Refuse a message of the alignment at any other time."""
        with self._stages:
            self.lifecycle.refuse_if_ended()
            self.lifecycle.refuse_if_not_open()
            is_through = self.parties.named(party).pair is not None
            is_due = self.stage is Stage.HANDSHAKEN and not is_through
            if not is_due or run_id not in (None, self.run_id):
                raise self._stages.refusal_of("an alignment")

    def aligned(self, file_rows: Positions, peer_nonce: bytes, party: str | None = None) -> None:
        """Store the rows shared with one party; prepare training once all parties' are there."""
        with self._stages:
            self.require_aligning(party=party)
            aligned = self.parties.named(party)
            aligned.take_pair(Pair(file_rows, peer_nonce))
            pairs = self.parties.pairs
            if len(pairs) == len(self.parties):
                self.lifecycle.begin(JointRows.of(self.contract, pairs))

    def share_of(self, party: str, timeout_s: float) -> Share | None:
        """Wait for the share that ends a party's alignment in a run with several of them."""
        with self._stages:
            aligned = self.parties.named(party)
            self._stages.wait(
                lambda: (
                    aligned.share is not None or self.stage.is_over or not self.parties.have_opened
                ),
                timeout_s,
            )
            self.lifecycle.refuse_if_ended()
            self.lifecycle.refuse_if_not_open()
            return aligned.share

    def common_order(self) -> CommonOrder:
        """Return the rows that all parties have, of a run that only aligns."""
        common = self.lifecycle.common
        if common is None:
            raise OutOfStep("the common rows are not known yet")
        seed = joint_seed(self.lifecycle.run.nonce, *common.nonces)
        return CommonOrder.of(self.run_id, self.ids, common.file_rows, seed)

    # ---- training ----

    def exchange(
        self, activation: Activation, party: str | None = None, is_listening: Listening = always
    ) -> Answer:
        """Answer a training activation with its defended gradient.

        The same bytes again get the stored answer: fresh noise on a repeated step could be averaged
        away. An answer that the budget forbids is not given, and the run ends.
        """
        with self._stages:
            asking = self.parties.named(party)
            reply = self._ask(asking, activation, is_listening, is_training=True)
            if isinstance(reply, Course):
                raise OutOfStep("a training activation where held-out rows are due")
            return reply

    def evaluate(
        self, activation: Activation, party: str | None = None, is_listening: Listening = always
    ) -> Course:
        """Score held-out rows; the peer only learns whether the run continues."""
        with self._stages:
            asking = self.parties.named(party)
            reply = self._ask(asking, activation, is_listening, is_training=False)
            if isinstance(reply, Answer):
                raise OutOfStep("held-out rows where a training activation is due")
            return reply

    def _ask(
        self,
        asking: PassivePeer,
        activation: Activation,
        is_listening: Listening,
        *,
        is_training: bool,
    ) -> Reply:
        lifecycle = self.lifecycle
        lifecycle.finish_step()
        lifecycle.refuse_if_ended()
        reply = asking.reply_to(activation)
        if reply is not None:
            return reply
        lifecycle.refuse_if_not_open()
        if self.stage is not Stage.TRAINING:
            raise self._stages.refusal_of("a tensor")
        batch = lifecycle.answering.take(asking, activation, is_training=is_training)
        if len(self.parties.questions) < len(self.parties):
            return self._wait_for_reply(asking, activation, is_listening)
        return (lifecycle.answer(batch) if is_training else lifecycle.evaluate(batch))[asking.index]

    def _wait_for_reply(
        self, asking: PassivePeer, activation: Activation, is_listening: Listening
    ) -> Reply:
        def find() -> Reply | None:
            self.lifecycle.refuse_if_ended()
            reply = asking.reply_to(activation)
            if reply is None:
                self.lifecycle.refuse_if_not_open()
                if asking.question is None or asking.question.batch != activation.batch:
                    raise OutOfStep("a question that was overtaken by the party's next one")
            return reply

        reply = self._stages.wait_for_caller(find, is_listening)
        if reply is None:
            raise NotOpen("a party gave up while it waited for others")
        return reply

    def finish_step(self) -> None:
        """Do the work that no peer waits for: the top model's update, figures, a checkpoint."""
        with self._stages:
            self.lifecycle.finish_step()

    def leak_bounds(self) -> LeakBounds:
        """Bound what all answers that were given may have revealed about the training examples."""
        with self._stages:
            return self.lifecycle.answering.budget.bounds()

    # ---- ending ----

    def leave(
        self,
        run_id: str,
        reason: LeaveReason,
        party: str | None = None,
        is_listening: Listening = always,
    ) -> None:
        """Take note that a party leaves.

        With several passive parties, none may leave before every party has its last answer: a party
        that is killed just before the end needs all others to resume with it.
        """
        with self._stages:
            if run_id != self.run_id:
                raise OutOfStep("a peer leaves another run than this one")
            leaving = self.parties.named(party)
            leaving.say_goodbye()
            self._stages.wake()
            if self._stages.current is Stage.FINISHED:
                self.lifecycle.save()  # a restart must not wait for a party that has finished
                if reason is LeaveReason.FINISHED:
                    self._wait_for_farewells(is_listening)
            who = f"passive party {leaving.name!r}" if self.parties.is_multi_party else "the peer"
            self.lifecycle.end(_error_of(reason, who))

    def _wait_for_farewells(self, is_listening: Listening) -> None:
        def have_left() -> bool | None:
            if self.parties.have_left:
                return True
            is_finished = self._stages.current is Stage.FINISHED
            if not is_finished or any(
                party.stage is PartyStage.RETURNING for party in self.parties
            ):
                raise NotOpen("a leave request while another party is resuming")
            return None

        if not self._stages.wait_for_caller(have_left, is_listening, FAREWELL_WAIT_S):
            missing = [party for party in self.parties if not party.has_left]
            raise OthersAwaited(f"waits for the goodbye of passive party {names_of(missing)}")

    def end(self, error: errors.SplitveilError) -> None:
        """End the run early; every later call of a peer gets this error's status."""
        with self._stages:
            self.lifecycle.end(error)


def _error_of(reason: LeaveReason, who: str) -> errors.SplitveilError:
    match reason:
        case LeaveReason.ALIGNMENT_FAILED:
            return errors.AlignmentError(f"{who} found no usable intersection of the ids")
        case LeaveReason.INTERRUPTED:
            return errors.PeerLeft(f"{who} was stopped by a person or a supervisor")
        case _:
            return errors.PeerLeft(f"{who} ended the run before its last step")


def _no_common_checkpoint() -> OutOfStep:
    return OutOfStep("the parties have no checkpoint in common")
