"""Runs cells, each with processes of its own and several side by side.

By default the local launcher runs a cell, with a process per party. With ``in_process`` both
parties share one, which gives the same figures at a fraction of the time (see
`splitveil.library.in_process`).

    cells/<data set>/<variant>/seed-<n>/
        settings/            the files for ``splitveil local``, which can also be run by hand
        runs/run/<party>/    the parties' results
        output.log           the parties' output
        cell.json            digest of the settings, written before the run
        finished.json        the same with machine, versions and time, written after the run

A cell with a ``finished.json`` of the same digest is not run again. An interrupted cell resumes
from its checkpoints; a cell ``in_process``, or whose settings changed, starts over.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from splitveil.common.errors import EndedForGood, Interrupted, SettingsError, SplitveilError
from splitveil.common.party import command_line
from splitveil.common.party.interruption import stop_signals_to
from splitveil.common.record.run_folder import write_json_atomically, write_text_atomically
from splitveil.common.text.log_lines import configure_logging
from splitveil.deploy.overrides import Overrides
from splitveil.experiments.cells import (
    EARLIER,
    PREPARED,
    RUN_NAME,
    Cell,
    passive_parties,
    with_folders,
)
from splitveil.library.in_process import run_recorded
from splitveil.library.loading import load

FINISHED = "finished.json"
_PARTIES = ("active", "passive")
ENDED_AS_ASKED = (0, EndedForGood.exit_code)
"""Exit codes of runs whose figures count; a budget may end a run."""

_LAST_LINES = 12
Process: TypeAlias = subprocess.Popen[bytes]


class Ending(NamedTuple):
    cell: Cell
    exit_code: int
    wall_s: float
    last_lines: str
    """The last lines of the parties' output if the cell failed."""

    @property
    def has_failed(self) -> bool:
        return self.exit_code not in ENDED_AS_ASKED


def is_finished(cell: Cell, results: Path) -> bool:
    """Tell whether a cell has run to its end with exactly these settings."""
    return _digest_in(results / cell.folder / FINISHED) == cell.digest


def run_cells(
    cells: Sequence[Cell],
    results: Path,
    prepared: Path,
    *,
    jobs: int = 1,
    threads: int = 1,
    in_process: bool = False,
) -> Iterator[Ending]:
    """Run cells, ``jobs`` at a time, and yield the outcome of each when it ends.

    Each party has ``threads`` cores; ``in_process``, both parties are one process.

    Call it only in the main thread: SIGINT and SIGTERM end the cells and raise Interrupted.
    """
    launched = _Launched()
    with stop_signals_to(launched.stop), ThreadPoolExecutor(jobs) as pool:
        begun: dict[Path, Future[Ending | None]] = {}

        def run(cell: Cell) -> Ending | None:
            if cell.after is not None and cell.after.folder in begun:
                # It was submitted to the pool before this cell, so it is running or over.
                wait([begun[cell.after.folder]])
            return _run(cell, results, prepared, threads, launched, in_process=in_process)

        try:
            for cell in cells:
                begun[cell.folder] = pool.submit(run, cell)
            for future in as_completed(begun.values()):
                ending = future.result()
                if ending is not None:
                    yield ending
        except BaseException:
            # A full disk, or the caller abandoned the iteration: leave nothing running.
            launched.stop(signal.SIGTERM)
            raise
    if launched.stopped_by is not None:
        raise Interrupted(launched.stopped_by)


def run_in_process(settings: Path, run_folder: Path, threads: str) -> None:
    """Run both parties of a cell in this process; it has no checkpoints, and begins anew."""
    configure_logging("cell")
    own = (f"torch_threads={threads}", f"runs_dir={run_folder.parent}")
    try:
        both = load(settings, Overrides(f"{party}.{one}" for party in _PARTIES for one in own))
        _, *others = both.passive.values()
        if others:
            raise SettingsError("in_process: expected one passive party; leave it out")
        command_line.prepare(both.active)
        run_recorded(both, run_folder)
    except SplitveilError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None


_IN_PROCESS = (
    "import pathlib, sys; from splitveil.experiments.execution import run_in_process; "
    "run_in_process(*map(pathlib.Path, sys.argv[1:3]), sys.argv[3])"
)


class _Launched:
    """Keeps the running processes, so that a signal reaches all of them. Thread-safe."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._processes: set[Process] = set()
        # A signal handler interrupts the main thread anywhere and must not wait for its own lock.
        self._lock = threading.RLock()

    def start(self, start: Callable[[], Process]) -> Process | None:
        with self._lock:
            if self.stopped_by is not None:
                return None
            process = start()
            self._processes.add(process)
            return process

    def ended(self, process: Process) -> None:
        with self._lock:
            self._processes.discard(process)

    def stop(self, signal_number: int) -> None:
        with self._lock:
            if self.stopped_by is None:
                self.stopped_by = signal_number
                for process in self._processes:
                    process.send_signal(signal_number)


def _run(
    cell: Cell,
    results: Path,
    prepared: Path,
    threads: int,
    launched: _Launched,
    *,
    in_process: bool,
) -> Ending | None:
    if launched.stopped_by is not None:
        return None
    if cell.after is not None and not is_finished(cell.after, results):
        return Ending(
            cell, 1, 0.0, f"it starts with the weights of {cell.after.name}, which is not finished"
        )
    folder = results / cell.folder
    if in_process:  # an interrupted run's figures would be counted among this one's
        shutil.rmtree(folder, ignore_errors=True)
    _make_ready(cell, results, prepared)
    begun = time.monotonic()
    process = launched.start(partial(_start, folder, str(threads), in_process=in_process))
    if process is None:
        return None
    exit_code = process.wait()
    launched.ended(process)
    wall_s = time.monotonic() - begun
    if launched.stopped_by is not None and exit_code:
        return None
    if exit_code not in ENDED_AS_ASKED:
        log = (folder / "output.log").read_text(encoding="utf-8", errors="replace")
        return Ending(cell, exit_code, wall_s, "\n".join(log.splitlines()[-_LAST_LINES:]))
    circumstances = {
        "wall_s": wall_s,
        "threads": threads,
        "in_process": in_process,
        "machine": machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "splitveil": version("splitveil"),
    }
    write_json_atomically(folder / FINISHED, _marker(cell) | circumstances)
    # Other cells do not need these weights, and they take most of the disk space.
    for checkpoint in [] if cell.is_followed else folder.glob("runs/*/*/checkpoint"):
        shutil.rmtree(checkpoint)
    return Ending(cell, exit_code, wall_s, "")


def _start(folder: Path, threads: str, *, in_process: bool) -> Process:
    settings, runs = str(folder / "settings"), folder / "runs"
    python = [sys.executable, "-P"]
    if in_process:
        command = [*python, "-c", _IN_PROCESS, settings, str(runs / RUN_NAME), threads]
    else:
        command = [*python, "-m", "splitveil", "local", "-v", settings, "--runs", str(runs)]
        command += ["--set", *(f"{name}.torch_threads={threads}" for name in ("active", "passive"))]
    with (folder / "output.log").open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # In its own group: a terminal's Ctrl-C reaches only this process.
            process_group=0,
        )


def _make_ready(cell: Cell, results: Path, prepared: Path) -> None:
    folder = results / cell.folder
    if _digest_in(folder / "cell.json") != cell.digest and folder.exists():
        shutil.rmtree(folder)
    (folder / "settings").mkdir(parents=True, exist_ok=True)
    folders = {PREPARED: prepared}
    if cell.after is not None:
        folders[EARLIER] = results / cell.after.run_folder
    settings = with_folders(cell.settings, folders)
    files = {name: settings[name] for name in ("contract", "active")} | passive_parties(settings)
    for name, values in files.items():
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        write_text_atomically(folder / "settings" / f"{name}.yaml", text)
    write_json_atomically(folder / "cell.json", _marker(cell))


def _marker(cell: Cell) -> dict[str, Any]:
    return {"digest": cell.digest, "cell": cell.name}


def machine() -> str:
    """Return the processor and the number of cores that this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return f"{processor}, {len(os.sched_getaffinity(0))} cores"


def read_marker(path: Path) -> dict[str, Any]:
    marker: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return marker


def _digest_in(path: Path) -> object:
    try:
        return read_marker(path).get("digest")
    except (OSError, ValueError):
        return None
