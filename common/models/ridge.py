"""The regression that fits a score to the label owner's release."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STRENGTHS = torch.logspace(-5, 2, 43, dtype=torch.float64)  # by row and unit of variance
_LEAST_DEVIATION = 0.2  # rarer categories and steps are shrunk more


def mean_and_covariance(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the covariance of values, from sums of the products of [1, values]."""
    mean = sums[0, 1:] / sums[0, 0]
    return mean, sums[1:, 1:] / sums[0, 0] - torch.outer(mean, mean)


def scales(covariance: Tensor) -> Tensor:
    """Return deviations; a rare category would otherwise count as much as a frequent one."""
    return covariance.diagonal().clamp(min=_LEAST_DEVIATION**2).sqrt()


class LabelStatistics(NamedTuple):
    """Statistics of a release about weights of codes in a linear model of standardised targets."""

    num_rows: Tensor
    mean: Tensor  # of the codes over the released rows, (codes,)
    covariance: Tensor  # (codes, codes)

    information: Tensor
    """Fisher's, by row, (codes, codes)."""

    pull: Tensor
    """Gradient of the logarithm of the likelihood at 0, by row, (codes, targets)."""

    def share(self, weight: Tensor, of_codes: Tensor) -> float:
        """Return the most that a regression on some codes explains of a score's variance."""
        together = (self.covariance @ weight)[of_codes]
        inverse = torch.linalg.pinv(self.covariance[of_codes][:, of_codes], hermitian=True)
        explained = (together * (inverse @ together)).sum(0)
        return float((explained / self.variance(weight)).max())

    def variance(self, weight: Tensor) -> Tensor:
        return (weight * (self.covariance @ weight)).sum(0)


def statistics_of_labels(sums: Tensor, num_codes: int) -> LabelStatistics:
    """Return the statistics of noisy labels, from sums of the products of [1, codes, noisy labels].

    Their own variance stands for that of the noise.
    """
    mean, covariance = mean_and_covariance(sums)
    deviations = covariance.diagonal()[num_codes:].clamp(min=1e-30).sqrt()
    of_codes = covariance[:num_codes, :num_codes]
    pull = covariance[:num_codes, num_codes:] / deviations
    return LabelStatistics(sums[0, 0], mean[:num_codes], of_codes, of_codes, pull)


def statistics_of_sums(
    sums: Tensor, num_codes: int, released: Tensor, sigma: float
) -> LabelStatistics:
    """Return the statistics of noisy sums of labels over bits, and over all rows.

    ``sums`` are those of the products of [1, codes, bits], without noise. The released ones less
    what the mean label explains are A w + e for the weights w, with A = N cov(bits, codes), and e
    normal with covariance R = s^2 N cov(bits, bits) + sigma^2 (1 + b b'), where s^2 is the labels'
    variance and b the share of each bit: the information is A' R^-1 A.
    """
    count = sums[0, 0]
    mean, covariance = mean_and_covariance(sums)
    total, shares = released[-1], mean[num_codes:]
    of_label = (total / count).clamp(0.5 / count, 1 - 0.5 / count)
    variance = (of_label * (1 - of_label)).mean()  # at most that: of shares of a range, less
    noise = torch.eye(len(shares)).to(sums) + torch.outer(shares, shares)
    noise = count * covariance[num_codes:, num_codes:] + sigma**2 / variance * noise
    noise.diagonal().add_(1e-9 * noise.diagonal().mean())
    seen = (released[:-1] - torch.outer(shares, total)) / variance.sqrt()
    design = count * covariance[num_codes:, :num_codes]
    both = torch.cat([design, seen], dim=1)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(noise), both, upper=False)
    statistics = white[:, :num_codes].T @ white / count
    of_codes = covariance[:num_codes, :num_codes]
    return LabelStatistics(
        count, mean[:num_codes], of_codes, statistics[:, :num_codes], statistics[:, num_codes:]
    )


class Ridge:
    """The mean of the weights of scaled codes after a release, under a normal prior for each.

    The strength is twice the one with the largest marginal likelihood.
    """

    def __init__(
        self, statistics: LabelStatistics, of_codes: NDArray[np.int64] | None = None
    ) -> None:
        count, self._mean, self._covariance = statistics[:3]
        everything = np.arange(len(self._mean)) if of_codes is None else of_codes
        codes = self._codes = torch.from_numpy(everything)
        self._scale = scales(self._covariance)[codes]
        of_scaled = statistics.information[codes][:, codes] / torch.outer(self._scale, self._scale)
        values, self._directions = torch.linalg.eigh(of_scaled)
        self._values = values.clamp(min=0)
        self._along = self._directions.T @ (statistics.pull[codes] / self._scale[:, None])
        # (directions, targets), and for each strength the likelihood
        kept = self._values + _STRENGTHS[:, None]
        likelihood = (count * ((self._along**2).sum(1) / kept) / 2).sum(1)
        likelihood -= statistics.pull.shape[1] * (kept / _STRENGTHS[:, None]).log().sum(1) / 2
        best = int(likelihood.argmax())
        self.evidence = float(likelihood[best])
        """Logarithm of the likelihood ratio to a model without codes."""
        self._strength = 2 * _STRENGTHS[best]

    def function(self) -> tuple[Tensor, Tensor]:
        """Return weights of all codes, (codes, targets), and bias of standardised scores."""
        along = self._along / (self._values + self._strength)[:, None]
        weight = torch.zeros(len(self._mean), along.shape[1], dtype=torch.float64)
        weight[self._codes] = self._directions @ along / self._scale[:, None]
        weight /= (weight * (self._covariance @ weight)).sum(0).clamp(min=1e-30).sqrt()
        return weight, -self._mean @ weight
