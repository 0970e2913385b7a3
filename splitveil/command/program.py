"""Finds the sub-command that the first word names, and lets its module do the rest.

``splitveil run active.yaml`` is a party's: the file says whose it is. The first word of
``splitveil active run active.yaml``, which no help names, says it as well.

A ``SplitveilError`` that a sub-command raises is printed after the program's name, and its exit
code is the command's. A module is imported only when its sub-command is called; it
imports torch, if at all, in ``run``, so that its help appears at once.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from rich.text import Text

from splitveil.common.errors import SplitveilError
from splitveil.common.party.arguments import (
    Commands,
    Parser,
    add_party_commands,
    end_program,
    run_command,
)
from splitveil.common.text.log_lines import printing_console
from splitveil.common.text.visible_text import visible_lines
from splitveil.common.text.wording import add_version

PROGRAM = "splitveil"


class SubCommand(NamedTuple):
    name: str
    purpose: str
    module: str  # has ``parser(program)``, and ``run(parsed)``, which returns the exit code


_OWN = "splitveil.command.subcommands"

SUB_COMMANDS = (
    SubCommand(
        "demo",
        "run both parties of an example on this machine, and compare defenses",
        "splitveil.deploy.demo",
    ),
    SubCommand(
        "init",
        "look at a party's table, and write commented settings that fit it",
        "splitveil.deploy.init.command",
    ),
    SubCommand(
        "local",
        "run all parties of a folder as processes on this machine",
        "splitveil.deploy.local",
    ),
    SubCommand("certs", "make and show certificates", "splitveil.deploy.certs"),
    SubCommand(
        "audit",
        "attack gradients of any trainer, and print what they reveal about the labels",
        _OWN,
    ),
    SubCommand("schema", "print the JSON Schema of a settings file", _OWN),
)
"""Beside those of a party, in the order of the help."""

OF_ONE_PARTY = tuple(
    SubCommand(party, "", f"splitveil.{party}_party.commands.program")
    for party in ("active", "passive")
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    words = list(sys.argv[1:] if arguments is None else arguments)
    end_program(_exit_code(words), is_program=arguments is None)


def _exit_code(words: Sequence[str]) -> int:
    by_name = {one.name: one for one in (*SUB_COMMANDS, *OF_ONE_PARTY)}
    called = by_name.get(words[0]) if words else None
    if called is None:  # a party's, --help, --version, or a mistake
        return run_command(_parser().parse_args(words or ["--help"]))
    module: Any = import_module(called.module)
    program = f"{PROGRAM} {called.name}"
    parser: argparse.ArgumentParser = module.parser(program)
    parser.description = parser.description or called.purpose
    parsed = parser.parse_args(words[1:])
    try:
        return int(module.run(parsed))
    except SplitveilError as error:
        said = Text(f"{program}: {visible_lines(str(error))}", "red")
        printing_console(stderr=True).print(said, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Two-party split learning with defended gradients.",
        example="demo",
    )
    add_version(parser)
    commands: Commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for one in SUB_COMMANDS:
        if one.name == "local":
            add_party_commands(commands)
        commands.add_parser(one.name, help=one.purpose, description=one.purpose)
    return parser
