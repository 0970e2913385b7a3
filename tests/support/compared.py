"""Comparisons of runs that have to be equal to the last bit."""

import torch
from torch import Tensor

from tests.support.runs import Parties


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_same(found: Parties, expected: Parties) -> None:
    """Compare weights, the last evaluation, and what the ledger says at the end."""
    assert_same_weights(found.weights(), expected.weights())
    assert found.active.evaluations[-1] == expected.active.evaluations[-1]
    assert found.active.ledger[-1] == expected.active.ledger[-1]
