"""Ids in forms that the other party probably does not write are pointed out, and never shown."""

import logging
from pathlib import Path

import pytest

from splitveil.common.data import canonical_form, sources
from splitveil.common.data.canonical_form import IdForms, form_of
from splitveil.common.data.settings import DataSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.run.messages import IdForm
from splitveil.common.settings import validate

FORMS = {
    "plain numbers": (["8417", "93", "120001"], []),
    "all padded to one width": (["000093", "084170", "120001"], []),
    "a single zero": (["0", "93", "120001"], []),
    "too few to count the rows": ([str(number) for number in range(1, 10)], []),
    "backwards": ([str(number) for number in range(60, 0, -1)], []),
    "but one": ([*map(str, range(1, 50)), "70"], []),
    "not from the first": ([str(number) for number in range(2, 60)], []),
    "words": (["c0093", "c84", "07-11", "v1.0"], []),
    "decimals": (["93.0", "84170.", "5.5", "x"], ["2 ids are whole numbers"]),
    "shortened": (["1.2E+15", "8417e+5", "12e5", "x"], ["2 ids are written like 1.2e+15"]),
    "protected": (['="0093"', "'0084", "x'"], ['2 ids are written like ="007" or \'007']),
    "no ids": (["None", "k.A.", "nullify", "c1"], ["2 ids are texts such as NULL, which mean"]),
    "padded and not": (["0093", "93", "120001"], ["1 ids of digits begin with 0", "2 to 6 digits"]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [1, 3])
def test_doubtful_forms_are_counted(form: str, parts: int) -> None:
    ids, expected = FORMS[form]
    forms = IdForms()
    for part in range(parts):
        forms.add(ids[part::parts])
    doubts = list(forms.doubts())
    assert len(doubts) == bool(expected)
    for text in expected:
        assert text in doubts[0]
    assert not any(name in doubt for doubt in doubts for name in ids if len(name) > 3)


@pytest.mark.parametrize("cache", [{}, {"cache_dir": "cache"}])
def test_they_are_said_whenever_a_table_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cache: dict[str, str],
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 64)
    rows = [f"{number}.0,1" for number in range(70_000, 70_050)]
    (tmp_path / "x.csv").write_text("\n".join(["id,x", *rows]) + "\n")
    values = {
        "source": {"kind": "csv", "path": "x.csv", **cache},
        "id_column": "id",
        "features": {"numeric": "x"},
    }
    for _ in range(2):  # the second time, from the copy if there is one
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            PartyData.load(validate(DataSettings, values, "data"), tmp_path)
        (said,) = caplog.messages
        assert "x.csv: column 'id': 50 ids are whole numbers written with a decimal point" in said
        assert "700" not in said


@pytest.mark.parametrize(
    ("ids", "form"),
    [
        (["7", "12", "-3"], IdForm("0", "-")),
        (["0"], IdForm("0", length=1)),
        (["7", "007"], IdForm("0", leading_zeros=True)),
        (["7", "7.0"], IdForm("0", length=1, decimal_point=True)),
        (["c7", "1.5e+3"], IdForm("0a", "+.", shortened=True)),
        (["7", "c7"], IdForm("0", "a")),
        (["C7", "Äb 9~"], IdForm("0A", " a~")),
        (["."], IdForm(".")),
        (['="007"'], IdForm('"0=', length=3, leading_zeros=True)),
        (["00ff-" * 4], IdForm("-0a", length=16, hexadecimal=True)),
    ],
)
def test_what_many_ids_share_is_their_form(ids: list[str], form: IdForm) -> None:
    assert form_of(ids * 10) == form


def test_fewer_than_ten_ids_and_one_in_a_hundred_change_no_form() -> None:
    assert form_of([f"K{number}" for number in range(9)]) is None
    for number, others in ((9, 90), (19, 1900)):
        ids = [*map(str, range(1_000, 1_000 + others)), *(f"x-{n:030}" for n in range(number))]
        assert form_of(ids) == IdForm("0", length=4)


@pytest.mark.parametrize("first", [0, 1])
def test_ids_that_count_the_rows_are_pointed_out_in_parts_as_well(first: int) -> None:
    ids = [str(number) for number in range(first, 60)]
    forms = IdForms()
    for start in (0, 7, 50):
        forms.add(ids[start : {0: 7, 7: 50, 50: 60}[start]])
    (doubt,) = forms.doubts()
    assert doubt.startswith("the ids are the numbers of the rows: ")


def test_of_a_large_table_some_ids_decide_about_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical_form, "LOOKED_AT", 10)
    assert form_of([f"{number}.0" for number in range(95)]) == IdForm(
        "0", length=2, decimal_point=True
    )
