"""Decides what an exchange goes on from: nothing, a kept key, or the place where it broke off."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from splitveil.common.alignment.extension import Base
from splitveil.common.alignment.hello import number_of_exchange
from splitveil.common.alignment.kept import Begun, ExchangeFiles, Kept, KeptTags, digest_of_ids
from splitveil.common.alignment.key_in_use import KeyInUse
from splitveil.common.alignment.room import Room, room_of
from splitveil.common.alignment.tag_lists import SecretOrder
from splitveil.common.alignment.turns import TagTurns, part_of
from splitveil.common.errors import InvalidMessage
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)


class Secrets(NamedTuple):
    """What a party tells nobody."""

    scalar: bytes
    shuffle_seed: bytes


class Keeping:
    """The files of one exchange, and of the key that outlives it if the contract keeps keys.

    Args:
        files: of the exchange.
        ids: of this party.
        chunk_ids: largest number of points or tags in a message.

    Raises:
        StorageError: a file cannot be read or written.
    """

    def __init__(self, files: ExchangeFiles, ids: Sequence[str], chunk_ids: int) -> None:
        self.room: Room = room_of(files)
        self._files, self._chunk_ids = files, chunk_ids
        self._ids_digest = digest_of_ids(ids)
        self._key: KeyInUse | None = None
        if files.key is not None:
            self._key = KeyInUse(files.key, ids, chunk_ids, self.room.sorting_bytes)
        kept = files.load(self._ids_digest, chunk_ids, part_of(chunk_ids))
        is_usable = kept is not None and self._has(kept.begun.base)
        self._kept: Kept | None = kept if is_usable else None

    def describe(self, hello: pb.AlignHello) -> None:
        """Say in this party's hello what has been kept."""
        if self._key is not None:
            hello.known.extend(self._key.described())
        if self._kept is not None:
            held = pb.AlignResume(
                exchange=self._kept.begun.exchange,
                points=self._kept.peer_points.num_points,
                points_digest=self._kept.peer_points.all().digest(),
                tags=self._kept.own_tags.num_tags,
            )
            hello.resume.CopyFrom(held)

    def base(self, peer: pb.AlignHello, base: Base) -> Base:
        """Return what the exchange extends.

        Args:
            peer: the hello of the peer.
            base: what it extends if no key is kept.

        Raises:
            InvalidMessage: the peer's numbers contradict each other.
        """
        if self._key is None:
            return base
        kept = self._resumed(peer)
        return self._key.base(peer, None if kept is None else kept.begun.base)

    def start(
        self, own: pb.AlignHello, peer: pb.AlignHello, base: Base, fresh: Secrets, tags: TagTurns
    ) -> tuple[bytes, Secrets]:
        """Resume the kept exchange if the peer has kept it too, and keep a new one otherwise.

        Args:
            own: the hello of this party.
            peer: the hello of the peer.
            base: what the exchange extends.
            fresh: secrets of a new exchange.
            tags: of the exchange; gets what was kept.

        Returns:
            The number of the exchange, and its secrets.

        Raises:
            InvalidMessage: the peer cannot have kept what it says.
            StorageError: the exchange cannot be kept.
        """
        kept = self._resumed(peer)
        if kept is not None:
            self._resume(kept, peer, base, tags)
            return kept.begun.exchange, Secrets(kept.begun.scalar, kept.begun.shuffle_seed)
        number = number_of_exchange(own, peer)
        secrets = Secrets(base.scalar or fresh.scalar, fresh.shuffle_seed)
        sizes = base.num_new, base.peer_new, self._chunk_ids
        self._files.begin(Begun(number, *secrets, self._ids_digest, base.number, *sizes))
        tags.keeper = self._files
        empty = (
            KeptTags(self._files.path("own.tags"), 0),
            KeptTags(self._files.path("peer.tags"), 0),
        )
        tags.hold(*map(self.room.tags, empty))
        return number, secrets

    def finish(
        self, number: bytes, scalar: bytes, base: Base, tags: TagTurns, order: SecretOrder
    ) -> None:
        """Keep the key and all tags, if the contract says so; see ``KeyInUse.keep``."""
        if self._key is not None:
            self._key.keep(number, scalar, base, tags, order)

    def forget(self, base: Base) -> None:
        """Delete what was kept of the exchange, and a key that it used."""
        self._files.discard()
        if self._key is not None and base.number:
            self._key.discard()

    def _has(self, number: bytes) -> bool:
        return not number or (self._key is not None and self._key.has(number))

    def _resumed(self, peer: pb.AlignHello) -> Kept | None:
        kept = self._kept
        return kept if kept is not None and peer.resume.exchange == kept.begun.exchange else None

    def _resume(self, kept: Kept, peer: pb.AlignHello, base: Base, tags: TagTurns) -> None:
        if (kept.begun.base, kept.begun.peer_size) != (base.number, base.peer_new):
            raise InvalidMessage("the other party resumes with another number of ids")
        tags.hold(self.room.tags(kept.own_tags), self.room.tags(kept.peer_tags))
        tags.restore(kept, peer.resume, self._files)
        logger.info(
            "resuming an exchange of ids: %d of %d own points were sent, %d of %d answered",
            tags.num_sent,
            tags.num_own,
            tags.num_computed,
            tags.num_peer,
        )
