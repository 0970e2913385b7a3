"""Features, and the encoder that makes them with its scalers and vocabularies.

The encoder is fitted on a party's own training rows only and saved with its model.

- A number x becomes (x - shift) / scale, after sign(x) log(1 + |x|) if the settings say so. For a
  model that embeds numbers, it becomes its place among the edges of bins, 2.5 in the middle of the
  third bin, and no number lies outside.
- A gap is filled before the scaling if the settings say so, with a number that was fitted; an
  indicator column is 1 where the gap was.
- A category becomes a slot: 0 for a category that is absent from the training rows (or too rare),
  1 for "no value", 2 and up for the others in the order of their text.
- A list of categories becomes a number per category, 1 or 0.
- A sequence becomes its tokens, padded with zeros, and its length.
- Images are not changed.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from splitveil.common.data.columns import Numbers
from splitveil.common.data.sequences import SetMembers, TokenColumn, TokenReader, count_members
from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.table import Table
from splitveil.common.errors import DataError
from splitveil.common.settings import Section, validate

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

UNKNOWN_SLOT = 0
MISSING_SLOT = 1
FIRST_CATEGORY_SLOT = 2

ImageDtype = Literal["uint8", "float32"]


@dataclass(frozen=True, eq=False)
class Features:
    """The input of a party's model for some rows. At least one part is present.

    The parts are arrays as an encoder returns them, and tensors after ``to``, as networks take
    them.
    """

    numeric: Any = None
    """(rows, numeric columns), float32."""

    categorical: Any = None
    """(rows, categorical columns), int64 slots."""

    image: Any = None
    """(rows, channels, height, width), uint8 or float32 as in the file; see ``image_as_float``."""

    tokens: Any = None
    """(rows, max_length of all columns of sequences together), int64; zeros behind each sequence.
    """

    lengths: Any = None
    """(rows, columns of sequences), int64; 0 for an empty cell."""

    def __len__(self) -> int:
        return next(map(len, self.parts()), 0)

    def rows(self, index: Any) -> "Features":
        """Return the rows with these positions, (count,) int64, of the kind of the parts."""
        if isinstance(self.parts()[0], np.ndarray):
            return self.changed(lambda part: part[index])
        # Indexing copies value by value: four times as long for rows of 64 numbers.
        return self.changed(lambda part: part.index_select(0, index))

    def to(self, device: "torch.device | str") -> "Features":
        """Return tensors; on the CPU, those of arrays share their memory."""
        import torch  # noqa: PLC0415 - a party without a network needs none

        return self.changed(lambda part: torch.as_tensor(part, device=device))

    def arrays(self) -> "Features":
        return self.changed(lambda part: np.asarray(part.cpu()))

    def changed(self, change: Callable[[Any], Any]) -> "Features":
        """Return what a function makes of the parts that are present."""
        parts = (self.numeric, self.categorical, self.image, self.tokens, self.lengths)
        return Features(*(None if part is None else change(part) for part in parts))

    def parts(self) -> list[Any]:
        """Return the parts that are present."""
        parts = (self.numeric, self.categorical, self.image, self.tokens, self.lengths)
        return [part for part in parts if part is not None]


def image_as_float(image: Any) -> Any:
    """Return an image, a tensor or an array, as float32, bytes scaled to [0, 1]."""
    if isinstance(image, np.ndarray):
        return image.astype(np.float32) / np.float32(255 if image.dtype == np.uint8 else 1)
    return image if image.is_floating_point() else image.float() / 255


class FeatureShapes(NamedTuple):
    """The shapes of `Features` that a model is built for."""

    numeric_dim: int = 0
    """Number of scaled numbers in a row, gap indicators included."""

    vocabulary_sizes: tuple[int, ...] = ()
    """Number of slots of each column of categories: the rows of an embedding."""

    image_shape: tuple[int, int, int] | None = None  # channels, height, width
    image_dtype: ImageDtype = "uint8"
    bins: tuple[int, ...] = ()
    """Number of bins of each of the first numeric columns, whose numbers are places among them."""

    num_tokens: tuple[int, ...] = ()
    """Number of tokens that each column of sequences may hold: the rows of an embedding."""

    max_lengths: tuple[int, ...] = ()
    """Number of places of ``tokens`` for each column of sequences, side by side."""

    def zeros(self, num_rows: int) -> Features:
        """Return tensors of so many rows."""
        image = None
        if self.image_shape is not None:
            image = np.zeros((num_rows, *self.image_shape), self.image_dtype)

        def of(count: int, dtype: type) -> NDArray[Any] | None:
            return np.zeros((num_rows, count), dtype) if count else None

        return Features(
            of(self.numeric_dim, np.float32),
            of(len(self.vocabulary_sizes), np.int64),
            image,
            of(sum(self.max_lengths), np.int64),
            of(len(self.max_lengths), np.int64),
        ).to("cpu")


class NumericScaler(Section):
    name: str
    shift: float
    scale: float = Field(gt=0)
    fill: float | None = None
    """The number in place of a gap, before the scaling; None if gaps are read as 0."""

    had_gaps: bool = False
    """Whether a training row had a gap that was filled."""

    low: float | None = None
    """No number of a training row is below, before the scaling; rounded."""

    high: float | None = None


class Vocabulary(Section):
    name: str
    categories: tuple[str, ...]
    """The texts of slots 2 and up; of a column of lists, those with a number of their own, before
    the one for all others."""


class ImageInfo(Section):
    """The kind of images that the encoder was fitted on."""

    shape: tuple[int, int, int]
    """Channels, height, width."""

    dtype: ImageDtype


class FeatureEncoder(Section):
    """Turns rows of a table into tensors with fitted scalers and vocabularies."""

    signed_log1p: bool

    numeric: tuple[NumericScaler, ...]
    """Numeric columns, in the order of the tensor's columns."""

    categorical: tuple[Vocabulary, ...]
    """Categorical columns, in the order of the tensor's columns."""

    image: ImageInfo | None
    indicators: tuple[str, ...] = ()
    """Numeric columns whose gaps have an indicator, after all scaled numbers."""

    timestamps: tuple[str, ...] = ()
    """Columns of times, whose parts are among ``numeric``."""

    lists: tuple[Vocabulary, ...] = ()
    """Columns of lists; their numbers come after the indicators."""

    sequences: tuple[TokenColumn, ...] = ()
    """Columns of sequences, in the order of their tokens."""

    bins: tuple[tuple[float, ...], ...] = ()
    """Edges of each numeric column's bins, in the unit of scaled numbers, ascending; or none."""

    @classmethod
    def fit(
        cls,
        settings: FeatureSettings,
        table: Table,
        rows: NDArray[np.int64],
        num_bins: int = 0,
        sequences: tuple[TokenColumn, ...] = (),
    ) -> "FeatureEncoder":
        """Fit scalers, vocabularies and bins on the training rows of the party's own table.

        No other row has any influence.
        """
        if len(rows) == 0:
            raise DataError(f"{table.source}: there are no training rows to fit scalers on")
        found = Fitted(table, settings)
        # In the file's order and in parts, so that a table on disk is read once, front to back.
        ordered = np.sort(rows)
        for start in range(0, len(ordered), FIT_ROWS):
            found.add(table, ordered[start : start + FIT_ROWS])
        fills, bins = found.fills(table, ordered), found.bins(table, ordered, num_bins)
        with_gaps = found.with_gaps()
        _say_cut(sequences, table, ordered)
        return cls(
            signed_log1p=settings.signed_log1p,
            numeric=tuple(
                NumericScaler(
                    name=name,
                    shift=shift,
                    scale=scale,
                    fill=fills.get(name),
                    had_gaps=name in with_gaps,
                    **found.bounds(name),
                )
                for name, (shift, scale) in found.scales().items()
            ),
            categorical=tuple(
                Vocabulary(name=name, categories=kept) for name, kept in found.vocabularies(table)
            ),
            image=None if table.image is None else _image_info(table.image),
            indicators=with_gaps if settings.missing_indicator else (),
            timestamps=table.timestamps,
            lists=tuple(
                Vocabulary(name=name, categories=kept) for name, kept in found.members(table)
            ),
            sequences=sequences,
            bins=bins,
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "FeatureEncoder":
        """Build the encoder that ``state`` was taken from; SettingsError if it is none."""
        return validate(cls, state, "feature encoder")

    def state(self) -> dict[str, Any]:
        """Return everything that was fitted, as values that JSON represents exactly."""
        # What is fitted only on request is left out, as it was before there was such a request.
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def columns(self) -> set[str]:
        """The names of all columns that become features."""
        kinds = (self.numeric, self.categorical, self.lists, self.sequences)
        return {column.name for kind in kinds for column in kind}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the tensors' columns; "" for an image."""
        numbers = (name.removesuffix(": gap") for name, n in self.numeric_parts for _ in range(n))
        categories = (column.name for column in self.categorical)
        sequences = (column.name for column in self.sequences)
        image = () if self.image is None else ("",) * math.prod(self.image.shape)
        return (*numbers, *image, *categories, *sequences)

    def by_column(self, features: Features) -> dict[str, NDArray[Any]]:
        """Return encoded numbers and categories by column; no lists, sequences and images."""
        names = [name for name, _ in self.numeric_parts[: len(self.numeric + self.indicators)]]
        parts = (
            (names, features.numeric),
            ([c.name for c in self.categorical], features.categorical),
        )
        found = [zip(one, np.asarray(of).T, strict=False) for one, of in parts if of is not None]
        return dict(itertools.chain(*found))

    @property
    def numeric_parts(self) -> tuple[tuple[str, int], ...]:
        """The meaning of the numbers that ``transform`` returns, and how many each of them has."""
        return (
            *((scaler.name, 1) for scaler in self.numeric),
            *((f"{name}: gap", 1) for name in self.indicators),
            *((column.name, len(column.categories) + 1) for column in self.lists),
        )

    @property
    def shapes(self) -> FeatureShapes:
        """The shapes of the features that ``transform`` returns."""
        sizes = tuple(FIRST_CATEGORY_SLOT + len(column.categories) for column in self.categorical)
        numeric_dim = sum(width for _, width in self.numeric_parts)
        bins = tuple(len(edges) - 1 for edges in self.bins)
        found = FeatureShapes(
            numeric_dim,
            sizes,
            bins=bins,
            num_tokens=tuple(column.num_tokens for column in self.sequences),
            max_lengths=tuple(column.max_length for column in self.sequences),
        )
        if self.image is None:
            return found
        return found._replace(image_shape=self.image.shape, image_dtype=self.image.dtype)

    def transform(self, table: Table, rows: NDArray[np.int64]) -> Features:
        """Return some rows of a table as tensors.

        DataError if it lacks a column or has other images.
        """
        return RowEncoder(self, table)(rows).to("cpu")

    def check_same_columns(self, table: Table) -> None:
        """Check that a table has the columns, images and gaps that the encoder was fitted on."""
        absent = [
            column.name
            for kind in ("numeric", "categorical", "lists", "sequences")
            for column in getattr(self, kind)
            if column.name not in getattr(table, kind)
        ]
        if absent:
            raise DataError(
                f"{table.source}: the model was trained with columns that are missing here: "
                f"{', '.join(absent)}"
            )
        fills = any(scaler.fill is not None for scaler in self.numeric)
        had_gaps = any(scaler.had_gaps for scaler in self.numeric)
        if self.numeric and (
            (table.gaps == "zero" and had_gaps) or (table.gaps == "nan" and not fills)
        ):
            raise DataError(
                f"{table.source}: the model was trained with another treatment of missing numbers: "
                f"set data.features.missing_numeric and missing_indicator as they were then"
            )
        image = None if table.image is None else _image_info(table.image)
        if image != self.image:
            raise DataError(
                f"{table.source}: the model was trained with images {self.image}, got {image}"
            )


class RowEncoder:
    """Encodes rows of one table; DataError if it lacks a column or has other images."""

    def __init__(self, encoder: FeatureEncoder, table: Table) -> None:
        encoder.check_same_columns(table)
        self._encoder, self._table = encoder, table
        self._slots = []
        for v in encoder.categorical:
            texts, known = table.categorical[v.name].categories, pa.array(v.categories, pa.string())
            places = pc.add(pc.index_in(texts, value_set=known), FIRST_CATEGORY_SLOT)
            slots = pc.fill_null(places, UNKNOWN_SLOT).to_numpy()
            # Code -1, no value, selects the last entry.
            self._slots.append((v.name, np.append(slots, MISSING_SLOT)))
        self._members = [
            (v.name, SetMembers(table.lists[v.name].categories, v.categories))
            for v in encoder.lists
        ]
        self._tokens = [
            (v.name, TokenReader(v, table.sequences[v.name].categories, table.source))
            for v in encoder.sequences
        ]

    def __call__(self, rows: NDArray[np.int64]) -> Features:
        codes_of = self._table.codes_at(rows)
        numeric = self._scaled(rows)
        if self._members:
            members = [members(codes_of(name)) for name, members in self._members]
            numeric = np.concatenate([numeric, *members], axis=1)
        categorical = np.empty((len(rows), len(self._slots)), dtype=np.int64)
        for j, (name, slots) in enumerate(self._slots):
            categorical[:, j] = slots[codes_of(name)]
        image, tokens, lengths = self._table.image, [], []
        for name, read in self._tokens:
            padded, length, _ = read(codes_of(name))
            tokens.append(padded)
            lengths.append(length)
        return Features(
            numeric if numeric.shape[1] else None,
            categorical if self._slots else None,
            None if image is None else np.ascontiguousarray(image[rows]),
            np.concatenate(tokens, axis=1) if tokens else None,
            np.stack(lengths, axis=1) if lengths else None,
        )

    def _scaled(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        encoder, numbers_of = self._encoder, self._table.numbers_at(rows)
        width = len(encoder.numeric) + len(encoder.indicators)
        result = np.zeros((len(rows), width), dtype=np.float32)
        for j, scaler in enumerate(encoder.numeric):
            values = compress(numbers_of(scaler.name), signed_log1p=encoder.signed_log1p)
            if scaler.fill is not None:
                is_gap = np.isnan(values)
                values = np.where(is_gap, scaler.fill, values)
                if scaler.name in encoder.indicators:
                    place = len(encoder.numeric) + encoder.indicators.index(scaler.name)
                    result[:, place] = is_gap
            scaled = (values - scaler.shift) / scaler.scale
            if encoder.bins:
                edges = encoder.bins[j]
                scaled = np.interp(scaled, edges, np.arange(len(edges)))
            result[:, j] = scaled
        return result


@dataclass(frozen=True, eq=False, kw_only=True)
class MappedFeatures(Features):
    """Features of many rows; only the requested rows are read and encoded."""

    encode: RowEncoder
    file_rows: NDArray[np.int64]
    """Rows of the table, in the order of these features, (rows,)."""

    device: "torch.device | str | None" = None
    """Of the tensors that ``rows`` returns; None for arrays."""

    def __len__(self) -> int:
        return len(self.file_rows)

    def rows(self, index: Any) -> Features:
        if self.device is None:
            return self.encode(self.file_rows[index])
        return self.encode(self.file_rows[index.cpu().numpy()]).to(self.device)

    def to(self, device: "torch.device | str") -> "MappedFeatures":
        return replace(self, device=device)


def _image_info(image: NDArray[Any]) -> ImageInfo:
    _, channels, height, width = image.shape
    return ImageInfo(
        shape=(channels, height, width), dtype="uint8" if image.dtype == np.uint8 else "float32"
    )


FIT_ROWS = 2**20

ORDERED_NUMBERS = 2**26
"""Numbers that are held at once to find medians and bins, 0.5 GiB."""

BIN_ROWS = 2**16
"""Most training rows that bins are fitted on, evenly spaced in the file if there are more."""


class Fitted:
    def __init__(self, table: Table, settings: FeatureSettings) -> None:
        self._settings = settings
        self._keeps_gaps = table.gaps == "nan"
        self._ranges = {name: _Range() for name in table.numeric}
        self._num_gaps = dict.fromkeys(table.numeric, 0)
        self._counts = {
            name: np.zeros(len(column.categories), np.int64)
            for name, column in table.categorical.items()
        }
        self._sets = {
            name: np.zeros(len(column.categories), np.int64) for name, column in table.lists.items()
        }

    def add(self, table: Table, rows: NDArray[np.int64]) -> None:
        for name, values in table.numeric.items():
            numbers = self._compressed(values[rows])
            if self._keeps_gaps:
                self._num_gaps[name] += int(np.count_nonzero(np.isnan(numbers)))
            self._ranges[name].add(self._present(numbers))
        for columns, counts in ((table.categorical, self._counts), (table.lists, self._sets)):
            for name, column in columns.items():
                codes = column.codes[rows]
                counts[name] += np.bincount(codes[codes >= 0], minlength=len(counts[name]))

    def scales(self) -> dict[str, tuple[float, float]]:
        """Return shift and scale by column."""
        return {name: _scale(found, self._settings) for name, found in self._ranges.items()}

    def fills(self, table: Table, rows: NDArray[np.int64]) -> dict[str, float]:
        """Return the number in place of a gap of each column; empty if gaps are read as 0.

        Training rows are ascending.
        """
        if table.gaps == "zero":
            return {}
        match self._settings.missing_numeric:
            case "mean" | "error":  # an error in training only
                return {name: found.mean for name, found in self._ranges.items()}
            case "median":
                columns = self._columns(table, rows)
                return {name: float(np.median(v)) if len(v) else 0.0 for name, v in columns}
            case _:
                return dict.fromkeys(self._ranges, 0.0)

    def bins(
        self, table: Table, rows: NDArray[np.int64], num_bins: int
    ) -> tuple[tuple[float, ...], ...]:
        """Return the edges of each column's bins, in the scaled unit; empty for no bins.

        Training rows are ascending.
        """
        if not num_bins:
            return ()
        some = rows[np.linspace(0, len(rows) - 1, min(len(rows), BIN_ROWS)).astype(np.int64)]
        scales = self.scales()
        found = []
        for name, values in self._columns(table, some):
            shift, scale = scales[name]
            edges = np.unique((values - shift) / scale)
            if len(edges) > num_bins + 1:
                edges = np.unique(np.quantile(edges, np.linspace(0, 1, num_bins + 1)))
            found.append(tuple(edges.tolist()) or (0.0,))
        return tuple(found)

    def bounds(self, name: str) -> dict[str, float]:
        """Return a column's range, empty if there are only gaps.

        It is rounded outwards: what a model's files hold is the number of no single row.
        """
        low, high = self._ranges[name].low, self._ranges[name].high
        if low > high:
            return {}
        width = min(high - low or abs(high) or 1.0, 1e300)
        step = 10.0 ** (math.floor(math.log10(max(width, 1e-300))) - 2)
        return {"low": math.floor(low / step) * step, "high": math.ceil(high / step) * step}

    def with_gaps(self) -> tuple[str, ...]:
        """Return the columns that had gaps which were kept."""
        return tuple(name for name, count in self._num_gaps.items() if count)

    def vocabularies(self, table: Table) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each categorical column with the categories that are frequent enough."""
        for name, counts in self._counts.items():
            kept = np.flatnonzero(counts >= self._settings.min_count)
            texts = table.categorical[name].categories.take(kept).to_pylist()
            yield name, tuple(sorted(texts))

    def members(self, table: Table) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each column of lists with the categories that are kept."""
        for name, counts in self._sets.items():
            found = count_members(table.lists[name].categories, counts)
            least = max(1, self._settings.min_count)
            frequent = [text for text, count in found.items() if count >= least]
            first = sorted(frequent, key=lambda text: (-found[text], text))
            yield name, tuple(sorted(first[: self._settings.max_list_categories]))

    def _compressed(self, values: Numbers) -> NDArray[np.float64]:
        return compress(values, signed_log1p=self._settings.signed_log1p)

    def _present(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._keeps_gaps:
            return values
        is_gap = np.isnan(values)
        if self._settings.missing_numeric == "zero":
            return np.where(is_gap, 0.0, values)
        return values[~is_gap]

    def _columns(
        self, table: Table, rows: NDArray[np.int64]
    ) -> Iterator[tuple[str, NDArray[np.float64]]]:
        names = list(table.numeric)
        at_once = max(1, ORDERED_NUMBERS // len(rows))
        for first in range(0, len(names), at_once):
            some = names[first : first + at_once]
            block = np.empty((len(some), len(rows)))
            # In parts, so that a table on disk is read once for all of these columns.
            for start in range(0, len(rows), FIT_ROWS):
                part = slice(start, start + FIT_ROWS)
                for j, name in enumerate(some):
                    block[j, part] = self._compressed(table.numeric[name][rows[part]])
            for name, values in zip(some, block, strict=True):
                yield name, self._present(values)


def compress(values: Numbers, *, signed_log1p: bool) -> NDArray[np.float64]:
    """Return sign(x) log(1 + |x|) if the settings say so, in float64."""
    wide = values.astype(np.float64, copy=False)
    return np.sign(wide) * np.log1p(np.abs(wide)) if signed_log1p else wide


class _Range:
    """Accumulates minimum, maximum, mean and squared deviations of numbers that come in parts.

    For two parts with n and m numbers and means a and b, the mean changes by (b - a) m / (n + m),
    and the sum of the squared deviations grows by (b - a)^2 n m / (n + m) beyond the sum of both
    parts (Chan, Golub and LeVeque, 1979).
    """

    def __init__(self) -> None:
        self.low = math.inf
        self.high = -math.inf
        self.mean = 0.0
        self._squares = 0.0
        self._count = 0

    def add(self, values: NDArray[np.float64]) -> None:
        if not len(values):
            return
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        mean, count = float(values.mean()), len(values)
        difference, total = mean - self.mean, self._count + count
        self._squares += float(np.square(values - mean).sum())
        self._squares += difference**2 * self._count * count / total
        self.mean += difference * count / total
        self._count = total

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self._count)


def _scale(found: _Range, settings: FeatureSettings) -> tuple[float, float]:
    if settings.numeric_scaling == "none" or found.low > found.high:  # nothing but gaps
        return 0.0, 1.0
    if found.low == found.high:
        # The standard deviation would consist of rounding errors and blow up other values.
        return found.low, 1.0
    if settings.numeric_scaling == "min_max":
        return found.low, found.high - found.low
    # The squares of numbers below 1e-154 are 0, and then so is the deviation.
    scale = found.deviation or found.high - found.low
    return found.mean, scale


MEASURED_ROWS = 2**12
"""Training rows whose sequences are compared with ``max_length``, if there are more."""


def _say_cut(columns: Sequence[TokenColumn], table: Table, rows: NDArray[np.int64]) -> None:
    """Warn of columns with training rows longer than ``max_length``."""
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), MEASURED_ROWS)).astype(np.int64)]
    for column in columns:
        coded = table.sequences[column.name]
        _, _, is_cut = TokenReader(column, coded.categories, table.source)(coded.codes[some])
        if is_cut.any():
            _logger.warning(
                "%s: column %r: %d of %d sequences are longer than max_length, %d tokens, and "
                "their ends are cut off",
                table.source,
                column.name,
                is_cut.sum(),
                len(some),
                column.max_length,
            )
