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
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.errors import DataError, InvalidMessage, SettingsError
from splitveil.common.models.ridge import (
    LabelStatistics,
    Numbers,
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
FIT_ROWS = 2**12  # rows whose codes are held at once
_AT_ONCE = 256  # rows that are computed at once, each entry of each by the cut's width
_ROUNDED = 1e-3  # a score's variance, which is 1, is less if there was nearly none to scale
_TINY = 1e-9  # share of the largest variance below which a component is rounding

Values = NDArray[np.float32]
Blocks = Callable[[], Iterable[Features]]
"""Yields a table's rows in parts, as arrays, the same at every call."""


def _functions_of(values: Any) -> Any:
    """Return NumPy for an array, or torch for a tensor: what is called here has the same names."""
    if isinstance(values, np.ndarray):
        return np
    import torch  # noqa: PLC0415 - arrays need none

    return torch


class Codes:
    """The codes of features, which are arrays, or the tensors of a network."""

    def __init__(self, shapes: FeatureShapes) -> None:
        self._bins = list(shapes.bins)
        image = math.prod(shapes.image_shape) if shapes.image_shape else 0
        self._num_dense = sum(self._bins) + shapes.numeric_dim - len(self._bins) + image
        self._sizes = [*shapes.vocabulary_sizes, *shapes.num_tokens]
        self._max_lengths = list(shapes.max_lengths)
        self.num_codes = self._num_dense + sum(self._sizes)
        self.starts = self._num_dense + np.array([0, *accumulate(self._sizes)][:-1], np.int64)
        """The first code of each column of categories or tokens."""

    def values(self, features: Features, weight: Any, starts: Any) -> Any:
        """Return codes times weights, (rows, width), without building the codes of categories.

        ``starts`` are those of this object, as an array or a tensor, as the other two are.
        """
        product: Callable[[Any, Any], Any]
        look_up: Callable[[Any], Any]
        if isinstance(weight, np.ndarray):
            # Unlike a product by BLAS, a sixth as long, it gives a row the same bits whatever rows
            # are beside it.
            product, look_up = partial(np.einsum, "rc,cw->rw"), weight.__getitem__
            found: Any = np.zeros((len(features), weight.shape[1]), np.float32)
        else:
            from torch.nn.functional import embedding  # noqa: PLC0415 - arrays need no torch

            product, look_up = operator.matmul, lambda slots: embedding(slots, weight)
            found = weight.new_zeros(())
        if self._num_dense:
            found = product(self.dense(features), weight[: self._num_dense])
        for slots, share in self.slots(features, starts):
            found = found + (look_up(slots) * share).sum(1)
        return found

    def column_of_code(self) -> NDArray[np.int64]:
        """Return the number of each code's column, (codes,), in the order of the features."""
        plain = self._num_dense - sum(self._bins)
        widths = np.array([*self._bins, *[1] * plain, *self._sizes], np.int64)
        return np.repeat(np.arange(len(widths)), widths)

    def dense(self, features: Features) -> Any:
        """Return the codes of numbers and images, the first ones, (rows, codes) float32."""
        parts: list[Any] = []
        if features.numeric is not None:
            places = features.numeric
            arange = _functions_of(places).arange
            for column, bins in enumerate(self._bins):
                steps = arange(bins, dtype=places.dtype, device=places.device)
                parts.append((places[:, column, None] - steps).clip(0, 1))
            parts.append(places[:, len(self._bins) :])
        if features.image is not None:
            image = image_as_float(features.image)
            # The number of rows stays open, as an export needs it.
            parts.append(image.reshape(image.shape[0], math.prod(image.shape[1:])))
        return _functions_of(parts[0]).concat(parts, 1)

    def slots(self, features: Features, starts: Any) -> Iterator[tuple[Any, Any]]:
        """Yield places of codes, (rows, entries), and the value that each has there."""
        categories = 0
        if features.categorical is not None:
            categories = features.categorical.shape[1]
            yield features.categorical + starts[:categories], 1.0
        if features.tokens is not None:
            start, arange = 0, _functions_of(features.tokens).arange
            for column, width in enumerate(self._max_lengths):
                tokens = features.tokens[:, start : start + width]
                lengths = features.lengths[:, column, None]
                is_there = arange(width, device=tokens.device) < lengths
                share = is_there / lengths.clip(min=1)
                yield tokens + starts[categories + column], share[:, :, None]
                start += width


class ComponentsBottom(Codes):
    """A linear function of codes, (rows, *cut_shape) float32; zero before it is fitted.

    It takes features that are arrays. A run with gradients trains a network with its weights.
    """

    def __init__(
        self, settings: PcaModel | ScoreModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        super().__init__(shapes)
        self.settings = settings
        self.cut_shape = tuple(cut_shape)
        width = math.prod(cut_shape)
        self.weight = np.zeros((self.num_codes, width), np.float32)
        self.bias = np.zeros(width, np.float32)
        self.limit = np.full(width, math.inf, np.float32)
        self.of_bits = np.zeros((self.num_codes + 1, 0), np.float32)
        """Weights, and in the last line thresholds, of the bits."""

    def state_dict(self) -> dict[str, Values]:
        return {"weight": self.weight, "bias": self.bias, "limit": self.limit}

    def load_state_dict(self, state: Mapping[str, Values]) -> None:
        for name, values in self.state_dict().items():
            values[...] = state[name]  # of other shapes, it raises ValueError

    def put_into(self, network: Any) -> None:
        """Give a network of the same shapes these weights."""
        import torch  # noqa: PLC0415 - only a network needs it

        network.load_state_dict({n: torch.tensor(one) for n, one in self.state_dict().items()})

    def __call__(self, features: Features) -> Values:
        """Return activations; a row's bits depend on no other row."""
        found = np.empty((len(features), *self.cut_shape), np.float32)
        for start in range(0, len(found), _AT_ONCE):
            at = slice(start, start + _AT_ONCE)
            values = self.values(features.rows(at), self.weight, self.starts) + self.bias
            found[at] = values.clip(-self.limit, self.limit).reshape(-1, *self.cut_shape)
        return found

    def codes(self, features: Features) -> Values:
        """Return the codes, (rows, codes) float32."""
        found = np.zeros((len(features), self.num_codes), np.float32)
        if self._num_dense:
            found[:, : self._num_dense] = self.dense(features)
        rows = np.arange(len(features))[:, None]
        for slots, share in self.slots(features, self.starts):
            np.add.at(found, (rows, slots), np.broadcast_to(share, (*slots.shape, 1))[..., 0])
        return found

    @property
    def num_bits(self) -> int:
        """Number of bits of a row, without the constant bit 1; 0 before ``before_labels``."""
        return self.of_bits.shape[1]

    def bits(self, features: Features) -> NDArray[np.bool_]:
        """Return the bits of rows over which labels are summed, (rows, num_bits)."""
        values = self.values(features, self.of_bits[:-1], self.starts)
        found: NDArray[np.bool_] = values > self.of_bits[-1]
        return found

    # ---- fitting ----

    def fit(self, blocks: Blocks, *, is_final: bool) -> None:
        """Fit principal components to a table's rows, from no label.

        They are clipped if they are final; a model that trains afterwards is not clipped.

        Raises SettingsError if there are fewer independent directions than components.
        """
        directions, variances, mean = self.components(blocks, len(self.bias))
        scaled = directions * variances ** (-1 / 4)
        deviations = variances ** (1 / 4) if is_final else np.full_like(variances, math.inf)
        self._set(slice(None), scaled, -mean @ scaled, deviations)

    def before_labels(self, blocks: Blocks) -> Numbers:
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
        scale = np.sqrt(scales(covariance))
        scaled = covariance / np.outer(scale, scale)
        directions, variances = _principal(scaled, _MOST_BITS)
        # As many bits as are expected to tell most; each adds to the noise on all sums. Codes are
        # taken for normal, and to explain a tenth of a label's variance, of .16, at a bound of .600
        # on the leak AUC.
        shares, num_rows = variances[variances > 0] / scaled.trace(), float(moments[0, 0])
        signal = 0.1 * shares * num_rows**2 / (2 * math.pi)
        noise = num_rows / 4 + 2.79**2 / 0.16 * (np.arange(1, len(shares) + 1) + 1)
        count = int(np.tril(np.log1p(signal / noise[:, None])).sum(1).argmax()) + 1
        directions = directions[:, :count] / scale[:, None]
        self.of_bits = np.vstack([directions, mean @ directions]).astype(np.float32)
        return moments

    def fit_score(
        self, rows: Features, noisy: Values, moments: Numbers, names: Sequence[str]
    ) -> None:
        """Fit scores to noisy labels of training rows, and components to a table's moments.

        Shapes: ``noisy`` (rows, 1), or of several classes (rows, classes). ``names`` holds the
        columns' names, in the order of the features.

        A score that is fitted without a row's own noisy label was measured to be no better for it.
        """
        targets = noisy.astype(np.float64)
        if targets.shape[1] > 1:  # shares of classes add up to 1, and the noise does not
            targets = (targets - targets.mean(1, keepdims=True))[:, :-1]
        self._fit(self.statistics_of_labels(rows, targets), moments, names)

    def fit_sums(
        self,
        blocks: Blocks,
        sums: NDArray[np.float64],
        sigma: float,
        moments: Numbers,
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
        joined = self._sums((part, self.bits(part)) for part in blocks())
        try:
            with np.errstate(over="raise", invalid="raise"):
                statistics = statistics_of_sums(joined, self.num_codes, sums, sigma)
        except (ArithmeticError, np.linalg.LinAlgError) as error:
            raise InvalidMessage(f"sums with noise of deviation {sigma:g}") from error
        self._fit(statistics, moments, names)

    def statistics_of_groups(
        self, rows: Features, groups: NDArray[np.int64], sums: Numbers, sigma: float
    ) -> tuple[LabelStatistics, Numbers, Numbers]:
        """Return the statistics of noisy sums as for ``fit_sums``, codes' scales, and their means.

        Each row is in several ``groups``, (rows, groups of a row), counted from 0. The means,
        (groups, codes) float64, are less those of all rows.
        """
        codes, bits = 1 + self.num_codes, 1 + self.num_codes + self.num_bits
        count = 1 + int(groups.max())

        def parts() -> Iterator[tuple[Features, NDArray[Any]]]:
            for start in range(0, len(groups), FIT_ROWS):
                at = slice(start, start + FIT_ROWS)
                part, members = rows.rows(at), np.zeros((len(groups[at]), count))
                np.put_along_axis(members, groups[at], 1, axis=1)
                yield part, np.column_stack([self.bits(part), members])

        joined = self._sums(parts())
        statistics = statistics_of_sums(joined[:bits, :bits], self.num_codes, sums, sigma)
        means = joined[bits:, 1:codes] / joined[bits:, :1] - statistics.mean
        return statistics, scales(statistics.covariance), means

    def statistics_of_labels(self, rows: Features, targets: Numbers) -> LabelStatistics:
        return statistics_of_labels(self._sums_of(rows, targets), self.num_codes)

    def scores_of(self, rows: Features, targets: Numbers) -> tuple[Numbers, Numbers]:
        """Return weights, (codes, targets), and bias of a score for each target, float64."""
        return Ridge(self.statistics_of_labels(rows, targets)).function()

    def _fit(self, statistics: LabelStatistics, moments: Numbers, names: Sequence[str]) -> None:
        with np.errstate(all="ignore"):
            weight, bias = Ridge(statistics).function()
        if not (np.abs(statistics.variance(weight) - 1) < _ROUNDED).all():
            raise InvalidMessage("labels or sums to which no score can be fitted")
        first, settings = len(bias), self.settings
        of_code = np.array(names, dtype=object)[self.column_of_code()]
        if isinstance(settings, ScoreModel) and settings.max_column_share is not None:
            for name in sorted({*names}):
                share = statistics.share(weight, np.flatnonzero(of_code == name))
                if not share <= settings.max_column_share:
                    raise SettingsError(
                        f"bottom_model.max_column_share: {settings.max_column_share:g}; column "
                        f"{name} alone explains {share:.3f} of a score's variance. It was not sent."
                    )
        self._set(slice(0, first), weight, bias, np.ones_like(bias))
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
            is_used = np.isin(of_code, best).astype(np.float64)
            covariance = covariance * np.outer(is_used, is_used)  # what is 0 has no variance
        # Some columns may have fewer directions: the values that are left are 0.
        directions, variances = _principal(covariance, width)
        scaled = directions * variances.clip(min=1e-30) ** (-1 / 4)
        self._set(slice(first, None), scaled, -mean @ scaled, variances ** (1 / 4))

    def moments(self, blocks: Blocks) -> Numbers:
        """Return the sums of the products of [1, codes] over a table's rows, float64."""
        sums = self._sums((part, np.empty((len(part), 0))) for part in blocks())
        if not sums[0, 0]:
            raise DataError("bottom_model: there is no row to fit it to")
        return sums

    def _sums_of(self, rows: Features, targets: Numbers) -> Numbers:
        places = np.array_split(np.arange(len(targets)), range(FIT_ROWS, len(targets), FIT_ROWS))
        return self._sums((rows.rows(at), targets[at]) for at in places)

    def _sums(self, parts: Iterable[tuple[Features, NDArray[Any]]]) -> Numbers:
        """Return the sums of the products of [1, codes, targets]."""
        sums: Numbers = np.zeros((1, 1))
        for features, targets in parts:
            codes = self.codes(features).astype(np.float64)
            joined = np.column_stack([np.ones(len(codes)), codes, targets])
            sums = sums + joined.T @ joined
        return sums

    def components(self, blocks: Blocks, width: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return directions, (codes, width), their variances, and the codes' mean, float64."""
        if self.num_codes <= MOST_DENSE:
            mean, covariance = mean_and_covariance(self.moments(blocks))
            directions, variances = _principal(covariance, width)
        else:
            from scipy import sparse  # noqa: PLC0415
            from sklearn.decomposition import PCA  # noqa: PLC0415

            parts = []
            for part in blocks():
                dense = np.empty((len(part), 0)) if not self._num_dense else self.dense(part)
                dense = sparse.csr_matrix(dense, dtype=np.float32)
                dense.resize(len(part), self.num_codes)
                parts.append(dense)
                for slots, share in self.slots(part, self.starts):
                    values = np.broadcast_to(share, (*slots.shape, 1)).flatten()
                    rows = np.repeat(np.arange(len(part)), slots.shape[1])
                    places = rows, slots.flatten()
                    parts[-1] += sparse.csr_matrix((values, places), dense.shape, np.float32)
            found = PCA(width, svd_solver="arpack", random_state=0).fit(sparse.vstack(parts))
            directions, variances = _signed(
                found.components_.T.astype(np.float64),
                np.asarray(found.explained_variance_, np.float64),
            )
            mean = np.asarray(found.mean_, np.float64).flatten()
        self._require_directions(variances)
        return directions, variances, mean

    def _require_directions(self, variances: Numbers) -> None:
        rank, width = int((variances > 0).sum()), len(self.bias)
        if rank < width:
            raise SettingsError(
                f"bottom_model: the columns of data.features have {rank} independent directions; "
                f"expected contract.cut_shape of at most [{rank}], got {list(self.cut_shape)}"
            )

    def _set(self, columns: slice, weight: Numbers, bias: Numbers, deviations: Numbers) -> None:
        self.weight[:, columns], self.bias[columns] = weight, bias
        self.limit[columns] = _CLIP * deviations


def _principal(covariance: Numbers, width: int) -> tuple[Numbers, Numbers]:
    variances, directions = np.linalg.eigh(covariance)
    return _signed(directions[:, ::-1][:, :width], variances[::-1][:width])


def _signed(directions: Numbers, variances: Numbers) -> tuple[Numbers, Numbers]:
    """Return directions with fixed signs; rounding errors become 0, with variance 0."""
    is_there = variances > _TINY * max(variances[0], _TINY)
    largest = np.abs(directions).argmax(0)[None]
    signs = np.sign(np.take_along_axis(directions, largest, axis=0))
    return directions * signs * is_there, variances * is_there
