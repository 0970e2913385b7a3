"""Finds the tags that two parties have in common, and draws the secret order in which ids leave."""

import hashlib

import numpy as np
import numpy.typing as npt

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.sample_order import Positions
from splitveil.common.wire.limits import TAG_BYTES

Tags = npt.NDArray[np.bytes_]

_SHUFFLE = b"splitveil alignment shuffle 2\x00"
_KEYS_AT_ONCE = 2**13


def common_tags(own: Tags, of_peer: Tags) -> tuple[Tags, Positions]:
    """Return the tags that are in both, sorted by their bytes, and their positions in ``own``.

    They are compared by their first four bits, so that copies in order are of a sixteenth.

    InvalidMessage: a tag is there twice.
    """
    bits = [tags.view(np.uint8)[::TAG_BYTES] >> 4 for tags in (own, of_peer)]
    found, positions = [], []
    for first in range(16):
        places, of_peers = (np.flatnonzero(some == first) for some in bits)
        parts = own[places], of_peer[of_peers]
        if any(len(np.unique(tags)) < len(tags) for tags in parts):
            raise InvalidMessage("two ids have the same tag")
        tags, at, _ = np.intersect1d(*parts, assume_unique=True, return_indices=True)
        found.append(tags)
        positions.append(places[at])
    return np.concatenate(found), np.concatenate(positions)


def secret_permutation(size: int, seed: bytes) -> Positions:
    """Permute 0..size-1 by a secret seed, which gives the same permutation again.

    Sorting by pseudo-random 64-bit keys is uniform unless two keys are equal, which has a
    probability below 2^-18 for 10 million keys.
    """
    keys = np.empty(size, np.uint64)
    for first in range(0, size, _KEYS_AT_ONCE):
        count = min(_KEYS_AT_ONCE, size - first)
        digest = hashlib.shake_256(_SHUFFLE + seed + first.to_bytes(8, "big"))
        keys[first : first + count] = np.frombuffer(digest.digest(8 * count), np.uint64)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
