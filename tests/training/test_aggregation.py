"""Several passive parties that put their gradients together, against one draw and against many."""

import pytest
import torch

from splitveil.active_party.defenses.interface import DefendedGradient
from splitveil.active_party.training.aggregation import aggregate, parts_of
from splitveil.common.run.contract import Aggregation

PARTIES = 3


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
