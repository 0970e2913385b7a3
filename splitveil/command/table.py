"""The sub-commands of ``splitveil``: what each is for, and the module that has its arguments.

Such a module has two functions:

    parser(program: str) -> argparse.ArgumentParser     the arguments; ``program`` is for its help
    run(parsed: argparse.Namespace) -> int              does what they say, returns the exit code

A ``SplitveilError`` that ``run`` raises is printed after the program's name, and its exit code is
the command's. A module is imported only when its sub-command is called, or for the completion of
all; it imports torch, if at all, in ``run``, so that its help appears at once.
"""

from typing import NamedTuple


class SubCommand(NamedTuple):
    name: str
    purpose: str
    module: str


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
        "a feature owner's commands: run, check, ...",
        "splitveil.passive_party.commands.program",
    ),
    SubCommand(
        "local",
        "run all parties of a folder as processes on this machine",
        "splitveil.deploy.local",
    ),
    SubCommand(
        "align",
        "find the rows that all parties have, and write this party's, without training",
        "splitveil.command.align",
    ),
    SubCommand(
        "certs",
        "make and show certificates",
        "splitveil.deploy.certs",
    ),
    SubCommand(
        "report",
        "write a page that shows what a run revealed about the labels",
        "splitveil.command.report",
    ),
    SubCommand(
        "compare",
        "print the final figures of several runs, side by side",
        "splitveil.command.compare",
    ),
    SubCommand(
        "audit",
        "attack gradients of any trainer, and print what they tell of the labels",
        "splitveil.command.audit",
    ),
    SubCommand("schema", "print the JSON Schema of a settings file", "splitveil.command.schema"),
)
"""In the order of the help."""
