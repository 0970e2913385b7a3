"""``splitveil compare``: the final figures of several runs, side by side."""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from splitveil.common.errors import SettingsError
from splitveil.common.party.json_output import add_json, print_json


def parser(program: str) -> argparse.ArgumentParser:
    compare = argparse.ArgumentParser(
        prog=program, description="Print the final figures of several runs, side by side."
    )
    compare.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's folder, runs/<run name>"
    )
    compare.add_argument(
        "--output", type=Path, metavar="FILE", help="also write a page with their charts"
    )
    add_json(compare)
    return compare


def run(parsed: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        SettingsError: a folder is named twice, or has no summary of an ended run.
        StorageError: the page cannot be written.
    """
    names = {folder.resolve(): folder for folder in parsed.runs}
    if len(names) < len(parsed.runs):
        raise SettingsError("expected each run once")
    written: Path | None = None
    if parsed.output is not None:
        report: Any = import_module("splitveil.active_party.report")
        written = report.write_comparison(parsed.runs, parsed.output)
    if parsed.json:
        library: Any = import_module("splitveil.library.recorded_run")
        runs = [library.Run(folder) for folder in parsed.runs]
        print_json(
            {
                "runs": [{**run.overview(), "summary": dict(run.summary)} for run in runs],
                "report": None if written is None else str(written),
            }
        )
        return 0
    comparison: Any = import_module("splitveil.deploy.comparison")
    console: Any = import_module("rich.console").Console()
    titles = [folder.resolve().name for folder in parsed.runs]
    if len(set(titles)) < len(titles):
        titles = list(map(str, parsed.runs))
    results = [comparison.read_results(folder) for folder in parsed.runs]
    table = comparison.comparison_table("comparison", dict(zip(titles, results, strict=True)))
    console.print(table)
    return 0
