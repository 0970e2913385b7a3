"""Runs the jobs of a simulation one after the other in this process, or side by side in others.

A job whose run is there, finished and of the same settings, is not run again.
"""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.sequences import tokenizer_files
from splitveil.common.errors import DataError, EndedForGood, SettingsError, SplitveilError
from splitveil.common.party import command_line
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.record.run_folder import claimed, has_finished, move_aside
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.imports import HANDED_OVER
from splitveil.deploy.overrides import Overrides
from splitveil.library.loading import PartiesSettings, files_of, load
from splitveil.library.recorded import run_recorded
from splitveil.library.runs import Run

NONCES_APART = 1_000_000
"""Difference between the nonce seeds of two parties: larger than any number of seeds."""

_ERRORS = {one.exit_code: one for one in (SettingsError, DataError)}
_LAST_LINES = 12
_CUSTOM = re.compile(r"\b(kind|name): custom\b")
_logger = logging.getLogger(__name__)


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


def run_here(jobs: Sequence[Job], on_epoch: Callable[[Run], object] | None = None) -> None:
    for job in jobs:
        _run(job, on_epoch)


def run_side_by_side(jobs: Sequence[Job], most: int) -> None:
    """Run jobs in processes of their own, at most ``most`` at a time; none is left at an error."""
    if any(HANDED_OVER in text for job in jobs for text in job.overrides):
        raise SettingsError(
            "jobs: code of this program has no name that another process can import: move it into "
            "a module, or leave jobs out"
        )
    running: set[subprocess.Popen[str]] = set()
    starting, stopped = threading.Lock(), threading.Event()

    def launch(job: Job) -> tuple[int, str]:
        with starting:
            if stopped.is_set():
                return 0, ""
            process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            running.add(process)
        _, said = process.communicate(json.dumps(job))
        running.discard(process)
        return process.returncode, _why_ended(process.returncode, said)

    with ThreadPoolExecutor(most) as pool:
        try:
            for job, (code, said) in zip(jobs, pool.map(launch, jobs), strict=True):
                if code:
                    raise _ERRORS.get(code, SplitveilError)(f"{Path(job.folder).name}: {said}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with starting:
                stopped.set()
                for process in [*running]:
                    process.kill()
            raise


def _why_ended(code: int, said: str) -> str:
    if code < 0:
        return f"ended by signal {-code}, perhaps for want of memory"
    of_unexpected = said.splitlines()[-1:] if "Traceback (most recent call last)" in said else None
    return "\n".join(of_unexpected or said.splitlines()[-_LAST_LINES:])


def _run(job: Job, on_epoch: Callable[[Run], object] | None = None) -> None:
    settings, folder = job.settings(), Path(job.folder)
    parties: dict[str, PartySettings] = {ACTIVE: settings.active}
    parties |= {one.folder_name(): one for one in settings.passive.values()}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with claimed(folder / ACTIVE, "another process writes this run; name another folder in runs"):
        if all(_is_finished(folder / name, one) for name, one in parties.items()):
            _logger.warning("%s: taken from an earlier call: not run again", folder.name)
            return
        for name in parties:
            if (folder / name).exists():
                move_aside(folder / name)
        with _as_in_a_process_of_its_own(settings.active), suppress(EndedForGood):
            run_recorded(
                settings,
                folder,
                on_epoch and (lambda: on_epoch(Run(folder, base_dir=Path(job.source)))),
            )


def _is_finished(folder: Path, settings: PartySettings) -> bool:
    """Whether a party's folder has a finished run with exactly these settings.

    Code of one's own and files may since have changed: a run with such code, or with an older
    summary than its files, is never the same.
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
    """Set what a party's process sets, and restore it for the program that simulates."""
    log = logging.getLogger("splitveil")
    level, path, threads = log.level, sys.path[:], torch.get_num_threads()
    if level == logging.NOTSET:
        log.setLevel(logging.ERROR)  # seeds are insecure between parties; here there are none
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            command_line.prepare(settings)
            yield
    finally:
        log.setLevel(level)
        sys.path[:] = path
        torch.set_num_threads(threads)


if __name__ == "__main__":
    try:
        _run(Job(*json.load(sys.stdin)))
    except SplitveilError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None
