"""Online predictions in tests: a served model, and programs that ask over HTTP."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitveil.active_party.commands.serve import (
    Access,
    access_of,
    impatient,
    open_service,
    serving,
)
from splitveil.active_party.http.service import AnswerService
from splitveil.active_party.http.status import OnlineStatus
from splitveil.active_party.predict.predictor import open_predictor
from splitveil.common.record.transcript import Transcript
from splitveil.common.wire.noted_calls import AllNotes
from tests.support import joint
from tests.support.joint import Trained, connecting_to, free_port
from tests.support.runs import CPU

ASKING_TAKES_S = 60.0
"""Longer than any answer takes on a busy machine."""


class Told(NamedTuple):
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """NaN where there is none."""
        values = self.body["probabilities"]
        width = next((len(v) for v in values if isinstance(v, list)), None)
        gap = np.nan if width is None else [np.nan] * width
        return np.array([gap if value is None else value for value in values], np.float32)


@dataclass
class Program:
    http: int
    service: AnswerService
    status: OnlineStatus
    access: Access
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] | None = None

    def get(self, path: str) -> Told:
        return self._told("GET", path, None)

    def ask(self, ids: Sequence[object], **more: object) -> Told:
        return self.post(json.dumps({"ids": list(ids), **more}).encode())

    def post(self, body: bytes) -> Told:
        return self._told("POST", "/predict", body)

    def raw(self, request: bytes) -> bytes:
        """Return the head of the answer to some bytes."""
        with socket.create_connection(("127.0.0.1", self.http), ASKING_TAKES_S) as client:
            client.sendall(request)
            return client.recv(2**16).partition(b"\r\n\r\n")[0]

    def _told(self, method: str, path: str, body: bytes | None) -> Told:
        kind: Any = http.client.HTTPConnection
        more: dict[str, Any] = {}
        if self.tls is not None:
            kind, more = http.client.HTTPSConnection, {"context": self.tls}
        connection = kind("127.0.0.1", self.http, timeout=ASKING_TAKES_S, **more)
        try:
            given = {"Content-Type": "application/json", **(self.headers or {})}
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in str(answer.getheader("Content-Type"))
            found = json.loads(text) if is_json else {"text": text}
            return Told(answer.status, found, dict(answer.getheaders()))
        finally:
            connection.close()


@contextmanager
def answering(
    trained: Trained,
    *overrides: str,
    ports: Mapping[str, int],
    transcript: Transcript | None = None,
    table: Path | None = None,
) -> Iterator[Program]:
    """Answer programs at the active party; passive parties serve at these ports, or do not."""
    settings = trained.active(
        *("serving.timeout_s=30", "serving.fallback=false"),
        f"serving.http='127.0.0.1:{free_port()}'",
        *overrides,
        connecting_to(ports),
    )
    with ExitStack() as resources:
        status = OnlineStatus(settings.contract)
        notes = status if transcript is None else AllNotes(transcript, status)
        predictor = resources.enter_context(
            open_predictor(impatient(settings), CPU, None, table, notes)
        )
        service = open_service(settings, predictor, resources, status, transcript)
        access = access_of(settings)
        server = resources.enter_context(serving(settings, service, access))
        yield Program(server.port, service, status, access)


@contextmanager
def asked(trained: Trained, *overrides: str, **more: Any) -> Iterator[Program]:
    """Answer programs while every passive party serves as well."""
    with ExitStack() as resources:
        ports = {name: free_port() for name in trained.settings.passive}
        for name, port in ports.items():
            resources.enter_context(joint.serving(trained.passive(name), port))
        yield resources.enter_context(answering(trained, *overrides, ports=ports, **more))
