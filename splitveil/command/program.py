"""Finds the sub-command that the first word names, and lets its module do the rest.

``splitveil active run active.yaml`` is read by the module of ``active``, which sees the words from
``run`` on; ``splitveil`` itself has only the options that need no sub-command.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn, Protocol, cast

from splitveil.command.table import SUB_COMMANDS, SubCommand
from splitveil.common.errors import SplitveilError
from splitveil.common.party.arguments import add_completion, end_program
from splitveil.common.text.version import add_version
from splitveil.common.text.visible_text import visible_lines

PROGRAM = "splitveil"


class CommandModule(Protocol):
    """A module of ``SUB_COMMANDS``."""

    def parser(self, program: str) -> argparse.ArgumentParser: ...

    def run(self, parsed: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    words = list(sys.argv[1:] if arguments is None else arguments)
    end_program(_exit_code(words), is_program=arguments is None)


def _exit_code(words: Sequence[str]) -> int:
    called = next((one for one in SUB_COMMANDS if words[:1] == [one.name]), None)
    if called is None:  # --help, --version, --print-completion, or a mistake
        _parser().parse_args(words or ["--help"])
        return 0
    module, program = _module(called), f"{PROGRAM} {called.name}"
    parsed = module.parser(program).parse_args(words[1:])
    try:
        return module.run(parsed)
    except SplitveilError as error:
        sys.stderr.write(f"{program}: {visible_lines(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser(*, with_arguments: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Two-party split learning with defended gradients."
    )
    add_version(parser)
    add_completion(parser, partial(_parser, with_arguments=True))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for one in SUB_COMMANDS:
        own = [_module(one).parser(f"{PROGRAM} {one.name}")] if with_arguments else []
        commands.add_parser(
            one.name, help=one.purpose, description=one.purpose, parents=own, add_help=not own
        )
    return parser


def _module(called: SubCommand) -> CommandModule:
    return cast("CommandModule", import_module(called.module))
