"""Gathers the calls that all passive parties make together: open, align, resume, ask and leave.

Each of these calls waits for those of the other parties, and the last one to arrive acts for all.
"""

from collections.abc import Callable, Sequence

from splitveil.active_party.run.lifecycle import Lifecycle
from splitveil.active_party.run.opening import (
    NewRun,
    Resumption,
    check_contract,
    check_nonce,
    check_resumption,
    common_rows,
    judge_new_run,
    judge_resumption,
    newest_common_checkpoint,
)
from splitveil.active_party.run.parties import Pair, PassiveParty, Reply, names_of
from splitveil.active_party.run.rendezvous import (
    FAREWELL_WAIT_S,
    HANDSHAKE_WAIT_S,
    Listening,
)
from splitveil.active_party.run.stages import Stage
from splitveil.common.alignment import Share
from splitveil.common.errors import (
    AlignmentError,
    NotOpen,
    OthersAwaited,
    OutOfStep,
    PeerLeft,
    SplitveilError,
)
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Activation, LeaveReason, Offer, Opening


class Gathering:
    """The calls that concern every party. Callers hold the lock of ``lifecycle``."""

    def __init__(
        self, contract: Contract, lifecycle: Lifecycle, draw_nonce: Callable[[], bytes]
    ) -> None:
        self._contract = contract
        self._lifecycle = lifecycle
        self._parties = lifecycle.parties
        self._rendezvous = lifecycle.rendezvous
        self._draw_nonce = draw_nonce

    def greet(self, name: str, contract_json: str) -> PassiveParty:
        """Return the party that shakes hands, if it holds the same contract.

        Raises:
            ContractMismatch: naming the fields that differ; the run goes on waiting.
            SplitveilError: the error that has ended the run.
        """
        self._lifecycle.refuse_if_ended()
        check_contract(self._contract, contract_json, name)
        return self._parties.named(name)

    def open(self, asking: PassiveParty, commitment: bytes, is_listening: Listening) -> Opening:
        """Open a new run, as soon as every party asks for it.

        Raises:
            OutOfStep: a run has begun.
            OthersAwaited: other parties have not asked yet.
        """
        lifecycle = self._lifecycle
        is_known = asking.has_committed_to(commitment)
        has_answered = lifecycle.phase.has_answered
        verdict = judge_new_run(lifecycle.stages, is_known=is_known, has_answered=has_answered)
        if verdict is NewRun.STARTED_OVER:
            lifecycle.start_over(self._draw_nonce())
        if verdict is not NewRun.REPEATED:
            asking.open(commitment)
            self._rendezvous.note_progress()
            if self._parties.have_opened:
                lifecycle.move_to(Stage.HANDSHAKEN)
            self._wait_for_openings(asking, (Stage.HANDSHAKEN,), is_listening)
        commitments = tuple(party.commitment for party in self._parties)
        return self._opening(None, commitments if self._parties.is_multi_party else ())

    def resume(
        self, asking: PassiveParty, commitment: bytes, offer: Offer, is_listening: Listening
    ) -> Opening:
        """Resume this run, as soon as every party asks for it.

        Raises:
            NothingBegun: the run to be resumed has started over before its first answer.
            OutOfStep: another run, or no checkpoint in common.
            OthersAwaited: other parties have not asked yet.
        """
        lifecycle, parties = self._lifecycle, self._parties
        is_known = asking.has_committed_to(commitment)
        check_resumption(lifecycle.stages, parties, lifecycle.run, offer, is_known=is_known)
        verdict = judge_resumption(parties, lifecycle.run, lifecycle.where, offer)
        lifecycle.finish_step()
        if verdict is Resumption.BEGUN:
            self._parties.forget_openings()
        if verdict is not Resumption.REPEATED:
            asking.ask_to_resume(offer.batch_numbers)
            self._rendezvous.note_progress()
            if self._parties.have_opened:
                self._resume_together(asking)
        self._wait_for_openings(asking, (Stage.TRAINING, Stage.FINISHED), is_listening)
        return self._opening(lifecycle.run.resumed_at)

    def _resume_together(self, last: PassiveParty) -> None:
        try:
            newest = newest_common_checkpoint(self._parties, self._lifecycle.where.checkpoints)
        except OutOfStep:
            last.forget_opening()
            raise
        self._lifecycle.resume_at(newest)

    def _opening(self, resumes_at: int | None, commitments: tuple[bytes, ...] = ()) -> Opening:
        run, digest = self._lifecycle.run, self._contract.digest()
        survey = resumes_at is None and self._lifecycle.has_survey
        return Opening(run.run_id, digest, run.nonce, resumes_at, commitments, survey)

    def _wait_for_openings(
        self, asking: PassiveParty, stages: Sequence[Stage], is_listening: Listening
    ) -> None:
        handshake = asking.handshakes

        def awaited() -> OthersAwaited:
            missing = [party for party in self._parties if not party.has_opened]
            return OthersAwaited(f"waits for passive party {names_of(missing)}")

        def have_opened() -> bool | None:
            if self._parties.have_opened and self._lifecycle.stages.current in stages:
                return True
            self._lifecycle.refuse_if_ended()
            if not asking.has_opened or asking.handshakes != handshake:
                raise awaited()
            return None

        if not self._rendezvous.wait_for_caller(have_opened, is_listening, HANDSHAKE_WAIT_S):
            raise awaited()

    def align(self, aligned: PassiveParty, pair: Pair) -> None:
        """Take the alignment with one party; with that of every party, begin to train.

        Raises:
            OutOfStep: the nonce is not the one to which the handshake committed.
            AlignmentError: too few rows in common.
            DataError: the common rows cannot be trained on, whatever their labels.
        """
        check_nonce(aligned, pair.nonce)
        aligned.take_pair(pair)
        pairs = self._parties.pairs
        if len(pairs) == len(self._parties):
            self._lifecycle.begin(common_rows(self._contract, pairs))

    def share_of(self, aligned: PassiveParty, timeout_s: float) -> Share | None:
        """Wait for the share that a party is sent once every party is aligned; None on a timeout.

        Raises:
            NotOpen: the run has to be opened again, because another party does so.
        """
        self._rendezvous.wait(
            lambda: (
                aligned.share is not None
                or self._lifecycle.stages.are_over
                or not self._parties.have_opened
            ),
            timeout_s,
        )
        self._lifecycle.refuse_if_ended()
        self._lifecycle.refuse_if_not_open()
        return aligned.share

    def part(self, leaving: PassiveParty, reason: LeaveReason, is_listening: Listening) -> None:
        """Let a party go: after the last answer together with all others, before it at once.

        Raises:
            NotOpen: a party resumes from a checkpoint, so that no other may leave.
            OthersAwaited: other parties have not finished yet; worth another attempt.
        """
        leaving.say_goodbye()
        self._rendezvous.wake()
        if self._lifecycle.stages.current is Stage.FINISHED:
            self._lifecycle.save()  # a restart must not wait for a party that has finished
            if reason is LeaveReason.FINISHED:
                self._wait_for_farewells(is_listening)
        who = f"passive party {leaving.name!r}" if self._parties.is_multi_party else "the peer"
        self._lifecycle.end(_error_of(reason, who))

    def _wait_for_farewells(self, is_listening: Listening) -> None:
        def have_left() -> bool | None:
            if self._parties.have_left:
                return True
            is_finished = self._lifecycle.stages.current is Stage.FINISHED
            if not is_finished or any(party.is_returning for party in self._parties):
                raise NotOpen("a leave request while another party is resuming")
            return None

        if not self._rendezvous.wait_for_caller(have_left, is_listening, FAREWELL_WAIT_S):
            missing = [party for party in self._parties if not party.has_left]
            raise OthersAwaited(f"waits for the goodbye of passive party {names_of(missing)}")

    def ask(
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
        lifecycle = self._lifecycle
        lifecycle.finish_step()
        lifecycle.refuse_if_ended()
        reply = asking.reply_to(activation)
        if reply is not None:
            return reply
        lifecycle.refuse_if_not_open()
        lifecycle.stages.require(Stage.TRAINING, message="a tensor")
        batch = lifecycle.answering.take(asking, activation, is_training=is_training)
        if not self._parties.have_asked:
            return self._wait_for_reply(asking, activation, is_listening)
        return (lifecycle.answer(batch) if is_training else lifecycle.evaluate(batch))[asking.index]

    def _wait_for_reply(
        self, asking: PassiveParty, activation: Activation, is_listening: Listening
    ) -> Reply:
        """Wait until the other parties have asked as well, and the last of them has the answer."""

        def find() -> Reply | None:
            self._lifecycle.refuse_if_ended()
            reply = asking.reply_to(activation)
            if reply is None:
                self._lifecycle.refuse_if_not_open()
                if not asking.waits_for(activation.batch):
                    raise OutOfStep("a question that was overtaken by the party's next one")
            return reply

        reply = self._rendezvous.wait_for_caller(find, is_listening)
        if reply is None:
            raise NotOpen("a party gave up while it waited for others")
        return reply


def _error_of(reason: LeaveReason, who: str) -> SplitveilError:
    match reason:
        case LeaveReason.ALIGNMENT_FAILED:
            return AlignmentError(f"{who} found no usable intersection of the ids")
        case LeaveReason.INTERRUPTED:
            return PeerLeft(f"{who} was stopped by a person or a supervisor")
        case _:
            return PeerLeft(f"{who} ended the run before its last step")
