"""The copy of the top model that is fitted to the true labels after the run."""

import pytest
import torch
from torch import Tensor, nn

from splitveil.active_party.defenses.projected.features import CutMemory
from splitveil.active_party.training.own_models import Fitting, KnownRows, refit_top


def known(labels: Tensor, seed: int = 1) -> KnownRows:
    """Return rows whose second activation is the label, seen through noise."""
    generator = torch.Generator().manual_seed(seed)
    memory = CutMemory(len(labels), torch.device("cpu"))
    noise = torch.randn(len(labels), 3, generator=generator)
    memory.note(torch.arange(len(labels)), noise + labels[:, None] * torch.tensor([0.0, 2.0, 0.0]))
    return KnownRows(labels, None, memory)


class Top(nn.Module):
    """A linear top model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, activation: Tensor, _features: object) -> Tensor:
        logits: Tensor = self.layer(activation).squeeze(1)
        return logits


FITTING = Fitting(lambda model: torch.optim.Adam(model.parameters(), lr=0.05), 32, seed=5)


def test_the_refit_learns_the_true_labels_and_leaves_the_model_alone() -> None:
    labels = (torch.arange(400) % 3 == 0).float()
    model, rows = Top(), known(labels)
    found = refit_top(model, rows, torch.arange(0, 400, 2), FITTING)
    logits = rows.logits(found, torch.arange(1, 400, 2))
    others = labels[1::2]
    assert float(logits[others == 1].mean() - logits[others == 0].mean()) > 1.0
    assert all(bool((value == 0).all()) for value in model.state_dict().values())
    again = refit_top(model, rows, torch.arange(0, 400, 2), FITTING)
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in found.state_dict().items()
    )


@pytest.mark.parametrize("rows", [2, 3, 10, 200])
def test_the_refit_copes_with_one_positive_and_with_few_rows(rows: int) -> None:
    labels = torch.zeros(rows)
    labels[rows // 2] = 1
    found = refit_top(Top(), known(labels), torch.arange(rows), FITTING)
    assert all(bool(value.isfinite().all()) for value in found.state_dict().values())


def test_the_refit_does_not_move_the_random_numbers_of_a_run_that_goes_on() -> None:
    model = Dropping()
    state = torch.get_rng_state()
    refit_top(model, known((torch.arange(50) % 2).float()), torch.arange(50), FITTING)
    assert torch.equal(torch.get_rng_state(), state)


class Dropping(Top):
    """A top model that draws random numbers in training."""

    def forward(self, activation: Tensor, features: object) -> Tensor:
        return super().forward(nn.functional.dropout(activation, training=self.training), features)
