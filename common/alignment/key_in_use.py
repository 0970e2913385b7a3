"""The kept key of a peer during one exchange: what it spares, and what is kept of the outcome."""

import logging
from collections.abc import Sequence

from splitveil.common.alignment.extension import Base, Extension, choose, reason_for_all
from splitveil.common.alignment.known import KeyFiles, Known, digest_of_known
from splitveil.common.alignment.known_lists import hash_ids, write_lists
from splitveil.common.alignment.tag_lists import SecretOrder
from splitveil.common.alignment.turns import TagTurns
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)


class KeyInUse:
    """What a party has kept of earlier alignments with a peer, compared with its ids of now.

    Args:
        files: where it is kept.
        ids: of this party.
        chunk_ids: largest number of tags in a message.
        most_bytes: memory for comparing and writing.

    Raises:
        StorageError: a file cannot be read or written.
    """

    def __init__(
        self, files: KeyFiles, ids: Sequence[str], chunk_ids: int, most_bytes: int
    ) -> None:
        self._files, self._num_ids, self._most_bytes = files, len(ids), most_bytes
        self._work = files.work()
        self._id_key = files.id_key()
        self._hashes = self._work / "ids"
        hash_ids(ids, self._id_key, self._hashes)
        self._extensions = [
            Extension(
                known,
                files.lists(known.number),
                self._hashes,
                self._work / known.number.hex(),
                chunk_ids=chunk_ids,
                most_bytes=most_bytes,
            )
            for known in files.load()
        ]

    def described(self) -> list[pb.AlignKnown]:
        """Describe what is kept, for the hello."""
        return [extension.described() for extension in self._extensions]

    def has(self, number: bytes) -> bool:
        """Return whether an alignment is among those that are kept."""
        return any(extension.number == number for extension in self._extensions)

    def base(self, peer: pb.AlignHello, number: bytes | None = None) -> Base:
        """Return what the exchange extends.

        Args:
            peer: the hello of the peer.
            number: of the alignment that a resumed exchange extends, empty if it extends none; by
                default the newest that both have.

        Raises:
            InvalidMessage: the peer's numbers contradict each other.
        """
        known = [one for one in self._extensions if number in {None, one.number}]
        found = choose(known, peer, self._num_ids)
        if found.number:
            logger.info(
                "new since the last alignment: %d of %d own ids, %d of %d of the other party",
                found.num_new,
                self._num_ids,
                found.peer_new,
                peer.set_size,
            )
        elif number is None:
            logger.info("all ids are exchanged: %s", reason_for_all(known, peer))
        return found

    def keep(
        self,
        number: bytes,
        scalar: bytes,
        base: Base,
        tags: TagTurns,
        order: SecretOrder,
    ) -> None:
        """Keep the alignment that an exchange has ended with.

        Args:
            number: of the exchange.
            scalar: of this party.
            base: what the exchange extended.
            tags: of the exchanged ids.
            order: the rows of the exchanged ids of this party.

        Raises:
            StorageError: it cannot be written.
        """
        own, of_peer = base.own(tags.own), base.of_peer(tags.of_peer)
        written = write_lists(
            own,
            of_peer,
            base.rows(order),
            self._hashes,
            self._files.lists(number),
            self._work / "parts",
            self._most_bytes,
        )
        known = Known(
            number,
            scalar,
            digest_of_known(number, written.own_tags, written.peer_tags),
            written.own_file,
            written.peer_tags,
            len(own),
            len(of_peer),
        )
        self._files.add(known, self._id_key, base.number)

    def discard(self) -> None:
        """Delete everything."""
        self._files.discard()
