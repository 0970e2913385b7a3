"""Tables of which a passive party has picked the rows, so that one label decides about a class."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.runs import write_example


class Labels(NamedTuple):
    """What is written for both classes of the example, and for the row about which a peer asks."""

    negative: str
    positive: str
    other: str
    settings: Sequence[str] = ()


KINDS = {
    "two classes": Labels("0", "1", "1"),
    "several classes": Labels("bus", "van", "opel", ["data.classes=[bus, van, opel]"]),
    "numbers": Labels("2.5", "7.5", "9", ["data.label_range={low: 0, high: 10}"]),
}
PARTS = ("train", "validation", "test")


def write_picked(folder: Path, kind: str, part: str, *, other: bool) -> None:
    """Write tables of which the peer has picked the rows.

    In one split, and without splits by the column ``part`` in all of them, it brings rows of one
    label, and one row that may have another.

    Args:
        folder: for tables and settings.
        kind: of the labels.
        part: that split; empty for all.
        other: whether that row has the other label.
    """
    write_example(folder)
    labels = KINDS[kind]
    tables = {}
    for name in ("active", "passive"):
        with (folder / f"{name}.csv").open() as file:
            tables[name] = {row["id"]: row for row in csv.DictReader(file)}
        for one, row in tables[name].items():
            row["part"] = PARTS[int(one[-1]) % 3]
    known = {one: row for one, row in tables["active"].items() if one in tables["passive"]}
    asked = [one for one, row in known.items() if part in ("", row["part"])]
    negative = [one for one in asked if known[one]["label"] == "0"]
    for place, row in enumerate(tables["active"].values()):
        row["label"] = labels.negative if row["label"] == "0" else labels.positive
        if place % 7 == 3 and row["id"] not in negative:
            row["label"] = labels.other
    if other:
        tables["active"][negative[0]]["label"] = labels.other
    left_out = set(asked) - set(negative)
    tables["passive"] = {o: row for o, row in tables["passive"].items() if o not in left_out}
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(next(iter(table.values()))))
            writer.writeheader()
            writer.writerows(table.values())
