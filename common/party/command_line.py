"""The command lines of both parties: arguments, signals, exit codes."""

import argparse
import hashlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

import torch
import yaml
from rich.console import Console

from splitveil.common.errors import (
    Interrupted,
    PeerError,
    SettingsError,
    SplitveilError,
    StorageError,
)
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.party.transcript import Broken, Verified, compare, verify
from splitveil.common.storage.ended_run import end_of
from splitveil.common.storage.run_folder import write_text_atomically
from splitveil.common.storage.run_store import RunStore
from splitveil.common.text.visible_text import visible
from splitveil.common.text.yaml_text import RESOLVED, read_yaml_file

logger = logging.getLogger(__name__)

# What add_subparsers returns has no public name.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001

MAY_CHANGE = frozenset(
    {
        "alignment_attempts",
        "alignment_workers",
        "allow_audits",
        "connect",
        "device",
        "first_contact_s",
        "leak_gate",
        "listen",
        "proxy",
        "reconnect",
        "run_budget",
        "runs_dir",
        "security",
        "torch_threads",
        "transcript",
    }
)
"""Settings that a run may go on without: all others change what comes out of it."""

_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


def parse_arguments(
    program: str,
    arguments: Sequence[str] | None,
    add_own_commands: Callable[[Commands], None] = lambda _: None,
) -> argparse.Namespace:
    """Read a party's command line.

    Args:
        program: the party's program.
        arguments: the words after it; those of this process by default.
        add_own_commands: adds the commands that only this kind of party has.
    """
    parser = argparse.ArgumentParser(prog=program)
    commands = parser.add_subparsers(dest="command", required=True)
    run = add_command(commands, "run", "train with the other party, or go on where it ended")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="begin anew; results of an unfinished run are moved aside",
    )
    add_command(
        commands, "check", "check settings and data without training; print the resolved settings"
    )
    _add_verify_transcript(commands)
    add_own_commands(commands)
    return parser.parse_args(arguments)


def add_command(commands: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    """Add a command with the arguments that all of them have."""
    command = commands.add_parser(name, help=purpose, description=purpose)
    command.add_argument("settings", type=Path, help="this party's settings file")
    command.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="override one setting, for instance contract.epochs=3 (may be repeated)",
    )
    command.add_argument("--runs", type=Path, help="folder of all runs (default: runs)")
    command.add_argument("-v", "--verbose", action="count", default=0)
    command.add_argument("-q", "--quiet", action="count", default=0)
    return command


def _add_verify_transcript(commands: Commands) -> None:
    purpose = "check that a transcript is whole, and that it fits the other party's"
    command = commands.add_parser("verify-transcript", help=purpose, description=purpose)
    command.add_argument("transcript", type=Path, help="transcript.jsonl of a party")
    command.add_argument("--against", type=Path, metavar="FILE", help="the other party's")
    command.add_argument("-v", "--verbose", action="count", default=0)
    command.add_argument("-q", "--quiet", action="count", default=0)


def verify_transcript(parsed: argparse.Namespace) -> None:
    """Check one transcript, or two against each other, and print what was found.

    Raises:
        SettingsError: a file cannot be read.
        SplitveilError: a chain is broken, or what one party received the other did not send.
    """
    found = _verified(parsed.transcript)
    if parsed.against is None:
        return
    compared = compare(found, _verified(parsed.against))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"{compared.agreed:,} messages were received as the other party sent them")
    for kind, count in compared.lost.items():
        line = f"{kind}: {count:,} sent and not received, as when a connection breaks"
        console.print(line, markup=False)
    if compared.unsent:
        raise SplitveilError(
            "\n".join(
                f"{kind}: {count:,} received that the other party does not say it sent"
                for kind, count in compared.unsent.items()
            )
        )


def _verified(path: Path) -> Verified:
    try:
        found = verify(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if isinstance(found, Broken):
        raise SplitveilError(f"{path}: line {found.line}: {found.reason}")
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(
        f"{visible(str(path))}: the chain of {found.entries:,} entries is whole; the last link is "
        f"{found.last_link}",
        markup=False,
    )
    return found


def overrides_of(arguments: argparse.Namespace, party: str) -> list[str]:
    """Return the overrides, ``--runs`` among them; a leading name of the own party is dropped."""
    overrides = [text.removeprefix(f"{party}.") for text in arguments.overrides]
    if arguments.runs is not None:
        overrides.append(f"runs_dir={arguments.runs}")
    return overrides


def exit_code_of(action: Callable[[], None]) -> int:
    """Do something and return the exit code that its outcome deserves; say what went wrong."""
    try:
        action()
    except SplitveilError as error:
        for told in _with_earlier(error):
            for line in str(told).splitlines() or [type(told).__name__]:
                logger.error("%s", line)
        return error.exit_code
    except KeyboardInterrupt:
        logger.error("stopped at once; nothing was saved")
        return 130
    return 0


def end_program(exit_code: int, *, is_program: bool) -> NoReturn:
    """End with an exit code.

    Args:
        exit_code: of the process.
        is_program: whether this process has nothing else to do. It then ends without the
            interpreter's teardown, in which threads of libraries (those of Arrow, after a file that
            cannot be read) now and then abort it, and the exit code is lost.
    """
    if is_program:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _with_earlier(error: SplitveilError) -> Iterator[SplitveilError]:
    """Yield an error, and first what a full disk would hide: why the run had ended before."""
    earlier: BaseException | None = error
    while isinstance(error, StorageError) and earlier is not None:
        earlier = earlier.__context__
        if isinstance(earlier, PeerError | Interrupted):
            yield earlier
            break
    yield error


class Interruption:
    """Remembers that SIGINT or SIGTERM came, so that the step at hand can be finished first.

    The second signal ends the process at once: what is written atomically stays whole.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def install(self) -> None:
        """Take the two signals; only in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def __call__(self) -> int | None:
        """Return the signal that came, if one did."""
        return self.signal_number

    def check(self) -> None:
        """Do nothing while no signal has come.

        Raises:
            Interrupted: one has.
        """
        if self.signal_number is not None:
            raise Interrupted(self.signal_number)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal_number is not None:
            os.write(2, _SHOW_CURSOR * os.isatty(2) + b"stopped at once; nothing more is saved\n")
            # An exception would still wait for the peer, for other threads, and for the disk.
            os._exit(128 + number)
        self.signal_number = number
        # No logging here: the signal may have come in the middle of a log line.
        os.write(2, b"stopping after this step; once more to stop at once\n")


def prepare(settings: PartySettings) -> torch.device:
    """Set threads, seeds and where modules are found; return the device to compute on."""
    _find_own_modules(settings)
    device = settings.torch_device()
    torch.set_num_threads(settings.cores())
    torch.manual_seed(settings.model_seed)
    return device


def _find_own_modules(settings: PartySettings) -> None:
    """Let modules of the user's own be imported that lie beside the settings file."""
    sys.path.append(str(settings.base_dir.resolve()))


def draw_nonce(settings: PartySettings) -> bytes:
    """Return this party's share of the joint seed, 32 bytes."""
    if settings.insecure_nonce_seed is None:
        return secrets.token_bytes(32)
    logger.warning(
        "insecure_nonce_seed is set: whoever knows it knows this party's share of the joint seed. "
        "For tests only"
    )
    return hashlib.sha256(b"splitveil test nonce %d" % settings.insecure_nonce_seed).digest()


def resolved_yaml(settings: PartySettings) -> str:
    """Return the settings with every default filled in, as YAML."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def goes_on(settings: PartySettings, *, fresh: bool, folder: Path) -> bool:
    """Tell whether the results in a folder are of a run that goes on with these settings.

    Args:
        settings: of this start.
        fresh: whether to begin anew in any case.
        folder: of the results.

    Of a run that was ended for good only the party itself knows whether it goes on.
    """
    if fresh or RunStore(folder, settings.contract.checkpoints.keep).run() is None:
        return False
    try:
        earlier = read_yaml_file(folder / "settings.yaml", RESOLVED)
    except SettingsError:
        earlier = None
    if not isinstance(earlier, dict):
        logger.warning("%s: the settings of the unfinished run are gone: beginning anew", folder)
        return False
    now = settings.model_dump(mode="json")
    changed = [
        name
        for name in sorted(now.keys() | earlier.keys())
        if name not in MAY_CHANGE and now.get(name) != earlier.get(name)
    ]
    if changed:
        logger.warning(
            "the settings are not those of the unfinished run (%s): beginning anew",
            ", ".join(changed),
        )
        return False
    if end_of(folder) is None:
        logger.info("going on with the unfinished run in %s; --fresh would begin anew", folder)
    return True


def save_resolved(settings: PartySettings, folder: Path) -> None:
    """Write the resolved settings into the run's folder."""
    write_text_atomically(folder / "settings.yaml", resolved_yaml(settings))


def report_check(settings: PartySettings, checks: Sequence[Callable[[], str]]) -> None:
    """Print the resolved settings, then the outcome of every check, failed or not.

    Raises:
        SplitveilError: the failure with the smallest exit code, after all have been printed.
    """
    _find_own_modules(settings)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(resolved_yaml(settings), markup=False)
    failures: list[SplitveilError] = []
    for check in checks:
        try:
            console.print(f"ok: {visible(check())}", markup=False)
        except SplitveilError as error:
            failures.append(error)
    if failures:
        worst = min(failures, key=lambda failure: failure.exit_code)
        raise _AllFailures(failures, worst.exit_code)


class _AllFailures(SplitveilError):
    def __init__(self, failures: Sequence[SplitveilError], exit_code: int) -> None:
        super().__init__("\n".join(str(failure) for failure in failures))
        self.exit_code = exit_code
