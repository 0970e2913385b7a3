"""A state on disk: a SHA-256 digest, followed by the output of ``torch.save``.

A state consists of nested plain values and tensors. It is read with ``weights_only`` and not by
unpickling, so a file cannot run code. Only its owner may access it (0600): it contains secrets.
"""

import hashlib
import io
import pickle
import zipfile
from pathlib import Path

import torch

from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.progress import State

DIGEST_BYTES = 32

_VERSION = 2


class UnreadableError(Exception):
    """A file does not hold a usable state; the message says why."""


class OtherVersionError(UnreadableError):
    """The file was written by another version of this module."""


def serialised(state: State) -> bytes:
    buffer = io.BytesIO()
    torch.save({"version": _VERSION, "state": state}, buffer)
    return buffer.getvalue()


def write_serialised(path: Path, content: bytes) -> None:
    """Write a serialised state."""
    write_bytes_atomically(path, hashlib.sha256(content).digest() + content, mode=0o600)


def read_state(path: Path) -> State:
    """Read a state.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: the file cannot be read, is damaged, or is of another version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from error
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise UnreadableError("is damaged")
    return _parsed(content)


def _parsed(content: bytes) -> State:
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        version, state = found["version"], found["state"]
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        RuntimeError,
        LookupError,
        TypeError,
    ) as error:
        raise UnreadableError("is not the state of a run") from error
    if version != _VERSION:
        raise OtherVersionError("was saved by another version of splitveil")
    if not isinstance(state, dict):
        raise UnreadableError("is not the state of a run")
    return state
