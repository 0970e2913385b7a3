"""Several passive parties that put their gradients together, against one draw and against many."""

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from active_party.defenses import build_defense
from active_party.defenses.joint_draw import defend_jointly
from active_party.defenses.settings import MarvellDefense, PowerRatio
from active_party.defenses.sum_kl import leak_auc_bound
from common.privacy.leakage import leak_auc

PARTIES = 3
SETTINGS = MarvellDefense(strength=PowerRatio(power_ratio=4.0), insecure_noise_seed=77)


def parties_gradients(rows: int = 40_000) -> tuple[list[Tensor], Tensor]:
    """One gap per party, of different lengths, and a little spread."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(rows) % 2 == 0
    gradients = []
    for party in range(PARTIES):
        gap = (party + 1) * torch.randn(8, generator=generator)
        spread = 0.01 * torch.randn(rows, 8, generator=generator)
        gradients.append(torch.where(labels[:, None], 0.5, -0.5) * gap + spread)
    return gradients, labels


def gap_of(gradients: Tensor, labels: Tensor) -> Tensor:
    return gradients[labels].mean(dim=0) - gradients[~labels].mean(dim=0)


def best_leak(defended: list[Tensor], gradients: list[Tensor], labels: Tensor) -> float:
    """Return the AUC of the best linear score, from the covariance of the noise that was drawn."""
    noise = torch.cat(
        [sent - raw for sent, raw in zip(defended, gradients, strict=True)], dim=1
    ).double()
    gap = torch.cat([gap_of(raw, labels) for raw in gradients]).double()
    covariance = torch.cov(noise.T) + 1e-4 * torch.eye(len(gap), dtype=torch.float64)
    weights = torch.linalg.solve(covariance, gap)
    return leak_auc(torch.cat(defended, dim=1).double() @ weights, labels)


def expected_leak(sum_kl: float) -> float:
    return NormalDist().cdf(math.sqrt(sum_kl / 2))


def test_parties_that_join_gain_from_independent_draws_and_not_from_a_joint_one() -> None:
    gradients, labels = parties_gradients()
    jointly, report = defend_jointly(build_defense(SETTINGS), gradients, labels)
    defense = build_defense(SETTINGS)
    separately: list[Tensor] = [defense.defend(raw, labels)[0] for raw in gradients]
    assert report.charge.sum_kl == pytest.approx(1 / 4, rel=0.01)
    bound = leak_auc_bound(report.charge.sum_kl)
    assert best_leak([*jointly], gradients, labels) == pytest.approx(expected_leak(1 / 4), abs=0.01)
    assert best_leak(separately, gradients, labels) == pytest.approx(
        expected_leak(PARTIES / 4), abs=0.01
    )
    assert best_leak([*jointly], gradients, labels) < bound < expected_leak(PARTIES / 4) + 0.01


@pytest.mark.parametrize("party", range(PARTIES))
def test_a_party_alone_knows_as_much_as_all_together(party: int) -> None:
    gradients, labels = parties_gradients()
    jointly, report = defend_jointly(build_defense(SETTINGS), gradients, labels)
    alone = best_leak([jointly[party]], [gradients[party]], labels)
    assert alone == pytest.approx(expected_leak(report.charge.sum_kl), abs=0.01)


def test_each_party_gets_its_gradients_shape_and_the_power_is_shared() -> None:
    gradients, labels = parties_gradients(rows=4000)
    shaped = [gradients[0].reshape(-1, 2, 4), *gradients[1:]]
    jointly, report = defend_jointly(build_defense(SETTINGS), shaped, labels)
    assert [tuple(sent.shape) for sent in jointly] == [tuple(raw.shape) for raw in shaped]
    power = sum(
        float((sent - raw).square().flatten(1).sum(dim=1).mean())
        for sent, raw in zip(jointly, shaped, strict=True)
    )
    gap_squared = sum(float(gap_of(raw, labels).square().sum()) for raw in gradients)
    assert report.noise_power == pytest.approx(4 * gap_squared, rel=1e-5)
    assert power == pytest.approx(report.noise_power, rel=0.1)


def test_one_party_is_answered_as_without_a_joint_draw() -> None:
    gradients, labels = parties_gradients(rows=200)
    (jointly,), _ = defend_jointly(build_defense(SETTINGS), gradients[:1], labels)
    alone, _ = build_defense(SETTINGS).defend(gradients[0], labels)
    assert torch.equal(jointly, alone)


def test_gradients_of_different_batches_are_refused() -> None:
    gradients, labels = parties_gradients(rows=20)
    for wrong in ([], [gradients[0], gradients[1][:10]], [gradients[0], gradients[1].double()]):
        with pytest.raises(ValueError, match="one batch"):
            defend_jointly(build_defense(SETTINGS), wrong, labels)
