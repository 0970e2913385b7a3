"""Finds the tags that two parties have in common, and draws the secret order in which ids leave."""

import hashlib

import numpy as np
import numpy.typing as npt

from splitveil.common.errors import InvalidMessage

Tags = npt.NDArray[np.bytes_]
Positions = npt.NDArray[np.int64]

_SHUFFLE = b"splitveil alignment shuffle 2\x00"
_KEYS_AT_ONCE = 2**13


def common_tags(own: Tags, of_peer: Tags) -> tuple[Tags, Positions]:
    """Return the tags that are in both, sorted by their bytes, and their positions in ``own``.

    InvalidMessage: a tag is there twice.
    """
    if any(len(np.unique(tags)) < len(tags) for tags in (own, of_peer)):
        raise InvalidMessage("two ids have the same tag")
    tags, positions, _ = np.intersect1d(own, of_peer, assume_unique=True, return_indices=True)
    return tags, positions


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
