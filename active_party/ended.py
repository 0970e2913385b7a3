"""A run that its budget or leak gate has ended for good, and the start that finds it so."""

import logging
from pathlib import Path
from typing import Any

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import BudgetExhausted, EndedForGood
from splitveil.common.party.command_line import is_finished
from splitveil.common.storage.ended_run import clear_mark, end_of, mark_as_ended

logger = logging.getLogger("splitveil.active_party")

WHAT_NOW = (
    "the same command trains nothing; a larger run_budget or leak_gate resumes the run, and "
    "--fresh starts over, which answers about the same labels again (the ledger counts both)"
)


def _limit_of(stopped: EndedForGood) -> str:
    return "run_budget" if isinstance(stopped, BudgetExhausted) else "leak_gate"


def _limits_of(settings: ActiveSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", include={"run_budget", "leak_gate"})


def was_ended(settings: ActiveSettings, folder: Path) -> bool:
    """Return whether the run is over, finished or ended by limits that are still set; say so."""
    if is_finished(folder):
        return True
    end = end_of(folder)
    if end is None:
        return False
    limits = _limits_of(settings)
    if all(name in end and end[name] == limit for name, limit in limits.items()):
        logger.warning("this run was ended for good by its %s: %s", end["ended_by"], WHAT_NOW)
        return True
    logger.info("resuming the run in %s, which was ended under other limits", folder)
    clear_mark(folder)
    return False


def mark_run_as_ended(settings: ActiveSettings, folder: Path, stopped: EndedForGood) -> None:
    """Mark a run as ended by one of its limits, which the mark holds.

    Raises:
        StorageError: the mark cannot be written.
    """
    mark_as_ended(folder, {"ended_by": _limit_of(stopped), **_limits_of(settings)})
