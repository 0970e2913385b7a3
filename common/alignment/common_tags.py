"""Finds the tags that two parties have in common, at once or part by part.

With a memory limit, what grows with the number of ids is in files, and a quarter of the limit is
for sorting them part by part. The rest is for the chunks under way, which take the same
memory for any number of ids.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.partitions import Records, UnevenError, partitions
from splitveil.common.alignment.store import ExchangeStore
from splitveil.common.alignment.tag_lists import (
    TAG,
    TAGGED_ROW,
    Rows,
    SecretOrder,
    TagList,
    tag_blocks,
    tagged_rows,
)
from splitveil.common.errors import InvalidMessage
from splitveil.common.wire.limits import TAG_BYTES

Splits = npt.NDArray[np.int8]
Tags = npt.NDArray[np.bytes_]
Positions = npt.NDArray[np.int64]
_Part = tuple[Tags, Rows, Tags]
"""Some of this party's tags, their rows, and the peer's tags that may be among them."""

_STEP = 16
"""First bytes that are compared at a time, so that copies in order are of a sixteenth of all."""

_OWN_BYTES, _PEER_BYTES = 112, 80
"""Memory that finding common tags takes for each tag: the records, and copies in order."""

_SORTING_SHARE = 4


def common_tags(own: Tags, of_peer: Tags) -> tuple[Tags, Positions]:
    """Return the tags that are in both, sorted by their bytes, and their positions in ``own``.

    InvalidMessage: a tag is there twice.
    """
    if any(len(np.unique(tags)) < len(tags) for tags in (own, of_peer)):
        raise InvalidMessage("two ids have the same tag")
    tags, positions, _ = np.intersect1d(own, of_peer, assume_unique=True, return_indices=True)
    return tags, positions


class Intersection(NamedTuple):
    """This party's rows of the ids that both parties have."""

    rows: Rows  # in the order of their tags, (common,)
    digest: "hashlib._Hash"  # SHA-256 of the tags in this order

    def split_digest(self, splits: Splits | None) -> bytes:
        """Digest the splits of the rows after their tags, which differ in every alignment."""
        if splits is None:
            return b""
        digest = self.digest.copy()
        digest.update(splits[self.rows].astype(np.int8).tobytes())
        return digest.digest()


def secret_order(size: int, seed: bytes, store: ExchangeStore | None) -> SecretOrder:
    """Return the order in which ids are sent, in a file of the store if it limits the memory."""
    if store is None or store.memory_limit_bytes is None:
        return SecretOrder(size, seed)
    return SecretOrder(size, seed, store.path("order"), store.memory_limit_bytes // _SORTING_SHARE)


def common_rows(
    own: TagList, of_peer: TagList, order: SecretOrder, store: ExchangeStore | None = None
) -> Intersection:
    """Return the rows of the common ids; InvalidMessage if the tags are not of distinct ids."""
    if store is None or store.memory_limit_bytes is None:
        parts = _parts_in_memory(own, of_peer, order)
    else:
        most_bytes = store.memory_limit_bytes // _SORTING_SHARE
        parts = _parts_in_file(own, of_peer, order, store.path("parts"), most_bytes)
    digest, rows = hashlib.sha256(), [np.empty(0, np.int64)]
    for own_tags, own_rows, peer_tags in parts:
        tags, positions = common_tags(own_tags, peer_tags)
        digest.update(tags.tobytes())
        rows.append(own_rows[positions].astype(np.int64, copy=False))
    return Intersection(np.concatenate(rows), digest)


def _parts_in_memory(own: TagList, of_peer: TagList, order: SecretOrder) -> Iterator[_Part]:
    own_tags, peer_tags = own.all(), of_peer.all()
    own_bytes, peer_bytes = (tags.view(np.uint8)[::TAG_BYTES] for tags in (own_tags, peer_tags))
    rows = order.rows(0, len(own))
    for first in range(0, 256, _STEP):
        places, of_peers = (
            np.flatnonzero((leading >= first) & (leading < first + _STEP))
            for leading in (own_bytes, peer_bytes)
        )
        yield own_tags[places], rows[places], peer_tags[of_peers]


def _parts_in_file(
    own: TagList, of_peer: TagList, order: SecretOrder, scratch: Path, most_bytes: int
) -> Iterator[_Part]:
    kinds = (
        Records(TAGGED_ROW, lambda: tagged_rows(own, order), _OWN_BYTES),
        Records(TAG, lambda: tag_blocks(of_peer), _PEER_BYTES),
    )
    try:
        for own_part, peer_part in partitions(kinds, scratch, most_bytes):
            yield np.ascontiguousarray(own_part["tag"]), own_part["row"], peer_part
    except UnevenError as error:
        raise InvalidMessage("too many tags begin alike to be tags of distinct ids") from error
