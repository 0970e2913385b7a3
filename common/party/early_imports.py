"""Imports, while the parties align, what is needed only later.

Libraries are imported where they are first used, because a party that only aligns does without
them. While the parties align, a process mostly waits: for its peer, for processes that do the
arithmetic, or for libsodium, which computes without the interpreter. What is imported then delays
neither the first step nor the end. A party that measures nothing needs none of it.
"""

import threading
from importlib import import_module

FOR_ATTACKS = (
    "scipy.linalg",  # for those that look for the widest direction
    "scipy.special",  # for what they are held against
)


def import_while_waiting(*modules: str) -> threading.Thread | None:
    """Start a thread that imports what is needed later, and return it; None without modules.

    Call it after processes have been started by forking. Whoever needs a module meanwhile waits
    for the rest of its import.
    """
    if not modules:
        return None

    def import_all() -> None:
        for name in modules:
            import_module(name)

    thread = threading.Thread(target=import_all, name="early-imports", daemon=True)
    thread.start()
    return thread
