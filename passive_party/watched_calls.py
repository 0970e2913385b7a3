"""Notes in a status whether the active party answers."""

from splitveil.common.errors import PeerUnreachable, SplitveilError
from splitveil.common.party.run_status import RunStatus
from splitveil.common.run.contract import ACTIVE

OPEN = "the run is open with the active party"


class WatchedCalls:
    """Notes in a status whether the active party answers."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        status.peers.expect(ACTIVE)

    def answered(self) -> None:
        """Note that the active party is there."""
        self._status.peers.heard(ACTIVE)
        if self._status.run_id and not self._status.readiness.ready:
            self._status.set_ready(OPEN)

    def unanswered(self, error: SplitveilError) -> None:
        """Count the failure; a peer that cannot be reached is away."""
        self._status.note_failed_call(error)
        if isinstance(error, PeerUnreachable):
            self._status.peers.lost(ACTIVE)
            self._status.set_ready("the active party does not answer", ready=False)
