"""Probes of the connection: what both sides learn of it, and that nothing changes by them."""

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc
import pytest
import yaml

from splitveil.active_party.grpc_server import probe_server
from splitveil.active_party.grpc_server.probe_server import ProbeServer
from splitveil.active_party.run.lifecycle import Stage
from splitveil.common.data.canonical_form import CanonicalForm, form_of
from splitveil.common.errors import PeerUnreachable, SettingsError, SplitveilError
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.record.transcript import Transcript, Verified, verify
from splitveil.common.run.contract import Contract, first_difference
from splitveil.common.run.id_rules import TextId
from splitveil.common.run.messages import IdForm
from splitveil.common.settings import validate
from splitveil.common.wire import probes
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.http_proxy import HttpProxy
from splitveil.common.wire.limits import PROBE_BYTES, PROBE_PADDING_BYTES
from splitveil.common.wire.probes import Introduction, ProbeResponder, checks_of, clock_in_words
from splitveil.passive_party.commands import check as probing
from splitveil.passive_party.commands.check import Probing, connection_checks
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import split_learning_pb2 as pb
from tests.support.certificates import files, use
from tests.support.loopback import serving
from tests.support.proxies import ConnectProxy
from tests.support.runs import CONTRACT, build_parties, write_example

TEXTS = IdForm("-0a", length=11)
SAME_IDS = "ids: 11 letters and digits with small letters, the marks - at both parties"


@pytest.fixture
def protected(tmp_path: Path, trusted: Path) -> Path:
    write_example(tmp_path)
    use(trusted, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move little: the figures themselves belong to the machine."""
    monkeypatch.setattr(probing, "MOST_BYTES", 4 * PROBE_PADDING_BYTES)
    monkeypatch.setattr(probe_server, "QUIET_S", 0.2)


def found(
    settings: PassiveSettings, proxy: HttpProxy | None = None, wait_s: float = 0
) -> list[str]:
    """Return the findings of a passive party; those that would end a run as their messages."""
    shown = None
    if settings.security.mode == "mtls":
        shown = files(settings.base_dir / settings.security.certificate.parent.parent, "passive")
    link = PeerConnection(settings.connect, settings.contract, shown, proxy=proxy)
    return outcomes(connection_checks(settings, wait_s, link))


def outcomes(checks: Iterator[Callable[[], str]]) -> list[str]:
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except SplitveilError as error:
            findings.append(f"{type(error).__name__}: {error}")
    return findings


def of_passive(folder: Path, port: int, *overrides: str) -> PassiveSettings:
    own = [f"connect=127.0.0.1:{port}", *overrides]
    return load_party_settings(PassiveSettings, folder / "passive.yaml", own)


def test_a_passive_party_learns_all_that_a_run_depends_on(
    example: Path, protected: Path, trusted: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["contract.batch_size=1024", "contract.cut_shape=[128]", "contract.pipeline_depth=4"]
    parties = build_parties(example)
    responder = ProbeResponder(parties.active_settings.contract, TEXTS)
    with serving(parties, port, files(trusted, "active"), None, responder):
        _, _, _, really_measured, *_ = found(of_passive(protected, port))
        # A line of 40 ms and 100 Mbit/s. With (1024, 128) float32, a tensor takes 42 ms.
        monkeypatch.setattr(Probing, "speed", lambda _: (0.040, 12.5e6))
        findings = found(of_passive(protected, port))
        *_, of_sizes, _, _, _ = found(of_passive(protected, port, *sizes))
        pca = ["contract.exchange=one_shot", "bottom_model={kind: pca}"]
        *_, one_shot, _, _, _ = found(of_passive(protected, port, *pca))
    direct, certificate, clock, line, versions, contract, ids = findings
    assert direct == f"connection: 127.0.0.1:{port}, direct"
    assert certificate.startswith(
        "certificate of the active party: CN=active.splitveil (active.splitveil), signed by "
        "CN=splitveil trial authority, valid to "
    )
    assert certificate.endswith(", 89 days left")
    assert clock.startswith("clock: the other party's is 0.")
    assert re.match(r"line: round trip \d+\.\d ms .* [\d,]+ Mbit/s in each", really_measured)
    measured = "line: round trip 40.0 ms (median of 20), 100 Mbit/s in each direction at once"
    assert line.startswith(measured)
    assert of_sizes == (
        f"{measured}: at most 8, 16, 24 steps/s with pipeline_depth 1, 2, 4; the contract has 4"
    )
    assert one_shot == measured
    assert versions.endswith("at the active party; the same protocol")
    assert contract == "contract: the active party holds the same"
    assert ids == SAME_IDS


def test_a_probe_changes_nothing_at_the_active_party(
    example: Path, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parties = build_parties(example)
    session = parties.session
    with (
        Transcript(tmp_path, "active") as transcript,
        serving(parties, port, transcript=transcript) as service,
    ):

        def state() -> tuple[object, ...]:
            named, caller = session.parties.named(None), service._callers["passive"]
            nonce = session.lifecycle.run.nonce
            return session.run_id, nonce, session.stage, named.stage, caller.heard_at

        before = state()
        found(of_passive(example, port))
        assert state() == before
        assert not service.refused
    noted = verify(tmp_path / "transcript.jsonl")
    assert isinstance(noted, Verified)
    assert noted.crossings == {}
    assert session.stage is Stage.WAITING
    assert "probed by party passive: the contracts agree" in caplog.text


def test_the_first_difference_of_the_contracts_is_shown_with_both_values(
    example: Path, port: int
) -> None:
    with serving(build_parties(example), port):
        findings = found(of_passive(example, port, "contract.epochs=77", "contract.batch_size=9"))
    (contract,) = (line for line in findings if "contract." in line)
    assert contract.startswith("ContractMismatch: contract.batch_size: 9 here, ")
    assert contract.endswith(" at the active party; also different: epochs")


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[1]", "{}", '{"epochs": "\\u001b[2J"}', "[" * 50_000, "1" * 60_000]
)
def test_whatever_the_peer_calls_its_contract_is_shown_in_one_printable_line(text: str) -> None:
    own = validate(Contract, CONTRACT, "contract")
    findings = first_difference(own, text, "the active party")
    assert findings
    assert findings.isprintable()
    assert len(findings) < 2000


NO_RULE = "no rule of contract.ids makes them equal"


def ids_like(pattern: str) -> list[str]:
    ids = []
    for n in range(99_900, 100_100):
        h = sha256(str(n).encode()).hexdigest()
        mail, short = (f"Ann_{n}+1@x.org", f"1.{n}E+15") if n % 10 == 0 else (f"a{n}@x.org", n)
        ids.append(pattern.format(n=n, h=h, H=h.upper(), uuid=UUID(h[:32]), mail=mail, short=short))
    return ids


@pytest.mark.parametrize(
    ("here", "there", "remedy"),
    [
        ("{h}", "{H}", "fold_case: true"),
        ("K{n}", "k{n}", "fold_case: true"),
        ('="00{n}"', "00{n}", 'drop_characters: "\\"="'),
        ("{uuid}", "{h:.32}", 'drop_characters: "-"'),
        ("K {n}", "K{n}", "space: remove"),
        ("00{n}", "{n}", "leading_zeros: drop"),
        ("{n}.0", "00{n}", "whole_numbers: true, leading_zeros: drop"),
        ("９{n}", "9{n}", "unicode: nfkc"),
        ("{short}", "{n}", NO_RULE),
        ("{h}", "{mail}", NO_RULE),
        ("K{n}", "{n}", NO_RULE),
        ("{h:.32}", "{h}", NO_RULE),
        ("{h}", "{h}", ""),
        ("a{n}@x.org", "{mail}", ""),
    ],
)
def test_the_rule_that_makes_ids_equal_is_named(here: str, there: str, remedy: str) -> None:
    own = validate(Contract, CONTRACT, "contract")
    both = [ids_like(here), ids_like(there)]
    forms = [Introduction("x", own.canonical_json(), 0.0, form_of(ids)) for ids in both]
    for mine, theirs in (forms, forms[::-1]):
        findings = outcomes(checks_of(own, mine, theirs, "the active party"))[-1]
        assert findings.startswith("DataError: ids: " if remedy else "ids: ")
        assert remedy in findings
        if found := re.search(r"contract\.ids: ({.*}) may make them equal", findings):
            form = CanonicalForm([TextId(**yaml.safe_load(found[1]))])
            assert form.of(both[0]) == form.of(both[1])


def test_a_clock_that_is_wrong_is_a_problem() -> None:
    with pytest.raises(SettingsError, match=r"3600\.00 s ahead of this machine's"):
        clock_in_words(3600.0, 0.1)


def test_the_proxy_is_named_whether_it_works_or_not(
    example: Path, protected: Path, trusted: Path, port: int
) -> None:
    settings = of_passive(protected, port)
    with ConnectProxy() as proxy:
        with serving(build_parties(example), port, files(trusted, "active")):
            findings = found(settings, HttpProxy("127.0.0.1", proxy.port))
        assert proxy.heads
    where = f"127.0.0.1:{port} through the proxy 127.0.0.1:{proxy.port}"
    assert findings[0].startswith(f"connection: {where}")
    with pytest.raises(PeerUnreachable, match=where):
        found(settings, HttpProxy("127.0.0.1", proxy.port))


def test_an_active_party_that_comes_late_is_waited_for(example: Path, port: int) -> None:
    settings = of_passive(example, port)
    with pytest.raises(PeerUnreachable):
        found(settings)
    with ThreadPoolExecutor(1) as passive:
        findings = passive.submit(found, settings, wait_s=60)
        with serving(build_parties(example), port):
            assert "contract: the active party holds the same" in findings.result()


def test_every_passive_party_of_several_is_waited_for(example: Path, port: int) -> None:
    several, names = "contract.passive_parties=[means, extremes]", ("means", "extremes")
    settings = [of_passive(example, port, several, f"party={name}") for name in names]
    server = ProbeServer(settings[0].contract, f"127.0.0.1:{port}", None, TEXTS)
    with ThreadPoolExecutor(2) as both:
        theirs = [both.submit(found, own, wait_s=60) for own in settings]
        server.wait(60, Interruption())
    for of_one in theirs:
        assert "contract: the active party holds the same" in of_one.result()
    findings = outcomes(server.checks())
    for name in names:
        assert f"contract: party {name} holds the same" in findings
    assert sum(one.startswith("clock: the other party's is 0.") for one in findings) == len(names)


def test_a_server_of_probes_says_that_no_run_is_served(example: Path, port: int) -> None:
    settings = of_passive(example, port)
    server = ProbeServer(settings.contract, f"127.0.0.1:{port}", None, None)

    def ask() -> bool:
        with GrpcPeer(PeerConnection(settings.connect, settings.contract), settings.reconnect) as p:
            is_ready: bool = p.is_ready()
        found(settings, wait_s=60)
        return is_ready

    with ThreadPoolExecutor(1) as passive:
        is_ready = passive.submit(ask)
        server.wait(60, Interruption())
    assert not is_ready.result()


def test_a_party_that_does_not_come_is_named(example: Path, port: int) -> None:
    contract = of_passive(example, port).contract
    server = ProbeServer(contract, f"127.0.0.1:{port}", None, None)
    with pytest.raises(PeerUnreachable, match="no probe came from passive within 0 s"):
        server.wait(0, Interruption())


def answer(port: int, data: bytes) -> bytes | grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary(method_path("Probe", probes.SERVICE))
        try:
            reply: bytes = call(data, timeout=20)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return reply


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        pb.ProbeRequest(introduction=pb.Introduction(party="passive")).SerializeToString(),
        b"\x0a\x09\x22\x02{}\x32\x03\x0a\x01\x1b",  # an id_form with the character ESC in most
        b"\x0a\x09\x22\x02{}\x32\x03\x12\x01k",  # an id_form with k in some
        pb.HandshakeReply(run_id="x").SerializeToString(),
    ],
)
def test_what_is_no_probe_is_refused(example: Path, port: int, data: bytes) -> None:
    with serving(build_parties(example), port) as service:
        assert answer(port, data) is grpc.StatusCode.INVALID_ARGUMENT
        assert service.refused == {"InvalidMessage": 1}


def test_a_probe_is_answered_with_as_much_as_it_brings_and_no_more(
    example: Path, port: int
) -> None:
    with serving(build_parties(example), port):
        for size in (0, 1, PROBE_PADDING_BYTES):
            reply = answer(port, pb.ProbeRequest(padding=bytes(size)).SerializeToString())
            assert isinstance(reply, bytes)
            assert pb.ProbeReply.FromString(reply) == pb.ProbeReply(padding=bytes(size))
        large = pb.ProbeRequest(padding=bytes(PROBE_PADDING_BYTES + 1)).SerializeToString()
        assert answer(port, large) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer(port, bytes(PROBE_BYTES + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
