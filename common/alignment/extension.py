"""What an exchange is of: all ids, or those that are new since an alignment that both have kept.

    gone    both    tags of the sender's ids that it has no longer, before its points
    points  both    of the ids that are new since then, with the scalar of then

The rest is as in any exchange, of the new ids; known tags join the new ones before the common ids
are found, so that count, digest and order are those of the whole sets.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from splitveil.common.alignment.joined import JoinedRows, JoinedTags, PickedRows, RowsInFile
from splitveil.common.alignment.known import Known, Lists
from splitveil.common.alignment.known_lists import Found, find_known, write_without
from splitveil.common.alignment.storing import private, storing
from splitveil.common.alignment.tag_lists import SecretOrder, TagList, TagsInFile
from splitveil.common.alignment.turns import check_chunk, check_length
from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.wire.limits import TAG_BYTES
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)


class Base(Protocol):
    """What is known before an exchange."""

    number: bytes
    """The number of the alignment that is extended; empty if there is none."""

    scalar: bytes
    """Of the alignment that is extended; empty if there is none."""

    num_new: int
    """Number of this party's ids that are exchanged."""

    peer_new: int
    """Number of the peer's ids that are exchanged, once its hello is there."""

    def gone_frames(self) -> Iterator[pb.AlignFrame]:
        """Yield the frames that tell which of this party's known ids are gone."""

    def receive_gone(self, message: pb.AlignGone) -> None:
        """Take tags of ids that the peer has no longer."""

    def require_gone(self) -> None:
        """Refuse what may come only after all of these."""

    def picked(self, order: SecretOrder) -> SecretOrder:
        """Return the rows of the exchanged ids, in a secret order of as many numbers."""

    def rows(self, exchanged: SecretOrder) -> SecretOrder:
        """Return the rows of all ids, in the order of ``own``."""

    def own(self, tags: TagList) -> TagList:
        """Return the tags of all ids of this party, given those of the exchanged ones."""

    def of_peer(self, tags: TagList) -> TagList:
        """Return the tags of all ids of the peer, given those of the exchanged ones."""


class Nothing:
    """Nothing is known: all ids are exchanged."""

    number = scalar = b""

    def __init__(self, num_ids: int) -> None:
        self.num_new, self.peer_new = num_ids, 0

    def gone_frames(self) -> Iterator[pb.AlignFrame]:
        """Yield nothing."""
        return iter(())

    def receive_gone(self, message: pb.AlignGone) -> None:
        """Refuse it."""
        raise OutOfStep(f"received tags of ids that are gone, chunk {message.chunk}, of none")

    def require_gone(self) -> None:
        """Require nothing."""

    def picked(self, order: SecretOrder) -> SecretOrder:
        """Return the order itself."""
        return order

    def rows(self, exchanged: SecretOrder) -> SecretOrder:
        """Return the order itself."""
        return exchanged

    def own(self, tags: TagList) -> TagList:
        """Return the list itself."""
        return tags

    def of_peer(self, tags: TagList) -> TagList:
        """Return the list itself."""
        return tags


class Extension:
    """An alignment that was kept, and what has changed since then.

    Args:
        known: the alignment.
        lists: its files.
        hashes: of all ids of this party; see ``known_lists.hash_ids``.
        folder: a folder to be made, for what is derived.
        chunk_ids: largest number of tags in a message.
        most_bytes: memory for it.

    Raises:
        StorageError: a file cannot be read or written.
    """

    def __init__(
        self,
        known: Known,
        lists: Lists,
        hashes: Path,
        folder: Path,
        *,
        chunk_ids: int,
        most_bytes: int,
    ) -> None:
        self.known, self.number, self.scalar = known, known.number, known.scalar
        self._lists, self._folder = lists, folder
        self._chunk_ids, self._most_bytes = chunk_ids, most_bytes
        self._found = Found.within(folder)
        with storing(folder):
            folder.mkdir(mode=0o700)
        find_known(hashes, lists.own, self._found, most_bytes)
        with storing(folder):
            self._num_known = self._found.tags.stat().st_size // TAG_BYTES
            self._num_gone = self._found.gone.stat().st_size // TAG_BYTES
            self.num_new = self._found.new.stat().st_size // 8
        self.peer_new = self._peer_gone = self._peer_gone_left = 0
        self._peer_tags = TagsInFile(lists.peer, known.peer_size)

    def described(self) -> pb.AlignKnown:
        """Describe it for the hello."""
        return pb.AlignKnown(
            alignment=self.number,
            digest=self.known.digest,
            new_ids=self.num_new,
            gone_ids=self._num_gone,
        )

    def begin(self, peer: pb.AlignHello, described: pb.AlignKnown) -> None:
        """Note what the peer says of the same alignment.

        Raises:
            InvalidMessage: its numbers contradict each other.
        """
        left = self.known.peer_size - int(described.gone_ids)
        if left < 0 or left + described.new_ids != peer.set_size:
            raise InvalidMessage("the other party's numbers of new and old ids do not add up")
        self.peer_new = int(described.new_ids)
        self._peer_gone = self._peer_gone_left = int(described.gone_ids)
        if self._peer_gone:
            self._peer_tags = TagsInFile(self._folder / "peer.left", left)
            with storing(self._folder), open(self._peer_gone_file, "wb", opener=private):
                pass

    def gone_frames(self) -> Iterator[pb.AlignFrame]:
        """Yield the frames that tell which of this party's known ids are gone."""
        tags = TagsInFile(self._found.gone, self._num_gone)
        for first in range(0, self._num_gone, self._chunk_ids):
            some = tags.read(first, self._chunk_ids)
            yield pb.AlignFrame(gone=pb.AlignGone(chunk=first // self._chunk_ids, tags=some))

    def receive_gone(self, message: pb.AlignGone) -> None:
        """Take tags of ids that the peer has no longer.

        Raises:
            InvalidMessage, OutOfStep, TooLarge: the peer broke a rule of the protocol.
            StorageError: they cannot be written.
        """
        if not self._peer_gone_left:
            raise OutOfStep("received more tags of ids that are gone than were announced")
        expected = min(self._chunk_ids, self._peer_gone_left)
        received = self._peer_gone - self._peer_gone_left
        check_chunk("tags of ids that are gone", message.chunk, received // self._chunk_ids)
        check_length("tags of ids that are gone", message.tags, expected * TAG_BYTES)
        with storing(self._folder), open(self._peer_gone_file, "ab", opener=private) as file:
            file.write(message.tags)
        self._peer_gone_left -= expected
        if not self._peer_gone_left:
            left = self._folder / "peer.left"
            write_without(self._lists.peer, self._peer_gone_file, left, self._most_bytes)

    def require_gone(self) -> None:
        """Refuse what may come only after all of these.

        Raises:
            OutOfStep: some are outstanding.
        """
        if self._peer_gone_left:
            raise OutOfStep("expected tags of ids that are gone before anything else")

    def picked(self, order: SecretOrder) -> SecretOrder:
        """Return the rows of the new ids, in a secret order of as many numbers."""
        return PickedRows(self._found.new, self.num_new, order)

    def rows(self, exchanged: SecretOrder) -> SecretOrder:
        """Return the rows of the known ids, and then of the new ones."""
        return JoinedRows(RowsInFile(self._found.rows, self._num_known), self._num_known, exchanged)

    def own(self, tags: TagList) -> TagList:
        """Return the tags of the known ids, and then of the new ones."""
        return JoinedTags(TagsInFile(self._found.tags, self._num_known), tags)

    def of_peer(self, tags: TagList) -> TagList:
        """Return the tags of the ids that the peer still has, and then of its new ones."""
        return JoinedTags(self._peer_tags, tags)

    @property
    def _peer_gone_file(self) -> Path:
        return self._folder / "peer.gone"


def choose(own: Sequence[Extension], peer: pb.AlignHello, num_ids: int) -> Base:
    """Return the newest kept alignment that both parties have, or that there is none.

    Args:
        own: the alignments that this party has kept, the newest first.
        peer: the hello of the peer.
        num_ids: number of ids of this party.

    Raises:
        InvalidMessage: the peer's numbers contradict each other.
    """
    theirs = {(one.alignment, one.digest): one for one in peer.known}
    for extension in own:
        described = theirs.get((extension.number, extension.known.digest))
        if described is not None:
            extension.begin(peer, described)
            return extension
    nothing = Nothing(num_ids)
    nothing.peer_new = int(peer.set_size)
    return nothing


def reason_for_all(own: Sequence[Extension], peer: pb.AlignHello) -> str:
    """Return why all ids are exchanged, although the contract says to keep the key."""
    if own and peer.known:
        return "the parties have kept the keys of different alignments"
    if own:
        return "the other party has kept no key"
    return "this party has kept no key" if peer.known else "no key was kept before"
