"""Works with whole sets: secret orders of ids, and the tags that two parties have in common."""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.ristretto import POINT_BYTES
from splitveil.common.errors import InvalidMessage
from splitveil.common.wire.limits import TAG_BYTES

_TAG = np.dtype(f"S{TAG_BYTES}")
_SHUFFLE = b"splitveil alignment shuffle 1\x00"


def secret_permutation(size: int, seed: bytes) -> npt.NDArray[np.int64]:
    """Permute 0..size-1 by a secret seed, which gives the same permutation again.

    Sorting by pseudo-random 64-bit keys is uniform unless two keys are equal, which has a
    probability below 2^-18 for 10 million keys.

    Args:
        size: number of elements.
        seed: 32 bytes from the operating system.
    """
    keys = np.frombuffer(hashlib.shake_256(_SHUFFLE + seed).digest(8 * size), np.uint64)
    return np.argsort(keys).astype(np.int64, copy=False)


def tags_of(points: bytes) -> bytes:
    """Return the first bytes of each encoded point."""
    rows = np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)
    return rows[:, :TAG_BYTES].tobytes()


class CommonTags(NamedTuple):
    """The tags that both parties have, sorted by their bytes."""

    tags: npt.NDArray[np.bytes_]
    """The tags themselves, (common,)."""

    positions: npt.NDArray[np.int64]
    """For each of them, its position among this party's tags, (common,)."""


def common_tags(own: bytes | bytearray, of_peer: bytes | bytearray) -> CommonTags:
    """Return the tags that are in both.

    Args:
        own: the tags of this party's ids, one after another, in any order.
        of_peer: the tags of the peer's ids, in any order, at least one.

    Raises:
        InvalidMessage: a tag is twice in one of them. Ids are distinct and so are their tags,
            unless the peer repeats a point or invents a tag.
    """
    own_tags, peer_tags = np.frombuffer(own, _TAG), np.frombuffer(of_peer, _TAG)
    order = np.argsort(own_tags)
    own_tags, peer_tags = own_tags[order], np.sort(peer_tags)
    if (own_tags[1:] == own_tags[:-1]).any() or (peer_tags[1:] == peer_tags[:-1]).any():
        raise InvalidMessage("two ids have the same tag")
    places = np.searchsorted(peer_tags, own_tags)
    is_common = peer_tags[np.minimum(places, len(peer_tags) - 1)] == own_tags
    return CommonTags(own_tags[is_common], order[is_common].astype(np.int64, copy=False))
