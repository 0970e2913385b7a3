"""The model of the active party's own features alone."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import ensemble
from torch import Tensor, nn

from splitveil import simulate
from splitveil.active_party import results
from splitveil.active_party.training import own_models
from splitveil.active_party.training.boosting import WithTrees, columns_of, with_trees
from splitveil.active_party.training.label_kinds import ClassLabels, LossWeights, NumberLabels
from splitveil.active_party.training.own_models import (
    HELD_OUT_SHARE,
    CutMemory,
    Fitting,
    KnownRows,
    build_alone,
    fit,
    predictions_alone,
)
from splitveil.common.data.features import FeatureEncoder, Features, NumericScaler
from splitveil.common.data.settings import LabelRange
from splitveil.common.privacy.leakage import auc

ENCODER = FeatureEncoder(
    signed_log1p=False,
    numeric=tuple(NumericScaler(name=f"x{j}", shift=0.0, scale=1.0) for j in range(3)),
    categorical=(),
    image=None,
)


def rows(num_classes: int = 2, count: int = 600, seed: int = 1) -> KnownRows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    if num_classes == 2:
        return KnownRows((x[:, 0] > 0.3).float(), Features(x))
    return KnownRows(x.argmax(dim=1).float(), Features(x))


def features_of(own: KnownRows) -> Features:
    assert own.features is not None
    return own.features


def trained(own: KnownRows, num_classes: int = 2) -> nn.Module:
    return fit(
        build_alone(ENCODER, num_classes, seed=3),
        own,
        torch.arange(0, len(own.labels), 2),
        Fitting(lambda model: torch.optim.Adam(model.parameters(), lr=0.01), 32, seed=4, epochs=50),
    )


def test_it_embeds_numbers_where_the_joint_model_does() -> None:
    binned = ENCODER.model_copy(update={"bins": ((0.0, 1.0),) * 3})
    embeds = ["numbers" in str(build_alone(own, 2, seed=3)) for own in (ENCODER, binned)]
    assert embeds == [False, True]


@pytest.mark.parametrize("num_classes", [2, 3])
def test_it_learns_what_the_features_say_of_rows_that_it_has_not_seen(num_classes: int) -> None:
    own = rows(num_classes)
    held_out = torch.arange(1, len(own.labels), 2)
    logits, labels = own.logits(trained(own, num_classes), held_out), own.labels[held_out]
    if num_classes == 2:
        assert auc(logits, labels) > 0.95
    else:
        assert float((logits.argmax(dim=1) == labels).float().mean()) > 0.85


def test_the_same_rows_and_seed_give_the_same_weights_and_disturb_no_random_numbers() -> None:
    own = rows()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    one, other = trained(own), trained(own)
    assert torch.equal(before, torch.get_rng_state())
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_labels_of_rows_outside_the_training_change_nothing() -> None:
    own = rows()
    labels = own.labels.clone()
    labels[1::2] = 1 - labels[1::2]
    for mine, theirs in zip(
        trained(own).parameters(), trained(own._replace(labels=labels)).parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def same_features(labels: torch.Tensor, weights: LossWeights) -> KnownRows:
    """Return rows whose features say nothing, so that the best prediction is a weighted share."""
    return KnownRows(labels, Features(torch.zeros(len(labels), 3)), weights=weights)


def test_rows_and_classes_count_in_it_what_they_count_in_the_joint_model() -> None:
    """Against the minimum of the weighted cross entropy, which is known in closed form."""
    labels = (torch.arange(2000) % 10 < 3).float()
    of_rows = torch.where(torch.arange(2000) % 20 < 10, 1.9, 0.1)
    of_rows[labels == 1] *= 2
    of_rows /= of_rows.mean()
    of_classes = torch.tensor([1.0, 4.0])
    found = {}
    for name, weights in {
        "plain": LossWeights(),
        "rows": LossWeights(of_rows),
        "classes": LossWeights(None, of_classes),
        "both": LossWeights(of_rows, of_classes),
    }.items():
        own = same_features(labels, weights)
        counted = torch.ones(2000) if weights.of_rows is None else weights.of_rows
        if weights.of_classes is not None:
            counted = counted * of_classes[labels.long()]
        training = torch.arange(0, 2000, 2)  # as ``trained`` chooses them
        share = float((counted * labels)[training].sum() / counted[training].sum())
        found[name] = float(predictions_alone(trained(own), features_of(own))[0])
        assert abs(found[name] - share) < 0.05, name
    assert found["rows"] - found["plain"] > 0.1
    assert found["classes"] - found["plain"] > 0.2
    assert found["both"] - found["classes"] > 0.08


def test_weights_of_three_classes_move_the_shares_to_theirs() -> None:
    labels = (torch.arange(3000) % 3).float()
    own = same_features(labels, LossWeights(None, torch.tensor([1.0, 2.0, 5.0])))
    found = predictions_alone(trained(own, 3), features_of(own))[0]
    assert found == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.05)


def test_a_large_table_needs_few_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first, as many whole epochs as 200 rows are."""
    fitted: list[int] = []
    training: list[int] = []

    def noting(model: nn.Module, own: KnownRows, chosen: Tensor, fitting: Fitting) -> nn.Module:
        training.append(len(chosen))
        model.register_forward_hook(
            lambda one, _given, logits: fitted.append(len(logits)) if one.training else None
        )
        return fit(model, own, chosen, fitting)

    monkeypatch.setattr(results, "_ROWS_ALONE", 200)
    monkeypatch.setattr(results, "fit", noting)
    x = np.random.default_rng(1).normal(size=(300, 2))
    simulate(
        active={"id": range(300), "y": (x.sum(axis=1) > 0).astype(int), "own": x[:, 0]},
        passive={"id": range(300), "a": x[:, 1]},
        label="y",
        key="id",
        settings={
            "contract.exchange": "one_shot",
            "contract.split": {"kind": "hash", "train": 0.3, "test": 0.7},
            "passive.bottom_model": {"kind": "pca"},
            "active.serving.fallback": True,
        },
        attacks=[],
        runs=tmp_path,
        threads=1,
    )
    (rows,) = training
    assert 60 < rows < 120
    epochs = sum(fitted) / (rows - round(HELD_OUT_SHARE * rows))
    assert epochs == 1 + 200 // rows


@pytest.mark.parametrize("num_classes", [2, 3])
def test_probabilities_do_not_depend_on_other_rows(num_classes: int) -> None:
    own, model = rows(num_classes), build_alone(ENCODER, num_classes, seed=3)
    together = predictions_alone(model, features_of(own))
    assert together.shape == ((600,) if num_classes == 2 else (600, 3))
    for row in (0, 1, 311, 599):
        one = predictions_alone(model, features_of(own).rows(torch.tensor([row])))
        assert (one[0] == together[row]).all()


# ---- the top model that is fitted to the true labels after the run ----


def known(labels: Tensor, seed: int = 1) -> KnownRows:
    """Return rows whose second activation is the label, seen through noise."""
    generator = torch.Generator().manual_seed(seed)
    memory = CutMemory(len(labels), torch.device("cpu"))
    noise = torch.randn(len(labels), 3, generator=generator)
    memory.note(torch.arange(len(labels)), noise + labels[:, None] * torch.tensor([0.0, 2.0, 0.0]))
    return KnownRows(labels, None, memory)


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, activation: Tensor, _features: object) -> Tensor:
        logits: Tensor = self.layer(activation).squeeze(1)
        return logits


FITTING = Fitting(
    lambda model: torch.optim.Adam(model.parameters(), lr=0.05), 32, seed=5, epochs=20
)


def test_the_refit_learns_the_true_labels_and_leaves_the_model_alone() -> None:
    labels = (torch.arange(400) % 3 == 0).float()
    model, rows = Top(), known(labels)
    found = fit(model, rows, torch.arange(0, 400, 2), FITTING)
    logits = rows.logits(found, torch.arange(1, 400, 2))
    others = labels[1::2]
    assert float(logits[others == 1].mean() - logits[others == 0].mean()) > 1.0
    assert all(bool((value == 0).all()) for value in model.state_dict().values())
    again = fit(model, rows, torch.arange(0, 400, 2), FITTING)
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in found.state_dict().items()
    )


def test_the_trained_model_stays_only_where_the_new_one_is_no_better_on_held_out_rows() -> None:
    labels = (torch.arange(400) % 3 == 0).float()
    rows, training = known(labels), torch.arange(0, 400, 2)
    fresh = fit(Top(), rows, training, FITTING)
    poor, good = Top(), copy.deepcopy(fresh)
    chosen = fit(Top(), rows, training, FITTING, poor)
    for name, value in fresh.state_dict().items():  # nothing of the trained model is in it
        assert torch.equal(value, chosen.state_dict()[name])
    assert fit(Top(), rows, training, FITTING, good) is good
    nn.init.constant_(poor.layer.bias, 9.0)
    assert fit(Top(), rows, training, FITTING, poor) is not poor


def test_the_schedule_goes_through_all_epochs_once() -> None:
    """90 rows in batches of 32 are 3 steps an epoch."""
    rates, asked = [], []

    def build(model: nn.Module) -> torch.optim.Optimizer:
        built = torch.optim.SGD(model.parameters(), lr=0.5)
        built.register_step_pre_hook(
            lambda one, _given, _named: rates.append(one.param_groups[0]["lr"])
        )
        return built

    def halved(step: int, total_steps: int) -> float:
        asked.append(total_steps)
        return 0.5**step

    fit(
        Top(),
        known((torch.arange(100) % 2).float()),
        torch.arange(100),
        Fitting(build, 32, 5, 4, halved),
    )
    assert rates == [0.5 * 0.5**step for step in range(12)]
    assert set(asked) == {12}


@pytest.mark.parametrize("labels", ["two classes", "three classes", "numbers"])
def test_trees_of_tensors_give_what_the_library_gives(
    labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a top model that says nothing, whose mean with them is half of theirs."""
    grown: list[Any] = []
    for name in ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor"):
        noting = partial(grow, getattr(ensemble, name), grown)
        monkeypatch.setattr(ensemble, name, noting)
    generator = torch.Generator().manual_seed(1)
    cut = torch.randn(500, 3, generator=generator)
    own = Features(cut.flip(1).abs(), torch.randint(4, (500, 2), generator=generator))
    given: dict[str, Any] = {
        "two classes": ((cut[:, 0] * cut[:, 1] > 0).float(), ClassLabels()),
        "three classes": (cut.argmax(dim=1).float(), ClassLabels(3)),
        "numbers": (cut[:, 0].sigmoid(), NumberLabels(LabelRange(low=0, high=1))),
    }
    found, kind = given[labels]
    columns, width = columns_of(cut, own), kind.shape_of_row
    model = with_trees(Silent(width), columns, found, kind, LossWeights(torch.rand(500)), seed=3)
    assert isinstance(model, WithTrees)
    expected = torch.from_numpy(grown[0]._raw_predict(columns.numpy())).float()
    halves = model(cut, own)
    assert halves.shape == (500, *width)
    torch.testing.assert_close(2 * halves, expected.view_as(halves), rtol=1e-5, atol=1e-6)
    assert float(halves.std()) > 0.01
    again = WithTrees(Silent(width), *map(int, model.sizes.split()))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(cut, own), halves)


def test_no_trees_grow_on_a_class_of_few_rows() -> None:
    labels = (torch.arange(500) < 19).float()
    columns = torch.randn(500, 2)
    assert with_trees(Top(), columns, labels, ClassLabels(), LossWeights(), seed=3) is None


@pytest.mark.parametrize(
    ("name", "limit", "count"),
    [("ROWS", 200, 200), ("NUMBERS", 3 * 150 + 2, 150), ("COLUMNS", 3, 500), ("COLUMNS", 2, None)],
)
def test_trees_grow_on_no_more_than_so_many_rows(
    name: str, limit: int, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(own_models, f"_MOST_{name}_OF_TREES", limit)
    monkeypatch.setattr(own_models, "with_trees", lambda *given: seen.append(given))
    own = known((torch.arange(1000) % 3 == 0).float())
    own = own._replace(weights=LossWeights(torch.linspace(0.5, 1.5, 1000)))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))[:500]
    assert own.with_trees(Top(), order, 5) is None
    if count is None:
        assert not seen
        return
    ((_, columns, labels, _, (weights, _), _),) = seen
    assert own.memory is not None
    assert own.weights.of_rows is not None
    assert torch.equal(columns, own.memory.at(order[:count]))
    assert torch.equal(labels, own.labels[order[:count]])
    assert torch.equal(weights, own.weights.of_rows[order[:count]])


def test_the_mean_with_trees_is_taken_where_it_is_better() -> None:
    labels = (torch.arange(1000) % 2).float()
    rows = known(labels)
    assert rows.memory is not None
    rows.memory.note(
        torch.arange(1000), torch.rand(1000, 3).sub(0.5) * (2 * labels[:, None] - 1 + 2)
    )
    found = fit(Top(), rows, torch.arange(1000), FITTING._replace(boosting=True))
    assert isinstance(found, WithTrees)
    assert not isinstance(fit(Top(), rows, torch.arange(1000), FITTING), WithTrees)


def grow(real: Callable[..., Any], grown: list[Any], **given: Any) -> Any:
    grown.append(real(**given))
    return grown[-1]


class Silent(nn.Module):
    def __init__(self, shape_of_row: tuple[int, ...]) -> None:
        super().__init__()
        self.shape_of_row = shape_of_row

    def forward(self, activation: Tensor, _own: object) -> Tensor:
        return activation.new_zeros(len(activation), *self.shape_of_row)


@pytest.mark.parametrize("rows", [2, 3, 10, 200])
def test_the_refit_copes_with_one_positive_and_with_few_rows(rows: int) -> None:
    labels = torch.zeros(rows)
    labels[rows // 2] = 1
    found = fit(Top(), known(labels), torch.arange(rows), FITTING)
    assert all(bool(value.isfinite().all()) for value in found.state_dict().values())


def test_the_refit_does_not_move_the_random_numbers_of_a_run_that_goes_on() -> None:
    model = Dropping()
    state = torch.get_rng_state()
    fit(model, known((torch.arange(50) % 2).float()), torch.arange(50), FITTING)
    assert torch.equal(torch.get_rng_state(), state)


class Dropping(Top):
    """A top model that draws random numbers in training."""

    def forward(self, activation: Tensor, features: object) -> Tensor:
        return super().forward(nn.functional.dropout(activation, training=self.training), features)
