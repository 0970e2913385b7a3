"""Finds the rows that the pairwise alignments with the passive parties have in common."""

from collections.abc import Sequence

import numpy as np

from splitveil.common.alignment import RowIndices
from splitveil.common.alignment.share import Mask


def intersect(pairs: Sequence[RowIndices]) -> list[Mask]:
    common = pairs[0]
    for rows in pairs[1:]:
        common = np.intersect1d(common, rows, assume_unique=True)
    return [np.isin(rows, common) for rows in pairs]
