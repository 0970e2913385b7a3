"""``splitveil check passive.yaml``: checks settings, data, model and connection only."""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, get_args

import grpc
import numpy as np

from splitveil.common.alignment.buckets import padded_size
from splitveil.common.errors import InvalidMessage, PeerUnreachable, SettingsError
from splitveil.common.models.device import device_in_words
from splitveil.common.models.factory import Trial, build_bottom_model, lone_row_in_words
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.settings import bins_of
from splitveil.common.party import command_line
from splitveil.common.party.command_line import Check
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.endpoint import status_checks
from splitveil.common.party.party_data import PartyData, form_of_own_ids, open_earlier_model
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.record.model_files import PretrainedWeights
from splitveil.common.run.contract import DTYPE_BYTES, PipelineDepth
from splitveil.common.wire import limits, probes
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import check_security, method_path, shown_certificate
from splitveil.passive_party.assembly import evaluation_labels
from splitveil.passive_party.exposure_plan import check_exposure
from splitveil.passive_party.grpc_peer import connection_of, idle_peer
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb

ROUND_TRIPS = 20
UNDER_WAY = 8  # large probes at the same time, so that the round trip slows none
SPEED_S = 2.0  # time for which the speed is measured
MOST_BYTES = 256 * 2**20
_CALL_S = 30.0
_RETRY_S = 0.5
_ACTIVE = "the active party"


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

    def speed(self) -> tuple[float, float]:
        """Return a round trip's seconds, their median, and the bytes per second in each direction.

        Both directions are measured at once, as in training.
        """
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
        return statistics.median(trips), passed / taken_s

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
            method_path("Probe", probes.SERVICE),
            request_serializer=pb.ProbeRequest.SerializeToString,
            response_deserializer=limits.reader(pb.ProbeReply, limits.PROBE_BYTES),
        )
        metadata = ((limits.PARTY_KEY, self._settings.party),) if several else None
        return call.future(request, timeout=_CALL_S, metadata=metadata)

    def _ended(self, call: Any) -> pb.ProbeReply:
        try:
            reply: pb.ProbeReply = limits.believed(call.result())
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                unknown = "the active party's version answers no probes"
                raise InvalidMessage(unknown) from error
            raise self._connection.error_of(error) from error
        return reply


def connection_checks(
    settings: PassiveSettings, wait_s: float, connection: PeerConnection | None = None
) -> Iterator[probes.Check]:
    contract, credentials = settings.contract, credential_files(settings, settings.party)
    connection = connection or connection_of(settings, credentials)
    form = form_of_own_ids(settings)
    own = probes.Introduction(settings.party, contract.canonical_json(), time.time(), form)
    probing = Probing(settings, connection, own)
    try:
        peer, ahead_s, error_s = probing.introduce(wait_s)
        round_trip_s, bytes_per_s = probing.speed()
    except PeerUnreachable as error:
        raise PeerUnreachable(f"{connection.where}: {error}") from error
    finally:
        connection.close()
    proxy = "direct" if connection.proxy is None else "as the setting proxy says"
    yield lambda: f"connection: {connection.where}, {proxy}"
    if credentials is not None:
        shown = shown_certificate(
            settings.connect, contract, credentials.current(), connection.proxy
        )
        yield lambda: probes.certificate_in_words(shown, _ACTIVE)
    yield lambda: probes.clock_in_words(ahead_s, error_s)
    allowed = ""
    if not contract.is_one_shot:
        # An activation and its gradient pass one after the other, those of other steps meanwhile.
        step_bytes = contract.batch_size * contract.cut_dim * DTYPE_BYTES[contract.cut_dtype]
        one_way_s, depths = step_bytes / max(bytes_per_s, 1.0), get_args(PipelineDepth)
        most = (min(n / (round_trip_s + 2 * one_way_s), 1 / one_way_s) for n in depths)
        allowed = (
            f": at most {', '.join(f'{steps:,.0f}' for steps in most)} steps/s with pipeline_depth "
            f"{', '.join(map(str, depths))}; the contract has {contract.pipeline_depth}"
        )
    yield (
        lambda: (
            f"line: round trip {1000 * round_trip_s:.1f} ms (median of {ROUND_TRIPS}), "
            f"{8e-6 * bytes_per_s:,.0f} Mbit/s in each direction at once{allowed}"
        )
    )
    yield from probes.checks_of(contract, own, peer, _ACTIVE)


def check(parsed: argparse.Namespace) -> None:
    settings: PassiveSettings = parsed.loaded
    is_one_sided = settings.contract.is_one_sided
    if is_one_sided and parsed.connect:
        raise SettingsError(
            "--connect: with alignment.kind one_sided the active party calls this one: start "
            "splitveil serve passive.yaml, and have the active party check --connect"
        )

    def connection() -> str:
        credentials = credential_files(settings, settings.party)
        if is_one_sided:
            at = settings.answers.listen
            security = check_security(credentials, at, "answers.listen")
            return f"answers.listen: {at}, where serve offers the sealed table; {security}"
        security = check_security(credentials, settings.connect, "connect")
        state = "probed below" if parsed.connect else _peer_state(settings)
        return f"connect: {state}; security: {security}"

    def data_and_model() -> str:
        data = PartyData.of(settings)
        check_exposure(settings, data)
        earlier = open_earlier_model(settings)
        encoder = data.fit(np.arange(len(data.ids)), earlier, bins_of(settings.bottom_model))
        if encoder is None:
            raise SettingsError("data.features: the passive party needs features")
        contract, device = settings.contract, command_line.device_of(settings)
        padded_size(len(data.ids), contract.alignment.buckets, contract.alignment.max_set_size)
        build = partial(
            build_bottom_model,
            settings.bottom_model,
            encoder,
            contract.cut_shape,
            seed=settings.model_seed,
        )
        model = build(trial=Trial((contract.batch_size,), device))
        build_optimizer(settings.optimizer, model)  # has the model what rates names?
        but = "" if contract.drop_last else lone_row_in_words(build, device)
        PretrainedWeights.open(settings.bottom_model, settings.base_dir).put_into(model)
        if earlier is not None:
            earlier.put_into(model)
        fits = f"the bottom model fits them{but}"
        return f"data: {data.summary(contract)}; {fits}; {data.table.id_report.in_words()}"

    def labels() -> str:
        found = evaluation_labels(settings)
        return f"evaluation labels: {'none' if found is None else found.table.source}"

    details, adversary = [*status_checks(settings.status), labels], settings.adversary
    if adversary is not None and adversary.custom_attacks:
        shape = settings.contract.cut_shape
        details.append(
            lambda: (
                f"attacks: {', '.join(try_custom_attacks(adversary, shape))} can score gradients"
            )
        )
    parts: list[Iterable[Check]] = [
        [
            connection,
            lambda: f"device: {device_in_words(command_line.device_of(settings))}",
            data_and_model,
        ]
    ]
    is_ready = parsed.connect or is_one_sided
    then = "run {}" if is_ready else "check {} --connect, while the active party does"
    if parsed.connect:
        parts.append(connection_checks(settings, parsed.wait))
    command_line.report_check(
        settings, parsed, parts, details, f"splitveil {then.format(parsed.settings)}"
    )


def _peer_state(settings: PassiveSettings) -> str:
    with idle_peer(settings) as peer:
        where = peer.connection.where
        try:
            ready = peer.is_ready()
        except PeerUnreachable:
            return f"no active party answers at {where} now; a run would wait for it"
    return f"the active party at {where} is {'ready' if ready else 'not ready'}"
