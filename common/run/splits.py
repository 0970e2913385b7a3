"""The splits of a run's rows."""

from typing import Literal, get_args

SplitName = Literal["train", "validation", "test"]

SPLITS: tuple[SplitName, ...] = get_args(SplitName)
"""The names of the splits in a column; in memory, a split is its index into this tuple."""
