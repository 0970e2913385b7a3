"""Imports, while the parties align, what only training needs.

scipy is imported where it is first used, because a party that only aligns does without it; torch
imports its compiler when the first optimizer is built, which takes more than a second of CPU
time. While the parties align, this process mostly waits: for its peer, and for the processes that
do the arithmetic.
"""

import threading

import torch


def import_while_waiting() -> threading.Thread:
    """Start a thread that imports what the first optimizer needs, and return it.

    Call it after processes have been started by forking, and when nothing else imports parts of
    torch. Whoever builds an optimizer meanwhile waits for the rest of the import.
    """
    thread = threading.Thread(target=_build_an_optimizer, name="early-imports", daemon=True)
    thread.start()
    return thread


def _build_an_optimizer() -> None:
    import scipy.linalg  # noqa: PLC0415 - for attacks that look for the widest direction
    import scipy.special  # noqa: F401, PLC0415 - for bounds

    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
