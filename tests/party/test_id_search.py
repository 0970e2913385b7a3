"""``find`` names every file that holds a person's id, by each run's own rules, and changes none."""

import json
import os
from pathlib import Path

import pytest

from splitveil import simulate
from splitveil.active_party.training.evaluation import read_predictions
from tests.support.commands import called
from tests.support.runs import write_example

ROWS = 120
CUT = ROWS // 20
PERSON, STRANGER = "person-00050", "person-99999"
ACTIVE_ONLY, PASSIVE_ONLY = "person-00000", f"person-{ROWS - 1:05}"
RUN = "runs/small-seed-0"
BOOK, TESTED, LAST = (
    f"{RUN}/active/checkpoint/{name}.safetensors"
    for name in ("ledger", "test_predictions", "activations")
)
WEIGHTS = f"{RUN}/%s/checkpoint/model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run whose contract folded case, as the one beside it does not."""
    folder = tmp_path_factory.mktemp("found")
    write_example(folder, ROWS)
    settings = {
        "contract.epochs": 1,
        "contract.batch_size": 32,
        "contract.ids": {"kind": "text", "fold_case": True},
        "active.leak_monitor": None,
        "passive.adversary": None,
        "passive.data.source.cache_dir": "cache",
    }
    simulate(folder, defense="marvell", settings=settings, threads=1, runs=folder / "runs")
    (folder / "predictions.csv").write_text(f"id,canonical_id,label\nx,{PERSON},0.5\n")
    (folder / "aligned.csv").write_text(f"id,x1\n{PERSON},0\n")
    (folder / "other.csv").write_text(f"name,x1\n{PERSON},0\n")  # no column of ids
    return folder


def found(folder: Path, party: str, *ids: str, more: str = "") -> list[dict[str, bool]]:
    """Return for each id the paths that hold it, and for each whether that is certain."""
    (folder / "ids.txt").write_text("\n".join(ids))
    done = called(folder, f"splitveil find {party}.yaml --ids ids.txt --json {more}")
    assert done.exit_code == 0, done.output
    assert not any(one.strip().lower() in done.output.lower() for one in ids)
    by_id: list[dict[str, bool]] = [{} for _ in ids]
    for one in json.loads(done.output)["found"]:
        path = os.path.relpath(folder / one["path"], folder)
        by_id[one["id"] - 1][path] = one["certain"]
    return by_id


def test_each_party_finds_a_person_where_it_is_and_a_stranger_nowhere(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    asked = f" {PERSON.upper()} ", ACTIVE_ONLY, PASSIVE_ONLY, STRANGER
    person, own, other, stranger = found(folder, "active", *asked)
    written = {"active.csv", "passive.csv", "predictions.csv", "aligned.csv"}
    certain = {path for path, is_certain in person.items() if is_certain}
    assert certain - {BOOK, TESTED} == {*written, LAST}
    assert person[WEIGHTS % "active"] is own[WEIGHTS % "active"] is False
    assert {path for path in own if own[path]} == {"active.csv"}
    assert other == {"passive.csv": True}
    assert stranger == {}
    person, other, own, stranger = found(folder, "passive", *asked)
    (copy,) = (
        os.path.relpath(path.parent, folder) for path in folder.glob("cache/*/manifest.json")
    )
    assert {path for path in person if person[path]} == {*written, copy}
    assert {path for path in own if own[path]} == {"passive.csv", copy}
    assert person[WEIGHTS % "passive"] is own[WEIGHTS % "passive"] is False
    assert other == {"active.csv": True}
    assert stranger == {}
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert {path for path, _ in before.items() ^ after.items()} == {folder / "ids.txt"}


def test_the_account_book_names_the_common_rows_and_predictions_those_for_tests(
    folder: Path,
) -> None:
    common = [f"person-{number:05}" for number in range(CUT, ROWS - CUT)]
    by_id = found(folder, "active", *common)
    summary = json.loads((folder / RUN / "active" / "summary.json").read_text())
    assert all(one[LAST] for one in by_id)
    assert summary["aligned_rows"] == len(common)
    booked, tested = ({i for i, one in enumerate(by_id) if path in one} for path in (BOOK, TESTED))
    assert len(booked) == len(common)
    predictions = read_predictions(folder / RUN / "active")
    assert predictions is not None
    assert 0 < len(tested) == len(predictions.ids) < len(common)


def test_a_run_whose_table_has_changed_since_may_depend_on_anybody(folder: Path) -> None:
    table = folder / "active.csv"
    before = table.read_bytes()
    try:
        table.write_bytes(b"\n".join(x for x in before.split(b"\n") if PERSON.encode() not in x))
        person, stranger = found(folder, "active", PERSON, STRANGER)
    finally:
        table.write_bytes(before)
        began = (folder / RUN / "active" / "settings.yaml").stat().st_mtime
        os.utime(table, (began - 1, began - 1))
    assert "active.csv" not in person
    assert person[LAST] is True
    assert stranger[WEIGHTS % "active"] is False


def test_a_query_is_not_asked_again(folder: Path) -> None:
    source = "data.source={kind: sql, driver: sqlite, uri: no.db, query: SELECT 1}"
    (stranger,) = found(folder, "passive", STRANGER, more=f"--set '{source}' --runs nowhere")
    assert stranger == {"sql": False}
    assert not (folder / "snapshots").exists()


@pytest.mark.parametrize(
    ("more", "exit_code", "problem"),
    [
        ("--ids missing.txt", 2, "there is no such file"),
        ("--ids contract.yaml --also missing.csv", 3, "there is no such file"),
        ("--id x --also other.csv", 3, "neither column 'id' nor canonical_id"),
        ("--id ' '", 3, "there are no ids"),
        ("--id \udcff", 3, "the ids are not UTF-8"),
        ("--id x --set contract.ids.kind=email --runs nowhere", 3, "id 1 of 1: no id by the rules"),
        ("--id x --set data.id_column=null", 2, "rows are known by their numbers"),
        ("--id x --set 'data.id_column=[id, x1]' --set 'contract.ids=[{}, {}]'", 2, "--ids"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(
    folder: Path, more: str, exit_code: int, problem: str
) -> None:
    done = called(folder, f"splitveil find passive.yaml {more}")
    assert (done.exit_code, problem in done.output) == (exit_code, True), done.output


@pytest.mark.parametrize(
    "name",
    ["active/settings.yaml", *(path.removeprefix(f"{RUN}/") for path in (BOOK, TESTED, LAST))],
)
def test_a_damaged_file_is_named_and_leaves_the_answer_open(folder: Path, name: str) -> None:
    path = folder / RUN / name
    before, times = path.read_bytes(), path.stat()
    try:
        path.write_bytes(before[:-20] if name.endswith("s") else b"[")
        done = called(folder, f"splitveil find active.yaml --id {PERSON}")
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert done.exit_code == 3
    assert str(path.parent.name if name.endswith("yaml") else path.name) in done.output
    assert "the answer lacks what these hold" in done.output
    assert WEIGHTS % "active" in done.output
