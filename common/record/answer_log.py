"""The log of a run's answers and their charges: private, and never undone.

A run may go back to a checkpoint, but its later answers stay answered. So the log is written before
an answer leaves, and nothing in it is ever changed. It is a sequence of records:

    header    a name, the version, and the number of fingerprints in a record
    record    number, fingerprints, reply, charge, link

The number is a batch's number in the run, or at least 3 * 2^61 where the run went back to a
checkpoint. The reply is a fingerprint of the answer, because answers with other noise may have the
same charge. The link is a hash of the previous link and of the record itself; the first link is a
hash of the run's name. So a reader detects a byte that was changed, inserted or removed, and the
log of another run.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

from splitveil.common.errors import StorageError
from splitveil.common.privacy.charge import CHARGE_BYTES, NO_CHARGE, Charge
from splitveil.common.record.run_folder import storage_errors, write_whole
from splitveil.common.text.system import BINARY

FIRST_RESUMPTION_NUMBER = 3 << 61  # from here on the times that a run went back
HOW_TO_RECOVER = (
    "the answers already given are no longer known, nor what they revealed about the labels: "
    "restore a copy of the file, or start over with --fresh at both parties"
)

_NAME = b"splitveil answers"
_VERSION = 5
_HEADER = struct.Struct(f"<{len(_NAME)}sBB")
_FINGERPRINT_BYTES = 16
_LINK_BYTES = 8
NO_REPLY = bytes(_FINGERPRINT_BYTES)  # of a reply that the questions determine


class Record(NamedTuple):
    number: int
    fingerprints: tuple[bytes, ...]  # fingerprint of each passive party's question, 16 bytes each
    charge: Charge
    reply: bytes = NO_REPLY  # fingerprint of the answer, 16 bytes


class AnswerLog:
    """The questions that were answered, in the order of their answers. Raises StorageError.

    Without a path the log is kept in this process only. ``run`` distinguishes its file from another
    run's. Records of batches before the first that may be asked about again are in the file only.
    """

    def __init__(
        self, path: Path | None = None, questions: int = 1, run: bytes = b"", first_batch: int = 0
    ) -> None:
        self.questions = questions
        self._path = path
        self._known: dict[int, Record] = {}
        self._count = 0
        self._record = struct.Struct(
            f"<Q{questions * _FINGERPRINT_BYTES}s{_FINGERPRINT_BYTES}s{CHARGE_BYTES}s"
        )
        self._link = _link(run, _header(questions))
        self.replies = b""  # a hash of all replies; it differs between copies of a run that go on
        if path is not None:
            self._read(path, first_batch)

    @classmethod
    def create(cls, path: Path, questions: int = 1, run: bytes = b"") -> Self:
        with _opened(path, os.O_CREAT | os.O_TRUNC) as file:
            write_whole(file, _header(questions))
            os.fsync(file.fileno())
        return cls(path, questions, run)

    @staticmethod
    def holds_answers(path: Path) -> bool:
        """Return whether a file holds more than the header of a log."""
        try:
            return path.stat().st_size > _HEADER.size
        except FileNotFoundError:
            return False

    def __len__(self) -> int:
        return self._count

    def at(self, number: int) -> Record | None:
        """Return the last record of a number that may be asked about again."""
        return self._known.get(number)

    def num_resumptions(self) -> int:
        return sum(number >= FIRST_RESUMPTION_NUMBER for number in self._known)

    def record(
        self,
        number: int,
        fingerprints: Sequence[bytes],
        charge: Charge = NO_CHARGE,
        reply: bytes = NO_REPLY,
    ) -> None:
        """Record that a question is about to be answered: it must not be after a StorageError."""
        if len(fingerprints) > self.questions:
            raise ValueError(f"expected {self.questions} questions, got {len(fingerprints)}")
        record = Record(number, tuple(fingerprints), charge, reply)
        joined = b"".join(fingerprints)
        packed = self._record.pack(number, joined, reply, charge.to_bytes())
        link = _link(self._link, packed)
        if self._path is not None:
            # Synced only with the next checkpoint, but for noisy sums: a killed process loses
            # nothing that it has written, and a peer cannot cause a power failure.
            with _opened(self._path, os.O_APPEND) as file:
                write_whole(file, packed + link)
        self._link = link
        self._count += 1
        self._note(record)

    def sync(self) -> None:
        """Make the log survive a power failure, as the checkpoint that counts its records does."""
        if self._path is not None:
            with _opened(self._path) as file:
                os.fsync(file.fileno())

    def since(self, count: int) -> Iterator[Record]:
        if count > len(self):
            raise StorageError(
                f"{self._path}: holds {len(self)} answers, and the checkpoint counts {count}: "
                f"{HOW_TO_RECOVER}"
            )
        if self._path is None:
            raise RuntimeError("a log without a file cannot be read again")
        size = self._record.size + _LINK_BYTES
        data = _content(self._path)[_HEADER.size + count * size :]
        for start in range(0, len(data), size):
            yield self._unpacked(data[start : start + self._record.size])

    def forget_before(self, batch_number: int) -> None:
        """Drop the records of earlier batches from memory; the file keeps them."""
        # All other records stay: their numbers are larger than any batch's.
        self._known = {
            number: known for number, known in self._known.items() if number >= batch_number
        }

    def _read(self, path: Path, first_batch: int) -> None:
        data = _content(path)
        header = _header(self.questions)
        if not data:
            raise StorageError(f"{path}: is empty: {HOW_TO_RECOVER}")
        if data[: len(header)] != header:
            raise StorageError(
                f"{path}: is damaged, or of another version of splitveil; resume with that "
                f"version, or start over with --fresh at both parties"
            )
        size = self._record.size + _LINK_BYTES
        self._count = (len(data) - len(header)) // size
        for number in range(self._count):
            start = len(header) + number * size
            packed = data[start : start + self._record.size]
            self._link = _link(self._link, packed)
            if data[start + len(packed) : start + size] != self._link:
                raise StorageError(f"{path}: record {number + 1} is damaged: {HOW_TO_RECOVER}")
            record = self._unpacked(packed)
            self._note(record, first_batch)
        whole = len(header) + self._count * size
        if len(data) != whole:  # a crash left part of a record: its answer never left this party
            with storage_errors(path, "cannot be written"):
                os.truncate(path, whole)

    def _note(self, record: Record, first_batch: int = 0) -> None:
        if record.reply != NO_REPLY:
            self.replies = _link(self.replies, record.reply)
        if record.number >= first_batch:
            self._known[record.number] = record

    def _unpacked(self, data: bytes) -> Record:
        number, joined, reply, charge = self._record.unpack(data)
        fingerprints = tuple(
            joined[start : start + _FINGERPRINT_BYTES]
            for start in range(0, len(joined), _FINGERPRINT_BYTES)
        )
        try:
            return Record(number, fingerprints, Charge.from_bytes(charge), reply)
        except ValueError as error:
            raise StorageError(f"{self._path}: {error}: {HOW_TO_RECOVER}") from error


def _header(questions: int) -> bytes:
    return _HEADER.pack(_NAME, _VERSION, questions)


def _link(before: bytes, data: bytes) -> bytes:
    # This finds accidents, not forgeries: anyone who may write the file may change the program too.
    return hashlib.blake2b(before + data, digest_size=_LINK_BYTES).digest()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(f"{path}: is missing: {HOW_TO_RECOVER}") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[FileIO]:
    with (
        storage_errors(path, "cannot be written"),
        FileIO(os.open(path, os.O_WRONLY | BINARY | flags, 0o600), "w") as file,
    ):
        yield file
