"""Gaps, timestamps and lists of categories become numbers, the same from a file and from its copy.

The oracles are scikit-learn's imputer, Python's datetime and Python's sets.
"""

import json
import logging
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from sklearn.impute import SimpleImputer

from splitveil.active_party.http.own_features import GivenFeatures
from splitveil.active_party.http.programs import Unusable
from splitveil.common.data import features as features_module
from splitveil.common.data import sources
from splitveil.common.data.features import FeatureEncoder
from splitveil.common.data.settings import DataSettings, FeatureSettings
from splitveil.common.data.table_files import settings_for, source_of, unseen_numbers
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.settings import validate

COUNT = 300
TRAINING = np.arange(0, COUNT, 3)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 64)
    monkeypatch.setattr(features_module, "FIT_ROWS", 50)
    monkeypatch.setattr(features_module, "ORDERED_NUMBERS", 150)


def load(folder: Path, columns: dict[str, Any], **features: Any) -> PartyData:
    """Write columns as Parquet and return what a party reads, with a copy if a cache is named."""
    cache = {"cache_dir": features.pop("cache_dir")} if "cache_dir" in features else {}
    ids = [f"p{row:05d}" for row in range(len(next(iter(columns.values()))))]
    parquet.write_table(pa.table({"id": ids, **columns}), folder / "rows.parquet")
    source = {"kind": "parquet", "path": "rows.parquet", **cache}
    values = {"source": source, "id_column": "id", "features": features}
    return PartyData.load(validate(DataSettings, values, "data"), folder)


def encode(data: PartyData, training: NDArray[np.int64]) -> tuple[FeatureEncoder, torch.Tensor]:
    """Fit on training rows, send the encoder through JSON, and return the numbers of all rows."""
    encoder = data.fit(training)
    assert encoder is not None
    assert FeatureEncoder.from_state(json.loads(json.dumps(encoder.state()))) == encoder
    rows = np.arange(len(data.ids))
    found = encoder.transform(data.table, rows).numeric
    assert found is not None
    assert found.dtype == torch.float32
    assert found.shape == (len(rows), encoder.shapes.numeric_dim)
    return encoder, found


def both(folder: Path, columns: dict[str, Any], **features: Any) -> torch.Tensor:
    """Return the numbers of all rows, after comparing those from the file and from its copy."""
    training = TRAINING[len(next(iter(columns.values()))) > TRAINING]
    encoder, numbers = encode(load(folder, columns, **features), training)
    again, mapped = encode(load(folder, columns, **features, cache_dir="cache"), training)
    assert again == encoder
    assert torch.equal(mapped, numbers)
    return numbers


def gappy(seed: int = 3) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    x = generator.exponential(size=(COUNT, 4)) * [1, 10, 100, 1] - 2
    is_gap = generator.random((COUNT, 4)) < [0.3, 0.05, 0.0, 0.0]
    is_gap[1, 2] = True  # a column whose only gap is in no training row
    is_gap[TRAINING, 1] |= generator.random(len(TRAINING)) < 0.1
    columns = {f"x{j}": pa.array(x[:, j], mask=is_gap[:, j]) for j in range(4)}
    return columns | {"x4": pa.nulls(COUNT, pa.float64())}


def as_matrix(columns: dict[str, Any]) -> NDArray[np.float64]:
    return np.column_stack([c.to_numpy(zero_copy_only=False) for c in columns.values()])


# ---- gaps ----


@pytest.mark.parametrize("strategy", ["mean", "median"])
@pytest.mark.parametrize("scaling", ["standard", "min_max", "none"])
@pytest.mark.parametrize("log", [False, True])
def test_gaps_are_filled_as_scikit_learn_fills_them(
    tmp_path: Path, strategy: str, scaling: str, *, log: bool
) -> None:
    """Of the training rows, and scaled by what is there."""
    columns = gappy()
    numbers = both(
        tmp_path,
        columns,
        numeric="x*",
        missing_numeric=strategy,
        numeric_scaling=scaling,
        signed_log1p=log,
    )
    x = as_matrix(columns)
    x = np.sign(x) * np.log1p(np.abs(x)) if log else x
    imputer = SimpleImputer(strategy=strategy, keep_empty_features=True).fit(x[TRAINING])
    filled = imputer.transform(x)
    shift, scale = np.zeros(5), np.ones(5)
    present = x[TRAINING][:, :4]
    if scaling == "standard":
        shift[:4], scale[:4] = np.nanmean(present, axis=0), np.nanstd(present, axis=0)
    elif scaling == "min_max":
        shift[:4] = np.nanmin(present, axis=0)
        scale[:4] = np.nanmax(present, axis=0) - shift[:4]
    assert np.allclose(numbers, (filled - shift) / scale, atol=1e-5)
    assert not numbers[:, 4].any()


@pytest.mark.parametrize("missing", ["mean", "median", "zero"])
def test_an_indicator_marks_the_gaps_of_columns_that_had_some(tmp_path: Path, missing: str) -> None:
    columns = gappy()
    plain = both(tmp_path, columns, numeric="x*", missing_numeric=missing)
    marked = both(tmp_path, columns, numeric="x*", missing_numeric=missing, missing_indicator=True)
    assert torch.equal(marked[:, :5], plain)
    is_gap = np.isnan(as_matrix(columns))
    # x2 has its only gap in a row that is not for training, and x3 has none.
    assert np.array_equal(marked[:, 5:].numpy(), is_gap[:, [0, 1, 4]])


def test_what_is_not_asked_for_leaves_no_trace_in_a_stored_encoder(tmp_path: Path) -> None:
    """A run that was stored by an earlier version has the same digest."""
    data = load(tmp_path, gappy(), numeric="x*", missing_numeric="zero")
    state = data.fit(TRAINING).state()  # type: ignore[union-attr]
    assert set(state) == {"signed_log1p", "numeric", "categorical", "image"}
    assert set(state["numeric"][0]) == {"name", "shift", "scale", "low", "high"}


@pytest.mark.parametrize(("before", "after"), [("zero", "mean"), ("median", "zero")])
@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_a_model_keeps_the_treatment_of_gaps_that_it_was_trained_with(
    tmp_path: Path, before: str, after: str, cache: dict[str, str]
) -> None:
    encoder, _ = encode(load(tmp_path, gappy(), numeric="x*", missing_numeric=before), TRAINING)
    other = load(tmp_path, gappy(), numeric="x*", missing_numeric=after, **cache)
    with pytest.raises(DataError, match="another treatment of missing numbers"):
        encoder.check_same_columns(other.table)


# ---- numbers and gaps that no training row had ----


def said_of(encoder: FeatureEncoder, data: PartyData) -> list[tuple[int, str]]:
    found = unseen_numbers(encoder, data.table, data.settings.features)
    return [(level, text.partition(": ")[2]) for level, text in found]


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
@pytest.mark.parametrize("log", [False, True])
def test_numbers_beyond_the_training_rows_are_counted(
    tmp_path: Path, cache: dict[str, str], *, log: bool
) -> None:
    made = np.random.default_rng(2)
    columns = {"fee": made.exponential(50, COUNT), "age": made.integers(18, 90, COUNT)}
    options = {"numeric": ["fee", "age"], "signed_log1p": log, **cache}
    encoder, _ = encode(load(tmp_path, columns, **options), np.arange(COUNT))
    assert said_of(encoder, load(tmp_path, columns, **options)) == []
    low, high = columns["fee"].min(), columns["fee"].max()
    cents = {"fee": columns["fee"] * 100, "age": np.append(columns["age"][1:], 91)}
    above = int(((cents["fee"] > high) | (cents["fee"] < low)).sum())
    rows = int(((cents["fee"] > high) | (cents["age"] > columns["age"].max())).sum())
    (found,) = said_of(encoder, load(tmp_path, cents, **options))
    assert above > 200
    outside = f"{rows} of 300 rows have numbers outside of what any training row had"
    assert found == (logging.WARNING, f"{outside}: 'fee' ({above}), 'age' (1)")
    # One in a hundred is what chance brings.
    rest = {"fee": np.append(columns["fee"][1:], high * 1.1), "age": columns["age"]}
    (found,) = said_of(encoder, load(tmp_path, rest, **options))
    assert found[0] == logging.INFO


def test_the_other_decimal_form_is_an_error_or_out_of_range(tmp_path: Path) -> None:
    """A table with points, and then one with commas, of the same amounts."""
    source = {"kind": "csv", "path": "rows.csv", "decimal": "."}
    values = {"source": source, "id_column": "id", "features": {"numeric": "x"}}
    amounts = [1000 + 7 * row for row in range(99)]

    def read(form: str) -> PartyData:
        texts = [form.format(*divmod(amount, 1000)) for amount in amounts]
        lines = [f'p{row},"{text}"' for row, text in enumerate(texts)]
        (tmp_path / "rows.csv").write_text("\n".join(["id,x", *lines, ""]))
        return PartyData.load(validate(DataSettings, values, "data"), tmp_path)

    encoder, _ = encode(read("{}.{:03}"), np.arange(99))
    ((level, found),) = said_of(encoder, read("{},{:03}"))
    assert level == logging.WARNING
    assert found.startswith("99 of 99 rows have numbers outside")
    with pytest.raises(DataError, match="expected numbers, found text"):
        read("{},{:02}")


@pytest.mark.parametrize("options", [{}, {"missing_numeric": "mean", "missing_indicator": True}])
def test_a_first_gap_is_filled_and_said_or_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """In a table and in what a program sends, with one result."""
    made = np.random.default_rng(2)
    fees, ages = made.exponential(50, COUNT), [*made.normal(40, 9, COUNT - 1), None]
    known = {"fee": fees, "age": ages if options else made.normal(40, 9, COUNT)}
    options = {"numeric": ["fee", "age"], **options}
    data = load(tmp_path, known, **options)
    encoder, _ = encode(data, np.arange(COUNT))
    new = {
        "fee": [*fees[:2].tolist(), None],
        "age": [30.0, None if "missing_numeric" in options else 30, 1],
    }
    gap = "1 of 3 rows have a gap in columns of numbers that had none in training"

    def later(**more: Any) -> tuple[PartyData, DataSettings]:
        given = load(tmp_path, new, **{"missing_numeric": "mean"} | options | more)
        settings = validate(DataSettings, data.settings.model_dump(), "data")
        features = validate(FeatureSettings, options | more, "data.features")
        return given, settings.model_copy(update={"features": features})

    table, settings = later()
    (filled, *_) = said_of(encoder, table)
    assert filled == (logging.WARNING, f"{gap}, filled: 'fee' (1)")
    numbers = encoder.transform(table.table, np.arange(3)).numeric
    assert numbers is not None
    assert abs(numbers[2, 0]) < 1e-6  # the mean
    rows = [{"fee": fee, "age": age} for fee, age in zip(*new.values(), strict=True)]
    sent = GivenFeatures(settings, encoder).of_rows(rows, 3).numeric
    assert sent is not None
    assert torch.equal(sent, numbers)
    assert said_of(encoder, later(new_gaps="error")[0])[0][0] == logging.ERROR
    with pytest.raises(Unusable, match=r"had none in training|no number .* in row 3"):
        GivenFeatures(later(new_gaps="error")[1], encoder).of_rows(rows, 3)


# ---- timestamps ----

TIMES = [datetime(2023, 12, 31, 23, 30) + timedelta(hours=37 * row) for row in range(60)]
PARTS = ["seconds", "year", "month", "day", "day_of_week", "hour", "minute"]


def parts_of(moment: datetime) -> list[float]:
    seconds = moment.replace(tzinfo=UTC).timestamp()
    return [
        *(seconds, moment.year, moment.month, moment.day),
        *(moment.weekday(), moment.hour, moment.minute),
    ]


BERLIN_WINTER = timezone(timedelta(hours=1))
WRITTEN: dict[str, Any] = {
    "microseconds": lambda: pa.array(TIMES, pa.timestamp("us")),
    "nanoseconds": lambda: pa.array(TIMES, pa.timestamp("ns")),
    "with a zone": lambda: pa.array(
        [moment.replace(tzinfo=UTC) for moment in TIMES], pa.timestamp("ms", "Europe/Berlin")
    ),
    "text": lambda: [moment.isoformat() for moment in TIMES],
    "text with a space": lambda: [f" {moment.isoformat(' ', 'minutes')} " for moment in TIMES],
    "text with zones": lambda: [
        moment.isoformat() + "Z"
        if row % 2
        else moment.replace(tzinfo=UTC).astimezone(BERLIN_WINTER).isoformat()
        for row, moment in enumerate(TIMES)
    ],
    "categories": lambda: pa.array([m.isoformat() for m in TIMES]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_parts_of_a_time_are_those_of_python(tmp_path: Path, kind: str) -> None:
    numbers = both(
        tmp_path,
        {"t": WRITTEN[kind]()},
        timestamps="t",
        timestamp_parts=PARTS,
        numeric_scaling="none",
    )
    expected = torch.tensor([parts_of(moment) for moment in TIMES], dtype=torch.float64)
    assert torch.equal(numbers, expected.float())


def test_gaps_in_timestamps_are_filled_like_numbers(tmp_path: Path) -> None:
    columns = {"t": ["2024-01-01", "", "2024-03-01", "2024-05-01"]}
    numbers = both(
        tmp_path,
        columns,
        timestamps="t",
        timestamp_parts=["month"],
        missing_numeric="median",
        missing_indicator=True,
        numeric_scaling="none",
    )
    # Rows 0 and 3 are for training; the gap is in neither.
    assert numbers.tolist() == [[1], [3], [3], [5]]
    with pytest.raises(DataError, match=r"'t'.*row 2"):
        load(tmp_path, columns, timestamps="t", timestamp_parts=["month"])


@pytest.mark.parametrize(
    ("cells", "features", "expected"),
    [
        (["2024-01-01", "secret", "2024-02-30"], {}, "rows 2, 3 "),
        (["2024-01-01", "20240102", "2024-W01-3"], {}, "rows 2, 3 "),
        (["2024-01-01", "2024-01-01 10:00:00.0000000001", None], {}, "row 2;"),
        (["01.02.2024", "secret", ""], {"timestamp_format": "%d.%m.%Y"}, "row 2"),
        ([1.5, 2.5, 3.5], {}, "not double"),
    ],
)
@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_what_is_no_time_is_refused_and_not_quoted(
    tmp_path: Path, cells: list[Any], features: dict[str, str], expected: str, cache: dict[str, str]
) -> None:
    with pytest.raises(DataError, match=expected) as refused:
        load(tmp_path, {"t": cells}, timestamps="t", **features, **cache)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("digits", [7, 9])
def test_digits_beyond_microseconds_are_dropped(tmp_path: Path, digits: int) -> None:
    """As nanoseconds and .NET write them."""
    texts = [f"2024-03-01 10:00:00.{'0' * digits}", f"2024-03-01T11:00:01.{'123456789'[:digits]}Z"]
    chosen = {"timestamps": "t", "timestamp_parts": ["seconds"], "numeric_scaling": "none"}
    data = load(tmp_path, {"t": [text.encode() for text in texts]}, **chosen)
    first = datetime(2024, 3, 1, 10, tzinfo=UTC).timestamp()
    assert data.table.numeric["t.seconds"].tolist() == [first, first + 3601.123456]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([b"1.5", b"?", b"-2"], [1.5, np.nan, -2]),
        ([1.5, float("inf"), None], [1.5, np.nan, np.nan]),
        ([1e300, float("-inf"), 2.0], [np.nan, np.nan, 2]),
    ],
)
def test_numbers_in_bytes_are_read_and_infinite_ones_may_be_gaps(
    tmp_path: Path, cells: list[Any], expected: list[float]
) -> None:
    texts = ["?", "inf", "-inf", "1e+300"]
    data = load(tmp_path, {"x": cells}, numeric="x", missing_numeric="mean", missing_texts=texts)
    assert np.array_equal(data.table.numeric["x"], expected, equal_nan=True)
    if float("inf") in cells:
        with pytest.raises(
            DataError, match=r"infinite .* in row 2; .* data.features.missing_texts"
        ):
            load(tmp_path, {"x": cells}, numeric="x", missing_numeric="mean")


def test_a_column_is_read_in_one_way_only(tmp_path: Path) -> None:
    columns = {"t": ["2024-01-01"], "t.year": [1.0], "x": [1.0]}
    for features in (
        {"timestamps": "t", "lists": "t"},
        {"timestamps": "t*", "numeric": "t.*"},
        {"timestamps": "t", "numeric": "t.year", "timestamp_parts": ["year"]},
    ):
        with pytest.raises(SettingsError, match=r"t\.year|'t'"):
            load(tmp_path, columns, **features)
    chosen = load(tmp_path, columns, timestamps="t", numeric="x", exclude="t.*")
    assert list(chosen.table.numeric) == ["x", "t.year", "t.month", "t.day_of_week", "t.hour"]


# ---- lists of categories ----


def tags(seed: int = 4) -> list[list[str]]:
    generator = np.random.default_rng(seed)
    words = [f"tag{number:02d}" for number in range(20)]
    return [
        [words[int(i)] for i in generator.exponential(size=generator.integers(0, 6)) * 5 % 20]
        for _ in range(COUNT)
    ]


def multi_hot(rows: list[list[str]], kept: list[str]) -> NDArray[np.float64]:
    return np.array(
        [[*(word in row for word in kept), bool(set(row) - set(kept))] for row in rows], float
    )


@pytest.mark.parametrize("kind", ["lists", "large lists", "text"])
@pytest.mark.parametrize(("most", "min_count"), [(100, 1), (5, 1), (100, 12)])
def test_a_list_becomes_a_number_for_each_frequent_category(
    tmp_path: Path, kind: str, most: int, min_count: int
) -> None:
    rows = tags()
    written: Any = {
        "lists": pa.array(rows),
        "large lists": pa.array(rows, pa.large_list(pa.large_string())),
        "text": [" , ".join(row) for row in rows],
    }[kind]
    limits = {"max_list_categories": most, "min_count": min_count}
    columns = {"tags": written, "x": np.arange(COUNT, dtype=float)}
    numbers = both(tmp_path, columns, lists="tags", list_separator=",", numeric="x", **limits)
    counts: dict[str, int] = {}
    for row in TRAINING:
        for word in set(rows[row]):
            counts[word] = counts.get(word, 0) + 1
    frequent = [word for word in sorted(counts) if counts[word] >= min_count]
    kept = sorted(sorted(frequent, key=lambda word: -counts[word])[:most])
    assert np.array_equal(numbers[:, 1:].numpy(), multi_hot(rows, kept))
    assert len(kept) in {5, len(frequent)}


def test_lists_alone_make_features_and_missing_words_are_no_category(tmp_path: Path) -> None:
    columns = {"tags": ["a|b", "", "?", "b|a|?", "b", None]}
    numbers = both(tmp_path, columns, lists="tags", missing_texts=["", "?"])
    # Rows 0 and 3 are for training: a and b.
    assert numbers.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_a_category_with_the_separator_of_sets_is_refused(tmp_path: Path) -> None:
    for cache in ({}, {"cache_dir": "cache"}):
        with pytest.raises(DataError, match=r"U\+001F in row 2"):
            load(tmp_path, {"tags": pa.array([["a"], ["b\x1fc"]])}, lists="tags", **cache)


# ---- another table, for predictions ----


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_another_table_is_read_for_a_model_as_its_own_was(
    tmp_path: Path, cache: dict[str, str]
) -> None:
    """Labels and weights are not needed, and neither are columns that the model does not know."""
    count = 40
    columns = {
        "x.year": pa.array([None if row % 7 == 0 else float(row) for row in range(count)]),
        "t": [f"20{10 + row % 9}-03-01" for row in range(count)],
        "tags": ["a|b" if row % 3 else "c" for row in range(count)],
        "kind": ["u", "v"] * (count // 2),
    }
    data = load(
        tmp_path,
        columns,
        numeric="x.*",
        timestamps="t*",
        lists="tags",
        categorical="kind",
        exclude="tags*",
        timestamp_parts=["year", "month"],
        missing_numeric="median",
        missing_indicator=True,
        **cache,
    )
    encoder, numbers = encode(data, np.arange(count))
    table = pa.table({"id": [f"q{row}" for row in range(count)], **columns, "x.new": [0] * count})
    parquet.write_table(table, tmp_path / "other.parquet")
    source = source_of(tmp_path / "other.parquet", data.settings.source)
    chosen = settings_for(data.settings, source, encoder)
    other = PartyData.load(chosen, tmp_path)
    assert set(other.table.numeric) == {"x.year", "t.year", "t.month"}
    rows = np.arange(count)
    found = encoder.transform(other.table, rows)
    assert found.numeric is not None
    assert torch.equal(found.numeric, numbers)
