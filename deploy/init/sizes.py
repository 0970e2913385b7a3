"""Recommends the sizes of a run, and its defense, for a table of some number of rows.

The figures are those with which the published tables were trained (`docs/results`): batches of
which an epoch has some tens, epochs until the test AUC stops rising, and `projected_labels` with as
many stages as they carry.
"""

import math
from typing import NamedTuple

from splitveil.active_party.defenses.gaussian_dp import mu_of_leak_auc
from splitveil.active_party.defenses.projection.outlook import outlook

LEAK_AUC = 0.6
RANK = 96
"""The default of `projected_labels`: a smaller one takes away more than it saves."""

TRAIN_SHARE = 0.8
_BATCHES = ((16_000, 1024), (6_000, 256), (1_500, 128), (0, 32))
_EPOCHS = ((5_000_000, 2), (500_000, 4), (50_000, 10), (0, 30))
_STAGES = 8


class Sizes(NamedTuple):
    """The sizes of a run."""

    batch_size: int
    epochs: int
    min_aligned: int
    max_set_size: int
    stages: int


class Defended(NamedTuple):
    """What the recommended defense leaves of the labels, said before a run."""

    leak_auc: float
    share: float
    """Share of the training rows' worth that is left, 0 to 1."""
    half_at_rows: int
    """Training rows at which half of it would be left."""


def recommended_sizes(num_rows: int) -> Sizes:
    """Return the sizes for a table whose rows are all common to both parties."""
    epochs = _at(_EPOCHS, num_rows)
    return Sizes(
        batch_size=_at(_BATCHES, num_rows),
        epochs=epochs,
        min_aligned=min(100, max(num_rows // 2, 1)),
        max_set_size=_rounded_up(10 * num_rows),
        stages=min(_STAGES, epochs),
    )


def defended(num_rows: int, rarest_share: float, num_classes: int) -> Defended:
    """Return what `projected_labels` leaves of a table's labels at the recommended bound.

    The share of the rarest class is that of labels of 0 and 1 with the same variance if labels are
    numbers (one class).
    """
    training = max(round(TRAIN_SHARE * num_rows), 1)
    share = rarest_share if num_classes <= 2 else 1 / num_classes
    found = outlook(training, share, mu_of_leak_auc(LEAK_AUC), RANK, num_classes)
    return Defended(LEAK_AUC, found.share, found.half_at_rows)


def _at(steps: tuple[tuple[int, int], ...], num_rows: int) -> int:
    return next(value for least, value in steps if num_rows >= least)


def _rounded_up(number: int) -> int:
    unit = 10 ** max(math.floor(math.log10(number)) - 1, 0)
    return int(min(math.ceil(number / unit) * unit, 2**31))
