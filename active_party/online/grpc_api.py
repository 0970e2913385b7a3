"""The gRPC side of online predictions: translates between messages and the desk, and no more."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NoReturn, Self, cast

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from splitveil.active_party.online.desk import AnswerDesk, as_columns
from splitveil.active_party.online.errors import RequestError, TooManyIds, Unusable
from splitveil.active_party.online.own_features import GivenFeatures
from splitveil.active_party.online.programs import Tokens
from splitveil.active_party.online.questions import Answer, AnsweredBy
from splitveil.active_party.online.server_tls import ServerTls
from splitveil.common.data.features import Features
from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import printable
from splitveil.common.text.addresses import on_loopback
from splitveil.common.wire.health import add_health
from splitveil.protos import prediction_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = "splitveil.v1.Predictions"
PROTOCOL = "grpc"
ID_MESSAGE_BYTES = 8192
"""Bytes of a request for each id that it may have, with its own features."""
MOST_CALLS = 64

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_MODELS = {
    AnsweredBy.NONE: pb.MODEL_UNSPECIFIED,
    AnsweredBy.JOINT: pb.MODEL_JOINT,
    AnsweredBy.FALLBACK: pb.MODEL_FALLBACK,
}


class GrpcServer:
    """Serves ``Predictions`` and the standard health service at an address until it is closed.

    Args:
        desk: answers.
        address: host and port.
        tokens: of the programs that may ask; None to go by certificates, or to ask for nothing.
        classes: the names of the classes, if there are more than two.
        tls: certificate and key; without them it serves plain text, on loopback only.
        numbers: whether the label is a number, so that answers have values and no probabilities.
    """

    def __init__(
        self,
        desk: AnswerDesk,
        address: str,
        tokens: Tokens | None = None,
        classes: Sequence[str] | None = None,
        tls: ServerTls | None = None,
        *,
        numbers: bool = False,
    ) -> None:
        """Start to serve.

        Raises:
            SettingsError: the address is taken, does not belong to this machine, or needs TLS.
        """
        self._desk = desk
        self._tokens = tokens
        self._classes = tuple(classes or ())
        self._numbers = numbers
        self._server = grpc.server(
            ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="predict"),
            options=_options(desk.rules.max_ids),
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        # Parsed in the handler: gRPC would report a fault of its own.
        handler: Any = grpc.unary_unary_rpc_method_handler(
            self._predict, None, pb.PredictReply.SerializeToString
        )
        generic = grpc.method_handlers_generic_handler(SERVICE, {"Predict": handler})
        self._server.add_generic_rpc_handlers((generic,))
        add_health(self._server, SERVICE)
        self.port = _add_port(self._server, address, tls)
        """The port on which it serves."""
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(0)

    def close(self, grace_s: float) -> None:
        """Stop serving: requests under way have some seconds to be answered."""
        self._server.stop(grace_s).wait()

    def _predict(self, data: bytes, context: grpc.ServicerContext) -> pb.PredictReply:
        try:
            return self._answered(data, context)
        except RequestError as error:
            _abort(context, _CODES[error.status], str(error))
        except Exception:
            logger.exception("fault in a handler")
            _abort(context, grpc.StatusCode.INTERNAL, "a fault here; this party's log says which")

    def _answered(self, data: bytes, context: grpc.ServicerContext) -> pb.PredictReply:
        desk = self._desk
        with desk.log.turning_away(PROTOCOL):
            program = self._program_of(context)
        with desk.log.noted(program, PROTOCOL) as call:
            try:
                request = pb.PredictRequest.FromString(data)
            except DecodeError as error:
                raise Unusable("not a PredictRequest") from error
            if len(request.ids) > desk.rules.max_ids:
                raise TooManyIds(f"ids: at most {desk.rules.max_ids}, got {len(request.ids)}")
            pending = desk.accept(call, list(request.ids), lambda given: _own(given, request))
            if pending.answer is not None:
                wait([pending.answer], desk.rules.timeout_s)
            answer = desk.finish(call, pending)
            return _reply(answer, self._classes, desk.run_id, numbers=self._numbers)

    def _program_of(self, context: grpc.ServicerContext) -> str:
        if self._tokens is not None:
            sent = dict(context.invocation_metadata() or ())
            return self._tokens.program_of(cast("str | None", sent.get("authorization")))
        # grpcio's stubs declare bytes where lists of bytes arrive.
        shown = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
        names = [name.decode(errors="replace") for name in shown.get("x509_common_name", [])]
        return printable(names[0]) if names else "local"


def _own(given: GivenFeatures, request: pb.PredictRequest) -> Features | None:
    if not request.features:
        return None
    columns = [(column.name, _values(column)) for column in request.features]
    return given.of_columns(as_columns(columns, len(request.ids)))


def _values(column: pb.Column) -> list[Any]:
    if column.numbers and column.texts:
        raise Unusable(f"features: column {column.name!r}: expected either numbers or texts")
    if column.texts:
        return [text or None for text in column.texts]
    return [None if np.isnan(number) else number for number in column.numbers]


def _reply(
    answer: Answer, classes: Sequence[str], run_id: str, *, numbers: bool
) -> pb.PredictReply:
    predictions = []
    for by, predicted in zip(answer.answered_by, answer.predicted, strict=True):
        one = pb.Prediction(model=_MODELS[by])
        if by is not AnsweredBy.NONE:
            if numbers:
                one.value = float(predicted)
            else:
                one.probabilities.extend(np.atleast_1d(predicted).tolist())
        predictions.append(one)
    return pb.PredictReply(
        predictions=predictions,
        classes=classes,
        run_id=run_id,
        why_fallback=answer.why_fallback or "",
    )


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    abort: Callable[..., NoReturn] = context.abort
    abort(code, details)


def _add_port(server: grpc.Server, address: str, tls: ServerTls | None) -> int:
    try:
        if tls is None:
            bound = server.add_insecure_port(on_loopback(address, "serving.grpc"))
        else:
            bound = server.add_secure_port(address, tls.for_grpc())
    except RuntimeError as error:
        raise SettingsError(f"serving.grpc: cannot serve at {address}: {error}") from error
    return bound


def _options(max_ids: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_ids * ID_MESSAGE_BYTES),
        # A few compressed kilobytes could expand without limit.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Two servers on one port would each get some of the calls: the second must fail instead.
        ("grpc.so_reuseport", 0),
    ]
