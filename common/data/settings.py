"""Settings of a party's data: its source, and its id, label and feature columns."""

import os
import string
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from splitveil.common.errors import SettingsError
from splitveil.common.settings import Section

ColumnName = Annotated[str, StringConstraints(min_length=1)]


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
    BeforeValidator(
        _as_class_names,
        json_schema_input_type=Annotated[int, Field(ge=3, le=MAX_CLASSES)]
        | Annotated[tuple[ClassName | int, ...], Field(min_length=3, max_length=MAX_CLASSES)],
    ),
]
"""The number of classes, or their names."""

Columns = Annotated[
    tuple[ColumnName, ...],
    BeforeValidator(_as_list, json_schema_input_type=ColumnName | tuple[ColumnName, ...]),
]
"""Column names, or patterns with shell wildcards such as ``x*``; a single one needs no list."""


def expand_path(setting: str, path: str, base_dir: Path) -> Path:
    """Expand a path of the settings.

    Raises:
        SettingsError: it names an environment variable that is not set.
    """
    try:
        expanded = string.Template(path).substitute(os.environ)
    except KeyError as error:
        name = error.args[0]
        raise SettingsError(
            f"{setting}: {path}: the environment variable {name} is not set; "
            f"set {name}, or write the folder into the path"
        ) from error
    except ValueError as error:
        raise SettingsError(
            f"{setting}: {path}: expected ${{NAME}} for a variable or $$ for a dollar sign"
        ) from error
    return base_dir / Path(expanded).expanduser()


class FileSource(Section):
    """A file that belongs to this party."""

    path: ColumnName
    """The file, relative to the settings file's folder. ``~`` and ``${NAME}`` (an environment
    variable) are replaced."""

    cache_dir: ColumnName | None = None
    """Folder for a copy as memory-mapped columns, for files that do not fit into memory; written
    like ``path``. The file is converted when it is first used, and again after it or the requested
    columns have changed. By default the whole file is read into memory each time."""

    def resolve(self, base_dir: Path) -> Path:
        """Return the file's path.

        Raises:
            SettingsError: the path names an environment variable that is not set.
        """
        return expand_path("path", self.path, base_dir)

    def files(self, base_dir: Path) -> list[Path]:
        """Return the files that are read, from which a change is noticed.

        Raises:
            SettingsError: a path names an environment variable that is not set.
        """
        return [self.resolve(base_dir)]

    def resolve_cache(self, base_dir: Path) -> Path | None:
        """Return the path of the cache; None without a cache.

        Raises:
            SettingsError: it names an environment variable that is not set.
        """
        if self.cache_dir is None:
            return None
        return expand_path("cache_dir", self.cache_dir, base_dir)


class CsvSource(FileSource):
    """A text file with one row per line; may be compressed (.gz, .bz2, .zst)."""

    kind: Literal["csv"]

    delimiter: Annotated[str, StringConstraints(pattern=r"^[^\r\n\"]$")] | None = None
    """Character between two cells; by default a tab for files ending in .tsv, otherwise a comma."""

    column_names: tuple[ColumnName, ...] | None = Field(default=None, min_length=1)
    """The column names, for a file without a header line; by default the first line has them."""

    def separator(self) -> str:
        """Return the character between two cells."""
        is_tsv = ".tsv" in Path(self.path).suffixes[-2:]
        return self.delimiter or ("\t" if is_tsv else ",")


class ParquetSource(FileSource):
    """A Parquet file."""

    kind: Literal["parquet"]


class NpzSource(FileSource):
    """A NumPy archive: a one-dimensional array is one column, a two-dimensional one is several."""

    kind: Literal["npz"]


class ImagesSource(FileSource):
    """A folder of images, ``path``, and a text file with a header line and one row per image."""

    kind: Literal["images"]

    table: ColumnName
    """The text file with ids, labels and file names, separated by commas, or by tabs if it ends in
    .tsv."""

    file_column: ColumnName
    """Column with each image's file name, relative to the folder."""

    file_ending: str = ""
    """Ending that is appended to each name in that column, for instance ``.jpg``."""

    height: int = Field(ge=1, le=4096)
    """Height in pixels to which images are resized, bilinearly with antialiasing."""

    width: int = Field(ge=1, le=4096)
    """Width in pixels to which images are resized."""

    colours: Literal["rgb", "grey"] = "rgb"
    """Three channels or one."""

    def files(self, base_dir: Path) -> list[Path]:
        """Return the folder and the table; adding or removing a file changes the folder's time.

        Raises:
            SettingsError: a path names an environment variable that is not set.
        """
        return [self.resolve(base_dir), expand_path("table", self.table, base_dir)]


class SklearnSource(Section):
    """A real data set that ships with scikit-learn, so that there is nothing to download.

    ``breast_cancer`` has 569 rows, the ids ``patient-0000`` and so on in column ``id``, its 30
    features with ``_`` for each space (``mean_radius``), and the label ``malignant``: 1 for the
    212 malignant tumours, so that 1 is the rarer class as in the other data sets (scikit-learn's
    own target is the opposite). ``digits`` has ten classes: 1,797 images of handwritten digits,
    the ids ``image-0000`` and so on in column ``id``, 64 pixels by row and column, ``pixel_0_0`` to
    ``pixel_7_7``, and the label ``digit``, 0 to 9.
    """

    kind: Literal["sklearn"]

    dataset: Literal["breast_cancer", "digits"] = "breast_cancer"
    """The data set."""

    shuffle_seed: int = Field(default=0, ge=0)
    """Seed of the row order. Two parties with different seeds have their rows in different
    orders."""


Source = Annotated[
    CsvSource | ParquetSource | NpzSource | ImagesSource | SklearnSource,
    Field(discriminator="kind"),
]


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
