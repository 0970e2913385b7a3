"""The active party as the passive party sees it: over gRPC, or in the same process in tests."""

from typing import Protocol

from splitveil.common.alignment import AlignChannel
from splitveil.common.run import messages


class Peer(Protocol):
    """The requests that the active party takes. Any call may raise a ``PeerError``.

    Training and evaluation have two halves, so that this party can use the time in between.
    """

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: messages.Offer | None = None
    ) -> messages.Opening:
        """Open a run, or resume one."""

    def open_alignment(self) -> AlignChannel:
        """Open the channel on which the two alignment engines talk."""

    def close_alignment(self) -> None:
        """Wait until the peer has the alignment's result as well."""

    def send_activation(self, activation: messages.Activation) -> None:
        """Send the activation of a training batch; ``pipeline_depth`` may wait for gradients."""

    def receive_gradient(self) -> messages.Answer:
        """Wait for the defended gradient of the oldest activation that has none yet."""

    def send_held_out(self, activation: messages.Activation) -> None:
        """Send the activation of held-out rows; ``evaluations_ahead`` may wait for replies."""

    def receive_course(self) -> messages.Course:
        """Wait for the reply to the oldest held-out rows that have none: does the run continue?"""

    def audit(self, question: messages.AuditQuestion) -> float:
        """Ask for the leak AUC of the scores of the training rows, which has two digits."""

    def leave(self, run_id: str, reason: messages.LeaveReason) -> None:
        """Leave the run, and give the reason."""
