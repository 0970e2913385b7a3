"""Mutual TLS: accepted and refused peers, and the log lines of each refusal."""

import logging
import os
import re
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil import common
from splitveil.active_party.grpc_server.server import start_server
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.errors import PeerUnreachable, PeerUntrusted, SettingsError
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path, open_channel
from splitveil.deploy.authority import PartyFolder, keep_certificates
from splitveil.passive_party.grpc_peer import GrpcPeer
from tests.support.certificates import NAMES, Unchecked, add_expired, files, make
from tests.support.loopback import peer_of, serving
from tests.support.mutations import AtStep
from tests.support.programs import run_program
from tests.support.proxies import Relay
from tests.support.runs import Parties, build_parties, in_background, run_in_process


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return certificates of one authority: both parties', a stranger's, and expired ones."""
    folder = make(tmp_path_factory.mktemp("trusted"), mallory="mallory.splitveil")
    add_expired(folder, "late-passive", NAMES["passive"])
    return folder


@pytest.fixture(scope="module")
def parties(example: Path) -> Parties:
    """Return parties that never meet: the active one waits throughout."""
    return build_parties(example)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, without the one about the example's nonce."""
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in messages if "nonce" not in message]


def test_a_server_without_tls_is_refused_at_once_and_with_the_reason(
    parties: Parties, trusted: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No line of the log is worth more than the error."""
    caplog.clear()
    with (
        serving(parties, port, None),
        peer_of(parties, port, files(trusted, "passive")) as peer,
        pytest.raises(PeerUntrusted, match="the peer answers without TLS") as caught,
    ):
        parties.run.run(peer)
    assert caught.value.exit_code == 4
    assert parties.session.stage is Stage.WAITING
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        ("late-passive", "CERTIFICATE_VERIFY_FAILED: certificate has expired"),
        (None, "WRONG_VERSION_NUMBER"),
    ],
)
def test_a_client_without_a_valid_certificate_gets_no_connection(
    parties: Parties,
    trusted: Path,
    port: int,
    client: str | None,
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The server's line is gRPC's; the client learns nothing and can only guess."""
    shown = None if client is None else Unchecked(trusted, client)
    with serving(parties, port, files(trusted, "active")), peer_of(parties, port, shown) as peer:
        capfd.readouterr()
        with pytest.raises(PeerUnreachable, match="may refuse this party's certificate"):
            peer.is_ready()
    lines = capfd.readouterr().err.splitlines()
    (line,) = (one for one in lines if "Handshake failed with error" in one)
    assert reason in line
    assert parties.session.stage is Stage.WAITING


def test_a_genuine_certificate_with_another_name_reaches_no_handler(
    parties: Parties, trusted: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(parties, port, files(trusted, "active")) as service,
        peer_of(parties, port, Unchecked(trusted, "mallory")) as peer,
    ):
        caplog.clear()
        heard_at = service._callers["passive"].heard_at
        with pytest.raises(PeerUntrusted, match="does not accept this party's certificate"):
            parties.run.run(peer)
        with pytest.raises(PeerUntrusted):
            peer.is_ready()
        assert service._callers["passive"].heard_at == heard_at
    (line,) = warnings(caplog)
    assert re.fullmatch(
        r"refused ipv4:127\.0\.0\.1:\d+ with certificate CN=mallory\.splitveil: "
        r"it does not carry the name of any passive party of the contract",
        line,
    )
    assert parties.session.stage is Stage.WAITING
    assert parties.session.lifecycle.error is None


def test_no_kind_of_call_passes_without_the_right_name(
    parties: Parties, trusted: Path, port: int
) -> None:
    contract = parties.run.contract
    shown = Unchecked(trusted, "mallory").current()
    with (
        serving(parties, port, files(trusted, "active")),
        open_channel(f"127.0.0.1:{port}", contract, shown) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        train: Any = channel.stream_stream(method_path("Train"))
        leave: Any = channel.unary_unary(method_path("Leave"))
        request = health_pb2.HealthCheckRequest()
        calls: list[Callable[[], object]] = [
            lambda: health.Check(request, timeout=60),
            lambda: list(health.Watch(request, timeout=60)),
            lambda: list(train(iter([b""]), timeout=60)),
            lambda: leave(b"", timeout=60),
        ]
        statuses = set()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            statuses.add((caught.value.code(), caught.value.details()))
    assert statuses == {(grpc.StatusCode.UNAUTHENTICATED, "untrusted: not accepted")}
    assert parties.session.stage is Stage.WAITING


def test_a_party_cannot_open_a_run_in_another_party_s_name(
    parties: Parties, trusted: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(parties, port, files(trusted, "active")),
        peer_of(parties, port, files(trusted, "passive")) as peer,
    ):
        caplog.clear()
        with pytest.raises(PeerUntrusted):
            peer.handshake("another", parties.run.contract.canonical_json(), bytes(32))
    (line,) = warnings(caplog)
    assert "it is passive's, and the handshake names another party" in line


def test_a_certificate_cannot_write_lines_of_its_own_into_the_log(
    parties: Parties, trusted: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "eve\n12:00 active INFO \x1b[2J")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(x509, "Name", lambda _: name)
        keep_certificates(trusted, {"eve": "eve.splitveil"})
    with (
        serving(parties, port, files(trusted, "active")),
        peer_of(parties, port, Unchecked(trusted, "eve")) as peer,
    ):
        caplog.clear()
        with pytest.raises(PeerUntrusted):
            peer.is_ready()
    (line,) = warnings(caplog)
    assert "eve" in line
    assert line.isprintable()


def test_the_identities_of_the_contract_decide_and_not_the_default_ones(
    example: Path, trusted: Path, port: int
) -> None:
    overrides = ["contract.identities={passive: mallory.splitveil}"]
    renamed = build_parties(example, overrides, overrides)
    with serving(renamed, port, files(trusted, "active")):
        refused = peer_of(renamed, port, files(trusted, "passive"))
        with refused as peer, pytest.raises(PeerUntrusted):
            peer.is_ready()
        with peer_of(renamed, port, Unchecked(trusted, "mallory")) as peer:
            assert peer.is_ready()


def python_context(trusted: Path, purpose: int, party: str) -> ssl.SSLContext:
    own = PartyFolder(trusted / party)
    context = ssl.SSLContext(purpose)
    context.load_cert_chain(own.certificate, own.private_key)
    context.load_verify_locations(own.authority)
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_of_tls_1_2_gets_no_connection(
    parties: Parties, trusted: Path, port: int, version: ssl.TLSVersion
) -> None:
    context = python_context(trusted, ssl.PROTOCOL_TLS_CLIENT, "passive")
    context.maximum_version = version
    with (
        serving(parties, port, files(trusted, "active")),
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
    ):
        if version is ssl.TLSVersion.TLSv1_3:
            with context.wrap_socket(plain, server_hostname=NAMES["active"]) as connection:
                assert connection.version() == "TLSv1.3"
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(plain, server_hostname=NAMES["active"])


def test_a_server_of_tls_1_2_is_refused_at_once(parties: Parties, trusted: Path) -> None:
    context = python_context(trusted, ssl.PROTOCOL_TLS_SERVER, "active")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with plain, pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(plain, server_side=True)

        in_background(serve)
        port = listener.getsockname()[1]
        with (
            peer_of(parties, port, files(trusted, "passive")) as peer,
            pytest.raises(PeerUntrusted, match=r"does not speak TLS 1\.3"),
        ):
            parties.run.run(peer)


# gRPC is imported, and only then splitveil; then the same with the variable in the environment.
GRPC_FIRST = """
import sys
import grpc
from pathlib import Path
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.errors import SettingsError
from splitveil.common.wire.endpoint import channel_credentials, server_credentials
folder = Path(sys.argv[1]) / "active"
paths = [folder / f"{name}.pem" for name in ("certificate", "private_key", "authority")]
files = CredentialFiles(*paths, "active.splitveil")
for make, *own in ((server_credentials, files), (channel_credentials, files.current(), b"")):
    try:
        make(*own)
        print("made")
    except SettingsError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("suites", "expected"), [("", "may agree to TLS 1.2"), (common.NEVER_AGREED, "made")]
)
def test_credentials_are_refused_where_grpc_may_agree_to_tls_1_2(
    trusted: Path, suites: str, expected: str
) -> None:
    environment = {**os.environ, common.SUITES: suites}
    done = run_program(sys.executable, "-c", GRPC_FIRST, str(trusted), env=environment, stderr=None)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(expected in line for line in lines)


def test_plain_text_stays_on_loopback(parties: Parties) -> None:
    contract, reconnect = parties.run.contract, parties.passive_settings.reconnect
    service = ActiveService(parties.session, parties.engine, deadline_s=300)
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(SettingsError, match="is not on loopback"):
            start_server(service, contract, address)
    for address in ("10.0.0.1:1", "192.168.1.1:1", "[fd00::1]:1", "8.8.8.8:1"):
        with pytest.raises(SettingsError, match="is not on loopback"):
            GrpcPeer(PeerConnection(address, contract), reconnect)


def test_replaced_certificates_are_taken_up_without_a_restart_and_cut_no_connection(
    example: Path, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Both parties change to another authority: a party with the old one would be refused."""
    caplog.set_level(logging.INFO)
    own, new = make(tmp_path / "own"), make(tmp_path / "new")
    parties, undisturbed = build_parties(example), build_parties(example)
    relay = Relay(port)
    connections: list[int] = []

    def rotate() -> None:
        for party in NAMES:
            for source in PartyFolder(new / party)[0].iterdir():
                source.replace(own / party / source.name)

    def cut() -> None:
        connections.append(relay.connections)
        relay.cut()

    with (
        relay,
        serving(parties, port, files(own, "active")),
        peer_of(parties, relay.port, files(own, "passive"), kind=AtStep) as peer,
    ):
        peer.actions = {2: rotate, 5: cut}
        parties.run.run(peer)
    run_in_process(undisturbed)
    assert connections == [2]  # the look at the certificate, and the channel
    assert parties.session.stage is Stage.FINISHED
    assert parties.active.losses == undisturbed.active.losses
    assert sum("new certificate in use" in r.getMessage() for r in caplog.records) == 2
