"""The malicious optimizer of active model completion: its factor and its state."""

import copy

import pytest
import torch
from torch import Tensor, nn

from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.settings import (
    SPARSE_FROM_ROWS,
    AdamOptimizer,
    OptimizerSettings,
    SgdOptimizer,
)
from tests.support.amplified_steps import amplified, amplify_steps


def test_a_gradient_that_keeps_its_direction_counts_up_to_five_times() -> None:
    before = torch.tensor([1.0, 1.0, 1.0, -2.0, 0.5, 0.0])
    gradient = torch.tensor([1.0, 3.0, -1.0, -1.0, 9.0, 0.0])
    expected = torch.tensor([2.0, 12.0, -1.0, -1.5, 45.0, 0.0])
    assert torch.allclose(amplified(gradient, before), expected, rtol=1e-5)


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(model(rows).square().sum())
        optimizer.step()


def test_the_second_step_is_given_the_amplified_gradient() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(SgdOptimizer(kind="sgd", learning_rate=0.1), model)
    amplify_steps(optimizer)
    weights = []
    for gradient in (1.0, 2.0, 6.0, -1.0):
        model.weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        weights.append(round(model.weight.item(), 4))
    # 1, then 2 (1 + 2/1), then 6 (1 + 6/6), then -1 (1 - 1/12 counts as 1)
    assert weights == [0.9, 0.3, -0.9, -0.8]


@pytest.mark.parametrize(
    "settings",
    [AdamOptimizer(kind="adam"), SgdOptimizer(kind="sgd"), SgdOptimizer(kind="sgd", momentum=0.9)],
    ids=str,
)
def test_a_resumed_optimizer_continues_bit_for_bit(settings: OptimizerSettings) -> None:
    def start() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = build_optimizer(settings, model)
        amplify_steps(optimizer)
        return model, optimizer

    whole, optimizer = start()
    train(whole, optimizer, range(3))
    weights, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(whole, optimizer, range(3, 6))
    resumed, its_optimizer = start()
    resumed.load_state_dict(weights)
    its_optimizer.load_state_dict(state)
    train(resumed, its_optimizer, range(3, 6))
    assert torch.equal(whole.weight, resumed.weight)


class TableAndLayer(nn.Module):
    """A large table beside a layer; neither one's gradient depends on the other's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SPARSE_FROM_ROWS, 2)
        self.layer = nn.Linear(2, 1)

    def loss(self, step: int) -> Tensor:
        rows: Tensor = self.table(torch.tensor([step, step + 1]))
        values: Tensor = self.layer(torch.full((1, 2), 2.0 + step))
        return rows.square().sum() + values.sum()


def test_sparse_tables_learn_as_they_would_and_the_layers_beside_them_do_not() -> None:
    learned = []
    for amplifies in (False, True):
        torch.manual_seed(0)
        model = TableAndLayer()
        optimizer = build_optimizer(AdamOptimizer(kind="adam"), model)
        if amplifies:
            amplify_steps(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(model.loss(step))
            optimizer.step()
        learned.append(model)
    plain, amplified_too = learned
    assert torch.equal(plain.table.weight, amplified_too.table.weight)
    assert not torch.equal(plain.layer.weight, amplified_too.layer.weight)
