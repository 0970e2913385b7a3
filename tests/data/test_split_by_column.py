"""A split by a column: all parties derive the same split, or the run ends before its first step."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import read_table
from splitveil.common.errors import AlignmentError, DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows
from splitveil.common.settings import validate
from splitveil.deploy.local import held_port
from tests.support.loopback import serving
from tests.support.runs import (
    CONTRACT,
    NAMES,
    build_parties,
    finish,
    run_in_process,
    run_over_grpc,
    start,
    write_example,
    write_several,
)
from tests.wire.test_several_parties_over_grpc import start as start_over_grpc

BY_COLUMN = "contract.split={kind: column, column: fold}"
WORDS = ("train", "train", "train", "validation", "test")


def word_of(name: str) -> str:
    return WORDS[int(name.removeprefix("person-")) % 5]


def add_column(path: Path, word: Callable[[str], str] = word_of) -> None:
    header, *rows = path.read_text().splitlines()
    lines = [f"{header},fold", *(f"{row},{word(row.partition(',')[0])}" for row in rows)]
    path.write_text("\n".join(lines) + "\n")


def write_both(folder: Path, other: Callable[[str], str] = word_of) -> None:
    write_example(folder)
    add_column(folder / "active.csv")
    add_column(folder / "passive.csv", other)


def differing(name: str) -> str:
    """Say something else of one row that both parties have."""
    return "test" if name == "person-00100" else word_of(name)


def words_by_id(rows: AlignedRows, ids: list[str]) -> Mapping[str, str]:
    return {ids[rows.file_rows[i]]: word for word in rows.splits for i in rows.splits[word]}


def test_both_parties_train_and_test_on_the_rows_that_the_column_says(tmp_path: Path) -> None:
    only_passive = {"person-00399", "person-00390"}  # the active party has the first 380
    write_both(tmp_path, lambda name: "test" if name in only_passive else word_of(name))
    parties = build_parties(tmp_path, [BY_COLUMN], [BY_COLUMN])
    run_in_process(parties)
    found = []
    for settings, seen in (
        (parties.active_settings, parties.active),
        (parties.passive_settings, parties.passive),
    ):
        assert seen.rows is not None
        ids = PartyData.load(settings.data, tmp_path).ids
        found.append(words_by_id(seen.rows, list(ids)))
    assert found[0] == found[1] == {name: word_of(name) for name in found[0]}
    assert len(found[0]) == 360
    evaluated = [(each.epoch, each.split) for each in parties.active.evaluations]
    assert evaluated == [(0, "validation"), (0, "test"), (1, "validation"), (1, "test")]


def test_one_word_that_differs_ends_the_run_on_both_sides(tmp_path: Path) -> None:
    write_both(tmp_path, differing)
    parties = build_parties(tmp_path, [BY_COLUMN], [BY_COLUMN])
    with (
        held_port() as port,
        pytest.raises(AlignmentError, match="the parties disagree on the split") as caught,
    ):
        run_over_grpc(parties, port)
    assert "person" not in str(caught.value)
    assert parties.run.trainer is None
    assert parties.session.lifecycle.trainer is None
    assert isinstance(parties.session.lifecycle.error, AlignmentError)
    assert "the parties disagree on the split" in str(parties.session.lifecycle.error)


def test_the_hash_split_s_canonical_form_has_not_changed() -> None:
    """Parties of two versions hold the same contract."""
    contract = Contract.model_validate(CONTRACT)
    assert '"split":{"kind":"hash","test":0.2,"train":0.6,"validation":0.2}' in (
        contract.canonical_json()
    )
    assert Contract.model_validate(CONTRACT | {"split": {"train": 0.7, "test": 0.3}})
    for wrong in ({"kind": "columns"}, {"kind": "column"}, {"kind": "column", "train": 0.5}):
        with pytest.raises(SettingsError, match="split"):
            validate(Contract, CONTRACT | {"split": wrong}, "contract")


@pytest.mark.parametrize("over_grpc", [False, True])
@pytest.mark.parametrize("disagreeing", [[], ["birch"]])
def test_several_parties_train_by_it_and_one_that_disagrees_ends_the_run_of_all(
    tmp_path: Path, port: int, disagreeing: list[str], *, over_grpc: bool
) -> None:
    write_several(tmp_path)
    for path in tmp_path.glob("*.csv"):
        add_column(path, differing if path.stem in disagreeing else word_of)
    several = build_parties(tmp_path, [BY_COLUMN], [BY_COLUMN])
    with serving(several, port):
        begin = partial(start_over_grpc, port=port) if over_grpc else start
        finish([begin(several, name) for name in NAMES])
    assert set(several.errors) == set(NAMES if disagreeing else ())
    assert all(isinstance(several.errors[name], AlignmentError) for name in disagreeing)
    assert bool(several.active.evaluations) != bool(disagreeing)


def test_a_run_resumes_with_the_same_split_and_not_with_another(tmp_path: Path) -> None:
    write_both(tmp_path)
    halfway = ["contract.epochs=2", BY_COLUMN]
    parties = build_parties(tmp_path, halfway, halfway, runs=tmp_path / "runs")
    run_in_process(parties)
    again = build_parties(tmp_path, halfway, halfway, runs=tmp_path / "runs")
    assert again.session.reopen()
    header, *rows = (tmp_path / "active.csv").read_text().splitlines()
    other = [row.replace(",validation", ",test") for row in rows]
    (tmp_path / "active.csv").write_text("\n".join([header, *other]) + "\n")
    changed = build_parties(tmp_path, halfway, halfway, runs=tmp_path / "runs")
    with pytest.raises(DataError, match="are not those that the run was started with"):
        changed.session.reopen()


def test_early_stopping_needs_rows_to_look_at(tmp_path: Path) -> None:
    write_example(tmp_path)
    for name in ("active", "passive"):
        add_column(
            tmp_path / f"{name}.csv", lambda name: word_of(name).replace("validation", "test")
        )
    stopping = "early_stopping_epochs=1"
    parties = build_parties(tmp_path, [BY_COLUMN, stopping], [BY_COLUMN])
    with pytest.raises(DataError, match="early_stopping_epochs needs validation rows"):
        run_in_process(parties)


# ---- the table ----


def read(
    folder: Path, text: str, split_column: str | None = "fold", cached: bool = False, **values: str
) -> PartyData:
    (folder / "rows.csv").write_text(text)
    source = {"kind": "csv", "path": "rows.csv"} | ({"cache_dir": "cache"} if cached else {})
    given = {"source": source, "id_column": "id", "features": {"categorical": "*"}, **values}
    split = {"kind": "column", "column": split_column} if split_column else CONTRACT["split"]
    contract = Contract.model_validate(CONTRACT | {"split": split})
    return PartyData.load(validate(DataSettings, given, "settings"), folder, contract.split)


TABLE = "id,fold,city\na, train ,Rome\nb,test,Oslo\nc,validation,Rome\nd,train,Bern\n"


@pytest.mark.parametrize("cached", [False, True])
def test_the_column_is_read_and_is_no_feature(tmp_path: Path, cached: bool) -> None:
    data = read(tmp_path, TABLE, cached=cached)
    assert data.table.splits is not None
    assert data.table.splits.tolist() == [0, 2, 1, 0]
    assert list(data.table.categorical) == ["city"]
    by_column = CONTRACT | {"batch_size": 2, "split": {"kind": "column", "column": "fold"}}
    contract = Contract.model_validate(by_column)
    expected = f"4 rows in {data.table.source} (2 train, 1 validation, 1 test)"
    found = f"{expected}, 1 feature columns (city), about 1 steps of 2"
    assert data.summary(contract).startswith(found)
    # Without it in the contract it is a column like any other, in another entry of the cache.
    without = read(tmp_path, TABLE, None, cached=cached)
    assert without.table.splits is None
    assert list(without.table.categorical) == ["fold", "city"]


@pytest.mark.parametrize("cached", [False, True])
def test_a_word_that_is_none_is_counted_and_not_repeated(tmp_path: Path, cached: bool) -> None:
    wrong = TABLE.replace("b,test", "b,holdout").replace("d,train", "d,")
    with pytest.raises(DataError) as caught:
        read(tmp_path, wrong, cached=cached)
    message = "column 'fold': expected train, validation or test in rows 2, 4 (2 in all)"
    assert message in str(caught.value)
    assert "holdout" not in str(caught.value)


def test_id_label_and_features_are_no_split(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'id' is the id, label or weight"):
        read(tmp_path, TABLE, "id")
    with pytest.raises(SettingsError, match="'fold' is the id, label or weight"):
        read(tmp_path, TABLE, label_column="fold", positive_label="test")
    source = {"kind": "csv", "path": "rows.csv"}
    asked = validate(DataSettings, {"source": source, "features": {"categorical": "fold"}}, "")
    with pytest.raises(SettingsError, match="'fold': a column is one of"):
        read_table(asked, tmp_path, "fold")


def test_a_column_without_test_rows_makes_no_run() -> None:
    contract = Contract.model_validate(CONTRACT | {"split": {"kind": "column", "column": "fold"}})
    ids = [f"person {number}" for number in range(50)]
    with pytest.raises(AlignmentError, match="leave no row for: test"):
        AlignedRows.derive(contract, b"seed", ids, np.arange(50), np.zeros(50, np.int8))
