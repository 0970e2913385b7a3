"""Sorts ids into buckets by a keyed hash and exchanges one bucket at a time to bound the memory.

Every bucket of a party has the same number of places. Empty places hold padding that looks like
ids, so a bucket's size reveals nothing about its ids.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitveil.common.errors import AlignmentError, InvalidMessage
from splitveil.common.run.sample_order import Positions, keyed_digests
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


_PURPOSE = b"splitveil bucket"
_IDS_AT_ONCE = 2**16


def places_of(num_ids: int, buckets: int) -> int:
    """Return the places of each bucket: too few for one of them with a probability below 10^-13.

    By Bernstein's inequality, for the binomial number of ids in a bucket.
    """
    mean = num_ids / buckets
    return min(num_ids, math.ceil(mean + 8 * math.sqrt(mean)) + 16)


def padded_size(num_ids: int, buckets: int, most: int) -> int:
    """Return the places of all buckets; AlignmentError if there are no ids, or more than ``most``.

    Padding counts.
    """
    places = places_of(num_ids, buckets) * buckets
    if not 0 < places <= most:
        padded = f", which are {places} with the padding of buckets" * (buckets > 1)
        raise AlignmentError(
            f"contract.alignment.max_set_size: expected 1 to {most} own ids, got {num_ids}{padded}"
        )
    return places


def buckets_of(ids: Sequence[str], key: bytes, buckets: int) -> npt.NDArray[np.uint16]:
    """Return the bucket of each id, (ids,), under a key of 32 bytes."""
    found = np.zeros(len(ids), np.uint16)
    for first in range(0, len(ids) if buckets > 1 else 0, _IDS_AT_ONCE):
        digests = keyed_digests(ids[first : first + _IDS_AT_ONCE], key, _PURPOSE)
        found[first : first + _IDS_AT_ONCE] = np.frombuffer(digests, ">u8")[::2] % buckets
    return found


def secret_order(rows: Positions, places: int, seed: bytes) -> Positions:
    """Put a bucket's rows and its padding, which is -1, into a secret order, (places,)."""
    if len(rows) > places:
        raise AlignmentError("a bucket has more ids than places: start both parties again")
    padded = np.full(places, -1)
    padded[: len(rows)] = rows
    return padded[secret_permutation(places, seed)]
