"""Runs a cell with both parties in one process, with the same figures at a fraction of the time.

What two processes do beyond that are certificates, gRPC, checkpoints and private set intersection.
None of it changes a bit of what is learned (see `splitveil.library.recorded`), except for models
with dropout, whose draws then come from one generator.

Processes are forked from one that has imported everything, so that a cell begins at once.
"""

import multiprocessing
import os
import sys
import traceback
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party import command_line
from splitveil.common.text.log_lines import configure_logging
from splitveil.library.loading import PartiesSettings, read_settings
from splitveil.library.recorded import run_recorded

_CONTEXT = multiprocessing.get_context("forkserver")


class CellProcess:
    """A process in which one cell runs, with the parties' files in the folder ``settings``.

    The parties' output is appended to ``log``; each has a folder in ``run_folder``.
    """

    def __init__(self, settings: Path, run_folder: Path, log: Path, threads: int) -> None:
        _CONTEXT.set_forkserver_preload([__name__])
        self._process: ForkServerProcess = _CONTEXT.Process(
            target=_main, args=(settings, run_folder, log, threads)
        )
        self._process.start()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0

    def send_signal(self, number: int) -> None:
        """Send a signal; the cell has no checkpoints and will begin anew."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)


def run_in_process(settings: Path, run_folder: Path, threads: int = 1) -> None:
    """Run both parties of a cell; leaves their metrics, summaries and models.

    Raises:
        EndedForGood: a budget or a gate ended the run; its figures count.
        SplitveilError: the run failed, or has several passive parties.
    """
    with_threads = [f"torch_threads={threads}", f"runs_dir={run_folder.parent}"]
    both = read_settings(settings, with_threads, with_threads)
    _check_party(both)
    command_line.prepare(both.active)
    run_recorded(both, run_folder)


def _check_party(settings: PartiesSettings) -> None:
    passive, *others = settings.passive.values()
    if others or passive.audits:
        raise SettingsError(
            "in_process: expected one passive party, which does not ask for audits; leave it out"
        )


def _main(settings: Path, run_folder: Path, log: Path, threads: int) -> None:
    with log.open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    configure_logging("cell")
    try:
        run_in_process(settings, run_folder, threads)
    except SplitveilError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        raise SystemExit(error.exit_code) from None
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None
