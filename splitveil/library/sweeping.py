"""Runs the jobs of a simulation one after the other in this process, or side by side in others.

A job whose run is there, finished and of the same settings, is not run again.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import torch

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.sequences import tokenizer_files
from splitveil.common.errors import DataError, EndedForGood, SettingsError, SplitveilError
from splitveil.common.models.device import restoring_devices
from splitveil.common.party import command_line
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.record.metrics_log import chart_outcome
from splitveil.common.record.run_folder import claimed, has_finished, move_aside
from splitveil.common.record.run_record import METRICS
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.imports import HANDED_OVER
from splitveil.deploy.overrides import Overrides
from splitveil.library.in_process import run_recorded
from splitveil.library.loading import PartiesSettings, files_of, load
from splitveil.library.runs import Run

NONCES_APART = 1_000_000
"""Difference between the nonce seeds of two parties: larger than any number of seeds."""

_ERRORS = {one.exit_code: one for one in (SettingsError, DataError)}
_CHARTED = {"cut_shape", "batch_size", "epochs", "schedule", "model_seed", "optimizer", "defense"}
_CHARTED |= {"top_model", "bottom_model", "initial_weights", "early_stopping_epochs", "run_budget"}
_CUSTOM = re.compile(r"\b(kind|name): custom\b")


class Job(NamedTuple):
    """One run, in words that another process can read."""

    source: str
    """The folder of the settings files."""
    overrides: Sequence[str]
    seed: int
    folder: str
    """The run's."""

    def settings(self) -> PartiesSettings:
        settings = load(Path(self.source), Overrides(self.overrides))
        seeded = {
            party: one.model_copy(update={"insecure_nonce_seed": self.seed + number * NONCES_APART})
            for number, (party, one) in enumerate(settings.passive.items(), start=1)
        }
        return settings._replace(passive=seeded)


Notify: TypeAlias = Callable[[str, Job], None]
"""Called with an event of a job: ``on_epoch``, ``on_end`` or `TAKEN`."""
TAKEN = "taken"
"""The job's run was there."""


def run_here(jobs: Sequence[Job], notify: Notify) -> None:
    for job in jobs:
        notify("on_end" if _run(job, partial(notify, "on_epoch", job)) else TAKEN, job)


def run_side_by_side(jobs: Sequence[Job], most: int, notify: Notify) -> None:
    """Run jobs in processes of their own, at most ``most`` at a time; none is left at an error.

    A process waits after each of its events until ``notify`` has returned here; if that raises, its
    run ends as in this process, and the other runs are interrupted.
    """
    if sys.platform == "win32":
        raise SettingsError("jobs: Windows hands no pipes on to processes: leave jobs out")
    if any(HANDED_OVER in text for job in jobs for text in job.overrides):
        raise SettingsError(
            "jobs: code of this program has no name that another process can import: move it into "
            "a module, or leave jobs out"
        )
    waiting, running = deque(jobs), dict[Connection, _OfJob]()
    try:
        while waiting or running:
            while waiting and len(running) < most:
                process = _OfJob(waiting.popleft())
                running[process.connection] = process
            for ready in connection.wait([*running]):
                process = running.pop(cast("Connection", ready))
                if not (event := process.heard()):
                    process.check_ended()
                    continue
                try:
                    notify(event, process.job)
                except BaseException:
                    process.end()
                    raise
                process.say(b"")
                running[process.connection] = process
    finally:
        for process in running.values():
            process.kill()
            process.end()


class _OfJob(subprocess.Popen[bytes]):
    def __init__(self, job: Job) -> None:
        self.job = job
        self.connection, theirs = connection.Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        with theirs:
            super().__init__(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
            )
        self.say(json.dumps(job).encode())

    def say(self, words: bytes) -> None:
        with suppress(ConnectionError):  # it has ended, which is heard next
            self.connection.send_bytes(words)

    def heard(self) -> str:
        """Return its next event; empty once it has ended."""
        try:
            return self.connection.recv_bytes().decode()
        except (EOFError, ConnectionError):
            return ""

    def end(self) -> str:
        """Wait until the process has ended, which it does after its next event; return its log."""
        self.connection.close()
        self.wait()
        with self._said:
            self._said.seek(0)
            return self._said.read().decode(errors="replace")

    def check_ended(self) -> None:
        lines, code = self.end().splitlines(), self.returncode
        if not code:
            return
        last = 1 if any("Traceback (most recent call last)" in line for line in lines) else 12
        why = "\n".join(lines[-last:])
        if code < 0:
            why = f"ended by signal {-code}, perhaps for want of memory"
        raise _ERRORS.get(code, SplitveilError)(f"{Path(self.job.folder).name}: {why}")


def _run(job: Job, on_epoch: Callable[[], object]) -> bool:
    settings, folder = job.settings(), Path(job.folder)
    parties: dict[str, PartySettings] = {ACTIVE: settings.active}
    parties |= {one.folder_name(): one for one in settings.passive.values()}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with claimed(folder / ACTIVE, "another process writes this run; name another folder in runs"):
        if all(_is_finished(folder / name, one) for name, one in parties.items()):
            return False
        for name in parties:
            if (folder / name).exists():
                move_aside(folder / name)
        try:
            with _as_in_a_process_of_its_own(settings.active), suppress(EndedForGood):
                run_recorded(settings, folder, on_epoch)
        finally:
            # An early error leaves no figures, and has to come out as itself.
            is_there = (folder / ACTIVE / METRICS).exists()
            if is_there and (run := Run(folder)).test_auc is not None:
                owners = {ACTIVE: settings.active, **settings.passive}
                charted = {"contract": settings.active.contract, **owners}
                chosen = {
                    name: one.model_dump(mode="json", include=_CHARTED)
                    for name, one in charted.items()
                }
                chart_outcome(folder / "hparams", chosen, run.overview())
    return True


def _is_finished(folder: Path, settings: PartySettings) -> bool:
    """Tell whether a party's folder has a finished run with exactly these settings.

    Custom code and files may have changed since: a run with such code, or with a summary older than
    its files, is never the same.
    """
    text = command_line.resolved_yaml(settings)
    if not has_finished(folder) or HANDED_OVER in text or _CUSTOM.search(text):
        return False
    ended = (folder / "summary.json").stat().st_mtime_ns
    files = files_of(settings.data.source, settings.base_dir)
    files += tokenizer_files(settings.data.features, settings.base_dir).values()
    if any(one.stat().st_mtime_ns > ended for one in files):
        return False
    stored = command_line.stored_settings(folder) | {"runs_dir": str(settings.runs_dir)}
    return stored == settings.model_dump(mode="json")


@contextmanager
def _as_in_a_process_of_its_own(settings: ActiveSettings) -> Iterator[None]:
    log = logging.getLogger("splitveil")
    level, path, threads = log.level, sys.path[:], torch.get_num_threads()
    if level == logging.NOTSET:
        log.setLevel(logging.ERROR)  # seeds are insecure between parties; here there are none
    try:
        with restoring_devices(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            command_line.prepare(settings)
            yield
    finally:
        log.setLevel(level)
        sys.path[:] = path
        torch.set_num_threads(threads)


if __name__ == "__main__":
    caller = Connection(int(sys.argv[1]))

    def tell(event: str, _: Job) -> None:
        caller.send_bytes(event.encode())
        caller.recv_bytes()  # EOFError, which ends the run, if the caller is gone

    try:
        run_here([Job(*json.loads(caller.recv_bytes()))], tell)
    except SplitveilError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None
