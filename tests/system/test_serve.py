"""Online predictions over mutual TLS between the parties, asked for over HTTP.

Equality is of bits, on the CPU, with the evaluation at the end of training.
"""

import csv
import json
import logging
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from gzip import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitveil.active_party.http.batcher import Batcher, IdQuestion
from splitveil.active_party.predict.predictor import Predictor
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.leakage import auc
from splitveil.common.record.transcript import Transcript, Verified, verify
from splitveil.deploy.authority import PartyFolder, make_certificates
from splitveil.passive_party.predict.service import InferenceService
from tests.support import inference
from tests.support.endpoints import value_of
from tests.support.inference import (
    ASKING_TAKES_S,
    Program,
    Trained,
    answering,
    asked,
    free_port,
    train,
    write_wide_deep,
)
from tests.support.proxies import SilentLine
from tests.support.waiting import wait_until
from tests.system.test_predict import expected


def test_answers_have_the_bits_of_the_evaluation(once: Callable[[str], Trained]) -> None:
    """Of digits, ten classes of images."""
    trained = once("digits")
    ids, right = trained.test_ids[:150], expected(trained)[:150]
    with asked(trained, "serving.max_ids=100000") as program:
        answer = program.ask(ids)
    assert answer.status == 200
    assert set(answer.body["model"]) == {"joint"}
    np.testing.assert_array_equal(answer.probabilities, right)
    assert answer.body["classes"] == list(trained.settings.active.data.class_names)
    assert answer.body["run_id"] == trained.run_id


def test_requests_that_come_together_are_asked_together_and_answered_with_the_same_bits(
    small: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, right = small.test_ids[:40], expected(small)[:40]
    submitted, submit, ask = [], Batcher.submit, Predictor.ask

    def noting(self: Batcher, question: IdQuestion) -> Any:
        answer = submit(self, question)
        submitted.append(question)
        return answer

    def ask_once_all_have_come(self: Predictor, asked: Sequence[str]) -> Any:
        wait_until(lambda: len(submitted) == len(ids))
        return ask(self, asked)

    monkeypatch.setattr(Batcher, "submit", noting)
    monkeypatch.setattr(Predictor, "ask", ask_once_all_have_come)
    with (
        Transcript(tmp_path, "active") as transcript,
        asked(small, "serving.timeout_s=60", transcript=transcript) as program,
        ThreadPoolExecutor(len(ids)) as pool,
    ):
        answers = pool.map(lambda text: program.ask([text]).probabilities[0], ids)
        found = np.array(list(answers), np.float32)
    np.testing.assert_array_equal(found, right)
    noted = (tmp_path / "transcript.jsonl").read_text()
    assert noted.count('"Embed request"') <= 2  # the first that came, and all others
    assert noted.count('"answered"') == len(ids)


def test_a_passive_party_sees_the_same_messages_whatever_the_order_of_a_request_s_ids(
    small: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may list its ids by label, more of them than fit into one message."""
    order = np.argsort(expected(small)[:40])
    ids = [*(small.test_ids[row] for row in order), "nobody", small.test_ids[0]]
    right = np.array([*expected(small)[order], np.nan, expected(small)[0]], np.float32)
    seen: list[list[list[str]]] = []
    reply: Callable[..., object] = InferenceService._reply

    def noting(self: InferenceService, request: Any, context: object) -> object:
        seen[-1].append(list(request.ids))
        return reply(self, request, context)

    monkeypatch.setattr(InferenceService, "_reply", noting)
    monkeypatch.setattr(Predictor, "max_ids", property(lambda _: 15))
    with asked(small) as program:
        for step in (1, -1):
            seen.append([])
            answer = program.ask(ids[::step])
            np.testing.assert_array_equal(answer.probabilities, right[::step])
            known = ids[:40][::step]
            answer = program.ask(known, features=own_features(small, known))
            np.testing.assert_array_equal(answer.probabilities, right[:40][::step])
    assert seen[0] == seen[1]
    assert [len(message) for message in seen[0]] == [15, 15, 12, 15, 15, 10]


def own_features(small: Trained, ids: Sequence[str]) -> list[dict[str, object]]:
    """Read the active party's columns of some ids from its file, without this project's reader."""
    with (small.settings.active.base_dir / "active.csv").open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    chosen = [rows[text] for text in ids]
    return [{"n1": float(r["n1"]), "n2": float(r["n2"]), "word": r["word"]} for r in chosen]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"ids": []}', 422),
        (b'{"ids": [""]}', 422),
        (b'{"ids": ["  "]}', 422),
        (b'{"ids": [true]}', 422),
        (b'{"ids": [1.5]}', 422),
        (b'{"ids": "row-0001"}', 422),
        (b'{"ids": ["\\ud800"]}', 422),
        (b'{"ids": ["' + 5000 * b"x" + b'"]}', 422),
        (b'{"ids": ["a"], "more": 1}', 422),
        (b'{"ids": [["a", null]]}', 422),
        (b'{"ids": ["a"], "features": [[]]}', 422),
        (b'{"ids": ' + 20_000 * b"[" + b"}", 413),
        (b'{"ids": ["a"], "features": [{}, {}, {}, {}, {}]}', 413),
        (b'{"ids": ["a"', 422),
        (b"[]", 422),
        (b"", 422),
        (b'{"ids": ["a", "b", "c", "d", "e"]}', 413),
        (b'{"ids": ["' + 40_000 * b"x" + b'"]}', 413),
    ],
)
def test_bad_requests_are_refused_and_the_next_one_is_answered(
    limited: Program, small: Trained, body: bytes, status: int
) -> None:
    answer = limited.post(body)
    assert answer.status == status
    assert set(answer.body) == {"detail"}
    assert limited.ask(small.test_ids[:1]).status == 200


def head(path: str = "/predict", method: str = "POST", **headers: str) -> bytes:
    """Return the head of a request; that of a body which is announced never follows."""
    named = (f"{key.replace('_', '-')}: {value}" for key, value in headers.items())
    return "\r\n".join([f"{method} {path} HTTP/1.1", *named, "", ""]).encode()


def test_what_a_health_check_and_an_odd_body_get_is_said_in_their_head(limited: Program) -> None:
    for path in ("/healthz", "/readyz"):
        assert b" 200 " in limited.raw(head(path, "HEAD", Host="localhost"))
    odd = {"Host": "localhost", "Content_Length": "9"}
    for kind in ({"Content_Encoding": "gzip", "Content_Type": "application/json"}, {}):
        assert b" 415 " in limited.raw(head(**odd, **kind))
    compressed = replace(limited, headers={"Content-Encoding": "gzip"}).post(compress(b"{}"))
    assert "Content-Encoding such as gzip" in compressed.body["detail"]
    large = {"Host": "localhost", "Content_Length": "99999", "Content_Type": "application/json"}
    assert b" 413 " in limited.raw(head(**large))


def test_a_page_whose_name_leads_to_this_machine_gets_no_answer(limited: Program) -> None:
    for name in ("localhost", "127.0.0.1:80", "[::1]:80"):
        assert b" 200 " in limited.raw(head("/healthz", "GET", Host=name))
    for name in ("rebound.example", "rebound.example:80", "localhost.rebound.example"):
        assert b" 400 " in limited.raw(head("/healthz", "GET", Host=name))
    for path in ("/docs", "/redoc"):  # pages with scripts, where tokens would be typed
        assert limited.get(path).status == 404


@pytest.fixture(scope="module")
def limited(small: Trained) -> Iterator[Program]:
    with asked(small, "serving.max_ids=4") as program:
        yield program


# ---- who may ask, and for what ----

TOKENS = {"scoring": 40 * "s", "billing": 40 * "b"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    lines = [f"{name} {token}" for name, token in TOKENS.items()]
    path.write_text("\n".join(["# who may ask", *lines]) + "\n")
    path.chmod(0o600)
    return path


def test_programs_are_known_by_their_tokens(
    small: Trained, token_file: Path, tmp_path: Path
) -> None:
    statuses = []
    with (
        Transcript(tmp_path, "active") as transcript,
        asked(small, f"serving.token_file={token_file}", transcript=transcript) as program,
    ):
        for token in (None, 40 * "x", TOKENS["billing"], TOKENS["scoring"]):
            program.headers = None if token is None else {"Authorization": f"Bearer {token}"}
            answer = program.ask(small.test_ids[:1])
            statuses.append(answer.status)
            assert (answer.headers.get("www-authenticate") == "Bearer") is (answer.status == 401)
        program.headers = None
        assert program.get("/healthz").status == 200
    assert statuses == [401, 401, 200, 200]
    noted = answered_lines(tmp_path)
    assert [line["program"] for line in noted] == ["billing", "scoring"]
    assert not any(token in str(noted) for token in TOKENS.values())


def test_nothing_of_a_stranger_s_body_is_read(small: Trained, token_file: Path) -> None:
    """The answer comes although the body does not."""
    announced = {"Host": "any", "Content_Type": "application/json", "Content_Length": "4000000"}
    with asked(small, f"serving.token_file={token_file}") as program:
        assert b" 401 " in program.raw(head(**announced))
        announced["Authorization"] = f"Bearer {TOKENS['billing']}"
        assert b" 100 " in program.raw(head(**announced, Expect="100-continue"))


def test_only_allowed_ids_are_answered_or_ever_sent(small: Trained, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(small.test_ids[:2]) + "\n")
    allowed = f"serving.allowed_ids={tmp_path / 'ids.txt'}"
    with (
        Transcript(tmp_path, "active") as transcript,
        asked(small, allowed, transcript=transcript) as program,
    ):
        ids = small.test_ids[:3]
        mixed = program.ask(ids[::-1])
        given = program.ask(ids, features=own_features(small, ids))
        others = program.ask(small.test_ids[2:4])
    assert mixed.body["found"] == [False, True, True]
    assert given.body["found"] == [True, True, False]
    np.testing.assert_array_equal(mixed.probabilities[::-1][:2], expected(small)[:2])
    np.testing.assert_array_equal(given.probabilities[:2], expected(small)[:2])
    assert others.status == 404
    assert (tmp_path / "transcript.jsonl").read_text().count('"Embed request"') == 2


def answered_lines(folder: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "transcript.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == "answered"]


def test_the_transcript_has_every_request_and_neither_an_id_nor_a_prediction(
    small: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = small.test_ids[:3]
    caplog.set_level(logging.DEBUG)
    with (
        Transcript(tmp_path, "active") as transcript,
        asked(small, "serving.timeout_s=60", transcript=transcript) as program,
    ):
        answer = program.ask([*ids, "nobody"])
        program.ask([""])
    assert isinstance(verify(tmp_path / "transcript.jsonl"), Verified)
    fields = ("program", "num_ids", "found", "status")
    assert [tuple(line[name] for name in fields) for line in answered_lines(tmp_path)] == [
        ("local", 4, 3, 200),
        ("local", 0, 0, 422),
    ]
    written = caplog.text + (tmp_path / "transcript.jsonl").read_text()
    shown = [*ids, *(repr(float(one))[:7] for one in answer.probabilities[:3])]
    assert not [text for text in shown if text in written]


def test_an_address_beyond_this_machine_needs_tls_and_known_programs(small: Trained) -> None:
    with pytest.raises(SettingsError, match=r"not on loopback and needs serving\.tls"):
        answering(small, "serving.http='0.0.0.0:1'", ports={"passive": free_port()}).__enter__()


# ---- a passive party that is away ----


def test_a_party_with_another_model_is_named_and_never_asked(
    small: Trained, tmp_path: Path
) -> None:
    write_wide_deep(tmp_path / "other", seed=6)
    other = train(tmp_path / "other", tmp_path / "runs")
    port = free_port()
    settings = small.passive("passive", f"runs_dir={other.settings.passive['passive'].runs_dir}")
    with (
        inference.serving_passive(settings, port),
        answering(small, ports={"passive": port}) as program,
    ):
        answer = program.ask(small.test_ids[:1])
    assert answer.status == 503
    assert other.run_id in answer.body["detail"]
    assert small.run_id in answer.body["detail"]


def test_while_one_of_several_parties_is_away_requests_are_refused_at_once(
    once: Callable[[str], Trained],
) -> None:
    trained = once("three_parties concat")
    names = list(trained.settings.passive)
    ports = {name: free_port() for name in names}
    with ExitStack() as resources:
        for name in names[:-1]:
            resources.enter_context(inference.serving_passive(trained.passive(name), ports[name]))
        program = resources.enter_context(answering(trained, ports=ports))
        away = program.ask(trained.test_ids[:2])
        ready, healthy = program.get("/readyz"), program.get("/healthz")
        last = inference.serving_passive(trained.passive(names[-1]), ports[names[-1]])
        with last:
            wait_until(lambda: program.get("/readyz").status == 200)
            back = program.ask(trained.test_ids[:2])
    assert (away.status, ready.status, healthy.status) == (503, 503, 200)
    assert "retry-after" in away.headers
    assert names[-1] in away.body["detail"]
    assert names[-1] in ready.body["reason"]
    np.testing.assert_array_equal(back.probabilities, expected(trained)[:2])
    assert back.body["classes"] is None


# ---- the model of the active party's own features ----


def test_the_fallback_answers_for_a_passive_party_that_is_away_and_says_so(small: Trained) -> None:
    port, ids = free_port(), small.test_ids
    fallback = ("serving.fallback=true",)
    with ExitStack() as resources:
        with inference.serving_passive(small.passive("passive"), port):
            program = resources.enter_context(answering(small, *fallback, ports={"passive": port}))
            joined = program.ask(ids[:3])
        wait_until(lambda: program.get("/readyz").body["model"] == "fallback")
        alone = program.ask([*ids, "nobody"])
        given = program.ask(ids[:3], features=own_features(small, ids[:3]))
    assert joined.body["model"] == 3 * ["joint"]
    assert alone.body["model"] == [*(len(ids) * ["fallback"]), None]
    assert alone.body["why_fallback"]
    np.testing.assert_array_equal(given.probabilities, alone.probabilities[:3])
    own = small.settings.active
    labels = PartyData.load(own.data, own.base_dir).labels_of(ids)
    found = auc(torch.from_numpy(alone.probabilities[:-1].copy()), labels)
    assert small.alone is not None
    assert found == pytest.approx(small.alone.auc, abs=1e-6)
    assert found > 0.6


def test_the_fallback_answers_where_the_passive_party_has_no_row(
    small: Trained, tmp_path: Path
) -> None:
    new = tmp_path / "active.csv"
    lines = (small.settings.active.base_dir / "active.csv").read_text().rstrip("\n")
    new.write_text(f"{lines}\nnew-row,0,0.5,-0.25,w1\n")
    with asked(small, "serving.fallback=true", table=new) as program:
        answer = program.ask([small.test_ids[0], "new-row", "nobody"])
    assert answer.body["model"] == ["joint", "fallback", None]
    assert answer.body["why_fallback"] is None


def test_a_run_without_a_fallback_says_how_to_get_one(small: Trained, tmp_path: Path) -> None:
    own = small.settings.active.run_folder("active")
    without = shutil.ignore_patterns("alone.safetensors")
    shutil.copytree(own, tmp_path / own.parent.name / "active", ignore=without)
    overrides = (f"runs_dir={tmp_path}", "serving.fallback=true")
    with pytest.raises(SettingsError, match=r"alone\.safetensors"):
        answering(small, *overrides, ports={"passive": free_port()}).__enter__()


# ---- TLS towards programs ----


def server_tls(folder: Path, *, with_clients: bool) -> tuple[str, ssl.SSLContext]:
    """Return an override for serving with TLS, and a client's context that trusts it."""
    certificates = folder / "certificates"
    if not certificates.exists():
        make_certificates(certificates, {"server": "localhost", "scoring": "scoring.example"})
    own, client = PartyFolder(certificates / "server"), PartyFolder(certificates / "scoring")
    files = f"certificate: {own.certificate}, private_key: {own.private_key}"
    if with_clients:
        files += f", clients: {own.authority}"
    context = ssl.create_default_context(cafile=str(own.authority))
    context.check_hostname = False  # the programs of these tests name the address
    if with_clients:
        context.load_cert_chain(client.certificate, client.private_key)
    return f"serving.tls={{{files}}}", context


def test_programs_are_known_by_their_certificates(small: Trained, tmp_path: Path) -> None:
    override, context = server_tls(tmp_path, with_clients=True)
    _, stranger = server_tls(tmp_path, with_clients=False)
    ids = small.test_ids[:2]
    with (
        Transcript(tmp_path, "active") as transcript,
        asked(small, override, transcript=transcript) as program,
    ):
        program.tls = context
        known = program.ask(ids)
        program.tls = stranger
        with pytest.raises(OSError):  # noqa: PT011 (the server hangs up, in one of several ways)
            program.ask(ids)
    np.testing.assert_array_equal(known.probabilities, expected(small)[:2])
    (line,) = answered_lines(tmp_path)
    assert "scoring" in str(line["program"])


def test_an_authority_that_is_withdrawn_lets_nobody_in_any_more(
    small: Trained, tmp_path: Path
) -> None:
    """Neither by a certificate, nor by a session of before, nor by a connection that is open."""
    override, first = server_tls(tmp_path, with_clients=True)
    others, trusted = PartyFolder(tmp_path / "others" / "scoring"), tmp_path / "trusted.pem"
    make_certificates(tmp_path / "others", {"scoring": "scoring.example"})
    own = PartyFolder(tmp_path / "certificates" / "server").authority
    trusted.write_bytes(own.read_bytes())
    _, second = server_tls(tmp_path, with_clients=False)
    second.load_cert_chain(others.certificate, others.private_key)
    with asked(small, override.replace(f"clients: {own}", f"clients: {trusted}")) as program:

        @contextmanager
        def connected(
            context: ssl.SSLContext, session: ssl.SSLSession | None = None
        ) -> Iterator[ssl.SSLSocket]:
            plain = socket.create_connection(("127.0.0.1", program.http), ASKING_TAKES_S)
            with plain, context.wrap_socket(plain, session=session) as client:
                yield client

        def is_answered(client: ssl.SSLSocket) -> bool:
            answer = b""
            with suppress(OSError):
                client.sendall(head("/healthz", "GET", Host="any"))
                while b"serving" not in answer and (part := client.recv(2**16)):
                    answer += part
            return b"serving" in answer

        def lets_in(context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> bool:
            with connected(context, session) as client:
                return is_answered(client)

        with connected(first) as opened:
            assert is_answered(opened)
            assert lets_in(first, opened.session)
            assert not lets_in(second)
            trusted.write_bytes(others.authority.read_bytes())
            tls, _ = program.access
            assert tls is not None
            tls.refresh()
            wait_until(lambda: not is_answered(opened))
            assert not lets_in(first)
            assert not lets_in(first, opened.session)
            assert lets_in(second)


def test_the_server_speaks_tls_1_3_alone_and_hangs_up_on_a_handshake_without_end(
    small: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override, context = server_tls(tmp_path, with_clients=False)
    with asked(small, override) as program:
        program.tls = context
        assert program.ask(small.test_ids[:1]).status == 200
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            program.ask(small.test_ids[:1])
    monkeypatch.setattr("splitveil.active_party.http.server.PATIENCE_S", 0.1)
    with asked(small, override) as program:
        assert program.raw(b"\x16\x03\x01") == b""


# ---- a line that is dead while nobody hangs up ----


@pytest.mark.parametrize("fallback", [False, True])
def test_a_line_that_goes_dead_costs_503_or_the_fallback_and_no_restart(
    small: Trained, fallback: bool
) -> None:
    """How soon is measured by hand, on two hosts: docs/guide/predicting.md has the figures."""
    port, ids = free_port(), small.test_ids[:3]
    own = ("serving.timeout_s=1", f"serving.fallback={str(fallback).lower()}")
    with (
        inference.serving_passive(small.passive("passive"), port),
        SilentLine(port) as line,
        answering(small, *own, ports={"passive": line.port}) as program,
        ThreadPoolExecutor(8) as pool,
    ):
        wait_until(lambda: program.service.trouble is None)
        assert program.ask(ids).body["model"] == 3 * ["joint"]
        for _ in range(2):  # the second time over connections that the first one has left
            line.silence()
            first = list(pool.map(lambda _: program.ask(ids), range(8)))
            # Some time after, requests are not even tried.
            wait_until(lambda: program.service.trouble is not None)
            later = program.ask(ids)
            line.resume()
            wait_until(lambda: program.service.trouble is None)
            back = program.ask(ids)
            for answer in (*first, later):
                assert answer.status == (200 if fallback else 503)
                if fallback:
                    assert answer.body["model"] == 3 * ["fallback"]
                    assert answer.body["why_fallback"]
            np.testing.assert_array_equal(back.probabilities, expected(small)[:3])
    assert value_of(program.status, "splitveil_predict_timeouts_total") >= 1
    assert value_of(program.status, "splitveil_reconnects_total", peer="passive") == 2
