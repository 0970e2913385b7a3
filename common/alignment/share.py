"""Writes and reads shares, which say to each passive party which ids all parties have in common.

Each passive party aligns with the active party as if there were no other. When all have finished,
the active party says to each of them, with one bit per id in the order of the pair's sorted tags,
which of the ids that the two have in common are common to all parties. A passive party therefore
learns only about its own ids, and about those only what it would learn from the training rows.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.wire.limits import MASK_BYTES
from splitveil.protos.split_learning_pb2 import AlignFrame, AlignShare

Mask = npt.NDArray[np.bool_]


class Share(NamedTuple):
    """The message that ends one passive party's alignment."""

    mask: Mask
    """For each id of the pair's intersection, in the order of its tags, whether all parties have
    it."""

    nonces: tuple[bytes, ...]  # the nonces of all passive parties, in the contract's order


def share_frames(share: Share) -> Iterator[AlignFrame]:
    mask = np.packbits(share.mask, bitorder="little").tobytes()
    for chunk, first in enumerate(range(0, len(mask), MASK_BYTES)):
        nonces = () if chunk else share.nonces
        part = AlignShare(chunk=chunk, mask=mask[first : first + MASK_BYTES], nonces=nonces)
        yield AlignFrame(share=part)


def receive_share(
    channel: AlignChannel, num_ids: int, commitments: Sequence[bytes], on_wait: Callable[[], None]
) -> Share:
    """Wait for this party's share of the ids that the pair has in common, at least one."""
    mask, nonces, chunk = bytearray(), tuple[bytes, ...](), 0
    num_bytes = -(-num_ids // 8)
    while len(mask) < num_bytes:
        frame = channel.receive()
        if frame.WhichOneof("body") == "wait" and not chunk:
            on_wait()
            continue
        if frame.WhichOneof("body") != "share" or frame.share.chunk != chunk:
            raise OutOfStep(f"expected chunk {chunk} of the share that ends the alignment")
        expected = min(MASK_BYTES, num_bytes - len(mask))
        if len(frame.share.mask) != expected or (chunk and frame.share.nonces):
            raise InvalidMessage(f"expected {expected} bytes of a mask in chunk {chunk}")
        if not chunk:
            nonces = tuple(frame.share.nonces)
        mask += frame.share.mask
        chunk += 1
    hashed = [hashlib.sha256(nonce).digest() for nonce in nonces]
    if len(hashed) != len(commitments) or not all(map(hmac.compare_digest, hashed, commitments)):
        raise InvalidMessage("the passive parties' nonces do not match their commitments")
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
    if bits[num_ids:].any():
        raise InvalidMessage("the mask has more bits than the two parties have ids in common")
    return Share(bits[:num_ids], nonces)
