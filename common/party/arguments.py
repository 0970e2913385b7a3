"""The arguments that both parties' commands have.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from splitveil.common.party.json_output import add_json
from splitveil.common.text.shell_completion import add_completion
from splitveil.common.text.version import add_version

# The type that add_subparsers returns is private.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001


ALIGN_PURPOSE = "find the rows that all parties have, and write this party's, without training"


def party_parser(
    program: str, add_own_commands: Callable[[Commands], None] = lambda _: None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program)
    add_version(parser)
    add_completion(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    run = add_command(commands, "run", "train with the other party, or resume an unfinished run")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="start over; earlier results are moved aside, and the ledger counts both runs",
    )
    check = add_command(
        commands, "check", "check settings and data without training; print the resolved settings"
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
    add_align_arguments(add_command(commands, "align", ALIGN_PURPOSE))
    _add_verify_transcript(commands)
    add_own_commands(commands)
    return parser


def add_command(commands: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    """Add a sub-command with the arguments of all that read a settings file."""
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
    command.add_argument(
        "--runs", type=Path, metavar="DIR", help="folder of all runs (default: runs)"
    )
    command.add_argument(
        "--log-format", choices=("text", "json"), help="form of the log (default: the settings')"
    )
    add_verbosity(command)
    return command


def add_align_arguments(align: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that aligns, beside those of all that read settings."""
    align.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="aligned.parquet or aligned.csv: this party's rows of the common ids, in the order "
        "that is the same at all parties; an earlier file is replaced",
    )
    add_json(align)


def add_verbosity(command: argparse.ArgumentParser) -> None:
    command.add_argument("-v", "--verbose", action="count", default=0)
    command.add_argument("-q", "--quiet", action="count", default=0)


def _add_verify_transcript(commands: Commands) -> None:
    purpose = "check that a transcript is intact and matches the other party's transcript"
    command = commands.add_parser("verify-transcript", help=purpose, description=purpose)
    command.add_argument("transcript", type=Path, help="a party's transcript.jsonl")
    command.add_argument(
        "--against", type=Path, metavar="FILE", help="the other party's transcript.jsonl"
    )
    add_json(command)
    add_verbosity(command)
