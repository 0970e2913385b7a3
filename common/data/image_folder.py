"""Reads images from files that a table names."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data import sources
from splitveil.common.data.csv_file import CsvFile
from splitveil.common.data.source_settings import ImagesSource, expand_path
from splitveil.common.data.sources import ArrowColumn, Part
from splitveil.common.errors import DataError
from splitveil.common.text.files import check_regular
from splitveil.common.text.imports import extra_missing
from splitveil.common.text.wording import suggest

try:
    from PIL import Image
except ImportError:  # a party with tables need not install it
    Image = None  # type: ignore[assignment]

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats that are read, by content and not by name; Pillow would have Ghostscript run a PostScript
file."""

_MAX_PIXELS = 2**26


class ImageFolder:
    """A folder of image files and the table that names them."""

    def __init__(self, settings: ImagesSource, base_dir: Path) -> None:
        if Image is None:
            raise extra_missing("data.source: kind images", "images")
        table = expand_path("table", settings.table, base_dir)
        separator = "\t" if ".tsv" in table.suffixes[-2:] else ","
        self._table = CsvFile(table, separator, None)
        self.name = self._table.name
        self._folder = settings.resolve(base_dir)
        self._settings = settings

    def column_names(self) -> list[str]:
        return self._table.column_names()

    def read(self, names: Sequence[str]) -> Mapping[str, ArrowColumn]:
        return self._table.read(names)

    def parts(self, names: Sequence[str]) -> Iterator[Part]:
        settings = self._settings
        column = settings.file_column
        if column not in self.column_names():
            raise DataError(
                f"{self.name}: there is no column {column!r}{suggest(column, self.column_names())}"
            )
        rows_at_once = max(1, sources.PART_BYTES // (3 * math.prod(settings.size)))
        first_row, done = 1, 0.0
        for part in self._table.parts(list(dict.fromkeys([*names, column]))):
            files = part.columns[column].to_pylist()
            for start in range(0, len(files), rows_at_once):
                some = files[start : start + rows_at_once]
                image = np.stack(
                    [self._load(name, first_row + i) for i, name in enumerate(some, start)]
                )
                columns = {name: part.columns[name].slice(start, len(some)) for name in names}
                share = (start + len(some)) / len(files)
                yield Part(columns, image, done + share * (part.done_fraction - done))
            first_row, done = first_row + len(files), part.done_fraction

    def _load(self, name: str, row: int) -> NDArray[np.uint8]:
        path = self._folder / f"{name}{self._settings.file_ending}"
        height, width = self._settings.size
        reason = f"damaged, or none of {', '.join(_FORMATS)}"
        try:
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                reason = "its name leads out of the folder"
                raise ValueError(reason)
            check_regular(path)
            with (
                warnings.catch_warnings(action="ignore"),  # which may repeat the file's own texts
                Image.open(path, formats=_FORMATS) as image,
            ):
                if image.width * image.height > _MAX_PIXELS:
                    reason = f"it has more than {_MAX_PIXELS:,} pixels"
                    raise ValueError(reason)
                pixels = image.convert("RGB" if self._settings.colours == "rgb" else "L")
                if pixels.size != (width, height):
                    pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
        except Exception as error:  # Pillow raises a dozen classes for damaged files
            if isinstance(error, FileNotFoundError):
                reason = "there is no such file"
            raise DataError(
                f"{self.name}: row {row}: its image cannot be read ({reason}) in {self._folder}"
            ) from error
        return np.asarray(pixels, np.uint8).reshape(height, width, -1)
