"""Imports, while the parties align, what is needed only later.

Libraries are imported where they are first used, because a party that only aligns does without
them. While the parties align, a process mostly waits: for its peer, for processes that do the
arithmetic, or for libsodium, which computes without the interpreter. What is imported then delays
neither the first step nor the end.
"""

import threading
from importlib import import_module

FOR_TRAINING = (
    "scipy.linalg",  # for attacks that look for the widest direction
    "scipy.special",  # for bounds
)


def import_while_waiting(*later: str) -> threading.Thread:
    """Start a thread that imports what training needs, and return it.

    Call it after processes have been started by forking. Whoever needs a module meanwhile waits
    for the rest of its import.

    Args:
        later: further modules, which are needed at the end.
    """

    def import_all() -> None:
        for name in (*FOR_TRAINING, *later):
            import_module(name)

    thread = threading.Thread(target=import_all, name="early-imports", daemon=True)
    thread.start()
    return thread
