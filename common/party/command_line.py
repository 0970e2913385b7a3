"""The parts of both parties' command lines: arguments, checks, exit codes."""

import argparse
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
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
from splitveil.common.party.party_settings import (
    PartySettings,
    PartySettingsT,
    load_party_settings,
)
from splitveil.common.party.transcript import Broken, Verified, compare, verify
from splitveil.common.storage.ended_run import end_of
from splitveil.common.storage.run_folder import write_text_atomically
from splitveil.common.storage.run_store import RunStore
from splitveil.common.text.log_lines import add_to_log_lines, log_fields, use_log_format
from splitveil.common.text.version import add_version
from splitveil.common.text.visible_text import visible
from splitveil.common.text.yaml_text import RESOLVED, read_yaml_file

logger = logging.getLogger(__name__)

# The type that add_subparsers returns is private.
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
        "log_format",
        "proxy",
        "reconnect",
        "run_budget",
        "runs_dir",
        "security",
        "status",
        "torch_threads",
        "transcript",
    }
)
"""Settings that may differ when a run is resumed; all others affect its results."""


def parse_arguments(
    program: str,
    arguments: Sequence[str] | None,
    add_own_commands: Callable[[Commands], None] = lambda _: None,
) -> argparse.Namespace:
    """Read a party's command line.

    Args:
        program: the name of the party's program.
        arguments: the words after it; by default the arguments of this process.
        add_own_commands: adds the commands that only this kind of party has.
    """
    parser = argparse.ArgumentParser(prog=program)
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    run = add_command(commands, "run", "train with the other party, or resume an unfinished run")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="start over; results of an unfinished run are moved aside",
    )
    add_command(
        commands, "check", "check settings and data without training; print the resolved settings"
    )
    _add_verify_transcript(commands)
    add_own_commands(commands)
    return parser.parse_args(arguments)


def add_command(commands: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    """Add a command with the arguments that all commands have."""
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
    command.add_argument(
        "--log-format", choices=("text", "json"), help="form of the log (default: the settings')"
    )
    command.add_argument("-v", "--verbose", action="count", default=0)
    command.add_argument("-q", "--quiet", action="count", default=0)
    return command


def _add_verify_transcript(commands: Commands) -> None:
    purpose = "check that a transcript is intact and matches the other party's transcript"
    command = commands.add_parser("verify-transcript", help=purpose, description=purpose)
    command.add_argument("transcript", type=Path, help="a party's transcript.jsonl")
    command.add_argument(
        "--against", type=Path, metavar="FILE", help="the other party's transcript.jsonl"
    )
    command.add_argument("-v", "--verbose", action="count", default=0)
    command.add_argument("-q", "--quiet", action="count", default=0)


def verify_transcript(parsed: argparse.Namespace) -> None:
    """Check one transcript, or two against each other, and print the result.

    Raises:
        SettingsError: a file cannot be read.
        SplitveilError: a chain is broken, or one party received something the other did not send.
    """
    found = _verified(parsed.transcript)
    if parsed.against is None:
        return
    compared = compare(found, _verified(parsed.against))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"{compared.agreed:,} messages were received as the other party sent them")
    for kind, count in compared.lost.items():
        line = f"{kind}: {count:,} sent but not received, as when a connection breaks"
        console.print(line, markup=False)
    if compared.unsent:
        raise SplitveilError(
            "\n".join(
                f"{kind}: {count:,} received that the other party did not record as sent"
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
        f"{visible(str(path))}: the chain of {found.entries:,} entries is intact; the last link "
        f"is {found.last_link}",
        markup=False,
    )
    return found


def load_settings(
    section: type[PartySettingsT], arguments: argparse.Namespace, party: str
) -> PartySettingsT:
    """Load the settings that a command names, with its overrides, and log as they say.

    Args:
        section: the settings class of this kind of party.
        arguments: of the command.
        party: this party's name in the overrides, where it may be left out.

    Raises:
        SettingsError: lists every problem of the settings and the contract.
    """
    overrides = [text.removeprefix(f"{party}.") for text in arguments.overrides]
    if arguments.runs is not None:
        overrides.append(f"runs_dir={arguments.runs}")
    if arguments.log_format is not None:
        use_log_format(arguments.log_format)  # now: problems of the settings are logged, too
        overrides.append(f"log_format={arguments.log_format}")
    settings = load_party_settings(section, arguments.settings, overrides)
    use_log_format(settings.log_format)
    add_to_log_lines(run=settings.contract.run_name)
    return settings


def exit_code_of(action: Callable[[], None]) -> int:
    """Run an action, log its errors, and return the exit code for its outcome."""
    try:
        action()
    except SplitveilError as error:
        for told in _with_earlier(error):
            for line in str(told).splitlines() or [type(told).__name__]:
                fields = log_fields(error=type(told).__name__, exit_code=error.exit_code)
                logger.error("%s", line, extra=fields)
        return error.exit_code
    except KeyboardInterrupt:
        logger.error("stopped at once; nothing was saved")
        return 130
    return 0


def end_program(exit_code: int, *, is_program: bool) -> NoReturn:
    """End with an exit code.

    Args:
        exit_code: the exit code of the process.
        is_program: whether this process has nothing else to do. It then ends without the
            interpreter's teardown, in which library threads (those of Arrow, after an unreadable
            file) occasionally abort the process, so that the exit code is lost.
    """
    if is_program:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _with_earlier(error: SplitveilError) -> Iterator[SplitveilError]:
    """Yield an error, preceded by the reason for the run's end if a full disk would hide it."""
    earlier: BaseException | None = error
    while isinstance(error, StorageError) and earlier is not None:
        earlier = earlier.__context__
        if isinstance(earlier, PeerError | Interrupted):
            yield earlier
            break
    yield error


def torch_device(device: str) -> torch.device:
    """Return the device that the setting ``device`` names.

    Raises:
        SettingsError: it names a GPU that does not exist.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"device: expected one of the {torch.cuda.device_count()} CUDA device(s) that torch "
            f"sees, got {device}"
        )
    return found


def prepare(settings: PartySettings) -> torch.device:
    """Set the number of threads, the seed and the module search path; return the device to use."""
    _find_own_modules(settings)
    device = torch_device(settings.device)
    torch.set_num_threads(settings.torch_threads or len(os.sched_getaffinity(0)))
    torch.manual_seed(settings.model_seed)
    return device


def _find_own_modules(settings: PartySettings) -> None:
    """Make user-defined modules that lie beside the settings file importable."""
    sys.path.append(str(settings.base_dir.resolve()))


def draw_nonce(settings: PartySettings) -> bytes:
    """Return this party's share of the joint seed, 32 bytes."""
    if settings.insecure_nonce_seed is None:
        return secrets.token_bytes(32)
    logger.warning(
        "insecure_nonce_seed is set: anyone who knows it knows this party's share of the joint "
        "seed. For tests only"
    )
    return hashlib.sha256(b"splitveil test nonce %d" % settings.insecure_nonce_seed).digest()


def resolved_yaml(settings: PartySettings) -> str:
    """Return the settings as YAML, with every default filled in."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def resumes(settings: PartySettings, *, fresh: bool, folder: Path) -> bool:
    """Whether a folder holds the results of a run that these settings resume.

    For a run that was ended for good, only the party itself knows whether it resumes.

    Args:
        settings: the settings of this start.
        fresh: whether to start over in any case.
        folder: the folder of the results.
    """
    if fresh or RunStore(folder, settings.contract.checkpoints.keep).run() is None:
        return False
    try:
        earlier = read_yaml_file(folder / "settings.yaml", RESOLVED)
    except SettingsError:
        earlier = None
    if not isinstance(earlier, dict):
        logger.warning("%s: the settings of the unfinished run are gone: starting over", folder)
        return False
    now = settings.model_dump(mode="json")
    changed = [
        name
        for name in sorted(now.keys() | earlier.keys())
        if name not in MAY_CHANGE and now.get(name) != earlier.get(name)
    ]
    if changed:
        logger.warning(
            "the settings differ from those of the unfinished run (%s): starting over",
            ", ".join(changed),
        )
        return False
    if end_of(folder) is None:
        logger.info("resuming the unfinished run in %s; --fresh would start over", folder)
    return True


def save_resolved(settings: PartySettings, folder: Path) -> None:
    """Write the resolved settings into the run's folder."""
    write_text_atomically(folder / "settings.yaml", resolved_yaml(settings))


def report_check(settings: PartySettings, checks: Sequence[Callable[[], str]]) -> None:
    """Print the resolved settings and the outcome of every successful check.

    Raises:
        SplitveilError: has the messages of all failed checks, and the smallest of their exit codes.
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
