"""A model that several processes compute; here, each process is a thread with queues for a line."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.conv import ConvTop
from splitveil.common.models.dense import MlpBottom
from splitveil.common.models.settings import ConvModel, TabularModel
from splitveil.common.models.spread_model import RowForm, SpreadModel, check_spreadable
from splitveil.common.models.worker import Replica, Worker
from splitveil.common.models.worker_line import Order, Pending, WorkerLine
from splitveil.passive_party.bottom_trainer import stashing_weights

CPU = torch.device("cpu")
OWN = FeatureShapes(3, (5, 4), bins=(2, 7))
TOP = RowForm((6, 8, 8), OWN)


class _Queued:
    def __init__(self, into: Tensor | None, queue: "SimpleQueue[Tensor]") -> None:
        self._into = into
        self._queue = queue

    def wait(self, _within: object) -> None:
        if self._into is not None:
            self._into.copy_(self._queue.get(timeout=60))


class QueueLine(WorkerLine):
    """The line within one process: a queue for each pair of ranks."""

    def __init__(self, rank: int, queues: "list[list[SimpleQueue[Tensor]]]") -> None:
        super().__init__(rank, len(queues))
        self._queues = queues

    def send(self, values: Tensor, to: int) -> Pending:
        queue = self._queues[self.rank][to]
        queue.put(values.detach().clone())
        return Pending(_Queued(None, queue), values, self._noticing)

    def begin_receiving(self, into: Tensor, source: int) -> Pending:
        return Pending(_Queued(into, self._queues[source][self.rank]), into, self._noticing)


@contextmanager
def workers(size: int, build: Callable[[], Replica]) -> Iterator[WorkerLine]:
    """Give rank 0's line to workers with these copies of its model; let them end in the end."""
    queues: list[list[SimpleQueue[Tensor]]] = [
        [SimpleQueue() for _ in range(size)] for _ in range(size)
    ]
    threads = [
        threading.Thread(
            target=Worker(QueueLine(rank, queues), lambda _: build()).work, daemon=True
        )
        for rank in range(1, size)
    ]
    for thread in threads:
        thread.start()
    line = QueueLine(0, queues)
    line.begin({})
    try:
        yield line
    finally:
        line.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("form", [TOP, RowForm(None, FeatureShapes(0, (), (1, 2, 2), "float32"))])
def test_a_form_of_rows_survives_the_way_to_a_worker(form: RowForm) -> None:
    assert RowForm.from_json(json.loads(json.dumps(form.to_json()))) == form


def top(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ConvTop(ConvModel(kind="conv", channels=(4,), hidden=(8,)), (6, 8, 8), OWN)


def top_replica(seed: int) -> Replica:
    return Replica(top(seed), TOP, CPU)


def own_features(rows: int) -> Features:
    return Features(torch.randn(rows, 3), torch.randint(0, 4, (rows, 2)))


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (2, 7), (3, 2), (3, 64)])
def test_outputs_and_gradients_are_those_of_one_process(size: int, rows: int) -> None:
    """Also for batches that do not divide evenly, or have fewer rows than there are processes."""
    model = top(seed=1)
    with workers(size, partial(top_replica, 2)) as line:  # the weights come from rank 0
        spread = SpreadModel(model, line)
        for _ in range(2):
            cut, own = torch.randn(rows, 6, 8, 8), own_features(rows)
            labels = torch.randint(0, 2, (rows,)).float()

            def gradients(compute: Any) -> list[Tensor]:
                given = cut.clone().requires_grad_()  # noqa: B023 (called at once)
                outputs = compute(given, own)  # noqa: B023
                loss = nn.functional.binary_cross_entropy_with_logits(outputs, labels)  # noqa: B023
                (raw,) = torch.autograd.grad(loss, given, retain_graph=True)
                return [outputs, raw, *torch.autograd.grad(loss, list(model.parameters()))]

            for found, expected in zip(gradients(spread), gradients(model), strict=True):
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
            SGD(model.parameters(), lr=0.1).step()


def test_a_step_that_is_computed_again_has_the_same_bits() -> None:
    model = top(seed=1)
    cut, own = torch.randn(50, 6, 8, 8), own_features(50)
    with workers(3, partial(top_replica, 1)) as line:
        spread = SpreadModel(model, line)
        first, again = (
            torch.autograd.grad(spread(cut, own).square().sum(), list(model.parameters()))
            for _ in range(2)
        )
    assert all(map(torch.equal, first, again))


def bottom(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MlpBottom(TabularModel(kind="tabular", hidden=(8,)), OWN, (4,))


def test_a_gradient_may_come_when_newer_batches_have_been_learned_from() -> None:
    """As with a pipeline: each gradient is that of the weights of its activation."""

    def trained(model: nn.Module, compute: Any) -> list[Tensor]:
        optimizer, waiting = SGD(model.parameters(), lr=0.1), []
        for batch in batches:
            with stashing_weights(model):
                waiting.append(compute(batch))
            if len(waiting) == 2:
                optimizer.zero_grad()
                waiting.pop(0).square().sum().backward()
                optimizer.step()
        return list(model.parameters())

    def replica() -> Replica:
        model = bottom(seed=2)
        return Replica(model, RowForm(None, OWN), CPU, (), 2, partial(stashing_weights, model))

    model, alone = bottom(seed=1), bottom(seed=1)
    batches = [own_features(10) for _ in range(4)]
    with workers(2, replica) as line:
        found = trained(model, SpreadModel(model, line))
    for one, wanted in zip(found, trained(alone, alone), strict=True):
        torch.testing.assert_close(one, wanted)


def test_weights_that_a_batch_does_not_use_have_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, features: Features) -> Tensor:
            assert features.numeric is not None
            output: Tensor = self.used(features.numeric) * self.frozen
            return output

    model = Partly()
    with workers(2, lambda: Replica(Partly(), RowForm(None, FeatureShapes(3)), CPU)) as line:
        torch.autograd.backward(SpreadModel(model, line)(Features(torch.randn(5, 3))).sum())
    assert model.used.weight.grad is not None
    assert model.idle.weight.grad is None
    assert model.frozen.grad is None


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(2), "looks at a whole batch"),
        (nn.Dropout(0.1), "set its dropout to 0"),
        (nn.Embedding(5, 2, sparse=True), r"optimizer\.sparse_from_rows"),
        (nn.Linear(2, 2).double(), "float32"),
    ],
)
def test_models_whose_shares_do_not_add_up_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_spreadable(nn.Sequential(layer), "bottom_model")
    check_spreadable(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), "bottom_model")


def test_a_worker_shows_that_it_lives() -> None:
    with workers(2, partial(top_replica, 1)) as line:
        line.check_all_alive()
        line.order(Order("ping"), 1).wait()
        assert line.receive(torch.zeros(1), 1).item() == 1
