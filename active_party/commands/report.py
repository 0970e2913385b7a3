"""``splitveil active report``, and the report at the end of a run."""

import argparse
import logging
from pathlib import Path

from splitveil.active_party.report import write_comparison, write_report
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.json_output import print_json

logger = logging.getLogger("splitveil.active_party")

_REPORT_LATER = "once the cause is gone: splitveil active report"


def report(parsed: argparse.Namespace) -> None:
    """Write the page of one run, or the comparison of several."""
    if parsed.run_dirs and parsed.compare:
        raise SettingsError("report: expected runs' folders either before or after --compare")
    folders = parsed.run_dirs or parsed.compare
    target = parsed.target_leak_auc
    if not folders:
        raise SettingsError("report: expected a run's folder, or several to compare")
    if target is not None and not 0.5 < target < 1:
        raise SettingsError(f"--target-leak-auc: expected an AUC between 0.5 and 1, got {target}")
    if len(folders) == 1 and parsed.compare is None:
        written = write_report(folders[0], parsed.output, target)
    elif target is not None:
        raise SettingsError("--target-leak-auc: expected one run's folder")
    else:
        written = write_comparison(folders, parsed.output or Path("comparison.html"))
    if parsed.json:
        print_json({"report": str(written)})
    logger.info("report written to %s", written)


def try_to_report(run_dir: Path) -> None:
    """Write the report of a run that is over; its results are safe even if that fails."""
    try:
        logger.info("report written to %s", write_report(run_dir))
    except SplitveilError as error:  # a full disk needs no traceback
        logger.error("%s; %s %s", error, _REPORT_LATER, run_dir)
    except Exception:
        logger.exception("the report could not be written; %s %s", _REPORT_LATER, run_dir)
