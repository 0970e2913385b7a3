"""Online predictions without a model: connections, bodies, rates, tokens, entries, and settings."""

import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.http import api, programs
from splitveil.active_party.http.api import request_of
from splitveil.active_party.http.server import LOG_LINES, HttpServer, SparseLog
from splitveil.active_party.http.service import AnswerService, Rules
from splitveil.active_party.http.status import Call
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import load_party_settings
from tests.support.inference import free_port
from tests.support.waiting import HANGS_AFTER_S, wait_until

TOKEN = programs.MIN_TOKEN_CHARACTERS * "t"


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def accepted(limit: programs.RateLimit, program: str, num_ids: int) -> bool:
    try:
        limit.charge(program, num_ids)
    except programs.TooFast:
        return False
    return True


def test_over_time_no_program_gets_more_ids_than_its_rate() -> None:
    clock = Clock()
    limit = programs.RateLimit(10.0, clock)
    given, seconds = 0, 30
    for _ in range(seconds * 100):
        given += 3 * accepted(limit, "one", 3)
        clock.now_s += 0.01
    assert 10 * (seconds - 1) <= given <= 10 * (seconds + 1)


def test_a_program_saves_up_one_second_and_pays_afterwards_for_more() -> None:
    clock = Clock()
    limit = programs.RateLimit(8.0, clock)
    clock.now_s += 3600
    assert [accepted(limit, "one", 1) for _ in range(10)] == [*(8 * [True]), False, False]
    assert accepted(limit, "another", 40)
    with pytest.raises(programs.TooFast) as caught:
        limit.charge("another", 1)
    assert caught.value.wait_s == pytest.approx(4.125)
    clock.now_s += 4.1
    assert not accepted(limit, "another", 1)
    clock.now_s += 0.1
    assert accepted(limit, "another", 1)


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_names_its_program_and_no_other_text_does(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"# programs\n\nfirst {TOKEN}\nsecond {TOKEN}2\n")
    tokens = programs.Tokens.read(path)
    assert tokens.program_of(f"Bearer {TOKEN}") == "first"
    assert tokens.program_of(f"bearer  {TOKEN}2") == "second"
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN[:-1]}"):
        with pytest.raises(programs.NotAdmitted) as caught:
            tokens.program_of(wrong)
        assert TOKEN[:-1] not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f"first {TOKEN}\n", 0o644, "chmod 600"),
        ("", 0o600, "no tokens"),
        (f"{TOKEN}\n", 0o600, "line 1: expected NAME TOKEN"),
        (f"first {TOKEN} more\n", 0o600, "line 1: expected NAME TOKEN"),
        (f"first {TOKEN}\nfirst {TOKEN}2\n", 0o600, "line 2: expected NAME TOKEN"),
        (f"fi/rst {TOKEN}\n", 0o600, "line 1: expected NAME TOKEN"),
        (f"first {TOKEN[1:]}\n", 0o600, "line 1: expected a token of at least"),
        (f"first {TOKEN}ü\n", 0o600, "ASCII"),
    ],
)
def test_an_unusable_file_of_tokens_is_refused_and_never_quoted(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        programs.Tokens.read(token_file(tmp_path, text, mode))
    assert TOKEN[1:] not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"ids": [%s]}' % b",".join(900 * [b"null"]),
        b'{"ids": [[%s]]}' % b",".join(9000 * [b"null"]),
        b'{"ids": ["a"], "features": [%s]}' % b",".join(900 * [b"null"]),
        b"{%s}" % b",".join(b'"%d": 0' % n for n in range(9000)),
    ],
)
def test_the_faults_of_a_body_are_not_collected(body: bytes) -> None:
    with pytest.raises(programs.RequestError) as caught:
        request_of(body, 1000)
    assert getattr(caught.value.__context__, "error_count", int)() < 10
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (b'{"ids": [%s]}', b"[],"),
        (b'{"ids": [%s]}', b"[[[[1]]]],"),
        (b'{"ids": [["a", %s]]}', b" [ ],"),
        (b'{"ids": ["a"], "features": [{"a": [%s]}]}', b"{},"),
        (b'{"ids": ["a"], "features": [{%s}]}', b'"\\"": 1,'),
    ],
)
def test_a_body_with_more_parts_than_its_ids_need_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch, body: bytes, most: bytes
) -> None:
    """Megabytes of empty lists would hold up all other requests for seconds."""
    monkeypatch.setattr(api, "from_json", None)
    with pytest.raises(programs.TooManyIds, match="than 10 ids need"):
        request_of(body % (200 * most)[:-1], 10, columns=3, lists=1)


def test_an_id_that_is_too_long_is_refused_before_it_is_normalised() -> None:
    nothing: Any = None  # whatever would be asked for more fails
    rules = Rules(10, 1.0, None, programs.RateLimit(None), nothing)
    service = AnswerService(nothing, nothing, nothing, nothing, rules, nothing)
    for ids in (["x", 300 * "\u0300\u0316"], [1025 * "x"]):
        with pytest.raises(programs.Unusable, match="more than 1024 bytes"):
            service.accept(Call("program"), ids, None)


@pytest.mark.parametrize("text", ["[{:", r"\"[", r"\\[", r"[\\", r"\\\"{", r"\n\\:[", r"\u005c["])
def test_the_marks_within_a_text_are_no_parts_of_a_body(text: str) -> None:
    written = f'"{100 * text}"'
    row = f'{{"a": {written}}}'
    body = f'{{"ids": [{written}, 2], "features": [{row}, {row}]}}'
    asked = request_of(body.encode(), 2, columns=1)
    assert asked.ids[0] == json.loads(written)
    assert asked.features == 2 * [json.loads(row)]


# ---- connections ----


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """Answer once the body is there; /early before, and /large with more than a socket takes."""
    while scope["path"] != "/early" and (await receive()).get("more_body"):
        pass
    size = 2**24 if scope["path"] == "/large" else 2
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": size * b"a"})


@pytest.fixture
def connect() -> Iterator[Callable[[bytes], socket.socket]]:
    """A server, to which each call makes a connection that begins with some bytes."""
    with ExitStack() as resources:
        address = f"127.0.0.1:{free_port()}"
        server = resources.enter_context(HttpServer(answers, address))

        def connected(begin: bytes) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", server.port), HANGS_AFTER_S)
            client.sendall(begin)
            return resources.enter_context(client)

        yield connected


WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHos",
    "half a body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc",
    "the second one's head": WHOLE + b"GET",
    "no wish for the answer": WHOLE.replace(b"/", b"/large", 1),
}


@pytest.fixture
def room_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitveil.active_party.http.server.MOST_CONNECTIONS", 4)


@pytest.mark.usefixtures("room_for_four")
@pytest.mark.parametrize("begin", UNFINISHED.values(), ids=UNFINISHED)
def test_no_number_of_clients_that_send_no_request_keeps_others_out(
    connect: Callable[[bytes], socket.socket], begin: bytes
) -> None:
    _clients = [connect(begin) for _ in range(20)]
    assert b" 200 " in connect(WHOLE).recv(100)


@pytest.mark.parametrize("begin", UNFINISHED.values(), ids=UNFINISHED)
def test_a_client_that_never_ends_its_request_or_takes_its_answer_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr("splitveil.active_party.http.server.PATIENCE_S", 0.1)
    server = HttpServer(answers, f"127.0.0.1:{free_port()}")
    with server, socket.create_connection(("127.0.0.1", server.port), HANGS_AFTER_S) as client:
        client.sendall(begin)
        wait_until(lambda: len(server._server.open) == 1)
        wait_until(lambda: len(server._server.open) == 0)


CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
LENGTHS = {
    "both": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n" + CHUNKS,
    "without a body": b"GET / HTTP/1.1\r\nHost: a\r\ncontent-length: 0\r\n" + CHUNKS,
    "too old for chunks": b"POST / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n" + CHUNKS,
}


@pytest.mark.parametrize("begin", LENGTHS.values(), ids=LENGTHS)
def test_a_request_whose_end_a_proxy_may_see_elsewhere_is_refused_with_all_that_follows(
    connect: Callable[[bytes], socket.socket], begin: bytes
) -> None:
    with connect(begin + WHOLE).makefile("rb") as answer:
        assert re.findall(rb"HTTP/1.1 (\d+)", answer.read()) == [b"400"]


MALFORMED = {
    "no HTTP": 100 * [b"\0 no HTTP\r\n\r\n"],
    "upgrades": [100 * (WHOLE[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n")],
    "bad chunks": 100
    * [WHOLE.replace(b"GET /", b"POST /early")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"],
}


@pytest.mark.parametrize("begins", MALFORMED.values(), ids=MALFORMED)
def test_strangers_do_not_fill_the_log(
    connect: Callable[[bytes], socket.socket], begins: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for begin in begins:
        client = connect(begin)
        client.recv(100)
        with suppress(OSError):
            client.sendall(b"no chunk\r\n\r\n")
            while client.recv(2**16):
                pass
    assert 0 < len(caplog.records) <= 2 * LOG_LINES  # a new minute may begin meanwhile
    assert not any(record.exc_info for record in caplog.records)


def test_lines_that_are_left_out_of_the_log_are_counted() -> None:
    clock = Clock()
    sparse = SparseLog(clock)
    passed = []
    for number in range(LOG_LINES + 30):
        record = logging.LogRecord("any", logging.WARNING, "", 0, "line %d", (number,), None)
        passed += [record.getMessage()] * sparse.filter(record)
    clock.now_s += 60
    record = logging.LogRecord("any", logging.WARNING, "", 0, "line %d", (99,), None)
    assert len(passed) == LOG_LINES
    assert sparse.filter(record)
    assert record.getMessage() == "line 99 (30 lines left out before)"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["serving.http=null"], "serving.http"),
        (["serving.fallback=true", "data.features=null"], "serving.fallback: needs data.features"),
        (["serving.http=nowhere"], "serving.http"),
        (["serving.tls={certificate: a.pem}"], "private_key"),
        (["serving.timeout_s=0"], "timeout_s"),
    ],
)
def test_settings_that_cannot_serve_are_refused(
    example: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        load_party_settings(ActiveSettings, example / "active.yaml", overrides)
