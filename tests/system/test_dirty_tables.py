"""Two tables as a German spreadsheet exports them become two reports without an edit."""

import csv
import datetime
import gzip
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from tests.support.commands import begun, called, ended
from tests.support.simulation import free_address

REPEATS, GAPS = 7, 3
SHORT = "--set contract.epochs=2"
Columns = Mapping[str, Sequence[float]]


class Tables(NamedTuple):
    labels: Sequence[int]
    active: Columns
    passive: Columns


def made(rows: int = 900) -> Tables:
    draw = np.random.default_rng(4)
    own, theirs = draw.normal(50, 20, (2, 2, rows))
    is_positive = own[0] + theirs[0] + 20 * draw.normal(size=rows) > 120
    return Tables(
        is_positive.astype(int).tolist(),
        {"betrag": own[0].tolist(), "gebuehr": (1000 * own[1]).tolist()},
        {"umsatz": theirs[0].tolist(), "limit": (1000 * theirs[1]).tolist()},
    )


def default_credit() -> Tables:
    if "SPLITVEIL_DATA" not in os.environ:
        pytest.skip("SPLITVEIL_DATA names no folder with data sets")
    path = Path(os.environ["SPLITVEIL_DATA"]) / "default_credit" / "raw.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = list(csv.reader(file))
    columns = dict(zip(rows[0], np.array(rows[1:], float).T.tolist(), strict=True))
    labels = columns.pop("default.payment.next.month")
    active = {name: cells for name, cells in columns.items() if name.startswith(("BILL", "PAY_A"))}
    passive = {name: cells for name, cells in columns.items() if name not in {*active, "ID"}}
    return Tables([int(label) for label in labels], active, passive)


def write(path: Path, ids: Sequence[str], columns: Columns, **others: Sequence[str]) -> None:
    """Write amounts in two forms, dates, gaps, and ids of which some are missing or repeated."""
    rows = len(ids)
    start = datetime.date(2001, 1, 1)
    cells: dict[str, Sequence[str]] = {"kunde_id": ids, **others}
    for name, numbers in columns.items():
        written = [f"{number:,.2f}".translate(str.maketrans(",.", ".,")) for number in numbers]
        cells[name] = ["k.A." if i % 97 == 5 else one for i, one in enumerate(written)]
    days = [(start + datetime.timedelta(i * 37 % 6000)).strftime("%d.%m.%Y") for i in range(rows)]
    cells["kunde_seit"] = ["k.A." if i % 89 == 3 else day for i, day in enumerate(days)]
    order = np.random.default_rng(len(path.name)).permutation(rows).tolist()
    chosen = [*order, *order[:REPEATS]]
    lines = [[column[row] for column in cells.values()] for row in chosen]
    for line in lines[20 : 20 + GAPS]:
        line[0] = ""
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows([[*cells], *lines])


@pytest.mark.parametrize("tables", [made, default_credit])
def test_two_files_become_two_reports(tmp_path: Path, tables: Callable[[], Tables]) -> None:
    labels, active, passive = tables()
    ids = [f"{100_000 + row}" for row in range(len(labels))]
    answers = [("nein", "ja")[label] for label in labels]
    write(tmp_path / "bank.csv", [f"KD-{one}" for one in ids], active, gekuendigt=answers)
    write(tmp_path / "telefon.csv", [f"kd-{one}" for one in ids], passive)
    address = free_address()
    for words in (
        f"splitveil init active bank.csv --address {address}",
        f"splitveil init passive telefon.csv --address {address}",
        "splitveil certs init certificates",
        "splitveil check active.yaml",
        "splitveil check passive.yaml",
    ):
        done = called(tmp_path, words)
        assert done.exit_code == 0, done.output
        if " init active" in words or " init passive" in words:
            assert f"{GAPS} rows without an id, {REPEATS} rows with the id of an" in done.output
            assert "times        kunde_seit" in done.output
            assert "categories   none" in done.output
            assert "left out     " not in done.output
    short = f" {SHORT}" * (tables is made)
    parties = [
        begun(tmp_path, f"splitveil {party} run {party}.yaml{short}")
        for party in ("active", "passive")
    ]
    for done in map(ended, parties):
        assert done.exit_code == 0, done.output
    for party in ("active", "passive"):
        results = tmp_path / "runs" / "bank" / party
        assert (results / "report.html").is_file()
        summary = yaml.safe_load((results / "summary.json").read_text())
        # Each party lacks three of the ids, and no id is lacking at both.
        assert len(labels) - summary["aligned_rows"] == 2 * GAPS
    if tables is made:
        assert_predictions_join(tmp_path, labels, free_address())


def assert_predictions_join(folder: Path, labels: Sequence[int], address: str) -> None:
    """Predict for the file as it is, and join the predictions to its labels by its own ids."""
    serve = f"splitveil serve passive.yaml {SHORT} --set answers.listen={address}"
    server = begun(folder, serve)
    try:
        done = called(
            folder,
            "splitveil predict active.yaml --ids bank.csv --data bank.csv --output p.csv "
            f"{SHORT} --set inference.connect.passive={address}",
        )
    finally:
        server.terminate()
        ended(server)
    assert done.exit_code == 0, done.output
    assert f"{GAPS} rows without a usable id are left out" in done.output
    with (folder / "bank.csv").open(encoding="utf-8-sig", newline="") as file:
        asked = [row["kunde_id"] for row in csv.DictReader(file, delimiter=";") if row["kunde_id"]]
    with (folder / "p.csv").open(newline="") as file:
        predicted = list(csv.DictReader(file))
    assert [row["id"] for row in predicted] == asked
    assert all(row["canonical_id"] == row["id"].lower() for row in predicted)
    found = [row for row in predicted if row["found"] == "true"]
    assert len(predicted) - len(found) == GAPS
    positive = [float(row["probability"]) for row in found if labels[int(row["id"][3:]) - 100_000]]
    assert np.mean(positive) > np.mean([float(row["probability"]) for row in found])
