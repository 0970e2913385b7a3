"""What has to be equal to the last bit: runs, and states as a checkpoint holds them."""

from typing import Any

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


def stored(state: Any) -> Any:
    """Return a state as a checkpoint would restore it; refuse values that it cannot hold."""
    if isinstance(state, dict):
        assert all(isinstance(name, str) for name in state)
        return {name: stored(state[name]) for name in sorted(state, reverse=True)}
    if isinstance(state, list):
        return [stored(item) for item in state]
    assert isinstance(state, Tensor | bool | int | float | str | None), type(state)
    return state.clone() if isinstance(state, Tensor) else state


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.numpy().tobytes() == second.numpy().tobytes()
        )
    return type(first) is type(second) and bool(first == second)
