"""The arguments of the ``passive-party`` command; ``__main__`` does what they say.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from splitveil.common.party.arguments import Commands, add_command, party_parser
from splitveil.common.party.ending import end_program


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    end_program(run(parser().parse_args(arguments)), is_program=arguments is None)


def parser(program: str = "passive-party") -> argparse.ArgumentParser:
    """Return the command's parser.

    Args:
        program: the words with which the command is called.
    """
    return party_parser(program, _add_serve)


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
