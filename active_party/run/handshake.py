"""The handshakes of a run: each waits for those of all passive parties, the last one opens it."""

from collections.abc import Callable, Sequence

from splitveil.active_party.run.lifecycle import Lifecycle
from splitveil.active_party.run.opening import (
    NewRun,
    Resumption,
    check_contract,
    check_resumption,
    judge_new_run,
    judge_resumption,
    newest_common_checkpoint,
)
from splitveil.active_party.run.parties import PassiveParty, names_of
from splitveil.active_party.run.rendezvous import HANDSHAKE_WAIT_S, Listening
from splitveil.active_party.run.stages import Stage
from splitveil.common.errors import OthersAwaited, OutOfStep
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Offer, Opening


class Handshakes:
    """The handshakes of one run. Callers hold the lock of ``lifecycle``."""

    def __init__(
        self, contract: Contract, lifecycle: Lifecycle, draw_nonce: Callable[[], bytes]
    ) -> None:
        self._contract = contract
        self._lifecycle = lifecycle
        self._parties = lifecycle.parties
        self._rendezvous = lifecycle.rendezvous
        self._draw_nonce = draw_nonce

    def greet(self, name: str, contract_json: str) -> PassiveParty:
        """Return the party that shakes hands, if it holds the same contract."""
        self._lifecycle.refuse_if_ended()
        check_contract(self._contract, contract_json, name)
        return self._parties.named(name)

    def open(self, asking: PassiveParty, commitment: bytes, is_listening: Listening) -> Opening:
        """Open a new run, as soon as every party asks for it."""
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
        lifecycle, parties = self._lifecycle, self._parties
        is_known = asking.has_committed_to(commitment)
        check_resumption(lifecycle.stages, parties, lifecycle.run, offer, is_known=is_known)
        verdict = judge_resumption(parties, lifecycle.run, lifecycle.where, offer)
        lifecycle.finish_step()
        if verdict is Resumption.BEGUN:
            for party in self._parties:
                party.forget_opening()
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
