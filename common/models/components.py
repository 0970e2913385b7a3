"""Bottom models that are computed from a party's own table instead of being trained.

A row becomes codes X: each number is cumulative over quantile bins, min(max(place - j, 0), 1) for
bin j, and each category one-hot. The activation is a linear function of the codes, clipped at five
standard deviations: principal components, X V L^(-1/4) with V and L the largest eigenvectors and
eigenvalues of the codes' covariance, or before these a score, which is a ridge regression on what
the label owner released: noisy labels, or noisy sums of labels over bits of the codes. Components
are scaled by the fourth root of their variance: half way to whitening, so that the later ones,
which are mostly noise, do not count as much as the first.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.errors import DataError, InvalidMessage, SettingsError
from splitveil.common.models.ridge import (
    LabelStatistics,
    Ridge,
    mean_and_covariance,
    scales,
    statistics_of_labels,
    statistics_of_sums,
)
from splitveil.common.models.settings import PcaModel, ScoreModel

_logger = logging.getLogger(__name__)

MOST_DENSE = 4096
"""Codes beyond which their covariance is not held, and a sparse solver is used."""

_MOST_BITS = 127  # of a row, without the bit that is always 1
_CLIP = 5.0
FIT_ROWS = 2**14  # rows whose codes are held at once
_ROUNDED = 1e-3  # a score's variance, which is 1, is less if there was nearly none to scale
_TINY = 1e-9  # share of the largest variance below which a component is rounding

Blocks = Callable[[], Iterable[Features]]
"""Yields a table's rows in parts, the same at every call."""


class ComponentsBottom(nn.Module):
    """A linear function of codes, (rows, *cut_shape); zero before it is fitted."""

    def __init__(
        self, settings: PcaModel | ScoreModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        super().__init__()
        self.settings = settings
        self.cut_shape = tuple(cut_shape)
        self._bins = list(shapes.bins)
        image = math.prod(shapes.image_shape) if shapes.image_shape else 0
        self._num_dense = sum(self._bins) + shapes.numeric_dim - len(self._bins) + image
        self._sizes = [*shapes.vocabulary_sizes, *shapes.num_tokens]
        self._max_lengths = list(shapes.max_lengths)
        self.num_codes = self._num_dense + sum(self._sizes)
        width = math.prod(cut_shape)
        self.weight = nn.Parameter(torch.zeros(self.num_codes, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("limit", torch.full((width,), math.inf))
        starts = torch.tensor([0, *accumulate(self._sizes)][:-1], dtype=torch.int64)
        self.register_buffer("starts", starts + self._num_dense, persistent=False)
        # Weights, and in the last line thresholds, of the bits.
        self.register_buffer("of_bits", torch.zeros(self.num_codes + 1, 0), persistent=False)

    def forward(self, features: Features) -> Tensor:
        activation = self.values(features, self.weight) + self.bias
        limit = self.get_buffer("limit")
        return activation.clamp(-limit, limit).reshape(-1, *self.cut_shape)

    def values(self, features: Features, weight: Tensor) -> Tensor:
        """Return codes times weights, (rows, width), without building the codes of categories."""
        found = weight.new_zeros(())
        if self._num_dense:
            found = self.dense(features) @ weight[: self._num_dense]
        for slots, share in self.slots(features):
            found = found + (embedding(slots, weight) * share).sum(1)
        return found

    def codes(self, features: Features) -> Tensor:
        """Return the codes, (rows, codes) float32."""
        found = torch.zeros(len(features), self.num_codes, device=self.weight.device)
        found[:, : self._num_dense] = self.dense(features)
        for slots, share in self.slots(features):
            found.scatter_add_(1, slots, share.squeeze(-1).expand(slots.shape).to(found))
        return found

    def column_of_code(self) -> Tensor:
        """Return the number of each code's column, (codes,), in the order of the features."""
        plain = self._num_dense - sum(self._bins)
        widths = torch.tensor([*self._bins, *[1] * plain, *self._sizes])
        return torch.repeat_interleave(torch.arange(len(widths)), widths)

    def dense(self, features: Features) -> Tensor:
        """Return the codes of numbers and images, the first ones, (rows, codes)."""
        parts: list[Tensor] = []
        if features.numeric is not None:
            places = features.numeric
            for column, bins in enumerate(self._bins):
                steps = torch.arange(bins, device=places.device)
                parts.append((places[:, column, None] - steps).clamp(0, 1))
            parts.append(places[:, len(self._bins) :])
        if features.image is not None:
            parts.append(image_as_float(features.image).flatten(1))
        # The number of rows stays open, as an export needs it.
        return torch.cat(parts, dim=1) if parts else self.weight.new_empty(len(features), 0)

    def slots(self, features: Features) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield places of codes, (rows, entries), and the value that each has there."""
        starts = self.get_buffer("starts")
        categories = 0 if features.categorical is None else features.categorical.shape[1]
        if features.categorical is not None:
            slots = features.categorical + starts[:categories]
            yield slots, torch.ones(1, 1, 1, device=slots.device)
        if features.tokens is not None and features.lengths is not None:
            columns = torch.split(features.tokens, self._max_lengths, dim=1)
            for column, tokens in enumerate(columns):
                lengths = features.lengths[:, column, None]
                is_there = torch.arange(tokens.shape[1], device=tokens.device) < lengths
                share = is_there / lengths.clamp(min=1)
                yield tokens + starts[categories + column], share[:, :, None]

    @property
    def num_bits(self) -> int:
        """Number of bits of a row, without the constant bit 1; 0 before ``before_labels``."""
        return self.get_buffer("of_bits").shape[1]

    def bits(self, features: Features) -> NDArray[np.bool_]:
        """Return the bits of rows over which labels are summed, (rows, num_bits)."""
        of_bits = self.get_buffer("of_bits")
        with torch.no_grad():
            is_above = self.values(features, of_bits[:-1]) > of_bits[-1]
            found: NDArray[np.bool_] = is_above.cpu().numpy()
        return found

    # ---- fitting ----

    def fit(self, blocks: Blocks, *, is_final: bool) -> None:
        """Fit principal components to a table's rows, from no label.

        They are clipped if they are final; a model that trains afterwards is not clipped.

        Raises SettingsError if there are fewer independent directions than components.
        """
        with torch.no_grad():
            directions, variances, mean = self.components(blocks, len(self.bias))
            scaled = directions * variances ** (-1 / 4)
            deviations = variances ** (1 / 4) if is_final else torch.full_like(variances, math.inf)
            self._set(slice(None), scaled, -mean @ scaled, deviations)

    def before_labels(self, blocks: Blocks) -> Tensor:
        """Choose the bits, and return what a score needs of a table's rows.

        A bit says on which side of the mean a row lies along a principal component of codes that
        are scaled half way to equal variance: it is dense, and the next ones tell little of it.

        Raises SettingsError for what could not be fitted to any labels: their release is charged.
        """
        if self.num_codes > MOST_DENSE:
            raise SettingsError(
                f"bottom_model: a score is fitted to at most {MOST_DENSE:,} codes, and the columns "
                f"have {self.num_codes:,}: leave out those of many categories, or set min_count"
            )
        moments = self.moments(blocks)
        mean, covariance = mean_and_covariance(moments)
        self._require_directions(_principal(covariance, len(self.bias))[1])
        scale = scales(covariance).sqrt()
        scaled = covariance / torch.outer(scale, scale)
        directions, variances = _principal(scaled, _MOST_BITS)
        # As many bits as are expected to tell most; each adds to the noise on all sums. Codes are
        # taken for normal, and to explain a tenth of a label's variance, of .16, at a bound of .600
        # on the leak AUC.
        shares, num_rows = variances[variances > 0] / scaled.trace(), float(moments[0, 0])
        signal = 0.1 * shares * num_rows**2 / (2 * math.pi)
        noise = num_rows / 4 + 2.79**2 / 0.16 * (torch.arange(1, len(shares) + 1) + 1)
        count = int(torch.log1p(signal / noise[:, None]).tril().sum(1).argmax()) + 1
        directions = directions[:, :count] / scale[:, None]
        self.of_bits = torch.cat([directions, (mean @ directions)[None]]).to(self.weight)
        return moments

    def fit_score(
        self, rows: Features, noisy: NDArray[np.float32], moments: Tensor, names: Sequence[str]
    ) -> None:
        """Fit scores to noisy labels of training rows, and components to a table's moments.

        Shapes: ``noisy`` (rows, 1), or of several classes (rows, classes). ``names`` holds the
        columns' names, in the order of the features.

        A score that is fitted without a row's own noisy label was measured to be no better for it.
        """
        with torch.no_grad():
            targets = torch.from_numpy(noisy).double()
            if targets.shape[1] > 1:  # shares of classes add up to 1, and the noise does not
                targets = (targets - targets.mean(1, keepdim=True))[:, :-1]
            self._fit(self.statistics_of_labels(rows, targets), moments, names)

    def fit_sums(
        self,
        blocks: Blocks,
        sums: NDArray[np.float64],
        sigma: float,
        moments: Tensor,
        names: Sequence[str],
    ) -> None:
        """Fit scores to noisy sums of training rows' labels, and components to a table's moments.

        ``sums``, (num_bits + 1, targets), adds up the labels, or shares of a range, over the rows
        of each bit, and last over all rows, each with normal noise of deviation ``sigma``.
        ``blocks`` yields those rows in parts.

        Raises InvalidMessage for sums of another shape, that are not finite, or that give no score.
        """
        if sums.shape[:-1] != (self.num_bits + 1,) or not np.isfinite([*sums.flat, sigma]).all():
            raise InvalidMessage(
                f"sums: expected finite ones over {self.num_bits + 1} bits, got {sums.shape}"
            )
        with torch.no_grad():
            joined = self._sums((part, torch.from_numpy(self.bits(part))) for part in blocks())
            try:
                statistics = statistics_of_sums(
                    joined, self.num_codes, torch.from_numpy(sums), sigma
                )
            except (OverflowError, RuntimeError) as error:  # the last is of torch.linalg
                raise InvalidMessage(f"sums with noise of deviation {sigma:g}") from error
            self._fit(statistics, moments, names)

    def statistics_of_groups(
        self, rows: Features, groups: NDArray[np.int64], sums: Tensor, sigma: float
    ) -> tuple[LabelStatistics, Tensor, Tensor]:
        """Return the statistics of noisy sums as for ``fit_sums``, codes' scales, and their means.

        Each row is in several ``groups``, (rows, groups of a row), counted from 0. The means,
        (groups, codes) float64, are less those of all rows.
        """
        codes, bits = 1 + self.num_codes, 1 + self.num_codes + self.num_bits
        every, count = torch.from_numpy(groups), 1 + int(groups.max())

        def parts() -> Iterator[tuple[Features, Tensor]]:
            for at in torch.split(torch.arange(len(groups)), FIT_ROWS):
                part = rows.rows(at.to(self.weight.device))
                members = torch.zeros(len(at), count).scatter_(1, every[at], 1)
                is_above = torch.from_numpy(self.bits(part)).float()
                yield part, torch.cat([is_above, members], dim=1)

        with torch.no_grad():
            joined = self._sums(parts())
            statistics = statistics_of_sums(joined[:bits, :bits], self.num_codes, sums, sigma)
            means = joined[bits:, 1:codes] / joined[bits:, :1] - statistics.mean
            return statistics, scales(statistics.covariance), means

    def statistics_of_labels(self, rows: Features, targets: Tensor) -> LabelStatistics:
        with torch.no_grad():
            return statistics_of_labels(self._sums_of(rows, targets), self.num_codes)

    def scores_of(self, rows: Features, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, (codes, targets), and bias of a score for each target, float64."""
        return Ridge(self.statistics_of_labels(rows, targets)).function()

    def _fit(self, statistics: LabelStatistics, moments: Tensor, names: Sequence[str]) -> None:
        weight, bias = Ridge(statistics).function()
        if not ((statistics.variance(weight) - 1).abs() < _ROUNDED).all():
            raise InvalidMessage("labels or sums to which no score can be fitted")
        first, settings = len(bias), self.settings
        of_code = np.array(names, dtype=object)[self.column_of_code()]
        if isinstance(settings, ScoreModel) and settings.max_column_share is not None:
            for name in sorted({*names}):
                share = statistics.share(weight, torch.from_numpy(np.flatnonzero(of_code == name)))
                if not share <= settings.max_column_share:
                    raise SettingsError(
                        f"bottom_model.max_column_share: {settings.max_column_share:g}; column "
                        f"{name} alone explains {share:.3f} of a score's variance. It was not sent."
                    )
        self._set(slice(0, first), weight, bias, torch.ones_like(bias))
        width = len(self.bias) - first
        mean, covariance = mean_and_covariance(moments)
        if width == 0:
            return
        if isinstance(settings, ScoreModel) and settings.columns is not None:
            worth = {
                name: Ridge(statistics, np.flatnonzero(of_code == name)).evidence
                for name in sorted({*names})
            }
            best = sorted(worth, key=lambda name: -worth[name])[: settings.columns]
            _logger.info("beside the score: components of %s", ", ".join(best))
            is_used = torch.from_numpy(np.isin(of_code, best)).double()
            covariance = covariance * torch.outer(is_used, is_used)  # what is 0 has no variance
        # Some columns may have fewer directions: the values that are left are 0.
        directions, variances = _principal(covariance, width)
        scaled = directions * variances.clamp(min=1e-30) ** (-1 / 4)
        self._set(slice(first, None), scaled, -mean @ scaled, variances ** (1 / 4))

    def moments(self, blocks: Blocks) -> Tensor:
        """Return the sums of the products of [1, codes] over a table's rows, float64."""
        sums = self._sums((part, torch.empty(len(part), 0)) for part in blocks())
        if not sums[0, 0]:
            raise DataError("bottom_model: there is no row to fit it to")
        return sums

    def _sums_of(self, rows: Features, targets: Tensor) -> Tensor:
        places = torch.split(torch.arange(len(targets)), FIT_ROWS)
        return self._sums((rows.rows(at.to(self.weight.device)), targets[at]) for at in places)

    def _sums(self, parts: Iterable[tuple[Features, Tensor]]) -> Tensor:
        """Return the sums of the products of [1, codes, targets]."""
        sums = torch.zeros((), dtype=torch.float64)
        for features, targets in parts:
            codes = self.codes(features).double().cpu()
            joined = torch.cat([torch.ones(len(codes), 1), codes, targets], dim=1)
            sums = sums + joined.T @ joined
        return sums if sums.ndim else sums.new_zeros(1, 1)

    def components(self, blocks: Blocks, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return directions, (codes, width), their variances, and the codes' mean, float64."""
        if self.num_codes <= MOST_DENSE:
            mean, covariance = mean_and_covariance(self.moments(blocks))
            directions, variances = _principal(covariance, width)
        else:
            from scipy import sparse  # noqa: PLC0415
            from sklearn.decomposition import PCA  # noqa: PLC0415

            parts = []
            for part in blocks():
                dense = sparse.csr_matrix(self.dense(part).numpy())
                dense.resize(len(part), self.num_codes)
                parts.append(dense)
                for slots, share in self.slots(part):
                    values = share.squeeze(-1).expand(slots.shape).flatten().numpy()
                    rows = np.repeat(np.arange(len(part)), slots.shape[1])
                    places = rows, slots.flatten().numpy()
                    parts[-1] += sparse.csr_matrix((values, places), dense.shape, np.float32)
            found = PCA(width, svd_solver="arpack", random_state=0).fit(sparse.vstack(parts))
            directions, variances = _signed(
                torch.from_numpy(found.components_.T.copy()).double(),
                torch.from_numpy(np.asarray(found.explained_variance_)).double(),
            )
            mean = torch.from_numpy(np.asarray(found.mean_)).double().flatten()
        self._require_directions(variances)
        return directions, variances, mean

    def _require_directions(self, variances: Tensor) -> None:
        rank, width = int((variances > 0).sum()), len(self.bias)
        if rank < width:
            raise SettingsError(
                f"bottom_model: the columns of data.features have {rank} independent directions; "
                f"expected contract.cut_shape of at most [{rank}], got {list(self.cut_shape)}"
            )

    def _set(self, columns: slice, weight: Tensor, bias: Tensor, deviations: Tensor) -> None:
        self.weight[:, columns] = weight.to(self.weight)
        self.bias[columns] = bias.to(self.bias)
        self.get_buffer("limit")[columns] = (_CLIP * deviations).to(self.bias)


def _principal(covariance: Tensor, width: int) -> tuple[Tensor, Tensor]:
    variances, directions = torch.linalg.eigh(covariance)
    return _signed(directions.flip(1)[:, :width], variances.flip(0)[:width])


def _signed(directions: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return directions with fixed signs; rounding errors become 0, with variance 0."""
    is_there = variances > _TINY * variances[0].clamp(min=_TINY)
    signs = torch.sign(directions.gather(0, directions.abs().argmax(0, keepdim=True)))
    return directions * signs * is_there, variances * is_there
