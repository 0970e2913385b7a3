"""The strongest attack on one answer: the likelihood ratio of each label, given the predictions.

With a cross entropy, the gradient of example i at the cut layer is

    g_i = sum_c (p_ic - y_ic) J_ic + noise,    J_ic the slope of logit c in the activation,

over the one logit of two classes or the logits of several. An attacker that knows p and J knows
what each label would lead to, and compares that with the answer: the score is the log-likelihood
ratio, for noise N(0, S). A peer cannot measure p and J, but it may come to know them well: from a
model of its own, or by choosing its activations. The label owner gives them to the attack, so
that the bound against every peer is put to the test.

The noise is estimated from the batch without labels. S is that of the mixture of the labels' normal
distributions that explains the batch best, by expectation maximisation (Dempster, Laird and Rubin
1977), with the share of each class estimated as well. With two classes, what is left along each
example's own J is a single number t_i = y_i + noise of variance v_i, and v_i is taken as

    v_i = s^2 (w + (1 - w) q_i / mean q),    q_i = 1 / (J_i' S^-1 J_i),

where w = 0 is noise of the same size for all rows, and w = 1 noise in units of each example's own
J. The s and w of the largest likelihood are used, and w = 1 where answers hold nothing but a
multiple of their own J: labels with noise, or targets in place of labels.

The ratio does not contain the prediction as a prior: it says what the gradient adds to it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from splitveil.common.privacy.gradient_rows import GradientRows, Gradients, scaled

_ROUNDS = 8  # rounds of expectation maximisation: the scores hardly change after half as many

_OWN_SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)  # the values of w that are tried

_SMALLEST_VARIANCE = 1e-6  # of t: below it, an answer reveals its label anyway

_ALL_ALONG = 1e-6  # share of noise across the slopes below which all is along them

_NEGLIGIBLE = 1e-12  # fraction of the mean noise variance that every direction has: rounding

_ROUNDING = 1e-24  # least noise variance, in units of the squared largest value

_LARGEST = 1e6


class KnownPredictions(NamedTuple):
    """The label owner's knowledge of a batch before it looks at a label."""

    probabilities: Tensor  # the model's predictions: (batch,) for label 1, or (batch, classes)
    slopes: Tensor  # J, in the unit of the gradients: (batch, ...), or (batch, classes, ...)


def informed(gradients: Gradients, known: KnownPredictions, target: int = 1) -> Tensor:
    """Score each example by the log-likelihood ratio of one class against the others, (batch,).

    With two classes, a score for 1 is minus that for 0. Scores are finite, 0 for a row that its
    label does not move. Raises ValueError if predictions or slopes are of another shape.
    """
    problem = _problem(gradients, known)
    if problem.is_binary:
        ratios = _bounded(_ratios_of_two(problem))
        return ratios if target == 1 else -ratios
    # A class is compared with the mixture of the others, each with the share that is predicted.
    whitening, _ = _fit(problem)
    ratios = _log_likelihoods(problem, whitening) + problem.probabilities.clamp(min=1e-30).log()
    others = [number for number in range(len(problem.moves)) if number != target]
    own = problem.probabilities[:, target].clamp(min=1e-30)
    rest = problem.probabilities[:, others].sum(dim=1).clamp(min=1e-30)
    prior = own.log() - rest.log()
    return _bounded(ratios[:, target] - torch.logsumexp(ratios[:, others], dim=1) - prior)


class _Problem(NamedTuple):
    """A batch in float64 and one unit: its answers, less what they are expected to be."""

    rest: Tensor  # answers less their mean if no label were 1 or of any class, (batch, row_dim)
    moves: Sequence[Tensor]  # by how much each class moves that mean, (batch, row_dim) each
    probabilities: Tensor  # (batch, classes)

    @property
    def is_binary(self) -> bool:
        return len(self.moves) == 2


def _problem(gradients: Gradients, known: KnownPredictions) -> _Problem:
    raw = gradients.gradients if isinstance(gradients, GradientRows) else gradients.detach()
    rows = raw.flatten(start_dim=1).double()
    slopes = known.slopes.detach().to(rows.device).double()
    shares = known.probabilities.detach().to(rows.device).double()
    shape = (len(rows), *shares.shape[1:], rows.shape[1])
    if shares.shape[:1] != rows.shape[:1] or slopes.numel() != math.prod(shape):
        raise ValueError(
            f"expected predictions and slopes of {len(rows)} rows of {rows.shape[1]} values, got "
            f"{tuple(shares.shape)} and {tuple(slopes.shape)}"
        )
    together, _ = scaled(
        torch.cat([rows[:, None], slopes.reshape(len(rows), -1, rows.shape[1])], 1)
    )
    rows, moves = together[:, 0], together[:, 1:]
    if shares.ndim == 1:
        (move,) = moves.unbind(1)
        rest = rows - shares[:, None] * move
        return _Problem(rest, (torch.zeros_like(move), -move), torch.stack([1 - shares, shares], 1))
    rest = rows - torch.einsum("nc,ncd->nd", shares, moves)
    return _Problem(rest, (-moves).unbind(1), shares)


def _fit(problem: _Problem) -> tuple[Tensor, Tensor]:
    """Return the whitening of the noise, and the classes' shares."""
    num_classes = len(problem.moves)
    row_dim = problem.rest.shape[1]
    distances = [torch.linalg.vector_norm(problem.rest - move, dim=1) for move in problem.moves]
    believed = one_hot(torch.stack(distances, 1).argmin(dim=1), num_classes).double()
    whitening, shares = torch.eye(row_dim).to(problem.rest), believed.mean(dim=0)
    for _ in range(_ROUNDS):
        whitening, shares = _whitening(problem, believed), believed.mean(dim=0)
        odds = _log_likelihoods(problem, whitening) + shares.clamp(min=1e-3).log()
        believed = torch.softmax(odds, dim=1)
    return whitening, shares


def _whitening(problem: _Problem, believed: Tensor) -> Tensor:
    """Return W with W' W = S^-1, (row_dim, row_dim)."""
    num_rows, row_dim = problem.rest.shape
    covariance = problem.rest.new_zeros(row_dim, row_dim)
    for move, share in zip(problem.moves, believed.T, strict=True):
        weighted = (problem.rest - move) * share.sqrt()[:, None]
        covariance.addmm_(weighted.T, weighted)
    powers, vectors = torch.linalg.eigh(covariance / num_rows)  # ascending
    powers = powers.clamp(min=0.0)
    # With few rows per dimension, S is shrunk towards a usual variance.
    usual = powers[row_dim // 2] if num_rows >= 2 * row_dim else powers.mean()
    ridge = usual * (row_dim / num_rows) ** 2 + _NEGLIGIBLE * powers.mean()
    weights = (powers + ridge).clamp(min=_ROUNDING).rsqrt()
    whitening: Tensor = weights[:, None] * vectors.T
    return whitening


def _log_likelihoods(problem: _Problem, whitening: Tensor) -> Tensor:
    """Return each class's log-likelihood, (batch, classes), up to an amount of the row."""
    rest = problem.rest @ whitening.T
    likelihoods = []
    for move in problem.moves:
        white = move @ whitening.T
        likelihoods.append((white * (rest - white / 2)).sum(dim=1))
    return torch.stack(likelihoods, dim=1)


def _ratios_of_two(problem: _Problem) -> Tensor:
    """Return the log-likelihood ratios of label 1 against label 0, (batch,)."""
    whitening, shares = _fit(problem)
    _, move = problem.moves
    white = move @ whitening.T
    power = white.square().sum(dim=1)
    moved = power > 0
    if not bool(moved.any()):
        return torch.zeros_like(power)
    rest = problem.rest @ whitening.T
    targets = (rest * white).sum(dim=1)[moved] / power[moved]
    spread = 1.0 / power[moved]
    spread = spread / spread.mean()
    along = torch.minimum(targets.square(), (targets - 1).square()) @ move[moved].square().sum(
        dim=1
    )
    across = (problem.rest[moved] - targets[:, None] * move[moved]).square().sum()
    own_shares = (1.0,) if across <= _ALL_ALONG * along else _OWN_SHARES
    ratios = torch.zeros_like(power)
    # The variances v_i that explain best the numbers t_i = y_i + noise, (rows,).
    best, variances = -math.inf, torch.ones_like(targets)
    for own in own_shares:
        shape = own + (1 - own) * spread
        variance, likelihood = _scale(targets, shape.clamp(min=1e-12), shares[1])
        if likelihood > best:
            best, variances = likelihood, variance
    ratios[moved] = (targets - 0.5) / variances
    return ratios


def _scale(targets: Tensor, shape: Tensor, share: Tensor) -> tuple[Tensor, float]:
    share = share.clamp(1e-3, 1 - 1e-3)
    nearest = torch.minimum(targets.square(), (targets - 1).square())
    variance = ((nearest / shape).mean() * shape).clamp(min=_SMALLEST_VARIANCE)
    for _ in range(_ROUNDS):
        odds = (targets - 0.5) / variance + share.log() - (1 - share).log()
        positive = torch.sigmoid(odds)
        errors = (1 - positive) * targets.square() + positive * (targets - 1).square()
        variance = ((errors / shape).mean() * shape).clamp(min=_SMALLEST_VARIANCE)
        share = positive.mean().clamp(1e-3, 1 - 1e-3)
    both = torch.stack(
        [
            (1 - share).log() - targets.square() / (2 * variance),
            share.log() - (targets - 1).square() / (2 * variance),
        ]
    )
    likelihood = torch.logsumexp(both, dim=0) - variance.log() / 2
    return variance, float(likelihood.mean())


def _bounded(scores: Tensor) -> Tensor:
    return scores.nan_to_num(0.0).clamp(-_LARGEST, _LARGEST)
