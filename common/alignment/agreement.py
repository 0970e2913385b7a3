"""Checks the hellos that begin an exchange of ids, and compares what both parties found at its end.

Every engine needs both.
"""

import hashlib

from splitveil.common.errors import AlignmentError, InvalidMessage, OutOfStep, TooLarge
from splitveil.protos import split_learning_pb2 as pb

_DOMAIN = b"splitveil alignment exchange 1\x00"
_DIGEST_BYTES = hashlib.sha256().digest_size


def check_hello(own: pb.AlignHello, peer: pb.AlignHello, max_set_size: int, buckets: int) -> None:
    """Refuse a peer that aligns differently, or with a set that is not allowed."""
    names = ("engine", "version", "normalisation", "tag_bytes", "chunk_ids")
    differing = [name for name in names if getattr(own, name) != getattr(peer, name)]
    if differing:
        raise AlignmentError(f"the parties align ids differently: {', '.join(differing)}")
    if peer.run_id != own.run_id:
        raise OutOfStep("the alignment hello is for another run")
    if len(peer.nonce) != len(own.nonce):
        raise InvalidMessage(f"expected a nonce of {len(own.nonce)} bytes, got {len(peer.nonce)}")
    if peer.set_size == 0:
        raise InvalidMessage("the other party announces an empty set of ids")
    if peer.set_size > max_set_size:
        raise TooLarge(f"expected at most {max_set_size} ids, got {peer.set_size}")
    if peer.set_size % buckets:
        raise InvalidMessage(f"expected {buckets} buckets of one size, got {peer.set_size} places")


def number_of_exchange(own: pb.AlignHello, peer: pb.AlignHello) -> bytes:
    sides = sorted(hello.nonce + int(hello.set_size).to_bytes(8, "big") for hello in (own, peer))
    return hashlib.sha256(_DOMAIN + own.run_id.encode() + b"\x00" + b"".join(sides)).digest()


def check_done(own: pb.AlignDone | None, known: pb.AlignDone | None, done: pb.AlignDone) -> None:
    """Check the peer's last message of the exchange; ``known`` has come before."""
    if own is None or known is not None:
        raise OutOfStep("the other party is done while points or tags are outstanding")
    if len(done.digest) != _DIGEST_BYTES:
        raise InvalidMessage(f"expected a digest of 32 bytes, got {len(done.digest)}")
    if len(done.split_digest) not in {0, _DIGEST_BYTES}:
        length = len(done.split_digest)
        raise InvalidMessage(f"expected a split digest of 32 bytes or none, got {length}")


def check_agreed(
    own: pb.AlignDone | None, peer: pb.AlignDone | None, counts: str, num_found: int, least: int = 0
) -> None:
    """Check that both parties found the same common ids, enough of them, and the same splits."""
    if own is None or peer is None:
        raise OutOfStep("the exchange of ids is not complete")
    if (peer.count, peer.digest) != (own.count, own.digest):
        raise AlignmentError(
            f"the parties disagree on the intersection: {counts}, "
            f"but the other party reports {peer.count}, or another order"
        )
    if num_found < least:
        raise AlignmentError(
            f"too few ids to train on: {counts}, expected at least {least}; if there "
            f"should be more, check --connect at both parties compares how they write them"
        )
    if peer.split_digest != own.split_digest:
        raise AlignmentError(
            f"the parties disagree on the split: {counts}, and the column named in "
            f"contract.split does not give each of them the same split in both tables"
        )
