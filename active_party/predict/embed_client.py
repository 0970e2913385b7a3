"""Asks one passive party for activations: of ids, or sealed for its whole table.

Many requests for ids are under way on one stream. A whole table hides the ids: all have to be known
in advance, are opened with this party's secrets, and then answered from memory.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch

from splitveil.common.alignment import ristretto
from splitveil.common.data.stored_ids import ABSENT, IdIndex
from splitveil.common.errors import InvalidMessage, OtherModel, PeerUnreachable, SplitveilError
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.text.files import Closing
from splitveil.common.wire import inference_codec
from splitveil.common.wire.connection import MessageStream, PeerConnection
from splitveil.common.wire.endpoint import HANDSHAKE_TIMEOUT_S, method_path
from splitveil.common.wire.limits import CHUNK_IDS, INFERENCE_SERVICE, SMALL_BYTES, believed, reader
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25


class EmbedClient(Closing):
    """Asks a passive party for the activations of ids. Several threads may use it at a time."""

    def __init__(
        self, connection: PeerConnection, model: ModelIdentity | None, deadline_s: float
    ) -> None:
        """Expect a party that serves this model; None: whichever it serves at first."""
        self.party = connection.party
        self.connection = connection
        self._model = model
        self._digest = b"" if model is None else inference_codec.model_digest(model)
        self._deadline_s = deadline_s
        self.max_ids = inference_codec.most_ids(connection.contract)
        """The most ids that one request may name; smaller if the passive party says so."""
        self._stream: _Stream | None = None
        self._lock = threading.Lock()

    def check_model(self, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> inference_codec.Described:
        """Ask which model the passive party serves, and check that it belongs to this party's."""
        with self._lock:
            channel = self.connection.channel()
        call = channel.unary_unary(
            method_path("Describe", INFERENCE_SERVICE),
            pb.DescribeRequest.SerializeToString,
            reader(pb.DescribeReply, SMALL_BYTES),
        )
        request = inference_codec.encode_describe(self.party, self.connection.contract)
        try:
            reply = call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self.connection.error_of(error) from error
        described = inference_codec.decode_described(believed(reply))
        if self._model is None:
            self._model = described.model
            self._digest = inference_codec.model_digest(described.model)
        if described.model != self._model:
            raise OtherModel(
                f"the halves of the model do not belong together: this party's is of "
                f"{self._model}, passive party {self.party!r} serves one of {described.model}"
            )
        self.max_ids = min(inference_codec.most_ids(self.connection.contract), described.max_ids)
        return described

    @property
    def has_lost_stream(self) -> bool:
        """True if a stream was open and has ended: the next request opens another one."""
        stream = self._stream
        return stream is not None and stream.is_over

    def submit(self, ids: Sequence[str]) -> "Future[Embedded]":
        """Ask for the activations of some ids without waiting.

        Returns the answer to come. Its error is a ``PeerUnreachable`` if the connection is down or
        the answer late: the same ids may be asked again, on a new stream.
        """
        try:
            return self.open_stream().submit(ids)
        except SplitveilError as error:
            failed: Future[Embedded] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """End the stream and the connection; requests under way fail, and the next one connects."""
        with self._lock:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.close()
            self.connection.close()

    def open_stream(self) -> "_Stream":
        """Open the stream if none is open, so that its loss is noticed without a request."""
        with self._lock:
            if self._stream is None or self._stream.is_over or self.connection.is_outdated:
                if self._stream is not None:
                    self._stream.close()
                    self.connection.renew()  # it may be that a certificate has expired
                self._stream = _Stream(self.connection, self._digest, self._deadline_s)
            return self._stream


class _OpenRequest(NamedTuple):
    number: int
    num_ids: int
    since: float
    answer: "Future[Embedded]"


class _Stream:
    """One stream of requests and replies; once it has failed, it stays over."""

    def __init__(self, connection: PeerConnection, digest: bytes, deadline_s: float) -> None:
        self.is_over = False
        self._lost = PeerUnreachable("the connection to the passive party was lost")
        """Why nothing can be asked any more; a refusal may come before the first question."""
        self._error_of = connection.error_of
        self._digest = digest
        self._limits = TensorLimits.of(connection.contract)
        self._deadline_s = deadline_s
        self._number = 0
        self._waiting: deque[_OpenRequest] = deque()
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        method: Any = connection.channel().stream_stream(
            method_path("Embed", INFERENCE_SERVICE),
            pb.EmbedRequest.SerializeToString,
            reader(pb.EmbedReply, connection.contract.max_message_bytes),
        )
        self._call = method(iter(self._outgoing.get, None))
        self._ended = threading.Event()
        for work, name in ((self._receive, "embed-replies"), (self._watch, "embed-deadline")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def submit(self, ids: Sequence[str]) -> "Future[Embedded]":
        answer: Future[Embedded] = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            if self.is_over:
                raise self._lost
            number, self._number = self._number, self._number + 1
            self._waiting.append(_OpenRequest(number, len(ids), time.monotonic(), answer))
            self._outgoing.put(inference_codec.encode_ids(number, ids, self._digest))
        return answer

    def close(self) -> None:
        self._fail(PeerUnreachable("the connection to the passive party was closed"))

    def _receive(self) -> None:
        try:
            for reply in self._call:
                with self._lock:
                    if not self._waiting:
                        raise PeerUnreachable("a reply that nothing was asked for")
                    asked = self._waiting[0]
                embedded = inference_codec.decode_embedded(
                    believed(reply), asked.number, asked.num_ids, self._limits
                )
                with self._lock:
                    if self.is_over:
                        return
                    self._waiting.popleft()
                asked.answer.set_result(embedded)
            self._fail(PeerUnreachable("the passive party closed the stream"))
        except grpc.RpcError as error:
            self._fail(self._error_of(error))
        except SplitveilError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("fault while replies were read")
            self._fail(PeerUnreachable(f"a reply could not be read: {type(error).__name__}"))

    def _fail(self, error: SplitveilError) -> None:
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            if isinstance(error, PeerUnreachable):
                self._lost = error
            left = list(self._waiting)
            self._waiting.clear()
        self._ended.set()
        self._outgoing.put(None)
        with suppress(Exception):
            self._call.cancel()
        for asked in left:
            asked.answer.set_exception(error)

    def _watch(self) -> None:
        while not self._ended.wait(min(_LOOK_EVERY_S, self._deadline_s / 2)):
            with self._lock:
                since = self._waiting[0].since if self._waiting else None
            if since is not None and time.monotonic() - since > self._deadline_s:
                late = f"the passive party has not answered within {self._deadline_s:g} s"
                self._fail(PeerUnreachable(late))


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
