"""Gives an exchange the room in which it holds tags and its secret order: memory, or files.

With a memory limit, what grows with the number of ids is in files, and a quarter of the limit is
for sorting them part by part. The rest leaves room for the chunks under way, which take the same
memory for any number of ids.
"""

from typing import Protocol

from splitveil.common.alignment.kept import ExchangeFiles, KeptTags
from splitveil.common.alignment.tag_lists import (
    OrderInFile,
    OrderInMemory,
    SecretOrder,
    TagList,
    TagsInFile,
    TagsInMemory,
)
from splitveil.common.alignment.tag_sets import CommonRows, common_rows, common_rows_by_parts

_SORTING_SHARE = 4


class Room(Protocol):
    """Where an exchange holds what grows with the number of ids."""

    def tags(self, kept: KeptTags) -> TagList:
        """Return a list that begins with the tags of a file, and takes those that follow.

        Raises StorageError: the file cannot be read.
        """

    def order(self, size: int, seed: bytes) -> SecretOrder:
        """Return the secret order of a number of ids that a seed of 32 bytes gives.

        Raises StorageError: it cannot be written.
        """

    def common_rows(self, own: TagList, of_peer: TagList, order: SecretOrder) -> CommonRows:
        """Return the rows of the common ids; see ``tag_sets.common_rows``."""


class RoomInMemory:
    """Holds everything in memory."""

    def tags(self, kept: KeptTags) -> TagList:
        """Return a list that begins with the tags of a file."""
        return TagsInMemory(TagsInFile(*kept).read(0, kept.num_tags))

    def order(self, size: int, seed: bytes) -> SecretOrder:
        """Return the secret order of a number of ids."""
        return OrderInMemory(size, seed)

    def common_rows(self, own: TagList, of_peer: TagList, order: SecretOrder) -> CommonRows:
        """Return the rows of the common ids."""
        return common_rows(own, of_peer, order)


class RoomInFiles:
    """Holds everything in files, beside those in which the exchange is kept."""

    def __init__(self, files: ExchangeFiles, limit_bytes: int) -> None:
        self._files, self._sorting_bytes = files, limit_bytes // _SORTING_SHARE

    def tags(self, kept: KeptTags) -> TagList:
        return TagsInFile(*kept)

    def order(self, size: int, seed: bytes) -> SecretOrder:
        """Return the secret order of a number of ids."""
        return OrderInFile(size, seed, self._files.path("order"), self._sorting_bytes)

    def common_rows(self, own: TagList, of_peer: TagList, order: SecretOrder) -> CommonRows:
        """Return the rows of the common ids."""
        scratch = self._files.path("parts")
        return common_rows_by_parts(own, of_peer, order, scratch, self._sorting_bytes)


def room_of(files: ExchangeFiles) -> Room:
    """Return the room of an exchange that is kept in files."""
    limit = files.memory_limit_bytes
    return RoomInMemory() if limit is None else RoomInFiles(files, limit)
