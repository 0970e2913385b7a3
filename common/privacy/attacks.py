"""Attacks: from the gradients of one batch to one score per example, higher meaning "positive".

    norm                   |g|
    cosine                 cos(g, g+), g+ the clean gradient of one random positive       (oracle)
    cosine_majority        minus the fraction of the batch with a positive cosine to g
    hint_inner_product_k   largest <g, h> to any of k known positives' gradients h
    hint_distance_k        minus the smallest |g - h| to any of them
    mean                   |g - m0| - |g - m1|, m0 and m1 the classes' means              (oracle)
    median                 the same with coordinate-wise medians                         (oracle)
    lda                    <g, S^-1 (m1 - m0)>, S the classes' pooled covariance          (oracle)
    spectral               <g, v>, v the batch's top right-singular vector, turned so that the
                           scores' long tail points up: positives are the minority
    regress_out            spectral, on what the party's own activations leave of g
    activation_spectral    spectral, on the activations instead of the gradients

No attack reads labels: what it needs to know besides the gradients is an explicit argument, and
`ATTACKS` names it. Scores are float64 on the gradients' device, and finite for finite gradients.
The attacks that gather over a run stand in `splitveil.common.privacy.accumulation`.

``spectral`` does not centre the batch. With a logistic loss g = (p - y) w: centring takes away the
part of w that the mean carries, which costs most where the classes are unbalanced and noise
covers the gradients (Li et al., "Label Leakage and Protection in Two-Party Split Learning", ICLR
2022, for the norm and cosine attacks; Sun et al., "Label Leakage and Protection from Forward
Embedding in Vertical Federated Learning", 2022, for the spectral one).

The oracles' classes are other examples than those scored: a class's mean that holds the example
itself finds a leak in pure noise.
"""

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.linalg
import torch
from torch import Tensor

BatchAttackName: TypeAlias = Literal[
    "norm",
    "cosine",
    "cosine_majority",
    "hint_inner_product_1",
    "hint_inner_product_3",
    "hint_inner_product_5",
    "hint_distance_1",
    "hint_distance_3",
    "hint_distance_5",
    "mean",
    "median",
    "lda",
    "spectral",
    "regress_out",
    "activation_spectral",
]

KnowledgeT = TypeVar("KnowledgeT")

RunAttackName: TypeAlias = Literal[
    "accumulated_spectral", "accumulated_cosine", "hint_combiner_50", "hint_combiner_200"
]

AttackName: TypeAlias = Literal[BatchAttackName, RunAttackName]

CUT = "cut"
"""Name of the layer at which the gradients arrive."""

_Floats: TypeAlias = npt.NDArray[np.float64]

_MAX_VOTERS = 2048
_LARGE = 64
"""Rows and columns from which on the Gram matrix costs more than a few passes over the batch."""

_MAX_LANCZOS_STEPS = 25
"""As many cost about as much as the Gram matrix and its top eigenvector, which need no luck."""

_STEPS_BETWEEN_CHECKS = 2
_FIRST_DOUBT = 8
"""Steps before how fast the error falls says anything."""

_CONVERGED = 1e-11
"""Length of Gv - lv, in units of l, at which v counts as the top direction."""

_SMALLEST = torch.finfo(torch.float64).tiny

_NEGLIGIBLE = 1e-10
"""What is left of a gradient below this part of the batch's largest entry is rounding."""


_EVALUATION_ONLY = " (evaluation only)"


class SideInformation(StrEnum):
    """What an attacker must know besides the gradients."""

    POSITIVE_GRADIENT = f"one clean gradient of a positive per batch{_EVALUATION_ONLY}"
    POSITIVES_ARE_FEWER = "positives are the minority"
    HINTS = "some positives of each batch"
    CLASSES = f"other gradients with their labels{_EVALUATION_ONLY}"
    ACTIVATIONS = "the party's own activations"

    @property
    def words(self) -> str:
        """The side information itself, without the note that only an evaluation has it."""
        return self.value.removesuffix(_EVALUATION_ONLY)

    @property
    def is_oracle(self) -> bool:
        """Whether only an evaluation has it, and no passive party."""
        return self in (SideInformation.POSITIVE_GRADIENT, SideInformation.CLASSES)

    @property
    def is_free(self) -> bool:
        """Whether every passive party knows it or can guess it."""
        return self in (SideInformation.POSITIVES_ARE_FEWER, SideInformation.ACTIVATIONS)


class KnownClasses(NamedTuple):
    """Gradients with their labels, of other examples than those to be scored."""

    negatives: Tensor
    """(negatives, ...), at least one."""

    positives: Tensor
    """(positives, ...), at least one."""


class Knowledge(NamedTuple):
    """The side information at hand for one batch; None where there is none."""

    positive_gradient: Tensor | None = None
    hints: Tensor | None = None
    """Gradients of known positives, (hints, ...)."""

    classes: KnownClasses | None = None
    activations: Tensor | None = None
    """(batch, ...)."""


class Attack(NamedTuple):
    """One row of the table of attacks."""

    score: "Callable[[Gradients, Knowledge], Tensor]"
    needs: frozenset[SideInformation]
    num_hints: int = 0
    reads_gradients: bool = True
    """Otherwise it finds the same at every layer."""

    @property
    def is_oracle(self) -> bool:
        """Whether it uses side information that only an evaluation has."""
        return any(need.is_oracle for need in self.needs)

    @property
    def is_free(self) -> bool:
        """Whether every passive party can run it, without any label."""
        return all(need.is_free for need in self.needs)


class TopDirection(NamedTuple):
    """The direction in which a batch of gradients stretches most; its sign is arbitrary."""

    projections: Tensor
    """The gradients' coordinates along it, (batch,), in the gradients' unit."""

    direction: Tensor
    """A unit vector, (row_dim,), or zero where all gradients are."""


class GradientRows:
    """The gradients of one batch, prepared once for all attacks on them.

    Args:
        gradients: (batch, ...).
    """

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients.detach()
        self.rows, self.unit = _rows(self.gradients)

    @cached_property
    def lengths(self) -> Tensor:
        """Norms of the rows, (batch,)."""
        if self.rows.device.type == "cpu":  # where numpy takes half of torch's time
            rows = self.rows.numpy()
            return torch.from_numpy(np.sqrt(np.vecdot(rows, rows)))
        lengths: Tensor = torch.linalg.vector_norm(self.rows, dim=1)
        return lengths

    @cached_property
    def top(self) -> TopDirection:
        """The direction in which they stretch most."""
        return _top_direction(self)


Gradients: TypeAlias = Tensor | GradientRows
"""(batch, ...), prepared or not."""


def norm(gradients: Gradients) -> Tensor:
    """Score each example by the Euclidean norm of its gradient.

    Args:
        gradients: (batch, ...).
    """
    known = prepared(gradients)
    return _in_unit(known.lengths, known.unit)


def cosine(gradients: Gradients, reference: Tensor) -> Tensor:
    """Score each example by the cosine between its gradient and a positive's.

    Args:
        gradients: (batch, ...).
        reference: one gradient of the same shape as a row of ``gradients``.

    Returns:
        Values in [-1, 1]; 0 where either gradient is zero.
    """
    known = prepared(gradients)
    direction, _ = _rows(reference.to(known.rows.device).reshape(1, -1))
    lengths = known.lengths * torch.linalg.vector_norm(direction)
    inner = known.rows @ direction[0]
    # Where a length is zero, so is the product.
    cosines: Tensor = inner / lengths.clamp_(min=_SMALLEST)
    return cosines.clamp_(-1.0, 1.0)


def cosine_majority(gradients: Gradients) -> Tensor:
    """Score each example by how few of the batch's gradients point its way.

    Every example votes in a batch of at most 2,048, and evenly spaced ones in a larger batch.

    Args:
        gradients: (batch, ...).

    Returns:
        Values in [-1, 0]; -1/2 where the gradient is zero.
    """
    rows = prepared(gradients).rows
    voters = rows[:: -(-len(rows) // _MAX_VOTERS)]
    agrees = (rows @ voters.T > 0).sum(dim=1)
    share = -agrees.double() / max(len(voters), 1)
    return torch.where((rows != 0).any(dim=1), share, -0.5)


def hint_inner_product(gradients: Gradients, hints: Tensor) -> Tensor:
    """Score each example by its largest inner product with a known positive's gradient.

    Args:
        gradients: (batch, ...).
        hints: (hints, ...), at least one.
    """
    (rows, known), unit = _rows_together(gradients, hints)
    return _in_unit(_in_unit((rows @ known.T).amax(dim=1), unit), unit)


def hint_distance(gradients: Gradients, hints: Tensor) -> Tensor:
    """Score each example by minus its smallest distance to a known positive's gradient.

    Args:
        gradients: (batch, ...).
        hints: (hints, ...), at least one.
    """
    (rows, known), unit = _rows_together(gradients, hints)
    return _in_unit(-torch.stack([_distances(rows, hint) for hint in known]).amin(dim=0), unit)


def mean(gradients: Gradients, classes: KnownClasses) -> Tensor:
    """Score each example by how much nearer it is to the positives' mean than the negatives'.

    Args:
        gradients: (batch, ...).
        classes: other gradients of the batch.
    """
    (rows, negatives, positives), unit = _rows_together(gradients, *classes)
    nearer = _distances(rows, negatives.mean(dim=0)) - _distances(rows, positives.mean(dim=0))
    return _in_unit(nearer, unit)


def median(gradients: Gradients, classes: KnownClasses) -> Tensor:
    """Score as `mean` does, with the classes' coordinate-wise medians.

    Args:
        gradients: (batch, ...).
        classes: other gradients of the batch.
    """
    (rows, negatives, positives), unit = _rows_together(gradients, *classes)
    nearer = _distances(rows, _medians(negatives)) - _distances(rows, _medians(positives))
    return _in_unit(nearer, unit)


def lda(gradients: Gradients, classes: KnownClasses) -> Tensor:
    """Score each example by Fisher's linear discriminant: the best direction for normal noise.

    The pooled covariance S is shrunk towards its mean variance, by d / (n + d) for n gradients of
    dimension d, so that few gradients, or gradients all of one direction, have a discriminant.

    Args:
        gradients: (batch, ...).
        classes: other gradients of the batch.

    Returns:
        Scores in a unit of their own.
    """
    (rows, negatives, positives), _ = _rows_together(gradients, *classes)
    centre_0, centre_1 = negatives.mean(dim=0), positives.mean(dim=0)
    within, _ = scaled(torch.cat([negatives - centre_0, positives - centre_1]))
    between, _ = scaled(centre_1 - centre_0)
    largest = torch.finfo(torch.float64).max
    return (rows @ _discriminant(within, between)).clamp(-largest, largest)


def spectral(gradients: Gradients) -> Tensor:
    """Score each example by its projection on the batch's top right-singular vector.

    The sign is chosen by skewness: the minority, taken for the positives, is the long tail.

    Args:
        gradients: (batch, ...).
    """
    return turned_by_skewness(top_direction(gradients).projections)


def regress_out(gradients: Gradients, activations: Tensor) -> Tensor:
    """Score each example by `spectral`, on what its activation does not explain of its gradient.

    What a model of the activations alone predicts is the same for both labels of an example; the
    label is in the rest.

    Args:
        gradients: (batch, ...).
        activations: the party's own, (batch, ...).

    Returns:
        Zeros where the activations, with a constant, explain everything.
    """
    rows, unit = prepared(gradients).rows, prepared(gradients).unit
    known, _ = scaled(activations.detach().flatten(start_dim=1).to(rows))
    known = torch.cat([known, known.new_ones(len(known), 1)], dim=1)
    basis, strengths, _ = torch.linalg.svd(known, full_matrices=False)
    rounding = strengths.amax() * max(known.shape) * torch.finfo(known.dtype).eps
    basis = basis * (strengths > rounding)
    rest = rows - basis @ (basis.T @ rows)
    rest = torch.where(rest.abs() > _NEGLIGIBLE * rows.abs().amax(), rest, 0.0)
    return _in_unit(spectral(rest), unit)


def top_direction(gradients: Gradients) -> TopDirection:
    """Return the batch's top right-singular vector, and the gradients' projections on it.

    Args:
        gradients: (batch, ...).
    """
    return prepared(gradients).top


def prepared(gradients: Gradients) -> GradientRows:
    """Return gradients as rows, the same if they are already."""
    return gradients if isinstance(gradients, GradientRows) else GradientRows(gradients)


def _top_direction(known: GradientRows) -> TopDirection:
    """Find it by a few products where it stands out, else through the smaller Gram matrix.

    What is read off is the leading direction, which loses nothing by squaring; the cost is that of
    a few passes over the batch, or of one product, instead of a full SVD.
    """
    rows, unit = known.rows, known.unit
    if rows.device.type == "cpu" and min(rows.shape) >= _LARGE:
        found = _by_lanczos(rows.numpy())
        if found is not None:
            projections, direction = map(torch.from_numpy, found)
            return TopDirection(_in_unit(projections, unit), direction)
    num_rows, row_dim = rows.shape
    if num_rows >= row_dim:
        _, direction = _top_eigenpair(_gram(rows.T))
        return TopDirection(_in_unit(rows @ direction, unit), direction)
    power, left = _top_eigenpair(_gram(rows))
    length = power.clamp(min=0.0).sqrt()
    direction = torch.where(length > 0, (left @ rows) / length, 0.0)
    return TopDirection(_in_unit(left * length, unit), direction)


def turned_by_skewness(projections: Tensor) -> Tensor:
    """Turn scores so that their long tail points up."""
    return -projections if skewness(projections) < 0 else projections


def skewness(scores: Tensor) -> float:
    """Return a number of the sign of the scores' skewness."""
    values = scores.cpu().numpy()
    # In a unit of their own: cubes leave the range of float64 early.
    largest = max(values.max(initial=0.0), -values.min(initial=0.0))
    values = values / (largest or 1.0)
    values -= values.sum() / max(len(values), 1)
    return float(np.vdot(values * values, values))


def _by_lanczos(rows: _Floats) -> tuple[_Floats, _Floats] | None:
    """Return the projections and the top right-singular vector; None where it stands out little.

    Lanczos' method for G = R'R (Golub and Van Loan, "Matrix Computations", 10.1), all directions
    kept orthogonal, without forming G. The start has a part of every direction, so that no other
    one can pass for the top.
    """
    image = _start(len(rows)) @ rows
    basis = np.empty((_MAX_LANCZOS_STEPS, rows.shape[1]))
    inner = np.zeros((_MAX_LANCZOS_STEPS, _MAX_LANCZOS_STEPS))  # of the basis, through G
    before = math.inf
    for step in range(_MAX_LANCZOS_STEPS):
        length = math.sqrt(image @ image)
        if not length > 0:  # nothing, or nothing new, to look at
            return None
        np.divide(image, length, out=basis[step])
        known = basis[: step + 1]
        image = (rows @ basis[step]) @ rows
        parts = known @ image
        image -= parts @ known
        image -= (known @ image) @ known  # what rounding left of them
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
        # By about the same factor from check to check.
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


def _gram(values: Tensor) -> Tensor:
    if values.device.type == "cpu":  # where numpy knows that half of it is enough
        return torch.from_numpy(values.numpy() @ values.numpy().T)
    return values @ values.T


def _top_eigenpair(gram: Tensor) -> tuple[Tensor, Tensor]:
    if gram.device.type == "cpu":
        # Only the pair that is wanted: a third of the time of all of them.
        last = len(gram) - 1
        values, vectors = scipy.linalg.eigh(
            gram.numpy(), subset_by_index=[last, last], check_finite=False
        )
        return torch.from_numpy(values)[0], torch.from_numpy(vectors)[:, 0]
    values, vectors = torch.linalg.eigh(gram)
    return values[-1], vectors[:, -1]


def _discriminant(within: Tensor, between: Tensor) -> Tensor:
    """Return the direction x of (W'W + r I) x = b, from the smaller of the two Gram matrices."""
    num_rows, row_dim = within.shape
    ridge = within.square().sum() / num_rows
    if not ridge > 0:
        return between
    if row_dim <= num_rows:
        gram = within.T @ within
        gram.diagonal().add_(ridge)
        direction: Tensor = torch.linalg.solve(gram, between)
        return direction
    gram = within @ within.T
    gram.diagonal().add_(ridge)
    weights: Tensor = torch.linalg.solve(gram, within @ between)
    return (between - within.T @ weights) / ridge


def _distances(rows: Tensor, centre: Tensor) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(rows - centre, dim=1)
    return distances


def _medians(rows: Tensor) -> Tensor:
    # torch's median is the lower one of an even number of values.
    return (rows.median(dim=0).values - (-rows).median(dim=0).values) / 2


def _rows(gradients: Tensor) -> tuple[Tensor, Tensor | None]:
    """Flatten to float64 rows, in a unit in which no square leaves the range of float64.

    Gradients of a smaller dtype are safe as they are, in no unit, and spared the pass over the
    batch.
    """
    rows = gradients.detach().flatten(start_dim=1).double()
    return scaled(rows) if gradients.dtype == torch.float64 else (rows, None)


def _rows_together(gradients: Gradients, *others: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Flatten several batches to float64 rows of one unit."""
    first = gradients.gradients if isinstance(gradients, GradientRows) else gradients
    every = [first, *(known.to(first.device) for known in others)]
    sizes = [len(known) for known in every]
    rows, unit = _rows(torch.cat([known.detach().flatten(start_dim=1) for known in every]))
    return list(torch.split(rows, sizes)), unit


def unit_vector(values: Tensor) -> Tensor:
    """Return a tensor's direction in float64, (values,); zeros where there is none."""
    flat, _ = scaled(values.detach().double().reshape(-1))
    length = torch.linalg.vector_norm(flat)
    return torch.where(length > 0, flat / length, 0.0)


def scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values with a largest magnitude of 1, and their unit; zeros stay as they are."""
    unit = values.new_ones(())
    if values.numel():
        largest = values.abs().amax()
        unit = torch.where(largest > 0, largest, unit)
    return values / unit, unit


def _in_unit(scores: Tensor, unit: Tensor | None) -> Tensor:
    if unit is None:
        return scores
    largest = torch.finfo(scores.dtype).max
    return (scores * unit).clamp(-largest, largest)


def _needed(value: KnowledgeT | None, what: SideInformation, attack: str) -> KnowledgeT:
    if value is None:
        raise ValueError(f"{attack} needs {what}")
    return value


def _score_cosine(gradients: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.positive_gradient, SideInformation.POSITIVE_GRADIENT, "cosine")
    return cosine(gradients, known)


def _score_with_hints(
    score: Callable[[Gradients, Tensor], Tensor],
    num_hints: int,
    gradients: Gradients,
    known: Knowledge,
) -> Tensor:
    hints = _needed(known.hints, SideInformation.HINTS, score.__name__)
    if len(hints) < num_hints:
        raise ValueError(f"{score.__name__} needs {num_hints} hints, got {len(hints)}")
    return score(gradients, hints[:num_hints])


def _score_with_classes(
    score: Callable[[Gradients, KnownClasses], Tensor], gradients: Gradients, known: Knowledge
) -> Tensor:
    return score(gradients, _needed(known.classes, SideInformation.CLASSES, score.__name__))


def _score_regress_out(gradients: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.activations, SideInformation.ACTIVATIONS, "regress_out")
    return regress_out(gradients, known)


def _score_activations(_: Gradients, knowledge: Knowledge) -> Tensor:
    known = _needed(knowledge.activations, SideInformation.ACTIVATIONS, "activation_spectral")
    return spectral(known)


def _hinted(score: Callable[[Gradients, Tensor], Tensor], num_hints: int) -> Attack:
    scored = partial(_score_with_hints, score, num_hints)
    return Attack(scored, frozenset({SideInformation.HINTS}), num_hints)


def _classed(score: Callable[[Gradients, KnownClasses], Tensor]) -> Attack:
    return Attack(partial(_score_with_classes, score), frozenset({SideInformation.CLASSES}))


_MINORITY = frozenset({SideInformation.POSITIVES_ARE_FEWER})

ATTACKS: Mapping[BatchAttackName, Attack] = MappingProxyType(
    {
        "norm": Attack(lambda gradients, _: norm(gradients), frozenset()),
        "cosine": Attack(_score_cosine, frozenset({SideInformation.POSITIVE_GRADIENT})),
        "cosine_majority": Attack(lambda gradients, _: cosine_majority(gradients), _MINORITY),
        "hint_inner_product_1": _hinted(hint_inner_product, 1),
        "hint_inner_product_3": _hinted(hint_inner_product, 3),
        "hint_inner_product_5": _hinted(hint_inner_product, 5),
        "hint_distance_1": _hinted(hint_distance, 1),
        "hint_distance_3": _hinted(hint_distance, 3),
        "hint_distance_5": _hinted(hint_distance, 5),
        "mean": _classed(mean),
        "median": _classed(median),
        "lda": _classed(lda),
        "spectral": Attack(lambda gradients, _: spectral(gradients), _MINORITY),
        "regress_out": Attack(_score_regress_out, _MINORITY | {SideInformation.ACTIVATIONS}),
        "activation_spectral": Attack(
            _score_activations,
            _MINORITY | {SideInformation.ACTIVATIONS},
            reads_gradients=False,
        ),
    }
)
