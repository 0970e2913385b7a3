"""The base of everything that stands before a server's handlers."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    # The class takes type arguments in its stubs only, not at run time.
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]


class HandlerInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Wraps the handler of every call that has one."""

    def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Handler | None]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wrap the handler of a call."""
        handler = continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details)

    @abstractmethod
    def wrap(self, handler: "Handler", details: grpc.HandlerCallDetails, /) -> "Handler":
        """Return the handler that is called in the place of another."""
