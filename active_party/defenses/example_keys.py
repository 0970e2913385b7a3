"""The secret noise key, and the secret bits that each example derives from it for the whole run.

An example's bits are BLAKE2b of its canonical id, keyed with the noise key and separated by
purpose. They do not need a table: a restarted party, a second worker, another epoch or another
batch derives the same bits. Anyone who knows the key can subtract the noise, so its file is
readable only by its owner, and the key never appears in a log or a message.

The file holds the key, 32 bytes, and once it has been used two digests, 16 bytes each: of what
`used_labels_file` holds, and of what it holds next. They differ only while that file is replaced.
"""

import hashlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NewType

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.defenses.noise import box_muller
from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.run.sample_order import keyed_digests
from splitveil.common.text.files import only_one_process

NoiseKey = NewType("NoiseKey", bytes)  # 32 secret bytes

GRADIENT_NOISE = b"gradient noise"
LABEL_NOISE = b"label noise"

_KEY_BYTES = 32
_DIGEST_BYTES = 16
_HOW_TO_GO_ON = (
    "the same noise on another label would reveal both labels. Restore it, or name another "
    "noise_key_path; what a new key draws is charged on top"
)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def load_or_create_key(path: Path) -> NoiseKey:
    """Read the noise key, or create it. Safe for processes that start at the same time.

    Raises SettingsError if the file is not a key, others own, read or write it, or
    `used_labels_file` does not match it; StorageError if it cannot be written.
    """
    used = used_labels_file(path)
    if not path.exists():
        if used.exists() and used.stat().st_size:
            raise SettingsError(
                f"{path}: the noise key is missing, and {used.name} says that it was used: restore "
                f"it, or name another noise_key_path; what a new key draws is charged on top"
            )
        # Written completely under another name first, so that a crash never leaves part of a key;
        # then linked to its own name, which fails if another worker was faster.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            used_labels_file(path).touch(0o600)
            descriptor = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(_KEY_BYTES))
                    file.flush()
                    os.fsync(descriptor)
                path.hardlink_to(temporary)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    key, _ = _read(path)
    try:
        with only_one_process(path):
            used_labels(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be used: {error.strerror}") from error
    return key


def used_labels_file(path: Path) -> Path:
    """Return the path of the labels a key's noise was drawn for, empty until the key is used."""
    return path.with_name(f"{path.name}.labels")


def used_labels(path: Path) -> bytes:
    """Return what `used_labels_file` holds; the caller holds the lock of the key's file.

    Raises SettingsError if it does not match the key's file: an empty, truncated or old file, or
    another key's, would make used rows look new.
    """
    file = used_labels_file(path)
    if not file.exists():
        raise SettingsError(f"{path}: expected {file.name} beside the noise key: {_HOW_TO_GO_ON}")
    (_, digests), content = _read(path), file.read_bytes()
    if _digest(content) not in (digests or [_digest(b"")]):
        raise SettingsError(
            f"{file}: not the labels for which {path.name} was last used: {_HOW_TO_GO_ON}"
        )
    return content


def note_use(path: Path, labels: bytes, following: bytes) -> None:
    """Note in the key's file what `used_labels_file` holds now and next. Raises OSError."""
    # In place and in one write: a new file would not have the lock, nor the key's other names.
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, _digest(labels) + _digest(following), _KEY_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(labels: bytes) -> bytes:
    return hashlib.blake2b(labels, digest_size=_DIGEST_BYTES, person=b"used labels").digest()


def key_from_insecure_seed(seed: int) -> NoiseKey:
    """Make a key for tests: anyone who knows the seed knows the key."""
    return NoiseKey(hashlib.blake2b(b"%d" % seed, digest_size=_KEY_BYTES).digest())


def key_for(key: NoiseKey, strength: str) -> NoiseKey:
    """Derive the key of a strength: the same noise at two strengths could be solved for."""
    digest = hashlib.blake2b(
        strength.encode(), digest_size=_KEY_BYTES, key=key, person=b"strength's key"
    )
    return NoiseKey(digest.digest())


def key_name(key: NoiseKey) -> str:
    """Return a name that distinguishes keys and reveals nothing about them."""
    return hashlib.blake2b(digest_size=8, key=key, person=b"name of the key").hexdigest()


def example_keys(key: NoiseKey, ids: Sequence[str], purpose: bytes) -> Tensor:
    """Derive each canonical id's secret bits for a purpose, (ids, 2) int64, on the CPU."""
    bits = keyed_digests(ids, key, purpose)
    return torch.from_numpy(np.frombuffer(bits, dtype="<i8").astype(np.int64).reshape(-1, 2))


def scalars(keys: Tensor) -> Tensor:
    """Turn secret bits into one standard normal number each, (batch,) float64.

    The number depends on nothing else: neither on the batch nor on the row in it.
    """
    numbers = torch.empty(2 * len(keys), dtype=torch.float64)
    box_muller(keys[:, 0], keys[:, 1], out=numbers)
    return numbers[: len(keys)]


def _read(path: Path) -> tuple[NoiseKey, list[bytes]]:
    """Return the key, and the digests of the labels it was used for, none if it was not used."""
    # Non-blocking, because opening a pipe in the file's place would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise SettingsError(f"{path}: the noise key cannot be read: {error.strerror}") from error
    try:
        _refuse_if_shared(path, os.fstat(descriptor))
        key = os.read(descriptor, 2 * _KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) not in (_KEY_BYTES, _KEY_BYTES + 2 * _DIGEST_BYTES):
        raise SettingsError(f"{path}: expected a noise key of {_KEY_BYTES} bytes, got another size")
    key, digests = key[:_KEY_BYTES], key[_KEY_BYTES:]
    return NoiseKey(key), [digests[:_DIGEST_BYTES], digests[_DIGEST_BYTES:]] if digests else []


def _refuse_if_shared(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SettingsError(f"{path}: expected a file with the noise key, got something else")
    if status.st_uid != os.geteuid():
        raise SettingsError(
            f"{path}: the noise key belongs to user {status.st_uid}, who may read it; this party "
            f"runs as user {os.geteuid()}"
        )
    if status.st_mode & _OTHERS:
        raise SettingsError(
            f"{path}: the noise key has mode {stat.S_IMODE(status.st_mode):04o}, so others may "
            f"know it; expected 0600. Whoever has read it subtracts the noise: delete it and start "
            f"a new run, unless you are sure that nobody has"
        )
