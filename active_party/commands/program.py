"""The program ``active-party``: the commands of ``splitveil`` for the label owner's files alone.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from splitveil.common.party.arguments import end_program, party_parser, run_command


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    end_program(run(parser().parse_args(arguments)), is_program=arguments is None)


def parser(program: str = "active-party") -> argparse.ArgumentParser:
    """Return the command's parser; ``program`` is how the user calls it."""
    return party_parser(program)


def run(parsed: argparse.Namespace) -> int:
    return run_command(parsed, "active")
