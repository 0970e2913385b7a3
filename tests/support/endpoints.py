"""Whole runs over localhost whose operators look at both parties' metrics."""

import re
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from splitveil.active_party.assembly import build_session
from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.trainer_builder import TrainerBuilder as TopBuilder
from splitveil.common.alignment.exchange import build_engine
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_status import PartyStatus, RunStatus
from splitveil.common.record.run_record import Summary
from splitveil.common.wire.connection import PeerConnection
from splitveil.passive_party.assembly import BottomBuilder
from splitveil.passive_party.grpc_peer import GrpcPeer, noting_attempts
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.run import PassiveRun
from tests.support.runs import CPU
from tests.support.simulation import free_address, read_settings

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Name and labels -> value."""


class Watched(NamedTuple):
    active: ActiveStatus
    passive: RunStatus
    passive_summary: Summary


def watched_run(folder: Path, into: Path, *active: str) -> Watched:
    """Let both parties meet over localhost, with the recorders that the programs have.

    ``into`` gets a folder for each party's records.
    """
    both = [text for text in active if text.startswith("contract.")]
    settings = read_settings(folder, active, both)
    (passive_settings,) = settings.passive.values()
    contract = settings.active.contract
    statuses = ActiveStatus(settings.active), RunStatus("passive", contract)
    for party in ("active", "passive"):
        (into / party).mkdir(parents=True)
    own = PartyData.load(passive_settings.data, folder, contract.split)
    adversary = passive_settings.adversary
    labels = None
    if adversary is not None and adversary.labels is not None:
        labels = PartyData.load(adversary.labels, folder)
    address = free_address()
    with ExitStack() as stack:
        recorder = ActiveRecorder(settings.active, into / "active", statuses[0])
        recorder = stack.enter_context(recorder)
        labelled = PartyData.load(settings.active.data, folder, contract.split)
        top = TopBuilder(settings.active, labelled, CPU, statuses[0].phases)
        session = build_session(
            settings.active, labelled, top, recorder, partial(draw_nonce, settings.active)
        )
        engine = build_engine(contract.alignment)
        service = ActiveService(session, engine, 300, status=statuses[0])
        server = start_server(service, contract, address, transcript=statuses[0])
        stack.callback(lambda: server.stop(1).wait())
        stack.enter_context(statuses[0].serving(session))
        attacker = PassiveRecorder(passive_settings, into / "passive", own.ids, labels, statuses[1])
        attacker = stack.enter_context(attacker)
        me = Participant(contract, "passive", own.ids)
        run = PassiveRun(
            Aligner(me, engine, partial(draw_nonce, passive_settings)),
            BottomBuilder(passive_settings, own, CPU),
            attacker,
            phases=statuses[1].phases,
        )
        connection = PeerConnection(address, contract, transcript=statuses[1])
        note = noting_attempts(statuses[1])
        peer = GrpcPeer(connection, passive_settings.reconnect, note=note)
        run.run(stack.enter_context(peer))
    return Watched(*statuses, attacker.summary())


def series_of(status: PartyStatus) -> Series:
    families = text_string_to_metric_families(generate_latest(status.metrics.registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def without_time(series: Series) -> Series:
    """Leave out time, and what the operating system says about the process."""
    return {
        key: value
        for key, value in series.items()
        if not re.search("_seconds|^process_", key[0]) and key[0] != "splitveil_run_info"
    }


def names_in(series: Series) -> set[str]:
    return {name for name, _ in series}


def value_of(status: PartyStatus, name: str, **labels: str) -> float:
    return series_of(status)[name, tuple(sorted(labels.items()))]


def asked(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Ask an endpoint, and return the code and the text.

    Raises:
        OSError: nobody answers.
    """
    host, _, port = address.rpartition(":")
    # A socket that asks a port without a server, again and again, meets itself one day.
    other = None if ":" in host else ("127.0.0.2", 0)
    connection = HTTPConnection(host.strip("[]"), int(port), timeout=60, source_address=other)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()
