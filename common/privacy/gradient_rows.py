"""The gradients of one batch as rows of numbers, prepared once for all attacks.

Rows are float64, in a unit that keeps every square within the range of float64.

Two directions divide a batch: its top right-singular vector, and the direction of two clusters.
Squaring costs the leading direction no precision, so a few products with the batch, or one Gram
matrix, replace a full SVD.

k-means is Lloyd's algorithm from given centres, without any randomness. It is own code, because the
libraries' disturb the training beside which an audit runs: scikit-learn's limits the threads of
BLAS in the whole process for as long as it computes, and SciPy's warns about empty clusters through
a state of the process.
"""

import math
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Floats: TypeAlias = npt.NDArray[np.float64]

_LARGE = 64  # rows and columns above which the Gram matrix costs more than some passes

_MAX_LANCZOS_STEPS = 25  # they cost about as much as the Gram matrix, which always succeeds

_STEPS_BETWEEN_CHECKS = 2
_FIRST_DOUBT = 8  # number of steps before the rate of convergence becomes meaningful

_CONVERGED = 1e-11  # fraction of l below which ``|Gv - lv|`` counts as converged

_MAX_ROUNDS = 20  # centres hardly move after so many rounds; they bound the time of a batch


class TopDirection(NamedTuple):
    """The direction in which a batch of gradients stretches most; its sign is arbitrary."""

    projections: Tensor  # the gradients' coordinates along it, (batch,), in the gradients' unit
    direction: Tensor  # a unit vector, (row_dim,), or zero if all gradients are zero


def top_direction_of_rows(rows: Tensor) -> TopDirection:
    """Return the top direction of float64 rows, by Lanczos' method if it stands out enough."""
    if rows.device.type == "cpu" and min(rows.shape) >= _LARGE:
        leading = _by_lanczos(rows.numpy())
        if leading is not None:
            projections, direction = map(torch.from_numpy, leading)
            return TopDirection(projections, direction)
    num_rows, row_dim = rows.shape
    if num_rows >= row_dim:
        _, direction = _top_eigenpair(gram(rows.T))
        return TopDirection(rows @ direction, direction)
    power, left = _top_eigenpair(gram(rows))
    length = power.clamp(min=0.0).sqrt()
    direction = torch.where(length > 0, (left @ rows) / length, 0.0)
    return TopDirection(left * length, direction)


def turned_by_skewness(projections: Tensor) -> Tensor:
    """Return scores with the sign that makes their long tail point up."""
    return -projections if skewness(projections) < 0 else projections


def skewness(scores: Tensor) -> float:
    """Return a number with the sign of the scores' skewness."""
    values = scores.cpu().numpy()
    # In a unit of their own: cubes leave the range of float64 early.
    largest = max(values.max(initial=0.0), -values.min(initial=0.0))
    values = values / (largest or 1.0)
    values -= values.sum() / max(len(values), 1)
    return float(np.vdot(values * values, values))


def settled_centres(rows: Tensor, centres: Tensor) -> Tensor:
    """Return the centres after Lloyd's algorithm; one that loses all its rows stays where it is."""
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
    """Return how near each row is to each centre, (rows, centres), up to an amount of the row."""
    return 2 * (rows @ centres.T) - centres.square().sum(dim=1)


def two_clusters(rows: Tensor, along: Tensor) -> TopDirection:
    """Group rows into two clusters, and score them by how much nearer they are to the smaller one.

    k-means begins with the rows above the mean of ``along`` against the others. Returns the
    differences of the squared distances to both centres, and the unit vector from the larger to the
    smaller cluster's; zeros where all rows are on one side of the mean.
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


def _by_lanczos(rows: _Floats) -> tuple[_Floats, _Floats] | None:
    """Return the projections and the top right-singular vector; None if it hardly stands out.

    Lanczos' method for G = R'R (Golub and Van Loan, "Matrix Computations", 10.1), with full
    reorthogonalisation and without forming G. The start vector has a component along every
    direction, so that no other direction can be mistaken for the top one.
    """
    image = _start(len(rows)) @ rows
    basis = np.empty((_MAX_LANCZOS_STEPS, rows.shape[1]))
    inner = np.zeros((_MAX_LANCZOS_STEPS, _MAX_LANCZOS_STEPS))  # products of the basis, through G
    before = math.inf
    for step in range(_MAX_LANCZOS_STEPS):
        length = math.sqrt(image @ image)
        if not length > 0:  # the Krylov space is exhausted
            return None
        np.divide(image, length, out=basis[step])
        known = basis[: step + 1]
        image = (rows @ basis[step]) @ rows
        parts = known @ image
        image -= parts @ known
        image -= (known @ image) @ known  # removes the remainder that rounding left
        inner[step, max(step - 1, 0) : step + 1] = parts[max(step - 1, 0) :]
        if step % _STEPS_BETWEEN_CHECKS:
            continue
        powers, weights = np.linalg.eigh(inner[: step + 1, : step + 1])  # reads the lower half
        power, top = float(powers[-1]), weights[:, -1]
        error = math.sqrt(image @ image) * abs(float(top[-1])) / power if power > 0 else math.inf
        if error <= _CONVERGED:
            direction = top @ known
            direction /= math.sqrt(direction @ direction)
            return rows @ direction, direction
        # The error falls by about the same factor between checks.
        checks_left = (_MAX_LANCZOS_STEPS - 1 - step) // _STEPS_BETWEEN_CHECKS
        if step >= _FIRST_DOUBT and error * (error / before) ** checks_left > _CONVERGED:
            return None
        before = error
    return None


@lru_cache(maxsize=8)
def _start(num_rows: int) -> _Floats:
    start = np.random.default_rng(0).standard_normal(num_rows)
    start.setflags(write=False)
    return start


def gram(values: Tensor) -> Tensor:
    """Return all inner products of some rows, (rows, rows)."""
    if values.device.type == "cpu":  # numpy computes only half of a symmetric product
        return torch.from_numpy(values.numpy() @ values.numpy().T)
    return values @ values.T


def _top_eigenpair(gram: Tensor) -> tuple[Tensor, Tensor]:
    if gram.device.type == "cpu":
        # Its import takes memory that a party which only aligns does not need.
        import scipy.linalg  # noqa: PLC0415

        # Computing only this pair takes a third of the time of all pairs.
        last = len(gram) - 1
        values, vectors = scipy.linalg.eigh(
            gram.numpy(), subset_by_index=[last, last], check_finite=False
        )
        return torch.from_numpy(values)[0], torch.from_numpy(vectors)[:, 0]
    values, vectors = torch.linalg.eigh(gram)
    return values[-1], vectors[:, -1]


class GradientRows:
    """The gradients of one batch, (batch, ...), with quantities that several attacks need."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients.detach()
        self.rows, self.unit = _flat_rows(self.gradients)

    @cached_property
    def lengths(self) -> Tensor:
        """Norms of the rows, (batch,)."""
        if self.rows.device.type == "cpu":  # numpy takes half of torch's time
            rows = self.rows.numpy()
            return torch.from_numpy(np.sqrt(np.vecdot(rows, rows)))
        lengths: Tensor = torch.linalg.vector_norm(self.rows, dim=1)
        return lengths

    @cached_property
    def top(self) -> TopDirection:
        top = top_direction_of_rows(self.rows)
        return top._replace(projections=in_unit(top.projections, self.unit))

    @cached_property
    def clusters(self) -> TopDirection:
        """The two clusters of the gradients' directions; scores are higher in the smaller one."""
        directions = unit_rows(self.rows)
        return two_clusters(directions, directions @ self.top.direction)


Gradients: TypeAlias = Tensor | GradientRows  # (batch, ...), prepared or not


def prepared(gradients: Gradients) -> GradientRows:
    """Return gradients as rows; gradients that are prepared already are returned unchanged."""
    return gradients if isinstance(gradients, GradientRows) else GradientRows(gradients)


def direction_of(gradient: Tensor, device: torch.device) -> Tensor:
    """Return one gradient as a float64 row, scaled to a unit of its own, (row_dim,)."""
    row, _ = _flat_rows(gradient.to(device).reshape(1, -1))
    return row[0]


def rows_together(gradients: Gradients, *others: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Flatten several batches to float64 rows in one common unit; None for a unit of 1."""
    first = gradients.gradients if isinstance(gradients, GradientRows) else gradients
    every = [first, *(known.to(first.device) for known in others)]
    sizes = [len(known) for known in every]
    rows, unit = _flat_rows(torch.cat([known.detach().flatten(start_dim=1) for known in every]))
    return list(torch.split(rows, sizes)), unit


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows of length 1, (rows, row_dim); zeros for a row of zeros."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / lengths.clamp(min=torch.finfo(rows.dtype).tiny)


def unit_vector(values: Tensor) -> Tensor:
    """Return a tensor's direction in float64, (values,); zeros for a tensor of zeros."""
    flat, _ = scaled(values.detach().double().reshape(-1))
    length = torch.linalg.vector_norm(flat)
    return torch.where(length > 0, flat / length, 0.0)


def scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values scaled to a largest magnitude of 1, and their unit; zeros remain zeros."""
    unit = values.new_ones(())
    if values.numel():
        largest = values.abs().amax()
        unit = torch.where(largest > 0, largest, unit)
    return values / unit, unit


def in_unit(scores: Tensor, unit: Tensor | None) -> Tensor:
    """Return scores in the gradients' unit, clamped to the range of their dtype."""
    if unit is None:
        return scores
    largest = torch.finfo(scores.dtype).max
    return (scores * unit).clamp(-largest, largest)


def _flat_rows(gradients: Tensor) -> tuple[Tensor, Tensor | None]:
    """Flatten to float64 rows, in a unit that keeps every square within the range of float64.

    Gradients of a smaller dtype are safe without a unit, which saves a pass over the batch.
    """
    rows = gradients.detach().flatten(start_dim=1).double()
    return scaled(rows) if gradients.dtype == torch.float64 else (rows, None)


def standardised(scores: Tensor) -> Tensor:
    """Return scores with mean 0 and variance 1, on the CPU; zeros where all are equal."""
    values = scores.detach().cpu().numpy().astype(np.float64)
    _make_size_one(values)
    values -= values.sum() / max(len(values), 1)
    _make_size_one(values)
    deviation = math.sqrt(values @ values / max(len(values), 1))
    if deviation > 0:
        values /= deviation
    return torch.from_numpy(values)


def _make_size_one(values: _Floats) -> None:
    largest = max(values.max(initial=0.0), -values.min(initial=0.0))
    if largest > 0:
        values /= largest
