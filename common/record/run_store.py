"""The checkpoints of a party on disk: states to resume a run from.

checkpoint/run.state             constants of the whole run: its id, nonces, common rows, secrets
checkpoint/at-0000001234.state   everything that changes, after 1,234 batches
checkpoint/answered.log          the answered questions and their charges (active party)

A state's file is a SHA-256 digest and JSON with safetensors (``common/run/state_bytes.py``), so it
cannot run code. Only its owner may access it (0600): it contains secrets.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from splitveil.common.errors import StorageError
from splitveil.common.record import run_folder
from splitveil.common.record.answer_log import AnswerLog
from splitveil.common.run.progress import State
from splitveil.common.run.state_bytes import state_from_bytes, state_to_parts
from splitveil.common.text.files import Closing

DIGEST_BYTES = 32

_VERSION = 4


class UnreadableError(Exception):
    """A file does not hold a usable state; the message says why."""


class OtherVersionError(UnreadableError):
    """The file was written by another version of this module."""


def serialised(state: State) -> Sequence[bytes]:
    return state_to_parts({"version": _VERSION, "state": state})


def write_serialised(path: Path, content: Sequence[bytes]) -> None:
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    run_folder.write_bytes_atomically(path, digest.digest(), *content, mode=0o600)


def read_state(path: Path) -> State:
    try:
        with path.open("rb") as file:
            digest, content = file.read(DIGEST_BYTES), file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).digest() != digest:
        raise UnreadableError("is damaged")
    try:
        found = state_from_bytes(content)
        version, state = found["version"], found["state"]
    except (ValueError, LookupError, TypeError) as error:
        raise UnreadableError("is not the state of a run") from error
    if version != _VERSION:
        raise OtherVersionError("was saved by another version of splitveil")
    if not isinstance(state, dict):
        raise UnreadableError("is not the state of a run")
    return state


logger = logging.getLogger(__name__)

RUN_STATE = "run.state"
ANSWERED = "answered.log"
_CHECKPOINT = re.compile(r"at-([0-9]{10})\.state")
_LOST = (
    "the unfinished run in this folder cannot be resumed, and no ledger holds what it has released "
    "about the labels so far: restore a copy of the file, or start over with --fresh at both "
    "parties"
)


class NoStore:
    """Keeps nothing: a run without checkpoints cannot be resumed."""

    keeps = False

    def __init__(self, questions_per_batch: int = 1) -> None:
        self._questions_per_batch = questions_per_batch

    def run(self) -> State | None:
        return None

    def checkpoints(self) -> list[int]:
        return []

    def load(self, batch_number: int) -> State:
        raise StorageError(f"there is no state after {batch_number} batches: none is kept")

    def _ignore(self, *_: object) -> None:
        pass

    save_run = save = save_soon = refuse_if_answered = _ignore

    def new_answers(self) -> AnswerLog:
        return AnswerLog(questions=self._questions_per_batch)

    def answers(self) -> AnswerLog:
        return self.new_answers()


class RunStore(Closing):
    """Keeps what one party needs in order to resume a run after its process has ended.

    Only one store at a time may use a folder. It has the newest ``keep`` checkpoints. With
    ``in_background``, ``save_soon`` writes in a thread, and the store has to be closed.
    """

    keeps = True

    def __init__(
        self,
        folder: Path,
        questions_per_batch: int = 1,
        *,
        keep: int = 3,
        in_background: bool = False,
    ) -> None:
        self._folder = folder / "checkpoint"
        self._keep = keep
        self._questions_per_batch = questions_per_batch
        self._answers: AnswerLog | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """Wait until everything is on disk; ``save_soon`` cannot be used afterwards."""
        if self._writer is not None:
            self._writer.shutdown()
        self._wait()

    def run(self) -> State | None:
        self._wait()
        path = self._folder / RUN_STATE
        try:
            return read_state(path)
        except FileNotFoundError:
            return None
        except OtherVersionError as error:
            raise StorageError(
                f"{path}: {error}; resume with that version, or start over with --fresh at both "
                f"parties"
            ) from error
        except UnreadableError as error:
            raise StorageError(f"{path}: {error}: {_LOST}") from error

    def save_run(self, state: State) -> None:
        """Start a run: keep its constants, and delete everything of earlier runs."""
        self.forget()
        run_folder.checkpoint_folder(self._folder.parent)
        write_serialised(self._folder / RUN_STATE, serialised(state))

    def checkpoints(self) -> list[int]:
        """Return the batch numbers of states that can be loaded, ascending; log damaged files."""
        self._wait()
        return [number for number, path in self._files() if self._read(path) is not None]

    def refuse_if_answered(self) -> None:
        """Raise StorageError if a run without any state left has answered already."""
        if AnswerLog.holds_answers(self._folder / ANSWERED):
            raise StorageError(f"{self._folder}: no checkpoint can be read: {_LOST}")

    def save(self, batch_number: int, state: State) -> None:
        """Keep the state after a number of batches, and the newest few of the earlier ones."""
        self._wait()
        self._keep_only(batch_number, serialised(state))
        self._forget_old_answers()

    def save_soon(self, batch_number: int, state: State) -> None:
        """Save like ``save``, but wait only until the previous state is written."""
        if self._writer is None:
            self.save(batch_number, state)
            return
        self._wait()  # before this state is copied, which may be as large as all activations
        self._pending = self._writer.submit(self._keep_only, batch_number, serialised(state))

    def _keep_only(self, batch_number: int, content: Sequence[bytes]) -> None:
        if self._answers is not None:
            self._answers.sync()  # a log with fewer answers than a state counts is refused
        write_serialised(self._path(batch_number), content)
        for _, path in self._files()[: -self._keep]:
            run_folder.delete(path)
        self._delete_halves()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            self._forget_old_answers()

    def _forget_old_answers(self) -> None:
        if self._answers is not None:
            # No run goes back to before the oldest state.
            oldest = min((kept for kept, _ in self._files()), default=0)
            self._answers.forget_before(oldest)

    def load(self, batch_number: int) -> State:
        self._wait()
        state = self._read(self._path(batch_number))
        if state is None:
            raise StorageError(f"{self._path(batch_number)}: cannot be read")
        for later, path in self._files():
            if later > batch_number:
                run_folder.delete(path)
        return state

    def new_answers(self) -> AnswerLog:
        path = run_folder.checkpoint_folder(self._folder.parent) / ANSWERED
        self._answers = AnswerLog.create(path, self._questions_per_batch, self._run_name())
        return self._answers

    def answers(self) -> AnswerLog:
        if self._answers is None:
            first = min((number for number, _ in self._files()), default=0)
            self._answers = AnswerLog(
                self._folder / ANSWERED, self._questions_per_batch, self._run_name(), first
            )
        return self._answers

    def _run_name(self) -> bytes:
        path = self._folder / RUN_STATE
        with run_folder.storage_errors(path, "cannot be read"), path.open("rb") as file:
            return file.read(DIGEST_BYTES)

    def forget(self) -> None:
        self._wait()
        self._answers = None
        for path in [self._folder / RUN_STATE, *self._folder.glob("*.state")]:
            run_folder.delete(path)
        run_folder.delete(self._folder / ANSWERED)
        self._delete_halves()

    def forget_finished(self) -> None:
        """Delete every state of a finished run; call it last.

        Once the run itself is deleted, nothing fails any more: a party that then ended with an
        error would be started again, and would train from the beginning. Raises StorageError.
        """
        self._wait()
        run_folder.delete(self._folder / RUN_STATE)
        try:
            self.forget()
        except StorageError as error:
            logger.warning("%s", error)

    def _delete_halves(self) -> None:
        """Delete the half-written files of a process that was killed: they may contain secrets."""
        for path in self._folder.glob(".*.state.*.tmp"):
            run_folder.delete(path)

    def _path(self, batch_number: int) -> Path:
        return self._folder / f"at-{batch_number:010d}.state"

    def _files(self) -> list[tuple[int, Path]]:
        found = ((_CHECKPOINT.fullmatch(path.name), path) for path in self._folder.glob("at-*"))
        return sorted((int(match[1]), path) for match, path in found if match is not None)

    def _read(self, path: Path) -> State | None:
        try:
            return read_state(path)
        except FileNotFoundError:
            return None
        except UnreadableError as error:
            logger.warning("%s: %s, and is ignored", path, error)
            return None
