"""The arguments of ``passive-party``, and the function that does what each command says.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from splitveil.common.party.arguments import (
    Commands,
    add_command,
    add_verbosity,
    end_program,
    party_parser,
    run_command,
)
from splitveil.common.party.json_output import add_json

_OWN = "splitveil.passive_party.commands"
_ACTIONS = {
    **{name: f"{_OWN}.{name}:{name}" for name in ("align", "run", "check", "plan", "serve")},
    "report": "splitveil.passive_party.report_page:report",
    "verify-transcript": "splitveil.common.party.command_line:verify_transcript",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    end_program(run(parser().parse_args(arguments)), is_program=arguments is None)


def parser(program: str = "passive-party") -> argparse.ArgumentParser:
    return party_parser(program, "passive", _add_own_commands)


def _add_own_commands(commands: Commands) -> None:
    _add_serve(commands)
    about = "print what a run would reveal of this party's columns, before anything is sent"
    add_json(add_command(commands, "plan", about, "passive.yaml"))
    purpose = "write a page that shows what left and what it reveals of this party's features"
    report = commands.add_parser(
        "report", help=purpose, description=purpose, example="runs/breast_cancer"
    )
    report.add_argument(
        "run_dir", type=Path, help="the run's folder, runs/<run name>, or this party's folder in it"
    )
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in this party's folder"
    )
    add_json(report)
    add_verbosity(report)


def run(parsed: argparse.Namespace) -> int:
    return run_command(parsed, "passive", _ACTIONS)


def _add_serve(commands: Commands) -> None:
    command = add_command(
        commands,
        "serve",
        "answer the active party's questions for predictions, until stopped",
        "passive.yaml",
    )
    command.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="table with the rows to answer for (default: data.source of the settings)",
    )
