"""What ends an alignment of several passive parties: which of a pair's common ids all parties have.

Each passive party aligns with the active one as if there were no other. When all are through, the
active party tells each, with one bit for each id in the order of the pair's sorted tags, which of
the ids that the two have in common are common to all. So a passive party learns of its own ids
alone, and of those only what it would learn from the rows that are trained on.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.alignment.ecdh import RowIndices
from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.wire.limits import MASK_BYTES
from splitveil.protos.split_learning_pb2 import AlignFrame, AlignShare, AlignWait

Mask = npt.NDArray[np.bool_]

WAIT_S = 2.0
"""How often a party that waits for the others is told that there is more to come."""


class Share(NamedTuple):
    """What one passive party is told in the end."""

    mask: Mask
    """For each id of the pair's intersection, in the order of its tags, whether all have it."""

    nonces: tuple[bytes, ...]
    """Of all passive parties, in the contract's order."""


def intersect(pairs: Sequence[RowIndices]) -> list[Mask]:
    """Return for each pair which of its rows all others have, too.

    Args:
        pairs: the active party's own rows of each pair's common ids, each row once.
    """
    common = pairs[0]
    for rows in pairs[1:]:
        common = np.intersect1d(common, rows, assume_unique=True)
    return [np.isin(rows, common) for rows in pairs]


def wait_frame() -> AlignFrame:
    """Return what says that there is more to come."""
    return AlignFrame(wait=AlignWait())


def share_frames(share: Share) -> Iterator[AlignFrame]:
    """Yield what tells a party its share."""
    mask = np.packbits(share.mask, bitorder="little").tobytes()
    for chunk, first in enumerate(range(0, len(mask), MASK_BYTES)):
        nonces = () if chunk else share.nonces
        part = AlignShare(chunk=chunk, mask=mask[first : first + MASK_BYTES], nonces=nonces)
        yield AlignFrame(share=part)


def receive_share(
    channel: AlignChannel,
    num_ids: int,
    commitments: Sequence[bytes],
    on_wait: Callable[[], None],
) -> Share:
    """Wait for this party's share.

    Args:
        channel: to the active party, once the pair is through.
        num_ids: ids that the pair has in common, at least one.
        commitments: to the nonces of all passive parties, from the handshake.
        on_wait: called whenever there is more to come.

    Raises:
        ProtocolError: what comes is no share, or not of these ids and nonces.
        PeerUnreachable: nothing comes.
    """
    mask, nonces, chunk = bytearray(), tuple[bytes, ...](), 0
    num_bytes = -(-num_ids // 8)
    while len(mask) < num_bytes:
        frame = channel.receive()
        if frame.WhichOneof("body") == "wait" and not chunk:
            on_wait()
            continue
        if frame.WhichOneof("body") != "share" or frame.share.chunk != chunk:
            raise OutOfStep(f"expected chunk {chunk} of the share that ends an alignment")
        expected = min(MASK_BYTES, num_bytes - len(mask))
        if len(frame.share.mask) != expected or (chunk and frame.share.nonces):
            raise InvalidMessage(f"expected {expected} bytes of a mask in chunk {chunk}")
        if not chunk:
            nonces = tuple(frame.share.nonces)
        mask += frame.share.mask
        chunk += 1
    if not _are_as_committed(nonces, commitments):
        raise InvalidMessage("the passive parties' nonces are not those that were committed to")
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
    if bits[num_ids:].any():
        raise InvalidMessage("a mask with more bits than the two have ids in common")
    return Share(bits[:num_ids], nonces)


def _are_as_committed(nonces: Sequence[bytes], commitments: Sequence[bytes]) -> bool:
    return len(nonces) == len(commitments) and all(
        hmac.compare_digest(hashlib.sha256(nonce).digest(), commitment)
        for nonce, commitment in zip(nonces, commitments, strict=True)
    )
