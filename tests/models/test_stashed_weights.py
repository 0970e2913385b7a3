"""Each gradient belongs to the weights of its activation, however many gradients came in between.

The oracle copies the whole model for each activation, and knows nothing of autograd's hooks.
"""

import copy
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features
from splitveil.common.models.data_parallel import Learner
from splitveil.common.models.optimizers import build_optimizer, freeze
from splitveil.common.models.settings import AdamOptimizer, OptimizerSettings, SgdOptimizer
from splitveil.passive_party.bottom_trainer import BottomTrainer, LayerTap, stashing_weights

ROWS, COLUMNS, STEPS, SIZE = 96, 6, 12, 8


class Dense(nn.Module):
    """Layers whose weights the backward pass needs, masks, and buffers that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(COLUMNS, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
            nn.Sigmoid(),
            nn.Linear(16, 4),
        )

    def forward(self, features: Features) -> Tensor:
        assert features.numeric is not None
        found: Tensor = self.layers(features.numeric)
        return found


class Frozen(Dense):
    """Layers that do not learn before and behind one that does."""

    def __init__(self) -> None:
        super().__init__()
        freeze(self, ["layers.0", "layers.6"], "frozen")


class Recurrent(nn.Module):
    """Weights that are in a list besides, and a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 5, sparse=True)
        self.recurrent = nn.LSTM(5, 7, batch_first=True)
        self.last = nn.Linear(7, 4)

    def forward(self, features: Features) -> Tensor:
        assert features.categorical is not None
        found: Tensor = self.last(self.recurrent(self.table(features.categorical))[0][:, -1])
        return found


class Scaled(nn.Module):
    """A buffer that the backward pass needs, and that the next forward pass changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, 4)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(4))

    def forward(self, features: Features) -> Tensor:
        assert features.numeric is not None
        found: Tensor = self.first(features.numeric) * self.scale
        self.scale.mul_(1.1)
        return found


def data() -> Features:
    generator = torch.Generator().manual_seed(0)
    return Features(
        torch.randn(ROWS, COLUMNS, generator=generator),
        torch.randint(20, (ROWS, 3), generator=generator),
    )


def batch_of(step: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(SIZE, dtype=np.int64) + SIZE * (step % (ROWS // SIZE))


def answer_to(activation: Tensor, step: int) -> Tensor:
    """Return any gradient that depends on the activation, as a top model's does."""
    return torch.tanh(activation) * (1 + step % 3) / len(activation)


def started(
    build: Callable[[], nn.Module], settings: OptimizerSettings
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(5)
    model = build()
    optimizer = build_optimizer(settings, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, schedule


def trained(
    build: Callable[[], nn.Module], settings: OptimizerSettings, depth: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, optimizer, schedule = started(build, settings)
    learner = Learner(model, optimizer, schedule, torch.device("cpu"))
    trainer = BottomTrainer(learner, data())
    sent: list[Tensor] = []
    for step in range(STEPS + depth - 1):
        if step < STEPS:
            rows = trainer.rows(batch_of(step))
            sent.append(trainer.forward(rows, stashes_weights=depth > 1).clone())
        if step >= depth - 1:
            done = step - depth + 1
            trainer.backward(answer_to(sent[done], done))
    assert trainer.is_between_steps
    return dict(model.state_dict()), sent


def by_copies(
    build: Callable[[], nn.Module], settings: OptimizerSettings, depth: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, optimizer, schedule = started(build, settings)
    features, waiting, sent = data(), deque[tuple[nn.Module, Tensor]](), list[Tensor]()

    def learn(step: int) -> None:
        of_then, activation = waiting.popleft()
        of_then.zero_grad()
        torch.autograd.backward(activation, answer_to(activation.detach(), step))
        pairs = zip(model.parameters(), of_then.parameters(), strict=True)
        for now, then in pairs:
            now.grad = then.grad
        optimizer.step()
        schedule.step()

    for step in range(STEPS):
        of_now = copy.deepcopy(model).train()
        activation = of_now(features.rows(torch.from_numpy(batch_of(step))))
        for now, changed in zip(model.buffers(), of_now.buffers(), strict=True):
            now.copy_(changed)
        waiting.append((of_now, activation))
        sent.append(activation.detach().clone())
        if len(waiting) == depth:
            learn(step - depth + 1)
    while waiting:
        learn(STEPS - len(waiting))
    return dict(model.state_dict()), sent


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (Dense, SgdOptimizer(kind="sgd", learning_rate=0.1, momentum=0.9)),
        (Dense, AdamOptimizer(kind="adam", learning_rate=0.01)),
        (Frozen, AdamOptimizer(kind="adam", rates={"layers.4": 0.1})),
        (Recurrent, SgdOptimizer(kind="sgd", learning_rate=0.5)),
    ],
    ids=["dense, sgd", "dense, adam", "frozen", "recurrent"],
)
def test_weights_and_activations_are_those_of_copies(
    build: Callable[[], nn.Module], settings: OptimizerSettings, depth: int
) -> None:
    weights, sent = trained(build, settings, depth)
    expected, expected_sent = by_copies(build, settings, depth)
    assert all(torch.equal(*pair) for pair in zip(sent, expected_sent, strict=True))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    strict, _ = trained(build, settings, 1)
    assert depth == 1 or any(not torch.equal(weights[name], strict[name]) for name in strict)


def test_a_buffer_that_the_next_pass_changes_is_the_one_of_its_own_pass() -> None:
    settings = SgdOptimizer(kind="sgd", learning_rate=0.1)
    weights, _ = trained(Scaled, settings, 2)
    model, optimizer, schedule = started(Scaled, settings)
    features = data()
    passes: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, scale, activation
    for step in range(STEPS + 1):
        if step < STEPS:
            assert features.numeric is not None
            rows = features.numeric[torch.from_numpy(batch_of(step))]
            scale = 1.1**step * torch.ones(4)
            with torch.no_grad():
                assert isinstance(model, Scaled)
                passes.append((rows, scale, model.first(rows) * scale))
        if step:
            of_rows, of_scale, activation = passes[step - 1]
            gradient = answer_to(activation, step - 1) * of_scale
            assert isinstance(model, Scaled)
            model.first.weight.grad, model.first.bias.grad = gradient.T @ of_rows, gradient.sum(0)
            optimizer.step()
            schedule.step()
    expected = model.state_dict()["first.weight"]
    assert torch.allclose(weights["first.weight"], expected, rtol=1e-4, atol=1e-6)


def test_a_model_that_changes_what_its_backward_pass_needs_is_refused_as_without_copies() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(COLUMNS, 4)

        def forward(self, values: Tensor) -> Tensor:
            found = torch.sigmoid(self.layer(values))
            later = found * 2
            found.add_(1)
            return later

    model, values = Careless(), torch.randn(3, COLUMNS)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.backward(model(values).sum())
    with stashing_weights(model):
        activation = model(values)
    with pytest.raises(RuntimeError, match=r"in place .* of shape \(3, 4\)"):
        torch.autograd.backward(activation.sum())


def test_a_tap_gets_the_gradient_of_each_batch_in_turn() -> None:
    model, optimizer, schedule = started(Dense, SgdOptimizer(kind="sgd", learning_rate=0.1))
    assert isinstance(model, Dense)
    taps = {"last": LayerTap(model.layers[-1]).take}
    learner = Learner(model, optimizer, schedule, torch.device("cpu"), taps)
    trainer = BottomTrainer(learner, data())
    sent = [
        trainer.forward(trainer.rows(batch_of(step)), stashes_weights=True) for step in range(3)
    ]
    for step, activation in enumerate(sent):
        gradient = answer_to(activation, step)
        assert torch.equal(trainer.backward(gradient)["last"], gradient)
