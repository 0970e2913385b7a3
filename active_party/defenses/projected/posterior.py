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

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from splitveil.active_party.defenses.projected.design import Design, ReleasedStages
from splitveil.active_party.defenses.projected.release import Release

_MOST_DOUBLINGS = 8  # q lies within 2^-8 and 2^8 times 1/4


class Posterior:
    """Remembers the newest stages that fit into memory, and turns them into targets.

    Their weights take 2 bytes for each of N r; the newest stage stays even if it is larger.
    """

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.memory_bytes = memory_bytes
        self._sums: list[Tensor] = []
        self.released: ReleasedStages | None = None
        """Weights and noise of the stages in memory; None if there is none."""

    @property
    def num_stages(self) -> int:
        return len(self._sums)

    def add(self, design: Design, release: Release) -> None:
        """Remember a stage, and forget the oldest ones that no longer fit.

        Raises ValueError if the release does not fit the design, or they do not fit earlier ones.
        """
        self._check(design, release)
        designs, sigmas, gram = [design], [release.sigma], torch.zeros(0, 0, dtype=torch.float64)
        if self.released is not None:
            designs, sigmas = (
                [*self.released.designs, design],
                [*self.released.sigmas, release.sigma],
            )
            gram = self.released.gram
        while len(designs) > 1 and sum(map(_bytes, designs)) > self.memory_bytes:
            forgotten = designs.pop(0).rank
            gram = gram[forgotten:, forgotten:]
            del sigmas[0], self._sums[0]
        self._sums.append(release.sums)
        known = len(gram)
        gram = pad(gram, (0, design.rank, 0, design.rank))
        self.released = ReleasedStages(designs, sigmas, gram)
        for _, steps in self.released.blocks():
            gram[:, known:] += steps.T @ steps[:, known:]
        gram[:, known:] *= self.released.units * design.unit
        gram[known:, :known] = gram[:known, known:].T

    def targets(self, prior: Tensor) -> Tensor:
        """Return the targets of all rows.

        They are float32, within 0 and 1 or rows on the simplex, and of the shape of the prior: the
        predicted probability of label 1, (N,), or of each class, (N, classes).
        """
        mean = prior.detach().cpu().float()
        if not bool(mean.isfinite().all()):
            raise ValueError("expected a finite prior")
        if self.released is None:
            return _as_probabilities(mean)
        sums = torch.cat(self._sums)
        if mean.shape != (self.released.designs[0].num_rows, *sums.shape[1:]):
            raise ValueError(f"expected a prior that fits the releases, got {tuple(mean.shape)}")
        targets = mean.clone()
        columns = targets.reshape(len(mean), -1)
        surprise = sums.reshape(len(sums), -1) - self.released.sums_of(columns)
        powers, vectors = self.released.spectrum
        variance = likeliest_variance(powers, vectors.T @ (surprise / self.released.noise))
        self.released.add_to(columns, self.released.solve(variance, surprise))
        return _as_probabilities(targets)

    def state_dict(self) -> dict[str, Tensor]:
        if self.released is None:
            return {"gram": torch.zeros(0, 0, dtype=torch.float64)}
        designs, sigmas, gram = self.released.designs, self.released.sigmas, self.released.gram
        state = {"gram": gram.clone()}
        for number, design in enumerate(designs):
            numbers = [design.unit, sigmas[number]]
            state[f"steps.{number}"] = design.steps
            state[f"sums.{number}"] = self._sums[number]
            state[f"numbers.{number}"] = torch.tensor(numbers, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], num_rows: int | None = None) -> None:
        """Restore a state; ValueError if it is none, or of another number of rows."""
        names = ("steps", "sums", "numbers")
        count = (len(state) - 1) // len(names)
        expected = {"gram", *(f"{name}.{number}" for name in names for number in range(count))}
        if set(state) != expected:
            raise ValueError(f"expected the state of a posterior, got {sorted(state)}")
        designs, sigmas = [], []
        for number in range(count):
            unit, sigma = state[f"numbers.{number}"].tolist()
            design = Design(state[f"steps.{number}"], unit)
            if num_rows not in {None, design.num_rows}:
                raise ValueError(f"expected a design of {num_rows} rows, got {design.num_rows}")
            designs.append(design)
            sigmas.append(sigma)
        rank = sum(design.rank for design in designs)
        if state["gram"].shape != (rank, rank):
            raise ValueError("expected a Gram matrix of all stages")
        self._sums = [state[f"sums.{number}"] for number in range(count)]
        self.released = ReleasedStages(designs, sigmas, state["gram"].clone()) if designs else None

    def _check(self, design: Design, release: Release) -> None:
        shape, sigma = tuple(release.sums.shape), release.sigma
        if shape[:1] != (design.rank,) or not bool(release.sums.isfinite().all()) or not sigma > 0:
            raise ValueError(f"expected finite sums of {design.rank} columns, got shape {shape}")
        if self.released is not None:
            num_rows = self.released.designs[0].num_rows
            if num_rows != design.num_rows:
                raise ValueError(f"expected a design of {num_rows} rows, got {design.num_rows}")
            if self._sums[0].shape[1:] != shape[1:]:
                raise ValueError("expected sums of as many classes as before")


def likeliest_variance(powers: Tensor, parts: Tensor) -> float:
    """Find the q with the largest likelihood of independent parts, N(0, q powers + I).

    Shapes: powers (R, 1), parts (R, classes).
    """
    likelihoods: dict[int, float] = {}

    def likelihood(power: int) -> float:
        if abs(power) > _MOST_DOUBLINGS:
            return float("-inf")
        if power not in likelihoods:
            spread = 1.0 + 0.25 * 2.0**power * powers
            log_determinant = spread.log().sum() * parts.shape[1]
            likelihoods[power] = -0.5 * float(log_determinant + (parts.square() / spread).sum())
        return likelihoods[power]

    best = 0
    while (step := max((-1, 0, 1), key=lambda step: (likelihood(best + step), -abs(step)))) != 0:
        best += step
    return 0.25 * 2.0**best


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
