"""Bad input of each kind: exit codes and messages of both parties' real processes."""

import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import Pair, Party, PartyName, side_by_side, started
from tests.support.runs import NAMES, write_example, write_several
from tests.support.simulation import free_address

ENDLESS = "contract.epochs=100000"


def example(folder: Path, rows: int = 400) -> Path:
    write_example(folder, rows)
    return folder


# ---- a party's own data ----

REFUSED: dict[str, tuple[PartyName, dict[tuple[int, int], str], list[str], list[str]]] = {
    "labels that are no labels": (
        "active",
        {(1, 1): "41.25", (8, 1): "41.25"},
        ["active.csv: column 'label': expected 0 or 1", "in rows 2, 9 (2 in all)"],
        ["41.25"],
    ),
    "features that are no numbers": (
        "passive",
        {(2, 2): "NaN", (3, 2): "", (4, 3): "a lot", (5, 4): "-inf"},
        [
            "passive.csv: column 'x2': no number (empty or NaN) in rows 3, 4 (2 in all)",
            "passive.csv: column 'x3': expected numbers, found text in row 5\n",
            "passive.csv: column 'x4': infinite or too large for float32 in row 6; ",
        ],
        ["a lot"],
    ),
}
"""Whose table it is, its spoilt cells by row and column, what the owner reads, and what nobody
reads."""


@pytest.mark.parametrize("what", REFUSED)
def test_data_that_cannot_be_used_are_refused_before_anything_is_sent(
    tmp_path: Path, what: str
) -> None:
    """With file, column, row numbers and count, and without any value of the file."""
    name, spoilt, reads, never_reads = REFUSED[what]
    table = example(tmp_path) / f"{name}.csv"
    header, *rows = (line.split(",") for line in table.read_text().splitlines())
    for (row, column), cell in spoilt.items():
        rows[row][column] = cell
    table.write_text("\n".join(",".join(row) for row in [header, *rows]))
    with socket.create_server(("127.0.0.1", 0)) as peer:
        peer.setblocking(False)
        address = f"127.0.0.1:{peer.getsockname()[1]}"
        where = f"connect={address}" if name == "passive" else f"listen={free_address()}"
        with Party(name, tmp_path, where) as party:
            assert party.wait() == 3, party.output
        with pytest.raises(BlockingIOError):
            peer.accept()  # nobody has tried to connect
    assert [text for text in reads if text not in party.output] == [], party.output
    for text in ("person-", "waiting for", *never_reads):
        assert text not in party.output, party.output
    assert not (tmp_path / "runs").exists()


def test_evaluation_labels_that_lack_ids_end_both(tmp_path: Path) -> None:
    """The active party cannot know the passive party's file: it hears of it, and does not wait."""
    folder = example(tmp_path)
    rows = (folder / "active.csv").read_text().splitlines()
    (folder / "labels.csv").write_text("\n".join(rows[:200]))
    with started(folder, passive=["adversary.labels.source.path=labels.csv"]) as pair:
        assert pair.wait() == (4, 3), pair.outputs
    assert "labels.csv: " in pair.passive.output
    assert "of the 360 aligned ids have no label here" in pair.passive.output
    assert "the peer ended the run before its last step" in pair.active.output
    assert "person-" not in pair.outputs


# ---- settings ----


def test_a_second_start_on_a_taken_port_leaves_the_first_run_s_results_alone(
    tmp_path: Path,
) -> None:
    folder = example(tmp_path)
    results = folder / "runs" / "small" / "active"
    results.mkdir(parents=True)
    (results / "metrics.jsonl").write_text("{}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Party("active", folder, f"listen={address}") as party:
            assert party.wait() == 2, party.output
    assert f"listen: cannot serve at {address}: " in party.output
    assert [path.name for path in results.parent.iterdir()] == ["active"]
    assert [path.name for path in results.iterdir()] == ["metrics.jsonl"]


# ---- signals ----


def test_a_signal_in_training_saves_both_models_and_the_peer_is_told(tmp_path: Path) -> None:
    cases: list[tuple[PartyName, signal.Signals]] = [
        ("active", signal.SIGINT),
        ("passive", signal.SIGTERM),
    ]

    def interrupt(party: PartyName, number: signal.Signals) -> tuple[tuple[int, int], Pair]:
        with started(example(tmp_path / f"{party}{number}"), ENDLESS) as pair:
            pair.wait_until_training()
            getattr(pair, party).signal(number)
            return pair.wait(), pair

    found = side_by_side(*(lambda case=case: interrupt(*case) for case in cases))
    for (party, number), (exit_codes, pair) in zip(cases, found, strict=True):
        stopped, left_behind = pair if party == "active" else (pair.passive, pair.active)
        expected = (128 + number, 4) if party == "active" else (4, 128 + number)
        assert exit_codes == expected, pair.outputs
        assert f"stopped by {number.name}\n" in stopped.output, pair.outputs
        assert "the peer was stopped by a person or a supervisor\n" in left_behind.output, (
            pair.outputs
        )
        assert stopped.has_checkpoint
        assert left_behind.has_checkpoint


def test_a_signal_while_aligning_does_not_wait_for_the_last_id(tmp_path: Path) -> None:
    """There is no model yet, and so no checkpoint: it would be there after the last id."""

    def interrupt(party: PartyName, number: signal.Signals) -> tuple[tuple[int, int], Pair]:
        # So many ids last seconds, however many cores there are.
        with started(example(tmp_path / party, rows=100_000), options=["-v"]) as pair:
            pair.active.wait_until_says("exchanging ids")
            getattr(pair, party).signal(number)
            return pair.wait(), pair

    # One after the other: a chunk of ids has to be done within the time that a peer is given.
    by_active, left_behind = interrupt("active", signal.SIGTERM)
    by_passive, left = interrupt("passive", signal.SIGINT)
    assert by_active == (143, 4), left_behind.outputs
    assert "the peer was stopped by a person or a supervisor\n" in left_behind.passive.output
    assert by_passive == (4, 130), left.outputs
    assert "the other party closed the exchange of ids" in left.active.output
    assert not any(party.has_checkpoint for pair in (left_behind, left) for party in pair)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """After one signal, a party with a peer gives it some seconds to answer."""
    with Party("passive", example(tmp_path), f"connect={free_address()}") as party:
        party.wait_until_says("no connection to the peer")
        # Both arrive while it is frozen: it cannot end between them.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            party.signal(number)
        assert party.wait() == 143, party.output
    assert "stopping after this step; send the signal again to stop at once\n" in party.output
    assert party.output.endswith("stopped at once; nothing more is saved\n")


# ---- several parties ----


def test_a_party_that_stays_away_ends_the_run_by_name(tmp_path: Path) -> None:
    write_several(tmp_path, 3)
    address, parties = free_address(), dict[str, Party]()
    with ExitStack() as stack:
        for name in ("active", *NAMES):
            where = f"{'listen' if name == 'active' else 'connect'}={address}"
            party = Party(name, tmp_path, where, ENDLESS, fast_clock=True)
            parties[name] = stack.enter_context(party)
        parties["active"].wait_until_training()
        parties["birch"].kill()
        parties["active"].hurry()
        codes = {name: parties[name].wait() for name in ("active", "ash", "cedar")}
        assert set(codes.values()) == {4}, codes
    message = "nothing came from passive party 'birch' for 300 s"
    assert message in " ".join(parties["active"].output.split())
