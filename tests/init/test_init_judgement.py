"""``splitveil init`` judges columns as a run reads them, and takes none for another in silence."""

import datetime
import decimal
import json
import logging
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pytest
import yaml
from pyarrow import parquet

from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table_files import source_of
from splitveil.common.data.timestamps import time_formats
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.run.id_rules import TextId
from splitveil.common.settings import validate
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.columns import GAPS, codes_for_gaps, describe
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Proposal, Terms
from tests.init.test_init import command

ROWS = 60
NUMBERS = [str(37 * row % 601) for row in range(ROWS)]
SIDES = ["n", "s"] * 30
IDS = [f"K{100_000 + row}" for row in range(ROWS)]


def write(folder: Path, columns: dict[str, Any], ending: str = "csv") -> Path:
    path = folder / f"t.{ending}"
    table = pa.table({"id": IDS} | columns)
    (arrow_csv.write_csv if ending == "csv" else parquet.write_table)(table, path)
    return path


def propose(path: Path, wishes: Wishes | None = None, role: Any = "passive") -> Proposal:
    terms = Terms(role, path.parent)
    return initialise(path, wishes or Wishes(), terms, force=True).proposal


def check(folder: Path, role: str = "passive", rules: Sequence[Any] = (TextId(),)) -> PartyData:
    """Read the table as a check and a run do, by the settings that were written."""
    written = yaml.safe_load((folder / f"{role}.yaml").read_text())
    return PartyData.load(validate(DataSettings, written["data"], "data"), folder, None, rules)


def edited(cells: Sequence[str], **others: str) -> list[str]:
    """Replace cells; ``r6`` is the sixth."""
    found = list(cells)
    for row, text in others.items():
        found[int(row[1:]) - 1] = text
    return found


TIMES = [f"2024-03-{1 + row % 28:02d} 10:00:00" for row in range(ROWS)]
GERMAN = [f"{row},{row % 90 + 10}" for row in range(ROWS)]
POINTS = [f"{row}.5" for row in range(ROWS)]
THREES = [f"{row},300" for row in range(1, ROWS + 1)]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (edited(NUMBERS, r6="12O"), "59 of 60 cells are numbers; row 6 is not: --missing-text"),
        (edited(NUMBERS, r6="x", r9="y"), "58 of 60 cells are numbers; rows 6, 9 (2 in all) are"),
        (["0"] * 50 + edited(NUMBERS, r1="n/k")[:10], "59 of 60 cells are numbers; row 51 is not"),
        (edited(NUMBERS, r6="1e400"), "59 of 60 cells are numbers; row 6 is not"),
        (THREES, "60 of 60 cells are numbers with commas or marks between thousands: --decimal ."),
        (edited(TIMES, r7="2024-02-30"), "59 of 60 cells are dates or times; row 7 is not"),
    ],
)
def test_what_is_almost_of_one_kind_is_a_question(
    tmp_path: Path, cells: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {"calls": cells, "region": ["NESW"[row % 4] for row in range(ROWS)]})
    for options in ([], ["--numeric", "calls"]):
        assert command("passive", path, "--folder", tmp_path, *options) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "--categorical calls, or --exclude calls" in said
    assert propose(path, Wishes(categorical=("calls",))).choices.categorical[0].name == "calls"
    check(tmp_path)
    assert message.partition(":")[0] in (tmp_path / "passive.yaml").read_text()
    assert not propose(path, Wishes(exclude=("calls",))).choices.numeric


@pytest.mark.parametrize(
    ("cells", "others", "options", "decimal", "first"),
    [
        (["0,5", *GERMAN[1:]], SIDES, [], ",", 0.5),
        (["1.234,5", *GERMAN[1:]], SIDES, [], ",", 1234.5),
        (["1.234", *NUMBERS[1:]], GERMAN, [], ",", 1234),
        (["1 234 567", *NUMBERS[1:]], GERMAN, [], ",", 1234567),
        (["1,234.5", *NUMBERS[1:]], SIDES, [], ".", 1234.5),
        (["1,234,567", *NUMBERS[1:]], SIDES, [], ".", 1234567),
        (["1'234", *NUMBERS[1:]], SIDES, [], ".", 1234),
        (["1\u202f234", *NUMBERS[1:]], POINTS, [], ".", 1234),
        (THREES, POINTS, [], ".", 1300),
        (THREES, GERMAN, [], ",", 1.3),
        (THREES, SIDES, ["--decimal", "."], ".", 1300),
        (THREES, SIDES, ["--decimal", ","], ",", 1.3),
        (["1.234", *POINTS[1:]], SIDES, [], None, 1.234),
    ],
)
def test_numbers_are_read_as_their_country_writes_them(
    tmp_path: Path,
    cells: list[str],
    others: list[str],
    options: list[str],
    decimal: str | None,
    first: float,
) -> None:
    path = write(tmp_path, {"calls": cells, "x": others})
    assert command("passive", path, "--folder", tmp_path, *options) == 0
    table = check(tmp_path).table
    assert table.numeric["calls"][0] == first
    assert ("x" in table.numeric) == (others is not SIDES)
    written = yaml.safe_load((tmp_path / "passive.yaml").read_text())
    assert written["data"]["source"].get("decimal") == decimal
    data = validate(DataSettings, written["data"], "data")
    again = data.model_copy(update={"source": source_of(path, data.source)})
    assert PartyData.load(again, tmp_path).table.numeric["calls"][0] == first


CODE = {"r6": "k/A", "r9": "k/A"}
DAYS = [f"{1 + row % 28}.{1 + row % 12:02}.2024" for row in range(ROWS)]


@pytest.mark.parametrize(
    ("columns", "options", "gaps"),
    [
        ({"x": edited(NUMBERS, **CODE)}, [], ["x"]),
        ({"x": edited(DAYS, **CODE)}, [], ["x.month"]),
        ({"x": edited(NUMBERS, **CODE), "y": edited(POINTS, r9="k/A")}, [], ["x"]),
        ({"x": edited(NUMBERS, r6="k/A")}, None, []),
        ({"x": edited(NUMBERS, r6="1x", r9="1x")}, None, []),
        ({"x": edited(NUMBERS, r6="inf", r9="inf")}, None, []),
        ({"x": edited(NUMBERS, r6="n", r9="n"), "y": SIDES}, None, []),
    ],
)
def test_what_stands_for_a_gap_again_and_again_is_one(
    tmp_path: Path,
    columns: dict[str, list[str]],
    options: list[str] | None,
    gaps: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, columns)
    ended = command("passive", path, "--folder", tmp_path, *(options or []))
    assert ended == (2 if options is None else 0)
    assert ("gaps         'k/A': no value, " in capsys.readouterr().out) == (options is not None)
    for name in gaps:
        numbers = check(tmp_path).table.numeric[name]
        assert np.flatnonzero(np.isnan(numbers)).tolist() == [5, 8]


@pytest.mark.parametrize(
    ("form", "others", "found"),
    [
        ("%d.%m.%Y", [], "%d.%m.%Y"),
        ("%d.%m.%y %H:%M", [], "%d.%m.%y %H:%M"),
        ("%m/%d/%Y", [], "%m/%d/%Y"),
        ("%d-%b-%Y", [], "%d-%b-%Y"),
        ("%Y%m%d", [], "%Y%m%d"),
        ("%d/%m/%Y", ["1/2/2024"] * 30 + ["3/2/2024"] * 30, "%d/%m/%Y"),
        ("%d.%m.%Y", TIMES, None),
        ("%d.%m.%Y", [f"{1 + row % 28}/{1 + row % 12}/2024" for row in range(ROWS)], "%d.%m.%Y"),
        ("%m/%m/2024", [], None),
    ],
)
def test_dates_are_read_in_their_form(
    tmp_path: Path, form: str, others: list[str], found: str | None
) -> None:
    start = datetime.date(2024, 1, 1)
    days = [(start + datetime.timedelta(5 * row)).strftime(form) for row in range(ROWS)]
    path = write(tmp_path, {"x": days, "y": NUMBERS} | ({"z": others} if others else {}))
    choices = propose(path).choices
    assert choices.time_format == found
    left_out = dict(choices.left_out)
    assert ("x" in left_out) == (found is None)
    assert all("see timestamp_format" in why for why in left_out.values())
    if found:
        months = check(tmp_path).table.numeric["x.month"]
        assert months[:8].tolist() == [1] * 7 + [2]


def test_a_code_for_gaps_that_any_other_column_holds_is_none() -> None:
    towns = [f"town {row}" for row in range(ROWS - 1)]
    amounts = pa.array(edited(NUMBERS, r6="M", r9="M"))
    for last, codes in (("M", ()), ("N", ("M",))):
        cells = {"amount": amounts, "town": pa.array([*towns, last])}
        columns = [describe(name, pa.chunked_array([column]), ()) for name, column in cells.items()]
        assert codes_for_gaps(columns, cells) == codes


def test_versions_are_no_dates() -> None:
    assert list(time_formats(pa.array(["1.2.3", "4.4.2", "7.1.1"]))) == [None]


def test_other_cells_are_gaps_where_an_option_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, {"calls": edited(NUMBERS, r6="12O", r9="-1x"), "x": range(ROWS)})
    texts = ["--missing-text=-1x", "--missing-text", "12O"]
    assert command("passive", path, "--folder", tmp_path, *texts) == 0
    calls = check(tmp_path).table.numeric["calls"]
    assert np.flatnonzero(np.isnan(calls)).tolist() == [5, 8]
    assert calls[0] == float(NUMBERS[0])


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_a_check_warns_of_categories_that_are_almost_numbers(
    tmp_path: Path, cache: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {"calls": edited(NUMBERS, r6="12O"), "code": NUMBERS, "region": SIDES})
    source = {"kind": "csv", "path": "t.csv", **cache}
    features = {"categorical": ["calls", "code", "region"]}
    plain = {"source": source, "id_column": "id", "features": features}
    with caplog.at_level(logging.WARNING):
        PartyData.load(validate(DataSettings, plain, "data"), tmp_path)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "column 'calls': each text is a category, but 59 of 60 cells are numbers, " in said
    assert "those in row 6 are not" in said
    assert "12O" not in said


def test_known_gaps_are_gaps_of_numbers_times_and_categories(tmp_path: Path) -> None:
    gaps = [gap for gap in GAPS if not gap.lower().startswith("n")][:24]
    rows = {f"r{row}": gap for row, gap in enumerate(gaps, start=1)}
    cells = {"calls": NUMBERS, "since": TIMES, "region": SIDES}
    found = propose(write(tmp_path, {n: edited(one, **rows) for n, one in cells.items()})).choices
    names = ("calls", "region", "since")
    assert [(c.name, c.missing) for c in found.features] == [(n, len(gaps)) for n in names]
    table = check(tmp_path).table
    for numbers in (table.numeric["calls"], table.numeric["since.year"]):
        assert np.flatnonzero(np.isnan(numbers)).tolist() == [*range(len(gaps))]
    assert (table.categorical["region"].codes[: len(gaps)] == -1).all()


def in_binary(texts: Sequence[str]) -> pa.Array:
    return pa.array([text.encode() for text in texts])


WHOLE = [*range(55), *[None] * 5]
UUIDS = [uuid.UUID(int=row) for row in range(ROWS)]


LOST = (
    "unusable_ids: leave_out  # {} rows without an id",
    "duplicate_ids: first  # {} rows with the",
)
FLOATS = pa.array([*map(float, range(ROWS - 1)), None])
BYTES = pa.array([uuid.UUID(int=2**127 + row).bytes for row in range(ROWS)], pa.binary(16))


@pytest.mark.parametrize(
    ("ids", "options", "lost", "first"),
    [
        (in_binary(IDS), [], (0, 0), "K100000"),
        (pa.array(map(decimal.Decimal, range(ROWS)), pa.decimal128(18, 0)), [], (0, 0), "0"),
        (pa.array([one.bytes for one in UUIDS], pa.uuid()), [], (0, 0), str(UUIDS[0])),
        (["NA", *IDS[1:]], [], (0, 0), "NA"),
        (pa.array(WHOLE, pa.int64()), [], (5, 0), "0"),
        ([*IDS[:57], *IDS[:3]], [], (0, 3), "K100000"),
        (["", *IDS[1:57], *IDS[1:3], " "], [], (2, 2), "K100001"),
        ([*IDS[:40], *IDS[:20]], ["left out: 20 rows with the id"], (0, 20), "K100000"),
        (FLOATS, ["1 row without an id, whole numbers with a decimal point"], (1, 0), "0"),
        ([f"{row}.0" for row in range(ROWS)], ["ids: {whole_numbers: true} if"], (0, 0), "0"),
        (
            pa.array(map(decimal.Decimal, range(ROWS)), pa.decimal128(18, 2)),
            ["ids: {whole_numbers: true} if"],
            (0, 0),
            "0",
        ),
    ],
)
def test_ids_that_a_run_reads_are_accepted(
    tmp_path: Path,
    ids: Any,
    options: list[str],
    lost: tuple[int, int],
    first: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those with a doubt only if they are named."""
    path = write(tmp_path, {"id": SIDES, "customer": ids, "y": [0, 1] * 30}, "parquet")
    for message in options:
        with pytest.raises(SettingsError, match=re.escape(message)):
            propose(path, Wishes(label_column="y"), "active")
    words = ["active", path, "--folder", tmp_path, "--label-column", "y"]
    assert command(*words, *["--id-column", "customer"] * len(options)) == 0
    said, written = capsys.readouterr().out, (tmp_path / "active.yaml").read_text()
    assert re.search(r"ids +customer\n", said)
    assert ("left out: " in said) == (sum(lost) > 0)
    for setting, count in zip(LOST, lost, strict=True):
        assert (setting.format(count) in written) == (count > 0)
    contract = yaml.safe_load((tmp_path / "contract.yaml").read_text())
    rules = contract.get("ids", {})
    assert rules.get("whole_numbers", False) == ("decimal point" in written)
    assert rules.get("fold_case", False) == (first[0] in "KN" or "-" in first)
    found = check(tmp_path, "active", [TextId(**rules)])
    expected = first.lower() if "fold_case" in rules else first
    assert (len(found.ids), found.ids[0]) == (ROWS - sum(lost), expected)


@pytest.mark.parametrize(
    ("ids", "folds"),
    [
        (IDS, True),
        ([one.lower() for one in IDS], True),
        ([*IDS[:30], *(one.lower() for one in IDS[30:])], True),
        ([*IDS[1:], IDS[1].lower()], False),
        ([f"aZ{one}" for one in IDS], False),
        (NUMBERS, False),
    ],
)
def test_a_contract_folds_the_case_of_ids_that_have_one(
    tmp_path: Path, ids: list[str], folds: bool
) -> None:
    path = write(tmp_path, {"id": ids, "y": [0, 1] * 30})
    propose(path, Wishes(label_column="y", id_column="id"), "active")
    contract = yaml.safe_load((tmp_path / "contract.yaml").read_text())
    assert contract.get("ids") == ({"fold_case": True} if folds else None)


FEW = [f"K{row // 3}" for row in range(ROWS)]
LONG = [*(str(1_200_000_000_000_000 + row) for row in range(ROWS - 4)), *["1.20E+15"] * 4]


@pytest.mark.parametrize(
    ("ids", "named", "message"),
    [
        (FEW, None, "in every row: none\\);"),
        (FEW, "id", "each once, found texts, 20 distinct"),
        (BYTES, None, r"id \(bytes that are no text: "),
        (BYTES, "id", "found neither texts nor"),
        (LONG, None, r"id \(left out: 3 rows .*, some are written like 1\.2E\+15"),
        ([*IDS[:50], *IDS[:10]], None, r"row: none; in many rows: id \(left out: 10 rows"),
    ],
)
def test_other_columns_are_no_ids(
    tmp_path: Path, ids: Any, named: str | None, message: str
) -> None:
    path = write(tmp_path, {"id": ids, "side": SIDES}, "parquet")
    with pytest.raises(SettingsError, match=message):
        propose(path, Wishes(id_column=named))


IDENTIFIERS: dict[str, list[Any]] = {
    "telephone or account": [f"+49 170 {1000 + row // 3}9" for row in range(ROWS)],
    "telephone or account numbers": [f"0170{1000 + row // 3}9" for row in range(ROWS)],
    "numbers of 12 digits": [491_700_000_000 + 37 * (row // 3) for row in range(ROWS)],
    "numbers of 16 digits": [
        float(4 * 10**15 + 7919 * row) if row % 9 else "" for row in range(ROWS)
    ],
    "IBANs": [f"DE{row // 3 + 10}37040044053201{1000 + row // 3}" for row in range(ROWS)],
    "UUIDs": [str(uuid.UUID(int=7**30 + row // 3)) for row in range(ROWS)],
    "hashes": [uuid.UUID(int=7**40 + row).hex for row in range(ROWS)],
    "e-mail addresses": [f"a.{row}@b.example" for row in range(ROWS)],
    "": [1_700_000_000 + 3600 * row for row in range(ROWS)],
    "8 digits": [10_000_000 + 37 * row for row in range(ROWS)],
    "a quantity": [10 ** (7 + row % 4) + row for row in range(ROWS)],
}


@pytest.mark.parametrize("what", IDENTIFIERS)
def test_identifiers_are_left_out_with_the_reason(tmp_path: Path, what: str) -> None:
    cells = [str(cell) for cell in IDENTIFIERS[what]]
    path = write(tmp_path, {"x": cells, "side": SIDES})
    left_out = dict(propose(path).choices.left_out)
    is_identifier = list(IDENTIFIERS).index(what) < list(IDENTIFIERS).index("")
    assert list(left_out) == ["x"] * is_identifier
    assert all(why.startswith(what) and ": they identify" in why for why in left_out.values())
    is_number = not is_identifier or "digits" in what
    named = Wishes(numeric=("x",)) if is_number else Wishes(categorical=("x",))
    assert not propose(path, named).choices.left_out


@pytest.mark.parametrize(
    ("index", "left_out"),
    [
        ("__index_level_0__", ["__index_level_0__"]),
        ("row", ["row"]),
        ("id", []),
        ({"kind": "range", "start": 0, "stop": ROWS, "step": 1}, []),
    ],
)
def test_an_index_of_pandas_is_no_feature(tmp_path: Path, index: Any, left_out: list[str]) -> None:
    columns = {"id": IDS, "calls": list(map(int, NUMBERS))} | dict.fromkeys(left_out, range(ROWS))
    noted = json.dumps({"index_columns": [index]})
    table = pa.table(columns).replace_schema_metadata({"pandas": noted})
    parquet.write_table(table, tmp_path / "t.parquet")
    choices = propose(tmp_path / "t.parquet").choices
    assert choices.id_column == "id"
    assert [column.name for column in choices.features] == ["calls"]
    assert [*choices.left_out] == left_out
    source = {"kind": "parquet", "path": "t.parquet"}
    plain = {"source": source, "id_column": "id", "features": {"numeric": "*"}}
    numeric = PartyData.load(validate(DataSettings, plain, "data"), tmp_path).table.numeric
    assert list(numeric) == (["calls", "row"] if left_out == ["row"] else ["calls"])


@pytest.mark.parametrize(
    "noted",
    [
        100_000 * "[",
        "\udcff",
        f'{{"index_columns": {5000 * "9"}}}',
        '{"columns": [{"name": ["calls"], "pandas_type": "categorical"}]}',
        '{"columns": ["calls", {"pandas_type": "categorical"}]}',
    ],
)
def test_damaged_notes_of_pandas_are_as_good_as_none(tmp_path: Path, noted: str) -> None:
    columns = {"id": IDS, "calls": list(map(int, NUMBERS))}
    metadata = {b"pandas": noted.encode("utf-8", "surrogateescape")}
    parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), tmp_path / "t.parquet")
    assert [column.name for column in propose(tmp_path / "t.parquet").choices.features] == ["calls"]


@pytest.mark.parametrize(
    ("wishes", "message"),
    [({"numeric": ("side",)}, "found text in rows 1, 2"), ({"categorical": ("x",)}, "not double")],
)
def test_nothing_is_written_that_a_run_refuses(
    tmp_path: Path, wishes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, {"side": SIDES, "x": pa.array([0.5, 1.5, 2] * 20)}, "parquet")
    with pytest.raises(DataError, match=message):
        propose(path, Wishes(**wishes))
    assert not (tmp_path / "passive.yaml").exists()


class Made(NamedTuple):
    """A column as it may be, and whether it is open how it is read."""

    cells: Any
    is_open: bool = False
    said: str = ""


def made_of_texts(made: np.random.Generator) -> dict[str, Made]:
    numbers = [f"{x:.3f}" for x in made.normal(size=ROWS)]
    whole = [str(x) for x in made.integers(-500, 500, ROWS)]
    row, gap = f"r{made.integers(1, ROWS + 1)}", str(made.choice(GAPS))
    seconds = made.integers(0, 10**9, ROWS).astype("datetime64[s]").tolist()
    iso = [one.isoformat(str(made.choice(["T", " "]))) for one in seconds]
    tail = str(made.choice(["", ".5", ".000000000", ".1234567", "Z", "+01:00", "+0100", "+01"]))
    day = [one[:10] for one in iso]
    wrong = str(made.choice(["12O", "x", "inf", "-Infinity", "1e400", "9e99", "1.2.3"]))
    sure = [
        *(numbers, whole, SIDES, day, [one + tail for one in iso], [one[:13] for one in iso]),
        *(["x"] * ROWS, [gap] * ROWS, [f"note {x}" for x in whole], [f"+{x}" for x in day]),
        *([f"1{x}e-3" for x in range(ROWS)], ["31.1.2024", *["1.12.2024"] * (ROWS - 1)]),
        made.choice(["true", "false"], ROWS).tolist(),
        made.choice(["train", "test", "validation"], ROWS).tolist(),
    ]
    form = str(made.choice(["{}+", "<{}", "{}*", "({})", "{} kg"]))
    asked = [
        *(edited(numbers, **{row: wrong}), edited(whole, **{row: wrong})),
        *(edited(day, **{row: "2024-02-30"}), edited(iso, **{row: "2024-01-01T25:00"})),
        [form.format(x) if i % 4 == 0 else x for i, x in enumerate(whole)],
    ]
    unit = str(made.choice(["%", "kg", "+", "*", "\u20ac", "US$", "~", "k", "cm\u00b2", "EUR "]))
    is_first = unit[0] in "U~E\u20ac"
    beside = [f"{unit}{x}" if is_first else f"{x}{' ' * (len(unit) > 1)}{unit}" for x in whole]
    zero = int(made.choice([0xFF10, 0x660, 0x966]))
    foreign = [x.translate({48 + i: zero + i for i in range(10)}) for x in whole]
    said = {
        "units": Made(beside, said=f"read without {unit.strip()!r} beside them; --categorical"),
        "digits": Made(foreign),
        "bands": Made(
            [f"{row % 5}0-{row % 5}9" for row in range(ROWS)], said="begin with a number"
        ),
        "sizes": Made([f"{2 ** (6 - row % 11 % 6)}" for row in range(ROWS)], said="may be codes"),
        "postcodes": Made([f"{7919 * (row % 9):05}" for row in range(ROWS)]),
    }
    found = {f"sure {i}": Made(cells) for i, cells in enumerate(sure)}
    found |= {f"gaps {i}": Made(edited(cells, **{row: gap})) for i, cells in enumerate(sure)}
    found |= said
    return found | {f"open {i}": Made(cells, is_open=True) for i, cells in enumerate(asked)}


def made_of_types(made: np.random.Generator) -> dict[str, Made]:
    x, whole = made.normal(size=ROWS).round(3), made.integers(0, 1000, ROWS)
    is_gap = made.random(ROWS) < made.choice([0.0, 0.1])
    infinite = np.where(np.arange(ROWS) == made.integers(ROWS), np.inf, x)
    columns = [
        *(pa.array(x, mask=is_gap), pa.array(x.astype(np.float32)), pa.array(whole, mask=is_gap)),
        *(pa.array(whole).cast(pa.decimal128(19, 0)), pa.array(x).cast(pa.decimal128(20, 3))),
        *(pa.array(np.where(is_gap, np.nan, x)), pa.array(x > 0, mask=is_gap), pa.nulls(ROWS)),
        *(pa.array(whole.astype(np.int32)).cast(pa.date32()), pa.array(whole % 7).cast(pa.int8())),
        *(pa.array(whole).cast(pa.timestamp("ns", "Europe/Rome")), pa.array(SIDES, pa.binary(1))),
        *(pa.array(whole).cast(pa.time64("us")), pa.array(whole).cast(pa.duration("s"))),
        *(in_binary([str(one % 3) for one in whole]), in_binary(SIDES), pa.array([[1]] * ROWS)),
        *(in_binary([str(one) for one in whole]), pa.array([b"12", b"34"] * 30, pa.binary(2))),
        *(pa.array(SIDES).dictionary_encode(), pa.array(UUIDS, pa.uuid())),
        *(pa.array([b"\xff", b"n"] * 30), pa.array(whole % 7).dictionary_encode()),
        pa.array([str(one % 5) for one in whole]).dictionary_encode(),
    ]
    found = {f"type {i}": Made(cells) for i, cells in enumerate(columns)}
    for name, cells in (("inf", infinite), ("f", infinite.astype(np.float32)), ("big", x * 1e300)):
        found[f"open {name}"] = Made(pa.array(cells), is_open=True)
    return found


def ids_of(made: np.random.Generator, ending: str) -> Any:
    if made.random() < 0.3:
        return [*IDS[:-4], "", *IDS[:3]]
    numbers = made.permutation(ROWS)
    kinds = [pa.array(IDS), pa.array(numbers), pa.array([f"{x}.0" for x in numbers])]
    if ending == "parquet":
        kinds += [pa.array(numbers.astype(float)), in_binary(IDS), pa.array(UUIDS, pa.uuid())]
    return kinds[made.integers(len(kinds))]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    "tables",
    [25, pytest.param(250, marks=pytest.mark.slow)],  # with both endings, 500 tables
)
def test_a_check_accepts_what_is_written_for_any_table(
    tmp_path: Path, ending: str, tables: int
) -> None:
    """What is open is asked about, and nothing else; what may be meant otherwise is said."""
    made = np.random.default_rng(8)
    for _ in range(tables):
        kinds = made_of_texts(made) | (made_of_types(made) if ending == "parquet" else {})
        names = made.permutation(list(kinds))[: made.integers(2, 9)].tolist()
        ids = ids_of(made, ending)
        cells = {name: kinds[name].cells for name in names}
        path = write(tmp_path, {"id": ids, "sure": NUMBERS, **cells}, ending)
        wishes = Wishes(id_column="id")
        if asked := [name for name in names if kinds[name].is_open]:
            with pytest.raises(SettingsError) as refused:
                propose(path, wishes)
            named = re.findall(r"^column '([^']*)'", str(refused.value), re.MULTILINE)
            assert sorted(named) == sorted(asked)
            wishes = wishes._replace(exclude=tuple(asked))
        found = propose(path, wishes)
        table = check(tmp_path, rules=[found.ids.rule]).table
        assert [*table.categorical] == [column.name for column in found.choices.categorical]
        for name in set(names) - set(asked):
            lines = [one for one in found.choices.decided if name in one.partition(": ")[0]]
            assert bool(lines) == bool(kinds[name].said)
            assert not lines or kinds[name].said in lines[0]
