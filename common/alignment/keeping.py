"""Decides what an exchange goes on from: nothing, or the place where it broke off."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from splitveil.common.alignment.agreement import number_of_exchange
from splitveil.common.alignment.common_tags import Workspace
from splitveil.common.alignment.kept import Begun, ExchangeFiles, Kept, digest_of_ids
from splitveil.common.alignment.tag_lists import TagList
from splitveil.common.alignment.turns import TagTurns, part_of
from splitveil.common.errors import InvalidMessage
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)


class Secrets(NamedTuple):
    scalar: bytes
    shuffle_seed: bytes


class Keeping:
    def __init__(self, files: ExchangeFiles, ids: Sequence[str], chunk_ids: int) -> None:
        self.workspace = Workspace(files)
        self._files, self._chunk_ids = files, chunk_ids
        self._ids_digest = digest_of_ids(ids)
        self._kept = files.load(self._ids_digest, chunk_ids, part_of(chunk_ids))

    def describe(self, hello: pb.AlignHello) -> None:
        if self._kept is not None:
            held = pb.AlignResume(
                exchange=self._kept.begun.exchange,
                points=self._kept.peer_points,
                points_digest=self._files.points_digest(
                    "peer.points", self._kept.peer_points
                ).digest(),
                tags=len(self._kept.own_tags),
            )
            hello.resume.CopyFrom(held)

    def start(
        self, own: pb.AlignHello, peer: pb.AlignHello, fresh: Secrets, tags: TagTurns
    ) -> tuple[bytes, Secrets]:
        """Resume the kept exchange if the peer has kept it too, and keep a new one otherwise.

        Returns the number of the exchange, and its secrets.
        """
        kept = self._kept
        if kept is not None and peer.resume.exchange == kept.begun.exchange:
            self._resume(kept, peer, tags)
            return kept.begun.exchange, Secrets(kept.begun.scalar, kept.begun.shuffle_seed)
        number = number_of_exchange(own, peer)
        sizes = tags.num_own, tags.num_peer, self._chunk_ids
        self._files.begin(Begun(number, *fresh, self._ids_digest, *sizes))
        tags.files = self._files
        empty = (TagList(file=self._files.path(name)) for name in ("own.tags", "peer.tags"))
        tags.hold(*map(self.workspace.tags, empty))
        return number, fresh

    def forget(self) -> None:
        self._files.discard()

    def _resume(self, kept: Kept, peer: pb.AlignHello, tags: TagTurns) -> None:
        if kept.begun.peer_size != tags.num_peer:
            raise InvalidMessage("the other party resumes with another number of ids")
        tags.hold(self.workspace.tags(kept.own_tags), self.workspace.tags(kept.peer_tags))
        tags.restore(kept, peer.resume, self._files)
        logger.info(
            "resuming an exchange of ids: %d of %d own points were sent, %d of %d answered",
            tags.num_sent,
            tags.num_own,
            tags.num_computed,
            tags.num_peer,
        )
