"""The mark in a run's folder that the run was ended for good, by a budget or a gate.

Without it, a supervisor that restarts every process that ends with an error would never stop.
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
        why: what the next start has to know, as values of JSON.

    Raises:
        StorageError: the mark cannot be written.
    """
    write_json_atomically(folder / FILE, why)


def end_of(folder: Path) -> Mapping[str, Any] | None:
    """Return the content of a run's mark; None if there is none, or it cannot be read.

    A run that is resumed because its mark was lost ends again at the same place.
    """
    try:
        why = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return why if isinstance(why, dict) else None


def clear_mark(folder: Path) -> None:
    """Let a run be resumed: its limits have changed since it ended.

    Raises:
        StorageError: the mark cannot be deleted.
    """
    delete(folder / FILE)
