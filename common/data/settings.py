"""Settings of a party's data: its source, and its id, label and feature columns."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from splitveil.common.data.source_settings import ColumnName, Source
from splitveil.common.settings import Section


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


MAX_CLASSES = 100


def _as_class_names(value: Any) -> Any:
    """Turn whole numbers in a list of classes, as YAML reads them, into their text."""
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
    BeforeValidator(_as_class_names),
]
"""The number of classes, or their names."""

Columns = Annotated[tuple[ColumnName, ...], BeforeValidator(_as_list)]
"""Column names, or patterns with shell wildcards such as ``x*``; a single one needs no list."""


class ImageSettings(Section):
    """One image per row, from a source of kind ``images`` or from an array of an npz file."""

    array: ColumnName | None = None
    """Name of an npz file's array of bytes or floating-point numbers, with shape (rows, height,
    width, channels) unless ``layout`` says otherwise. A source of kind ``images`` needs no name:
    write ``image: {}``."""

    layout: Literal["channels_last", "channels_first"] = "channels_last"
    """Whether the channels are the array's last dimension or the dimension after the rows."""


class FeatureSettings(Section):
    """The columns that a party feeds into its model.

    A name takes precedence over a pattern, and a pattern over ``*``: with ``categorical: C*`` and
    ``numeric: "*"``, all columns except the ``C`` columns are numeric. Id and label are never
    features.
    """

    numeric: Columns = ()
    """Columns read as numbers."""

    categorical: Columns = ()
    """Columns read as text, each value a category."""

    image: ImageSettings | None = None
    """The image of each row."""

    exclude: Columns = ()
    """Columns that patterns must not match, such as a column that gives the label away."""

    missing_numeric: Literal["error", "zero"] = "error"
    """Treatment of an empty cell in a numeric column: an error, or the number 0."""

    missing_texts: tuple[str, ...] = ("",)
    """Cells that mean "no value" in features and labels, for instance ``["", "?"]``."""

    signed_log1p: bool = False
    """Whether numbers x become sign(x) log(1 + |x|) before scaling, which suits counts."""

    numeric_scaling: Literal["standard", "min_max", "none"] = "standard"
    """Scaling by mean and standard deviation (``standard``) or by minimum and maximum
    (``min_max``) of the training rows, or no scaling."""

    min_count: int = Field(default=1, ge=1)
    """Categories in fewer training rows than this share the slot of unknown categories."""

    @model_validator(mode="after")
    def _selects_something(self) -> "FeatureSettings":
        if not (self.numeric or self.categorical or self.image):
            raise ValueError("name at least one of numeric, categorical and image")
        return self


class DataSettings(Section):
    """A party's own table."""

    source: Source
    """The source of the rows."""

    id_column: ColumnName | None = None
    """Column with each row's id, by which the parties align. Without it, a row's id is its number
    in the file, from 1; use this only for two files whose rows already correspond, such as raw
    Criteo."""

    label_column: ColumnName | None = None
    """Column with the label: 0 or 1, or one of ``classes``."""

    positive_label: ColumnName | None = None
    """The text that stands for label 1; all other texts then stand for 0. By default the column
    must hold 0 and 1."""

    classes: Classes | None = None
    """Three or more classes, for a softmax over them: a number K, for a column that holds the whole
    numbers 0 to K - 1, or the list of the texts (or whole numbers) that the column holds. If
    absent, there are two classes."""

    features: FeatureSettings | None = None
    """The columns that go into the model; absent for a party that only holds labels."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty if there are two."""
        if isinstance(self.classes, int):
            return tuple(map(str, range(self.classes)))
        return self.classes or ()

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names) or 2

    @model_validator(mode="after")
    def _names_something_to_read(self) -> "DataSettings":
        if self.label_column is None and self.features is None:
            raise ValueError("name a label_column, features, or both")
        if self.label_column is None and self.positive_label is not None:
            raise ValueError("positive_label needs a label_column")
        if self.classes is not None and self.label_column is None:
            raise ValueError("classes needs a label_column")
        if self.classes is not None and self.positive_label is not None:
            raise ValueError("positive_label is for two classes; leave it or classes out")
        if len(set(self.class_names)) < len(self.class_names):
            raise ValueError("classes: name each class only once")
        if self.features and self.features.image:
            if self.source.kind not in {"npz", "images"}:
                raise ValueError(
                    f"features.image needs a source of kind npz or images, not {self.source.kind}"
                )
            if (self.features.image.array is None) == (self.source.kind == "npz"):
                raise ValueError(
                    "features.image.array: required for a source of kind npz, and only there"
                )
        return self
