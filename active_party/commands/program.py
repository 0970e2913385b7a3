"""The arguments of ``splitveil active``, and the function that does what each command says.

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


def parser(program: str = "active-party") -> argparse.ArgumentParser:
    """Return the command's parser; ``program`` is how the user calls it."""
    return party_parser(program, "active", _add_own_commands)


def run(parsed: argparse.Namespace) -> int:
    return run_command(parsed, "active")


def _add_own_commands(commands: Commands) -> None:
    _add_plan(commands)
    _add_predict(commands)
    add_command(
        commands,
        "refit",
        "fit another top model on what a finished run has left, without any other party",
        "active.yaml --set model_seed=2 --set refit.epochs=50",
    )
    own = "this party's own features, which needs no labels"
    add_serve(commands, "active", "answer other programs' requests for predictions", own)
    _add_report(commands)


def _add_plan(commands: Commands) -> None:
    command = add_command(
        commands,
        "plan",
        "print what a run would reveal about the labels, before any training",
        "active.yaml --target-leak-auc 0.65",
    )
    command.add_argument(
        "--target-leak-auc",
        type=float,
        metavar="AUC",
        help="also print the power ratio at which the whole run stays below this",
    )
    add_json(command)


def _add_predict(commands: Commands) -> None:
    command = add_command(
        commands,
        "predict",
        "predict with the trained model and every passive party's serve",
        "active.yaml --ids new.csv --output predictions.csv",
    )
    command.add_argument(
        "--ids",
        type=Path,
        required=True,
        metavar="FILE",
        help="ids to predict: a text file with one per line, or a CSV or Parquet file with the "
        "column data.id_column",
    )
    command.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="predictions.parquet or predictions.csv; an interrupted prediction goes on with the "
        "same command",
    )
    command.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="table with this party's own features of the ids, which needs no labels (default: "
        "data.source of the settings)",
    )
    command.add_argument(
        "--model",
        choices=["best", "trained", "refitted"],
        help="which of the run's top models predicts (default: inference.model of the settings)",
    )
    command.add_argument(
        "--whole-table",
        action="store_true",
        help="take every passive party's whole table, sealed, so that it does not learn which of "
        "its ids are meant",
    )
    add_json(command)


def _add_report(commands: Commands) -> None:
    command = add_report(
        commands,
        "write a page that shows what a run revealed about the labels",
        "active/report.html in the run's folder, or comparison.html here",
    )
    command.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="the run's folder, runs/<run name>; several are set side by side",
    )
    command.add_argument(
        "--target-leak-auc",
        type=float,
        metavar="AUC",
        help="pass or fail one run against this instead of report.target_leak_auc",
    )
