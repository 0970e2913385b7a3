"""The HTTP endpoint of a party's operators: ``/healthz``, ``/readyz`` and ``/metrics``.

It only reads. A fault in it, a slow reader or a thousand of them cost the run nothing but the few
threads that it may have: a request beyond those ends the oldest one.
"""

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Self

from prometheus_client import generate_latest

from splitveil.common.errors import EndedForGood, PeerEndedForGood, SettingsError
from splitveil.common.party.party_status import PartyStatus
from splitveil.common.text.addresses import is_numeric_loopback, split_address

logger = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 8  # requests that are answered at the same time
PATIENCE_S = 5.0
"""Seconds that a client may take to send its request, or to take a part of the answer."""
LAST_LOOK_S = 65.0
"""Longest wait for a last request for metrics: scrapes a minute apart are the rarest usual ones."""
LEAST_LOOK_S = 5.0
_GOODBYE_S = 2.0
_POLL_S = 0.05


def check_free(address: str | None) -> None:
    if address is not None:
        _StatusServer(address, _Handler).server_close()


def status_checks(address: str | None) -> list[Callable[[], str]]:
    def is_free() -> str:
        check_free(address)
        return f"status: {address} is free"

    return [] if address is None else [is_free]


@contextmanager
def serving_status(
    status: PartyStatus, address: str | None, interruption: Callable[[], int | None]
) -> Iterator[None]:
    """Serve a status within the block, if it has an address.

    A run that has finished, or was ended for good, is served until its metrics were asked for once
    more, if somebody asks regularly: who sees a party vanish from training has to look after it.
    """
    if address is None:
        yield
        return
    with StatusEndpoint(status, address) as endpoint:
        try:
            yield
        except (EndedForGood, PeerEndedForGood):
            status.enter_stage("ended")
            endpoint.wait_for_last_look(interruption)
            raise
        status.enter_stage("finished")
        endpoint.wait_for_last_look(interruption)


def endpoint_of(
    status: PartyStatus, address: str | None
) -> AbstractContextManager["StatusEndpoint | None"]:
    """Return the endpoint, if there is one, of a program that ends as soon as it is asked to."""
    return nullcontext() if address is None else StatusEndpoint(status, address)


class StatusEndpoint:
    def __init__(self, status: PartyStatus, address: str) -> None:
        self._looks = _Looks()
        self._server = _StatusServer(address, partial(_Handler, status, self._looks))
        self._host, port = str(self._server.server_address[0]), self._server.server_address[1]
        self.address = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        """The address that it is served at."""

    def __enter__(self) -> Self:
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="status", daemon=True
        )
        self._thread.start()
        logger.info("status: http://%s/metrics, /healthz and /readyz", self.address)
        if not is_numeric_loopback(self._host):
            logger.warning(
                "status: %s can be reached from other machines, without password and encryption; "
                "see to it that only those who operate this party get through to it",
                self.address,
            )
        return self

    def wait_for_last_look(
        self, interruption: Callable[[], int | None], patience_s: float | None = None
    ) -> None:
        """Wait until the metrics are asked for once more, if they were asked for twice."""
        asked, every_s = self._looks.count, self._looks.every_s
        if every_s is None:
            return
        patience_s = (
            min(2 * every_s + LEAST_LOOK_S, LAST_LOOK_S) if patience_s is None else patience_s
        )
        until = time.monotonic() + patience_s
        while self._looks.count == asked and time.monotonic() < until and not interruption():
            time.sleep(_POLL_S)

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_GOODBYE_S)


class _Looks:
    def __init__(self) -> None:
        self.count = 0
        self.every_s: float | None = None
        self._last_at: float | None = None

    def note(self) -> None:
        now = time.monotonic()
        if self._last_at is not None:
            self.every_s = now - self._last_at
        self._last_at = now
        self.count += 1


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE_S
    server: "_StatusServer"

    def __init__(self, status: PartyStatus, looks: _Looks, *connection: Any) -> None:
        self._status = status
        self._looks = looks
        super().__init__(*connection)

    def do_GET(self) -> None:
        path, kind = self.path.partition("?")[0].rstrip("/"), "application/json"
        code, facts = 200, self._status.facts()
        if path == "/healthz":
            facts = {"status": "ok", **facts}
        elif path == "/readyz":
            ready, reason = self._status.readiness
            code = 200 if ready else 503
            facts = {"status": "ready" if ready else "not ready", "reason": reason, **facts}
        elif path != "/metrics":
            code, facts = 404, {"error": "expected /healthz, /readyz or /metrics"}
        body = json.dumps(facts).encode() + b"\n"
        if path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            body = generate_latest(self._status.metrics.registry)
        if path == "/metrics" and self.command == "GET":
            self._looks.note()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def parse_request(self) -> bool:
        """Refuse also a request with two lengths, and one that was meant for another host."""
        if not super().parse_request():
            return False
        if "Content-Length" in self.headers and "Transfer-Encoding" in self.headers:
            self.send_error(400)
            return False
        if not all(map(self.server.hosts.fullmatch, self.headers.get_all("Host", ()))):
            self.send_error(421)
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        ...


class _StatusServer(ThreadingTCPServer):
    """Answers a few requests at the same time; one more ends the oldest."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, handler: Callable[..., _Handler]) -> None:
        host, port = split_address(address, least_port=0)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        self._oldest_first: list[socket.socket] = []
        try:
            super().__init__((host, port), handler)
        except (OSError, UnicodeError) as error:
            raise SettingsError(f"status: cannot serve at {address}: {error}") from error
        # Else a page of a name that leads to this machine could ask through a browser here. Beyond
        # loopback, those who operate the party ask by whatever names their network has.
        known = rf"(localhost|{re.escape(host)}|[0-9.]+|\[[0-9a-f:.]+])(:[0-9]*)?"
        is_local = is_numeric_loopback(str(self.server_address[0]))
        self.hosts = re.compile(known if is_local else ".*", re.IGNORECASE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            # Whoever sends a request byte by byte must not keep a health check waiting.
            with suppress(IndexError, OSError):  # it has just ended
                self._oldest_first[0].shutdown(socket.SHUT_RDWR)
            self._slots.acquire()
        self._oldest_first.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._oldest_first.remove(request)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.debug("status: a request failed", exc_info=True)
