"""What parts a run's rows are split into."""

from typing import Literal, get_args

SplitName = Literal["train", "validation", "test"]

SPLITS: tuple[SplitName, ...] = get_args(SplitName)
"""As a column names them; in memory, a split is its place among these."""
