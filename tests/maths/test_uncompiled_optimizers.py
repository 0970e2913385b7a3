"""Optimizers that do not import torch's compiler take torch's own steps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from splitveil.common.models.uncompiled_optimizers import Adam, Sgd, SparseAdam

PAIRS = [
    pytest.param(Adam, torch.optim.Adam, {"fused": True, "weight_decay": 0.1}, id="adam"),
    pytest.param(SparseAdam, torch.optim.SparseAdam, {"lr": 0.1}, id="sparse_adam"),
    pytest.param(Sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, id="sgd"),
]


@pytest.mark.parametrize(("ours", "torchs", "values"), PAIRS)
def test_steps_have_the_bits_of_torchs_own(
    ours: type[Optimizer], torchs: type[Optimizer], values: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    table = nn.Embedding(7, 3, sparse=ours is SparseAdam)
    beside = copy.deepcopy(table)
    begun = table.weight.detach().clone()
    learned = after_steps(ours, table, values, steps=5)
    expected = after_steps(torchs, beside, values, steps=5)
    assert torch.equal(learned, expected)
    assert not torch.equal(learned, begun)


@pytest.mark.parametrize(("ours", "torchs", "values"), PAIRS)
def test_a_state_of_torchs_own_is_continued(
    ours: type[Optimizer], torchs: type[Optimizer], values: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    table = nn.Embedding(7, 3, sparse=ours is SparseAdam)
    optimizer = torchs(table.parameters(), **values)
    learn(optimizer, table, 0)
    beside = copy.deepcopy(table)
    continued = ours(beside.parameters(), **values)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert continued.state_dict().keys() == optimizer.state_dict().keys()
    learn(continued, beside, 1)
    learn(optimizer, table, 1)
    assert torch.equal(table.weight, beside.weight)


def test_a_closure_is_computed_with_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = Sgd([weight], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        torch.autograd.backward(loss)
        return loss.detach()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 2
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_hooks_are_called_around_each_step() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = Sgd([weight], lr=0.5)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(f"before {weight[0].item()}"))
    optimizer.register_step_post_hook(lambda *_: called.append(f"after {weight[0].item()}"))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert called == ["before 1.0", "after 0.5"]


def test_gradients_are_cleared_as_torch_clears_them() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = Sgd([weight], lr=0.5)
    weight.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(weight.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert weight.grad is None


def after_steps(
    kind: type[Optimizer], table: nn.Embedding, values: dict[str, Any], steps: int
) -> Tensor:
    optimizer = kind(table.parameters(), **values)
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    for number in range(steps):
        learn(optimizer, table, number)
        schedule.step()
    return table.weight.detach()


def learn(optimizer: Optimizer, table: nn.Embedding, number: int) -> None:
    optimizer.zero_grad()
    table(torch.tensor([number, number + 1])).square().sum().backward()
    optimizer.step()
