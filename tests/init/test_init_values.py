"""What looks like a gap, a quotation mark or a second label is read as the table means it."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.csv_file import CsvFile, TextForm, form_of
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import read_table
from splitveil.common.errors import DataError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.settings import validate
from tests.init.test_init import command


def test_texts_that_look_like_gaps_are_values_where_an_option_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In categories and in labels, beside a column of numbers in which they are gaps."""
    lines = ["id,country,fee,outcome"]
    for row in range(60):
        country, fee = ("NA", "DE", "ZA")[row % 3], "NA" if row % 9 == 0 else row * row % 17
        lines.append(f"c{row},{country},{fee},{'-+'[row % 2]}")
    path = tmp_path / "t.csv"
    path.write_text("\n".join([*lines, ""]))
    arguments = ["active", path, "--folder", tmp_path, "--force", "--label-column", "outcome"]
    arguments += ["--no-gaps", "outcome"]
    assert command(*arguments) == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if "--no-gaps" in line)
    assert said.endswith(
        "country ('NA'): no value; with --no-gaps NAME, every text of a column is a value"
    )
    assert command(*arguments, "country") == 0
    assert "--no-gaps" not in capsys.readouterr().out
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml").data
    table = read_table(settings, tmp_path)
    assert table.categorical["country"].categories.to_pylist() == ["NA", "DE", "ZA"]
    assert np.isnan(table.numeric["fee"]).sum() == 7
    assert table.labels is not None
    assert table.labels.sum() == 30
    assert settings.features is not None
    mistyped = settings.features.model_copy(update={"missing_texts_of": {"cuntry": ()}})
    wrong = settings.model_copy(update={"features": mistyped})
    with pytest.raises(DataError, match="no column 'cuntry'; did you mean 'country'"):
        read_table(wrong, tmp_path)


def test_two_labels_of_one_id_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"c{row},{row % 2},{row / 7}" for row in range(60)]
    lines += ["c1,0,0.5", "c2,0,0.5", "c4,1,0.1"]
    (tmp_path / "t.csv").write_text("\n".join(["id,y,x", *lines, ""]))
    assert command("active", tmp_path / "t.csv", "--folder", tmp_path) == 0
    what = "have another label than the earlier row, whose label counts"
    assert f"2 of the rows with the id of an earlier row {what}" in capsys.readouterr().out
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    for cache in ({}, {"cache_dir": str(tmp_path / "cache")}):
        source = settings.data.source.model_copy(update=cache)
        own = settings.data.model_copy(update={"source": source})
        caplog.clear()
        found = PartyData.of(settings.model_copy(update={"data": own}))
        said = f"3 of 63 rows left out: 3 with the id of an earlier row; 2 of these {what}"
        assert said in caplog.text
        assert found.table.id_report.contradicting == 2


ROWS = range(60)
SPARK = [f'c{row},{row % 2},"say \\"no, {row % 7}\\"",DOM\\user{row % 3}' for row in ROWS]
MYSQL = [f'c{row}\t{row % 2}\tsay "no\\\t {row % 7}"\tDOM\\\\user{row % 3}' for row in ROWS]
QUOTED = [f"'c{row}','{row % 2}','say \"no, {row % 7}\"','DOM\\user{row % 3}'" for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "between", "settings", "said"),
    [
        (SPARK, ",", {"escape": "\\"}, "\\ stands before marks within cells"),
        (MYSQL, "\t", {"escape": "\\", "quote": ""}, ""),
        (QUOTED, ",", {"quote": "'"}, "' stands around cells: see data.source.quote"),
    ],
)
def test_marks_that_other_programs_write_are_no_part_of_cells(
    tmp_path: Path,
    rows: list[str],
    between: str,
    settings: dict[str, str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "t.txt"
    path.write_text("\n".join([between.join(["id", "y", "note", "user"]), *rows, ""]))
    source = {"kind": "csv", "path": "t.txt", "delimiter": between}
    features = {"categorical": ["note", "user"]}
    own = {"id_column": "id", "label_column": "y", "features": features}
    by_hand = validate(DataSettings, {"source": source | settings, **own}, "data")
    found = [by_hand]
    if said:
        assert command("active", path, "--folder", tmp_path) == 0
        assert said in capsys.readouterr().out
        found.append(load_party_settings(ActiveSettings, tmp_path / "active.yaml").data)
    for one in found:
        data = PartyData.load(one, tmp_path)
        assert list(data.ids) == [f"c{row}" for row in ROWS]
        texts = {n: {*c.categories.to_pylist()} for n, c in data.table.categorical.items()}
        gap = "\t" if between == "\t" else ","
        assert texts["note"] == {f'say "no{gap} {i}"' for i in range(7)}
        assert texts["user"] == {f"DOM\\user{i}" for i in range(3)}
    assert not caplog.records
    if said:  # a run says what its settings leave open
        plain = validate(DataSettings, {"source": source, **own}, "data")
        with suppress(DataError):
            PartyData.load(plain, tmp_path)
            assert "data.source." + next(iter(settings)) in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        'id,x\nc1,"C:\\"\nc2,"a \\""b"\n',  # backslashes of cells
        "id,x\nc1,'t Hart\nc2,O'Neill\nc3,'s\n",
        "id,x\nc1,5'\nc2,6'\nc3,7'\n",
    ],
)
def test_marks_of_the_cells_are_left_to_them(text: str) -> None:
    assert form_of(text, ",") == TextForm()


def test_a_backslash_before_other_characters_belongs_to_the_cell(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('id,x\na,\\N\nb,c:\\d\nc,\\\\\nd,"\\"\\""\ne,f\\')
    for block in (1024, 8):
        file = CsvFile(tmp_path / "t.csv", ",", None, TextForm(escape="\\")).in_blocks_of(block)
        assert file.read(["x"])["x"].to_pylist() == ["\\N", "c:\\d", "\\", '""', "f\\"]
