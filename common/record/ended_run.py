"""Tells from a run's folder that the run has finished, or was ended for good by a budget or a gate.

The latter has a mark. Without it, a supervisor that restarts every process that ends with an error
would never stop.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitveil.common.record.run_folder import delete, write_json_atomically

FILE = "ended.json"


def mark_as_ended(folder: Path, why: Mapping[str, Any]) -> None:
    """Mark a run as ended for good.

    Args:
        why: the facts that the next start needs, as JSON values.
    """
    write_json_atomically(folder / FILE, why)


def end_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the content of a run's mark; None if there is none, or if it cannot be read.

    A run that is resumed because its mark was lost ends again at the same batch.
    """
    try:
        why = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return why if isinstance(why, dict) else None


def has_finished(folder: Path) -> bool:
    """Return whether a folder holds the results of a finished run, of which the state goes last."""
    return (folder / "summary.json").exists() and not (folder / "checkpoint" / "run.state").exists()


def clear_mark(folder: Path) -> None:
    """Delete the mark, so that a run whose limits have changed since can be resumed."""
    delete(folder / FILE)
