"""Projected batches: the length of every row's weights, and a bound that is met and not passed."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses import (
    DefenseContext,
    NoiseSecrets,
    NoisyLabelDefense,
    RawBatch,
)
from splitveil.active_party.defenses.exact_auc import gaussian_auc, strength_for_auc
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.interface import Defense, LabelledRows
from splitveil.active_party.defenses.label_batches import (
    design_of,
    features_of,
    noisy_sums,
    rebuild,
)
from splitveil.active_party.defenses.label_mechanisms import ProjectedBatches
from splitveil.active_party.defenses.noise import secure_normal
from splitveil.common.privacy.covers import Covers
from splitveil.common.privacy.leakage import leak_auc

ROWS, WIDTH = 96, 12


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_hot_rows() -> Tensor:
    return torch.eye(ROWS)[:, :WIDTH]


CHOSEN: dict[str, Callable[[], Tensor]] = {
    "a model's": lambda: drawn(ROWS, WIDTH),
    "an image": lambda: drawn(ROWS, 3, 8, 8),
    "one huge row": lambda: drawn(ROWS, WIDTH).index_fill(0, torch.tensor([7]), 1e30),
    "one-hot rows": one_hot_rows,
    "constant": lambda: torch.full((ROWS, WIDTH), 3.0),
    "zero": lambda: torch.zeros(ROWS, WIDTH),
    "denormal": lambda: 1e-42 * drawn(ROWS, WIDTH),
    "largest": lambda: torch.finfo(torch.float32).max * drawn(ROWS, WIDTH).sign(),
    "collinear": lambda: drawn(ROWS, 1).expand(ROWS, WIDTH),
    "two groups": lambda: torch.where(torch.arange(ROWS) < 2, 1e4, 0.0)[:, None].expand(-1, WIDTH),
    "one row": lambda: drawn(1, WIDTH),
    "fewer rows than the rank": lambda: drawn(5, WIDTH),
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("num_logits", [0, 3])
def test_no_label_weighs_more_than_one_whatever_the_activations(name: str, num_logits: int) -> None:
    """In exact arithmetic on the grid, which is what the bound rests on."""
    activation = CHOSEN[name]()
    shape = (len(activation), num_logits) if num_logits else (len(activation),)
    features = features_of(activation, drawn(*shape, seed=2))
    assert float(features.abs().max()) <= 4
    design = design_of(features, 8)
    assert 1 <= design.shape[1] <= 8
    assert torch.equal(design * 2**20, (design * 2**20).round())
    on_grid = (design * 2**20).long()
    assert int(on_grid.square().sum(dim=1).max()) <= 2**40


def test_nearly_every_row_is_charged_what_the_longest_is() -> None:
    design = design_of(features_of(drawn(1024, 32), drawn(1024)), 24)
    lengths = torch.linalg.vector_norm(design, dim=1)
    assert float((lengths > 0.999).double().mean()) > 0.95


def test_the_exact_likelihood_ratio_of_a_label_meets_the_bound_and_does_not_pass_it() -> None:
    """All other labels are known. Noise a fifth smaller is found out.

    30,000 releases per label: 5 standard errors of .0024.
    """
    mu, draws = 0.358, 30_000
    generator = np.random.default_rng(1)
    design = design_of(features_of(drawn(ROWS, WIDTH), drawn(ROWS)), 8)
    lengths = torch.linalg.vector_norm(design, dim=1)
    row = int(lengths.argmax())
    truth = torch.from_numpy(generator.integers(2, size=(ROWS, 1)).astype(float))

    def measured(deviation: float) -> float:
        scores, labels = [], []
        for label in (0.0, 1.0):
            truth[row] = label
            key = key_from_insecure_seed(int(label))
            normal = secure_normal(8 * draws, torch.float64, key).reshape(8, draws)
            told = noisy_sums(design, truth, deviation * normal)
            others = truth.clone()
            others[row] = 0.0
            # The log likelihood ratio is linear in the release.
            scores.append(design[row] @ (told - design.T @ others))
            labels.append(torch.full((draws,), label))
        return leak_auc(torch.cat(scores), torch.cat(labels))

    bound = gaussian_auc(mu)
    assert bound == pytest.approx(0.6, abs=1e-3)
    assert abs(measured(1 / mu) - bound) < 0.012
    assert measured(0.8 / mu) > bound + 0.012


class Counted:
    """Noise from a key and a counter, so that a second defense draws the same."""

    def __init__(self, seed: int) -> None:
        self._seed, self._draws = seed, 0

    def __call__(self) -> bytes:
        self._draws += 1
        return key_from_insecure_seed(1000 * self._seed + self._draws)


def build(num_classes: int = 2, seed: int = 1, **settings: float) -> Defense:
    mechanism = ProjectedBatches.model_validate({"kind": "projected_batches"} | settings)
    return NoisyLabelDefense(mechanism=mechanism).build(
        DefenseContext((WIDTH,), num_classes), NoiseSecrets(None, Counted(seed))
    )


def targets_of(defense: Defense, activation: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    rows = torch.arange(len(labels))
    return defense.targets(LabelledRows(rows, labels, activation, lambda: logits))


@pytest.mark.parametrize("num_classes", [2, 4])
def test_targets_are_the_conditional_mean_of_the_labels(num_classes: int) -> None:
    """Against the joint normal distribution of labels and release, inverted as a whole."""
    activation, rank, ratio = drawn(ROWS, WIDTH), 6, 3.0
    labels = torch.arange(ROWS).remainder(num_classes).float()
    logits = 0.5 * drawn(*((ROWS,) if num_classes == 2 else (ROWS, num_classes)), seed=4)
    targets = targets_of(
        build(num_classes, noise_ratio=ratio, rank=rank), activation, labels, logits
    )
    design = design_of(features_of(activation, logits), rank).numpy()
    if num_classes == 2:
        truth, prior = labels.double()[:, None].numpy(), torch.sigmoid(logits.double())[:, None]
    else:
        truth = np.eye(num_classes)[labels.long().numpy()]
        prior, ratio = torch.softmax(logits.double(), dim=1), ratio * math.sqrt(2)
    normal = secure_normal(rank * truth.shape[1], torch.float64, Counted(1)())
    noise = ratio * normal.reshape(rank, -1).numpy()
    told, expected = design.T @ truth + np.round(noise * 2**20) / 2**20, np.empty_like(truth)
    for column in range(truth.shape[1]):
        p = prior[:, column].numpy()
        q = (p * (1 - p)).mean()
        joint = q * design.T @ design + ratio**2 * np.eye(rank)
        gain = q * design @ np.linalg.inv(joint)
        expected[:, column] = p + gain @ (told[:, column] - design.T @ p)
    expected = expected.clip(0, 1)
    if num_classes > 2:
        expected /= expected.sum(axis=1, keepdims=True)
        assert torch.allclose(targets.sum(dim=1), torch.ones(ROWS))
    assert targets.numpy() == pytest.approx(expected.squeeze(), abs=1e-5)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("num_classes", [2, 3])
def test_targets_are_finite_shares_whatever_the_activations(name: str, num_classes: int) -> None:
    activation = CHOSEN[name]()
    labels = torch.arange(len(activation)).remainder(num_classes).float()
    shape = (len(activation),) if num_classes == 2 else (len(activation), num_classes)
    targets = targets_of(build(num_classes), activation, labels, 30 * drawn(*shape))
    assert targets.shape == shape
    assert bool(((targets >= 0) & (targets <= 1)).all())


def test_with_little_noise_and_every_direction_the_labels_come_back() -> None:
    """What the noise hides is not hidden by the projection: a batch of fewer rows than the rank."""
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0])
    defense = build(noise_ratio=0.01, rank=16)
    found = targets_of(defense, drawn(4, WIDTH), labels, torch.zeros(4))
    assert torch.allclose(found, labels, atol=0.05)


def test_every_answer_has_noise_of_its_own_and_its_charge_adds_up() -> None:
    labels, activation = torch.arange(ROWS).remainder(2).float(), drawn(ROWS, WIDTH)
    defense = build(noise_ratio=20.0)
    first, second = (targets_of(defense, activation, labels, torch.zeros(ROWS)) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(
        first, targets_of(build(noise_ratio=20.0), activation, labels, torch.zeros(ROWS))
    )
    charge = defense.defend(RawBatch(torch.ones(ROWS, 3), labels)).report.charge
    assert charge.noise_identity is None
    assert (charge.covers, charge.is_gaussian) == (Covers.ANYBODY, True)
    assert charge.sum_kl == pytest.approx(1 / 400)
    forecast = NoisyLabelDefense(
        mechanism=ProjectedBatches(kind="projected_batches", noise_ratio=20.0)
    ).forecast(DefenseContext((WIDTH,)))
    assert (forecast.configured, forecast.charge.high) == ("fresh", charge.sum_kl)


def test_labels_dealt_out_are_told_as_well_as_the_bound_allows_over_a_run_and_no_better() -> None:
    """The targets of 10 epochs, added up, about labels that no feature knows.

    Within 3 standard errors of .0062; noise a fifth smaller is found out.
    """
    rows, epochs = 8000, 10
    labels = torch.randint(2, (rows,), generator=torch.Generator().manual_seed(5)).float()
    activation, order = drawn(rows, WIDTH, seed=6), torch.Generator().manual_seed(7)
    mu = strength_for_auc(gaussian_auc, 0.65)

    def read(noise_ratio: float) -> float:
        defense, told = build(noise_ratio=noise_ratio, rank=WIDTH + 2), torch.zeros(rows)
        for _ in range(epochs):
            for part in torch.randperm(rows, generator=order).reshape(-1, 80):
                logits = torch.zeros(len(part))
                told[part] += targets_of(defense, activation[part], labels[part], logits)
        return leak_auc(told, labels)

    assert abs(read(math.sqrt(epochs) / mu) - 0.65) < 0.019
    assert read(0.8 * math.sqrt(epochs) / mu) > 0.669


def test_more_classes_share_out_what_is_left_after_clipping() -> None:
    """Rows whose every share is clipped to 0 keep the prediction."""
    design = torch.ones(1, 1, dtype=torch.float64)
    predicted = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    nothing = rebuild(design, torch.full((1, 3), -1e6, dtype=torch.float64), predicted, 1.0)
    assert torch.equal(nothing, predicted)


def test_a_prediction_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        targets_of(build(), drawn(2, WIDTH), torch.zeros(2), torch.tensor([0.0, math.nan]))
