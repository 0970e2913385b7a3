"""Imports, while the parties align, what only training needs.

torch imports its compiler when the first optimizer is built, which takes more than a second of CPU
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
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
