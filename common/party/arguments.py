"""The arguments that both parties' commands have, and how a command ends.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeAlias

from splitveil.common.errors import Interrupted, PeerError, SplitveilError, StorageError
from splitveil.common.party.json_output import add_json
from splitveil.common.text.imports import fault_of_own_code
from splitveil.common.text.log_lines import configure_logging, log_fields
from splitveil.common.text.version import add_version
from splitveil.common.text.wording import suggest


class Parser(argparse.ArgumentParser):
    """Ends its help with an example, and says which choice a mistyped one may mean.

    Args:
        example: the words after the program's name.
    """

    def __init__(self, *, example: str = "", **options: Any) -> None:
        super().__init__(
            epilog=f"example:\n  %(prog)s {example}" if example else "",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = "" if wrong is None else suggest(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        super().error(f"{message}{hint}")


# The type that add_subparsers returns is private.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # noqa: SLF001


def party_parser(
    program: str, party: str, add_own_commands: Callable[[Commands], None]
) -> argparse.ArgumentParser:
    settings = f"{party}.yaml"
    parser = Parser(prog=program, example=f"run {settings}")
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    run = add_command(
        commands, "run", "train with the other party, or resume an unfinished run", settings
    )
    run.add_argument(
        "--fresh",
        action="store_true",
        help="start over; earlier results are moved aside, and the ledger counts both runs",
    )
    check = add_command(
        commands,
        "check",
        "check settings and data without training; with -v, print all settings",
        f"{settings} --connect",
    )
    check.add_argument(
        "--connect",
        action="store_true",
        help="probe the connection to the other party as well: certificate, clock, speed, contract",
    )
    check.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="with --connect: how long to wait for the other party (default: 60)",
    )
    add_json(check)
    purpose = "find the rows that all parties have, and write this party's, without training"
    align = add_command(commands, "align", purpose, f"{settings} --output aligned.parquet")
    align.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="aligned.parquet or aligned.csv: this party's rows of the common ids, in the order "
        "that is the same at all parties; an earlier file is replaced",
    )
    align.add_argument(
        "--positions",
        action="store_true",
        help="write the columns of the ids and their position in that order, from 0, and no others",
    )
    add_json(align)
    purpose = "check that a transcript is intact and matches the other party's transcript"
    verify = commands.add_parser(
        "verify-transcript",
        help=purpose,
        description=purpose,
        example="transcript.jsonl --against theirs.jsonl",
    )
    verify.add_argument("transcript", type=Path, help="a party's transcript.jsonl")
    verify.add_argument(
        "--against", type=Path, metavar="FILE", help="the other party's transcript.jsonl"
    )
    add_json(verify)
    add_verbosity(verify)
    add_own_commands(commands)
    return parser


def add_command(commands: Commands, name: str, purpose: str, example: str) -> Parser:
    command: Parser = commands.add_parser(name, help=purpose, description=purpose, example=example)
    command.add_argument("settings", type=Path, help="this party's settings file")
    command.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="override one setting, for instance contract.epochs=3 (may be repeated)",
    )
    command.add_argument(
        "--runs", type=Path, metavar="DIR", help="folder of all runs (default: runs)"
    )
    command.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="form of the log"
    )
    add_verbosity(command)
    return command


def add_serve(commands: Commands, party: str, purpose: str, rows: str) -> None:
    command = add_command(commands, "serve", f"{purpose}, until stopped", f"{party}.yaml")
    about = f"table with {rows} (default: data.source of the settings)"
    command.add_argument("--data", type=Path, metavar="FILE", help=about)


def add_report(commands: Commands, purpose: str, otherwise: str) -> Parser:
    """Add the command that writes a page, to a place ``otherwise`` if none is given."""
    report: Parser = commands.add_parser(
        "report", help=purpose, description=purpose, example="runs/breast_cancer"
    )
    report.add_argument("--output", type=Path, metavar="FILE", help=f"default: {otherwise}")
    add_json(report)
    add_verbosity(report)
    return report


def add_verbosity(command: argparse.ArgumentParser) -> None:
    command.add_argument("-v", "--verbose", action="count", default=0, help="show all details")
    command.add_argument(
        "-q", "--quiet", action="count", default=0, help="show warnings and errors only"
    )


logger = logging.getLogger(__name__)


def run_command(parsed: argparse.Namespace, party: str, **elsewhere: str) -> int:
    """Do what parsed arguments say, and return the exit code.

    A command is the function of its name in the module of its name, if ``elsewhere`` has no other.
    """
    # Before torch is imported. Threads that spin while they wait for each other take the cores from
    # the other party on this machine, and gain nothing on small batches.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    name = str(parsed.command).replace("-", "_")
    common = {"verify_transcript": "splitveil.common.party.command_line:verify_transcript"}
    own = f"splitveil.{party}_party.commands.{name}:{name}"

    def act() -> None:
        if "overrides" in parsed:  # first: a mistake is answered before the command is imported
            section = resolve_name(f"splitveil.{party}_party.settings:{party.title()}Settings")
            load = resolve_name("splitveil.common.party.party_settings:load_settings")
            parsed.loaded = load(section, parsed, party)
        action = resolve_name((common | elsewhere).get(name, own))
        resolve_name("splitveil.common.party.workers:act")(parsed, action)

    configure_logging(party, parsed.verbose - parsed.quiet)
    return exit_code_of(act)


def exit_code_of(action: Callable[[], None]) -> int:
    try:
        action()
    except Exception as error:
        known = error if isinstance(error, SplitveilError) else fault_of_own_code(error)
        if known is None:
            raise
        for reported in _with_earlier(known):
            for line in str(reported).splitlines() or [type(reported).__name__]:
                fields = log_fields(error=type(reported).__name__, exit_code=known.exit_code)
                logger.error("%s", line, extra=fields)
        return known.exit_code
    except KeyboardInterrupt:
        logger.error("stopped at once; nothing was saved")
        return 130
    return 0


def end_program(exit_code: int, *, is_program: bool) -> NoReturn:
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
