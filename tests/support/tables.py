"""Tables and settings whose label is a number or one of several classes."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from splitveil.library.own_data import write_settings
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, write_table, write_yaml

LOW, HIGH = -20.0, 80.0
"""Bounds of the labels, in an arbitrary unit."""

Columns = dict[str, npt.NDArray[Any]]


def number_tables(rows: int = 600, seed: int = 3, parties: int = 1) -> tuple[Columns, Any]:
    """Return the label owner's table, and that of the feature owner or of several.

    The label is a nonlinear function of both parties' features with noise, within LOW and HIGH.
    """
    generator = np.random.default_rng(seed)
    passive = generator.standard_normal((rows, 4 * parties))
    own = generator.standard_normal((rows, 2))
    signal = passive[:, 0] + np.abs(passive[:, 1]) + 0.5 * passive[:, -1] + own[:, 0]
    label = np.clip(25 + 9 * signal + 4 * generator.standard_normal(rows), LOW, HIGH)
    active = {"amount": label, "a0": own[:, 0], "a1": own[:, 1]}
    if parties == 1:
        return active, passive
    return active, {f"p{one}": passive[:, 4 * one : 4 * one + 4] for one in range(parties)}


def write_numbers(folder: Path, rows: int = 600, parties: int = 1) -> None:
    tables = number_tables(rows, parties=parties)
    write_settings(folder, *tables, label="amount", label_range=(LOW, HIGH))


def swap_labels(table: Path) -> None:
    """Turn the labels of an example round, which are the second column of its table."""
    header, *lines = table.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    swapped = [",".join([own, str(1 - int(label)), *rest]) for own, label, *rest in cells]
    table.write_text("\n".join([header, *swapped, ""]))


def deal_other_labels(table: Path) -> None:
    """Replace each label of an example by one drawn with probability 1/2, unrelated to it."""
    header, *lines = table.read_text().splitlines()
    generator = np.random.default_rng(5)
    cells = [line.split(",") for line in lines]
    dealt = [",".join([own, str(generator.integers(2)), *rest]) for own, _, *rest in cells]
    table.write_text("\n".join([header, *dealt, ""]))


CLASSES = ("bus", "opel", "saab", "van")
ATTACKS = ("norm", "cosine", "spectral", "accumulated_spectral", "accumulated_cosine")


def write_classes(folder: Path, rows: int = 600, seed: int = 3) -> None:
    """Write data of four classes, by name, and settings; 9 in 10 rows are common."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    places = generator.choice(4, size=rows, p=[0.4, 0.3, 0.2, 0.1])
    centres = generator.normal(size=(4, 7))
    x = 1.5 * centres[places] + generator.normal(size=(rows, 7))
    ids = [f"car-{number:05d}" for number in range(rows)]
    cut = rows // 20
    active, passive = generator.permutation(rows - cut), cut + generator.permutation(rows - cut)
    own = [CLASSES[place] for place in places], places, *x.T[5:]
    write_table(folder / "active.csv", "id,label,number,own1,own2", active, ids, *own)
    write_table(folder / "passive.csv", "id,x1,x2,x3,x4,x5", passive, ids, *x.T[:5])
    source = {"source": {"kind": "csv", "path": "active.csv"}, "id_column": "id"}
    labels = {**source, "label_column": "label", "classes": list(CLASSES)}
    monitor = {"attacks": list(ATTACKS), "max_cpu_share": None}
    data = {**labels, "features": {"numeric": "own*"}}
    write_yaml(
        folder,
        contract=CONTRACT,
        active={**ACTIVE, "data": data, "leak_monitor": monitor},
        passive={**PASSIVE, "adversary": {**monitor, "labels": labels}},
    )
