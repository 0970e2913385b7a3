"""Addresses: early refusals, and the actual destination of plain text."""

import socket
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.text.addresses import HostAndPort, on_loopback, split_address
from splitveil.common.wire.endpoint import add_port
from splitveil.passive_party.settings import PassiveSettings
from tests.support.loopback import peer_of, serving
from tests.support.runs import Parties, build_parties


@pytest.fixture(scope="module")
def parties(example: Path) -> Parties:
    return build_parties(example)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:99999",
        "127.0.0.1:65536",
        "127.0.0.1:0",
        "127.0.0.1:-1",
        "127.0.0.1:",
        "127.0.0.1",
        "127.0.0.1:http",
        "127.0.0.1:\u0665",
        ":50051",
        "*:50051",
        "::1:50051",
        "[127.0.0.1]:50051",
        "[::1:50051",
        "a..b:50051",
        ".a:50051",
        "a b:50051",
        f"{'a' * 64}:50051",
        "unix:/tmp/socket:1",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected|does not appear|Octet|At least"):
        split_address(address)


@pytest.mark.parametrize(("party", "setting"), [("active", "listen"), ("passive", "connect")])
def test_an_address_of_the_settings_is_refused_in_one_line(
    example: Path, party: str, setting: str
) -> None:
    section = ActiveSettings if party == "active" else PassiveSettings
    with pytest.raises(SettingsError) as refused:
        load_party_settings(section, example / f"{party}.yaml", [f"{setting}='127.0.0.1:99999'"])
    (line,) = refused.value.problems
    assert f"{party}.yaml: {setting}: " in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("active-party:50051", ("active-party", 50051)),
        ("a.b_c.example.:1", ("a.b_c.example.", 1)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("[::1]:50051", ("::1", 50051)),
    ],
)
def test_what_is_an_address_is_taken_apart(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == HostAndPort(*parts)


def test_plain_text_goes_and_listens_where_the_name_led_when_it_was_judged(
    parties: Parties, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's resolver finds the name on loopback, and gRPC's own finds it nowhere."""
    host, found = "rebound.invalid", socket.getaddrinfo

    def resolve(name: Any, *rest: Any, **named: Any) -> Any:
        return found("127.0.0.1" if name == host else name, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with serving(parties, port, host=host), peer_of(parties, port, host=host) as peer:
        assert peer.is_ready()


def test_a_name_that_leads_to_two_places_needs_both_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leading_to(*numbers: str) -> None:
        found = [(0, 0, 0, "", (number, 1)) for number in numbers]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    leading_to("::1", "127.0.0.1")
    assert on_loopback("localhost:1", "connect") == "127.0.0.1:1"
    leading_to("::1")
    assert on_loopback("localhost:1", "connect") == "[::1]:1"
    leading_to("127.0.0.1", "192.168.1.1")
    with pytest.raises(SettingsError, match="is not on loopback"):
        on_loopback("localhost:1", "connect")


@pytest.mark.parametrize("bound", [0, 34463])
def test_a_port_that_was_not_bound_is_found_out(bound: int) -> None:
    class Server:
        def add_insecure_port(self, address: str) -> int:
            return bound

    with pytest.raises(SettingsError, match=f"cannot serve at 127.0.0.1:7: gRPC took port {bound}"):
        add_port(Server(), "127.0.0.1:7", None)  # type: ignore[arg-type]
