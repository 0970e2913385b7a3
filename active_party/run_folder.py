"""The folder of a run: opens it, finds a run that is over, and leaves the summary of one that ends.

A run that its budget or leak gate has ended for good is marked; the same limits never resume it.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment import ExchangeStores
from splitveil.common.errors import BudgetExhausted, EndedForGood
from splitveil.common.party import command_line
from splitveil.common.record.ended_run import clear_mark, end_of, mark_as_ended
from splitveil.common.record.run_folder import open_run_folder
from splitveil.common.record.run_record import write_summary
from splitveil.common.record.summary import Summary, provenance_of_process
from splitveil.common.record.summary_tables import print_summary
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.version import VERSION

logger = logging.getLogger("splitveil.active_party")

_WHAT_NOW = (
    "the same command trains nothing; a larger run_budget or leak_gate resumes the run, and "
    "--fresh starts over, which answers about the same labels again (the ledger counts both)"
)


def open_folder(settings: ActiveSettings, *, fresh: bool) -> Path | None:
    """Open the run's folder; None if the run is over."""
    folder = open_run_folder(
        settings.runs_dir,
        settings.contract.run_name,
        ACTIVE,
        lambda folder: command_line.takes_up(settings, fresh=fresh, folder=folder),
    )
    if _was_ended(settings, folder):
        return None
    # By its settings, the start of another run finds this one.
    command_line.save_resolved(settings, folder)
    if fresh:
        ExchangeStores(folder).discard()
    return folder


def leave_summary(
    settings: ActiveSettings, folder: Path, summary: Summary, stopped: EndedForGood | None
) -> None:
    """Write and print a run's summary, and then its report."""
    # A run need not wait for what its report is made with, nor hold it in memory.
    from splitveil.active_party.report import try_to_report  # noqa: PLC0415

    provenance = provenance_of_process(shows_host=settings.report.show_host)
    summary = replace(summary, version=VERSION, provenance=provenance)
    write_summary(folder, summary)
    if stopped is not None:
        limit = "run_budget" if isinstance(stopped, BudgetExhausted) else "leak_gate"
        mark_as_ended(folder, {"ended_by": limit, **_limits_of(settings)})
    print_summary("active party", summary)
    try_to_report(folder.parent)
    if stopped is not None:
        logger.warning("the run has ended for good: %s", _WHAT_NOW)
        raise stopped


def _limits_of(settings: ActiveSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", include={"run_budget", "leak_gate"})


def _was_ended(settings: ActiveSettings, folder: Path) -> bool:
    """Return whether the run is over, finished or ended by limits that are still set; say so."""
    if command_line.is_finished(folder):
        return True
    end = end_of(folder)
    if end is None:
        return False
    limits = _limits_of(settings)
    if all(name in end and end[name] == limit for name, limit in limits.items()):
        logger.warning("this run was ended for good by its %s: %s", end["ended_by"], _WHAT_NOW)
        return True
    logger.info("resuming the run in %s, which was ended under other limits", folder)
    clear_mark(folder)
    return False
