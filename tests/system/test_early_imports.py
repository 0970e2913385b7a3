"""What training alone needs is imported while the parties align, in another thread."""

import subprocess
import sys

PROGRAM = """
import sys, threading
from splitveil.common.party.early_imports import import_while_waiting
before = set(sys.modules)
import_while_waiting().join()
new = set(sys.modules) - before
import torch
rest = set(sys.modules)
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.Adam([weight], fused=True)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
print(len(new), len(set(sys.modules) - rest), float(weight[0].detach()) < 1)
"""


def test_the_first_step_of_an_optimizer_imports_nothing_any_more() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    early, later, has_learned = found.stdout.split()
    assert has_learned == "True"
    assert int(early) > 100
    assert int(later) < int(early) / 20
