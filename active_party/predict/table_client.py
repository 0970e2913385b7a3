"""Takes a passive party's whole table, sealed, and opens the rows whose ids this party has.

All ids have to be known in advance, and are then answered from memory.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.common.alignment import ristretto
from splitveil.common.data.stored_ids import ABSENT, IdIndex
from splitveil.common.errors import InvalidMessage
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.wire import inference_codec
from splitveil.common.wire.connection import MessageStream, PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.limits import CHUNK_IDS, INFERENCE_SERVICE, believed, reader
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)


class TableClient(EmbedClient):
    """Answers ids from a table that was taken as a whole; no single id is ever asked for."""

    def __init__(
        self, connection: PeerConnection, model: ModelIdentity | None, deadline_s: float
    ) -> None:
        super().__init__(connection, model, deadline_s)
        self._limits = TensorLimits.of(connection.contract)
        self._index: IdIndex | None = None
        self._place = np.empty(0, np.int64)
        self._values = torch.empty(0)

    def take(self, ids: Sequence[str], interruption: Callable[[], int | None]) -> None:
        """Take the table, and open the rows of some ids.

        No row is opened before the stream has ended, and one that does not open or has no finite
        values counts as missing: a passive party that saw this party stop, or ask again, because of
        a row would learn that its id was asked for.
        """
        distinct = list(dict.fromkeys(ids))
        stream = self.open_table(interruption)
        try:
            points = b"".join(self._unmasked(stream, distinct))
            key_of = {
                secret.tag: (row, secret.key)
                for row, secret in enumerate(inference_codec.secrets_of(points))
            }
            sealed = dict(self._rows_in(stream, key_of))
        finally:
            stream.drop()
        opened: dict[int, torch.Tensor] = {}
        for tag, row in sealed.items():
            number, key = key_of[tag]
            with suppress(InvalidMessage):
                plain = inference_codec.open_row(row, key)
                opened[number] = inference_codec.decode_rows([plain], self._limits)
        if unread := len(sealed) - len(opened):
            logger.warning(
                "%d rows of passive party %r cannot be read, and count as missing",
                *(unread, self.party),
            )
        place = np.full(len(distinct), ABSENT, np.int64)
        rows = np.fromiter(opened, np.int64, len(opened))
        place[rows] = np.arange(len(rows))
        empty = inference_codec.decode_rows([], self._limits)
        self._values = torch.cat([empty, *opened.values()])
        self._place = place
        self._index = IdIndex(distinct)

    def open_table(self, interruption: Callable[[], int | None]) -> MessageStream:
        with self._lock:
            channel = self.connection.channel()
        method: Any = channel.stream_stream(
            method_path("EmbedTable", INFERENCE_SERVICE),
            pb.TableRequest.SerializeToString,
            reader(pb.TableReply, self.connection.contract.max_message_bytes),
        )
        return MessageStream(method, self._deadline_s, interruption, self.connection.error_of)

    def submit(self, ids: Sequence[str]) -> "Future[Embedded]":
        if self._index is None:
            raise RuntimeError("the table has to be taken first")
        rows = self._index.rows_of(ids)
        places = np.where(rows != ABSENT, self._place[rows], ABSENT)
        known = places != ABSENT
        answer: Future[Embedded] = Future()
        answer.set_result(Embedded(known, self._values[torch.from_numpy(places[known])]))
        return answer

    def _unmasked(self, stream: MessageStream, ids: Sequence[str]) -> Iterator[bytes]:
        """Yield the points k H(id) of all ids, in parts; the passive party sees only r H(id)."""
        group = ristretto.load()
        scalar = group.random_scalar()
        undoing = group.invert(scalar)
        most = min(CHUNK_IDS, self.max_ids)
        for start in range(0, len(ids), most):
            part = ids[start : start + most]
            masked = group.mask(ristretto.digest_ids(part), scalar)
            is_last = start + most >= len(ids)
            request = pb.TableRequest(model_digest=self._digest, points=masked, last=is_last)
            stream.send_all([request])
            reply: pb.TableReply = believed(stream.receive())
            try:
                yield group.multiply(
                    inference_codec.decode_points(reply.points, len(part)), undoing
                )
            except ristretto.NotInGroupError as error:
                raise InvalidMessage(f"points: {error}") from error

    def _rows_in(
        self, stream: MessageStream, key_of: dict[bytes, tuple[int, bytes]]
    ) -> Iterator[tuple[bytes, bytes]]:
        while True:
            reply: pb.TableReply = believed(stream.receive())
            for tag, sealed in inference_codec.sealed_rows(reply, self._limits):
                if tag in key_of:
                    yield tag, sealed
            if reply.last:
                return
