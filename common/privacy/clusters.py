"""Groups rows by k-means: Lloyd's algorithm from given centres, without any randomness.

Own code, because the libraries' disturb the training beside which an audit runs: scikit-learn's
limits the threads of BLAS in the whole process for as long as it computes, and SciPy's warns about
empty clusters through a state of the process.
"""

import torch
from torch import Tensor

from splitveil.common.privacy.top_direction import TopDirection

_MAX_ROUNDS = 20
"""Rounds after which centres hardly move any more; they bound the time of a batch."""


def settled_centres(rows: Tensor, centres: Tensor) -> Tensor:
    """Return the centres after Lloyd's algorithm; one that loses all its rows stays where it is.

    Args:
        rows: (rows, row_dim).
        centres: where to begin, (clusters, row_dim).
    """
    before: Tensor | None = None
    for _ in range(_MAX_ROUNDS):
        nearest = nearness(rows, centres).argmax(dim=1)
        if before is not None and torch.equal(nearest, before):
            break
        before = nearest
        members = torch.nn.functional.one_hot(nearest, len(centres)).to(rows.dtype)
        sizes = members.sum(dim=0)[:, None]
        centres = torch.where(sizes > 0, members.T @ rows / sizes.clamp(min=1.0), centres)
    return centres


def nearness(rows: Tensor, centres: Tensor) -> Tensor:
    """Return how near each row is to each centre, (rows, centres).

    Half the difference of two columns is the difference of the squared distances: the same amount
    is missing from all entries of a row.
    """
    return 2 * (rows @ centres.T) - centres.square().sum(dim=1)


def two_clusters(rows: Tensor, along: Tensor) -> TopDirection:
    """Group rows into two clusters, and score them by how much nearer they are to the smaller one.

    Args:
        rows: (rows, row_dim), float64.
        along: numbers that say where to begin: rows above their mean against the others, (rows,).

    Returns:
        The differences of the squared distances to both centres, and the unit vector from the
        larger to the smaller cluster's; zeros where all rows are on one side of the mean.
    """
    above = along > along.mean()
    if not bool(above.any()) or bool(above.all()):
        return TopDirection(torch.zeros_like(along), torch.zeros_like(rows[0]))
    begin = torch.stack([rows[~above].mean(dim=0), rows[above].mean(dim=0)])
    first, second = settled_centres(rows, begin)
    margins = nearness(rows, second[None])[:, 0] - nearness(rows, first[None])[:, 0]
    direction = second - first
    length = torch.linalg.vector_norm(direction)
    direction = torch.where(length > 0, direction / length, 0.0)
    if int((margins > 0).sum()) * 2 > len(rows):
        return TopDirection(-margins, -direction)
    return TopDirection(margins, direction)
