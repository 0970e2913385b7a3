"""The defenses of several classes: unbiased, and charged for the pair they leave furthest apart.

Statistical tests reject a wrong alternative: noise of the same power in all directions, or along
the longest gap alone.
"""

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party import defenses
from splitveil.active_party.defenses.class_statistics import measure_classes, squared_distances
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.iso import Isotropic
from splitveil.active_party.defenses.marvell import (
    DetectionError,
    LeakAuc,
    Marvell,
    PowerRatio,
    Strength,
    SumKl,
    pair_divergences,
    power_for_worst_pair,
    solve_shared_noise,
    worst_pair_factor,
)
from splitveil.active_party.defenses.max_norm import MaxNorm
from splitveil.active_party.defenses.noise import AnswerKeys, NoiseSource
from splitveil.active_party.defenses.noisy_label import (
    GaussianLabels,
    LaplaceLabels,
    RandomizedResponse,
    draw_noisy_labels,
    label_leak,
)
from splitveil.active_party.defenses.sum_kl import estimated_auc
from splitveil.common.privacy.leakage import pair_aucs
from tests.support.defenses import build_defense, context_of

SHARES = (0.4, 0.3, 0.25, 0.05)


def softmax_batch(
    rows: int, cut_dim: int = 8, seed: int = 1, shares: tuple[float, ...] = SHARES
) -> tuple[Tensor, Tensor]:
    """Gradients (p - e_y) W of a softmax at the beginning of training, with some spread."""
    generator = np.random.default_rng(seed)
    num_classes = len(shares)
    labels = generator.choice(num_classes, size=rows, p=shares)
    labels[:num_classes] = range(num_classes)
    weights = generator.normal(size=(num_classes, cut_dim))
    residuals = np.full((rows, num_classes), 1 / num_classes) - np.eye(num_classes)[labels]
    spread = 0.02 * generator.normal(size=(rows, cut_dim))
    return torch.from_numpy((residuals @ weights + spread) / rows).float(), torch.tensor(labels)


def noise_of(seed: int) -> NoiseSource:
    return NoiseSource(AnswerKeys(key_from_insecure_seed(seed)))


def marvell(strength: Strength, seed: int = 7, num_classes: int = 4) -> Marvell:
    return Marvell(strength, noise_of(seed), num_classes)


MultiClass = Isotropic | MaxNorm | Marvell
DEFENSES: dict[str, Callable[[int], MultiClass]] = {
    "iso": lambda seed: Isotropic(1.0, noise_of(seed), 4),
    "max_norm": lambda seed: MaxNorm(noise_of(seed), 4),
    "marvell": lambda seed: marvell(PowerRatio(power_ratio=4), seed),
}


@pytest.mark.parametrize(
    ("strength", "allowed"),
    [
        (SumKl(sum_kl=0.25), 0.25),
        (DetectionError(detection_error=0.4), 0.16),
        (LeakAuc(leak_auc=0.6), None),
    ],
)
def test_the_other_strengths_leave_the_worst_pair_what_they_allow(
    strength: Strength, allowed: float | None
) -> None:
    gradients, labels = softmax_batch(400)
    answer = marvell(strength).defend(defenses.Step(gradients, labels))
    found = answer.charge.sum_kl
    if allowed is None:
        from splitveil.active_party.defenses.sum_kl import leak_auc_bound

        assert leak_auc_bound(found) == pytest.approx(0.6, abs=1e-9)
    else:
        assert found == pytest.approx(allowed, rel=1e-9)


def worst_oracle_auc(defended: Tensor, means: Tensor, labels: Tensor) -> float:
    """Leak AUC of the worst pair, given each pair's means and noise covariance."""
    rows = defended.double()
    noise = torch.cov((rows - means[labels]).T)
    worst = 0.0
    for i, j in combinations(range(len(means)), 2):
        # Where there is no noise, rounding to float32 would decide the direction.
        direction = torch.linalg.lstsq(noise, means[i] - means[j], rcond=1e-9).solution
        of_pair = pair_aucs((rows @ direction).numpy(), labels.numpy(), len(means))
        worst = max(worst, float(of_pair.leak().pairs[i, j]))
    return worst


def test_no_pair_is_told_apart_better_than_its_charge_says() -> None:
    """Accepts Phi(sqrt(K/2)) to 0.01; rejects the same power in all directions or on one gap."""
    shares = (0.25, 0.25, 0.25, 0.25)
    gradients, labels = softmax_batch(160_000, cut_dim=16, seed=5, shares=shares)
    means = measure_classes(gradients, labels, 4).means
    # Without spread of their own, so that the noise is all that hides them.
    bare = means[labels].float()
    answer = marvell(PowerRatio(power_ratio=4)).defend(defenses.Step(bare, labels))
    defended = answer.gradient
    charged = estimated_auc(answer.charge.sum_kl)
    measured = worst_oracle_auc(defended, means, labels)
    assert measured == pytest.approx(charged, abs=0.01)
    deviation = math.sqrt(answer.noise_power / 16)
    noise = noise_of(3).standard_normal((160_000, 16), bare)
    assert worst_oracle_auc(bare + deviation * noise, means, labels) > charged + 0.05
    i, j = np.unravel_index(int(squared_distances(means).argmax()), (4, 4))
    gap = means[i] - means[j]
    along = math.sqrt(answer.noise_power) * (gap / gap.norm()).float()
    one_gap = bare + noise[:, :1] * along + 1e-2 * bare.abs().max() * noise
    assert worst_oracle_auc(one_gap, means, labels) > 0.99


def test_a_rare_class_weighs_as_much_as_the_others() -> None:
    gradients, labels = softmax_batch(4_000, shares=(0.49, 0.3, 0.2, 0.01))
    answer = marvell(PowerRatio(power_ratio=4)).defend(defenses.Step(gradients, labels))
    means = measure_classes(gradients, labels, 4).means
    power = 4 * float(squared_distances(means).max())
    by_class, by_share = (
        float(pair_divergences(means, solve_shared_noise(means, weights, power)).max())
        for weights in (torch.ones(4), torch.bincount(labels))
    )
    assert answer.charge.sum_kl == pytest.approx(by_class, rel=1e-6)
    assert by_class < 0.7 * by_share


def test_a_power_ratio_leaves_the_worst_pair_what_the_plan_says() -> None:
    """Over random means of any shape; one long gap reaches the lower end."""
    generator = np.random.default_rng(3)
    lowest, highest = math.inf, 0.0
    for num_classes in (3, 4, 6):
        for _ in range(300):
            scales = 10 ** generator.uniform(-3, 0, 5)
            means = torch.from_numpy(generator.normal(size=(num_classes, 5)) * scales)
            power = 4 * float(squared_distances(means).max())
            weights = torch.full((num_classes,), 1 / num_classes, dtype=torch.float64)
            left = float(pair_divergences(means, solve_shared_noise(means, weights, power)).max())
            assert 0.25 * (1 - 1e-9) <= left <= worst_pair_factor(num_classes) / 4
            lowest, highest = min(lowest, left), max(highest, left)
    assert lowest < 0.26
    assert highest > 3 * lowest  # so that the ratio alone is no charge
    simplex = torch.eye(5, dtype=torch.float64)
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    of_pairs = pair_divergences(simplex, solve_shared_noise(simplex, weights, 4 * 2.0))
    assert float(of_pairs.max()) == pytest.approx(4 / 4, rel=1e-12)  # (K - 1)/s
    charge = defenses.MarvellDefense().charge_model(context_of(num_classes=5))
    assert charge.low == 0.25
    assert charge.high == worst_pair_factor(5) / 4
    assert worst_pair_factor(2) == 1.0


def test_the_power_for_the_worst_pair_is_the_least_that_is_enough() -> None:
    generator = np.random.default_rng(4)
    for _ in range(50):
        means = torch.from_numpy(generator.normal(size=(5, 7)) * 10 ** generator.uniform(-9, 9))
        weights = torch.full((5,), 0.2, dtype=torch.float64)
        power = power_for_worst_pair(means, weights, 0.3)
        for factor, is_enough in ((1 + 1e-9, True), (1 - 1e-6, False)):
            solution = solve_shared_noise(means, weights, factor * power)
            assert (float(pair_divergences(means, solution).max()) <= 0.3) is is_enough
    with pytest.raises(ValueError, match="above 0"):
        power_for_worst_pair(torch.eye(3), torch.full((3,), 1 / 3), 0.0)


def test_iso_is_charged_for_the_longest_gap() -> None:
    gradients, labels = softmax_batch(300, cut_dim=8)
    answer = DEFENSES["iso"](1).defend(defenses.Step(gradients, labels))
    defended = answer.gradient
    means = torch.stack([gradients.double()[labels == k].mean(dim=0) for k in range(4)])
    longest = max(float((a - b).square().sum()) for a, b in combinations(means, 2))
    variance = float(gradients.double().norm(dim=1).max()) ** 2 / 8
    assert answer.charge.sum_kl == pytest.approx(longest / variance, rel=1e-9)
    assert float((defended - gradients).double().var()) == pytest.approx(variance, rel=0.1)


def test_max_norm_is_charged_for_the_pair_with_the_least_noise_on_its_gap() -> None:
    gradients, labels = softmax_batch(300)
    answer = DEFENSES["max_norm"](1).defend(defenses.Step(gradients, labels))
    rows = gradients.double()
    norms = rows.norm(dim=1)
    variances = norms.max() ** 2 - norms**2
    means = [rows[labels == k].mean(dim=0) for k in range(4)]
    charges = []
    for i, j in combinations(range(4), 2):
        gap = means[i] - means[j]
        along = (rows @ (gap / gap.norm()) / norms) ** 2 * variances
        first, second = (float(along[labels == k].mean()) for k in (i, j))
        squared = float(gap.square().sum())
        charges.append(
            (first / second + second / first + squared * (1 / first + 1 / second)) / 2 - 1
        )
    assert answer.charge.sum_kl == pytest.approx(max(charges), rel=1e-6)
    assert max(charges) > 1.5 * min(charges)


def test_before_every_class_was_seen_nothing_is_given_away() -> None:
    gradients, labels = softmax_batch(200)
    three = labels < 3
    defense = marvell(PowerRatio(power_ratio=4))
    answer = defense.defend(defenses.Step(gradients[three], labels[three]))
    defended = answer.gradient
    largest = float(gradients[three].norm(dim=1).max())
    assert answer.charge.sum_kl == 0
    assert float(defended.norm(dim=1).square().mean()) == pytest.approx(largest**2, rel=0.2)
    signal = torch.nn.functional.cosine_similarity(defended, gradients[three]).mean()
    assert abs(float(signal)) < 0.1
    for name in ("iso", "max_norm"):
        unknown = DEFENSES[name](1).defend(defenses.Step(gradients[three], labels[three]))
        assert unknown.charge.sum_kl == math.inf
    later = defense.defend(defenses.Step(gradients, labels))
    assert later.charge.sum_kl > 0
    borrowed = defense.defend(defenses.Step(gradients[three], labels[three]))
    assert borrowed.charge.sum_kl > 0


def test_noise_fitted_to_earlier_batches_is_charged_for_longer_gaps() -> None:
    gradients, labels = softmax_batch(200)
    defense = Marvell(SumKl(sum_kl=0.3), noise_of(1), 4, from_earlier=True)
    assert defense.defend(defenses.Step(gradients, labels)).charge.sum_kl == 0
    assert defense.defend(defenses.Step(gradients, labels)).charge.sum_kl == pytest.approx(
        0.3, rel=1e-9
    )
    stretched = defense.defend(defenses.Step(3 * gradients, labels))
    assert stretched.charge.sum_kl == pytest.approx(9 * 0.3, rel=1e-6)


def test_a_state_of_another_number_of_classes_is_refused() -> None:
    five = MaxNorm(noise_of(1), 5)
    defense = DEFENSES["max_norm"](1)
    assert defense.state_dict() == {}
    defense.defend(defenses.Step(*softmax_batch(60)))
    with pytest.raises(ValueError, match="classes"):
        five.load_state_dict(defense.state_dict())


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_randomised_response_has_its_probabilities(num_classes: int) -> None:
    """Accepts them at 5 standard errors; rejects the flip probability of two classes."""
    rows, epsilon = 20_000, 1.0
    labels = torch.arange(rows).remainder(num_classes).float()
    mechanism = RandomizedResponse(kind="randomized_response", epsilon=epsilon)
    ids = [f"id-{row}" for row in range(rows)]
    key = key_from_insecure_seed(5)
    noisy = draw_noisy_labels(mechanism, labels, key, ids, num_classes)
    assert torch.equal(noisy, draw_noisy_labels(mechanism, labels, key, ids, num_classes))
    kept = math.exp(epsilon) / (num_classes - 1 + math.exp(epsilon))
    per_class = rows / num_classes
    for true in range(num_classes):
        counts = torch.bincount(noisy[labels == true].long(), minlength=num_classes) / per_class
        for answer in range(num_classes):
            share = kept if answer == true else (1 - kept) / (num_classes - 1)
            error = math.sqrt(share * (1 - share) / per_class)
            assert abs(float(counts[answer]) - share) < 5 * error
            wrong = math.exp(epsilon) / (1 + math.exp(epsilon))
            if num_classes > 2 and answer == true:
                assert abs(float(counts[answer]) - wrong) > 5 * error
    model = defenses.NoisyLabelDefense(mechanism=mechanism).charge_model(
        context_of(num_classes=num_classes)
    )
    assert model.low == label_leak(mechanism, num_classes).sum_kl


REFUSED: dict[str, defenses.DefenseSettings] = {
    "gafm": defenses.GafmDefense(),
    "max_norm_positive": defenses.MaxNormPositiveDefense(),
    "marvell": defenses.MarvellDefense(noise="persistent"),
    "iso": defenses.IsoDefense(noise="persistent"),
    "gaussian": defenses.NoisyLabelDefense(mechanism=GaussianLabels(kind="gaussian")),
    "laplace": defenses.NoisyLabelDefense(mechanism=LaplaceLabels(kind="laplace", epsilon=1.0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_defined_for_two_classes_is_refused(name: str) -> None:
    refusal = REFUSED[name].objection(context_of(num_classes=3))
    assert refusal is not None
    assert name in refusal
    with pytest.raises(ValueError, match=r"classes|0 or 1"):
        build_defense(REFUSED[name], key_from_insecure_seed(1), num_classes=3)
    build_defense(REFUSED[name], key_from_insecure_seed(1))
