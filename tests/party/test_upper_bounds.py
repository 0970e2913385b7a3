"""Bounds as they are printed: never below what they bound, and the same digits everywhere."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.active_party.defenses.sum_kl import leak_auc_bound, sum_kl_for_leak_auc
from splitveil.common.text.wording import at_least, at_most, auc_at_most


@given(st.floats(0.5, 1.0))
def test_an_auc_is_printed_less_than_a_thousandth_above_itself(auc: float) -> None:
    printed = float(auc_at_most(auc))
    assert auc * (1 - 2e-9) <= printed < auc + 0.001
    assert len(auc_at_most(auc)) == 5


@given(st.floats(0.0, 1e12))
def test_a_sum_is_printed_less_than_a_thousandth_part_above_itself(value: float) -> None:
    printed = float(at_most(value))
    assert value * (1 - 2e-9) <= printed
    assert printed <= value * 1.001 or value < 1e-300


@pytest.mark.parametrize(
    ("text_of", "value", "printed"),
    [
        (auc_at_most, 0.5, "0.500"),
        (auc_at_most, leak_auc_bound(sum_kl_for_leak_auc(0.7)), "0.700"),
        (auc_at_most, 0.9925, "0.993"),
        (auc_at_most, 0.9921, "0.993"),
        (auc_at_most, 0.9991, "1.000"),
        (auc_at_most, 1.0, "1.000"),
        (auc_at_most, math.nan, "nan"),
        (at_most, 0.1 + 0.2, "0.3"),
        (at_most, 2 / 16, "0.125"),
        (at_most, 0.0, "0"),
        (at_most, math.inf, "inf"),
        (at_least, 0.3369, "0.336"),
        (at_least, 0.336, "0.336"),
        (at_least, 0.7 - 1e-12, "0.700"),
        (at_least, 0, "0.000"),
    ],
)
def test_a_bound_is_rounded_away_from_what_it_bounds_unless_it_is_meant_exactly(
    text_of: Callable[[float], str], value: float, printed: str
) -> None:
    assert text_of(value) == printed
