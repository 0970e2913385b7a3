"""Feature tensors, and the encoder that makes them with its scalers and vocabularies.

The encoder is fitted on a party's own training rows only and saved with its model.

- A number x becomes (x - shift) / scale, after sign(x) log(1 + |x|) if the settings say so.
- A category becomes a slot: 0 for a category that is absent from the training rows (or too rare),
  1 for "no value", 2 and up for the others in the order of their text.
- Images are not changed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from splitveil.common.data.settings import FeatureSettings
from splitveil.common.data.table import Table
from splitveil.common.errors import DataError
from splitveil.common.settings import Section, validate

UNKNOWN_SLOT = 0
MISSING_SLOT = 1
FIRST_CATEGORY_SLOT = 2

FIT_ROWS = 2**20

ImageDtype = Literal["uint8", "float32"]


@dataclass(frozen=True, eq=False)
class Features:
    """The input of a party's model for some rows. At least one part is present."""

    numeric: Tensor | None = None
    """(rows, numeric columns), float32."""

    categorical: Tensor | None = None
    """(rows, categorical columns), int64 slots."""

    image: Tensor | None = None
    """(rows, channels, height, width), uint8 or float32 as in the file; see ``image_as_float``."""

    def __len__(self) -> int:
        return next((len(part) for part in self.parts() if part is not None), 0)

    def rows(self, index: Tensor) -> "Features":
        """Return the rows with these positions, (count,) int64, in this order."""
        return Features(*(None if part is None else part[index] for part in self.parts()))

    def to(self, device: torch.device) -> "Features":
        """Return the same features on a device."""
        return Features(*(None if part is None else part.to(device) for part in self.parts()))

    def parts(self) -> tuple[Tensor | None, ...]:
        """Return numbers, categories and images, each None if there are none."""
        return self.numeric, self.categorical, self.image


def image_as_float(image: Tensor) -> Tensor:
    """Return an image as float32, bytes scaled to [0, 1]."""
    return image.float() / 255 if image.dtype == torch.uint8 else image


class FeatureShapes(NamedTuple):
    """The shapes of the features that a model is built for."""

    numeric_dim: int = 0
    vocabulary_sizes: tuple[int, ...] = ()
    image_shape: tuple[int, int, int] | None = None  # channels, height, width
    image_dtype: ImageDtype = "uint8"

    def zeros(self, num_rows: int) -> Features:
        """Return all-zero features of these shapes."""
        image = None
        if self.image_shape is not None:
            dtype = torch.uint8 if self.image_dtype == "uint8" else torch.float32
            image = torch.zeros(num_rows, *self.image_shape, dtype=dtype)
        num_categorical = len(self.vocabulary_sizes)
        return Features(
            torch.zeros(num_rows, self.numeric_dim) if self.numeric_dim else None,
            torch.zeros(num_rows, num_categorical, dtype=torch.int64) if num_categorical else None,
            image,
        )


class NumericScaler(Section):
    """The scaling of one numeric column."""

    name: str
    """The column."""

    shift: float
    """Subtracted from each number."""

    scale: float = Field(gt=0)
    """Divides the difference."""


class Vocabulary(Section):
    """The categories of one column."""

    name: str
    """The column."""

    categories: tuple[str, ...]
    """The texts of slots 2 and up."""


class ImageInfo(Section):
    """The kind of images that the encoder was fitted on."""

    shape: tuple[int, int, int]
    """Channels, height, width."""

    dtype: ImageDtype
    """Element type."""


class FeatureEncoder(Section):
    """Turns rows of a table into tensors with fitted scalers and vocabularies."""

    signed_log1p: bool
    """Whether numbers become sign(x) log(1 + |x|) before scaling."""

    numeric: tuple[NumericScaler, ...]
    """Numeric columns, in the order of the tensor's columns."""

    categorical: tuple[Vocabulary, ...]
    """Categorical columns, in the order of the tensor's columns."""

    image: ImageInfo | None
    """The kind of images, if there are images."""

    @classmethod
    def fit(
        cls, settings: FeatureSettings, table: Table, rows: NDArray[np.int64]
    ) -> "FeatureEncoder":
        """Fit scalers and vocabularies on some rows of the party's own table.

        Args:
            settings: say how numbers are scaled and which categories are too rare.
            table: the party's table.
            rows: indices of the training rows in the table; no other row has any influence.

        Raises:
            DataError: there are no rows to fit on.
        """
        if len(rows) == 0:
            raise DataError(f"{table.source}: there are no training rows to fit scalers on")
        ranges = {name: _Range() for name in table.numeric}
        counts = {
            name: np.zeros(len(column.categories), np.int64)
            for name, column in table.categorical.items()
        }
        # In the file's order and in parts, so that a table on disk is read once, front to back.
        ordered = np.sort(rows)
        for start in range(0, len(ordered), FIT_ROWS):
            some = ordered[start : start + FIT_ROWS]
            for name, values in table.numeric.items():
                ranges[name].add(compress(values[some], signed_log1p=settings.signed_log1p))
            for name, column in table.categorical.items():
                codes = column.codes[some]
                counts[name] += np.bincount(codes[codes >= 0], minlength=len(counts[name]))
        return cls(
            signed_log1p=settings.signed_log1p,
            numeric=tuple(_scaler(name, found, settings) for name, found in ranges.items()),
            categorical=tuple(
                _vocabulary(name, table.categorical[name].categories, count, settings.min_count)
                for name, count in counts.items()
            ),
            image=None if table.image is None else _image_info(table.image),
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "FeatureEncoder":
        """Build the encoder that ``state`` was taken from.

        Raises:
            SettingsError: this is not the state of an encoder.
        """
        return validate(cls, state, "feature encoder")

    def state(self) -> dict[str, Any]:
        """Return everything that was fitted, as values that JSON represents exactly."""
        return self.model_dump(mode="json")

    @property
    def shapes(self) -> FeatureShapes:
        """The shapes of the features that ``transform`` returns."""
        sizes = tuple(FIRST_CATEGORY_SLOT + len(column.categories) for column in self.categorical)
        if self.image is None:
            return FeatureShapes(len(self.numeric), sizes)
        return FeatureShapes(len(self.numeric), sizes, self.image.shape, self.image.dtype)

    def transform(self, table: Table, rows: NDArray[np.int64]) -> Features:
        """Return some rows of a table as tensors.

        Raises:
            DataError: the table lacks a column that the encoder was fitted on, or has other images.
        """
        self.check_same_columns(table)
        numeric = np.empty((len(rows), len(self.numeric)), dtype=np.float32)
        for j, scaler in enumerate(self.numeric):
            values = compress(table.numeric[scaler.name][rows], signed_log1p=self.signed_log1p)
            numeric[:, j] = (values - scaler.shift) / scaler.scale
        categorical = np.empty((len(rows), len(self.categorical)), dtype=np.int64)
        for j, vocabulary in enumerate(self.categorical):
            column = table.categorical[vocabulary.name]
            # Code -1, no value, selects the last entry.
            slots = np.append(slots_of(vocabulary, column.categories), MISSING_SLOT)
            categorical[:, j] = slots[column.codes[rows]]
        image = None if table.image is None else np.ascontiguousarray(table.image[rows])
        return Features(
            torch.from_numpy(numeric) if self.numeric else None,
            torch.from_numpy(categorical) if self.categorical else None,
            None if image is None else torch.from_numpy(image),
        )

    def check_same_columns(self, table: Table) -> None:
        """Check that a table has the columns and images that the encoder was fitted on.

        Raises:
            DataError: it lacks a column, or has other images.
        """
        absent = [s.name for s in self.numeric if s.name not in table.numeric]
        absent += [v.name for v in self.categorical if v.name not in table.categorical]
        if absent:
            raise DataError(
                f"{table.source}: the model was trained with columns that are missing here: "
                f"{', '.join(absent)}"
            )
        image = None if table.image is None else _image_info(table.image)
        if image != self.image:
            raise DataError(
                f"{table.source}: the model was trained with images {self.image}, got {image}"
            )


def compress(values: NDArray[np.float64], *, signed_log1p: bool) -> NDArray[np.float64]:
    """Return sign(x) log(1 + |x|) if the settings say so."""
    return np.sign(values) * np.log1p(np.abs(values)) if signed_log1p else values


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


def _scaler(name: str, found: _Range, settings: FeatureSettings) -> NumericScaler:
    if settings.numeric_scaling == "none":
        return NumericScaler(name=name, shift=0.0, scale=1.0)
    if found.low == found.high:
        # The standard deviation would consist of rounding errors and blow up other values.
        return NumericScaler(name=name, shift=found.low, scale=1.0)
    if settings.numeric_scaling == "min_max":
        return NumericScaler(name=name, shift=found.low, scale=found.high - found.low)
    # The squares of numbers below 1e-154 are 0, and then so is the deviation.
    scale = found.deviation or found.high - found.low
    return NumericScaler(name=name, shift=found.mean, scale=scale)


def _vocabulary(
    name: str, categories: Any, counts: NDArray[np.int64], min_count: int
) -> Vocabulary:
    kept = np.flatnonzero(counts >= min_count)
    return Vocabulary(name=name, categories=tuple(sorted(categories.take(kept).to_pylist())))


def slots_of(vocabulary: Vocabulary, categories: Any) -> NDArray[np.int64]:
    """Return the slot of each of a table's distinct texts."""
    indices = pc.index_in(categories, value_set=pa.array(vocabulary.categories, pa.string()))
    slots = pc.fill_null(pc.add(indices, FIRST_CATEGORY_SLOT), UNKNOWN_SLOT).to_numpy()
    return np.asarray(slots, dtype=np.int64)


def _image_info(image: NDArray[Any]) -> ImageInfo:
    _, channels, height, width = image.shape
    return ImageInfo(
        shape=(channels, height, width), dtype="uint8" if image.dtype == np.uint8 else "float32"
    )
