"""The active party, as the passive party sees it: over gRPC, or in the same process in tests."""

from typing import NamedTuple, Protocol

from splitveil.common.alignment import AlignChannel
from splitveil.common.wire.audit_codec import AuditQuestion
from splitveil.common.wire.tensor_codec import TensorMessage
from splitveil.protos import split_learning_pb2 as pb


class Offer(NamedTuple):
    """A run that this party can go on with."""

    run_id: str
    places: tuple[int, ...]
    """Numbers of batches after which it has a checkpoint, ascending."""


class Opening(NamedTuple):
    """The active party's answer to a handshake."""

    run_id: str
    contract_digest: bytes
    nonce: bytes
    resumes_at: int | None = None
    """The place that all go on from; None for a new run."""
    commitments: tuple[bytes, ...] = ()
    """To the nonces of all passive parties, where there are several."""


class Peer(Protocol):
    """What the active party can be asked. Any call may raise a ``PeerError``.

    Training has two halves, so that this party can use the time in between.
    """

    def handshake(
        self, party: str, canonical_contract: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        """Open a run, or go on with one."""

    def open_alignment(self) -> AlignChannel:
        """Open the channel on which the two alignment engines talk."""

    def close_alignment(self) -> None:
        """Wait until the peer has taken the alignment's result, too."""

    def send_activation(self, message: TensorMessage) -> None:
        """Send the activation of a training batch."""

    def receive_gradient(self) -> TensorMessage:
        """Wait for the defended gradient of the activation sent last."""

    def evaluate(self, message: TensorMessage) -> "pb.Course":
        """Send the activation of held-out rows, and learn whether the run goes on."""

    def audit(self, question: AuditQuestion) -> float:
        """Ask for the leak AUC of scores of the training rows; it has two digits."""

    def leave(self, run_id: str, reason: "pb.LeaveReason") -> None:
        """Say goodbye, and why."""
