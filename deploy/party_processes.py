"""Runs the parties as processes on this machine, with their output, signals and exit codes."""

import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitveil.common.errors import PeerError
from splitveil.common.party.interruption import stop_signals_to
from splitveil.common.record.progress import ProgressBar
from splitveil.common.text.visible_text import visible

PEER_NOTICES_S = 5.0
"""Seconds that a party may continue after another has failed: enough to notice it and to save."""

STOP_S = 20.0
"""Seconds that a party may take to end after a signal: to finish its step and to write files."""

_POLL_S = 0.05

_LOG_LINE = re.compile(r"(\d\d:\d\d:\d\d) \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_EPOCH = re.compile(r"epoch (\d+)/(\d+)\b")
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_TIME_WIDTH = 8


class RunDisplay:
    """The output of some parties on one terminal: a table of their log lines.

    A line has the time, the party, and the message, wrapped beneath itself. Where there is no
    terminal, the lines keep the party's name in front, as they come.
    """

    def __init__(self, parties: Sequence[str], console: Console) -> None:
        self._console = console
        self._width = max(map(len, parties))
        self._last_time = ""
        self._lock = threading.Lock()

    def show(self, party: str, line: str) -> None:
        parts = _LOG_LINE.fullmatch(line)
        when, level, message = parts.groups() if parts else ("", "", line)
        with self._lock:
            shown = "" if when == self._last_time else when
            self._last_time = when or self._last_time
            row = Table.grid(padding=(0, 1, 0, 0), expand=True)
            row.add_column(width=_TIME_WIDTH, style="dim")
            row.add_column(width=self._width, no_wrap=True, style="cyan")
            row.add_column(ratio=1, overflow="fold")
            row.add_row(shown, party, Text(visible(message), style=_STYLES.get(level, "")))
            self._console.print(row)


def run_parties(
    commands: Mapping[str, Sequence[str]], *, stderr: bool = False, quiet: bool = False
) -> int:
    """Run the parties' commands side by side until all have ended.

    When one fails, the others have ``PEER_NOTICES_S`` to end by themselves. A SIGINT or SIGTERM
    received meanwhile is forwarded once to each. With ``stderr``, their output is shown there; with
    ``quiet``, only the output of a run where a party fails, and errors, after a bar on a terminal.

    Returns 0, or the exit code of the first party that failed; a party that knows the reason goes
    before one that only noticed that its peer was gone.
    """
    console = Console(stderr=stderr)
    stream = sys.stderr if stderr else sys.stdout
    display = RunDisplay(list(commands), console) if console.is_terminal else None

    def write(name: str, line: str) -> None:
        # One write per line, so that the lines of the parties are not mixed.
        stream.write(f"{_prefix(name)}{line}\n")
        stream.flush()

    show = write if display is None else display.show
    held: list[tuple[str, str, str]] = []
    bar = ProgressBar("running", "epochs", per_epoch=1, console=console)

    def hold(name: str, line: str) -> None:
        _, level, message = parts.groups() if (parts := _LOG_LINE.fullmatch(line)) else ("", "", "")
        if level not in {"DEBUG", "INFO"}:
            held.append((name, level, line))
        elif epoch := _EPOCH.match(message):
            done, total = map(int, epoch.groups())
            if done < total:  # else what comes at the end is still to do
                bar.note(done, total)

    with bar if quiet else nullcontext():
        code = _run_side_by_side(commands, hold if quiet else show)
    for name, level, line in held:
        # A leak alarm is a line below the table of runs.
        if code or (level in {"ERROR", "CRITICAL"} and "LEAK ALARM" not in line):
            show(name, line)
    return code


def _run_side_by_side(
    commands: Mapping[str, Sequence[str]], show: Callable[[str, str], None]
) -> int:
    def copy_lines(name: str, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                show(name, line.rstrip())

    processes = {name: _start(name, command) for name, command in commands.items()}
    readers = [
        threading.Thread(target=copy_lines, args=(name, process.stdout), daemon=True)
        for name, process in processes.items()
    ]
    for reader in readers:
        reader.start()
    with _first_signal_forwarded(list(processes.values())) as signalled_at:
        exit_code = _wait(list(processes.values()), signalled_at)
    for reader in readers:
        reader.join()
    return exit_code


def _start(name: str, command: Sequence[str]) -> subprocess.Popen[str]:
    width = shutil.get_terminal_size((100, 0)).columns - len(_prefix(name))
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": str(max(width, 40))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # In its own group: a terminal's Ctrl-C reaches only this process, which forwards it.
        process_group=0,
    )


def _prefix(name: str) -> str:
    return f"{name:<7} | "


@contextmanager
def _first_signal_forwarded(processes: Sequence[subprocess.Popen[str]]) -> Iterator[list[float]]:
    """Forward the first SIGINT or SIGTERM; yields a list that then holds the time it arrived."""
    signalled_at: list[float] = []

    def forward(number: int) -> None:
        if not signalled_at:
            signalled_at.append(time.monotonic())
            for process in processes:
                process.send_signal(number)

    with stop_signals_to(forward):
        yield signalled_at


def _wait(processes: Sequence[subprocess.Popen[str]], signalled_at: Sequence[float]) -> int:
    exit_code = 0
    was_patient = True
    deadline = math.inf
    while running := [process for process in processes if process.poll() is None]:
        exit_code = exit_code or _first_failure(processes)
        if exit_code:
            deadline = min(deadline, time.monotonic() + PEER_NOTICES_S)
        if signalled_at:
            deadline = min(deadline, signalled_at[0] + STOP_S)
        if time.monotonic() > deadline:
            was_patient = False
            for process in running:
                process.terminate()
            for process in running:
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        time.sleep(_POLL_S)
    if exit_code == PeerError.exit_code and was_patient:
        # A party that only noticed the failure may end first; another one knows the reason.
        return _first_failure([p for p in processes if p.returncode != exit_code]) or exit_code
    return exit_code or _first_failure(processes)


def _first_failure(processes: Sequence[subprocess.Popen[str]]) -> int:
    code = next((process.returncode for process in processes if process.returncode), 0)
    # For a process ended by a signal, Python returns its negative number; shells add 128 to it.
    return code if code >= 0 else 128 - code
