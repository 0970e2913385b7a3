"""Joint inference over gRPC: translates between the wire and the model, and serves it."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from splitveil.common import errors
from splitveil.common.alignment.tried_ids import TriedIds
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.party.drift import Drift
from splitveil.common.party.party_status import ANSWER_BUCKETS_S, PartyStatus
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.wire import limits
from splitveil.common.wire.endpoint import build_server
from splitveil.common.wire.inference_codec import (
    Described,
    check_describe,
    decode_ids,
    decode_points,
    encode_described,
    encode_embedded,
    model_digest,
    most_ids,
)
from splitveil.common.wire.limits import INFERENCE_SERVICE
from splitveil.common.wire.recorded_calls import Notes
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.passive_party.predict.served_model import SealedTable, ServedModel
from splitveil.protos import split_learning_pb2 as pb

STAGES = ("starting", "serving", "closing")  # the stages of the program, in order
CALLS = ("Describe", "Embed", "EmbedTable")


class InferenceStatus(PartyStatus):
    """Counts of requests, ids, streams and seconds; none depends on a label or a prediction."""

    def __init__(self, party: str, contract: Contract) -> None:
        super().__init__(party, contract, STAGES)
        self.peers.expect(ACTIVE)
        self._rows = self.metrics.gauge("served_rows", "Rows that are answered for.")
        self._streams = self.metrics.gauge("embed_streams", "Streams of requests that are open.")
        self._requests = self.metrics.counter(
            "embed_requests", "Requests of the active party that were answered.", ["call"]
        )
        self._seconds = self.metrics.histogram(
            "embed_seconds",
            "Seconds for the activations of one request, without waits for answers.ids_per_second.",
            ANSWER_BUCKETS_S,
        )
        self._ids = self.metrics.counter("embed_ids", "Ids in these requests.", ["outcome"])
        self._waited = self.metrics.counter(
            "embed_waited_seconds", "Seconds for which answers.ids_per_second held requests back."
        )
        about = "Drift of the last 1,000 rows asked for from training rows, in the worst column."
        self.drift = self.metrics.gauge("column_psi", about, ["column"])
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for call in CALLS:
            self._requests.labels(call)
        for outcome in ("known", "unknown", "masked"):
            self._ids.labels(outcome)
        for reason in (errors.Busy, errors.OtherModel, errors.TableRefused):
            self._refused.labels(reason.__name__)

    def follow(self, run_id: str, num_rows: int, streams_of: Callable[[], int]) -> None:
        self.name_run(run_id)
        self._rows.set(num_rows)
        self._streams.set_function(streams_of)
        self.enter_stage("serving")
        self.set_ready("serving")

    def close(self) -> None:
        self.enter_stage("closing")
        self.set_ready("stopping", ready=False)

    def note_described(self) -> None:
        self._heard("Describe")

    def note_embedded(self, num_ids: int, num_known: int, seconds: float) -> None:
        self._heard("Embed")
        self._ids.labels("known").inc(num_known)
        self._ids.labels("unknown").inc(num_ids - num_known)
        self._seconds.observe(seconds)

    def note_masked(self, num_ids: int) -> None:
        """Count masked ids whose keys for sealed rows were requested."""
        self._heard("EmbedTable")
        self._ids.labels("masked").inc(num_ids)

    def note_waited(self, seconds: float) -> None:
        self._waited.inc(seconds)

    def note_stream_ended(self, num_left: int) -> None:
        if not num_left:
            self.peers.left(ACTIVE)

    def _heard(self, call: str) -> None:
        self.peers.heard(ACTIVE)
        self._requests.labels(call).inc()


BURST_S = 1.0  # seconds of answers that may be saved up by asking nothing
_LOOK_EVERY_S = 0.1


class Throttle:
    """Lets requests wait until their ids are due. Several threads may use it."""

    def __init__(
        self,
        ids_per_s: float | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ids_per_s = ids_per_s
        self._now = now
        self._sleep = sleep
        self._free_at = now() - BURST_S
        self._lock = threading.Lock()

    def most_ids(self, most: int, seconds: float) -> int:
        """Return how many ids a request may name so that it is due within some seconds."""
        if self._ids_per_s is None:
            return most
        return max(1, min(most, int(self._ids_per_s * seconds)))

    def wait(self, num_ids: int, is_active: Callable[[], bool]) -> bool:
        """Wait until so many ids are due. Returns whether somebody does."""
        if self._ids_per_s is None:
            return True
        with self._lock:
            due = max(self._free_at, self._now() - BURST_S) + num_ids / self._ids_per_s
            self._free_at = due
        while (left := due - self._now()) > 0:
            if not is_active():
                return False
            self._sleep(min(left, _LOOK_EVERY_S))
        return True


logger = logging.getLogger(__name__)

MAX_STREAMS = 16
"""Most streams at a time; each occupies a thread, and the next one is turned away at once."""

WAIT_S = 5.0
"""Longest wait for one request of a client that asks for nothing else."""


class InferenceService:
    def __init__(
        self,
        model: ServedModel,
        party: str,
        contract: Contract,
        throttle: Throttle,
        *,
        gives_table: bool = False,
        tried: TriedIds | None = None,
        status: InferenceStatus | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()  # number of refused messages by kind of error
        self.answered: Counter[str] = Counter()
        """Numbers of ``requests``, of the ``ids`` in them, and of the ``known`` ids."""
        self._model = model
        self._party = party
        self._contract = contract
        self._throttle = throttle
        self._gives_table = gives_table
        self._tried = tried  # limits the ids of all tables together
        self._table: SealedTable | None = None
        self._limits = TensorLimits.of(contract)
        self._most_ids = most_ids(contract)
        self._digest = model_digest(model.identity)
        self._streams: dict[int, grpc.ServicerContext] = {}
        self._busy: set[int] = set()
        self._stopping = False
        self._lock = threading.Lock()
        self.status = status or InferenceStatus(party, contract)  # for this party's operators
        model.drift = Drift(
            model.metadata, model.rows.by_column, self.status.drift, "rows that were asked for"
        )
        self.status.follow(model.identity.run_id, len(model.rows), lambda: len(self._streams))

    def describe(
        self, request: pb.DescribeRequest, _context: grpc.ServicerContext
    ) -> pb.DescribeReply:
        check_describe(request, self._party, self._contract)
        self.status.note_described()
        most = self._throttle.most_ids(self._most_ids, WAIT_S)
        return encode_described(Described(self._model.identity, most))

    def embed(
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[pb.EmbedReply]:
        with self._entered(context):
            while not self._stopping:
                try:
                    received = next(requests)
                except (StopIteration, grpc.RpcError):
                    return  # the client has what it wanted, or is gone
                request: pb.EmbedRequest = limits.believed(received)
                with self._working(context):
                    reply = self._reply(request, context)
                if reply is None:
                    return
                yield reply

    def embed_table(
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[pb.TableReply]:
        """Multiply masked ids, and then send every row, sealed."""
        table = self._sealed_table()
        with self._entered(context), self._working(context):
            is_last = False
            while not is_last:
                try:
                    request: pb.TableRequest = limits.believed(next(requests))
                except (StopIteration, grpc.RpcError):
                    return
                self._check_model(request.model_digest)
                points, is_last = decode_points(request.points), request.last
                num_ids = len(points) // limits.POINT_BYTES
                if not self._is_due(num_ids, context):
                    return
                if self._tried is not None:
                    self._tried.charge(ACTIVE, num_ids)
                self.answered.update(requests=1, ids=num_ids)
                self.status.note_masked(num_ids)
                yield pb.TableReply(points=table.multiply(points))
            for reply in table.replies():
                if not self._is_wanted(context):
                    return
                yield reply
            yield pb.TableReply(last=True)

    def stop(self) -> None:
        """Take no more requests: answer those under way, and end all streams."""
        self.status.close()
        with self._lock:
            self._stopping = True
            idle = [stream for key, stream in self._streams.items() if key not in self._busy]
        for stream in idle:
            stream.cancel()

    def on_error(self, error: Exception) -> None:
        kind = type(error).__name__
        self.refused[kind] += 1
        if not isinstance(error, errors.Interrupted):
            self.status.note_refused(error)
        count = self.refused[kind]
        if not isinstance(error, errors.SplitveilError):
            logger.error("fault in a handler", exc_info=error)
        elif count <= limits.REFUSALS_LOGGED or count & (count - 1) == 0:
            refused = isinstance(
                error,
                errors.ProtocolError
                | errors.ContractMismatch
                | errors.OtherModel
                | errors.TableRefused,
            )
            what = "refused a message" if refused else "a request failed"
            # Not the error itself: a log that keeps it would keep the stream of its frames open.
            logger.warning("%s: %s (%d so far)", what, str(error), count)

    def _reply(
        self, request: pb.EmbedRequest, context: grpc.ServicerContext
    ) -> pb.EmbedReply | None:
        self._check_model(request.model_digest)
        ids = decode_ids(request, self._most_ids)
        if not self._is_due(len(ids), context):
            return None
        began = time.monotonic()
        embedded = self._model.embed(ids)
        num_known = int(embedded.known.sum())
        self.answered.update(requests=1, ids=len(ids), known=num_known)
        self.status.note_embedded(len(ids), num_known, time.monotonic() - began)
        return encode_embedded(request.number, embedded, self._limits)

    def _is_due(self, num_ids: int, context: grpc.ServicerContext) -> bool:
        began = time.monotonic()
        is_wanted = self._throttle.wait(num_ids, lambda: self._is_wanted(context))
        self.status.note_waited(time.monotonic() - began)
        return is_wanted

    def _check_model(self, digest: bytes) -> None:
        if digest != self._digest:
            raise errors.OtherModel(
                f"the active party asks for another model than that of {self._model.identity}"
            )

    def _is_wanted(self, context: grpc.ServicerContext) -> bool:
        return context.is_active() and not self._stopping

    def _sealed_table(self) -> SealedTable:
        if not self._gives_table:
            raise errors.TableRefused("the whole table is asked for: see answers.whole_table")
        with self._lock:
            if self._table is None:
                self._table = SealedTable(self._model, self._contract)
            return self._table

    @contextmanager
    def _entered(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            if self._stopping:
                raise errors.Interrupted
            if len(self._streams) >= MAX_STREAMS:
                raise errors.Busy(f"a stream beyond {MAX_STREAMS}")
            self._streams[id(context)] = context
        try:
            yield
        finally:
            with self._lock:
                self._streams.pop(id(context), None)
                num_left = len(self._streams)
            self.status.note_stream_ended(num_left)

    @contextmanager
    def _working(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            self._busy.add(id(context))
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(id(context))


OTHER_THREADS = 8  # for single calls, and for streams that are turned away


class InferenceServer(AbstractContextManager["InferenceServer"]):
    def __init__(
        self,
        service: InferenceService,
        contract: Contract,
        address: str,
        credentials: CredentialFiles | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._service = service
        self._server, self._health = build_server(
            contract,
            INFERENCE_SERVICE,
            address,
            credentials,
            service.on_error,
            notes=notes,
            threads=MAX_STREAMS + OTHER_THREADS,
            admitted=(ACTIVE,),
        )
        handlers = method_handlers(service, contract)
        generic = grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.start()

    def __exit__(self, *_: object) -> None:
        self.stop(0)

    def stop(self, grace_s: float) -> None:
        """Stop serving: requests under way have some seconds to be answered."""
        self._health.set(INFERENCE_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        stopped = self._server.stop(grace_s)
        self._service.stop()
        stopped.wait()


def method_handlers(
    service: InferenceService, contract: Contract
) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
    def describe(request: Any, context: grpc.ServicerContext) -> pb.DescribeReply:
        return service.describe(limits.believed(request), context)

    return {
        "Describe": grpc.unary_unary_rpc_method_handler(
            describe,
            limits.reader(pb.DescribeRequest, limits.HANDSHAKE_BYTES),
            pb.DescribeReply.SerializeToString,
        ),
        "Embed": grpc.stream_stream_rpc_method_handler(
            service.embed,
            limits.reader(pb.EmbedRequest, contract.max_message_bytes),
            pb.EmbedReply.SerializeToString,
        ),
        "EmbedTable": grpc.stream_stream_rpc_method_handler(
            service.embed_table,
            limits.reader(pb.TableRequest, contract.max_message_bytes),
            pb.TableReply.SerializeToString,
        ),
    }
