"""Finds the sub-command that the first word names, and lets its module do the rest.

``splitveil active run active.yaml`` is read by the module of ``active``, which sees the words from
``run`` on; ``splitveil`` itself has only the options that need no sub-command.

A ``SplitveilError`` that a sub-command raises is printed after the program's name, and its exit
code is the command's. A module is imported only when its sub-command is called; it
imports torch, if at all, in ``run``, so that its help appears at once.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from splitveil.common.errors import SplitveilError
from splitveil.common.party.arguments import Commands, Parser, end_program
from splitveil.common.text.version import add_version
from splitveil.common.text.visible_text import visible_lines

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
        "active",
        "the label owner's commands: run, check, plan, report, ...",
        "splitveil.active_party.commands.program",
    ),
    SubCommand(
        "passive",
        "a feature owner's commands: run, check, plan, report, ...",
        "splitveil.passive_party.commands.program",
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
"""In the order of the help."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    words = list(sys.argv[1:] if arguments is None else arguments)
    end_program(_exit_code(words), is_program=arguments is None)


def _exit_code(words: Sequence[str]) -> int:
    called = next((command for command in SUB_COMMANDS if words[:1] == [command.name]), None)
    if called is None:  # --help, --version, or a mistake
        _parser().parse_args(words or ["--help"])
        return 0
    module: Any = import_module(called.module)
    program = f"{PROGRAM} {called.name}"
    parser: argparse.ArgumentParser = module.parser(program)
    parser.description = parser.description or called.purpose
    parsed = parser.parse_args(words[1:])
    try:
        return int(module.run(parsed))
    except SplitveilError as error:
        sys.stderr.write(f"{program}: {visible_lines(str(error))}\n")
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
        commands.add_parser(one.name, help=one.purpose, description=one.purpose)
    return parser
