"""States as bytes."""

import math
from typing import Any

import pytest
import torch

from splitveil.common.run.state_bytes import state_from_bytes, state_to_bytes
from tests.support.equality import same


def test_a_state_comes_back_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    weights = torch.arange(6.0).reshape(2, 3)
    state: dict[str, Any] = {
        "optimizer": optimizer.state_dict(),  # with numbers as keys
        "model": dict(model.state_dict()),
        "tied": [weights, weights, weights[:, 1], weights.T],
        "kinds": (torch.tensor(7), torch.zeros(0, 3), torch.tensor([True]), torch.get_rng_state()),
        "plain": [None, True, 2**80, -0.0, 1e-320, math.inf, "ä\n\ud800", b"\x00\xff", (), {}],
        "": {"tensor": 1, "dict": {(1, "a"): [[]]}, 0: "0", "0": 0},
    }
    found = state_from_bytes(state_to_bytes(state))
    assert same(found, state)
    conjugated = {"lazy": torch.tensor([1 + 2j]).conj().imag}
    assert state_from_bytes(state_to_bytes(conjugated))["lazy"].tolist() == [-2.0]
    ((again, *_), (nan,)) = state_from_bytes(state_to_bytes({"a": [[-0.0], [math.nan]]}))["a"]
    assert math.copysign(1, again) == -1
    assert math.isnan(nan)


def test_the_number_of_bytes_does_not_depend_on_numbers_with_fractions() -> None:
    lengths = {len(state_to_bytes({"mean": mean})) for mean in (0.0, 1 / 3, -1e-320, math.nan)}
    assert len(lengths) == 1


def test_a_value_without_a_form_is_named() -> None:
    with pytest.raises(TypeError, match="cannot hold a set, as there is in a/1"):
        state_to_bytes({"a": [0, {1}]})


def test_bytes_that_hold_no_state_are_one_error() -> None:
    whole = state_to_bytes({"a": [1, (torch.ones(2), b"12")]})
    assert state_from_bytes(whole)
    for damaged in (b"", whole[:-1], whole[:40], whole + b"1", bytes(len(whole))):
        with pytest.raises(ValueError, match="hold no state"):
            state_from_bytes(damaged)
    for at in range(len(whole)):  # other bytes may be another state, but no other error
        try:
            state_from_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        except ValueError as error:
            assert str(error) == "these bytes hold no state"  # noqa: PT017 (not all of them fail)
