"""The certificates that each party accepts as the other's follow the same rule on both sides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.errors import PeerError, PeerUntrusted
from splitveil.common.party.credentials import in_lower_case
from tests.support.certificates import (
    CLIENT,
    NAMES,
    SERVER,
    Unchecked,
    add_unusual,
    files,
    make,
    spoil_signature,
)
from tests.support.inference import free_port
from tests.support.loopback import peer_of, serving
from tests.support.proxies import Relay
from tests.support.runs import Parties, build_parties, write_example

WRONG_NAME = "does not carry the called party's name"


Make = Callable[[Path, str], None]
"""Makes the certificate ``unusual`` in a folder, for one who wants to pass for the identity."""


def named(*patterns: str, **others: Any) -> Make:
    """Make one with some DNS names, in which {} is the identity."""

    def add(folder: Path, name: str) -> None:
        names = [x509.DNSName(pattern.format(name)) for pattern in patterns]
        add_unusual(folder, "unusual", names, **others)

    return add


ACCEPTED: dict[str, Make] = {
    "exact": named("{}"),
    "upper case": lambda folder, name: named(name.upper())(folder, name),
    "one of several": named("other.example", "*.example", "{}"),
    "no extended key usage": named("{}", purposes=()),
}


def wrong_end(folder: Path, name: str) -> None:
    only = CLIENT if name == NAMES["active"] else SERVER
    named(name, purposes=[only])(folder, name)


def other_authority(folder: Path, name: str) -> None:
    foreign = make(folder / "foreign")
    named(name)(foreign, name)
    (foreign / "unusual").rename(folder / "unusual")
    (folder / "unusual" / "authority.pem").write_bytes(
        (folder / "active" / "authority.pem").read_bytes()
    )


def bad_signature(folder: Path, name: str) -> None:
    named(name)(folder, name)
    spoil_signature(folder, "unusual")


def cut_short(other: bytes, rest: str = "x.evil") -> Make:
    """Make one whose only name begins with the identity, and goes on after unusual bytes."""

    def add(folder: Path, name: str) -> None:
        written = f"{name}{'~' * len(other)}{rest}".encode()
        spoilt = f"{name}".encode() + other + rest.encode()
        names = [x509.DNSName(written.decode())]
        add_unusual(folder, "unusual", names, replaced=(written, spoilt))

    return add


# What the passive party says of a server with such a certificate.
REFUSED: dict[str, tuple[Make, str]] = {
    "other name": (named("other.splitveil"), f"{WRONG_NAME}: .* found other.splitveil"),
    "common name only": (
        lambda folder, name: add_unusual(folder, "unusual", [], common_name=name),
        f"{WRONG_NAME}: .* found none",
    ),
    "wildcard": (named("*.splitveil"), f"{WRONG_NAME}: .* found \\*.splitveil"),
    "partial wildcard": (named("{:.3}*.splitveil"), WRONG_NAME),
    "trailing dot": (named("{}."), WRONG_NAME),
    "below the name": (named("x.{}"), WRONG_NAME),
    "on behind a NUL": (cut_short(b"\0"), f"{WRONG_NAME}: .*x00x.evil"),
    "a NUL at the end": (cut_short(b"\0", ""), WRONG_NAME),
    "on behind a line break": (cut_short(b"\n"), WRONG_NAME),
    "on behind a byte that is no ASCII": (cut_short(b"\xc3\xa9"), WRONG_NAME),
    "another name in the common name": (
        lambda folder, name: named("other.splitveil", common_name=name)(folder, name),
        WRONG_NAME,
    ),
    "not as a DNS name": (
        lambda folder, name: add_unusual(
            folder, "unusual", [x509.UniformResourceIdentifier(name), x509.RFC822Name(f"a@{name}")]
        ),
        WRONG_NAME,
    ),
    "expired": (named("{}", days=-1), "has expired"),
    "for the other end only": (wrong_end, "is not for servers"),
    "other authority of the same name": (other_authority, "a signature in the peer's chain"),
    "bad signature": (bad_signature, "a signature in the peer's chain"),
}


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Parties:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    return build_parties(folder)


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("party", NAMES)
def test_either_party_accepts_a_certificate_with_the_very_name(
    parties: Parties, tmp_path: Path, port: int, kind: str, party: str
) -> None:
    folder = make(tmp_path / "certificates")
    ACCEPTED[kind](folder, NAMES[party])
    shown = {one: files(folder, one) for one in NAMES} | {party: Unchecked(folder, "unusual")}
    with serving(parties, port, shown["active"]), peer_of(parties, port, shown["passive"]) as peer:
        assert peer.is_ready()


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("party", NAMES)
def test_either_party_refuses_every_other_certificate(
    parties: Parties, tmp_path: Path, port: int, kind: str, party: str
) -> None:
    """The passive party says why; of what TLS refuses of its own, it does not learn the reason."""
    folder = make(tmp_path / "certificates")
    spoil, reason = REFUSED[kind]
    spoil(folder, NAMES[party])
    shown = {one: files(folder, one) for one in NAMES} | {party: Unchecked(folder, "unusual")}
    is_in_words = party == "active" or reason.startswith(WRONG_NAME)
    if party == "passive":
        reason = "does not accept" if is_in_words else "may refuse"
    with (
        serving(parties, port, shown["active"]),
        peer_of(parties, port, shown["passive"]) as peer,
        pytest.raises(PeerError, match=reason) as caught,
    ):
        peer.is_ready()
    assert isinstance(caught.value, PeerUntrusted) == is_in_words
    assert parties.session.stage is Stage.WAITING


def test_only_ascii_letters_have_another_case() -> None:
    """The Kelvin sign's lower case is the letter k."""
    assert in_lower_case("Active.BanK") == "active.bank"
    assert "\N{KELVIN SIGN}".lower() == "k"
    assert in_lower_case("active.ban\N{KELVIN SIGN}") != "active.bank"


def test_whoever_passes_the_look_on_and_then_answers_by_itself_is_spoken_to_by_nobody(
    parties: Parties, tmp_path: Path
) -> None:
    """Somebody on the way, with a wildcard certificate of the same authority."""
    folder = make(tmp_path / "certificates")
    add_unusual(folder, "between", [x509.DNSName("*.splitveil")])
    genuine, between = free_port(), free_port()
    with (
        serving(parties, genuine, files(folder, "active")),
        serving(parties, between, Unchecked(folder, "between")),
        Relay(genuine, between) as switch,
        peer_of(parties, switch.port, files(folder, "passive")) as peer,
    ):
        with pytest.raises(PeerError, match="another certificate than before"):
            peer.is_ready()
        with pytest.raises(PeerUntrusted, match=WRONG_NAME):
            peer.is_ready()
        assert switch.connections >= 3
