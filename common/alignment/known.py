"""Keeps the key of a finished alignment and the tags of both parties, to align only new ids later.

    state       for each alignment: its number, the scalar, sizes and digests
    NUMBER.own  tags of this party's ids, each with a keyed hash of the id, 32 bytes, sorted
    NUMBER.peer tags of the peer's ids, 16 bytes each, sorted
    work        what the exchange under way derives from them

Whoever reads the scalar can test any id against the tags of the peer, so the files lie in a folder
of their own (mode 0700, files 0600), one for each peer. A party does not know whether the peer has
the outcome of an alignment before the next message of it: until then the alignment that it extended
stays beside it, and the next exchange extends the newest one that both parties have.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from splitveil.common.alignment.storing import discard, storing
from splitveil.common.errors import StorageError
from splitveil.common.storage.run_folder import write_bytes_atomically
from splitveil.common.text.files import sync
from splitveil.common.wire.limits import TAG_BYTES

logger = logging.getLogger(__name__)

ID_HASH_BYTES = 16
OWN_BYTES = TAG_BYTES + ID_HASH_BYTES

_STATE = "state"
_DOMAIN = b"splitveil alignment known 1\x00"
_KEY_BYTES = 32
_BLOCK_BYTES = 1 << 20


class Known(NamedTuple):
    """A finished alignment of which the key was kept."""

    number: bytes
    """The number of its exchange, 32 bytes."""
    scalar: bytes
    digest: bytes
    """Over the number and the tags of both parties: the same at both."""
    own_digest: bytes
    """Of the file with this party's tags, and below of that with the peer's."""
    peer_digest: bytes
    own_size: int
    peer_size: int


class Lists(NamedTuple):
    """The files with the tags of an alignment."""

    own: Path
    peer: Path


class KeyFiles:
    """The alignments with one peer of which the key was kept.

    Args:
        folder: their folder, which need not exist.
        rules: what the form of ids follows from; with others, no key is used again.
    """

    def __init__(self, folder: Path, rules: bytes = b"") -> None:
        self._folder = folder
        self._rules = hashlib.sha256(rules).digest()

    def load(self) -> list[Known]:
        """Return the kept alignments that can be extended, the newest first.

        Raises:
            StorageError: a file cannot be read.
        """
        stored = self._read()
        if stored and stored.rules != self._rules:
            logger.info("%s: was kept for ids under other rules, and is not used", self._folder)
            return []
        found = [known for known in stored.alignments if self._is_whole(known)] if stored else []
        if stored and len(found) < len(stored.alignments):
            logger.warning("%s: is damaged, and not used", self._folder)
        return found

    def id_key(self) -> bytes:
        """Return the key with which ids are hashed here, 32 bytes; a new one if there is none."""
        stored = self._read()
        return stored.id_key if stored and stored.rules == self._rules else os.urandom(_KEY_BYTES)

    def lists(self, number: bytes) -> Lists:
        """Return the files of an alignment, existing or not."""
        name = number.hex()
        return Lists(self._folder / f"{name}.own", self._folder / f"{name}.peer")

    def work(self) -> Path:
        """Return an empty folder for an exchange.

        Raises:
            StorageError: it cannot be made.
        """
        path = self._folder / "work"
        with storing(path):
            shutil.rmtree(path, ignore_errors=True)
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700)
        return path

    def add(self, known: Known, id_key: bytes, base: bytes) -> None:
        """Keep an alignment whose files are written, and of the others only the one it extends.

        Args:
            known: the alignment.
            id_key: with which the ids in its file are hashed.
            base: the number of the alignment that it extends; empty without one.

        Raises:
            StorageError: it cannot be written.
        """
        for path in self.lists(known.number):
            with storing(path):
                sync(path)
        stored = self._read()
        earlier = [one for one in stored.alignments if one.number == base] if stored else []
        kept = [known, *(one for one in earlier if one.number != known.number)]
        self._write(_Stored(self._rules, id_key, kept))

    def settle(self) -> None:
        """Keep the newest alignment only, because the other party has its outcome as well."""
        try:
            stored = self._read()
            if stored:
                self._write(stored._replace(alignments=stored.alignments[:1]))
        except StorageError as error:
            logger.warning("%s; it is settled the next time", error)
        shutil.rmtree(self._folder / "work", ignore_errors=True)

    def discard(self) -> None:
        """Delete everything, the secrets first; what cannot be deleted is reported."""
        discard(self._folder, _STATE)

    def _is_whole(self, known: Known) -> bool:
        own, peer = self.lists(known.number)
        return (
            _digest_of(own, known.own_size * OWN_BYTES) == known.own_digest
            and _digest_of(peer, known.peer_size * TAG_BYTES) == known.peer_digest
        )

    def _read(self) -> "_Stored | None":
        path = self._folder / _STATE
        with storing(path):
            text = path.read_bytes() if path.exists() else None
        if text is None:
            return None
        try:
            return _Stored.from_json(text)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            logger.warning("%s: is damaged, and not used", path)
            return None

    def _write(self, stored: "_Stored") -> None:
        write_bytes_atomically(self._folder / _STATE, stored.to_json(), 0o600)
        used = {path for known in stored.alignments for path in self.lists(known.number)}
        with storing(self._folder):
            for path in {*self._folder.glob("*.own"), *self._folder.glob("*.peer")} - used:
                path.unlink()


class KeptKeys:
    """The kept keys of one party, for all of its peers.

    Args:
        folder: holds a folder for each peer.
        identities: the name in its certificate that each peer has, by the peer's name.
        rules: see ``KeyFiles``.
    """

    def __init__(self, folder: Path, identities: Mapping[str, str], rules: bytes = b"") -> None:
        self._folder, self._identities, self._rules = folder, identities, rules

    def of(self, peer: str) -> KeyFiles:
        """Return the key files of a peer."""
        return KeyFiles(self._folder / self._identities[peer], self._rules)


def digest_of_known(number: bytes, own_tags: bytes, peer_tags: bytes) -> bytes:
    """Return the digest that both parties have of an alignment, 32 bytes.

    Args:
        number: of its exchange.
        own_tags: SHA-256 over the sorted tags of this party.
        peer_tags: the same of the peer.
    """
    return hashlib.sha256(_DOMAIN + number + b"".join(sorted((own_tags, peer_tags)))).digest()


class _Stored(NamedTuple):
    rules: bytes
    id_key: bytes
    alignments: list[Known]

    @classmethod
    def from_json(cls, text: bytes) -> "_Stored":
        stored = json.loads(text)
        rules, id_key = (bytes.fromhex(stored[name]) for name in cls._fields[:2])
        return cls(rules, id_key, [_known(one) for one in stored["alignments"]])

    def to_json(self) -> bytes:
        stored = {
            "rules": self.rules.hex(),
            "id_key": self.id_key.hex(),
            "alignments": [
                [one.hex() if isinstance(one, bytes) else one for one in known]
                for known in self.alignments
            ],
        }
        return json.dumps(stored).encode()


def _known(stored: list[str | int]) -> Known:
    *texts, own_size, peer_size = stored
    number, scalar, digest, own, peer = (bytes.fromhex(str(text)) for text in texts)
    if {len(one) for one in (number, scalar, digest, own, peer)} != {_KEY_BYTES}:
        raise ValueError(texts)
    if type(own_size) is not int or type(peer_size) is not int or min(own_size, peer_size) < 0:
        raise ValueError(stored)
    return Known(number, scalar, digest, own, peer, own_size, peer_size)


def _digest_of(path: Path, length: int) -> bytes:
    """Return the SHA-256 of a file; empty if it has another length or does not exist."""
    digest = hashlib.sha256()
    with storing(path):
        if not path.is_file() or path.stat().st_size != length:
            return b""
        with path.open("rb") as file:
            while data := file.read(_BLOCK_BYTES):
                digest.update(data)
    return digest.digest()
