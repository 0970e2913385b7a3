"""A disk that fills up while messages are noted: both parties end, and say why."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from splitveil.common.errors import PeerLeft, SplitveilError, StorageError
from splitveil.common.record.transcript import FILE, Broken, Crossing, Transcript, Verified, verify
from tests.support.inference import free_port
from tests.support.loopback import peer_of, serving
from tests.support.runs import Parties, build_parties

FULL = os.strerror(errno.ENOSPC)


class FullDisk:
    """Stands in for an open file on a disk that has room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, FULL)
        written: int = self._file.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def transcript(folder: Path, room: int | None) -> Iterator[Transcript]:
    folder.mkdir(parents=True)
    noting = Transcript(folder, folder.name)
    if room is not None:
        noting._file = FullDisk(noting._file, room)  # type: ignore[assignment]
    try:
        yield noting
    finally:
        with suppress(StorageError):
            noting.close()


def run_noted(parties: Parties, folder: Path, **room: int) -> None:
    """Run over localhost with two transcripts, of which one may have little room."""
    port = free_port()
    with (
        transcript(folder / "active", room.get("active")) as one,
        transcript(folder / "passive", room.get("passive")) as other,
        serving(parties, port, transcript=one),
        peer_of(parties, port, transcript=other) as peer,
    ):
        parties.run.run(peer)


@pytest.fixture(scope="module")
def sizes(example: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("whole")
    run_noted(build_parties(example), folder)
    return {party: (folder / party / FILE).stat().st_size for party in ("active", "passive")}


@pytest.mark.parametrize(
    ("full", "share"), [("active", 0.1), ("active", 0.6), ("passive", 0.4), ("passive", 0.8)]
)
def test_a_message_that_cannot_be_noted_ends_both_parties(
    example: Path,
    sizes: dict[str, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    full: str,
    share: float,
) -> None:
    """In the alignment, in training, or in an evaluation: it is no lost connection to wait for."""
    parties = build_parties(example)
    with pytest.raises(SplitveilError) as caught:
        run_noted(parties, tmp_path, **{full: int(share * sizes[full])})
    ended, others = parties.session.lifecycle.error, caught.value
    if full == "passive":
        ended, others = others, ended
    assert isinstance(ended, StorageError)
    assert str(ended) == f"{tmp_path / full / FILE}: cannot be written: {FULL}"
    assert isinstance(others, PeerLeft)
    assert not [record for record in caplog.records if record.exc_info]  # of gRPC's own threads
    assert not isinstance(verify(tmp_path / full / FILE), Broken)


@pytest.mark.parametrize("full", ["active", "passive"])
def test_a_goodbye_that_cannot_be_noted_is_said_all_the_same(
    example: Path, sizes: dict[str, int], tmp_path: Path, full: str
) -> None:
    parties = build_parties(example)
    run_noted(parties, tmp_path, **{full: sizes[full] - 400})
    assert parties.session.wait_for_farewell(0)
    assert parties.session.lifecycle.error is None


def test_a_transcript_on_a_full_disk_holds_whole_lines_and_resumes(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path, "active")
    transcript._file = FullDisk(transcript._file, 500)  # type: ignore[assignment]
    for step in range(8):
        with suppress(StorageError):
            transcript.note(Crossing("sent", "Train reply", b"gradient", 0, step))
    with pytest.raises(StorageError, match=f"cannot be written: {FULL}"):
        transcript.close()
    transcript.close()
    before = verify(tmp_path / FILE)
    with Transcript(tmp_path, "active") as again:
        again.note(Crossing("sent", "Train reply", b"gradient", 0, 8))
    after = verify(tmp_path / FILE)
    assert isinstance(before, Verified)
    assert isinstance(after, Verified)
    assert after.entries == before.entries + 2
    assert (tmp_path / FILE).read_text().count('"event":"opened"') == 2
