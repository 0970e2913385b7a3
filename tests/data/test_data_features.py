"""Features are scaled and encoded by the training rows alone."""

import json
import re
from dataclasses import replace
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from splitveil.common.data import features as features_module
from splitveil.common.data import table_files
from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.data.features import FeatureEncoder, Features, FeatureShapes, image_as_float
from splitveil.common.data.sequences import SEPARATOR
from splitveil.common.data.settings import DataSettings, FeatureSettings
from splitveil.common.data.table import Table, read_table
from splitveil.common.data.table_files import unknown_categories
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.settings import validate
from splitveil.experiments.preparation import write_columns


def settings(**values: Any) -> FeatureSettings:
    return validate(FeatureSettings, {"numeric": "*", **values}, "settings")


def table(
    numeric: dict[str, list[float]] | None = None,
    categorical: dict[str, list[str | None]] | None = None,
    image: np.ndarray[Any, Any] | None = None,
) -> Table:
    columns = {}
    for name, texts in (categorical or {}).items():
        different = sorted({text for text in texts if text is not None}, reverse=True)
        codes = [-1 if text is None else different.index(text) for text in texts]
        columns[name] = CategoricalColumn(np.array(codes, np.int32), pa.array(different))
    numbers = {name: np.array(values) for name, values in (numeric or {}).items()}
    parts = [*numbers.values(), *(column.codes for column in columns.values()), image]
    num_rows = len(next(part for part in parts if part is not None))
    return Table("rows.csv", [str(row) for row in range(num_rows)], None, numbers, columns, image)


def fit(own: Table, rows: list[int], **values: Any) -> FeatureEncoder:
    return FeatureEncoder.fit(settings(**values), own, np.array(rows, np.int64))


def transform(encoder: FeatureEncoder, own: Table, rows: list[int] | None = None) -> Features:
    return encoder.transform(own, np.array(range(len(own)) if rows is None else rows, np.int64))


def test_bins_are_quantiles_of_the_numbers_in_training_rows() -> None:
    """Equal numbers count once, and gaps do not count."""
    own = table(
        {
            "many": [*range(101), 9e9],
            "two": [1.0, 1.0, 3.0] * 34,
            "one": [5.0] * 101 + [7.0],
            "gaps": [0.0, np.nan, 4.0] * 34,
            "none": [np.nan] * 101 + [2.0],
        }
    )
    own = replace(own, gaps="nan")
    found = FeatureEncoder.fit(
        settings(numeric_scaling="none", missing_numeric="mean"), own, np.arange(101), 4
    )
    assert found.bins == ((0, 25, 50, 75, 100), (1, 3), (5,), (0, 4), (0,))
    assert FeatureEncoder.from_state(json.loads(json.dumps(found.state()))) == found
    scaled = FeatureEncoder.fit(settings(missing_numeric="zero"), own, np.arange(101), 2)
    column = np.arange(101)
    edges = (np.array([0, 50, 100]) - column.mean()) / column.std()
    assert np.allclose(scaled.bins[0], edges)
    assert found.shapes.bins == (4, 1, 0, 1, 0)
    places = transform(found, own).numeric
    assert places is not None
    assert np.allclose(places[:101, 0], np.arange(101) / 25)
    assert places[101].tolist() == [4, 1, 0, 1, 0]  # the last edge stands for what is beyond it
    assert places[1, 3] == pytest.approx(4 * 33 / 67 / 4)  # a gap is filled with the mean


def test_fitting_some_rows_at_a_time_gives_what_fitting_all_of_them_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(8)
    values = 1e6 + generator.normal(size=500) * np.linspace(0.1, 9, 500)
    own = table({"a": values.tolist()}, {"c": [f"{int(v) % 9}" for v in values]})
    rows = generator.permutation(500)[:330]
    fitting_all = partial(FeatureEncoder.fit, settings(min_count=30), own, rows, 4)
    whole = fitting_all()
    monkeypatch.setattr(features_module, "FIT_ROWS", 7)
    monkeypatch.setattr(features_module, "BIN_ROWS", len(rows))
    parts = fitting_all()
    assert parts.bins[0] == pytest.approx(whole.bins[0])
    monkeypatch.setattr(features_module, "BIN_ROWS", 3)
    three = np.sort(rows)[[0, 164, 329]]
    expected = (values[three] - values[rows].mean()) / values[rows].std()
    assert fitting_all().bins[0] == pytest.approx(sorted(expected))
    assert parts.categorical == whole.categorical
    for found in (parts.numeric[0], whole.numeric[0]):
        assert found.shift == pytest.approx(values[rows].mean(), rel=1e-14)
        assert found.scale == pytest.approx(values[rows].std(), rel=1e-10)
        assert found.scale != pytest.approx(values.std(), rel=1e-10)


@pytest.mark.parametrize(
    ("numbers", "scaling", "expected"),
    [
        ([0.1, 0.1, 0.1, 0.3], "standard", [0, 0, 0, 0.2]),
        ([0.1, 0.1, 0.1, 0.3], "min_max", [0, 0, 0, 0.2]),
        ([1e-200, 2e-200, 3e-200], "standard", [-0.5, 0, 0.5]),  # squares vanish
    ],
)
def test_no_deviation_makes_no_infinite_numbers(
    numbers: list[float], scaling: str, expected: list[float]
) -> None:
    own = table({"a": numbers})
    numeric = transform(fit(own, [0, 1, 2], numeric_scaling=scaling), own).numeric
    assert numeric is not None
    assert numeric[:, 0].tolist() == pytest.approx(expected)


def test_unknown_missing_known_and_rare_categories_have_their_slots() -> None:
    own = table(categorical={"c": ["b", "a", None, "b", "new"], "d": ["p", None, "q", "r", "p"]})
    encoder = fit(own, [0, 1, 2, 3])
    slots = transform(encoder, own).categorical
    assert slots is not None
    assert slots.dtype == torch.int64
    assert slots.tolist() == [[3, 2], [2, 1], [1, 3], [3, 4], [0, 2]]
    assert encoder.shapes.vocabulary_sizes == (4, 5)
    rare = fit(own, [0, 1, 2, 3], min_count=2)
    slots = transform(rare, own).categorical
    assert slots is not None
    assert slots.tolist() == [[2, 0], [0, 1], [1, 0], [2, 0], [0, 0]]
    assert rare.shapes.vocabulary_sizes == (3, 2)


def test_images_stay_bytes_until_a_model_asks() -> None:
    image = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5, 3).transpose(0, 3, 1, 2)
    own = table(image=image)
    encoder = fit(own, [0])
    found = transform(encoder, own, [1]).image
    assert found is not None
    assert np.array_equal(found.numpy(), image[1:])
    assert encoder.shapes == FeatureShapes(0, (), (3, 4, 5), "uint8")
    assert image_as_float(found).max().item() == pytest.approx(119 / 255)
    floating = torch.rand(1, 2, 2)
    assert image_as_float(floating) is floating
    assert FeatureEncoder.from_state(json.loads(json.dumps(encoder.state()))) == encoder
    with pytest.raises(SettingsError, match="feature encoder"):
        FeatureEncoder.from_state({"numeric": []})


def test_table_without_the_trained_columns_is_refused() -> None:
    encoder = fit(table({"a": [1.0, 2.0]}, {"c": ["x", "y"]}), [0, 1])
    with pytest.raises(DataError, match=r"missing here: a, c"):
        transform(encoder, table({"b": [1.0]}))
    with_image = table({"a": [1.0]}, {"c": ["x"]}, np.zeros((1, 1, 2, 2), np.uint8))
    with pytest.raises(DataError, match="images None"):
        transform(encoder, with_image)


def test_no_training_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="no training rows"):
        fit(table({"a": [1.0]}), [])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("missing", ["zero", "median"])
def test_numbers_stored_as_float32_take_half_the_memory_and_give_the_same_bits(
    tmp_path: Path, missing: str, *, log: bool
) -> None:
    x = np.random.default_rng(0).normal(scale=1e3, size=(200, 3)).astype(np.float32)
    x[::7, 1] = np.nan
    found = []
    for name, kind in (("narrow", np.float32), ("wide", np.float64)):
        write_columns(tmp_path / f"{name}.parquet", id=np.arange(200), x=x.astype(kind))
        features = {"numeric": "x*", "missing_numeric": missing, "signed_log1p": log}
        values = {
            "source": {"kind": "parquet", "path": f"{name}.parquet"},
            "id_column": "id",
            "features": features,
        }
        own = read_table(validate(DataSettings, values, "settings"), tmp_path)
        assert {column.dtype for column in own.numeric.values()} == {np.dtype(kind)}
        encoder = FeatureEncoder.fit(
            validate(FeatureSettings, features, "settings"), own, np.arange(150)
        )
        numeric = transform(encoder, own).numeric
        assert numeric is not None
        found.append((encoder.state(), numeric))
    (narrow, from_narrow), (wide, from_wide) = found
    assert narrow == wide
    assert torch.equal(from_narrow, from_wide)


UNKNOWN: list[tuple[Any, ...]] = [
    # texts in the training, at prediction, settings, unknown rows, wording
    ("categorical", ["1.0", "2.0"], ["1", "2"] * 10, {}, 20, "unknown; some differ .*; write"),
    ("categorical", ["North"], ["NORTH"] * 20, {}, 20, "unknown; some differ .*; write"),
    ("categorical", ["a", "b"], ["z", None] * 20, {}, 20, "had, and count as unknown; write"),
    ("categorical", ["a", "b"], ["z"] * 20 + ["a"], {}, 20, "had, and count as unknown$"),
    ("categorical", ["a", "b"], ["z"] * 19, {}, 19, "had, and count as unknown$"),
    ("categorical", ["a", "a", "b"], ["b"] * 20, {"min_count": 2}, 20, "or too few, .*unknown$"),
    ("categorical", ["7", "7"], ["7.0"] * 20, {"min_count": 2}, 20, "too few, .* some .*; write"),
    ("categorical", [None], ["b"] * 20, {}, 20, "had, and count as unknown$"),
    ("categorical", ["a"], ["a", None] * 20, {}, 0, None),
    ("lists", ["a|b"], ["z", "a|z", None, "y|z", "b"], {}, 2, "had, and count as unknown$"),
    ("lists", ["1|b"], ["1.0|c"] * 20, {}, 20, "unknown; some differ .*; write"),
    ("lists", ["a|b"], ["b"] * 20, {"max_list_categories": 1}, 20, "or too few, .*unknown$"),
]


@pytest.mark.parametrize(("kind", "before", "now", "values", "rows", "wording"), UNKNOWN)
def test_rows_with_unknown_categories_are_counted_by_column(
    kind: str, before: Any, now: Any, values: Any, rows: int, wording: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(table_files, "FIT_ROWS", 7)
    tables = []
    for texts in (before, now):
        sets = [text and text.replace("|", SEPARATOR) for text in texts]
        own = table({"n": [1.0] * len(sets)}, {"c": sets})
        of_lists = replace(own, lists=own.categorical, categorical={})
        tables.append(of_lists if kind == "lists" else own)
    encoder = fit(tables[0], list(range(len(before))), **values)
    found = list(unknown_categories(encoder, tables[1], settings(**values)))
    assert len(found) == bool(rows)
    for level, sentence in found:
        start = f"^rows.csv: column 'c': {rows} of {len(now)} rows have categories .*"
        assert re.search(start + wording, sentence), sentence
        assert (level == ERROR) is wording.endswith("write")
