"""Settings of the sources that a party's rows can come from."""

import os
import re
import string
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from splitveil.common.errors import SettingsError
from splitveil.common.settings import Mark, Section
from splitveil.common.text.addresses import may_hold_secret

ColumnName = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[str, StringConstraints(min_length=1), Mark.PATH, Mark.UNCACHED]
"""The copy that ``cache_dir`` keeps goes by the files' sizes and times."""


def expand_path(setting: str, path: str, base_dir: Path) -> Path:
    """Expand a path of the settings.

    SettingsError if it names an environment variable that is not set.
    """
    # Path.expanduser raises if "~name" names no user.
    return base_dir / os.path.expanduser(expand_variables(setting, path))  # noqa: PTH111


def not_expanded(path: str) -> str:
    """Return a path as settings name it where it contains a dollar sign."""
    return path.replace("$", "$$")


def expand_variables(setting: str, text: str) -> str:
    """Replace ``${NAME}`` by the environment variable."""
    try:
        return string.Template(text).substitute(os.environ)
    except KeyError as error:
        name = error.args[0]
        raise SettingsError(
            f"{setting}: {text}: the environment variable {name} is not set; "
            f"set {name}, or write the folder into the path"
        ) from error
    except ValueError as error:
        raise SettingsError(
            f"{setting}: {text}: expected ${{NAME}} for a variable or $$ for a dollar sign"
        ) from error


class CacheableSource(Section):
    """A source whose rows can be kept as memory-mapped columns."""

    cache_dir: Annotated[ColumnName | None, Mark.PATH, Mark.SAME_ROWS, Mark.UNCACHED] = None
    """Folder for a copy as memory-mapped columns, for files that do not fit into memory; written
    like ``path``. The file is converted when it is first used, and again after it or the requested
    columns have changed. By default the whole file is read into memory each time."""


class FileSource(CacheableSource):
    """A file that belongs to this party."""

    path: PathText
    """The file, relative to the settings file's folder. ``~`` and ``${NAME}`` (an environment
    variable) are replaced."""

    def resolve(self, base_dir: Path) -> Path:
        """Return the file's path; SettingsError if it is an address."""
        if _ADDRESS.match(self.path):
            raise SettingsError(
                f"path: {self.path}: only a source of kind parquet may be an address (s3://, "
                f"gs://, abfs://); copy the file to this machine, or write it as Parquet"
            )
        return expand_path("path", self.path, base_dir)

    def files(self, base_dir: Path) -> list[Path]:
        """Return the files of this machine that are read, to notice a change."""
        return [self.resolve(base_dir)]


class CsvSource(FileSource):
    """A text file with one row per line, or several that are read as one table.

    Files may be compressed (.gz, .bz2, .zst). ``path`` is a file, a folder, or a pattern such as
    ``part-*.csv.gz``. Parts follow each other in the order of their paths; what has a name that
    begins with ``_`` or ``.`` is no part. Each part has a header line unless ``column_names`` is
    set; the columns that are used must be in every part, except in empty ones. A first line such as
    ``sep=;`` names the delimiter and is no row.
    """

    kind: Literal["csv"]

    delimiter: Annotated[str, StringConstraints(pattern=r"^[^\r\n\"]$")] | None = None
    """Character between two cells; by default a tab for files ending in .tsv, otherwise a comma."""

    quote: Literal['"', "'", ""] = '"'
    """Quotation mark that may enclose a cell, doubled within it; empty if quotation marks belong to
    the cells."""

    escape: Literal["\\"] | None = None
    """The backslash, if one before a quotation mark, a delimiter, a line break or a backslash makes
    that a part of the cell, as Spark and MySQL write it. Before other characters it belongs to the
    cell, as in ``\\N``, and by default everywhere."""

    column_names: tuple[ColumnName, ...] | None = Field(default=None, min_length=1)
    """The column names, for a file without a header line; by default the first line has them."""

    encoding: Annotated[str, Mark.SAME_ROWS] = "utf-8"
    """The text's encoding, by a name that Python knows, such as ``cp1252`` (Windows, in Western
    Europe), ``gbk`` or ``utf-16``. A byte order mark at the beginning takes precedence."""

    decimal: Annotated[Literal[".", ","] | None, Mark.SAME_ROWS] = None
    """The decimal mark of numbers: of numeric columns, weights and labels that are numbers. With
    ``","``, ``1.234,5`` and ``1 234,5`` are 1234.5 and ``1.234`` is 1234; with ``"."``, ``1,234.5``
    and ``1'234.5`` are 1234.5.
    By default, it is a point, and nothing may stand between thousands."""

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, encoding: str) -> str:
        try:
            "".encode(encoding)
        except (LookupError, UnicodeError, ValueError) as error:
            raise ValueError(f"Python knows no encoding of texts {encoding!r}") from error
        return encoding

    def separator(self) -> str:
        """Return the character between two cells."""
        is_tsv = ".tsv" in Path(self.path).suffixes[-2:]
        return self.delimiter or ("\t" if is_tsv else ",")


Scheme = Literal["s3", "gs", "abfs"]
"""The kinds of object stores, as addresses name them."""

_ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


class StoreSettings(Section):
    """Access to an object store, if its library does not find it in the environment.

    No secret stands in the settings. ``s3://`` looks for credentials where Amazon's own tools do
    (``AWS_ACCESS_KEY_ID``, ``~/.aws``, the machine's role) and takes ``AWS_REGION``, or else the
    region that Amazon names for the bucket; ``gs://`` looks in the file that
    ``GOOGLE_APPLICATION_CREDENTIALS`` names or with the machine's service account, and ``abfs://``
    as Azure's default credential does.
    """

    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/@\s]+$")] | None = None
    """Address of a store that is compatible with one of the three, ``https://HOST:PORT``."""

    account: ColumnName | None = None
    """Storage account, required by ``abfs://`` addresses."""


class ParquetSource(FileSource):
    """A Parquet file, or several that are read as one table.

    ``path`` is a file, a folder, or a pattern with shell wildcards (``*``, ``?``, ``[...]``, and
    ``**`` for any number of folders). It may be an address in an object store: ``s3://BUCKET/PATH``,
    ``gs://BUCKET/PATH`` or ``abfs://CONTAINER/PATH``, or ``file://`` and an absolute path.

    The parts follow each other in the order of their paths, compared segment by segment, and that
    is the order of the rows. In a folder, everything is a part except what has a name that begins
    with ``_`` or ``.``. Folders named ``NAME=VALUE`` below the folder, or below the pattern's first
    wildcard, make a column of text, ``NAME``. The columns that are used must be in every part, with
    one type.
    """

    kind: Literal["parquet"]

    store: Annotated[StoreSettings, Mark.SAME_ROWS, Mark.UNCACHED] = StoreSettings()
    """Access to an object store; no effect on paths of this machine."""

    @property
    def scheme(self) -> Scheme | None:
        """The kind of object store; None for paths of this machine."""
        match = _ADDRESS.match(self.path)
        schemes: dict[str, Scheme | None] = {"s3": "s3", "gs": "gs", "abfs": "abfs", "file": None}
        return schemes[match[1]] if match else None

    def resolve(self, base_dir: Path) -> Path:
        return expand_path("path", self.path.removeprefix("file://"), base_dir)

    @model_validator(mode="after")
    def _has_a_known_scheme(self) -> "ParquetSource":
        match = _ADDRESS.match(self.path)
        if match and match[1] not in {"s3", "gs", "abfs", "file"}:
            raise ValueError(
                f"path: expected a path, or an address that begins with s3://, gs://, abfs:// or "
                f"file://, not {match[1]}://"
            )
        if self.scheme is None and self.store != StoreSettings():
            raise ValueError("store is for addresses such as s3://BUCKET/PATH")
        if self.scheme is not None and (
            "@" in self.path.split("/")[2] or may_hold_secret(self.path)
        ):
            raise ValueError("path: an address holds no credentials: set them in the environment")
        if (self.scheme == "abfs") != (self.store.account is not None):
            raise ValueError("store.account: required for abfs:// addresses, and only there")
        return self


IN_MEMORY = ":memory:"
"""The address of a DuckDB database without a file, for queries that read files."""


class SqlSource(CacheableSource):
    """The result of a query, read by ADBC; needs ``pip install splitveil[sql]``.

    The query runs once. Its result is kept as a Parquet file in ``cache_dir``, by default in the
    folder ``snapshots`` beside the settings file, readable by this user only, and later commands
    read it: a database promises no order of rows and changes under a run, and a resumed run needs
    the rows that it began with. The query runs again if the query, the database's address or
    ``snapshot`` changes, and for SQLite and DuckDB also after the database file has changed.
    """

    kind: Literal["sql"]

    driver: Annotated[ColumnName, Mark.LIBRARY, Mark.UNCACHED]
    """``sqlite``, ``postgresql``, ``duckdb`` or another ADBC driver: the NAME of an installed
    package ``adbc-driver-NAME``, a name that ADBC's driver manager knows, or the path of a shared
    library, which has a slash. A driver is code that runs in this process."""

    uri: Annotated[ColumnName | None, Mark.PATH, Mark.HIDDEN, Mark.UNCACHED] = None
    """The database's address, without a password: ``postgresql://USER@HOST/DATABASE``; for SQLite
    and DuckDB the file, written like the path of other sources, or for DuckDB ``:memory:``."""

    uri_file: Annotated[ColumnName | None, Mark.PATH, Mark.UNCACHED] = None
    """File, mode 0600, whose only line is the address, instead of ``uri``."""

    query: Annotated[ColumnName, Mark.UNCACHED]
    """One SELECT statement. It decides which rows are read, and their order. Paths in a query of
    DuckDB are relative to the settings file's folder, and need ``uri: ":memory:"``: neither a query
    of a database's file nor the views and macros in it may read another file."""

    snapshot: Annotated[str, Mark.SAME_ROWS, Mark.UNCACHED] = ""
    """Any text, such as a date. Change it to run the query again."""

    @model_validator(mode="after")
    def _has_one_address(self) -> "SqlSource":
        if (self.uri is None) == (self.uri_file is None):
            raise ValueError("name one of uri and uri_file")
        if self.uri is not None and self.driver != "sqlite" and may_hold_secret(self.uri):
            # The message does not repeat the address.
            raise ValueError("uri: write an address with a password into a file: uri_file")
        if not _READS.match(self.query):
            # A database that is open for reading still takes statements that write other files.
            raise ValueError("query: expected one statement that begins with SELECT or WITH")
        return self


# Atomic: otherwise a comment could reach to the end of a later one.
_READS = re.compile(r"(?is)(?>\s|\(|--[^\n]*\n|/\*.*?\*/)*(SELECT|WITH|VALUES|TABLE)\b")


Pixels = Annotated[int, Field(ge=1, le=4096)]


class ImagesSource(FileSource):
    """A folder of images, ``path``, and a text file with a header line and one row per image.

    An image is BMP, GIF, JPEG, PNG, TIFF or WebP by its content, whatever its name, with at most
    67,108,864 pixels; of several frames, the first is read.
    """

    kind: Literal["images"]

    table: PathText
    """The text file with ids, labels and file names, separated by commas, or by tabs if it ends in
    .tsv."""

    file_column: ColumnName
    """Column with each image's file name, relative to the folder and in it."""

    file_ending: str = ""
    """Ending that is appended to each name in that column, for instance ``.jpg``."""

    size: tuple[Pixels, Pixels]
    """Height and width in pixels of the resized images (bilinear, with antialiasing)."""

    colours: Literal["rgb", "grey"] = "rgb"
    """Three channels or one."""

    def files(self, base_dir: Path) -> list[Path]:
        """Return the folder and the table; adding or removing a file changes the folder's time."""
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
    CsvSource | ParquetSource | SqlSource | ImagesSource | SklearnSource,
    Field(discriminator="kind"),
]
