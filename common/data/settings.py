"""Settings of a party's data: its source, and its id, label and feature columns."""

import re
from decimal import Decimal
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from splitveil.common.data.source_settings import ColumnName, Source
from splitveil.common.run.id_rules import MAX_ID_COLUMNS
from splitveil.common.settings import Mark, Section, marked

ONE_NUMBER = 1
"""The "number of classes" of labels that are numbers: one value is predicted for each row."""

AnyFloat = TypeVar("AnyFloat", np.float32, np.float64)


class LabelRange(Section):
    """The bounds of labels that are numbers, such as an amount or an age."""

    low: float = Field(allow_inf_nan=False)
    """The least that a label can be, in the label's unit. Choose it by what the label means: a
    bound read off the labels tells the smallest of them to whoever learns the bound."""

    high: float = Field(allow_inf_nan=False)
    """The most that a label can be, above ``low``."""

    outside: Literal["refused", "clipped"] = "refused"
    """Treatment of a label outside the bounds: the table is refused, or the label counts as the
    nearer bound, and the log says for how many rows."""

    @model_validator(mode="after")
    def _holds_more_than_one_number(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"expected low below high, got {self.low:g} and {self.high:g}")
        if not np.isfinite(self.width):
            raise ValueError("expected a range whose width is a finite number")
        return self

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def in_words(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def shares(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return labels (no NaN) as shares of the range, clipped to 0 and 1."""
        shares = (values - self.low) / self.width
        return np.clip(shares, 0.0, 1.0).astype(np.float32)

    def values(self, shares: NDArray[AnyFloat]) -> NDArray[AnyFloat]:
        """Return shares of the range, of any shape, in the label's unit and the same precision.

        NaN stays NaN.
        """
        found = self.low + shares.astype(np.float64) * self.width
        return found.astype(shares.dtype)


MAX_CLASSES = 100

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


def class_key(text: str) -> Decimal | str:
    """Return what labels are compared by: texts of equal numbers, as ``1`` and ``1.0``, are one."""
    return Decimal(text) if _NUMBER.fullmatch(text) else text


def _as_class_names(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    whole = (isinstance(name, int) and not isinstance(name, bool) for name in value)
    return tuple(str(n) if is_whole else n for n, is_whole in zip(value, whole, strict=True))


ClassName = Annotated[
    str, StringConstraints(min_length=1, max_length=64, strip_whitespace=True, strict=True)
]
Classes = Annotated[
    Annotated[int, Field(ge=3, le=MAX_CLASSES, strict=True)]
    | Annotated[tuple[ClassName, ...], Field(min_length=3, max_length=MAX_CLASSES)],
    BeforeValidator(
        _as_class_names,
        json_schema_input_type=Annotated[int, Field(ge=3, le=MAX_CLASSES)]
        | Annotated[tuple[ClassName | int, ...], Field(min_length=3, max_length=MAX_CLASSES)],
    ),
]
"""The number of classes, or their names."""

TimestampPart = Literal["seconds", "year", "month", "day", "day_of_week", "hour", "minute"]

Gaps = Literal["refused", "zero", "nan"]
"""Values of a table for missing numbers: there are none, 0, or NaN for the encoder to fill.
"""


def _single_as_text(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


IdColumns = Annotated[
    ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=2, max_length=MAX_ID_COLUMNS)],
    BeforeValidator(_single_as_text, json_schema_input_type=ColumnName | tuple[ColumnName, ...]),
]
"""The column of ids, or several that make up the id together."""

PositiveLabel = Annotated[
    ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=2, max_length=MAX_CLASSES)],
    BeforeValidator(_single_as_text, json_schema_input_type=ColumnName | tuple[ColumnName, ...]),
]
"""The text of label 1, or several that all mean it."""

UnitText = Annotated[str, StringConstraints(min_length=1, max_length=64, strip_whitespace=True)]

Weight = Annotated[float, Field(gt=0, le=1e6)]

Columns = Annotated[
    tuple[ColumnName, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value,
        json_schema_input_type=ColumnName | tuple[ColumnName, ...],
    ),
]
"""Column names, or patterns with shell wildcards such as ``x*``; a single one needs no list."""


class ImageSettings(Section):
    """One image per row, from a source of kind ``images``: write ``image: {}``."""


class SequenceSettings(Section):
    """A column of sequences of tokens: of whole numbers, or of texts that a tokenizer splits."""

    max_length: Annotated[int, Mark.UNCACHED] = Field(ge=1, le=65_536)
    """Most tokens of a cell that the model gets; the rest of a longer one is cut off, and the log
    says in how many rows. An empty cell is a sequence of length 0."""

    num_tokens: int | None = Field(default=None, ge=1, le=10**9)
    """For whole numbers, in a Parquet list or in text separated by ``list_separator``: all are at
    least 0 and less than this."""

    tokenizer: Annotated[str | None, Mark.PATH, Mark.UNCACHED] = Field(default=None, min_length=1)
    """For texts: a file of the library ``tokenizers`` (the extra ``text``), usually
    ``tokenizer.json``. Relative to this settings file; ``~`` and ``${NAME}`` are replaced. A copy
    is kept with the model. A file whose rules can make a text more than 4,000 times as long is
    refused, and a run ends where it needs longer than a minute for some thousand characters."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "SequenceSettings":
        if (self.num_tokens is None) == (self.tokenizer is None):
            raise ValueError("expected num_tokens for whole numbers, or a tokenizer for texts")
        return self


class FeatureSettings(Section):
    """The columns that a party feeds into its model.

    A column is used in one way. ``sequences`` take precedence over all others, a name over a
    pattern, and a pattern over ``*``: with ``categorical: C*`` and ``numeric: "*"``, all columns
    except the ``C`` columns are numeric. Id and label are never features, and what pandas calls
    ``__index_level_0__`` or ``Unnamed: 0`` is one only by its name.
    """

    numeric: Columns = ()
    """Columns read as numbers."""

    categorical: Columns = ()
    """Columns read as text, each value a category."""

    timestamps: Columns = ()
    """Columns of dates or times, each turned into the numbers of ``timestamp_parts``. Texts are
    ISO 8601 (``2026-03-01``, ``2026-03-01T17:30:00+01:00``) unless ``timestamp_format`` says
    otherwise; a time with a zone is taken in UTC, one without as written, and digits of a second
    beyond the sixth are dropped."""

    timestamp_parts: tuple[TimestampPart, ...] = Field(
        default=("year", "month", "day_of_week", "hour"), min_length=1
    )
    """The numbers that a timestamp becomes, named ``COLUMN.PART`` and scaled like the other
    numbers: ``seconds`` since 1970, ``year``, ``month`` (from 1), ``day`` (of the month, from 1),
    ``day_of_week`` (0 is Monday), ``hour`` and ``minute``."""

    timestamp_format: ColumnName | None = None
    """Format of timestamps in text, in the directives of C's ``strptime``, such as
    ``%d.%m.%Y %H:%M``; without a zone."""

    first_year: int = Field(default=1969, ge=1000, le=9900)
    """The first of the hundred years that ``%y`` stands for in ``timestamp_format``: with 1927,
    ``68`` is 1968 and ``26`` is 2026."""

    lists: Columns = ()
    """Columns whose cells hold any number of categories: a Parquet list, or text with
    ``list_separator`` between them. Each becomes one number per category, 1 for those that
    the cell holds and 0 for the others, and one more for any category that is not kept."""

    list_separator: Annotated[str, StringConstraints(min_length=1, max_length=8)] = "|"
    """Separator of the categories in a text. Space around a category is no part of it."""

    max_list_categories: Annotated[int, Mark.UNCACHED] = Field(default=100, ge=1, le=10_000)
    """Number of categories kept for a column of lists: the most frequent ones by training rows,
    ties in the order of their text."""

    sequences: dict[ColumnName, SequenceSettings] = Field(default_factory=dict)
    """Columns of sequences by name, such as ``{note: {tokenizer: bert/tokenizer.json, max_length:
    128}}``."""

    image: ImageSettings | None = None
    """The image of each row."""

    exclude: Columns = ()
    """Columns that patterns must not match, such as a column that gives the label away. All of them
    must be in the table."""

    patterns: bool = True
    """Treat an entry with ``*``, ``?`` or ``[...]`` as a pattern with shell wildcards unless a
    column has exactly this name. With ``false``, every entry is the name of a column."""

    missing_numeric: Annotated[Literal["error", "zero", "mean", "median"], Mark.UNCACHED] = "error"
    """Treatment of an empty cell in a numeric column or a timestamp: an error, the number 0, or the
    mean or median of the column's numbers in the training rows; see ``new_gaps`` for predictions
    with a model that was trained without any. Mean and median are taken after ``signed_log1p``;
    with either, scaling uses only the numbers that are present."""

    new_gaps: Literal["filled", "error"] = "filled"
    """Treatment, in predictions, of an empty cell in a column of numbers that had none in the
    training rows: it is filled with the column's median if ``missing_numeric`` says so, otherwise
    with the mean, and the log counts such rows; or the row is an error. With ``missing_numeric:
    zero`` and no indicator, it is 0 as in the training."""

    missing_indicator: Annotated[bool, Mark.UNCACHED] = False
    """Add one more number for every column of numbers that has gaps in the training rows: 1 where
    there is a gap, otherwise 0. These come after all columns of numbers, unscaled."""

    missing_texts: tuple[str, ...] = ("",)
    """Cells that mean "no value" in features and labels, for instance ``["", "?"]``; in columns of
    floating-point numbers only infinite ones and those too large for float32."""

    missing_texts_of: dict[ColumnName, tuple[str, ...]] = Field(default_factory=dict)
    """The same for single columns, in place of ``missing_texts``: with ``{country: [""]}``, ``NA``
    is a country. It may name the label column."""

    signed_log1p: Annotated[bool, Mark.UNCACHED] = False
    """Turn numbers x into sign(x) log(1 + |x|) before scaling, which suits counts."""

    numeric_scaling: Annotated[Literal["standard", "min_max", "none"], Mark.UNCACHED] = "standard"
    """Scaling by mean and standard deviation (``standard``) or by minimum and maximum
    (``min_max``) of the training rows, or no scaling."""

    min_count: Annotated[int, Mark.UNCACHED] = Field(default=1, ge=1)
    """Categories, also those of lists, in fewer training rows than this share the slot of unknown
    categories."""

    @model_validator(mode="after")
    def _selects_something(self) -> "FeatureSettings":
        if not (self.by_name or self.sequences or self.image):
            raise ValueError(
                "name at least one of numeric, categorical, timestamps, lists, sequences and image"
            )
        if self.missing_indicator and self.missing_numeric == "error":
            raise ValueError("missing_indicator: no gap is left with missing_numeric: error")
        if len(set(self.timestamp_parts)) < len(self.timestamp_parts):
            raise ValueError("timestamp_parts: name each part only once")
        return self

    @property
    def by_name(self) -> tuple[str, ...]:
        """The names and patterns of columns, without sequences."""
        return (*self.numeric, *self.categorical, *self.timestamps, *self.lists)

    @property
    def gaps(self) -> Gaps:
        """The value of a table for a missing number."""
        if self.missing_numeric == "error":
            return "refused"
        if self.missing_numeric == "zero" and not self.missing_indicator:
            return "zero"
        return "nan"


class DataSettings(Section):
    """A party's own table."""

    source: Source
    """The source of the rows."""

    id_column: IdColumns | None = None
    """Column with each row's id for the alignment, or a list of columns that make up the id
    together; the contract's ``ids`` has the rules for each. Without it, a row's id is its number in
    the file, from 1; use this only for two files whose rows already correspond, such as raw
    Criteo."""

    units: dict[ColumnName, tuple[UnitText, ...]] = Field(default_factory=dict)
    """Texts before or after the numbers of a column, which are dropped, such as ``{weight: [kg],
    price: ["US$"]}``; a number may also stand alone."""

    duplicate_ids: Literal["error", "first"] = "error"
    """Treatment of rows with the same id: an error, or all but the first are left out."""

    unusable_ids: Literal["error", "leave_out"] = "error"
    """Treatment of rows without an id, or with one that is not what the contract's ``ids`` says,
    such as an e-mail address: an error, or they are left out."""

    unlabelled_rows: Literal["error", "leave_out"] = "error"
    """Treatment of the label owner's rows without a label (an empty cell, NaN, or one of
    ``features.missing_texts``): an error, or they are left out before the alignment, as if the
    table did not have them: the peer learns that the common ids have labels. Predictions need no
    label."""

    label_column: Annotated[ColumnName | None, Mark.ABOUT_LABELS] = None
    """Column with the label: 0 or 1, one of ``classes``, or a number within ``label_range``."""

    positive_label: Annotated[PositiveLabel | None, Mark.ABOUT_LABELS] = None
    """The text that stands for label 1, or a list of such texts, for instance ``["yes", "YES"]``;
    all other texts then stand for 0, and ``check`` counts them. Numbers are compared as numbers:
    ``"1"`` is also ``1.0``. By default the column must hold 0 and 1."""

    classes: Annotated[Classes | None, Mark.ABOUT_LABELS] = None
    """Three or more classes, for a softmax over them: a number K, for a column that holds the whole
    numbers 0 to K - 1, or the list of the texts (or whole numbers) that the column holds; equal
    numbers (``1`` and ``1.0``) are one class. If absent, there are two classes."""

    label_range: Annotated[LabelRange | None, Mark.ABOUT_LABELS] = None
    """Bounds of a label that is a number: the model then predicts a number (regression). Without
    it, labels are classes. The bounds stay with the label owner."""

    class_weights: Annotated[tuple[Weight, ...] | None, Mark.ABOUT_LABELS, Mark.UNCACHED] = Field(
        default=None, min_length=2
    )
    """Weight of each class in the loss: label 0 and label 1, or the classes in their order; 1 for
    all by default. A target between two labels counts in proportion."""

    weight_column: Annotated[ColumnName | None, Mark.ABOUT_LABELS] = None
    """Column with a positive number for each row: what the row counts in the loss, in units of the
    mean over the training rows. The peer can read the weights off the gradients. It belongs to the
    label owner's table."""

    weights_are_label_free: Annotated[bool, Mark.ABOUT_LABELS, Mark.UNCACHED] = False
    """Declare that the weights were chosen without looking at any label, such as the sampling
    weights of a survey. Without it, defenses whose bounds hold for more than class means refuse a
    ``weight_column``: it could tell what they hide, and no charge would count that."""

    features: FeatureSettings | None = None
    """The columns that go into the model; absent for a party that only holds labels."""

    @property
    def id_columns(self) -> tuple[str, ...]:
        """The columns of ids; empty if the rows' numbers are the ids."""
        if self.id_column is None:
            return ()
        return (self.id_column,) if isinstance(self.id_column, str) else self.id_column

    @property
    def place_of_ids(self) -> str:
        """The columns of ids in words, for messages."""
        columns = self.id_columns
        names = ", ".join(map(repr, columns)) or "None"
        return f"column{'s' * (len(columns) > 1)} {names}"

    def without_labels(self, **changed: Any) -> "DataSettings":
        """Return the settings without those about labels and weights, and with others changed."""
        about = marked(DataSettings, Mark.ABOUT_LABELS)
        absent = {name: DataSettings.model_fields[name].default for (name,) in about}
        return self.model_copy(update=absent | changed)

    def missing_texts(self, column: str) -> tuple[str, ...]:
        """Return the cells of a column that mean "no value"."""
        if self.features is None:
            return ("",)
        return self.features.missing_texts_of.get(column, self.features.missing_texts)

    @property
    def positive_labels(self) -> tuple[str, ...]:
        """The texts that stand for label 1; empty if the settings name none."""
        one = self.positive_label
        return (one,) if isinstance(one, str) else one or ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty if there are two."""
        if isinstance(self.classes, int):
            return tuple(map(str, range(self.classes)))
        return self.classes or ()

    @property
    def num_classes(self) -> int:
        """The number of classes; ``ONE_NUMBER`` where the label is a number."""
        return ONE_NUMBER if self.label_range is not None else len(self.class_names) or 2

    @model_validator(mode="after")
    def _names_something_to_read(self) -> "DataSettings":
        if self.label_column is None:
            if self.features is None:
                raise ValueError("name a label_column, features, or both")
            for (name,) in sorted(marked(DataSettings, Mark.ABOUT_LABELS)):
                if getattr(self, name) not in {None, False}:
                    raise ValueError(f"{name} needs a label_column")
        if self.classes is not None and self.positive_label is not None:
            raise ValueError("positive_label is for two classes; leave it or classes out")
        if len(set(map(class_key, self.class_names))) < len(self.class_names):
            raise ValueError("classes: name each class only once (1 and 1.0 are the same)")
        self._check_label_range()
        self._check_ids()
        if self.class_weights is not None and len(self.class_weights) != self.num_classes:
            raise ValueError(
                f"class_weights: expected {self.num_classes} numbers, one per class, got "
                f"{len(self.class_weights)}"
            )
        if self.weights_are_label_free and self.weight_column is None:
            raise ValueError("weights_are_label_free is about a weight_column")
        if self.features and self.features.image and self.source.kind != "images":
            raise ValueError(
                f"features.image needs a source of kind images, not {self.source.kind}"
            )
        return self

    def _check_label_range(self) -> None:
        if self.label_range is None:
            return
        for name in ("positive_label", "classes", "class_weights"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is for classes; leave it or label_range out")

    def _check_ids(self) -> None:
        if len(set(self.id_columns)) < len(self.id_columns):
            raise ValueError("id_column: name each column only once")
        for name in ("duplicate_ids", "unusable_ids"):
            if getattr(self, name) != "error" and self.id_column is None:
                raise ValueError(f"{name}: {getattr(self, name)} needs an id_column")
        if self.unlabelled_rows != "error" and not (self.id_column and self.label_column):
            raise ValueError("unlabelled_rows: leave_out needs a label_column and an id_column")
