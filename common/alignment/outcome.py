"""Compares what both parties found: the end of an exchange, whatever its engine."""

import hashlib
from typing import NamedTuple

from splitveil.common.alignment.interface import RowIndices
from splitveil.common.errors import AlignmentError, InvalidMessage, OutOfStep
from splitveil.protos.split_learning_pb2 import AlignDone

_DIGEST_BYTES = hashlib.sha256().digest_size


class Sizes(NamedTuple):
    own: int
    peer: int
    min_aligned: int


def check_done(own: AlignDone | None, known: AlignDone | None, done: AlignDone) -> None:
    """Check the message with which the peer ends the exchange.

    Args:
        own: this party's; None if it has not found its common ids yet.
        known: the peer's, if it has come before.
        done: the peer's, as it was received.

    Raises InvalidMessage or OutOfStep: the message is wrong, or comes too early or twice.
    """
    if own is None or known is not None:
        raise OutOfStep("the other party is done while points or tags are outstanding")
    if len(done.digest) != _DIGEST_BYTES:
        raise InvalidMessage(f"expected a digest of 32 bytes, got {len(done.digest)}")
    if len(done.split_digest) not in {0, _DIGEST_BYTES}:
        length = len(done.split_digest)
        raise InvalidMessage(f"expected a split digest of 32 bytes or none, got {length}")


def agreed_rows(
    sizes: Sizes, rows: RowIndices | None, own: AlignDone | None, peer: AlignDone | None
) -> RowIndices:
    """Return the rows of the common ids, if both parties found the same ones.

    Args:
        rows: this party's rows of the common ids, in the common order.
    """
    if rows is None or own is None or peer is None:
        raise OutOfStep("the exchange of ids is not complete")
    counts = f"{sizes.own} own ids, {sizes.peer} ids of the other party, {len(rows)} in common"
    if (peer.count, peer.digest) != (own.count, own.digest):
        raise AlignmentError(
            f"the parties disagree on the intersection: {counts}, "
            f"but the other party reports {peer.count}, or another order"
        )
    if len(rows) < sizes.min_aligned:
        raise AlignmentError(
            f"too few ids to train on: {counts}, expected at least {sizes.min_aligned}; if there "
            f"should be more, check --connect at both parties compares how they write them"
        )
    if peer.split_digest != own.split_digest:
        raise AlignmentError(
            f"the parties disagree on the split: {counts}, and the column named in "
            f"contract.split does not give each of them the same split in both tables"
        )
    return rows
