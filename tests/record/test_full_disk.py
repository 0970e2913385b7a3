"""A disk that fills up while messages are noted: both parties end, and say why."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from splitveil.common.errors import PeerLeft, SplitveilError, StorageError
from splitveil.common.record.transcript import FILE, Broken, Crossing, Transcript, verify
from tests.support.lines import free_port, peer_of, serving
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


class Noted:
    """Both parties over localhost with transcripts, of which one may get on a full disk."""

    def __init__(self, example: Path, folder: Path) -> None:
        self.folder = folder
        self.parties: Parties = build_parties(example)
        for party in ("active", "passive"):
            (folder / party).mkdir(parents=True)

    def size(self, party: str) -> int:
        return (self.folder / party / FILE).stat().st_size

    @contextmanager
    def transcript(self, party: str, room: int | None) -> Iterator[Transcript]:
        transcript = Transcript(self.folder / party, party)
        if room is not None:
            transcript._file = FullDisk(transcript._file, room)  # type: ignore[assignment]
        try:
            yield transcript
        finally:
            with suppress(StorageError):
                transcript.close()

    def run(self, full: str | None = None, room: int = 0) -> None:
        port = free_port()
        with (
            self.transcript("active", room if full == "active" else None) as one,
            self.transcript("passive", room if full == "passive" else None) as other,
            serving(self.parties, port, transcript=one),
            peer_of(self.parties, port, transcript=other) as peer,
        ):
            self.parties.run.run(peer)


@pytest.fixture(scope="module")
def whole(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Noted:
    noted = Noted(example, tmp_path_factory.mktemp("whole"))
    noted.run()
    return noted


@pytest.mark.parametrize(
    ("full", "share"), [("active", 0.1), ("active", 0.6), ("passive", 0.4), ("passive", 0.8)]
)
def test_a_message_that_cannot_be_noted_ends_both_parties(
    example: Path,
    whole: Noted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    full: str,
    share: float,
) -> None:
    """In the alignment, in training, or in an evaluation: it is no lost connection to wait for."""
    noted = Noted(example, tmp_path)
    with pytest.raises(SplitveilError) as caught:
        noted.run(full, int(share * whole.size(full)))
    session = noted.parties.session
    ended, others = (session.lifecycle.error, caught.value)
    if full == "passive":
        ended, others = others, ended
    assert isinstance(ended, StorageError)
    assert str(ended) == f"{tmp_path / full / FILE}: cannot be written: {FULL}"
    assert isinstance(others, PeerLeft)
    assert not [record for record in caplog.records if record.exc_info]  # of gRPC's own threads
    assert not isinstance(verify(tmp_path / full / FILE), Broken)


@pytest.mark.parametrize("full", ["active", "passive"])
def test_a_goodbye_that_cannot_be_noted_is_said_all_the_same(
    example: Path, whole: Noted, tmp_path: Path, full: str
) -> None:
    noted = Noted(example, tmp_path)
    noted.run(full, whole.size(full) - 400)
    assert noted.parties.session.wait_for_farewell(0)
    assert noted.parties.session.lifecycle.error is None


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
    assert not isinstance(before, Broken)
    with Transcript(tmp_path, "active") as again:
        again.note(Crossing("sent", "Train reply", b"gradient", 0, 8))
    after = verify(tmp_path / FILE)
    assert not isinstance(after, Broken)
    assert (after.entries, after.starts) == (before.entries + 2, 2)
