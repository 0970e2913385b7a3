"""Online predictions without a network: rates, tokens, entries of the transcript, and settings."""

import json
from pathlib import Path

import pytest

from splitveil.active_party.online.errors import NotAdmitted, TooFast
from splitveil.active_party.online.programs import MIN_TOKEN_CHARACTERS, Tokens
from splitveil.active_party.online.rate_limit import RateLimit
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.party.transcript import Transcript, Verified, verify
from splitveil.common.party.transcript_lines import LINE_BYTES, Answered
from tests.runs import write_example

TOKEN = MIN_TOKEN_CHARACTERS * "t"


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def accepted(limit: RateLimit, program: str, num_ids: int) -> bool:
    try:
        limit.charge(program, num_ids)
    except TooFast:
        return False
    return True


def test_over_time_no_program_gets_more_ids_than_its_rate() -> None:
    clock = Clock()
    limit = RateLimit(10.0, clock)
    given, seconds = 0, 30
    for _ in range(seconds * 100):
        given += 3 * accepted(limit, "one", 3)
        clock.now_s += 0.01
    assert 10 * (seconds - 1) <= given <= 10 * (seconds + 1)


def test_a_program_may_save_up_one_second_and_no_more() -> None:
    clock = Clock()
    limit = RateLimit(8.0, clock)
    clock.now_s += 3600
    assert [accepted(limit, "one", 1) for _ in range(10)] == [*(8 * [True]), False, False]
    assert accepted(limit, "another", 8)


def test_a_request_beyond_a_second_s_ids_is_paid_for_afterwards() -> None:
    clock = Clock()
    limit = RateLimit(10.0, clock)
    assert accepted(limit, "one", 50)
    with pytest.raises(TooFast) as caught:
        limit.charge("one", 1)
    assert caught.value.wait_s == pytest.approx(4.1)
    clock.now_s += 4.05
    assert not accepted(limit, "one", 1)
    clock.now_s += 0.1
    assert accepted(limit, "one", 1)


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_names_its_program_and_no_other_text_does(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"# programs\n\nfirst {TOKEN}\nsecond {TOKEN}2\n")
    tokens = Tokens.read(path)
    assert tokens.program_of(f"Bearer {TOKEN}") == "first"
    assert tokens.program_of(f"bearer  {TOKEN}2") == "second"
    for wrong in (None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN[:-1]}"):
        with pytest.raises(NotAdmitted) as caught:
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
        Tokens.read(token_file(tmp_path, text, mode))
    assert TOKEN[1:] not in str(caught.value)


def test_many_long_ids_are_recorded_in_lines_that_can_be_read_again(tmp_path: Path) -> None:
    ids = tuple(f"{number:05d}" + 500 * '"' for number in range(300))
    answered = Answered(
        program="one", protocol="http", num_ids=300, found=7, status=200, milliseconds=1.5, ids=ids
    )
    with Transcript(tmp_path, "active") as transcript:
        transcript.note_answered(answered)
        transcript.note_answered(answered.model_copy(update={"ids": None}))
        transcript.note_answered(answered.model_copy(update={"ids": ()}))
    path = tmp_path / "transcript.jsonl"
    found = verify(path)
    assert isinstance(found, Verified)
    lines = path.read_bytes().splitlines()
    assert max(map(len, lines)) <= LINE_BYTES
    entries = [json.loads(line) for line in lines[1:]]
    *named, without, none = entries
    assert [text for entry in named for text in entry["ids"]] == list(ids)
    assert [entry.get("part") for entry in named] == [None, *range(1, len(named))]
    assert "ids" not in without
    assert none["ids"] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("serving={http: null, grpc: null}", "an address for http, grpc or both"),
        ("serving.fallback=true", "serving.fallback: needs data.features"),
        ("serving.http=nowhere", "serving.http"),
        ("serving.tls={certificate: a.pem}", "private_key"),
        ("serving.timeout_s=0", "timeout_s"),
    ],
)
def test_settings_that_cannot_serve_are_refused(tmp_path: Path, override: str, words: str) -> None:
    write_example(tmp_path)
    overrides = [override]
    if "fallback" in override:
        overrides.append("data.features=null")
    with pytest.raises(SettingsError, match=words):
        load_party_settings(ActiveSettings, tmp_path / "active.yaml", overrides)
