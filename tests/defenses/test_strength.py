"""Each strength's target is met exactly, whatever the classes look like, and no power is wasted."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses import DefenseSettings, MarvellDefense, Step
from splitveil.active_party.defenses.marvell import (
    DetectionError,
    LeakAuc,
    PowerRatio,
    Strength,
    SumKl,
    allowed_sum_kl,
)
from splitveil.active_party.defenses.sum_kl import (
    leak_auc_bound,
    power_for_sum_kl,
    solve_noise,
    sum_kl_for_leak_auc,
)
from splitveil.common.errors import SettingsError
from splitveil.common.settings import Section, apply_overrides, validate
from tests.defenses.test_solver import random_instance
from tests.support.defenses import build_defense

# ---- power for a divergence


def left_at(target: dict[str, Any], power: float) -> float:
    classes = {name: value for name, value in target.items() if name != "sum_kl"}
    return solve_noise(**classes, noise_power=power).sum_kl


def random_target(generator: random.Random, log_low: float, log_high: float) -> dict[str, Any]:
    names = ("neg_variance", "pos_variance", "gap_squared", "cut_dim", "pos_fraction")
    target = dict(zip(names, random_instance(generator, log_low, log_high)[:5], strict=True))
    target["pos_fraction"] = 10 ** generator.uniform(-5, -0.31)
    target["sum_kl"] = 10 ** generator.uniform(-9, 4)
    return target


@pytest.mark.parametrize("logs", [(-30, 10), (-290, 290), (-2, 2)])
def test_power_is_enough_and_a_millionth_less_is_not(logs: tuple[float, float]) -> None:
    generator = random.Random(1)
    needed = 0
    for _ in range(300):
        target = random_target(generator, *logs)
        power = power_for_sum_kl(**target)
        assert left_at(target, power) <= target["sum_kl"]
        if power > 0:
            needed += 1
            assert left_at(target, power * (1 - 1e-6)) > target["sum_kl"]
    assert needed > 150


@pytest.mark.parametrize(
    "classes", [(0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 0.5), (1.0, 1.1, 0.4)]
)
def test_classes_that_are_close_enough_need_no_power(classes: tuple[float, float, float]) -> None:
    assert power_for_sum_kl(*classes, cut_dim=8, pos_fraction=0.2, sum_kl=0.6) == 0


def test_power_for_any_divergence_is_nothing() -> None:
    assert power_for_sum_kl(0.0, 0.0, 1.0, 8, 0.2, math.inf) == 0


def test_power_beyond_every_float_is_infinite() -> None:
    assert power_for_sum_kl(0.0, 0.0, 1e300, 8, 0.2, 1e-30) == math.inf
    assert power_for_sum_kl(0.0, 0.0, 1.0, 8, 0.2, 5e-324) == math.inf


def test_power_scales_with_the_gradient_bit_for_bit() -> None:
    generator = random.Random(2)
    for _ in range(100):
        target = random_target(generator, -3, 3)
        k = 2.0 ** generator.randint(-200, 200)
        scaled = {name: k * target[name] for name in ("neg_variance", "pos_variance")}
        scaled["gap_squared"] = k * target["gap_squared"]
        assert power_for_sum_kl(**(target | scaled)) == k * power_for_sum_kl(**target)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
def test_an_impossible_divergence_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="sum_kl"):
        power_for_sum_kl(1.0, 1.0, 1.0, 8, 0.5, wrong)


# ---- the four units


@pytest.mark.parametrize("auc", [0.5001, 0.55, 0.6, 0.75, 0.9, 0.9999])
def test_a_leak_auc_is_guaranteed_with_less_power_than_the_papers_formula(auc: float) -> None:
    """Theirs is the inverse of 1/2 + sqrt(K)/2 - K/8, which holds, too, and asks for more."""
    papers = (2 - 2 * math.sqrt(2 * (1 - auc))) ** 2
    ours = sum_kl_for_leak_auc(auc)
    assert 0.5 + papers**0.5 / 2 - papers / 8 == pytest.approx(auc, rel=1e-12)
    assert leak_auc_bound(ours) == pytest.approx(auc, rel=1e-12)
    assert leak_auc_bound(papers) < auc
    assert ours > papers


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        (SumKl(sum_kl=0.16), 0.16),
        (DetectionError(detection_error=0.4), 0.16),
        (LeakAuc(leak_auc=0.68), 4 * 0.2 * math.atanh(0.2)),
    ],
)
def test_strengths_allow_the_documented_divergence(
    strength: SumKl | DetectionError | LeakAuc, expected: float
) -> None:
    assert allowed_sum_kl(strength) == pytest.approx(expected, rel=1e-12)


def gaussian_batch(rows: int, seed: int, pos_fraction: float = 0.25) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(rows, generator=generator) < pos_fraction
    noise = torch.randn(rows, 6, generator=generator)
    gap = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0, 0.3])
    return torch.where(labels[:, None], gap + 0.8 * noise, 0.1 * noise), labels


def gaussian_sum_kl(means: list[np.ndarray], covariances: list[np.ndarray]) -> float:
    def kl(first: int, second: int) -> float:
        precision = np.linalg.inv(covariances[second])
        shift = means[second] - means[first]
        log_dets = [np.linalg.slogdet(covariance)[1] for covariance in covariances]
        trace = np.trace(precision @ covariances[first])
        return float(
            (trace + shift @ precision @ shift - len(shift) + log_dets[second] - log_dets[first])
            / 2
        )

    return kl(0, 1) + kl(1, 0)


@pytest.mark.parametrize(
    "strength",
    [SumKl(sum_kl=0.3), DetectionError(detection_error=0.4), LeakAuc(leak_auc=0.6)],
    ids=lambda strength: type(strength).__name__,
)
def test_divergence_of_the_noise_that_is_drawn_is_the_target(
    strength: SumKl | DetectionError | LeakAuc,
) -> None:
    """Accepts the target, and rejects one that is 10 % off, for the full covariances."""
    target = allowed_sum_kl(strength)
    gradients, labels = gaussian_batch(200_000, seed=1)
    settings = MarvellDefense(strength=strength, insecure_noise_seed=77)
    answer = build_defense(settings).defend(Step(gradients, labels))
    defended = answer.gradient
    assert answer.solution is not None
    assert answer.solution.sum_kl == pytest.approx(target, rel=1e-6)
    assert answer.solution.neg_across > 0  # otherwise half of the covariances would be empty
    means, covariances = [], []
    for member in (~labels, labels):
        own = gradients[member].double()
        noise = np.cov((defended - gradients)[member].double().numpy().T)
        variance = float(own.var(dim=0, unbiased=False).mean())
        means.append(own.mean(dim=0).numpy())
        covariances.append(noise + variance * np.eye(6))
    measured = gaussian_sum_kl(means, covariances)
    assert measured == pytest.approx(target, rel=0.03)
    assert measured != pytest.approx(1.1 * target, rel=0.03)


# ---- settings


class Example(Section):
    defense: DefenseSettings


FILE: dict[str, Any] = {"defense": {"name": "marvell", "strength": {"power_ratio": 4.0}}}


def strength_of(values: dict[str, Any], *overrides: str) -> Strength:
    settings = validate(Example, apply_overrides(values, overrides), "file").defense
    assert isinstance(settings, MarvellDefense)
    return settings.strength


def test_a_strength_is_chosen_by_its_key() -> None:
    assert strength_of(FILE) == PowerRatio(power_ratio=4.0)
    assert strength_of(FILE, "defense.strength.power_ratio=9") == PowerRatio(power_ratio=9.0)
    assert strength_of(FILE, "defense.strength={sum_kl: 0.3}") == SumKl(sum_kl=0.3)
    assert strength_of(FILE, "defense.strength={detection_error: 0.4}") == DetectionError(
        detection_error=0.4
    )
    auc = strength_of(FILE, "defense.strength={leak_auc: 0.6}")
    assert auc == LeakAuc(leak_auc=0.6)
    written = Example(defense=MarvellDefense(strength=auc)).model_dump(mode="json")
    assert strength_of(written) == auc


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("defense.strength.leak_auc=0.6", "exactly one of power_ratio, sum_kl"),
        ("defense.strength={power_ration: 4}", "exactly one of power_ratio, sum_kl"),
        ("defense.strength={}", "exactly one of power_ratio, sum_kl"),
        ("defense.strength=4", "exactly one of power_ratio, sum_kl"),
        ("defense.strength={leak_auc: 0.5}", "more than 0.5"),
        ("defense.strength={leak_auc: 1}", "less than 1"),
        ("defense.strength={detection_error: 0.5}", "less than 0.5"),
        ("defense.strength={sum_kl: 0}", "at least"),
        ("defense.strength={sum_kl: .inf}", "finite number"),
    ],
)
def test_a_wrong_or_second_key_is_explained(override: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint) as raised:
        strength_of(FILE, override)
    assert len(raised.value.problems) == 1
    assert raised.value.problems[0].startswith("file: defense.marvell.strength")


# ---- statistics of the batch or of earlier ones


def reported_noise(statistics: str, pos_fraction: float) -> tuple[float, ...]:
    """Defend a common batch, then one with another share of positives, and return its noise."""
    values = {"name": "marvell", "statistics": statistics, "insecure_noise_seed": 1}
    defense = build_defense(validate(Example, {"defense": values}, "file").defense)
    defense.defend(Step(*gaussian_batch(2000, seed=1)))
    answer = defense.defend(Step(*gaussian_batch(2000, seed=2, pos_fraction=pos_fraction)))
    assert answer.solution is not None
    return tuple(answer.solution[:4])


def test_running_statistics_keep_a_batchs_share_of_positives_out_of_its_noise() -> None:
    assert reported_noise("running", 0.05) == reported_noise("running", 0.6)
    assert reported_noise("batch", 0.05) != pytest.approx(reported_noise("batch", 0.6), rel=0.1)


def test_running_statistics_start_without_signal_and_end_at_the_classes() -> None:
    defense = build_defense(MarvellDefense(statistics="running", insecure_noise_seed=1))
    reports = [defense.defend(Step(*gaussian_batch(2000, seed=seed))) for seed in range(40)]
    whole = build_defense(MarvellDefense()).defend(Step(*gaussian_batch(50_000, seed=41)))
    assert reports[0].solution is None
    assert reports[1].solution is not None
    last, expected = reports[-1].solution, whole.solution
    assert last is not None
    assert expected is not None
    assert reports[-1].noise_power == pytest.approx(whole.noise_power, rel=0.05)
    assert last.sum_kl == pytest.approx(expected.sum_kl, rel=0.05)


def test_running_statistics_leave_the_answer_unbiased() -> None:
    """120 coordinates at 5 standard errors; rejects what is shrunk by a third."""
    gradients, labels = gaussian_batch(20, seed=3)
    labels[:2], labels[2:4] = True, False
    defense = build_defense(MarvellDefense(statistics="running", insecure_noise_seed=77))
    defense.defend(Step(*gaussian_batch(2000, seed=1)))
    state = defense.state_dict()
    answers: list[Tensor] = []
    for _ in range(40):  # of earlier batches, the noise does not depend on the rows beside
        defense.load_state_dict(state)
        answers.append(defense.defend(Step(gradients.repeat(100, 1), labels.repeat(100)))[0])
    samples = torch.cat(answers).double().view(-1, *gradients.shape)
    error = samples.std(dim=0) / len(samples) ** 0.5
    assert float(((samples.mean(dim=0) - gradients).abs() / error).max()) < 5
    assert float(((samples.mean(dim=0) - 0.67 * gradients).abs() / error).max()) > 5
