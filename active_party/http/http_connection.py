"""A client's connection to the HTTP server: who is at its other end, and how long it lasts."""

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from splitveil.common.party.credentials import printable

PATIENCE_S = 60.0
"""Seconds that a client may take, from its connection or the last answer on, until its next request
is there and the answer is taken."""


class Connection(H11Protocol):
    """A client's connection, which does not last if nothing comes of it.

    It tells the application the common name of the certificate that the client has shown.
    """

    opening: "asyncio.Task[None]"

    def __init__(
        self, config: uvicorn.Config, state: Any, by_use: "dict[Connection, None]"
    ) -> None:
        super().__init__(config, state, {})
        self._by_use = by_use
        self._deadline: asyncio.TimerHandle | None = None
        self._note_use()

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn: to send a whole request, or to take an answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        shown = transport.get_extra_info("peercert")
        if shown:
            names = [value for part in shown["subject"] for key, value in part]
            keys = [key for part in shown["subject"] for key, value in part]
            named = dict(zip(keys, names, strict=True)).get("commonName", "unnamed")
            self.app_state = {**self.app_state, "program": printable(named)}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.forget()

    def on_response_complete(self) -> None:
        """Give the client time for its next request."""
        super().on_response_complete()
        if self in self._by_use:
            self._note_use()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, also in the middle of an answer, which uvicorn fails to do."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.cut()

    def end(self) -> None:
        """Close the connection, after the answer if a request is under way."""
        if self.transport is None:
            self.cut()
        elif not self.transport.is_closing():
            self.shutdown()

    def cut(self) -> None:
        self.forget()
        if self.transport is None:
            self.opening.cancel()
        else:
            self.transport.abort()

    def forget(self) -> None:
        self._by_use.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def _note_use(self) -> None:
        self.forget()
        self._by_use[self] = None
        self._deadline = self.loop.call_later(PATIENCE_S, self._look)

    def _look(self) -> None:
        if self.is_waiting:
            self.cut()
        else:
            self._note_use()
