"""Starts the worker of the engine ``rr22`` in a private folder, and leaves nothing of it behind."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from splitveil.common.alignment.sorted_tags import Tags
from splitveil.common.alignment.tag_lists import TAG
from splitveil.common.errors import SettingsError, SplitveilError, StorageError
from splitveil.common.text.visible_text import visible
from splitveil.common.wire.limits import TAG_BYTES

WORKER = Path(__file__).with_name("worker.py")
HOW_TO_INSTALL = (
    "make an environment of Python 3.11 or older for it: `python3.11 -m venv rr22`, "
    "`rr22/bin/pip install --no-deps spu==0.9.5 'numpy<2'`, and set alignment_rr22_python to "
    "rr22/bin/python"
)
_CHECK_WITHIN_S = 60.0
_SAID_BYTES = 4000
_LINES_AT_ONCE = 2**16
_PADDED_BYTES = 3 * -(-TAG_BYTES // 3)
_PADDED_CHARACTERS = 4 * _PADDED_BYTES // 3
_LINE_BYTES = -(-8 * TAG_BYTES // 6) + 1
_TRACE = re.compile(rb"Trace has been written to (/tmp/psi_[\w-]+\.trace)\.")


def check_interpreter(python: Path | None) -> str:
    """Return the version of spu that an interpreter has.

    Args:
        python: from the setting ``alignment_rr22_python``.

    Raises:
        SettingsError: there is none, or it has no usable spu; the message says how to install one.
    """
    if python is None:
        raise SettingsError(
            f"alignment_rr22_python: contract.alignment.engine is rr22, which needs the package "
            f"spu in an environment of its own; {HOW_TO_INSTALL}"
        )
    try:
        checked = subprocess.run(
            [python, "-I", WORKER, "--check"],
            capture_output=True,
            timeout=_CHECK_WITHIN_S,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(
            f"alignment_rr22_python: {python} cannot be run ({error}); {HOW_TO_INSTALL}"
        ) from error
    if checked.returncode:
        said = (checked.stderr.strip().splitlines() or ["no reason"])[-1]
        raise SettingsError(
            f"alignment_rr22_python: {python} has no usable spu ({visible(said)}); {HOW_TO_INSTALL}"
        )
    return checked.stdout.strip()


def lines_of(tags: Tags) -> bytes:
    """Return a line of text for each tag: base64 for addresses, without padding.

    The worker takes less time for shorter lines, and base64 is the shortest text without quotes.
    """
    padded = np.zeros((len(tags), _PADDED_BYTES), np.uint8)
    padded[:, :TAG_BYTES] = tags.view(np.uint8).reshape(-1, TAG_BYTES)
    text = base64.urlsafe_b64encode(padded.tobytes())
    lines = np.frombuffer(text, np.uint8).reshape(-1, _PADDED_CHARACTERS)[:, :_LINE_BYTES].copy()
    lines[:, -1] = ord("\n")
    return lines.tobytes()


def tags_in(lines: bytes) -> Tags:
    """Return the tags of lines of text.

    Raises:
        ValueError: they are not what ``lines_of`` makes.
    """
    rows = np.frombuffer(lines, np.uint8).reshape(-1, _LINE_BYTES)
    text = np.full((len(rows), _PADDED_CHARACTERS), ord("A"), np.uint8)
    text[:, : _LINE_BYTES - 1] = rows[:, :-1]
    padded = np.frombuffer(base64.urlsafe_b64decode(text.tobytes()), np.uint8)
    tags = np.ascontiguousarray(padded.reshape(-1, _PADDED_BYTES)[:, :TAG_BYTES])
    if lines_of(found := tags.view(TAG).ravel()) != lines:
        raise ValueError("not lines of tags")
    return found


class Worker:
    """One process and its folder, mode 0700, which holds this party's hashed ids meanwhile.

    Args:
        python: the interpreter.
        rank: 0 or 1, the other one than the peer's.
        ports: of 127.0.0.1, at which rank 0 and rank 1 are found.
        tags: of this party's ids, distinct.
        script: the program; tests have another.

    Raises:
        StorageError: the folder cannot be written.
        SplitveilError: the process cannot be started.
    """

    def __init__(
        self, python: Path, rank: int, ports: Sequence[int], tags: Tags, script: Path = WORKER
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="splitveil-rr22-"))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._write(tags)
            self._process = self._start(python, script)
            task = {"rank": rank, "ports": list(ports), "ids": "ids.csv", "common": "common.csv"}
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(task).encode() + b"\n")
                self._process.stdin.flush()
        except BaseException:
            self.close()
            raise

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return -signal.SIGKILL if self._process is None else self._process.wait()

    def common(self) -> Tags:
        """Return the tags that the worker has written, after it has ended, in any order.

        Raises:
            SplitveilError: it has failed.
        """
        code = self.wait()
        if code:
            raise SplitveilError(f"the rr22 worker ended with exit code {code}: {self._said()}")
        try:
            text = (self._folder / "common.csv").read_bytes().replace(b'"', b"")
        except OSError as error:
            raise SplitveilError("the rr22 worker ended without a result") from error
        header, _, lines = text.partition(b"\n")
        try:
            if header != b"id":
                raise ValueError
            step = _LINES_AT_ONCE * _LINE_BYTES
            parts = [tags_in(lines[start : start + step]) for start in range(0, len(lines), step)]
            return np.concatenate([np.empty(0, TAG), *parts])
        except ValueError as error:
            raise SplitveilError("the rr22 worker's result is no column of ids") from error

    def close(self) -> None:
        """Kill what still runs, and delete everything that it has written."""
        process = self._process
        if process is not None:
            # Its group, because spu lets `sort` work for it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._delete_trace()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, tags: Tags) -> None:
        path = self._folder / "ids.csv"
        try:
            with path.open("wb") as file:  # nobody else can enter the folder
                file.write(b"id\n")
                for start in range(0, len(tags), _LINES_AT_ONCE):
                    file.write(lines_of(tags[start : start + _LINES_AT_ONCE]))
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error

    def _start(self, python: Path, script: Path) -> "subprocess.Popen[bytes]":
        environment = {"LC_ALL": "C", "TMPDIR": str(self._folder), "HOME": str(self._folder)}
        try:
            with (self._folder / "log").open("wb") as log:
                return subprocess.Popen(
                    [python, "-I", script],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=environment | {"PATH": os.environ.get("PATH", os.defpath)},
                    start_new_session=True,
                )
        except OSError as error:
            raise SplitveilError(f"the rr22 worker cannot be started: {error}") from error

    def _said(self) -> str:
        lines = self._log()[-_SAID_BYTES:].decode(errors="replace").strip().splitlines()
        wrong = [line for line in lines if "rror" in line] or lines
        return visible(wrong[-1]) if wrong else "it said nothing"

    def _log(self) -> bytes:
        try:
            return (self._folder / "log").read_bytes()
        except OSError:
            return b""

    def _delete_trace(self) -> None:
        # spu writes it to /tmp wherever the folder for temporary files is.
        for name in _TRACE.findall(self._log()):
            Path(os.fsdecode(name)).unlink(missing_ok=True)
