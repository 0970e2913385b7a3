"""Models of one's own: modules go into ``simulate``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitveil import models, predict, simulate
from splitveil.common.errors import SettingsError
from splitveil.common.models.factory import build_bottom_model
from tests.api.test_simulate import SHORT, Columns, columns, columns_of, weights_of
from tests.models.test_models import custom

__all__ = ["columns"]


class Embedding(nn.Module):
    def __init__(self, shapes: models.FeatureShapes, width: int = 16) -> None:
        super().__init__()
        (slots,) = shapes.vocabulary_sizes
        self.table = nn.Embedding(slots, 3)
        self.dense = nn.Linear(shapes.numeric_dim + 3, width)

    def forward(self, numbers: Tensor, categorical: Tensor) -> Tensor:
        rows = torch.cat([numbers, self.table(categorical[:, 0])], dim=1)
        activation: Tensor = self.dense(rows)
        return activation


class Whole(Embedding):
    def forward(self, features: models.Features) -> Tensor:  # type: ignore[override]
        assert features.numeric is not None
        assert features.categorical is not None
        return super().forward(features.numeric, features.categorical)


SAME: dict[str, Callable[[], Any]] = {
    "a class that gets tensors": lambda: Embedding,
    "a class that gets features": lambda: Whole,
    "a function": lambda: partial(Embedding, width=16),
    "a section": lambda: {"kind": "custom", "module": Embedding, "arguments": {"width": 16}},
    "text": lambda: {"kind": "custom", "module": f"{__name__}:Embedding"},
}


@pytest.fixture(scope="module")
def expected(columns: Columns) -> dict[str, Tensor]:
    return trained(columns, SAME["text"]())


def trained(columns: Columns, bottom: Any, seed: int = 3) -> dict[str, Tensor]:
    active, passive = columns
    chosen = {**SHORT, "passive.bottom_model": bottom}
    chosen["active.top_model"] = lambda shapes: nn.Bilinear(16, shapes.numeric_dim, 1)
    (run,) = simulate(
        active=active, passive=passive, key="id", attacks=[], seeds=[seed], settings=chosen
    )
    assert None not in columns_of(predict(run))["probability"]
    return weights_of(run.path, "passive")


@pytest.mark.parametrize("given", SAME)
def test_a_model_is_a_class_a_function_or_text_with_the_same_bits(
    given: str, columns: Columns, expected: dict[str, Tensor]
) -> None:
    found = trained(columns, SAME[given]())
    assert found.keys() == {"table.weight", "dense.weight", "dense.bias"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_run_trains_a_copy_of_an_instance(columns: Columns) -> None:
    own = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.0))
    before = own.get_parameter("0.weight").detach().clone()
    active, passive = columns
    numbers = {name: passive[name] for name in ("id", "x0", "x1")}
    still = {**SHORT, "passive.optimizer.learning_rate": 1e-30, "passive.bottom_model": own}
    runs = simulate(active=active, passive=numbers, key="id", attacks=[], seeds=2, settings=still)
    assert torch.equal(own.get_parameter("0.weight"), before)
    for run in runs:
        assert torch.equal(weights_of(run.path, "passive")["0.weight"], before)
    first, second = (weights_of(run.path, "active") for run in runs)
    assert not torch.equal(first["layers.output.weight"], second["layers.output.weight"])
    with pytest.raises(
        SettingsError, match=r"Linear\.forward has no parameter for the categorical"
    ):
        trained(columns, nn.Linear(2, 16))


def test_another_process_says_that_an_object_was_given_to_simulate() -> None:
    with pytest.raises(SettingsError, match=r"given to simulate .* name it package\.module:Net"):
        build_bottom_model(
            custom("splitveil.library.handed_over:Net"), models.FeatureShapes(2), (4,), seed=0
        )
