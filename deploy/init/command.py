"""The arguments of ``splitveil init``; ``initialise`` does what they say.

    splitveil init active FILE [--label-column NAME] [--id-column NAME] ...
    splitveil init passive FILE [--id-column NAME] ...

It imports no torch, so that help and a mistyped option are answered at once.
"""

import argparse
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.arguments import Parser, add_json
from splitveil.common.text.files import check_regular, why_unreadable


def parser(program: str) -> argparse.ArgumentParser:
    init = Parser(prog=program, example="active clients.csv --label-column churned")
    init.add_argument(
        "role",
        choices=["active", "passive"],
        help="active: the party that has the labels; passive: the one that has only features",
    )
    init.add_argument("file", type=_file_here, help="this party's table: .csv, .tsv or .parquet")
    init.add_argument("--folder", type=Path, default=Path(), help="where to write (default: .)")
    init.add_argument("--id-column", metavar="NAME", help="column with the ids")
    init.add_argument(
        "--no-id-column",
        action="store_true",
        help="there are no ids: both files have the same examples in the same order",
    )
    init.add_argument("--label-column", metavar="NAME", help="column with the labels (active)")
    init.add_argument(
        "--positive-label",
        action="append",
        default=[],
        metavar="TEXT",
        help="the label that stands for 1; again for each text that does",
    )
    what = "labels that look alike, classes of a row or two and a row of sums are meant so"
    init.add_argument("--as-written", action="store_true", help=what)
    what = "leave rows without a label out"
    init.add_argument("--unlabelled-rows", choices=["leave_out"], help=what)
    init.add_argument(
        "--label-range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="bounds of a label that is a number, by what it means and not by the labels",
    )
    for kind, what in (
        ("numeric", "columns to read as numbers"),
        ("categorical", "columns whose values are categories"),
        ("exclude", "columns to leave out"),
        ("missing-text", "further texts that mean that a cell has no value"),
        ("no-gaps", "columns in which every text is a value, such as NA, none, ? and -"),
    ):
        metavar = "TEXT" if kind == "missing-text" else "NAME"
        init.add_argument(
            f"--{kind}", nargs="+", action="extend", default=[], metavar=metavar, help=what
        )
    init.add_argument("--delimiter", metavar="CHARACTER", help="character between two cells")
    init.add_argument("--encoding", metavar="NAME", help="of a text file, such as cp1252")
    init.add_argument("--decimal", choices=[".", ","], help="decimal mark of a text file's numbers")
    init.add_argument(
        "--first-year",
        type=int,
        metavar="YEAR",
        help="first of the hundred years that two digits stand for, such as 1927",
    )
    init.add_argument("--party", default="passive", metavar="NAME", help="the passive party")
    init.add_argument("--run-name", metavar="NAME", help="default: the name of the file")
    init.add_argument("--address", default="127.0.0.1:50051", metavar="HOST:PORT")
    init.add_argument("--force", action="store_true", help="overwrite existing files")
    add_json(init)
    return init


def _file_here(text: str) -> Path:
    if "://" in text:
        what = "expected a file of this machine; only settings name addresses, of Parquet files"
        raise argparse.ArgumentTypeError(f"{text}: {what} (s3://, gs://, abfs://)")
    return Path(text)


FILES = {"active": ("active.yaml", "contract.yaml"), "passive": ("passive.yaml",)}
"""What is written for each role."""


def check_absent(folder: Path, names: Iterable[str]) -> None:
    if existing := [str(folder / name) for name in names if (folder / name).exists()]:
        shown = ", ".join(existing)
        raise SettingsError(f"{shown}: exists and will not be overwritten without --force")


def run(parsed: argparse.Namespace) -> int:
    # First: what reads tables takes a while to import.
    try:
        check_regular(parsed.file)
    except OSError as error:
        raise DataError(f"{parsed.file}: {why_unreadable(parsed.file, error)}") from error
    if not parsed.force:
        check_absent(parsed.folder, FILES[parsed.role])
    exit_code: int = import_module("splitveil.deploy.init.initialise").perform(parsed)
    return exit_code
