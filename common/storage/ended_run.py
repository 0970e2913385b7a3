"""The mark in a run's folder which says that the run was ended for good, by a budget or a gate.

Without it a supervisor that starts again whatever ended with an error would never stop doing so.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitveil.common.storage.run_folder import delete, write_json_atomically

FILE = "ended.json"


def mark_as_ended(folder: Path, why: Mapping[str, Any]) -> None:
    """Mark a run.

    Args:
        folder: the run's folder.
        why: what the next start has to know, as JSON can hold it.

    Raises:
        StorageError: the mark cannot be written.
    """
    write_json_atomically(folder / FILE, why)


def end_of(folder: Path) -> Mapping[str, Any] | None:
    """Return what a run was marked with; None where it was not, or nobody can read the mark.

    A run that goes on for want of a mark is ended again at the same place.
    """
    try:
        why = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return why if isinstance(why, dict) else None


def clear_mark(folder: Path) -> None:
    """Let a run go on: its limits have changed since.

    Raises:
        StorageError: the mark cannot be deleted.
    """
    delete(folder / FILE)
