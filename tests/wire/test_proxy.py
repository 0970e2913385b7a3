"""The environment's proxies are used only if the settings say so, and only with mTLS."""

import base64
import logging
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.errors import PeerUnreachable, SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.wire.endpoint import open_channel
from splitveil.common.wire.http_proxy import HttpProxy, proxy_of_environment
from splitveil.passive_party.grpc_peer import http_proxy
from splitveil.passive_party.settings import PassiveSettings
from tests.support.certificates import files, use
from tests.support.loopback import peer_of, serving
from tests.support.proxies import ConnectProxy
from tests.support.runs import Parties, build_parties, write_example

HASTY = ["reconnect.max_s=1"]
UNREPEATED = "hunter2"


def name_proxy(patch: pytest.MonkeyPatch, variable: str, port: int) -> None:
    """Set a variable as an administrator would; the address form lists networks beside it."""
    if variable == "GRPC_ADDRESS_HTTP_PROXY":
        patch.setenv(variable, f"127.0.0.1:{port}")
        patch.setenv(f"{variable}_ENABLED_ADDRESSES", "127.0.0.0/8")
    else:
        patch.setenv(variable, f"http://somebody:{UNREPEATED}@127.0.0.1:{port}")


@pytest.mark.parametrize(
    "variable", ["grpc_proxy", "https_proxy", "http_proxy", "GRPC_ADDRESS_HTTP_PROXY"]
)
@pytest.mark.parametrize("protected", [False, True])
def test_what_the_environment_names_is_not_asked(
    example: Path,
    trusted: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    protected: bool,
) -> None:
    parties = build_parties(example)
    shown = {p: files(trusted, p) if protected else None for p in ("active", "passive")}
    with ConnectProxy() as proxy, serving(parties, port, shown["active"]):
        name_proxy(monkeypatch, variable, proxy.port)
        with peer_of(parties, port, shown["passive"]) as peer:
            assert peer.is_ready()
        assert proxy.heads == []


def through(parties: Parties, trusted: Path, port: int, proxy: HttpProxy | None = None) -> Any:
    proxy = proxy or proxy_of_environment(f"127.0.0.1:{port}")
    return peer_of(parties, port, files(trusted, "passive"), proxy=proxy)


def test_a_whole_run_goes_through_the_proxy_that_is_asked_for(
    example: Path, trusted: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties = build_parties(example)
    with ConnectProxy() as proxy, serving(parties, port, files(trusted, "active")):
        name_proxy(monkeypatch, "https_proxy", proxy.port)
        with through(parties, trusted, port) as peer:
            parties.run.run(peer)
    assert parties.session.stage is Stage.FINISHED
    assert proxy.heads
    for head in proxy.heads:
        assert head.startswith(b"CONNECT 127.0.0.1:%d HTTP/1." % port)
        # Of "somebody:hunter2", by RFC 7617.
        assert b"Basic c29tZWJvZHk6aHVudGVyMg==" in head


@pytest.mark.parametrize("reply", [None, b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"])
def test_a_proxy_that_is_dead_or_refuses_is_named_without_its_password(
    example: Path,
    trusted: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reply: bytes | None,
) -> None:
    parties = build_parties(example, [], HASTY)
    with ConnectProxy(reply) as proxy:
        where = f"127.0.0.1:{port} through the proxy 127.0.0.1:{proxy.port}"
        if reply is None:
            proxy.__exit__()
        name_proxy(monkeypatch, "https_proxy", proxy.port)
        with (
            through(parties, trusted, port) as peer,
            pytest.raises(PeerUnreachable, match=where) as caught,
        ):
            parties.run.run(peer)
    assert where in caplog.text
    assert UNREPEATED not in caplog.text + repr(caught.value) + repr(peer.connection.proxy)


def test_plain_text_goes_through_no_proxy(example: Path) -> None:
    contract = build_parties(example).run.contract
    with pytest.raises(SettingsError, match=r"proxy: .*127\.0\.0\.1:9 would read every message"):
        open_channel("127.0.0.1:1", contract, None, HttpProxy("127.0.0.1", 9))
    with pytest.raises(SettingsError, match="plain text may not use a proxy"):
        named(example, "proxy=environment")


def test_the_environment_s_proxy_is_used_if_the_settings_ask_for_it(
    protected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_proxy(monkeypatch, "grpc_proxy", 3128)
    assert http_proxy(named(protected)) is None
    assert str(http_proxy(named(protected, "proxy=environment"))) == "127.0.0.1:3128"


@pytest.mark.parametrize(
    "value", ["nonsense", "https://host:1", "http://:1", "http://host", "http://host:99999"]
)
def test_a_value_that_names_no_proxy_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(SettingsError) as caught:
        proxy_of_environment("somewhere.example:1")
    assert str(caught.value) == "proxy: expected http://HOST:PORT in the environment's https_proxy"


@pytest.mark.parametrize(
    ("address", "is_excepted"),
    [
        ("active.hospital.org:1", True),
        ("ACTIVE.Hospital.org:1", True),
        ("active.bank.example:1", False),
        ("10.1.2.3:1", True),
        ("11.1.2.3:1", False),
        ("[fd00::1]:1", True),
    ],
)
def test_hosts_that_are_excepted_are_reached_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, address: str, is_excepted: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "nothing, .hospital.org,10.0.0.0/8,fd00::/16")
    assert (proxy_of_environment(address) is None) == is_excepted


def test_an_empty_variable_names_no_proxy_and_hides_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("grpc_proxy", "")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert proxy_of_environment("somewhere.example:1") is None
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def named(folder: Path, *overrides: str) -> PassiveSettings:
    return load_party_settings(PassiveSettings, folder / "passive.yaml", overrides)


@pytest.fixture
def protected(tmp_path: Path, trusted: Path) -> Path:
    """Return an example whose settings ask for mTLS."""
    write_example(tmp_path)
    use(trusted, tmp_path)
    (tmp_path / "proxy.txt").touch(0o600)
    (tmp_path / "proxy.txt").write_text(f"some:body@x:{UNREPEATED}\n")
    return tmp_path


def test_the_proxy_that_the_settings_name_is_used_whatever_the_environment_says(
    example: Path, protected: Path, trusted: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    parties = build_parties(example)
    with ConnectProxy() as proxy, serving(parties, port, files(trusted, "active")):
        settings = named(
            protected, f"proxy=http://127.0.0.1:{proxy.port}", "proxy_credentials=proxy.txt"
        )
        with through(parties, trusted, port, http_proxy(settings)) as peer:
            assert peer.is_ready()
    assert proxy.heads
    expected = base64.b64encode(b"some:body@x:hunter2")
    assert all(b"Basic " + expected in head for head in proxy.heads)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["proxy=https://host:1"], "proxy"),
        (["proxy=http://user:word@host:1"], "proxy"),
        (["proxy=http://host"], "proxy"),
        (["proxy_credentials=proxy.txt"], "proxy_credentials: needs proxy"),
        (["proxy=environment", "proxy_credentials=proxy.txt"], "proxy_credentials: needs proxy"),
    ],
)
def test_a_proxy_that_cannot_be_meant_is_refused(
    protected: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        named(protected, *overrides)


def test_credentials_of_a_proxy_are_kept_like_a_key(protected: Path) -> None:
    settings = named(protected, "proxy=http://host:1", "proxy_credentials=proxy.txt")
    assert UNREPEATED not in repr(http_proxy(settings)) + str(http_proxy(settings))
    (protected / "proxy.txt").chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        http_proxy(settings)
    (protected / "proxy.txt").chmod(0o600)
    (protected / "proxy.txt").write_text(UNREPEATED)
    with pytest.raises(SettingsError, match="expected one line USER:PASSWORD") as caught:
        http_proxy(settings)
    assert UNREPEATED not in str(caught.value)
    with pytest.raises(SettingsError, match="got http://host:99999"):
        http_proxy(named(protected, "proxy=http://host:99999"))
