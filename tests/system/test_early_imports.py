"""What is needed only later is imported while the parties align, and torch's compiler never."""

import subprocess
import sys

STEP = """
import sys
import numpy as np
import torch
from splitveil.common.data.features import Features
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.settings import AdamOptimizer
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.common.party.early_imports import FOR_ATTACKS, import_while_waiting
from splitveil.common.privacy.cross_fitting import LIBRARIES, cross_fitted_predictions

class Bottom(torch.nn.Linear):
    def forward(self, features):
        return super().forward(features.numeric)
"""

PARTY = """
bottom = Bottom(3, 2)
optimizer = build_optimizer(AdamOptimizer(kind="adam"), bottom)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
features = Features(torch.ones(4, 3))
trainer = BottomTrainer(
    model=bottom,
    optimizer=optimizer,
    schedule=schedule,
    features=features,
    device=torch.device("cpu"),
)
before = bottom.weight.detach().clone()
sent = trainer.forward(trainer.rows(np.arange(4)))
trainer.backward(torch.ones_like(sent))
trainer.load_state_dict(trainer.state_dict())
print(bool((bottom.weight < before).all()), "sympy" in sys.modules, "torch._dynamo" in sys.modules)
"""

MEASURED = """
import_while_waiting(*FOR_ATTACKS, *LIBRARIES).join()
before = len(sys.modules)
generator = np.random.default_rng(0)
rows = generator.normal(size=(60, 2))
cross_fitted_predictions(rows, (rows[:, 0] > 0).astype(np.int64))
from scipy.stats import rankdata
print(before > 1000, len(sys.modules) - before)
"""


def test_a_step_of_the_passive_party_imports_no_compiler_of_torch() -> None:
    assert output_of(STEP + PARTY) == ["True", "False", "False"]


def test_what_the_end_of_a_measured_run_needs_is_imported_early() -> None:
    was_imported, later = output_of(STEP + MEASURED)
    assert was_imported == "True"
    assert int(later) < 20


def output_of(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
