"""What looks like a gap, a quotation mark or a second label is read as the table means it."""

from pathlib import Path

import numpy as np
import pytest

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.table import read_table
from splitveil.common.errors import DataError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from tests.init.test_init import command


def test_texts_that_look_like_gaps_are_values_where_an_option_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In categories and in labels, beside a column of numbers in which they are gaps."""
    lines = ["id,country,fee,outcome"]
    for row in range(60):
        country, fee = ("NA", "DE", "ZA")[row % 3], "NA" if row % 9 == 0 else row
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
    wrong = settings.model_copy(
        update={
            "features": settings.features.model_copy(update={"missing_texts_of": {"cuntry": ()}})
        }
    )
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
