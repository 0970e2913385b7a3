"""Manages the folder of a run's results, and writes files so that a crash leaves none half written.

runs/<run name>/<party>/                the newest run of that name
runs/<run name>/<party>.previous-1/     the oldest one, -2 the next, ...

A party's files are derived from its labels or its features. Its folder is therefore accessible to
its owner only (0700), and so are the files in it (0600), under any umask.

A run that a budget has ended for good has a mark: without it, a supervisor that restarts
every process that ends with an error would never stop.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.text.files import OWNER_ONLY, replacing_file
from splitveil.common.text.system import BINARY, lock
from splitveil.common.text.visible_text import visible_lines

_logger = logging.getLogger(__name__)

AS_USUAL = 0o666  # mode of a file that is meant to be passed on: the process's umask decides
_OWNER_ONLY_FOLDER = 0o700
_OTHERS = 0o077

_RUNS_ALREADY = (
    "another process is running this party of this run; stop it, or give this one another "
    "contract.run_name or --runs"
)


def open_run_folder(
    runs_dir: Path, run_name: str, party: str, resumes: Callable[[Path], bool] = lambda _: False
) -> Path:
    """Claim a party's folder for this process; move results aside unless it ``resumes`` them.

    Raises SettingsError.
    """
    for name in (run_name, party):
        if name in {"", ".", ".."} or set(name) & {"/", "\\", "\0"}:
            raise SettingsError(f"expected a name that can name a folder, got {name!r}")
    folder = runs_dir / run_name / party
    with storage_errors(folder, "cannot be used for results"):
        _claim(folder, _RUNS_ALREADY)
        if folder.is_dir():
            if folder.stat().st_mode & _OTHERS:
                try:
                    folder.chmod(_OWNER_ONLY_FOLDER)
                except OSError as error:
                    # Another user's folder, or a file system without modes: results may still be
                    # written there.
                    reason = error.strerror
                    _logger.warning("%s: others may read the results (%s)", folder, reason)
            if any(folder.iterdir()) and not resumes(folder):
                move_aside(folder)
        folder.mkdir(_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    return folder


def open_to_append(path: Path) -> TextIO:
    """Open a UTF-8 text file for appending, for its owner only, line by line."""
    return os.fdopen(_appending(path), "a", buffering=1, encoding="utf-8")


def open_unbuffered_to_append(path: Path) -> FileIO:
    return FileIO(_appending(path), "a")


def write_whole(file: FileIO, data: bytes) -> None:
    """Append all or nothing: a partial record on a full disk would spoil the records after it."""
    begin, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        with suppress(OSError):
            file.truncate(begin)
        raise


def _appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, OWNER_ONLY)


def write_bytes_atomically(path: Path, *parts: bytes, mode: int = OWNER_ONLY) -> None:
    """Replace a file as a whole: afterwards it holds the old content or the new, never a part."""
    with storage_errors(path, "cannot be written"), replacing_file(path, mode) as file:
        file.writelines(parts)


@contextmanager
def storage_errors(path: Path, problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {problem}: {error.strerror}") from error


def write_text_atomically(path: Path, text: str, mode: int = OWNER_ONLY) -> None:
    write_bytes_atomically(path, text.encode(), mode=mode)


def write_json_atomically(path: Path, value: object) -> None:
    write_text_atomically(path, json_text(value))


def json_text(value: object) -> str:
    """Return a JSON document with a line break at its end; NaN and infinities become null."""
    held = finite_or_null(value)
    text = json.dumps(held, indent=2, ensure_ascii=False, allow_nan=False)
    if visible_lines(text) != text:  # a terminal could take a character of it for more than text
        text = json.dumps(held, indent=2)
    return text + "\n"


def finite_or_null(value: object) -> Any:
    """Return a value that JSON can hold, with None for NaN and infinities, which it cannot."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_null(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


@contextmanager
def claimed(folder: Path, complaint: str) -> Iterator[None]:
    """Keep other processes, and other callers in this one, from changing a folder meanwhile."""
    descriptor = _claim(folder, complaint)
    try:
        yield
    finally:
        os.close(descriptor)


def _claim(folder: Path, complaint: str) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(descriptor, waits=False)
    except BlockingIOError:
        os.close(descriptor)
        raise SettingsError(f"{folder}: {complaint}") from None
    return descriptor


def move_aside(folder: Path) -> None:
    prefix = f"{folder.name}.previous-"
    endings = (path.name.removeprefix(prefix) for path in folder.parent.glob(f"{prefix}*"))
    newest = max((int(ending) for ending in endings if ending.isdecimal()), default=0)
    aside = folder.with_name(f"{prefix}{newest + 1}")
    folder.rename(aside)
    _logger.info("earlier results moved to %s", aside)


def checkpoint_folder(folder: Path) -> Path:
    return inner_folder(folder, "checkpoint")


def inner_folder(folder: Path, name: str) -> Path:
    inner = folder / name
    with storage_errors(inner, "cannot be made"):
        inner.mkdir(exist_ok=True)
    return inner


def delete(path: Path) -> None:
    with storage_errors(path, "cannot be deleted"):
        path.unlink(missing_ok=True)


FILE = "ended.json"


def mark_as_ended(folder: Path, why: Mapping[str, Any]) -> None:
    write_json_atomically(folder / FILE, why)


def end_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the content of a run's mark; None if there is none, or if it cannot be read."""
    try:
        why = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return why if isinstance(why, dict) else None


def has_finished(folder: Path) -> bool:
    """Return whether a folder holds the results of a finished run; its state is deleted last."""
    return (folder / "summary.json").exists() and not (folder / "checkpoint" / "run.state").exists()


def clear_mark(folder: Path) -> None:
    """Delete the mark, so that a run whose limits have changed since can be resumed."""
    delete(folder / FILE)
