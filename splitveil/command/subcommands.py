"""The sub-commands of ``splitveil`` that work on files: align, report, compare, audit, schema.

``align`` and ``report`` do the same as in ``splitveil active`` and ``splitveil passive``.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rich.console import Console

from splitveil.active_party.commands.program import REPORT_EXAMPLE, add_report_arguments
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.arguments import (
    ALIGN_PURPOSE,
    Commands,
    Parser,
    add_align_arguments,
    add_command,
)
from splitveil.common.party.json_output import add_json, print_json
from splitveil.common.text.upper_bounds import at_least
from splitveil.common.text.visible_text import PlainTable

if TYPE_CHECKING:
    from splitveil.library.auditing import Audit

NEEDED = ("gradients", "labels")
OPTIONAL = ("batches", "examples", "activations", "covariates", "predictions")


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the sub-command that is the last word of ``program``."""
    add, example = _PARSERS[program.rsplit(maxsplit=1)[-1]]
    made = Parser(prog=program, example=example)
    add(made)
    return made


def run(parsed: argparse.Namespace) -> int:
    exit_code: int = parsed.action(parsed)
    return exit_code


def _add_align(align: argparse.ArgumentParser) -> None:
    align.description = f"{ALIGN_PURPOSE}; every party runs it at once"
    parties: Commands = align.add_subparsers(dest="party", required=True, metavar="PARTY")
    parts = {
        "active": "the label owner's part: it is called",
        "passive": "a feature owner's part: it calls",
    }
    for party, part in parts.items():
        example = f"{party}.yaml --output aligned.parquet"
        add_align_arguments(add_command(parties, party, part, example))
    align.set_defaults(command="align", action=_run_of_party)


def _add_report(report: argparse.ArgumentParser) -> None:
    add_report_arguments(report)
    report.set_defaults(command="report", party="active", action=_run_of_party)


def _run_of_party(parsed: argparse.Namespace) -> int:
    run_party = resolve_name(f"splitveil.{parsed.party}_party.commands.program:run")
    exit_code: int = run_party(parsed)
    return exit_code


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's folder, runs/<run name>"
    )
    compare.add_argument(
        "--output", type=Path, metavar="FILE", help="also write a page with their charts"
    )
    add_json(compare)
    compare.set_defaults(action=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    if len({folder.resolve() for folder in parsed.runs}) < len(parsed.runs):
        raise SettingsError("expected each run once")
    written: Path | None = None
    if parsed.output is not None:
        write_comparison = resolve_name("splitveil.active_party.report:write_comparison")
        written = write_comparison(parsed.runs, parsed.output)
    if parsed.json:
        runs = list(map(resolve_name("splitveil.library.runs:Run"), parsed.runs))
        print_json(
            {
                "runs": [{**run.overview(), "summary": dict(run.summary)} for run in runs],
                "report": None if written is None else str(written),
            }
        )
        return 0
    titles = [folder.resolve().name for folder in parsed.runs]
    if len(set(titles)) < len(titles):
        titles = list(map(str, parsed.runs))
    read_summary = resolve_name("splitveil.common.record.run_record:read_summary")
    summaries = [read_summary(folder / "active") for folder in parsed.runs]
    comparison_table = resolve_name("splitveil.deploy.comparison:comparison_table")
    table = comparison_table("comparison", dict(zip(titles, summaries, strict=True)))
    Console().print(table)
    return 0


def _add_audit(audit: argparse.ArgumentParser) -> None:
    audit.epilog = (
        f"{audit.epilog}\n\nFILE is an npz archive with arrays {' and '.join(NEEDED)} and perhaps "
        f"\n{', '.join(OPTIONAL)}, one entry per row;\nthe rows of several files are put together."
    )
    audit.add_argument("files", type=Path, nargs="+", metavar="FILE", help="an npz archive")
    audit.add_argument(
        "--batch-size",
        type=int,
        metavar="ROWS",
        help="rows per batch, for a file without batches (default: one batch)",
    )
    audit.add_argument(
        "--attacks", nargs="+", metavar="ATTACK", help="default: all that the arrays suffice for"
    )
    add_json(audit)
    audit.set_defaults(action=_audit)


def _audit(parsed: argparse.Namespace) -> int:
    parts = [_arrays(path) for path in parsed.files]
    if len({tuple(part) for part in parts}) > 1:
        raise DataError("the files have different arrays")
    concatenate = resolve_name("numpy:concatenate")
    arrays: dict[str, Any] = {name: concatenate([one[name] for one in parts]) for name in parts[0]}
    if parsed.batch_size is not None:
        if "batches" in arrays:
            raise DataError(f"{parsed.files[0]}: has batches: leave --batch-size out")
        arrays["batches"] = parsed.batch_size
    audit = resolve_name("splitveil.library.auditing:audit")
    try:
        result: Audit = audit(**arrays, attacks=parsed.attacks)
    except ValueError as error:
        raise DataError(f"{parsed.files[0]}: {error}") from error
    if parsed.json:
        print_json(result.to_json())
    else:
        _print_audit(result)
    return 0


def _arrays(path: Path) -> dict[str, Any]:
    source = resolve_name("splitveil.common.data.npz_file:NpzFile")(path)
    names = set(source.array_names())
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise DataError(f"{path}: expected an array {' and one '.join(missing)}")
    return {name: source.read_array(name) for name in (*NEEDED, *OPTIONAL) if name in names}


def _print_audit(audit: "Audit") -> None:
    console = Console(file=sys.stdout, highlight=False)
    if audit.beyond is not None:
        adjusted = {
            name: (one.value, one.low, one.high) for name, one in audit.beyond.adjusted.items()
        }
        console.print(_intervals("leak AUC, adjusted for covariates", adjusted))
    figures_of = ("leak AUC", "95 % interval", "random", "batches")
    batches = PlainTable("single batches: mean raw leak AUC", ("attack",), figures_of)
    batches.add_column("needs to know")
    for one in audit.batches:
        interval = _interval(one.low, one.high)
        figures = (f"{one.leak_auc:.3f}", interval, f"{one.random:.3f}", str(one.batches))
        batches.add_row(one.attack, *figures, one.needs)
    console.print(batches)
    if audit.run:
        of_run = {name: (one["auc"], one["low"], one["high"]) for name, one in audit.run.items()}
        console.print(_intervals("all batches together: raw leak AUC", of_run))
    if audit.epsilon is not None:
        epsilon = audit.epsilon
        console.print(
            f"epsilon of label differential privacy is at least {at_least(epsilon.epsilon)} "
            f"(confidence {epsilon.confidence:g}, delta {epsilon.delta:g}): {epsilon.attack} "
            f"guessed {epsilon.correct} of {epsilon.guesses} labels right",
            markup=False,
            soft_wrap=True,
        )
    if audit.skipped_one_class:
        console.print(
            f"{audit.skipped_one_class} batches of a single class were left out", markup=False
        )


def _intervals(title: str, figures: Mapping[str, tuple[float, float, float]]) -> PlainTable:
    table = PlainTable(title, ("attack",), ("leak AUC", "95 % interval"))
    for attack, (auc, low, high) in figures.items():
        table.add_row(attack, f"{auc:.3f}", _interval(low, high))
    return table


def _interval(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"{low:.3f} .. {min(high, 1.0):.3f}"


def _add_schema(schema: argparse.ArgumentParser) -> None:
    schema.add_argument(
        "file",
        nargs="?",
        choices=("active", "passive", "contract"),
        help="the kind of file (default: all three, by their names)",
    )
    schema.set_defaults(action=_schema)


def _schema(parsed: argparse.Namespace) -> int:
    print_json(resolve_name("splitveil.library.loading:settings_schema")(parsed.file))
    return 0


_PARSERS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "align": (_add_align, "active active.yaml --output aligned.parquet"),
    "report": (_add_report, REPORT_EXAMPLE),
    "compare": (_add_compare, "runs/breast_cancer-none runs/breast_cancer-marvell"),
    "audit": (_add_audit, "gradients.npz --batch-size 128"),
    "schema": (_add_schema, "active"),
}
