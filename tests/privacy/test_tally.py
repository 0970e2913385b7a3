"""Figures of a run that do not grow with it: against those of all values."""

import sys

import numpy as np
import pytest

from splitveil.common.privacy.tally import REMEMBERED_EPOCHS, AttackTally

HALF_CELL = 2.6e-5


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_a_quantile_is_that_of_all_values_to_half_a_cell(share: float, count: int) -> None:
    values = np.append(np.random.default_rng(count).uniform(0.5, 1.0, count), [0.5, 1.0])
    tally = AttackTally()
    for value in values:
        tally.add(0, value, 0.5)
    assert tally.quantile(share) == pytest.approx(np.quantile(values, share), abs=HALF_CELL)


def test_the_worst_epoch_is_known_long_after_its_figures_are_forgotten() -> None:
    tally = AttackTally()
    tally.add(0, 0.99, 0.6)
    for epoch in range(1, 3 * REMEMBERED_EPOCHS):
        tally.add(epoch, 0.7, 0.6)
    assert tally.epoch_mean(0) is None
    assert tally.worst_epoch == 0.99


def test_memory_does_not_grow_with_the_run() -> None:
    tally = AttackTally()

    def size() -> int:
        state = tally.state_dict()
        return int(state["measured"].numel()) + sys.getsizeof(state["epochs"])

    for epoch in range(REMEMBERED_EPOCHS):
        tally.add(epoch, 0.7, 0.6)
    before = size()
    for epoch in range(REMEMBERED_EPOCHS, 5000):
        tally.add(epoch, 0.7, 0.6)
    assert size() == before
