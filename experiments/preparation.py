"""Converts raw files that splitveil cannot read into tables that it can, before the first run."""

import csv
import gzip
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet

from splitveil.common.errors import DataError, SettingsError
from splitveil.deploy.flights import write_tables
from splitveil.experiments.models import GREY_SIDE

IMDB_WORDS = 500


def prepare(name: str, folder: Path) -> None:
    done = folder / f".{name}.done"
    if done.exists():
        return
    source, make = _PREPARATIONS[name]
    path = Path()
    if source is not None:
        root = os.environ.get("SPLITVEIL_DATA")
        if root is None:
            raise SettingsError(f"{name}: SPLITVEIL_DATA is not set to a folder with data sets")
        path = Path(root, source)
        if not path.is_file():
            raise DataError(f"needs the file {path}")
    folder.mkdir(parents=True, exist_ok=True)
    make(path, folder)
    done.touch()


def _imdb(path: Path, folder: Path) -> None:
    with np.load(path, allow_pickle=False) as archive:
        words = np.unpackbits(archive["x_bits"], axis=1, count=IMDB_WORDS)
        write_columns(folder / "imdb.parquet", x=words, y=archive["y"])


def _images(name: str, path: Path, folder: Path, *, is_grey: bool = False) -> None:
    """Write a folder of images, which lose nothing, and a table of their names beside it."""
    (folder / name).mkdir(exist_ok=True)
    with np.load(path, allow_pickle=False) as archive:
        for row, image in enumerate(images_of(archive)):
            written = image.convert("L").resize((GREY_SIDE, GREY_SIDE)) if is_grey else image
            written.save(folder / name / f"{row}.png")
        rows = [f"{row},{label}" for row, label in enumerate(archive["y"])]
    text = "\n".join(["image,y", *rows, ""])
    (folder / f"{name}.csv").write_text(text, encoding="utf-8")


def images_of(archive: Mapping[str, NDArray[np.uint8]]) -> Iterator[Image.Image]:
    packed, offsets = archive["jpeg"].tobytes(), archive["offset"]
    for begin, end in itertools.pairwise(offsets):
        yield Image.open(io.BytesIO(packed[begin:end]))


def write_columns(path: Path, **arrays: NDArray[Any]) -> None:
    """Write a table: an array of two dimensions becomes columns ``name.0``, ``name.1``, ..."""
    columns = dict[str, NDArray[Any]]()
    for name, array in arrays.items():
        names = [name] if array.ndim == 1 else [f"{name}.{j}" for j in range(array.shape[1])]
        columns |= dict(zip(names, np.atleast_2d(array.T), strict=True))
    parquet.write_table(pa.table(columns), path)


def _talkingdata_days(path: Path, folder: Path) -> None:
    """Write one file per day with the next day as test rows; click numbers are the same in all."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [row | {"click": number} for number, row in enumerate(csv.DictReader(file))]
    days = sorted({str(row["click_time"])[:10] for row in rows})
    names = ["click", "ip", "app", "device", "os", "channel", "hour", "is_attributed", "split"]
    for number, (today, tomorrow) in enumerate(itertools.pairwise(days), start=1):
        split = {today: "train", tomorrow: "test"}
        with (folder / f"talkingdata_day_{number}.csv").open("w", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            for row in rows:
                day, _, time = str(row["click_time"]).partition(" ")
                if day in split:
                    # attributed_time would give the label away, and is left out.
                    writer.writerow(row | {"hour": time.partition(":")[0], "split": split[day]})


_PREPARATIONS: Mapping[str, tuple[str | None, Callable[[Path, Path], None]]] = {
    "flights": (None, lambda _path, folder: write_tables(folder)),  # from an installed package
    "imdb": ("imdb/imdb_top500.npz", _imdb),
    "melanoma": ("melanoma/melanoma84_jpeg.npz", partial(_images, "melanoma")),
    "melanoma_grey64": (
        "melanoma/melanoma84_jpeg.npz",
        partial(_images, "melanoma_grey64", is_grey=True),
    ),
    "talkingdata_days": ("talkingdata/talkingdata.csv.gz", _talkingdata_days),
}
