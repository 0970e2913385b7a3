"""A file too large for memory becomes memory-mapped columns, once, with the same features."""

import csv
import gzip
import io
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import EpsImagePlugin, Image
from pyarrow import parquet

from splitveil.common.data import converted, sources
from splitveil.common.data.converted import convert as convert_file
from splitveil.common.data.converted import open_converted
from splitveil.common.data.features import FeatureEncoder, Features, MappedFeatures, RowEncoder
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.stored_ids import repeated_rows
from splitveil.common.data.table import Table, read_table
from splitveil.common.errors import DataError, StorageError
from splitveil.common.party.party_data import PartyData
from splitveil.common.settings import validate
from tests.support.waiting import HANGS_AFTER_S

FEATURES = {"numeric": "n*", "categorical": "c*", "missing_numeric": "zero", "signed_log1p": True}
NAMED = {"id_column": "id", "label_column": "label"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 2048)
    monkeypatch.setattr(sources, "PART_ROWS", 64)


def rows(count: int = 700, seed: int = 1) -> dict[str, list[str]]:
    """Columns of text: numbers with empty cells, and categories that appear late or rarely."""
    generator = np.random.default_rng(seed)
    empty = generator.random(count) < 0.1
    return {
        "id": [f" zoë-{row * 7 % 99991} " for row in range(count)],
        "label": [str(int(value)) for value in generator.random(count) < 0.2],
        "n1": [
            "" if e else str(int(v))
            for e, v in zip(empty, generator.normal(size=count) * 1e4, strict=True)
        ],
        "n2": [str(value) for value in generator.normal(size=count)],
        "c1": [f"word{int(value)}" for value in generator.exponential(size=count) * 40],
        "c2": ["" if e else f"b{row // 150}" for row, e in enumerate(empty)],
        "c3": ["" for _ in range(count)],
        "unused": ["x"] * count,
    }


def write_csv(path: Path, columns: dict[str, list[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def settings(source: dict[str, Any], **values: Any) -> DataSettings:
    values = {**NAMED, "features": FEATURES, **values}
    return validate(DataSettings, {"source": source, **values}, "settings")


def source_of(kind: str, folder: Path) -> dict[str, Any]:
    columns = rows()
    if kind == "csv":
        write_csv(folder / "rows.csv", columns)
        return {"kind": "csv", "path": "rows.csv"}
    if kind == "csv.gz":
        write_csv(folder / "rows.csv.gz", columns)
        return {"kind": "csv", "path": "rows.csv.gz"}
    typed = pa.table({**columns, "n2": [float(value) for value in columns["n2"]]})
    parquet.write_table(typed, folder / "rows.parquet", row_group_size=150)
    return {"kind": "parquet", "path": "rows.parquet"}


def same(one: Features, other: Features) -> bool:
    pairs = [(getattr(one, n), getattr(other, n)) for n in ("numeric", "categorical", "image")]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def convert(found: DataSettings, folder: Path) -> Table:
    return open_converted(found, folder, lambda _: None)


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("csv", "standard"), ("csv.gz", "min_max"), ("parquet", "none")],
)
def test_features_are_those_of_the_table_in_memory_bit_for_bit(
    tmp_path: Path, kind: str, scaling: str
) -> None:
    source = source_of(kind, tmp_path)
    features = {**FEATURES, "numeric_scaling": scaling, "min_count": 3}
    plain = read_table(settings(source, features=features), tmp_path)
    found = settings({**source, "cache_dir": "cache"}, features=features)
    assert found.features is not None
    mapped = convert(found, tmp_path)
    generator = np.random.default_rng(2)
    training = generator.permutation(len(plain))[:400]
    order = generator.permutation(len(plain))[:500]
    encoder = FeatureEncoder.fit(found.features, mapped, training, 8)
    assert encoder == FeatureEncoder.fit(found.features, plain, training, 8)
    assert max(map(len, encoder.bins)) == 9
    expected = encoder.transform(plain, order)
    lazy = MappedFeatures(encode=RowEncoder(encoder, mapped), file_rows=order)
    assert len(lazy) == 500
    index = torch.randperm(500)[:64]
    arrays = lazy.rows(index.numpy()).to("cpu")
    for batch in (arrays, lazy.to(torch.device("cpu")).rows(index)):
        assert same(batch, expected.rows(index))
    assert not same(arrays, expected.rows(index.flip(0)))
    assert expected.categorical is not None
    assert (expected.categorical == 0).any()
    assert mapped.labels is not None
    assert plain.labels is not None
    assert np.array_equal(mapped.labels, plain.labels)
    assert same(encoder.transform(mapped, order), expected)


def test_columns_in_another_order_than_the_models_are_found_by_name(tmp_path: Path) -> None:
    source = {**source_of("csv", tmp_path), "cache_dir": "cache"}
    found = settings(source)
    assert found.features is not None
    encoder = FeatureEncoder.fit(found.features, convert(found, tmp_path), np.arange(300))
    columns = rows()
    write_csv(tmp_path / "rows.csv", dict(reversed(columns.items())))
    turned = convert(settings(source), tmp_path)
    assert list(turned.numeric) == ["n2", "n1"]
    batch = RowEncoder(encoder, turned)(np.arange(50)).to("cpu")
    plain = encoder.transform(read_table(settings(source), tmp_path), np.arange(50))
    assert same(batch, plain)


@pytest.mark.parametrize("named", ["id", None])
def test_ids_are_canonical_and_labels_are_found_by_them(tmp_path: Path, named: str | None) -> None:
    source = source_of("csv", tmp_path)
    plain = PartyData.load(settings(source, id_column=named), tmp_path)
    cached = {**source, "cache_dir": "cache"}
    mapped = PartyData.load(settings(cached, id_column=named), tmp_path)
    assert list(mapped.ids) == list(plain.ids)
    assert [mapped.ids[row] for row in (0, 5, 699, -1)] == [plain.ids[r] for r in (0, 5, 699, -1)]
    for place in (slice(60, 70), slice(3), slice(-2, None), slice(9, 2), slice(7, 400, 130)):
        assert mapped.ids[place] == list(plain.ids)[place]
    assert mapped.digest(None) == plain.digest(None)
    some = [plain.ids[row] for row in (3, 600, 1)]
    assert torch.equal(mapped.labels_of(some), plain.labels_of(some))
    assert torch.equal(mapped.labels_at(np.array([3, 600, 1])), plain.labels_of(some))


# ---- the cache ----


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("rows*"))


def test_a_file_is_converted_once_and_again_when_what_is_read_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {**source_of("csv", tmp_path), "cache_dir": "cache"}
    count = 0

    def counted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        convert_file(*arguments)

    monkeypatch.setattr(converted, "convert", counted)

    def conversions(**values: Any) -> int:
        before = count
        convert(settings(source, **values), tmp_path)
        return count - before

    assert conversions() == 1
    assert conversions() == 0
    assert conversions(features={**FEATURES, "min_count": 9, "numeric_scaling": "none"}) == 0
    assert conversions(features={**FEATURES, "numeric": "n1"}) == 1
    assert conversions(features={**FEATURES, "missing_texts": ["", "b0"]}) == 1
    for tokenizer, length, expected in (("a.json", 2, 1), ("b.json", 2, 0), ("a.json", 9, 0)):
        sequences = {"c1": {"tokenizer": tokenizer, "max_length": length}}
        assert conversions(features={**FEATURES, "sequences": sequences}) == expected
    assert conversions(id_column=None) == 1
    assert conversions(label_column=None) == 1
    os.utime(tmp_path / "rows.csv", ns=(1, 1))
    assert conversions() == 1
    assert len(entries(tmp_path / "cache")) == 7


def test_what_a_killed_conversion_left_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    source = {**source_of("csv", tmp_path), "cache_dir": "cache"}
    convert(settings(source), tmp_path)
    (folder,) = (tmp_path / "cache").glob("rows*")
    left = folder.rename(folder.with_name(f".{folder.name}.1234.tmp"))
    assert len(convert(settings(source), tmp_path)) == 700
    assert not left.exists()
    assert entries(tmp_path / "cache") == [folder.name]


def test_two_parties_convert_a_file_once(tmp_path: Path) -> None:
    source = {**source_of("csv", tmp_path), "cache_dir": "cache"}
    begun: list[int] = []
    both_wait = threading.Barrier(2, timeout=HANGS_AFTER_S)

    def work(party: int) -> int:
        both_wait.wait()
        return len(open_converted(settings(source), tmp_path, lambda _: begun.append(party)))

    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(work, (0, 1))) == [700, 700]
    assert len(set(begun)) == 1


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = {**source_of("csv", tmp_path), "cache_dir": "cache"}

    def touch(_: float) -> None:
        os.utime(tmp_path / "rows.csv", ns=(7, 7))

    with pytest.raises(DataError, match="changed during its conversion"):
        open_converted(settings(source), tmp_path, touch)
    assert entries(tmp_path / "cache") == []


def test_progress_rises_to_one(tmp_path: Path) -> None:
    for kind in ("csv", "csv.gz", "parquet"):
        source = {**source_of(kind, tmp_path), "cache_dir": "cache"}
        seen: list[float] = []
        open_converted(settings(source), tmp_path, seen.append)
        assert len(seen) > 8, kind
        assert seen == sorted(seen), kind
        assert seen[-1] == pytest.approx(1), kind
        if not kind.startswith("csv"):  # there all of so small a file is read ahead
            assert seen[2] < 0.9, kind


def test_a_cache_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    source = source_of("csv", tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="taken"):
        convert(settings({**source, "cache_dir": "taken/cache"}), tmp_path)


@pytest.mark.parametrize(
    "name", ["manifest.json", "numeric.bin", "codes.bin", "categories-1.arrow", "id_offsets.bin"]
)
def test_a_damaged_cache_is_a_storage_error(tmp_path: Path, name: str) -> None:
    source = {**source_of("csv", tmp_path), "cache_dir": "cache"}
    convert(settings(source), tmp_path)
    (folder,) = (tmp_path / "cache").glob("rows*")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 3])
    with pytest.raises(StorageError, match=r"damaged .* delete it to convert the file again"):
        convert(settings(source), tmp_path)


# ---- bad files ----


@pytest.mark.parametrize(
    ("column", "row", "text", "parts"),
    [
        ("label", 600, "2", ["column 'label'", "row 601"]),
        ("n1", 444, "abc", ["column 'n1'", "expected numbers", "row 445"]),
        ("n2", 444, "inf", ["column 'n2'", "infinite", "row 445"]),
        ("id", 300, " ", ["column 'id'", "1 missing or empty ids"]),
        ("id", 690, "zoë-14 ", ["column 'id'", "normalised: data rows 691 (as 3)"]),
    ],
)
def test_a_bad_cell_is_named_with_its_row_in_the_file(
    tmp_path: Path, column: str, row: int, text: str, parts: list[str]
) -> None:
    columns = rows()
    columns[column][row] = text
    write_csv(tmp_path / "rows.csv", columns)
    with pytest.raises(DataError) as raised:
        convert(settings({"kind": "csv", "path": "rows.csv", "cache_dir": "cache"}), tmp_path)
    for part in ["rows.csv", *parts]:
        assert part in str(raised.value)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


def test_different_ids_with_one_hash_are_no_duplicates() -> None:
    ids = ["a", "b", "c", "b"]
    assert repeated_rows(ids[:3], np.array([7, 7, 7])) == []
    assert repeated_rows(ids, np.array([7, 8, 7, 8])) == [(3, 1)]


# ---- images ----


def write_images(folder: Path, count: int = 30) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(5)
    pixels = generator.integers(0, 256, (count, 6, 8, 3), dtype=np.uint8)
    (folder / "images").mkdir()
    lines = ["name,target,age"]
    for row, image in enumerate(pixels):
        Image.fromarray(image).save(folder / "images" / f"lesion{row:02d}.png")
        lines.append(f"lesion{row:02d},{row % 3 == 0:d},{row}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return pixels


def image_settings(**values: Any) -> DataSettings:
    source = {
        "kind": "images",
        "path": "images",
        "table": "labels.csv",
        "file_column": "name",
        "file_ending": ".png",
        "size": (6, 8),
        **values,
    }
    found = {
        "source": source,
        "id_column": "name",
        "label_column": "target",
        "features": {"numeric": "age", "image": {}},
    }
    return validate(DataSettings, found, "settings")


@pytest.mark.parametrize("cached", [False, True])
def test_a_folder_of_images_is_read_in_the_order_of_its_table(tmp_path: Path, cached: bool) -> None:
    pixels = write_images(tmp_path)
    in_cache = image_settings(cache_dir="cache")
    table = convert(in_cache, tmp_path) if cached else read_table(image_settings(), tmp_path)
    assert table.image is not None
    assert np.array_equal(table.image, pixels.transpose(0, 3, 1, 2))
    assert list(table.ids)[:2] == ["lesion00", "lesion01"]
    assert table.labels is not None
    assert table.labels[:4].tolist() == [1, 0, 0, 1]
    assert table.numeric["age"].tolist() == list(range(30))


def test_a_conversion_of_images_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path)
    monkeypatch.setattr(sources, "PART_BYTES", 10 * 3 * 6 * 8)  # of ten images
    shown: list[float] = []
    open_converted(image_settings(cache_dir="cache"), tmp_path, shown.append)
    assert shown == pytest.approx([0.3, 0.6, 0.9])


def test_images_are_resized_and_made_grey(tmp_path: Path) -> None:
    pixels = write_images(tmp_path)
    table = read_table(image_settings(size=(3, 4), colours="grey"), tmp_path)
    assert table.image is not None
    assert table.image.shape == (30, 1, 3, 4)
    assert abs(float(table.image.mean()) - float(pixels.mean())) < 2


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no such file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(60), "damaged, or none of BMP, GIF, JPEG, PNG"),
        (POSTSCRIPT, "damaged, or none of BMP, GIF, JPEG, PNG"),
        (Image.new("1", (9000, 9000)), "more than 67,108,864 pixels"),
    ],
    ids=["missing", "damaged", "PostScript", "too large"],
)
def test_an_image_that_cannot_be_read_is_named_by_its_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | Image.Image | None,
    reason: str,
) -> None:
    """And no program of PostScript is run."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("was run"))
    write_images(tmp_path)
    path = tmp_path / "images" / "lesion07.png"
    path.unlink()
    if isinstance(content, Image.Image):
        content.save(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"labels\.csv: row 8: its image cannot be read") as raised:
        read_table(image_settings(), tmp_path)
    assert reason in str(raised.value)
    assert "lesion07" not in str(raised.value)  # an id names a person


@pytest.mark.parametrize("name", ["../lesion07", "{folder}/lesion07"])
def test_an_image_outside_of_the_folder_is_not_read(tmp_path: Path, name: str) -> None:
    write_images(tmp_path)
    (tmp_path / "images" / "lesion07.png").rename(tmp_path / "lesion07.png")
    table = (tmp_path / "labels.csv").read_text()
    (tmp_path / "labels.csv").write_text(table.replace("lesion07", name.format(folder=tmp_path)))
    with pytest.raises(DataError, match=r"row 8: .*leads out of the folder"):
        read_table(image_settings(), tmp_path)


@pytest.mark.parametrize("form", ["BMP", "JPEG", "PNG", "TIFF"])
def test_damaged_images_are_refused_or_read(tmp_path: Path, form: str) -> None:
    """Pillow raises classes of a dozen kinds, and decides by the content, whatever the name."""
    pixels = write_images(tmp_path, count=2)
    path, draw = tmp_path / "images" / "lesion00.png", random.Random(1)
    Image.fromarray(pixels[0]).save(path, form)
    whole = path.read_bytes()
    assert read_table(image_settings(), tmp_path).image is not None
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(min(len(whole), 120))] = draw.choice(
                [0, 255, draw.randrange(256)]
            )
        path.write_bytes(damaged)
        try:
            read_table(image_settings(), tmp_path)
        except DataError:
            refused += 1
    assert refused > 10


def test_a_column_of_file_names_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_images(tmp_path)
    with pytest.raises(DataError, match="no column 'nmae'; did you mean 'name'"):
        read_table(image_settings(file_column="nmae"), tmp_path)
