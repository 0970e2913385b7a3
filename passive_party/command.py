"""The arguments of the command ``splitveil passive``; ``__main__`` does what they say.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from splitveil.common.party.arguments import (
    Commands,
    add_command,
    add_verbosity,
    party_parser,
)
from splitveil.common.party.ending import end_program
from splitveil.common.party.json_output import add_json


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    end_program(run(parser().parse_args(arguments)), is_program=arguments is None)


def parser(program: str = "passive-party") -> argparse.ArgumentParser:
    """Return the command's parser.

    Args:
        program: the words with which the command is called.
    """
    return party_parser(program, _add_own_commands)


def _add_own_commands(commands: Commands) -> None:
    _add_serve(commands)
    purpose = "write a page that shows what left and what it tells of this party's features"
    report = commands.add_parser("report", help=purpose, description=purpose)
    report.add_argument(
        "run_dir", type=Path, help="the run's folder, runs/<run name>, or this party's folder in it"
    )
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in this party's folder"
    )
    add_json(report)
    add_verbosity(report)


def run(parsed: argparse.Namespace) -> int:
    """Do what parsed arguments say, and return the exit code."""
    exit_code: int = import_module("splitveil.passive_party.__main__").perform(parsed)
    return exit_code


def _add_serve(commands: Commands) -> None:
    command = add_command(
        commands, "serve", "answer the active party's questions for predictions, until stopped"
    )
    command.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="table with the rows to answer for (default: data.source of the settings)",
    )
