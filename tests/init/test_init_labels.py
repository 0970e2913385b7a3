"""Labels as people write them: ``init``, ``check``, ``align`` and a run read the same ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from splitveil.active_party.commands import program as active_program
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import DataError
from splitveil.common.party.aligned_table import read_own_ids
from splitveil.common.party.party_data import PartyData, ServedRows, read_ids_alone
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.id_rules import AS_WRITTEN
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Terms
from tests.init.test_init import ROWS, clients, command
from tests.support.commands import exit_code_of

LEAVE_OUT = ("--unlabelled-rows", "leave_out")
YES = ("--positive-label", "yes")


def mixed(usual: str, rare: str, *others: str) -> list[str]:
    """Return labels of which two in eleven are rare, and one in eleven is each of the others."""
    return [[usual, rare, rare, *others][i % 11] if i % 11 < 3 + len(others) else usual
            for i in range(ROWS)]  # fmt: skip


NUMBERS: dict[str, float] = {"0": 0, "0.0": 0, "1": 1, "1.0": 1, "+1e0": 1}
WORDS: dict[str, float] = {"no": 0, "yes": 1, "YES": 1, "No": 0}
READ: dict[str, tuple[list[str], Sequence[str], dict[str, float], str]] = {
    "two exports": (mixed("0", "1", "0.0", "1.0", "+1e0"), (), NUMBERS, ""),
    "1 is 1.0": (mixed("0", "1", "1.0", "2"), ("--positive-label", "1"), NUMBERS | {"2": 0},
                 "WARNING: 2 other texts"),
    "three numbers": (mixed("0", "1", "1.0", "2"), (), NUMBERS | {"2": 2}, "3 classes"),
    "numbers that are names": (mixed("3", "1", "1.0", "2"), (), {"3": 2, "1": 0, "1.0": 0, "2": 1},
                               "3 classes"),
    "spellings": (mixed("no", "yes", "YES", "No"), (*YES, "--positive-label", "YES"), WORDS,
                  "('yes', 'YES'); WARNING: 2 other"),
    "minus one": (mixed("1.0", "-1.0"), (), {"1.0": 1, "-1.0": 0}, "81.7% of the labels are posi"),
    "ja": (mixed("ja", "nein"), (), {"ja": 1, "nein": 0}, "('ja'); 1 other text (110 rows)"),
    "true": (mixed("true", "false"), (), {"true": 1, "false": 0}, "('true')"),
    "rarer": (mixed("left", "right"), (), {"left": 0, "right": 1}, "guess: the rarer"),
    "one and two": (mixed("1", "2"), (), {"1": 0, "2": 1}, "guess: the rarer"),
    "a rare no": (mixed("yes", "no"), (), {"yes": 1, "no": 0}, "81.7% of the labels are positive"),
    "white space": (mixed("no", "yes", " yes"), (), {"no": 0, "yes": 1, " yes": 1}, "('yes'); 1"),
    "others": (mixed("no", "yes", "maybe"), YES, {"no": 0, "yes": 1, "maybe": 0},
               "WARNING: 2 other texts"),
    "empty": (mixed("0", "1", ""), LEAVE_OUT, {"0": 0, "1": 1}, "55 rows without a label"),
    "N/A": (mixed("no", "yes", "N/A"), LEAVE_OUT, {"no": 0, "yes": 1}, "55 rows without a label"),
    "letters": (mixed("A", "T", "Y", "N"), (), {"A": 0, "N": 1, "T": 2, "Y": 3}, "4 classes"),
    "gaps in classes": (mixed("a", "b", "", "c"), LEAVE_OUT, {"a": 0, "b": 1, "c": 2}, "3 classes"),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "options", "values", "words"), READ.values(), ids=READ)
def test_labels_are_what_init_says(
    tmp_path: Path,
    port: int,
    capsys: pytest.CaptureFixture[str],
    labels: list[str],
    options: Sequence[str],
    values: Mapping[str, float],
    words: str,
) -> None:
    path = clients(tmp_path, churned=labels)
    assert command("active", path, "--folder", tmp_path, *options) == 0
    said = capsys.readouterr().out
    assert words in said
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    assert_read(settings, labels, values)
    sets = ["--set", "security={mode: insecure}", "--set", f"listen=127.0.0.1:{port}"]
    assert exit_code_of(active_program.main, "check", tmp_path / "active.yaml", *sets) == 0
    checked = capsys.readouterr().out
    for counted in ("WARNING: 2 other", "1 other text", "for 0"):
        assert (counted in checked) == (counted in said)


def assert_read(
    settings: ActiveSettings, labels: Sequence[object], values: Mapping[Any, float]
) -> None:
    """Compare what a run, with and without a cache, an alignment and a prediction read."""
    rows = [row for row, one in enumerate(labels) if one in values]
    source = settings.data.source.model_copy(update={"cache_dir": "cache"})
    for data in (settings.data, settings.data.model_copy(update={"source": source})):
        found = PartyData.load(data, settings.base_dir)
        assert found.table.labels is not None
        assert found.table.labels.tolist() == [values[labels[row]] for row in rows]
        assert len(rows) == len(labels) if found.kept is None else found.kept.tolist() == rows
        again = settings.model_copy(update={"data": data})
        assert list(read_own_ids(again).ids) == list(found.ids)
        report = found.table.id_report
        assert report.unlabelled == report.left_out == len(labels) - len(rows)
        assert len(ServedRows.load(again, found.fit(np.arange(9)))) == len(labels)


@pytest.mark.parametrize("value", [1.0, 7.5])
def test_numbers_in_parquet_may_have_gaps(tmp_path: Path, value: float) -> None:
    labels = [None if i % 60 == 0 else float("nan") if i % 60 == 1 else value * (i % 2)
              for i in range(ROWS)]  # fmt: skip
    table = pa.table({"id": range(ROWS), "y": labels, "x": np.arange(ROWS) / 7})
    parquet.write_table(table, tmp_path / "t.parquet")
    wishes = Wishes(leave_out_unlabelled=True, label_range=(0, 10) if value > 1 else None)
    wishes = wishes._replace(id_column="id", label_column="y")
    initialise(tmp_path / "t.parquet", wishes, Terms("active", tmp_path))
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    assert_read(settings, labels, {0.0: 0, value: 0.75 if value > 1 else 1})


REFUSED: dict[str, tuple[list[str], Sequence[str], str]] = {
    "case": (mixed("no", "yes", "YES"), (), "1: --positive-label yes --positive-label YES"),
    "two exports": (mixed("0", "1", "False", "True"), (), "'True' seem to mean the same"),
    "no such label": (mixed("no", "yes"), ("--positive-label", "ja"), "no label 'ja'; it has 'no'"),
    "one spelling": (mixed("no", "yes", "YES"), YES, "--positive-label yes --positive-label YES"),
    "case of classes": (mixed("low", "high", "mid", "Mid"), (), "'Mid' seem to mean the same"),
    "gaps": (mixed("no", "yes", ""), (), "churned has texts, 2 distinct; 55 gaps (empty); --unl"),
    "gaps in a named column": (mixed("no", "yes", "N/A"), ("--label-column", "churned"),
                               "('N/A'); --unlabelled-rows leave_out leaves these rows out"),
    "no ids": (mixed("no", "yes", ""), (*LEAVE_OUT, "--no-id-column"), "needs a column of ids"),
    "no features": (mixed("a", "b", "NA"), (*LEAVE_OUT, "--exclude", "fee", "plan"), "features if"),
}  # fmt: skip


@pytest.mark.parametrize(("labels", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_a_question_about_labels_names_its_answer(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    labels: list[str],
    options: Sequence[str],
    words: str,
) -> None:
    path = clients(tmp_path, churned=labels)
    assert command("active", path, "--folder", tmp_path, *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "active.yaml").exists()


def test_a_row_without_a_label_repeats_no_id(tmp_path: Path) -> None:
    """Nor is its id looked at."""
    (tmp_path / "t.csv").write_text("id,y\na,\na,1\nb,0\n,\nb,\n")
    for cache in ({}, {"cache_dir": "cache"}):
        source = {"kind": "csv", "path": "t.csv"} | cache
        data = {"source": source, "id_column": "id", "label_column": "y"}
        chosen = DataSettings.model_validate(data | {"unlabelled_rows": "leave_out"})
        for read in (PartyData.load, read_ids_alone):
            found = read(chosen, tmp_path, None, AS_WRITTEN)
            assert list(found.ids) == ["a", "b"]
            assert found.table.id_report.losses == "3 of 5 rows left out: 3 without a label"


def test_cells_of_a_column_that_holds_no_labels_are_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,y\n" + "".join(f"{i},Jane {i}\n" for i in range(40)))
    data = {"source": {"kind": "csv", "path": "t.csv"}, "id_column": "id", "label_column": "y"}
    chosen = DataSettings.model_validate(data | {"positive_label": "Jane"})
    with pytest.raises(DataError, match=r"no row has 'Jane' .*, but 40 other values$"):
        PartyData.load(chosen, tmp_path)
