"""What ``init`` may read in two ways is certain, said in one line with the option, or asked."""

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from splitveil.common.data.columns import WrittenColumn, read_numbers
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.timestamps import read_timestamps
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.settings import validate
from splitveil.library.own_data import write_settings
from tests.init.test_init import command

ROWS = 300
MADE = np.random.default_rng(4)
WHOLE = MADE.integers(1, 400, ROWS).tolist()
PARTS = MADE.normal(size=ROWS).round(3).tolist()
IDS = [f"K{100_000 + row}" for row in range(ROWS)]


def write(folder: Path, **columns: Any) -> Path:
    table = pa.table({"id": IDS, "part": PARTS} | columns)
    is_typed = any(pa.types.is_dictionary(kind) for kind in table.schema.types)
    path = folder / ("t.parquet" if is_typed else "t.csv")
    (parquet.write_table if is_typed else arrow_csv.write_csv)(table, path)
    return path


def read(folder: Path, role: str = "passive") -> PartyData:
    """Read the table as a check and a run do, by the settings that were written."""
    written = yaml.safe_load((folder / f"{role}.yaml").read_text())
    return PartyData.load(validate(DataSettings, written["data"], "data"), folder)


def each(form: str, numbers: Any = WHOLE) -> list[str]:
    return [form.format(number) for number in numbers]


def some(form: str, share: float) -> list[str]:
    return [form.format(x) if row < share * ROWS else str(x) for row, x in enumerate(WHOLE)]


def digits(first: int) -> list[str]:
    return ["".join(chr(first + int(one)) for one in str(number)) for number in WHOLE]


SMALL = [round(abs(number) * 20, 1) for number in PARTS]
FEW = [["0", "1", "2", "3+"][row % 4] for row in range(ROWS)]
UNITS: dict[str, tuple[list[str], str | None]] = {
    "80 kg": (each("{} kg"), "without 'kg' beside them; --categorical x"),
    "80kg": (each("{}kg"), "without 'kg'"),
    "46+": (each("{}+"), "without '+'"),
    "65*": (each("{}*"), "without '*'"),
    "~67": (each("~{}"), "without '~'"),
    "<5": (each("<{}"), "without '<'"),
    "US$89": (each("US${}"), "without 'US$'"),
    "-€5": (["-€5", *each("€{}")[1:]], "without '€'"),
    "EUR 5": (each("EUR {}"), "without 'EUR'"),
    "12 %": (each("{} %", SMALL), "without '%'"),
    "4.3k": (each("{}k", SMALL), "without 'k'"),
    "ca. 5.5": (each("ca. {}", SMALL), "without 'ca.'"),
    "nearly all": (some("{} kg", 0.95), "without 'kg'"),
    "full width": (digits(0xFF10), None),
    "Arabic": (digits(0x660), None),
    "minus": (each("\u2212{}"), None),
    "thin space": ([f"{x}\u2009{x % 900 + 100}" for x in WHOLE], None),
}


@pytest.mark.parametrize("form", UNITS)
def test_numbers_with_the_same_text_beside_them_are_numbers(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells, said = UNITS[form]
    path = write(tmp_path, x=cells)
    assert command("passive", path, "--folder", tmp_path) == 0
    lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith("decided")]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]
    numbers = read(tmp_path).table.numeric["x"]
    expected = {
        "-€5": [-5.0, *WHOLE[1:]],
        "minus": [-x for x in WHOLE],
        "thin space": [x * 1000 + x % 900 + 100 for x in WHOLE],
    }.get(form, SMALL if said and form in {"12 %", "4.3k", "ca. 5.5"} else WHOLE)
    assert numbers.tolist() == expected
    if said is not None:
        options = ["--force", "--categorical", "x"]
        assert command("passive", path, "--folder", tmp_path, *options) == 0
        assert set(read(tmp_path).table.categorical["x"].categories.to_pylist()) == set(cells)
    given = {"id": IDS, "x": cells, "part": PARTS}
    write_settings(tmp_path / "s", {"id": IDS, "label": [0, 1] * 150}, given, label="label")
    simulated = read(tmp_path / "s").table
    if form == "thin space":  # Parquet has no decimal mark to say how these are read
        assert list(simulated.categorical) == ["x"]
    else:
        assert simulated.numeric["x"].tolist() == expected


ASKED: dict[str, tuple[list[str], str, Sequence[str]]] = {
    "46+": (some("{}+", 0.2), "--numeric x for the number without the text", ["--numeric", "x"]),
    "65*": (some("{}*", 0.05), "--numeric x for the number without", ["--numeric", "x"]),
    "<5": (some("<{}", 0.3), "--numeric x for the number", ["--numeric", "x"]),
    "35-": (some("{}-", 0.2), "write the sign of a number first", ["--categorical", "x"]),
    "(35)": (some("({})", 0.2), "write the sign of a number first", ["--exclude", "x"]),
}


@pytest.mark.parametrize("form", ASKED)
def test_a_text_beside_some_numbers_is_a_question(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells, message, answer = ASKED[form]
    path = write(tmp_path, x=cells)
    assert command("passive", path, "--folder", tmp_path) == 2
    assert message in capsys.readouterr().err
    assert command("passive", path, "--folder", tmp_path, *answer) == 0
    if answer[0] == "--numeric":
        assert read(tmp_path).table.numeric["x"].tolist() == WHOLE
        assert "x: numbers, read without" in capsys.readouterr().out
    if "write the sign" in message:
        assert command("passive", path, "--folder", tmp_path, "--force", "--numeric", "x") == 2


BORN = [f"{1 + x % 28:02}.{1 + x % 12:02}.{35 + x % 63}" for x in WHOLE]
DAYS = [f"{1 + x % 28:02}.{1 + x % 12:02}.20{x % 20:02}" for x in WHOLE]
THIS = datetime.now(tz=UTC).year
ENDS = [f"{1 + x % 28:02}.{1 + x % 12:02}.{(THIS - 6 + x % 10) % 100:02}" for x in WHOLE]
NUMBER, CODE = (
    "may be codes, read as numbers; --categ",
    "may be quantities, read as categories; --num",
)
BEGIN = "texts that begin with a number, read as categories"
KINDS = ["numeric", "categorical", "timestamps", "left out"]
PERSONS = MADE.permutation(np.repeat(10_000 + MADE.permutation(90_000)[: ROWS // 2], 2))
SIZES = MADE.choice([2, 4, 8, 16, 24, 32], ROWS, p=[0.1, 0.25, 0.4, 0.15, 0.07, 0.03])
USED = (17, 61, 101, 160, 203, 262, 311, 359, 402, 467)
CHANNELS = [USED[(2 * row + 1) // 3 % 10] for row in range(ROWS)]
POSTCODES = MADE.choice(range(900, 99_000, 3277), ROWS)
JUDGED: dict[str, tuple[Any, str, str]] = {
    "postcodes": (each("{:05d}", POSTCODES), "categorical", ""),
    "persons": (each("{}", PERSONS), "left out", "no more than 2 rows: they identify"),
    "persons in words": (each("P{}", PERSONS), "left out", "in no more than 2 rows: they"),
    "row numbers": (each("{}", MADE.permutation(ROWS)), "left out", "far less often than by"),
    "memory": (each("{}", SIZES), "numeric", NUMBER),
    "channels": (each("{}", CHANNELS), "categorical", CODE),
    "ages": (each("{}", MADE.integers(18, 90, ROWS)), "numeric", ""),
    "scores": (each("{}", MADE.binomial(100, 0.6, ROWS)), "numeric", ""),
    "bands": ([f"{x // 100}0-{x // 100}9" for x in WHOLE], "categorical", BEGIN),
    "durations": ([f"{x % 3}:{x % 6}0" for x in WHOLE], "categorical", BEGIN),
    "hours": ([f"{x % 3}h{x % 6}0" for x in WHOLE], "categorical", BEGIN),
    "children": (FEW, "categorical", BEGIN),
    "names": (each("K{}", [x % 9 for x in WHOLE]), "categorical", ""),
    "births": (BORN, "timestamps", f"digits are {THIS - 99} to {THIS}; --first-year YEAR says"),
    "ends": (ENDS, "timestamps", f"digits are {THIS - 96} to {THIS + 3}; --first-year YEAR"),
    "German dates": (DAYS, "timestamps", ""),
    "times": ([f"2026-03-{1 + x % 28:02}" for x in WHOLE], "timestamps", ""),
    "no value": ([str(x) if x % 9 else "NA" for x in WHOLE], "numeric", ""),
    "a code for none": ([str(x) if x % 20 else "nix" for x in WHOLE], "numeric", ""),
    "no value of texts": ([f"K{x % 9}" if x % 7 else "-" for x in WHOLE], "categorical", ""),
    "one text": (["x"] * ROWS, "left out", "the same value in every row"),
    "splits": ([("train", "test")[x % 2] for x in WHOLE], "left out", "says train, validation"),
    "texts of a dictionary": (
        pa.array([str(x % 5) for x in WHOLE]).dictionary_encode(),
        "categorical",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", JUDGED)
def test_columns_are_judged_by_what_their_cells_do(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never by their names; what may be meant otherwise is said. In memory, they are the same."""
    cells, kind, said = JUDGED[what]
    names = ("x", "terminal")
    path = write(tmp_path, **dict.fromkeys(names, cells))
    assert command("passive", path, "--folder", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(said in one for one in lines)
    assert any(one.startswith("decided") for one in lines) == (bool(said) and kind != "left out")
    chosen = yaml.safe_load((tmp_path / "passive.yaml").read_text())["data"]["features"]
    for name in names:
        assert [one for one in KINDS if name in chosen.get(one, ())] == [kind] * (
            kind != "left out"
        )
    read(tmp_path)
    given = {"id": IDS, "part": PARTS, **dict.fromkeys(names, cells)}
    labels = {"id": IDS, "label": [0, 1] * 150}
    write_settings(tmp_path / "s", labels, given, label="label", key="id")
    assert features(tmp_path / "s") == features(tmp_path)


def features(folder: Path) -> dict[str, Any]:
    """Return how each column is read, less what depends on the number of rows."""
    found: dict[str, Any] = yaml.safe_load((folder / "passive.yaml").read_text())["data"]
    return {"units": found.get("units", {}), "missing_texts": [""], **found["features"]}


LABELLED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "0 and 1": ([0, 1], {}),
    "fractions": ([0.0, 1.0], {}),
    "signs": ([-1, 1], {"positive_label": "1"}),
    "0 to 2": ([0, 1, 2], {"classes": 3}),
    "1 to 3": ([1, 2, 3], {"classes": ["1", "2", "3"]}),
    "yes": (["no", "yes"], {"positive_label": "yes"}),
    "three texts": (["c", "a", "b"], {"classes": ["a", "b", "c"]}),
}


@pytest.mark.parametrize("what", LABELLED)
def test_labels_in_memory_are_read_as_init_reads_them(tmp_path: Path, what: str) -> None:
    labels, expected = LABELLED[what]
    table = {"id": IDS, "label": [labels[row % len(labels)] for row in range(ROWS)]}
    assert command("active", write(tmp_path, label=table["label"]), "--folder", tmp_path) == 0
    write_settings(tmp_path / "s", table, {"id": IDS, "part": PARTS}, label="label", key="id")
    for folder in (tmp_path, tmp_path / "s"):
        written = yaml.safe_load((folder / "active.yaml").read_text())["data"]
        found = {name: written[name] for name in ("classes", "positive_label") if name in written}
        assert found == expected


def test_whole_numbers_that_are_categories_in_pandas_stay_some(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": IDS, "part": PARTS, "x": pandas.Categorical(WHOLE)})
    frame["x"] = pandas.Categorical([x % 5 for x in WHOLE])
    frame.to_parquet(tmp_path / "t.parquet")
    assert command("passive", tmp_path / "t.parquet", "--folder", tmp_path) == 0
    assert list(read(tmp_path).table.categorical) == ["x"]


def test_two_digits_of_a_year_stand_for_the_hundred_years_that_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, x=BORN)
    for options, first in (([], THIS - 99), (["--first-year", "1836"], 1836)):
        assert command("passive", path, "--folder", tmp_path, "--force", *options) == 0
        years = read(tmp_path).table.numeric["x.year"]
        assert (first <= years).all()
        assert (years < first + 100).all()
        assert ((years - [35 + x % 63 for x in WHOLE]) % 100 == 0).all()
    cells = pa.chunked_array([pa.array(["29.02.68", "31.12.99", None])])
    parts = read_timestamps(WrittenColumn(cells, "x"), ["year", "day"], "%d.%m.%y", 1900)
    assert parts["year"][:2].tolist() == [1968, 1999]
    assert parts["day"][:2].tolist() == [29, 31]


def test_a_unit_is_dropped_beside_a_number_and_nowhere_else() -> None:
    texts = ["7 kg", "7", "kg7", "7kg8", "kg", "7 lb", "5²", None]
    cells = pa.chunked_array([pa.array(texts)])
    values, is_unreadable = read_numbers(WrittenColumn(cells, "x", units=("kg",)))
    assert values[:3].tolist() == [7, 7, 7]
    assert is_unreadable.tolist() == [False] * 3 + [True] * 4 + [False]


def spelt(*rows: tuple[str, int]) -> list[str]:
    return [name for name, count in rows for _ in range(count)]


ALIKE = "seem to mean the same"
LABELS: dict[str, tuple[list[str], str | None]] = {
    "a point": (spelt(("<=50K", 100), (">50K", 100), (">50K.", 50), ("<=50K.", 50)), ALIKE),
    "no.": (spelt(("no", 200), ("no.", 50), ("yes", 50)), ALIKE),
    "underscore": (spelt(("not_churned", 100), ("not churned", 100), ("churned", 100)), ALIKE),
    "unseen": (spelt(("no", 200), ("yes", 50), ("yes\u200b", 50)), ALIKE),
    "a typing error": (spelt(("left", 200), ("stayed", 97), ("staied", 3)), "'staied' (3 rows)"),
    "exchanged": (spelt(("left", 200), ("stayed", 97), ("satyed", 3)), "'satyed' (3 rows) beside"),
    "one row": (spelt(("a", 150), ("b", 149), ("c", 1)), "'c' (1 row in all)"),
    "two rows": (spelt(("0", 150), ("1", 148), ("2", 2)), "'2' (2 rows in all)"),
    "one positive": (spelt(("0", 299), ("1", 1)), "'1' (1 row in all)"),
    "grades": (spelt(("A", 100), ("A-", 100), ("B+", 50), ("B", 50)), None),
    "stars": (spelt(("1 star", 100), ("2 stars", 100), ("3 stars", 100)), None),
    "signs": (spelt(("-1", 150), ("1", 150)), None),
    "parts": (spelt(("1.5", 100), ("15", 100), ("2", 100)), None),
    "active": (spelt(("active", 290), ("inactive", 10)), None),
}  # fmt: skip


@pytest.mark.parametrize("what", LABELS)
def test_labels_that_are_probably_mistakes_are_a_question(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, message = LABELS[what]
    path = write(tmp_path, y=found)
    words = ["active", path, "--folder", tmp_path, "--label-column", "y"]
    assert command(*words) == (0 if message is None else 2)
    if message is not None:
        said = capsys.readouterr().err
        assert message in said
        assert "--as-written" in said
        assert command(*words, "--as-written") == 0
    read(tmp_path, "active")


def test_a_label_with_text_beside_its_numbers_is_read_as_it_says(tmp_path: Path) -> None:
    stars = write(tmp_path, y=each("{} stars", [x % 3 for x in WHOLE]))
    assert command("active", stars, "--folder", tmp_path, "--label-column", "y") == 0
    data = yaml.safe_load((tmp_path / "active.yaml").read_text())["data"]
    assert data["classes"] == ["0 stars", "1 stars", "2 stars"]
    weights = write(tmp_path, y=each("{} kg"))
    assert command("active", weights, "--folder", tmp_path, "--label-column", "y", "--force") == 0
    found = read(tmp_path, "active").table.labels
    assert found is not None
    assert np.allclose(found * 500, WHOLE, atol=1e-3)


def test_a_column_that_tells_any_class_from_the_others_is_left_out(tmp_path: Path) -> None:
    y = np.array(spelt(("a", 150), ("b", 100), ("c", 49), ("d", 1)))
    good = [*PARTS[:-1], 1000.0]  # highest in the one row of the rarest class
    columns = {
        "good": good,
        "flag": (y == "b").astype(int),
        "code": [{"a": "u", "b": "v", "c": "w", "d": "w"}[one] for one in y],
        "high": [WHOLE[row] + 1000 * (one == "c") for row, one in enumerate(y)],
    }
    path = write(tmp_path, y=y, **columns)
    words = ["--label-column", "y", "--as-written"]
    assert command("active", path, "--folder", tmp_path, *words) == 0
    features = yaml.safe_load((tmp_path / "active.yaml").read_text())["data"]["features"]
    assert set(features["numeric"]) == {"part", "good"}
    assert "categorical" not in features


@pytest.mark.parametrize(("row", "name"), [(0, "first"), (ROWS - 1, "last")])
def test_a_row_of_sums_is_a_question(
    tmp_path: Path, row: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"x": np.array(WHOLE), "z": np.array(SMALL)}
    path = write(tmp_path, **columns)
    assert command("passive", path, "--folder", tmp_path) == 0
    for cells in columns.values():
        cells[row] = np.delete(cells, row).sum()
    path = write(tmp_path, **columns)
    assert command("passive", path, "--folder", tmp_path, "--force") == 2
    assert f"the {name} row seems to be a total: in x, z, it is" in capsys.readouterr().err
    assert command("passive", path, "--folder", tmp_path, "--force", "--as-written") == 0


GUIDS = [str(uuid.UUID(int=7**40 + row)) for row in range(ROWS)]
FORMS: dict[str, tuple[list[str], str | None]] = {
    "braces": ([f"{{{one}}}" for one in GUIDS], f"{ROWS} ids stand in braces"),
    "capitals": ([one.upper() for one in GUIDS], f"{ROWS} ids are hexadecimal digits in capitals"),
    "hashes": (
        [one.replace("-", "") * (1 + row % 2) for row, one in enumerate(GUIDS)],
        "150 of 32 (MD5) and 150 of 64 (SHA-256)",
    ),
    **{
        f"U+{ord(one):04X}": ([IDS[0] + one, *IDS[1:]], "1 ids hold a character that cannot be")
        for one in "\u200b\ufeff\u2060\u00ad\u202e"
    },
    "GUIDs": (GUIDS, None),
    "names": (IDS, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_ids_that_the_other_party_may_not_write_are_said(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, message = FORMS[form]
    path = write(tmp_path, id=ids)
    assert command("passive", path, "--folder", tmp_path, "--id-column", "id") == 0
    said = [one for one in capsys.readouterr().out.splitlines() if one.startswith("warning")]
    assert len(said) == (message is not None)
    assert message is None or message in said[0]
    assert (message or "") in str(read(tmp_path).table.id_doubts)


def test_mixed_objects_are_refused_with_their_rows(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    mixed = pandas.Series([1, 2, "x", None, float("nan")] * 60, dtype=object)
    labels = {"id": IDS, "label": [0, 1] * 150}
    good = {"id": IDS, "part": PARTS}
    for owners in (
        {"a": good, "b": pandas.DataFrame({"id": IDS, "x": mixed})},
        {"b": good | {"x": [*mixed]}},
    ):
        with pytest.raises(
            SettingsError, match=r"^b: .*column 'x': .*numbers in most.*rows 3, 8, "
        ):
            write_settings(tmp_path / "s", labels, owners, label="label", key="id")
