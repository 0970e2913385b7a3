"""Turns errors of this party into statuses for the peer; the only module that does."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from splitveil.common.wire.interceptor import HandlerInterceptor
from splitveil.common.wire.status import status_for

ErrorListener = Callable[[Exception], None]

if TYPE_CHECKING:
    from splitveil.common.wire.interceptor import Handler


class ErrorInterceptor(HandlerInterceptor):
    """Turns exceptions of the handlers into the statuses of ``common/wire/status.py``.

    Args:
        on_error: called with every error before the peer gets its status.
    """

    def __init__(self, on_error: ErrorListener) -> None:
        self._on_error = on_error

    def wrap(self, handler: "Handler", _details: grpc.HandlerCallDetails, /) -> "Handler":
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._wrap_unary(handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._wrap_stream(handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler

    def _wrap_unary(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(request, context)
            except Exception as error:  # noqa: BLE001, RUF100 (any error becomes a status)
                self._abort(error, context)

        return wrapped

    def _wrap_stream(self, behaviour: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        def wrapped(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from behaviour(requests, context)
            except Exception as error:  # noqa: BLE001, RUF100
                if context.is_active():
                    self._abort(error, context)

        return wrapped

    def _abort(self, error: Exception, context: grpc.ServicerContext) -> NoReturn:
        self._on_error(error)
        status = status_for(error)
        context.abort(status.code, status.details)
