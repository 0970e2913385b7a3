"""Soft targets from all releases so far: the posterior mean of the labels.

With A = [A_1 ... A_s] (N, R) the weights of all stages in memory, t their releases, D the diagonal
of their noise variances, p the prior mean (what the model predicts) and y ~ N(p, q I):

    y^ = p + q A (q A^T A + D)^-1 (t - A^T p)

q is the one with the largest marginal likelihood of t ~ N(A^T p, q A^T A + D) among powers of 2
times 1/4. It may exceed 1/4, the largest variance of a label: smooth directions, those of A, hold
more than their share of what the model does not know yet. Targets are clipped to [0, 1]; several
classes share q, and their targets are projected on the simplex.

The same holds for labels that are numbers within 0 and 1, whose largest variance is 1/4 as well
(Popoviciu 1935): (y, t) is normal with Cov(y, t) = q A and Var(t) = q A^T A + D, and the formula is
a ridge regression of the labels' residuals on the design.

This is a function of public weights and released sums: it costs no privacy, however often it is
evaluated (post-processing).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.projected.design import BLOCK_ROWS, Design, ReleasedStages
from splitveil.active_party.defenses.projected.release import Release

_MOST_DOUBLINGS = 8  # q lies within 2^-8 and 2^8 times 1/4


class _Stage(NamedTuple):
    design: Design
    release: Release


class Posterior:
    """Remembers the newest stages that fit into memory, and turns them into targets.

    Their weights take 2 bytes for each of N r; the newest stage stays even if it is larger.
    """

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.memory_bytes = memory_bytes
        self._stages: list[_Stage] = []
        self._gram = torch.zeros(0, 0, dtype=torch.float64)

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @property
    def released(self) -> ReleasedStages | None:
        """Weights and noise of the stages in memory; None if there is none."""
        if not self._stages:
            return None
        return ReleasedStages(
            [stage.design for stage in self._stages],
            [stage.release.sigma for stage in self._stages],
            self._gram,
        )

    def add(self, design: Design, release: Release) -> None:
        """Remember a stage, and forget the oldest ones that no longer fit.

        Raises ValueError if the release does not fit the design, or they do not fit earlier ones.
        """
        self._check(design, release)
        while self._stages and self._bytes() + _bytes(design) > self.memory_bytes:
            forgotten = self._stages.pop(0).design.rank
            self._gram = self._gram[forgotten:, forgotten:]
        self._stages.append(_Stage(design, release))
        known, rank = len(self._gram), design.rank
        cross = torch.zeros(known + rank, rank, dtype=torch.float64)
        for _, weights in self._blocks():
            cross += weights.T @ weights[:, known:]
        gram = torch.empty(known + rank, known + rank, dtype=torch.float64)
        gram[:known, :known] = self._gram
        gram[:, known:], gram[known:, :known] = cross, cross[:known].T
        self._gram = gram

    def targets(self, prior: Tensor) -> Tensor:
        """Return the targets of all rows.

        They are float32, within 0 and 1 or rows on the simplex, and of the shape of the prior: the
        predicted probability of label 1, (N,), or of each class, (N, classes).
        """
        mean = prior.detach().cpu().float()
        if not bool(mean.isfinite().all()):
            raise ValueError("expected a finite prior")
        if not self._stages:
            return _as_probabilities(mean)
        weights = self._coefficients(mean)
        targets = mean.clone()
        for start, block in self._blocks():
            targets[start : start + len(block)] += block @ weights
        return _as_probabilities(targets)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"gram": self._gram.clone()}
        for number, (design, release) in enumerate(self._stages):
            numbers = [design.unit, release.sigma]
            state[f"steps.{number}"] = design.steps
            state[f"sums.{number}"] = release.sums
            state[f"numbers.{number}"] = torch.tensor(numbers, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], num_rows: int | None = None) -> None:
        """Restore a state; ValueError if it is none, or of another number of rows."""
        names = ("steps", "sums", "numbers")
        count = (len(state) - 1) // len(names)
        expected = {"gram", *(f"{name}.{number}" for name in names for number in range(count))}
        if set(state) != expected:
            raise ValueError(f"expected the state of a posterior, got {sorted(state)}")
        stages = []
        for number in range(count):
            unit, sigma = state[f"numbers.{number}"].tolist()
            design = Design(state[f"steps.{number}"], unit)
            if num_rows not in {None, design.num_rows}:
                raise ValueError(f"expected a design of {num_rows} rows, got {design.num_rows}")
            stages.append(_Stage(design, Release(state[f"sums.{number}"], sigma)))
        rank = sum(stage.design.rank for stage in stages)
        if state["gram"].shape != (rank, rank):
            raise ValueError("expected a Gram matrix of all stages")
        self._stages, self._gram = stages, state["gram"].clone()

    def _check(self, design: Design, release: Release) -> None:
        shape, sigma = tuple(release.sums.shape), release.sigma
        if shape[:1] != (design.rank,) or not bool(release.sums.isfinite().all()) or not sigma > 0:
            raise ValueError(f"expected finite sums of {design.rank} columns, got shape {shape}")
        for earlier in self._stages[-1:]:
            if earlier.design.num_rows != design.num_rows:
                raise ValueError(
                    f"expected a design of {earlier.design.num_rows} rows, got {design.num_rows}"
                )
            if earlier.release.sums.shape[1:] != shape[1:]:
                raise ValueError("expected sums of as many classes as before")

    def _bytes(self) -> int:
        return sum(_bytes(stage.design) for stage in self._stages)

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield places and blocks of A, (rows, R) float32."""
        for start in range(0, self._stages[0].design.num_rows, BLOCK_ROWS):
            yield start, torch.cat([stage.design.block(start) for stage in self._stages], dim=1)

    def _coefficients(self, mean: Tensor) -> Tensor:
        """Return q (q A^T A + D)^-1 (t - A^T p), (R,) or (R, classes), float32."""
        sums = torch.cat([stage.release.sums for stage in self._stages])
        if mean.shape != (self._stages[0].design.num_rows, *sums.shape[1:]):
            raise ValueError(f"expected a prior that fits the releases, got {tuple(mean.shape)}")
        expected = torch.zeros_like(sums)
        for start, block in self._blocks():
            expected += block.T @ mean[start : start + len(block)]
        sigma = torch.cat(
            [torch.full((s.design.rank,), s.release.sigma) for s in self._stages]
        ).double()
        gram = self._gram / sigma / sigma[:, None]
        surprise = (sums - expected).reshape(len(sums), -1) / sigma[:, None]
        variance, solved = likeliest_variance(gram, surprise)
        solved = solved * variance / sigma[:, None]
        return solved.reshape(sums.shape).float()


def likeliest_variance(gram: Tensor, surprise: Tensor) -> tuple[float, Tensor]:
    """Find the q with the largest likelihood of the surprise, N(0, q gram + I) in each column.

    A peer can make the columns of several stages equal. The Gram matrix, whose sums are rounded,
    then has eigenvalues slightly below 0, which count as 0. Gram (R, R) and surprise (R, classes)
    are in units of the noise. Returns q, and (q gram + I)^-1 surprise, (R, classes).
    """
    powers, vectors = torch.linalg.eigh(gram)
    powers = powers.clamp(min=0.0)[:, None]
    parts = vectors.T @ surprise
    likelihoods: dict[int, float] = {}

    def likelihood(power: int) -> float:
        if abs(power) > _MOST_DOUBLINGS:
            return float("-inf")
        if power not in likelihoods:
            spread = 1.0 + 0.25 * 2.0**power * powers
            log_determinant = spread.log().sum() * surprise.shape[1]
            likelihoods[power] = -0.5 * float(log_determinant + (parts.square() / spread).sum())
        return likelihoods[power]

    best = 0
    while (step := max((-1, 0, 1), key=lambda step: (likelihood(best + step), -abs(step)))) != 0:
        best += step
    variance = 0.25 * 2.0**best
    return variance, vectors @ (parts / (1.0 + variance * powers))


def _bytes(design: Design) -> int:
    return design.steps.numel() * design.steps.element_size()


def _as_probabilities(values: Tensor) -> Tensor:
    """Clip to [0, 1], or project rows on the simplex (Duchi et al., ICML 2008, figure 1)."""
    if values.ndim == 1:
        return values.clamp(0.0, 1.0)
    ordered = values.sort(dim=1, descending=True).values
    excess = (ordered.cumsum(dim=1) - 1) / torch.arange(1, values.shape[1] + 1)
    kept = (ordered > excess).sum(dim=1, keepdim=True)
    return (values - excess.gather(1, kept - 1)).clamp_(0.0, 1.0)
