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
    add_report,
    add_serve,
    end_program,
    party_parser,
    run_command,
)
from splitveil.common.party.json_output import add_json


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    end_program(run(parser().parse_args(arguments)), is_program=arguments is None)


def parser(program: str = "passive-party") -> argparse.ArgumentParser:
    return party_parser(program, "passive", _add_own_commands)


def run(parsed: argparse.Namespace) -> int:
    return run_command(parsed, "passive", report="splitveil.passive_party.report_page:report")


def _add_own_commands(commands: Commands) -> None:
    asked = "answer the active party's questions for predictions"
    add_serve(commands, "passive", asked, "the rows to answer for")
    about = "print what a run would reveal of this party's columns, before anything is sent"
    add_json(add_command(commands, "plan", about, "passive.yaml"))
    purpose = "write a page that shows what left and what it reveals of this party's features"
    add_report(commands, purpose, "report.html in this party's folder").add_argument(
        "run_dir", type=Path, help="the run's folder, runs/<run name>, or this party's folder in it"
    )
