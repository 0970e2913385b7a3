"""Stores an unfinished exchange of ids in files, to resume it after a fault on the line or a crash.

    state              what the exchange is of, the number of its bucket, and the bucket's secrets:
                       the scalar, and that of the shuffled order
    rows               this party's rows of the common ids of earlier buckets, 8 bytes each
    0/own.points       of bucket 0: points of this party that were sent, 32 bytes each
    0/peer.points      points of the peer that were received and multiplied
    0/peer.tags        their tags, which this party has computed, 16 bytes each
    0/peer.commitment  the peer's commitment to the tags of this party's ids, once it has arrived
    0/own.tags         tags of this party's ids, as the peer has shown them

Whoever reads the scalar can test any id against the points, so the files lie in a folder of their
own (mode 0700, files 0600) beside the run's results, one for each peer, and are deleted as soon as
both parties have the outcome: a party knows that from the next message of the other one, because
the last message of the exchange itself may be lost. No tag is shown before everything it depends on
is on disk: a machine that loses its power in between would otherwise answer other points with the
same scalar.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from splitveil.common.errors import AlignmentError, ProtocolError, StorageError
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.sample_order import Positions
from splitveil.common.wire.limits import POINT_BYTES, TAG_BYTES

logger = logging.getLogger(__name__)

StoredName = Literal["own.points", "peer.points", "peer.tags", "peer.commitment", "own.tags"]

_STATE, _ROWS = "state", "rows"
_ROW = np.dtype("<i8")
_IDS_DOMAIN = b"splitveil alignment ids 2\x00"
_DIGEST_BYTES = hashlib.sha256().digest_size
_READ_BYTES = 1 << 20
# Bytes of one element of each file.
_LENGTHS: dict[StoredName, int] = {
    "own.points": POINT_BYTES,
    "peer.points": POINT_BYTES,
    "peer.tags": TAG_BYTES,
    "peer.commitment": _DIGEST_BYTES,
    "own.tags": TAG_BYTES,
}


class ExchangeState(NamedTuple):
    """The identity of an exchange, and its secrets."""

    exchange: bytes  # the number that both parties give it, 32 bytes
    scalar: bytes
    shuffle_seed: bytes
    ids_digest: bytes  # of this party's ids: with others, the exchange cannot be resumed
    own_size: NonNegativeInt  # number of this party's places in each bucket
    peer_size: NonNegativeInt
    chunk_ids: PositiveInt
    buckets: PositiveInt
    bucket: NonNegativeInt = 0
    found: NonNegativeInt = 0  # number of common ids in earlier buckets
    digest: bytes = b""  # of their tags


_STATE_FORM = TypeAdapter(
    ExchangeState, config=ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", strict=True)
)


class ResumePoint(NamedTuple):
    """The point where an exchange broke off."""

    store: "ExchangeStore"
    state: ExchangeState
    rows: Positions  # of the common ids of earlier buckets
    own_points: int  # number of points in the file
    peer_points: int
    peer_tags: bytearray
    own_tags: bytearray
    peer_commitment: bytes  # empty if it had not arrived


class ExchangeStore:
    """The files of one unfinished exchange, or of none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bucket = folder

    def load(
        self, ids_digest: bytes, chunk_ids: int, buckets: int, part_of: Callable[[int], int]
    ) -> ResumePoint | None:
        """Return where the stored exchange broke off; None if these ids can resume none.

        What a killed process has written in part is left out.
        """
        state = self._state()
        wanted = ids_digest, chunk_ids, buckets
        if state is None or (state.ids_digest, state.chunk_ids, state.buckets) != wanted:
            return None
        self._bucket = self._folder / str(state.bucket)
        rows = np.frombuffer(_content(self._folder / _ROWS), _ROW)[: state.found].copy()
        if len(rows) < state.found:
            return None
        own, peer = state.own_size, state.peer_size
        sent = self._whole(["own.points"], own, chunk_ids)
        answered = self._whole(["peer.points", "peer.tags"], peer, chunk_ids)
        shown = self._whole(["own.tags"], own, part_of(own))
        commitment = self._read("peer.commitment")
        if len(commitment) != _DIGEST_BYTES:
            # Tags are shown after the commitments.
            commitment, shown = bytearray(), 0
        cuts: dict[StoredName, int] = {
            "own.points": sent,
            "peer.points": answered,
            "peer.tags": answered,
            "own.tags": shown,
            "peer.commitment": int(bool(commitment)),
        }
        for name, count in cuts.items():
            self.cut(name, count)
        tags = self._read("peer.tags"), self._read("own.tags")
        return ResumePoint(self, state, rows, sent, answered, *tags, bytes(commitment))

    def begin(self, state: ExchangeState, rows: Positions) -> None:
        """Store a new bucket and the rows of the one before it, or raise StorageError.

        Nothing is left of the one before it, nor of an earlier exchange.
        """
        if not state.bucket:
            self.discard()
        before, self._bucket = self._bucket, self._folder / str(state.bucket)
        with storing(self._folder):
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._bucket.exists():  # begun by a process that was killed in this place
                shutil.rmtree(self._bucket)
            self._bucket.mkdir(mode=0o700)
        path = self._folder / _ROWS
        with storing(path), _opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
            os.ftruncate(descriptor, (state.found - len(rows)) * _ROW.itemsize)
            os.lseek(descriptor, 0, os.SEEK_END)
            _write(descriptor, rows.astype(_ROW).tobytes())
            os.fsync(descriptor)
        write_bytes_atomically(self._folder / _STATE, _STATE_FORM.dump_json(state), mode=0o600)
        if state.bucket:
            shutil.rmtree(before, ignore_errors=True)

    def points_digest(self, name: StoredName, count: int) -> "hashlib._Hash":
        """Return the SHA-256 over the first ``count`` points of a file, or raise StorageError."""
        path, digest, left = self._bucket / name, hashlib.sha256(), count * POINT_BYTES
        if not left:
            return digest  # there may be no file yet
        with storing(path), path.open("rb") as file:
            while left:
                data = file.read(min(left, _READ_BYTES))
                if not data:
                    raise StorageError(f"{path}: is damaged")
                digest.update(data)
                left -= len(data)
        return digest

    def append(self, name: StoredName, data: bytes) -> None:
        """Append to one of the files, before anything that follows from it is sent."""
        path = self._bucket / name
        with storing(path), _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
            _write(descriptor, data)

    def part(self, name: StoredName, first: int, count: int) -> bytes:
        path = self._bucket / name
        with storing(path), path.open("rb") as file:
            file.seek(first * _LENGTHS[name])
            data = file.read(count * _LENGTHS[name])
        if len(data) < count * _LENGTHS[name]:
            raise StorageError(f"{path}: is damaged")
        return data

    def cut(self, name: StoredName, count: int) -> None:
        path = self._bucket / name
        if path.exists():
            with storing(path), _opened(path, os.O_WRONLY) as descriptor:
                os.ftruncate(descriptor, min(count * _LENGTHS[name], os.fstat(descriptor).st_size))

    def sync(self) -> None:
        for path in (*(self._bucket / name for name in _LENGTHS), self._bucket):
            if path.exists():
                with storing(path), _opened(path, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)

    def discard(self) -> None:
        """Delete the files, the secrets first; what cannot be deleted is reported."""
        try:
            (self._folder / _STATE).unlink(missing_ok=True)
            if self._folder.exists():
                shutil.rmtree(self._folder)
        except OSError as error:
            logger.warning("%s: cannot be deleted: %s", self._folder, error.strerror)

    def _state(self) -> ExchangeState | None:
        path = self._folder / _STATE
        try:
            with storing(path):
                return _STATE_FORM.validate_json(path.read_bytes()) if path.exists() else None
        except ValidationError:
            logger.warning("%s: is damaged; the ids are exchanged anew", path)
            return None

    def _read(self, name: StoredName) -> bytearray:
        return _content(self._bucket / name)

    def _whole(self, names: Iterable[StoredName], size: int, step: int) -> int:
        """Return how many of ``size`` elements each file has, in whole steps or all of them."""
        paths = {name: self._bucket / name for name in names}
        with storing(self._folder):
            counts = [
                path.stat().st_size // _LENGTHS[name] if path.exists() else 0
                for name, path in paths.items()
            ]
        count = min(*counts, size)
        return count if count == size else count - count % step


class ExchangeStores:
    """The unfinished exchanges of one party with all of its peers.

    They lie beside the party's folder of the run, because starting over moves it aside.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.with_name(f".{folder.name}.exchanges")

    def folder_of(self, peer: str) -> Path:
        return self._folder / peer

    def of(self, peer: str) -> ExchangeStore:
        return ExchangeStore(self.folder_of(peer))

    def discard(self) -> None:
        if self._folder.exists():
            for folder in self._folder.iterdir():
                ExchangeStore(folder).discard()
            shutil.rmtree(self._folder, ignore_errors=True)


def digest_of_ids(ids: Iterable[str]) -> bytes:
    """Return a digest of ids in their order, 32 bytes, to recognise them."""
    digest = hashlib.sha256(_IDS_DOMAIN)
    for own in ids:
        text = own.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(4, "big") + text)
    return digest.digest()


@contextmanager
def forgetting(forget: Callable[[], None]) -> Iterator[None]:
    """Forget the stored exchange if the peer's data are refused: they would be refused again."""
    try:
        yield
    except (AlignmentError, ProtocolError):
        forget()
        raise


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Convert errors of the operating system to StorageError, which names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def _content(path: Path) -> bytearray:
    with storing(path):
        return bytearray(path.read_bytes()) if path.exists() else bytearray()


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    # Nobody else can write to the folder; a link there would be a fault.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
