"""What stands before a server's handlers; turns errors of this party into statuses for the peer."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import grpc

from splitveil.common.wire.status import status_for

ErrorListener = Callable[[Exception], None]
Handler: TypeAlias = Any
"""A ``grpc.RpcMethodHandler``, which is a named tuple, as grpcio's stubs do not say."""


class HandlerInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Wraps the handler of every call that has one."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details)

    @abstractmethod
    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails, /) -> Handler:
        """Return the handler that is called in the place of another."""


class ErrorInterceptor(HandlerInterceptor):
    """Turns exceptions of the handlers into the statuses of ``common/wire/status.py``.

    Args:
        on_error: called with every error before the peer gets its status.
    """

    def __init__(self, on_error: ErrorListener) -> None:
        self._on_error = on_error

    def wrap(self, handler: Handler, _details: grpc.HandlerCallDetails, /) -> Handler:
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._wrap_unary(handler.unary_unary))
        if handler.stream_stream is not None:
            return handler._replace(stream_stream=self._wrap_stream(handler.stream_stream))
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
