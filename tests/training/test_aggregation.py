"""Several passive parties that put their gradients together, against one draw and against many."""

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses import MarvellDefense, RawBatch
from splitveil.active_party.defenses.interface import DefendedGradient, DefenseReport
from splitveil.active_party.defenses.strength import PowerRatio
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.training.aggregation import aggregate, parts_of
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.run.contract import Aggregation
from tests.support.defenses import build_defense

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


def defend_jointly(gradients: list[Tensor], labels: Tensor) -> tuple[list[Tensor], DefenseReport]:
    """Answer the parties of a concatenation: the aggregate's gradient is all of theirs."""
    joint = torch.cat(gradients, dim=1)
    defended, report = build_defense(SETTINGS).defend(RawBatch(joint, labels))
    return [*parts_of("concat", defended, len(gradients))], report


def test_parties_that_join_gain_from_independent_draws_and_not_from_a_joint_one() -> None:
    gradients, labels = parties_gradients()
    jointly, report = defend_jointly(gradients, labels)
    defense = build_defense(SETTINGS)
    separately: list[Tensor] = [defense.defend(RawBatch(raw, labels))[0] for raw in gradients]
    assert report.charge.sum_kl == pytest.approx(1 / 4, rel=0.01)
    bound = leak_auc_bound(report.charge.sum_kl)
    assert best_leak(jointly, gradients, labels) == pytest.approx(expected_leak(1 / 4), abs=0.01)
    assert best_leak(separately, gradients, labels) == pytest.approx(
        expected_leak(PARTIES / 4), abs=0.01
    )
    assert best_leak(jointly, gradients, labels) < bound < expected_leak(PARTIES / 4) + 0.01
    by_itself = best_leak([jointly[1]], [gradients[1]], labels)  # as much as all together
    assert by_itself == pytest.approx(expected_leak(1 / 4), abs=0.01)


RULES: list[Aggregation] = ["mean", "sum", "concat"]


@pytest.mark.parametrize("rule", RULES)
def test_the_parts_are_what_the_chain_rule_makes_of_the_aggregate_s_gradient(
    rule: Aggregation,
) -> None:
    generator = torch.Generator().manual_seed(1)
    activations = [torch.randn(5, 2, 3, generator=generator) for _ in range(PARTIES)]
    for activation in activations:
        activation.requires_grad_()
    whole = aggregate(rule, activations)
    sent = torch.randn(whole.shape, generator=generator)
    expected = torch.autograd.grad(whole, activations, sent)
    parts = parts_of(rule, DefendedGradient(sent), PARTIES)
    assert all(torch.allclose(*pair) for pair in zip(parts, expected, strict=True))
    assert whole.shape == (5, 6, 3) if rule == "concat" else (5, 2, 3)


@pytest.mark.parametrize("rule", RULES)
def test_of_one_party_everything_stays_as_it_is(rule: Aggregation) -> None:
    activation = torch.randn(4, 3, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    assert aggregate(rule, [activation]) is activation
    sent = DefendedGradient(activation)
    assert parts_of(rule, sent, 1)[0] is sent


@pytest.mark.parametrize("rule", ["mean", "sum"])
def test_parties_whose_activations_are_added_all_get_the_same(rule: Aggregation) -> None:
    """So that together they know what each one knows, whatever the defense."""
    sent = DefendedGradient(torch.randn(4, 3, generator=torch.Generator().manual_seed(2)))
    first, *others = parts_of(rule, sent, PARTIES)
    assert all(torch.equal(first, other) for other in others)
