"""Probes the connection to the active party: its certificate, clock, speed, contract, versions."""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc

from splitveil.common.errors import InvalidMessage, PeerUnreachable, SplitveilError
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.party_data import form_of_own_ids
from splitveil.common.run.contract import DTYPE_BYTES, Contract
from splitveil.common.wire import limits, probes
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import shown_certificate
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb

ROUND_TRIPS = 20
UNDER_WAY = 8  # large probes at the same time, so that the round trip slows none
SPEED_S = 2.0  # time for which the speed is measured
MOST_BYTES = 256 * 2**20
_CALL_S = 30.0
_RETRY_S = 0.5
_ACTIVE = "the active party"


class Speed(NamedTuple):
    round_trip_s: float  # median of the round trips
    bytes_per_s: float  # bytes in each direction, both at once, as in training


class Probing:
    def __init__(
        self, settings: PassiveSettings, connection: PeerConnection, own: probes.Introduction
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._own = own

    def introduce(self, wait_s: float) -> tuple[probes.Introduction, float, float]:
        """Return the peer's introduction, its clock's lead and its error, or raise PeerError."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self._introduced()
            except PeerUnreachable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _introduced(self) -> tuple[probes.Introduction, float, float]:
        self._call(pb.ProbeRequest())  # opens the connection, which no clock has to wait for
        sent = time.time()
        own = self._own._replace(clock_s=sent)
        reply = self._call(pb.ProbeRequest(introduction=probes.encode_introduction(own)))
        received = time.time()
        if not reply.HasField("introduction"):
            raise InvalidMessage("the active party does not introduce itself")
        peer = probes.decode_introduction(reply.introduction)
        half = (received - sent) / 2
        return peer, peer.clock_s - (sent + half), half + 0.001  # it says whole milliseconds

    def speed(self) -> Speed:
        trips = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            self._call(pb.ProbeRequest())
            trips.append(time.perf_counter() - begin)
        begin, taken_s, passed = time.perf_counter(), 0.0, 0
        for num_bytes in self._bytes_that_came_back():
            taken_s, passed = time.perf_counter() - begin, num_bytes
            if taken_s > SPEED_S:
                break
        return Speed(statistics.median(trips), passed / taken_s)

    def _bytes_that_came_back(self) -> Iterator[int]:
        request = pb.ProbeRequest(padding=bytes(limits.PROBE_PADDING_BYTES))
        waiting = deque(self._begin(request) for _ in range(UNDER_WAY))
        passed = 0
        try:
            while passed < MOST_BYTES:
                padding = self._ended(waiting.popleft()).padding
                if len(padding) != limits.PROBE_PADDING_BYTES:
                    raise InvalidMessage("a probe came back with another number of bytes")
                passed += len(padding)
                waiting.append(self._begin(request))
                yield passed
        finally:
            for call in waiting:
                call.cancel()

    def _call(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        return self._ended(self._begin(request))

    def _begin(self, request: pb.ProbeRequest) -> Any:
        contract = self._settings.contract
        several = len(contract.passive_parties) > 1
        call = self._connection.channel().unary_unary(
            probes.method_path(),
            request_serializer=pb.ProbeRequest.SerializeToString,
            response_deserializer=limits.reader(pb.ProbeReply, limits.PROBE_BYTES),
        )
        metadata = ((limits.PARTY_KEY, self._settings.party),) if several else None
        return call.future(request, timeout=_CALL_S, metadata=metadata)

    def _ended(self, call: Any) -> pb.ProbeReply:
        try:
            reply: pb.ProbeReply = limits.believed(call.result())
        except grpc.RpcError as error:
            raise self._meaning_of(error) from error
        return reply

    def _meaning_of(self, error: Exception) -> SplitveilError:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return InvalidMessage("the active party's version answers no probes")
        return self._connection.error_of(error)


def connection_checks(
    settings: PassiveSettings, connection: PeerConnection, wait_s: float
) -> Iterator[probes.Check]:
    contract = settings.contract
    form = form_of_own_ids(settings)
    own = probes.Introduction(settings.party, contract.canonical_json(), time.time(), form)
    probing = Probing(settings, connection, own)
    try:
        peer, ahead_s, error_s = probing.introduce(wait_s)
        found = probing.speed()
    except PeerUnreachable as error:
        raise PeerUnreachable(f"{connection.where}: {error}") from error
    finally:
        connection.close()
    proxy = "direct" if connection.proxy is None else "as the setting proxy says"
    yield lambda: f"connection: {connection.where}, {proxy}"
    credentials = credential_files(settings, settings.party)
    if credentials is not None:
        shown = shown_certificate(
            settings.connect, contract, credentials.current(), connection.proxy
        )
        yield lambda: probes.certificate_in_words(shown, _ACTIVE)
    yield lambda: probes.clock_in_words(ahead_s, error_s)
    yield lambda: _speed_in_words(found, contract)
    yield from probes.checks_of(contract, own, peer, _ACTIVE)


def _speed_in_words(found: Speed, contract: Contract) -> str:
    step_bytes = contract.batch_size * contract.cut_dim * DTYPE_BYTES[contract.cut_dtype]
    steps = 1 / (found.round_trip_s + step_bytes / max(found.bytes_per_s, 1.0))
    return (
        f"line: round trip {1000 * found.round_trip_s:.1f} ms (median of {ROUND_TRIPS}), "
        f"{8e-6 * found.bytes_per_s:,.0f} Mbit/s in each direction at once: enough for "
        f"{steps:,.0f} steps/s of this contract"
    )
