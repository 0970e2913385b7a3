"""A name of a column is never a pattern: a run's features are the columns that were listed."""

import json
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from splitveil import predict, simulate
from splitveil.active_party.http.own_features import GivenFeatures
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.features import FeatureEncoder
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import Table, read_table
from splitveil.common.errors import DataError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import Contract
from splitveil.common.settings import validate
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Terms
from tests.support.records import columns_of
from tests.support.runs import CONTRACT

ROWS = 120
PLAIN = ("a", "a1", "ab", "b", "bx", "x", "ax", "é", "e\u0301", "A1", " a", "a ", "1", "1e3", "yes")
ODD = (
    *("*", "**", "?", "a?", "a*", "??", "[ab]", "[!a]x", "!x", "a[", "]", "a]", "[*]", "a[*]"),
    *("[[]ab]", "[a-z]*", "A*", "{a,b}", "a,b", "a.b", "a b", "'q'", '"q"', "null", "#x", "&a"),
    *(
        "~",
        "- x",
        "a: b",
        "|",
        "%x",
        "a\\*",
        "\\",
        "é*",
        "?*x",
        "income [EUR]",
        "smoker?",
        "HbA1c*",
    ),
)
NAMES = (*PLAIN, *ODD)
USED, OTHERS = (*ODD[::2], *PLAIN[::2]), (*ODD[1::2], *PLAIN[1::2])


def table_of(names: Sequence[str] = NAMES, prefix: str = "") -> pa.Table:
    made = np.random.default_rng(5)
    own = {prefix + name: made.normal(size=ROWS).round(6) for name in names}
    return pa.table({"id": [f"c{row}" for row in range(ROWS)], "y": np.arange(ROWS) % 2, **own})


def write(table: pa.Table, path: Path) -> Path:
    (csv.write_csv if path.suffix == ".csv" else parquet.write_table)(table, path)
    return path


def features_of(table: Table) -> set[str]:
    return {*table.numeric, *table.coded}


def read_by_hand(folder: Path, **features: Any) -> Table:
    values = {"source": {"kind": "parquet", "path": "t.parquet"}, "id_column": "id"}
    own = {**values, "label_column": "y", "features": features}
    return read_table(validate(DataSettings, own, "data"), folder)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_run_reads_what_init_lists(tmp_path: Path, ending: str) -> None:
    """Whether a table has other columns that its names would match, or has lost some."""
    path = write(table_of(), tmp_path / f"t.{ending}")
    written = initialise(path, Wishes("id", exclude=OTHERS), Terms("active", tmp_path))
    listed = {column.name for column in written.proposal.choices.features}
    assert listed == {*USED}
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml").data
    assert features_of(read_table(settings, tmp_path)) == listed
    write(table_of(USED).append_column("az", table_of()["y"]), path)
    assert features_of(read_table(settings, tmp_path)) == listed
    write(table_of().drop_columns(["a*"]), path)
    with pytest.raises(DataError, match=r"there is no column 'a\*'"):
        read_table(settings, tmp_path)


def test_settings_by_hand_may_list_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(table_of(), tmp_path / "t.parquet")
    assert features_of(read_by_hand(tmp_path, numeric=USED)) == {*USED}
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == WARNING]
    assert said.endswith("not as patterns: '*', '?', 'a*', '[ab]', '[*]', '[[]ab]', 'A*', '?*x'")
    assert features_of(read_by_hand(tmp_path, numeric=USED, patterns=False)) == {*USED}


def test_what_is_excluded_by_name_leaves_what_it_would_match(tmp_path: Path) -> None:
    names = [name for name in NAMES if name != "*"]
    write(table_of(names), tmp_path / "t.parquet")
    excluded = ["a*", "??", "[ab]", "income [EUR]"]
    expected = {*names} - {*excluded}
    assert features_of(read_by_hand(tmp_path, numeric="*", exclude=excluded)) == expected
    assert features_of(read_by_hand(tmp_path, numeric="*", exclude="b?")) == {*names} - {"bx"}


@pytest.mark.parametrize(
    ("features", "absent"),
    [
        ({"numeric": "*", "exclude": ["leek"]}, "leek"),
        ({"numeric": "*", "exclude": ["leek*"]}, r"leek\*"),
        ({"numeric": "l*", "patterns": False}, r"l\*"),
        ({"numeric": "leak", "sequences": {"l*": {"max_length": 2, "num_tokens": 3}}}, r"l\*"),
    ],
)
def test_an_entry_without_a_column_is_an_error(
    tmp_path: Path, features: Mapping[str, Any], absent: str
) -> None:
    write(table_of(["leak", "b"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=f"there is no column '{absent}'"):
        read_by_hand(tmp_path, **features)


def test_a_simulated_run_and_its_predictions_read_the_same_columns(tmp_path: Path) -> None:
    """The same names at both parties, in files, and in the features that a program sends."""
    own, theirs = table_of(USED), table_of(USED).drop_columns(["y"])
    given: dict[str, Any] = {"active": own, "passive": theirs, "label": "y", "key": "id"}
    short = {"contract.epochs": 1}
    (run,) = simulate(**given, settings=short, attacks=[], threads=1, runs=tmp_path / "runs")
    for party in ("active", "passive"):
        encoder = FeatureEncoder.from_state(
            json.loads(next((run.path / party).rglob("encoder.json")).read_text())
        )
        assert encoder.columns == {*USED}
    more = theirs.append_column("az", own["y"])
    expected = columns_of(predict(run))["probability"]
    assert columns_of(predict(run, tables={"passive": more}))["probability"] == expected
    with pytest.raises(DataError, match=r"no column 'a\*'"):
        predict(run, tables={"passive": theirs.drop_columns(["a*"])})
    settings = load_party_settings(ActiveSettings, run.path / "active" / "settings.yaml")
    assert {*GivenFeatures(settings.data, encoder).columns} == {*USED}
    folder = run.export_settings(tmp_path / "exported")
    again = load_party_settings(ActiveSettings, folder / "active.yaml")
    assert features_of(read_table(again.data, folder)) == {*USED}
    run.export(tmp_path / "halves")
    for file in (tmp_path / "halves").glob("*.encoder.json"):
        assert FeatureEncoder.from_state(json.loads(file.read_text())).columns == {*USED}
    assert len(list((tmp_path / "halves").glob("*.encoder.json"))) == 2


def test_a_copy_on_disk_follows_the_table(tmp_path: Path) -> None:
    """A table that has gained a column of that name is converted again, and read as named."""
    source = {"kind": "parquet", "path": "t.parquet", "cache_dir": "cache"}
    values = {"source": source, "id_column": "id", "features": {"numeric": "a*"}}
    settings = validate(DataSettings, values, "data")
    write(table_of(["a1", "a2"]), tmp_path / "t.parquet")
    data = PartyData.load(settings, tmp_path)
    assert features_of(data.table) == {"a1", "a2"}
    contract = Contract.model_validate(CONTRACT | {"epochs": 1})
    assert ", 2 feature columns (a1, a2), " in data.summary(contract)  # what a check says
    write(table_of(["a1", "a2", "a*"]), tmp_path / "t.parquet")
    assert features_of(PartyData.load(settings, tmp_path).table) == {"a*"}
