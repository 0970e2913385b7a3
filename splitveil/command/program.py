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
from typing import Any, NoReturn

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


_OWN = "splitveil.command.subcommands"

# Purpose, and the module, which has ``parser(program)``, and ``run(parsed)``, which returns the
# exit code; beside those of a party, in the order of the help.
SUB_COMMANDS = {
    "demo": (
        "run both parties of an example on this machine, and compare defenses",
        "splitveil.deploy.demo",
    ),
    "init": (
        "look at a party's table, and write commented settings that fit it",
        "splitveil.deploy.init.command",
    ),
    "local": ("run all parties of a folder as processes on this machine", "splitveil.deploy.local"),
    "certs": ("make and show certificates", "splitveil.deploy.certs"),
    "audit": (
        "attack gradients of any trainer, and print what they reveal about the labels",
        _OWN,
    ),
    "schema": ("print the JSON Schema of a settings file", _OWN),
}

OF_ONE_PARTY = {
    party: ("", f"splitveil.{party}_party.commands.program") for party in ("active", "passive")
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    words = list(sys.argv[1:] if arguments is None else arguments)
    end_program(_exit_code(words), is_program=arguments is None)


def _exit_code(words: Sequence[str]) -> int:
    called = (SUB_COMMANDS | OF_ONE_PARTY).get(words[0]) if words else None
    if called is None:  # a party's, --help, --version, or a mistake
        return run_command(_parser().parse_args(words or ["--help"]))
    purpose, path = called
    module: Any = import_module(path)
    program = f"{PROGRAM} {words[0]}"
    parser: argparse.ArgumentParser = module.parser(program)
    parser.description = parser.description or purpose
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
    for name, (purpose, _) in SUB_COMMANDS.items():
        if name == "local":
            add_party_commands(commands)
        commands.add_parser(name, help=purpose, description=purpose)
    return parser
