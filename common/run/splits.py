"""The splits of a run's rows, and the passes over them."""

from typing import Literal, get_args

SplitName = Literal["train", "validation", "test"]

PassName = Literal["survey", "train", "validation", "test"]
"""A pass over rows: over one split in each epoch, or the survey, which goes over the training rows
once before the first epoch, without gradients."""

SPLITS: tuple[SplitName, ...] = get_args(SplitName)
"""The names of the splits in a column; in memory, a split is its index into this tuple."""
