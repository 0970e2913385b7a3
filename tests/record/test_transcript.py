"""Transcripts of both parties: complete, matching, and broken by any change."""

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.commands.program import main as active_main
from splitveil.common.record.transcript import (
    FILE,
    KINDS,
    Broken,
    Crossing,
    Transcript,
    TranscriptComparison,
    TranscriptEnd,
    Verified,
    compare,
    verify,
)
from tests.support.commands import exit_code_of
from tests.support.equality import assert_same_weights
from tests.support.inference import free_port
from tests.support.loopback import peer_of, serving
from tests.support.runs import Parties, build_parties, run_in_process, write_example
from tests.support.tables import deal_other_labels

Lines = list[str]
Noted = tuple[Parties, Path, Path]


def run_noted(folder: Path, into: Path, *overrides: str) -> Noted:
    parties = build_parties(folder, overrides)
    for party in ("active", "passive"):
        (into / party).mkdir(parents=True)
    port = free_port()
    with (
        Transcript(into / "active", "active") as one,
        Transcript(into / "passive", "passive") as other,
        serving(parties, port, transcript=one),
        peer_of(parties, port, transcript=other) as peer,
    ):
        parties.run.run(peer)
    return parties, into / "active" / FILE, into / "passive" / FILE


@pytest.fixture(scope="module")
def noted(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Noted:
    return run_noted(example, tmp_path_factory.mktemp("noted"))


def verified(path: Path) -> Verified:
    found = verify(path)
    assert isinstance(found, Verified), found
    return found


def test_each_party_notes_what_the_other_notes(noted: Noted) -> None:
    parties, active, passive = noted
    one, other = verified(active), verified(passive)
    compared = compare(one, other)
    assert compared.lost == compared.unsent == {}
    assert compared.agreed == one.entries - 1 == other.entries - 1
    entries = [json.loads(line) for line in active.read_text().splitlines()]
    kinds = [(entry.get("direction"), entry.get("kind")) for entry in entries]
    steps = len(parties.active.losses)
    assert kinds.count(("received", "Train request")) == steps
    assert kinds.count(("sent", "Train reply")) == steps
    for call in ("Handshake", "Align", "Evaluate", "Leave"):
        assert ("received", f"{call} request") in kinds
        assert ("sent", f"{call} reply") in kinds
    train = [entry for entry in entries if entry.get("kind") == "Train reply"]
    assert [(entry["epoch"], entry["step"]) for entry in train][-1] == (1, steps // 2 - 1)
    of_messages = {str(entry["kind"]) for entry in entries if "kind" in entry}
    assert {"Train request", "Train reply", "Align reply"} <= of_messages <= KINDS


def test_noting_changes_nothing_in_a_run(example: Path, noted: Noted) -> None:
    plain = build_parties(example)
    run_in_process(plain)
    assert_same_weights(noted[0].weights(), plain.weights())


DAMAGES: dict[str, Callable[[str, str], Lines]] = {
    "changed": lambda line, after: [line.replace('"bytes":', '"bytes":1', 1), after],
    "dropped": lambda line, after: [after],
    "swapped": lambda line, after: [after, line],
    "doubled": lambda line, after: [line, line, after],
    "garbled": lambda line, after: [line[:20], after],
}


def damaged(text: str, how: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:4], *DAMAGES[how](*lines[4:6]), *lines[6:]]) + "\n"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_changed_transcript_is_broken_where_it_was_changed(tmp_path: Path, how: str) -> None:
    with Transcript(tmp_path, "active") as transcript:
        for step in range(8):
            transcript.note(Crossing("sent", "Train reply", b"gradient %d" % step, 0, step))
    path = tmp_path / FILE
    assert verified(path).entries == 9
    assert verified(path).last_link == transcript.summary().last_link
    path.write_text(damaged(path.read_text(), how))
    broken = verify(path)
    assert isinstance(broken, Broken)
    assert broken.line in (5, 6)


def test_a_restarted_party_continues_its_chain_after_half_a_line(tmp_path: Path) -> None:
    with Transcript(tmp_path, "active") as transcript:
        transcript.note(Crossing("sent", "Train reply", b"one", 0, 0))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"number":2,"time":"2026')
    with Transcript(tmp_path, "active") as transcript:
        transcript.note(Crossing("sent", "Train reply", b"two", 0, 1, "event"))
    found = verified(tmp_path / FILE)
    assert found.entries == 4
    assert (tmp_path / FILE).read_text().count('"event":"opened"') == 2
    assert "event" in found.crossings  # a passive party may have that name
    assert transcript.summary() == TranscriptEnd(4, found.last_link)


def test_a_message_that_only_one_party_knows_of_shows(tmp_path: Path) -> None:
    for party in ("one", "other"):
        (tmp_path / party).mkdir()
    with Transcript(tmp_path / "one", "one") as one:
        one.note(Crossing("sent", "Train reply", b"gradient", 0, 0))
        one.note(Crossing("sent", "Train reply", b"lost on its way", 0, 1))
    with Transcript(tmp_path / "other", "other") as other:
        other.note(Crossing("received", "Train reply", b"gradient", 0, 0))
        other.note(Crossing("received", "Train reply", b"never sent", 0, 2))
    compared = compare(verified(tmp_path / "one" / FILE), verified(tmp_path / "other" / FILE))
    assert compared == TranscriptComparison(1, {"Train reply": 1}, {"Train reply": 1})


def test_the_command_checks_one_transcript_or_two(
    noted: Noted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, active, passive = noted

    exit_code = partial(exit_code_of, active_main, "verify-transcript")
    assert exit_code(active, "--against", passive) == 0
    assert "messages were received as the other party sent them" in capsys.readouterr().out
    assert exit_code(tmp_path / "none") == 2
    broken = tmp_path / FILE
    broken.write_text(damaged(passive.read_text(), "dropped"))
    assert exit_code(active, "--against", broken) == 1
    assert "line 5: the link does not match the previous line" in capsys.readouterr().err


Line = dict[str, object]


def chained(*lines: Line | str) -> bytes:
    """Return a transcript with whole links, of entries or of raw text."""
    text, link = "", 64 * "0"
    for number, entry in enumerate(lines):
        if isinstance(entry, dict):
            line = json.dumps({"number": number, "time": "now"} | entry | {"link": link})
        else:
            line = entry.replace("NUMBER", str(number)).replace("LINK", link)
        text += line + "\n"
        link = hashlib.sha256(line.encode("utf-8", "surrogatepass")).hexdigest()
    return text.encode("utf-8", "surrogatepass")


def crossed(**changed: object) -> Line:
    plain = {"direction": "received", "kind": "Train reply", "epoch": 0, "step": 0, "bytes": 8}
    return plain | {"digest": 64 * "a"} | changed


OPENED: Line = {"event": "opened", "party": "active"}
FORGED = "\x1b]0;title\x07\x1b[2J\nthe chain is whole"
HOSTILE: dict[str, Line | str] = {
    "an escape sequence as kind": crossed(kind=FORGED),
    "markup as kind": crossed(kind="[/bold]"),
    "a kind of 60,000 characters": crossed(kind="x" * 60_000),
    "a list as kind": crossed(kind=["Train reply"]),
    "a lone surrogate as kind": crossed(kind="\ud800"),
    "a raw surrogate": '{"number":NUMBER,"kind":"\udcff","link":"LINK"}',
    "NUL as kind": crossed(kind="Train reply\0"),
    "a list as epoch": crossed(epoch=[]),
    "an object as step": crossed(step={"a": 1}),
    "true as step": crossed(step=True),
    "a fraction as step": crossed(step=1.5),
    "a huge step": crossed(step=10**40),
    "an integer of 6,000 digits": f'{{"number":NUMBER,"step":{"9" * 6_000},"link":"LINK"}}',
    "a huge number of the line": f'{{"number":{"9" * 4_000},"link":"LINK"}}',
    "a text as number of the line": '{"number":"\x1b[2J","link":"LINK"}',
    "an object as digest": crossed(digest={}),
    "an object as party": crossed(party={}),
    "a long party": crossed(party="x" * 65),
    "an object as the opening party": OPENED | {"party": {"a": []}},
    "another event": {"event": FORGED},
    "another direction": crossed(direction=FORGED),
    "deep nesting": f'{{"number":NUMBER,"x":{"[" * 30_000}{"]" * 30_000},"link":"LINK"}}',
    "a list": "[]",
    "a long line": " " * 100_000,
    "NUL alone": "\0",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_another_s_transcript_gets_one_line_and_steers_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    own, theirs = tmp_path / "own.jsonl", tmp_path / "theirs.jsonl"
    own.write_bytes(chained(OPENED))
    # Where the bad line comes first, nothing but itself can be wrong with it.
    theirs.write_bytes(chained(HOSTILE[what]))
    code = exit_code_of(active_main, "verify-transcript", own, "--against", theirs)
    shown = capsys.readouterr()
    assert code == 1, shown.err
    (line,) = shown.err.splitlines()
    assert "theirs.jsonl: line 1: " in line
    assert len(line) < len(str(theirs)) + 200
    (line,) = shown.out.splitlines()
    assert "own.jsonl: the chain of 1 entries is intact" in line
    assert (shown.out + shown.err).replace("\n", "").isprintable()


def test_a_line_without_end_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """A sparse file of 8 GiB."""
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(2**33)
    tracemalloc.start()
    try:
        found = verify(tmp_path / FILE)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert found == Broken(1, "the line is not an entry: expected at most 65,536 bytes")


# ---- side channels: only the gradients may differ between two sets of labels ----


MARVELL = "defense={name: marvell, strength: {power_ratio: 4}, insecure_noise_seed: 1}"


def sent(folder: Path) -> list[dict[str, Any]]:
    """Run, and return the active party's messages as its transcript notes them."""
    run_noted(folder, folder / "run", MARVELL)
    lines = (folder / "run" / "active" / FILE).read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry.get("direction") == "sent"]


def test_only_the_gradients_depend_on_the_labels(tmp_path: Path) -> None:
    """Handshake and alignment come before any label is used, and hold random numbers."""
    for name in ("one", "other"):
        write_example(tmp_path / name)
    deal_other_labels(tmp_path / "other" / "active.csv")
    one, other = sent(tmp_path / "one"), sent(tmp_path / "other")
    assert len(one) > 10
    for field in ("kind", "epoch", "step", "bytes"):
        assert [entry[field] for entry in one] == [entry[field] for entry in other]
    kinds = set()
    for a, b in zip(one, other, strict=True):
        if not a["kind"].startswith(("Handshake", "Align")):
            assert (a["digest"] != b["digest"]) is (a["kind"] == "Train reply")
            kinds.add(a["kind"])
    assert kinds == {"Train reply", "Evaluate reply", "Leave reply"}
