"""Ids that another party may write in another form are found out before anything is sent."""

import logging
from pathlib import Path

import pytest

from splitveil.common.data import id_forms
from splitveil.common.data.id_forms import doubts_about, form_of
from splitveil.common.data.settings import DataSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.run.messages import IdForm
from splitveil.common.settings import validate


@pytest.mark.parametrize(
    ("ids", "form"),
    [
        (["7", "12", "-3"], IdForm.WHOLE),
        (["7", "007"], IdForm.LEADING_ZEROS),
        (["0"], IdForm.WHOLE),
        (["7", "7.0"], IdForm.DECIMAL_POINT),
        (["007", "1.5e3"], IdForm.DECIMAL_POINT),
        (["7", "c7"], IdForm.TEXT),
        (["."], IdForm.TEXT),
        (["7.0.0"], IdForm.TEXT),
        (["٧"], IdForm.WHOLE),  # a digit, if not one of ours
    ],
)
def test_the_form_is_that_of_the_least_number_like_id(ids: list[str], form: IdForm) -> None:
    assert form_of(ids) is form


@pytest.mark.parametrize(
    ("ids", "doubt"),
    [
        (["7.0", "12.0"], "2 ids have a decimal point, as in 7.0: "),
        (["7.0", "12"], "1 ids have a decimal point, as in 7.0: "),
        (["007", "012"], "2 ids have leading zeros (all are equally long), as in 007: "),
        (["007", "12"], "1 ids have leading zeros, as in 007: "),
        (["7", "007", "8"], "1 ids are equal to another one as numbers, but not as texts"),
        (["7", "7.0", "8"], "1 ids are equal to another one as numbers, but not as texts"),
        ([str(n) for n in range(1, 30)], "the ids are the numbers of the rows: "),
        ([str(n) for n in range(30)], "the ids are the numbers of the rows: "),
    ],
)
def test_a_doubt_is_said_without_any_id_of_the_table(ids: list[str], doubt: str) -> None:
    told = doubts_about(ids, "clients.csv: column 'id'")
    assert any(line.startswith(f"clients.csv: column 'id': {doubt}") for line in told), told


@pytest.mark.parametrize(
    "ids",
    [
        ["c1", "c2"],
        ["7", "12", "5"],
        ["1.2.3", "4.5.6"],
        ["a.0", "7.0"],
        ["007a", "008"],
        [str(n) for n in range(1, 10)],  # too few to be no coincidence
        [str(n) for n in range(30, 0, -1)],
    ],
)
def test_ids_without_a_doubt_say_nothing(ids: list[str]) -> None:
    assert doubts_about(ids, "x") == []


def test_of_a_large_table_some_ids_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_forms, "LOOKED_AT", 10)
    (told,) = doubts_about([f"{n}.0" for n in range(95)], "x")
    assert told.startswith("x: 10 ids of 10 that were looked at have a decimal point")


def test_doubts_are_in_the_log_of_every_command_that_reads_the_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.csv").write_text("id,x\n7.0,1\n8.0,2\n")
    values = {
        "source": {"kind": "csv", "path": "t.csv"},
        "id_column": "id",
        "features": {"numeric": "x"},
    }
    with caplog.at_level(logging.WARNING):
        PartyData.load(validate(DataSettings, values, "data"), tmp_path)
        cached = values | {"source": {"kind": "csv", "path": "t.csv", "cache_dir": "cache"}}
        PartyData.load(validate(DataSettings, cached, "data"), tmp_path)
    assert caplog.text.count("column 'id': 2 ids have a decimal point") == 2
