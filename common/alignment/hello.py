"""Checks the hellos of an exchange of ids, and names the exchange that they begin."""

import hashlib

from splitveil.common.errors import AlignmentError, InvalidMessage, OutOfStep, TooLarge
from splitveil.protos import split_learning_pb2 as pb

_DOMAIN = b"splitveil alignment exchange 1\x00"


def check_hello(own: pb.AlignHello, peer: pb.AlignHello, max_set_size: int) -> None:
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


def number_of_exchange(own: pb.AlignHello, peer: pb.AlignHello) -> bytes:
    sides = sorted(hello.nonce + int(hello.set_size).to_bytes(8, "big") for hello in (own, peer))
    return hashlib.sha256(_DOMAIN + own.run_id.encode() + b"\x00" + b"".join(sides)).digest()
