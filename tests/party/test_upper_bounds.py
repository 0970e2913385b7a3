"""Bounds as they are printed: never below what they bound, and the same digits everywhere."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitveil.active_party.defenses.sum_kl import leak_auc_bound, sum_kl_for_leak_auc
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most


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


def test_what_is_meant_exactly_is_printed_so() -> None:
    assert auc_at_most(0.5) == "0.500"
    assert auc_at_most(leak_auc_bound(sum_kl_for_leak_auc(0.7))) == "0.700"
    assert at_most(0.1 + 0.2) == "0.3"
    assert at_most(2 / 16) == "0.125"
    assert at_most(0.0) == "0"


@pytest.mark.parametrize(
    ("auc", "printed"), [(0.9925, "0.993"), (0.9921, "0.993"), (0.9991, "1.000"), (1.0, "1.000")]
)
def test_an_auc_above_a_digit_is_printed_as_the_next(auc: float, printed: str) -> None:
    assert auc_at_most(auc) == printed


def test_what_has_no_bound_says_so() -> None:
    assert at_most(math.inf) == "inf"
    assert auc_at_most(math.nan) == "nan"


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.3369, "0.336"), (0.336, "0.336"), (0.7 - 1e-12, "0.700"), (0, "0.000")],
)
def test_a_lower_bound_is_rounded_down(value: float, written: str) -> None:
    assert at_least(value) == written
