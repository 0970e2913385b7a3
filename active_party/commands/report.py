"""``splitveil report``: writes the page of a run, or of several."""

import argparse
import logging
from pathlib import Path

from rich.console import Console

from splitveil.active_party.report import read_run, write_comparison, write_report
from splitveil.active_party.report.comparison_table import comparison_table
from splitveil.common.errors import SettingsError
from splitveil.common.party.arguments import print_json

logger = logging.getLogger("splitveil.active_party")


def report(parsed: argparse.Namespace) -> None:
    folders, target = parsed.run_dirs, parsed.target_leak_auc
    if target is not None and not 0.5 < target < 1:
        raise SettingsError(f"--target-leak-auc: expected an AUC between 0.5 and 1, got {target}")
    if len(folders) == 1:
        written = write_report(folders[0], parsed.output, target)
    elif target is not None:
        raise SettingsError("--target-leak-auc: expected one run's folder")
    else:
        written = write_comparison(folders, parsed.output or Path("comparison.html"))
        if not parsed.json:
            summaries = [read_run(folder).active.summary for folder in folders]
            names = [folder.resolve().name for folder in folders]
            titles = names if len({*names}) == len(names) else map(str, folders)
            table = dict(zip(titles, summaries, strict=True))
            Console().print(comparison_table("comparison", table))
    if parsed.json:
        print_json({"report": str(written)})
    logger.info("report written to %s", written)
