"""The regression that fits a score to the label owner's release."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_STRENGTHS = np.logspace(-5, 2, 43)  # by row and unit of variance
_LEAST_DEVIATION = 0.2  # rarer categories and steps are shrunk more


def mean_and_covariance(sums: Numbers) -> tuple[Numbers, Numbers]:
    """Return the mean and the covariance of values, from sums of the products of [1, values]."""
    mean = sums[0, 1:] / sums[0, 0]
    return mean, sums[1:, 1:] / sums[0, 0] - np.outer(mean, mean)


def scales(covariance: Numbers) -> Numbers:
    """Return deviations; a rare category would otherwise count as much as a frequent one."""
    found: Numbers = np.sqrt(covariance.diagonal().clip(min=_LEAST_DEVIATION**2))
    return found


class LabelStatistics(NamedTuple):
    """Statistics of a release about weights of codes in a linear model of standardised targets."""

    num_rows: float
    mean: Numbers  # of the codes over the released rows, (codes,)
    covariance: Numbers  # (codes, codes)

    information: Numbers
    """Fisher's, by row, (codes, codes)."""

    pull: Numbers
    """Gradient of the logarithm of the likelihood at 0, by row, (codes, targets)."""

    def share(self, weight: Numbers, of_codes: NDArray[np.int64]) -> float:
        """Return the most that a regression on some codes explains of a score's variance."""
        together = (self.covariance @ weight)[of_codes]
        inverse = np.linalg.pinv(self.covariance[of_codes][:, of_codes], hermitian=True)
        explained = (together * (inverse @ together)).sum(0)
        return float((explained / self.variance(weight)).max())

    def variance(self, weight: Numbers) -> Numbers:
        found: Numbers = (weight * (self.covariance @ weight)).sum(0)
        return found


def statistics_of_labels(sums: Numbers, num_codes: int) -> LabelStatistics:
    """Return the statistics of noisy labels, from sums of the products of [1, codes, noisy labels].

    Their own variance stands for that of the noise.
    """
    mean, covariance = mean_and_covariance(sums)
    deviations = np.sqrt(covariance.diagonal()[num_codes:].clip(min=1e-30))
    of_codes = covariance[:num_codes, :num_codes]
    pull = covariance[:num_codes, num_codes:] / deviations
    return LabelStatistics(sums[0, 0], mean[:num_codes], of_codes, of_codes, pull)


def statistics_of_sums(
    sums: Numbers, num_codes: int, released: Numbers, sigma: float
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
    of_label = (total / count).clip(0.5 / count, 1 - 0.5 / count)
    variance = (of_label * (1 - of_label)).mean()  # at most that: of shares of a range, less
    noise = np.eye(len(shares)) + np.outer(shares, shares)
    noise = count * covariance[num_codes:, num_codes:] + sigma**2 / variance * noise
    np.fill_diagonal(noise, noise.diagonal() + 1e-9 * noise.diagonal().mean())
    seen = (released[:-1] - np.outer(shares, total)) / variance**0.5
    design = count * covariance[num_codes:, :num_codes]
    both = np.concatenate([design, seen], axis=1)
    white = np.linalg.solve(np.linalg.cholesky(noise), both)
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
        codes = np.arange(len(self._mean)) if of_codes is None else of_codes
        self._codes = codes
        self._scale = scales(self._covariance)[codes]
        of_scaled = statistics.information[codes][:, codes] / np.outer(self._scale, self._scale)
        values, self._directions = np.linalg.eigh(of_scaled)
        self._values = values.clip(min=0)
        self._along = self._directions.T @ (statistics.pull[codes] / self._scale[:, None])
        # (directions, targets), and for each strength the likelihood
        kept = self._values + _STRENGTHS[:, None]
        likelihood = (count * ((self._along**2).sum(1) / kept) / 2).sum(1)
        likelihood -= statistics.pull.shape[1] * np.log(kept / _STRENGTHS[:, None]).sum(1) / 2
        best = int(likelihood.argmax())
        self.evidence = float(likelihood[best])
        """Logarithm of the likelihood ratio to a model without codes."""
        self._strength = 2 * _STRENGTHS[best]

    def function(self) -> tuple[Numbers, Numbers]:
        """Return weights of all codes, (codes, targets), and bias of standardised scores."""
        along = self._along / (self._values + self._strength)[:, None]
        weight = np.zeros((len(self._mean), along.shape[1]))
        weight[self._codes] = self._directions @ along / self._scale[:, None]
        weight /= np.sqrt((weight * (self._covariance @ weight)).sum(0).clip(min=1e-30))
        return weight, -self._mean @ weight
