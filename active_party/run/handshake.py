"""The handshakes of a run: each waits for all passive parties, and the last one opens the run.

A run about which something has been answered never starts over: it resumes from a checkpoint that
all parties have. A run about which nothing has been answered may start over, with another nonce:
the passive party that was lost has seen the first one.
"""

from collections.abc import Callable, Sequence

from splitveil.active_party.run.lifecycle import Lifecycle
from splitveil.active_party.run.parties import PassivePeer, names_of
from splitveil.active_party.run.stages import Listening, Stage
from splitveil.common.errors import ContractMismatch, OthersAwaited, OutOfStep, StartedOver
from splitveil.common.run.contract import Contract, check_same_contract
from splitveil.common.run.messages import Offer, Opening
from splitveil.common.text.visible_text import visible

HANDSHAKE_WAIT_S = 10.0
"""Longest wait of a handshake for the other parties before the caller has to ask again."""

RESUMABLE = (Stage.REJOINING, Stage.TRAINING, Stage.FINISHED)


class Handshakes:
    """The handshakes of one run. Callers hold the lock of ``lifecycle``."""

    def __init__(
        self, contract: Contract, lifecycle: Lifecycle, draw_nonce: Callable[[], bytes]
    ) -> None:
        self._contract = contract
        self._lifecycle = lifecycle
        self._parties = lifecycle.parties
        self._stages = lifecycle.stages
        self._draw_nonce = draw_nonce

    def greet(self, name: str, contract_json: str) -> PassivePeer:
        """Return the party that shakes hands, if it holds the same contract."""
        self._lifecycle.refuse_if_ended()
        check_same_contract(self._contract, contract_json, f"party {visible(name)}")
        if name not in self._contract.passive_parties:
            raise ContractMismatch(["passive_parties"])
        return self._parties.named(name)

    def open(self, asking: PassivePeer, commitment: bytes, is_listening: Listening) -> Opening:
        """Open a new run, as soon as every party asks for it; a repeated request changes nothing.

        Raises:
            OutOfStep: the run has answered something, so that it must not start over.
        """
        lifecycle, stages = self._lifecycle, self._stages
        is_known = asking.has_committed_to(commitment)
        if not (stages.current is Stage.HANDSHAKEN and is_known):
            if lifecycle.phase.has_answered:
                raise OutOfStep("a handshake for a new run, where one has begun")
            if stages.current is not Stage.WAITING:
                lifecycle.start_over(self._draw_nonce())
            asking.open(commitment)
            stages.note_progress()
            if self._parties.have_opened:
                stages.move_to(Stage.HANDSHAKEN)
            self._wait_for_openings(asking, (Stage.HANDSHAKEN,), is_listening)
        commitments = tuple(party.commitment for party in self._parties)
        return self._opening(None, commitments if self._parties.is_multi_party else ())

    def resume(
        self, asking: PassivePeer, commitment: bytes, offer: Offer, is_listening: Listening
    ) -> Opening:
        """Resume the stored run, as soon as every party asks for it."""
        lifecycle, parties, run = self._lifecycle, self._parties, self._lifecycle.run
        if parties.is_multi_party and offer.run_id in run.dropped:
            raise StartedOver("a peer asks to resume a run that has started over")
        is_this_run = offer.run_id == run.run_id and asking.has_committed_to(commitment)
        if self._stages.current not in RESUMABLE or not is_this_run:
            raise OutOfStep("a peer asks to resume another run than this one")
        if not offer.batch_numbers & lifecycle.checkpoints:
            raise _no_common_checkpoint()
        position, have_opened = lifecycle.phase.batch_number, parties.have_opened
        is_there = position == run.resumed_at in offer.batch_numbers
        lifecycle.finish_step()
        if not (have_opened and parties.is_multi_party and is_there):
            if have_opened:  # every party has to ask again
                for party in parties:
                    party.forget_opening()
            asking.ask_to_resume(offer.batch_numbers)
            self._stages.note_progress()
            if parties.have_opened:
                self._resume_together(asking)
        self._wait_for_openings(asking, (Stage.TRAINING, Stage.FINISHED), is_listening)
        return self._opening(lifecycle.run.resumed_at)

    def _resume_together(self, last: PassivePeer) -> None:
        offers = (party.offer for party in self._parties)
        common = self._lifecycle.checkpoints.intersection(*offers)
        if not common:
            last.forget_opening()
            raise _no_common_checkpoint()
        self._lifecycle.resume_at(max(common))

    def _opening(self, resumes_at: int | None, commitments: tuple[bytes, ...] = ()) -> Opening:
        run, digest = self._lifecycle.run, self._contract.digest()
        return Opening(run.run_id, digest, run.nonce, resumes_at, commitments)

    def _wait_for_openings(
        self, asking: PassivePeer, stages: Sequence[Stage], is_listening: Listening
    ) -> None:
        handshake = asking.handshakes

        def awaited() -> OthersAwaited:
            missing = [party for party in self._parties if not party.has_opened]
            return OthersAwaited(f"waits for passive party {names_of(missing)}")

        def have_opened() -> bool | None:
            if self._parties.have_opened and self._stages.current in stages:
                return True
            self._lifecycle.refuse_if_ended()
            if not asking.has_opened or asking.handshakes != handshake:
                raise awaited()
            return None

        if not self._stages.wait_for_caller(have_opened, is_listening, HANDSHAKE_WAIT_S):
            raise awaited()


def _no_common_checkpoint() -> OutOfStep:
    return OutOfStep("the parties have no checkpoint in common")
