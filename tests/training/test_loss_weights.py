"""Weights of rows and classes enter the loss, and no bound that they would break is promised.

With noisy labels, tests/defenses/test_noisy_label_view.py shows that weights leave the
peer's view a function of the release.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitveil.active_party.defenses.interface import Step, TopModel
from splitveil.active_party.training.label_kinds import (
    LossWeights,
    OrdinaryObjective,
    cross_entropy_of,
    weighted_cross_entropy,
)
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.leakage import auc
from splitveil.common.settings import validate
from tests.support import simulation
from tests.support.equality import assert_same_weights
from tests.support.runs import write_example
from tests.support.simulation import ActiveRecording, Simulation

GAUSSIAN = "defense={name: noisy_label, insecure_noise_seed: 7}"
WEIGHTED = "data.weight_column=weight"
LABEL_FREE = "data.weights_are_label_free=true"
RANDOMISED = "defense={name: noisy_label, mechanism: {kind: randomized_response, epsilon: 1}}"
PERSISTENT = "defense={name: marvell, noise: persistent, strength: {power_ratio: 4}}"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    found: list[Step] = []
    monkeypatch.setattr(ActiveRecording, "on_step", lambda _self, _batch, one: found.append(one))
    return found


def weigh(folder: Path, weight_of: Any, *, header: str = "weight") -> None:
    lines = (folder / "active.csv").read_text().splitlines()
    more = [f"{line},{weight_of(int(line.split(',')[1]))}" for line in lines[1:]]
    (folder / "active.csv").write_text("\n".join([f"{lines[0]},{header}", *more]) + "\n")


def met(folder: Path, *active: str) -> Simulation:
    run = simulation.build(
        simulation.read_settings(
            folder, ["defense={name: none}", f"runs_dir={folder / 'runs'}", *active]
        )
    )
    run.meet()
    return run


# ---- the loss ----


def by_hand(
    logits: Tensor, shares: Tensor, of_rows: list[float] | None, of_classes: list[float] | None
) -> float:
    columns = torch.stack((-logits, logits), 1) / 2 if logits.ndim == 1 else logits
    logs = torch.log(torch.softmax(columns.double(), dim=1))
    total = 0.0
    for row in range(len(logs)):
        weight = 1.0 if of_rows is None else of_rows[row]
        for k in range(logs.shape[1]):
            of_class = 1.0 if of_classes is None else of_classes[k]
            total -= weight * of_class * float(shares[row, k]) * float(logs[row, k])
    return total / len(logs)


@pytest.mark.parametrize("of_rows", [None, [0.5, 2.0, 1.0, 0.1, 4.0]])
@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("kind", ["labels", "targets", "class indices", "shares"])
def test_the_loss_is_the_weighted_mean_over_rows(
    of_rows: list[float] | None, kind: str, *, has_classes: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    several = kind in {"class indices", "shares"}
    logits = torch.randn(5, 3, generator=generator) if several else torch.randn(5)
    shares = torch.softmax(torch.randn(5, 3 if several else 2, generator=generator), dim=1)
    if kind in {"labels", "class indices"}:
        shares = torch.nn.functional.one_hot(shares.argmax(1), shares.shape[1]).float()
    labels = {
        "labels": shares[:, 1],
        "targets": shares[:, 1],
        "class indices": shares.argmax(1).float(),
        "shares": shares,
    }[kind]
    of_classes = [0.5, 3.0, 1.5][: shares.shape[1]] if has_classes else None
    weights = LossWeights(
        None if of_rows is None else torch.tensor(of_rows),
        None if of_classes is None else torch.tensor(of_classes),
    )
    found = float(weighted_cross_entropy(logits, labels, weights))
    assert found == pytest.approx(by_hand(logits, shares, of_rows, of_classes), rel=1e-5)


def test_without_weights_it_is_the_same_loss_to_the_bit() -> None:
    logits, labels = torch.randn(64), torch.rand(64)
    plain = cross_entropy_of(logits, labels)
    assert torch.equal(weighted_cross_entropy(logits, labels, LossWeights()), plain)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_class_weights_follow_the_target_and_not_the_label(num_classes: int) -> None:
    """Whatever a defense tells in a label's place, the gradient is a function of that alone."""
    model = nn.Linear(4, 1 if num_classes == 2 else num_classes)
    squeezed = nn.Sequential(model, nn.Flatten(0)) if num_classes == 2 else model
    top = TopModel(WithoutFeatures(squeezed), torch.optim.SGD(model.parameters()), lambda _: 1.0)
    objective = OrdinaryObjective(top, class_weights=torch.arange(1.0, num_classes + 1) ** 2)
    shape = (6,) if num_classes == 2 else (6, num_classes)
    targets = torch.rand(shape)
    activation = torch.randn(6, 4).requires_grad_()

    def gradient(label: float, targets: Tensor) -> Tensor:
        step = Step(labels=torch.full((6,), label), rows=torch.arange(6), activation=activation)
        step.targets = targets
        objective.compute(step)
        return step.gradients

    assert torch.equal(gradient(0.0, targets), gradient(1.0, targets))
    assert not torch.equal(gradient(0.0, targets.flip(0)), gradient(0.0, targets))


class WithoutFeatures(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, activation: Tensor, _own: None) -> Tensor:
        logits: Tensor = self.inner(activation)
        return logits


# ---- the column ----


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_weights_are_in_units_of_the_training_rows_mean(
    example: Path, tmp_path: Path, cache: dict[str, str]
) -> None:
    write_example(tmp_path)
    weigh(tmp_path, lambda label: 0.25 + 3 * label)
    one = met(tmp_path, WEIGHTED, *(f"data.source.{k}={tmp_path}/{v}" for k, v in cache.items()))
    weigh(tmp_path, lambda label: 10 * (0.25 + 3 * label), header="tenfold")
    ten = met(tmp_path, "data.weight_column=tenfold")
    for before, after in zip(one.weights().values(), ten.weights().values(), strict=True):
        assert torch.allclose(before, after, atol=1e-5)
    plain = met(tmp_path)
    with pytest.raises(AssertionError):
        assert_same_weights(one.weights(), plain.weights())


def test_a_weight_for_each_class_is_one_for_each_of_its_rows(
    tmp_path: Path, steps: list[Step]
) -> None:
    """Up to the scale: weights of rows are divided by their mean over the training rows."""
    write_example(tmp_path)
    weigh(tmp_path, lambda label: 1 + 3 * label)
    run = met(tmp_path, "data.class_weights=[1, 4]")
    of_classes = steps.pop(0).gradients
    steps.clear()
    met(tmp_path, WEIGHTED)
    rows = run.active.seen.rows
    assert rows is not None
    labels = PartyData.load(run.active.settings.data, tmp_path).labels_at(rows.file_rows)
    mean = float((1 + 3 * labels[rows.splits["train"]]).mean())
    assert torch.allclose(of_classes, mean * steps[0].gradients, rtol=1e-4, atol=1e-8)


def test_a_rows_weight_is_part_of_what_a_label_moves(tmp_path: Path, steps: list[Step]) -> None:
    """Persistent noise is measured by it, and oracles know it."""
    write_example(tmp_path)
    weigh(tmp_path, lambda label: 1)
    met(tmp_path, PERSISTENT)
    plain = steps[0]
    steps.clear()
    lines = (tmp_path / "active.csv").read_text().splitlines()
    drawn = np.random.default_rng(1).uniform(0.1, 3, len(lines))
    changed = [f"{line.rpartition(',')[0]},{w}" for line, w in zip(lines[1:], drawn, strict=False)]
    (tmp_path / "active.csv").write_text("\n".join([lines[0], *changed]) + "\n")
    met(tmp_path, PERSISTENT, WEIGHTED, LABEL_FREE)
    for found in (plain, steps[0]):
        assert found.slopes is not None
        residuals = (found.probabilities - found.labels)[:, None]
        assert torch.allclose(found.gradients, residuals * found.slopes, rtol=1e-4, atol=1e-9)
    assert not torch.allclose(plain.gradients, steps[0].gradients, rtol=1e-2)


def loaded(folder: Path, weight: str, cache: dict[str, str], **values: str) -> PartyData:
    (folder / "x.csv").write_text(f"id,label,w\na,1,2\nb,0,{weight}\n")
    given = {"source": {"kind": "csv", "path": "x.csv", **cache}, "id_column": "id", **values}
    settings = validate(DataSettings, given | {"label_column": "label"}, "data")
    return PartyData.load(settings, folder)


@pytest.mark.parametrize("weight", ["0", "-1", "", "nan", "1000001", "secret"])
@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_a_bad_weight_is_refused(tmp_path: Path, weight: str, cache: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"'w': expected a weight above 0.*row 2") as refused:
        loaded(tmp_path, weight, cache, weight_column="w")
    assert "secret" not in str(refused.value)


def test_weights_belong_to_the_data_of_a_run(tmp_path: Path) -> None:
    digests = set()
    for weight in (1, 2):
        for more in ({}, {"weight_column": "w"}):
            digests.add(loaded(tmp_path, str(weight), {}, **more).digest(None))
    assert len(digests) == 3


# ---- what is refused, and why ----

REFUSALS: dict[str, tuple[list[str], str | None]] = {
    "rows, gaussian": ([GAUSSIAN, WEIGHTED], "weights_are_label_free"),
    "rows, randomised": ([RANDOMISED, WEIGHTED], "weights_are_label_free"),
    "rows, persistent": ([PERSISTENT, WEIGHTED], "weights_are_label_free"),
    "rows without labels, gaussian": ([GAUSSIAN, WEIGHTED, LABEL_FREE], None),
    "rows without labels, persistent": ([PERSISTENT, WEIGHTED, LABEL_FREE], None),
    "rows, measured": (["defense={name: marvell}", WEIGHTED], None),
    "rows, none": (["defense={name: none}", WEIGHTED], None),
    "classes, gaussian": ([GAUSSIAN, "data.class_weights=[1, 2]"], None),
    "classes, randomised": ([RANDOMISED, "data.class_weights=[1, 2]"], None),
    "classes, persistent": ([PERSISTENT, "data.class_weights=[1, 2]"], "persistent noise"),
    "classes, gafm": (["defense={name: gafm}", "data.class_weights=[1, 2]"], "loss of its own"),
    "rows, gafm": (["defense={name: gafm}", WEIGHTED, LABEL_FREE], "loss of its own"),
    "too many classes": (["data.class_weights=[1, 2, 3]"], "expected 2 numbers"),
    "about nothing": ([LABEL_FREE], "is about a weight_column"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_weights_that_would_break_a_bound_are_refused(example: Path, what: str) -> None:
    overrides, expected = REFUSALS[what]
    if expected is None:
        simulation.read_settings(example, overrides)
        return
    with pytest.raises(SettingsError, match=expected):
        simulation.read_settings(example, overrides)


def test_a_passive_party_has_no_weights(example: Path) -> None:
    for override in (WEIGHTED, "data.class_weights=[1, 2]"):
        with pytest.raises(SettingsError, match="needs a label_column"):
            simulation.read_settings(example, [], [override])


def test_weights_that_depend_on_labels_would_tell_them(tmp_path: Path, steps: list[Step]) -> None:
    """The reason of the refusal: from the lengths of what noisy labels send, to a claim."""
    write_example(tmp_path)
    weigh(tmp_path, lambda label: 1 + 9 * label)
    leaks = {}
    for name, more in (("plain", []), ("by the label", [WEIGHTED, LABEL_FREE])):
        met(tmp_path, GAUSSIAN, *more)
        lengths = torch.cat(
            [torch.linalg.vector_norm(one.defended.gradient, dim=1) for one in steps]
        )
        leaks[name] = auc(lengths, torch.cat([one.labels for one in steps]))
        steps.clear()
    assert leaks["by the label"] > leaks["plain"] + 0.2
    assert leaks["by the label"] > 0.75
