"""The arguments that both parties' commands have, and how a command ends.

It imports neither torch nor gRPC, so that help and a mistyped option are answered at once.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeAlias

from splitveil.common.errors import (
    Interrupted,
    PeerError,
    SettingsError,
    SplitveilError,
    StorageError,
)
from splitveil.common.record.run_folder import json_text
from splitveil.common.text.files import why_unreadable
from splitveil.common.text.imports import fault_of_own_code
from splitveil.common.text.log_lines import LogFormat, configure_logging, log_fields
from splitveil.common.text.system import require_linux
from splitveil.common.text.wording import add_version, suggest
from splitveil.common.text.yaml_text import read_yaml_file


class Parser(argparse.ArgumentParser):
    """Ends its help with an example, and says which choice a mistyped one may mean.

    Args:
        example: the words after the program's name.
    """

    def __init__(self, *, example: str = "", **options: Any) -> None:
        super().__init__(
            epilog=f"example:\n  %(prog)s {example}" if example else "",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = "" if wrong is None else suggest(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        super().error(f"{message}{hint}")


# The type that add_subparsers returns is private.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # noqa: SLF001


def party_parser(program: str) -> Parser:
    """Return the parser of a program that has the commands of a party and no others."""
    parser = Parser(prog=program, example="run active.yaml")
    add_version(parser)
    add_party_commands(parser.add_subparsers(dest="command", required=True))
    return parser


def add_party_commands(commands: Commands) -> None:
    """Add the commands that read from their file, or from a run's folder, which party they serve.

    Where only the active party has a command or an option, its help says so.
    """
    purpose = "train with the other party, or resume an unfinished run"
    run = _add_command(commands, "run", purpose, "active.yaml")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="start over; earlier results are moved aside, and the ledger counts both runs",
    )
    purpose = "check settings and data without training; with -v, print all settings"
    check = _add_command(commands, "check", purpose, "passive.yaml --connect")
    check.add_argument(
        "--connect",
        action="store_true",
        help="probe the connection to the other party as well: certificate, clock, speed, contract",
    )
    check.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="with --connect: how long to wait for the other party (default: 60)",
    )
    purpose = "print what a run would reveal of this party's labels or columns, before it sends any"
    plan = _add_command(commands, "plan", purpose, "active.yaml --target-leak-auc 0.65")
    about = "the label owner's: also print the power ratio at which the whole run stays below this"
    plan.add_argument("--target-leak-auc", type=float, metavar="AUC", help=about)
    purpose = "find the rows that all parties have, and write this party's, without training"
    align = _add_command(commands, "align", purpose, "passive.yaml --output aligned.parquet")
    align.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="aligned.parquet or aligned.csv: this party's rows of the common ids, in the order "
        "that is the same at all parties; an earlier file is replaced",
    )
    align.add_argument(
        "--positions",
        action="store_true",
        help="write the columns of the ids and their position in that order, from 0, and no others",
    )
    purpose = "write a page that shows what a run revealed of this party's labels or columns"
    report = _add(commands, "report", purpose, "runs/breast_cancer")
    report.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="the run's folder, runs/<run name>, or a party's folder in it; several of the label "
        "owner's are set side by side",
    )
    about = "default: report.html in the party's folder, or comparison.html here"
    report.add_argument("--output", type=Path, metavar="FILE", help=about)
    about = "the label owner's: pass or fail one run against this instead of its settings'"
    report.add_argument("--target-leak-auc", type=float, metavar="AUC", help=about)
    purpose = "the label owner's: predict with the trained model and every passive party's serve"
    example = "active.yaml --ids new.csv --output predictions.csv"
    _add_predict(_add_command(commands, "predict", purpose, example))
    purpose = "the label owner's: fit another top model on what a finished run has left, alone"
    example = "active.yaml --set model_seed=2 --set refit.epochs=50"
    refit = _add_command(commands, "refit", purpose, example)
    purpose = "answer requests for predictions, until stopped: of programs, or of the label owner"
    serve = _add_command(commands, "serve", purpose, "passive.yaml")
    about = "table with the features to answer from (default: data.source of the settings)"
    serve.add_argument("--data", type=Path, metavar="FILE", help=about)
    purpose = "check that a transcript is intact and matches the other party's transcript"
    example = "transcript.jsonl --against theirs.jsonl"
    verify = _add(commands, "verify-transcript", purpose, example)
    verify.add_argument("transcript", type=Path, help="a party's transcript.jsonl")
    about = "the other party's transcript.jsonl"
    verify.add_argument("--against", type=Path, metavar="FILE", help=about)
    for command in commands.choices.values():
        if command not in {run, refit, serve}:
            add_json(command)


def _add_predict(command: Parser) -> None:
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
        "same command, and an earlier file is replaced",
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


def _add(commands: Commands, name: str, purpose: str, example: str) -> Parser:
    command: Parser = commands.add_parser(name, help=purpose, description=purpose, example=example)
    add_verbosity(command)
    return command


def _add_command(commands: Commands, name: str, purpose: str, example: str) -> Parser:
    """Add a command that reads a settings file."""
    command = _add(commands, name, purpose, example)
    command.add_argument("settings", type=Path, metavar="FILE", help="this party's settings file")
    command.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="override one setting, for instance contract.epochs=3 (may be repeated)",
    )
    command.add_argument(
        "--runs", type=Path, metavar="DIR", help="folder of all runs (default: runs)"
    )
    command.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="form of the log"
    )
    return command


def add_verbosity(command: argparse.ArgumentParser) -> None:
    command.add_argument("-v", "--verbose", action="count", default=0, help="show all details")
    command.add_argument(
        "-q", "--quiet", action="count", default=0, help="show warnings and errors only"
    )


logger = logging.getLogger(__name__)


def run_command(parsed: argparse.Namespace, party: str | None = None) -> int:
    """Do what parsed arguments say, and return the exit code.

    A command is the function of its name in the module of its name, if ``_ELSEWHERE`` has no other.

    Args:
        party: whose commands these are; None if the file that they name says it.
    """
    # Before torch is imported. Threads that spin while they wait for each other take the cores from
    # the other party on this machine, and gain nothing on small batches.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    name = str(parsed.command).replace("-", "_")

    def act() -> None:
        role = _role_of(parsed, party)  # first: a mistake is answered before anything is imported
        configure_logging(role, *form)
        if "overrides" in parsed:
            section = resolve_name(f"splitveil.{role}_party.settings:{role.title()}Settings")
            load = resolve_name("splitveil.common.party.party_settings:load_settings")
            parsed.loaded = load(section, parsed, role)
        own = f"splitveil.{role}_party.commands.{name}:{name}"
        if name in _OF_PARTIES:
            require_linux()
        action = resolve_name(_ELSEWHERE.get(name) or _ELSEWHERE.get(f"{role} {name}", own))
        ended_early = resolve_name("splitveil.common.party.workers:act")(parsed, action)
        then = None if ended_early else _THEN.get(f"{role} {name}")
        if then and os.environ.get("RANK", "0") == "0":
            logger.info("next: splitveil %s", then.format(parsed.settings))

    log_format: LogFormat = getattr(parsed, "log_format", "text")
    form = (parsed.verbose - parsed.quiet, log_format)
    configure_logging(party or _ANY, *form)
    return exit_code_of(act)


_OF_PARTIES = {"align", "predict", "run", "serve"}
_ANY = "splitveil"  # where a command serves no party more than another
_ELSEWHERE = {
    "verify_transcript": "splitveil.common.party.command_line:verify_transcript",
    "passive plan": "splitveil.passive_party.exposure_plan:plan",
    "passive report": "splitveil.passive_party.report_page:report",
}
_THEN = {
    "active align": "run {}",
    "passive align": "run {}",
    "active plan": "run {}",
    "passive plan": "check {} --connect",
    "active run": "predict {} --ids IDS --output predictions.csv",
    "passive run": "serve {}",
    "active refit": "predict {} --ids IDS --output predictions.csv",
}
_OWN_SETTINGS: Mapping[str, Collection[str]] = {
    "active": ("defense", "leak_monitor", "listen", "top_model"),
    "passive": ("answers", "bottom_model", "connect", "party"),
}
"""Names that the settings of one kind of party have: its class is not imported for them."""
_FILES = {"active": "label owner's file", "passive": "feature owner's file"}


def _role_of(parsed: argparse.Namespace, expected: str | None) -> str:
    """Return which party a command is for: ``active`` or ``passive``, as its file or folder says.

    Raises:
        SettingsError: a file is missing, is none of the expected party's, or lacks what only the
            active party has.
    """
    given = vars(parsed)
    named = [given.get(name) for name in ("settings", "ids", "data")]
    paths: list[Path] = [path for path in (*named, *given.get("run_dirs", ())) if path is not None]
    for path in paths:
        try:
            path.stat()
        except OSError as error:
            raise SettingsError(f"{path}: {why_unreadable(path, error)}") from error
    if not paths:
        return expected or _ANY
    if "settings" in parsed:
        role = _role_in_file(parsed.settings, parsed.overrides, expected)
    else:
        is_active = len(paths) > 1 or (paths[0] / "active").exists()
        found = "active" if is_active or paths[0].resolve().name == "active" else "passive"
        role = expected or found
    for_active = [parsed.command] if parsed.command in {"predict", "refit"} else []
    for_active += ["--target-leak-auc"] * (given.get("target_leak_auc") is not None)
    for_active += ["several folders"] * (len(given.get("run_dirs", ())) > 1)
    if role == "passive" and for_active:
        raise SettingsError(
            f"{for_active[0]}: for the label owner; {paths[0]} is the other party's"
        )
    return role


def _role_in_file(path: Path, overrides: Sequence[str], expected: str | None) -> str:
    values = read_yaml_file(path)
    given = {*(values if isinstance(values, dict) else ())}
    given |= {re.split("[.=]", text)[0] for text in overrides}
    found = [role for role, names in _OWN_SETTINGS.items() if given.intersection(names)]
    if (expected is None and len(found) == 1) or found == [expected]:
        return found[0]
    if "contract" not in given and given & {"batch_size", "cut_shape", "run_name"}:
        own = [x.name for x in path.parent.glob("*.yaml") if x.stem.startswith((*_OWN_SETTINGS,))]
        expected = f"expected {' or '.join(sorted(own)) or 'the settings of a party'}"
        raise SettingsError(f"{path}: this is the contract, which all parties share; {expected}")
    if len(found) == 1:
        raise SettingsError(f"{path}: this is the {_FILES[found[0]]}; expected the other party's")
    if expected is None:
        raise SettingsError(
            f"{path}: expected the settings of one party: the label owner's have a defense, and a "
            f"feature owner's a bottom_model"
        )
    return expected  # its class says what is wrong


def exit_code_of(action: Callable[[], None]) -> int:
    try:
        action()
    except Exception as error:
        known = error if isinstance(error, SplitveilError) else fault_of_own_code(error)
        if known is None:
            raise
        for reported in (*_hidden_by(known), known):
            for line in str(reported).splitlines() or [type(reported).__name__]:
                fields = log_fields(error=type(reported).__name__, exit_code=known.exit_code)
                logger.error("%s", line, extra=fields)
        return known.exit_code
    except KeyboardInterrupt:
        logger.error("stopped at once; nothing was saved")
        return 130
    return 0


def end_program(exit_code: int, *, is_program: bool) -> NoReturn:
    if is_program:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _hidden_by(error: SplitveilError) -> Iterator[SplitveilError]:
    """Yield the reason for the run's end if a full disk would hide it."""
    earlier = error.__context__
    while isinstance(error, StorageError) and earlier is not None:
        if isinstance(earlier, PeerError | Interrupted):
            yield earlier
            return
        earlier = earlier.__context__


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


def print_json(value: Mapping[str, object]) -> None:
    sys.stdout.write(json_text(value))
