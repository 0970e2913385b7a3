"""The charge of each fresh answer: the divergence along the gap that its noise leaves."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from splitveil.active_party import defenses
from splitveil.active_party.defenses import DefenseSettings, Step
from splitveil.active_party.defenses.sum_kl import sum_kl_along_gap
from tests.support.defenses import build_defense

NOISY = ["iso", "max_norm", "max_norm_positive", "marvell"]
GAP = torch.tensor([3.0, 0.0, 4.0, 0.0])


def settings_of(name: str) -> DefenseSettings:
    match name:
        case "iso":
            return defenses.IsoDefense(noise_ratio=2.0, insecure_noise_seed=77)
        case "max_norm":
            return defenses.MaxNormDefense(insecure_noise_seed=77)
        case "max_norm_positive":
            return defenses.MaxNormPositiveDefense(insecure_noise_seed=77)
        case _:
            return defenses.MarvellDefense(insecure_noise_seed=77)


def binary_batch(rows: int = 400, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=generator) < 0.3).long()
    labels[:2] = torch.tensor([0, 1])
    predicted = 0.1 + 0.5 * torch.rand(rows, generator=generator)
    weights = GAP + 0.5 * torch.randn(rows, 4, generator=generator)
    return (predicted - labels)[:, None] * weights, labels, predicted


def charge(settings: DefenseSettings, *batches: tuple[Tensor, Tensor, Tensor]) -> float:
    defense = build_defense(settings)
    for gradients, labels, predicted in batches:
        answer = defense.defend(Step(gradients, labels, probabilities=predicted))
        assert answer.charge.noise_identity == b""
        assert math.isinf(answer.charge.epsilon)
    return answer.charge.sum_kl


def class_means(gradients: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = gradients.double()
    return rows[labels == 0].mean(dim=0), rows[labels == 1].mean(dim=0)


def divergence(neg_deviation: float, pos_deviation: float, gap: float) -> float:
    """KL both ways, as torch's own distributions have it."""
    neg = Normal(torch.tensor(0.0, dtype=torch.float64), neg_deviation)
    pos = Normal(torch.tensor(gap, dtype=torch.float64), pos_deviation)
    return float(kl_divergence(neg, pos) + kl_divergence(pos, neg))


# ---- the formula


@pytest.mark.parametrize("deviations", [(1.0, 1.0), (0.5, 2.0), (7.0, 6.5), (1e-20, 3e-20)])
@pytest.mark.parametrize("gap", [0.0, 0.3, 5.0])
def test_formula_is_the_divergence_of_two_normals(
    deviations: tuple[float, float], gap: float
) -> None:
    gap *= deviations[0]
    expected = divergence(*deviations, gap)
    assert sum_kl_along_gap(*deviations, gap) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert sum_kl_along_gap(deviations[1], deviations[0], -gap) == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize("bare", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (math.inf, 1.0)])
def test_a_class_without_noise_is_infinitely_told(bare: tuple[float, float]) -> None:
    assert sum_kl_along_gap(*bare, gap=1.0) == math.inf
    assert sum_kl_along_gap(*bare, gap=0.0) == math.inf


# ---- each defense


def test_no_defense_is_charged_infinitely() -> None:
    assert charge(defenses.NoDefense(), binary_batch()) == math.inf


def test_iso_is_charged_its_gap_against_its_noise() -> None:
    gradients, labels, predicted = binary_batch()
    neg, pos = class_means(gradients, labels)
    noise_power = (2.0 * float(gradients.norm(dim=1).max())) ** 2
    expected = float((pos - neg).square().sum()) / (noise_power / 4)
    assert charge(settings_of("iso"), (gradients, labels, predicted)) == pytest.approx(
        expected, rel=1e-6
    )


def test_marvell_is_charged_as_if_the_classes_had_no_spread() -> None:
    gradients, labels, _ = binary_batch()
    answer = build_defense(settings_of("marvell")).defend(Step(gradients, labels))
    assert answer.solution is not None
    neg, pos = class_means(gradients, labels)
    expected = divergence(
        answer.solution.neg_along**0.5, answer.solution.pos_along**0.5, float((pos - neg).norm())
    )
    assert answer.charge.sum_kl == pytest.approx(expected, rel=1e-9)
    assert answer.charge.sum_kl > 1.001 * answer.solution.sum_kl  # spread would earn some credit


@pytest.mark.parametrize("name", ["max_norm", "max_norm_positive"])
@pytest.mark.parametrize("zero_rows", [0, 2])
def test_row_noise_is_charged_by_the_variance_that_is_measured_on_the_gap(
    name: str, zero_rows: int
) -> None:
    """Accepts the variances of what is drawn, and rejects a charge that is 10 % off."""
    gradients, labels, predicted = binary_batch(rows=40)
    gradients[:zero_rows] = 0
    defense = build_defense(settings_of(name))
    # 500 times each row in one batch: neither the largest norm nor the least probability changes.
    tiled = Step(gradients.repeat(500, 1), labels.repeat(500), probabilities=predicted.repeat(500))
    samples = torch.cat([defense.defend(tiled).gradient for _ in range(8)])
    samples = samples.view(4000, *gradients.shape)
    neg, pos = class_means(gradients, labels)
    gap = pos - neg
    variances = ((samples - gradients).double() @ (gap / gap.norm())).square().mean(dim=0)
    expected = divergence(
        float(variances[labels == 0].mean()) ** 0.5,
        float(variances[labels == 1].mean()) ** 0.5,
        float(gap.norm()),
    )
    charged = charge(settings_of(name), (gradients, labels, predicted))
    assert charged == pytest.approx(expected, rel=0.04)
    assert 1.1 * charged != pytest.approx(expected, rel=0.04)


# ---- what holds for all


def only(batch: tuple[Tensor, Tensor, Tensor], label: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = batch[1] == label
    return batch[0][chosen], batch[1][chosen], batch[2][chosen]


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("name", ["iso", "max_norm", "max_norm_positive"])
def test_one_class_before_the_other_was_seen_is_charged_infinitely(name: str, label: int) -> None:
    assert charge(settings_of(name), only(binary_batch(), label)) == math.inf


def test_an_answer_without_signal_is_charged_nothing() -> None:
    assert charge(settings_of("marvell"), only(binary_batch(), 0)) == 0


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_is_charged_the_gap_to_the_others_running_mean(label: int) -> None:
    first, second = binary_batch(seed=5), only(binary_batch(seed=6), label)
    means = list(class_means(first[0], first[1]))
    means[label] = second[0].double().mean(dim=0)
    gap = float((means[1] - means[0]).norm())
    noise_power = (2.0 * float(second[0].norm(dim=1).max())) ** 2
    assert charge(settings_of("iso"), first, second) == pytest.approx(
        gap**2 / (noise_power / 4), rel=1e-6
    )
    defense = build_defense(settings_of("marvell"))
    defense.defend(Step(*first[:2]))
    answer = defense.defend(Step(*second[:2]))
    assert answer.solution is not None
    expected = divergence(answer.solution.neg_along**0.5, answer.solution.pos_along**0.5, gap)
    assert answer.charge.sum_kl == pytest.approx(expected, rel=1e-6)


def test_max_norm_charges_one_class_against_a_row_at_the_others_mean() -> None:
    """Rows on one line, so that the row's whole noise is on the gap."""
    line = torch.tensor([0.6, 0.8])
    predicted = torch.full((4,), 0.5)
    both = torch.outer(torch.tensor([1.0, 1.0, -3.0, -3.0]), line), torch.tensor([0, 0, 1, 1])
    neg = torch.outer(torch.tensor([1.0, 2.0, 3.0, 5.0]), line), torch.zeros(4)
    neg_variance = (24 + 21 + 16 + 0) / 4
    expected = divergence(neg_variance**0.5, (25 - 9) ** 0.5, 2.75 + 3)
    batches = ((*both, predicted), (*neg, predicted))
    assert charge(settings_of("max_norm"), *batches) == pytest.approx(expected, rel=1e-5)
    short = neg[0] / 2, neg[1]  # a row at -3 would have stood out
    assert charge(settings_of("max_norm"), batches[0], (*short, predicted)) == math.inf


@pytest.mark.parametrize("name", NOISY)
def test_zeros_tell_nothing_once_both_classes_are_zero(name: str) -> None:
    labels = torch.tensor([0, 1, 1])
    assert charge(settings_of(name), (torch.zeros(3, 2), labels, torch.full((3,), 0.5))) == 0


def test_noise_that_is_nowhere_on_the_gap_is_no_protection() -> None:
    assert charge(defenses.IsoDefense(noise_ratio=0.0), binary_batch()) == math.inf
    labels = torch.tensor([0, 0, 1, 1])
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [-2.0, 0.0]])  # no gap at all
    assert charge(defenses.MaxNormDefense(), (rows, labels, torch.full((4,), 0.5))) == math.inf


def test_running_statistics_are_charged_the_longer_gap() -> None:
    gradients, labels, _ = binary_batch()
    charges = {}
    for factor in (0.1, 1.0, 3.0):
        settings = defenses.MarvellDefense(statistics="running", insecure_noise_seed=77)
        defense = build_defense(settings)
        first = defense.defend(Step(gradients, labels))
        assert first.charge.sum_kl == 0  # no signal yet
        charges[factor] = defense.defend(Step(factor * gradients, labels)).charge.sum_kl
    assert charges[0.1] == pytest.approx(charges[1.0])
    assert charges[3.0] > 8 * charges[1.0]
