"""A party's checkpoints on disk: weights for later use, and whole states to go on from. No pickle.

checkpoint/model.safetensors     the model, for whoever wants to use it
checkpoint/encoder.json          how its features are encoded
checkpoint/run.state             what holds for the whole run: its id, nonces, common rows, secrets
checkpoint/at-0000001234.state   everything that changes, after 1,234 batches
checkpoint/answered.log          what was answered, and what that was charged (active party)

A ``.state`` file is a SHA-256 digest and, after it, what ``torch.save`` made of nested plain values
and tensors; it is read with ``weights_only``, and is its owner's alone: there are secrets in it.
"""

import hashlib
import io
import logging
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save
from torch import Tensor, nn

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import StorageError
from splitveil.common.storage.answer_log import AnswerLog
from splitveil.common.storage.run_folder import write_bytes_atomically, write_json_atomically

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
ENCODER = "encoder.json"

State = dict[str, Any]
"""Nested dicts, lists and tuples of tensors and plain values."""

_VERSION = 2
_RUN = "run.state"
_ANSWERED = "answered.log"
_PLACE = re.compile(r"at-([0-9]{10})\.state")
_DIGEST_BYTES = 32
_LOST = (
    "the unfinished run in this folder cannot be resumed, and what it told of the labels so "
    "far is in no ledger: put a copy of the file back, or begin anew with --fresh, and let the "
    "other party do so, too"
)


def save_model(folder: Path, model: nn.Module, encoder: FeatureEncoder | None) -> Path:
    """Write ``checkpoint/model.safetensors`` and ``checkpoint/encoder.json`` into a run's folder.

    Raises:
        StorageError: something could not be written; what stood there before still does.
    """
    checkpoint = _checkpoint_folder(folder)
    if encoder is not None:
        write_json_atomically(checkpoint / ENCODER, encoder.state())
    save_tensors(folder, WEIGHTS, model.state_dict())
    return checkpoint


def save_tensors(folder: Path, file_name: str, tensors: Mapping[str, Tensor]) -> Path:
    """Write named tensors as ``checkpoint/<file_name>`` into a run's folder.

    Raises:
        StorageError: they cannot be written; what stood there before still does.
    """
    path = _checkpoint_folder(folder) / file_name
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes_atomically(path, save(plain))
    return path


def delete_saved(folder: Path, file_name: str) -> None:
    """Delete ``checkpoint/<file_name>`` from a run's folder, if it is there.

    Raises:
        StorageError: it cannot be deleted.
    """
    _delete(folder / "checkpoint" / file_name)


class RunStore:
    """What one party needs in order to go on with a run after its process has ended.

    One store at a time works on a folder.

    Args:
        folder: the run's folder.
        keep: how many of the newest checkpoints to keep.
        questions_per_place: how many fingerprints each place has in the log of answers.
        in_background: whether `save_soon` leaves the disk to a thread of its own. Such a store
            has to be closed.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        questions_per_place: int = 1,
        *,
        in_background: bool = False,
    ) -> None:
        self._folder = folder / "checkpoint"
        self._keep = keep
        self._questions_per_place = questions_per_place
        self._answers: AnswerLog | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until everything is on the disk; nothing can be saved soon afterwards.

        Raises:
            StorageError: what was to be saved soon cannot be written.
        """
        if self._writer is not None:
            self._writer.shutdown()
        self._wait()

    def run(self) -> State | None:
        """Return what holds for the whole run; None where there is no run to go on with.

        Raises:
            StorageError: there is one, and the file is damaged, or of another version.
        """
        self._wait()
        path = self._folder / _RUN
        try:
            return _state_in(path)
        except FileNotFoundError:
            return None
        except _OtherVersionError as error:
            raise StorageError(
                f"{path}: {error}; resume with that one, or begin anew with --fresh, and let the "
                f"other party do so, too"
            ) from error
        except _UnreadableError as error:
            raise StorageError(f"{path}: {error}: {_LOST}") from error

    def save_run(self, state: State) -> None:
        """Begin a run: keep what holds for all of it, and nothing of runs before.

        Raises:
            StorageError: it cannot be written.
        """
        self.forget()
        _checkpoint_folder(self._folder.parent)
        _write_content(self._folder / _RUN, _serialised(state))

    def places(self) -> list[int]:
        """Return the places that a state can be loaded for, ascending.

        A damaged file is said so, and passed over.
        """
        self._wait()
        return [place for place, path in self._files() if self._read(path) is not None]

    def refuse_if_answered(self) -> None:
        """Make sure that a run of which no state is left had answered nothing.

        Raises:
            StorageError: it had; to begin it again would be to answer again.
        """
        if AnswerLog.holds_answers(self._folder / _ANSWERED):
            raise StorageError(f"{self._folder}: no checkpoint can be read: {_LOST}")

    def save(self, place: int, state: State) -> None:
        """Keep the state after a number of batches, and the newest few of those before.

        Raises:
            StorageError: it, or the one before, cannot be written; those before stay.
        """
        self._wait()
        self._keep_only(place, _serialised(state))
        self._forget_old_answers()

    def save_soon(self, place: int, state: State) -> None:
        """Do as `save`, and wait for the disk only where it still has the state before to write.

        The state may change afterwards. A process that is killed in between goes on from the state
        before, as one that is killed before.

        Raises:
            StorageError: it, or one saved soon before, cannot be written; those before stay.
        """
        if self._writer is None:
            self.save(place, state)
            return
        content = _serialised(state)
        self._wait()
        self._pending = self._writer.submit(self._keep_only, place, content)

    def _keep_only(self, place: int, content: bytes) -> None:
        """Write a state, then delete what is older than the newest few."""
        if self._answers is not None:
            self._answers.sync()  # a log with fewer answers than a state counts is refused
        _write_content(self._path(place), content)
        for _, path in self._files()[: -self._keep]:
            _delete(path)
        self._delete_halves()

    def _wait(self) -> None:
        """Wait until what was to be saved soon is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            self._forget_old_answers()

    def _forget_old_answers(self) -> None:
        if self._answers is not None:
            # No run goes back to before the oldest state.
            oldest = min(kept for kept, _ in self._files())
            self._answers.forget_before(oldest)

    def load(self, place: int) -> State:
        """Return the state at a place, and forget those after it.

        Raises:
            StorageError: there is none that can be read.
        """
        self._wait()
        state = self._read(self._path(place))
        if state is None:
            raise StorageError(f"{self._path(place)}: cannot be read")
        for later, path in self._files():
            if later > place:
                _delete(path)
        return state

    def new_answers(self) -> AnswerLog:
        """Begin the log of answers, once the run is saved.

        Raises:
            StorageError: it cannot be written.
        """
        path = _checkpoint_folder(self._folder.parent) / _ANSWERED
        self._answers = AnswerLog.create(path, self._questions_per_place, self._run_name())
        return self._answers

    def answers(self) -> AnswerLog:
        """Return what was answered, in this process or before.

        Raises:
            StorageError: the file is missing, damaged, or of another version.
        """
        if self._answers is None:
            first = min((place for place, _ in self._files()), default=0)
            self._answers = AnswerLog(
                self._folder / _ANSWERED, self._questions_per_place, self._run_name(), first
            )
        return self._answers

    def _run_name(self) -> bytes:
        """Return what tells this run's log of answers from others."""
        path = self._folder / _RUN
        try:
            return path.read_bytes()[:_DIGEST_BYTES]
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error

    def forget(self) -> None:
        """Delete every state: there is nothing to go on with."""
        self._wait()
        self._answers = None
        for path in [self._folder / _RUN, *(path for _, path in self._files())]:
            _delete(path)
        _delete(self._folder / _ANSWERED)
        self._delete_halves()

    def forget_finished(self) -> None:
        """Delete every state of a run that has come to its end, as the last thing that is done.

        Once the run itself is forgotten, nothing more fails: a party that ended with an error then
        would be started again, and would train anew.

        Raises:
            StorageError: the run cannot be forgotten; started again, it ends at once.
        """
        self._wait()
        _delete(self._folder / _RUN)
        try:
            self.forget()
        except StorageError as error:
            logger.warning("%s", error)

    def _delete_halves(self) -> None:
        """Delete what a process left that was killed while it wrote: secrets may be in it."""
        for path in self._folder.glob(".*.state.*.tmp"):
            _delete(path)

    def _path(self, place: int) -> Path:
        return self._folder / f"at-{place:010d}.state"

    def _files(self) -> list[tuple[int, Path]]:
        if not self._folder.is_dir():
            return []
        found = ((_PLACE.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match is not None)

    def _read(self, path: Path) -> State | None:
        try:
            return _state_in(path)
        except FileNotFoundError:
            return None
        except _UnreadableError as error:
            logger.warning("%s: %s, and left out", path, error)
            return None


class _UnreadableError(Exception):
    """Why a file holds no state that can be used."""


class _OtherVersionError(_UnreadableError):
    """It was written by another version of this module."""


@contextmanager
def as_whole_state() -> Iterator[None]:
    """Load the parts of a state, of which each checks its own.

    Raises:
        StorageError: one of them is not what this version of splitveil saves.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"the run was saved by another version of splitveil ({error}); resume with that one, "
            f"or begin anew with --fresh"
        ) from error


def _serialised(state: State) -> bytes:
    buffer = io.BytesIO()
    torch.save({"version": _VERSION, "state": state}, buffer)
    return buffer.getvalue()


def _write_content(path: Path, content: bytes) -> None:
    write_bytes_atomically(path, hashlib.sha256(content).digest() + content, mode=0o600)


def _state_in(path: Path) -> State:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _UnreadableError(f"cannot be read ({error.strerror})") from error
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise _UnreadableError("is damaged")
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
        raise _UnreadableError("is no state of a run") from error
    if version != _VERSION:
        raise _OtherVersionError("was saved by another version of splitveil")
    if not isinstance(state, dict):
        raise _UnreadableError("is no state of a run")
    return state


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be deleted: {error.strerror}") from error


def _checkpoint_folder(folder: Path) -> Path:
    checkpoint = folder / "checkpoint"
    try:
        checkpoint.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{checkpoint}: cannot be made: {error.strerror}") from error
    return checkpoint
