"""Finds the tags that two parties have in common, at once or part by part."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.partitions import Records, UnevenError, partitions
from splitveil.common.alignment.ristretto import POINT_BYTES
from splitveil.common.alignment.sorted_tags import SortedTags
from splitveil.common.alignment.tag_lists import (
    TAG,
    TAGGED_ROW,
    Rows,
    SecretOrder,
    TagList,
    TagsInMemory,
    tag_blocks,
    tagged_rows,
)
from splitveil.common.errors import InvalidMessage
from splitveil.common.wire.limits import TAG_BYTES

Splits = npt.NDArray[np.int8]
_Buffer = bytes | bytearray | memoryview

_STEP = 16
"""First bytes that are compared at a time, so that copies in order are of a sixteenth of all."""

_OWN_BYTES, _PEER_BYTES = 112, 48
"""Memory that finding common tags takes for each tag: the records, and copies in order."""


def tags_of(points: bytes) -> bytes:
    rows = np.frombuffer(points, np.uint8).reshape(-1, POINT_BYTES)
    return rows[:, :TAG_BYTES].tobytes()


class CommonTags(NamedTuple):
    """The tags that both parties have, sorted by their bytes."""

    tags: npt.NDArray[np.bytes_]  # the tags themselves, (common,)
    positions: npt.NDArray[np.int64]
    """For each of them, its position among this party's tags, (common,)."""


def common_tags(own: _Buffer, of_peer: _Buffer) -> CommonTags:
    """Return the tags that are in both.

    Args:
        own: the tags of this party's ids, one after another, in any order.
        of_peer: the tags of the peer's ids, in any order.
    """
    own_tags, peer_tags = (SortedTags(np.frombuffer(tags, TAG)) for tags in (own, of_peer))
    if own_tags.has_repeats or peer_tags.has_repeats:
        raise InvalidMessage("two ids have the same tag")
    is_common = peer_tags.find(own_tags) >= 0
    return CommonTags(own_tags.tags[is_common], own_tags.order[is_common])


class CommonRows(NamedTuple):
    """This party's rows of the ids that both parties have."""

    rows: Rows  # in the order of their tags, (common,)
    digest: "hashlib._Hash"  # SHA-256 of the tags in this order

    def split_digest(self, splits: Splits | None) -> bytes:
        """Digest the splits of the rows after their tags, which differ in every alignment."""
        if splits is None:
            return b""
        found = self.digest.copy()
        found.update(splits[self.rows].astype(np.int8).tobytes())
        return found.digest()


def common_rows(own: TagList, of_peer: TagList, order: SecretOrder) -> CommonRows:
    """Return the rows of the common ids, found in memory.

    Args:
        own: the tags of this party's ids, in the secret order.
        of_peer: the tags of the peer's ids, in any order.
        order: this party's secret order.

    Raises InvalidMessage: a tag is twice in one of them.
    """
    own_tags, peer_tags = (np.frombuffer(_all(tags), TAG) for tags in (own, of_peer))
    own_bytes, peer_bytes = (tags.view(np.uint8)[::TAG_BYTES] for tags in (own_tags, peer_tags))
    all_rows, digest, rows = order.rows(0, len(own)), hashlib.sha256(), []
    for first in range(0, 256, _STEP):
        places, of_peers = (
            np.flatnonzero((leading >= first) & (leading < first + _STEP))
            for leading in (own_bytes, peer_bytes)
        )
        found = common_tags(own_tags[places].data, peer_tags[of_peers].data)
        digest.update(found.tags.tobytes())
        rows.append(all_rows[places[found.positions]])
    return CommonRows(np.concatenate(rows), digest)


def common_rows_by_parts(
    own: TagList, of_peer: TagList, order: SecretOrder, scratch: Path, most_bytes: int
) -> CommonRows:
    """Return the same as ``common_rows``, with no more than some of the tags in memory at a time.

    Args:
        own: the tags of this party's ids, in the secret order.
        of_peer: the tags of the peer's ids, in any order.
        order: this party's secret order.
    """
    digest, rows = hashlib.sha256(), [np.empty(0, np.int64)]
    kinds = (
        Records(TAGGED_ROW, lambda: tagged_rows(own, order), _OWN_BYTES),
        Records(TAG, lambda: tag_blocks(of_peer), _PEER_BYTES),
    )
    try:
        for own_part, peer_part in partitions(kinds, scratch, most_bytes):
            found = common_tags(own_part["tag"].tobytes(), peer_part.data)
            digest.update(found.tags.tobytes())
            rows.append(own_part["row"][found.positions].astype(np.int64, copy=False))
    except UnevenError as error:
        raise InvalidMessage("too many tags begin alike to be tags of distinct ids") from error
    return CommonRows(np.concatenate(rows), digest)


def _all(tags: TagList) -> _Buffer:
    return tags.all() if isinstance(tags, TagsInMemory) else tags.read(0, len(tags))
