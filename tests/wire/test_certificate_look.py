"""The look at the active party's certificate: it ends in time, and its errors give the reason."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from splitveil.common.errors import PeerError, PeerUnreachable, PeerUntrusted, SettingsError
from splitveil.common.run.contract import Contract
from splitveil.common.wire import endpoint, http_proxy
from splitveil.common.wire.endpoint import LOOK_TIMEOUT_S, judged_certificate, open_channel
from splitveil.common.wire.http_proxy import HttpProxy
from splitveil.deploy.authority import PartyFolder
from tests.support.certificates import NAMES, add_unusual, certs, files, make
from tests.support.runs import CONTRACT, in_background

OWN = Contract.model_validate(CONTRACT)
SUBJECT_ALTERNATIVE_NAME = x509.ObjectIdentifier("2.5.29.17")
UNKNOWN, UNKNOWN_TOO = (x509.ObjectIdentifier(f"1.3.6.1.4.1.99999.{last}") for last in (1, 2))
UNKNOWN_DER, UNKNOWN_TOO_DER = (bytes.fromhex(f"2b06010401868d1f0{last}") for last in (1, 2))


@contextmanager
def answering(folder: Path, party: str) -> Iterator[int]:
    """Complete the TLS handshake with every caller, as a party would, and then stay silent."""
    own = PartyFolder(folder / party)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.private_key)

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = listener.accept()
                # The look ends in the middle of the handshake.
                with near, suppress(OSError), context.wrap_socket(near, server_side=True):
                    pass

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        in_background(accept)
        yield int(listener.getsockname()[1])


class Dripping:
    """A connection on which a byte comes every second; the last byte of the data comes for ever."""

    def __init__(self, data: bytes) -> None:
        self.now = 0.0
        self.received = 0
        self._data = data

    def __enter__(self) -> "Dripping":
        return self

    def __exit__(self, *_: object) -> None: ...

    def monotonic(self) -> float:
        return self.now

    def settimeout(self, value: float) -> None:
        assert value > 0

    def sendall(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def recv(self, most: int) -> bytes:
        assert most > 0
        self.now += 1
        self.received += 1
        return self._data[self.received - 1 : self.received] or self._data[-1:]


def test_a_peer_that_never_finishes_a_message_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch, trusted: Path
) -> None:
    authority = PartyFolder(trusted / "passive").authority.read_bytes()
    # A handshake record of 16,384 bytes, with the beginning of a message that is longer still.
    connection: Any = Dripping(bytes.fromhex("16 0303 4000 02 ffffff"))
    monkeypatch.setattr(endpoint, "time", connection)
    with pytest.raises(PeerUnreachable, match="it does not answer in time"):
        judged_certificate(connection, authority, NAMES["active"])
    assert connection.received <= LOOK_TIMEOUT_S


def test_a_proxy_that_never_finishes_its_reply_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Dripping(b"HTTP/1.1 200 OK\r\nFiller: x")
    monkeypatch.setattr(socket, "create_connection", lambda *_: connection)
    monkeypatch.setattr(http_proxy, "time", connection)
    with pytest.raises(PeerUnreachable, match=r"proxy \(it does not answer in time\)"):
        HttpProxy("127.0.0.1", 9).connect("active.example:1", LOOK_TIMEOUT_S)
    assert connection.received <= LOOK_TIMEOUT_S


def dns(name: str) -> bytes:
    return b"\x82" + bytes([len(name)]) + name.encode()


def sequence(content: bytes) -> bytes:
    return b"\x30" + bytes([len(content)]) + content


# Its own name and one of an unsupported kind (ediPartyName), or one extension two times.
OTHER_KIND = x509.UnrecognizedExtension(
    SUBJECT_ALTERNATIVE_NAME, sequence(dns(NAMES["active"]) + b"\xa5\x05\xa1\x03\x0c\x01x")
)
TWO = [x509.UnrecognizedExtension(kind, b"\x05\x00") for kind in (UNKNOWN, UNKNOWN_TOO)]
TWICE = {"extensions": TWO, "replaced": (UNKNOWN_TOO_DER, UNKNOWN_DER)}


@pytest.mark.parametrize(
    ("names", "strange"),
    [([], {"extensions": [OTHER_KIND]}), ([x509.DNSName(NAMES["active"])], TWICE)],
)
def test_a_certificate_that_cannot_be_read_is_refused_and_no_fault(
    tmp_path: Path,
    names: list[x509.GeneralName],
    strange: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make(tmp_path / "certificates")
    add_unusual(folder, "strange", names, **strange)
    credentials = files(folder, "passive").current()
    with (
        answering(folder, "strange") as port,
        # OpenSSL itself may refuse it, with words of its own.
        pytest.raises(PeerUntrusted, match=r"cannot be (read|believed)"),
    ):
        open_channel(f"127.0.0.1:{port}", OWN, credentials)
    # As a party's own, it is a bad setting.
    with pytest.raises(SettingsError, match=r"security\.certificate: .*cannot be read"):
        files(folder, "strange", NAMES["active"]).current()
    capsys.readouterr()
    assert certs(["show", str(PartyFolder(folder / "strange").certificate)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_own_key_of_an_unknown_kind_is_a_bad_setting(tmp_path: Path) -> None:
    folder = make(tmp_path / "certificates")
    own = PartyFolder(folder / "passive")
    # PKCS 8, of an algorithm that nobody knows.
    algorithm = sequence(b"\x06\x09" + UNKNOWN_DER)
    der = sequence(b"\x02\x01\x00" + algorithm + b"\x04\x02\x05\x00")
    pem = ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", "PRIVATE KEY")
    own.private_key.write_text(pem)
    with pytest.raises(SettingsError, match=r"security\.private_key: .* expected a private key"):
        files(folder, "passive").current()


@pytest.mark.parametrize("identity", ["a" * 64, "active..splitveil"])
def test_an_identity_need_not_be_the_name_of_a_host(tmp_path: Path, identity: str) -> None:
    folder = make(tmp_path / "certificates")
    add_unusual(folder, "active-too", [x509.DNSName(identity)])
    authority = PartyFolder(folder / "passive").authority.read_bytes()
    with (
        answering(folder, "active-too") as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        pinned = judged_certificate(connection, authority, identity)
    expected = PartyFolder(folder / "active-too").certificate.read_text()
    assert ssl.PEM_cert_to_DER_cert(pinned.decode()) == ssl.PEM_cert_to_DER_cert(expected)


def numbers(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Let every name have a number for each port, of somebody on this machine."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        named = host == "active.example"
        return found if named else real(host, port, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_every_number_of_a_name_is_looked_at_until_one_is_the_active_party_s(
    monkeypatch: pytest.MonkeyPatch, trusted: Path, tmp_path: Path
) -> None:
    credentials = files(trusted, "passive").current()
    foreign = make(tmp_path / "foreign")
    with (
        answering(foreign, "active") as other,
        answering(trusted, "active") as genuine,
        socket.socket() as deaf,
    ):
        deaf.bind(("127.0.0.1", 0))  # held, so that nobody else listens there
        port = int(deaf.getsockname()[1])
        numbers(monkeypatch, port, other, genuine)  # nobody, somebody else, and the right one
        open_channel("active.example:1", OWN, credentials).close()
        numbers(monkeypatch, other, port)
        with pytest.raises(PeerUntrusted, match="not signed by any authority"):
            open_channel("active.example:1", OWN, credentials)
        numbers(monkeypatch, port, port)
        with pytest.raises(PeerUnreachable, match="no connection to the peer"):
            open_channel("active.example:1", OWN, credentials)


@pytest.mark.parametrize(
    "proxy",
    [HttpProxy("a" * 64, 9), HttpProxy("127.0.0.1", 9, "user:\udcff")],
    ids=["name", "password"],
)
def test_a_proxy_that_cannot_be_named_or_asked_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, proxy: HttpProxy
) -> None:
    if proxy.credentials:
        monkeypatch.setattr(socket, "create_connection", lambda *_: Dripping(b"x"))
    with pytest.raises(PeerError, match="no connection to the proxy"):
        proxy.connect("active.example:1", 1.0)
