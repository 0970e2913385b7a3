"""Tables whose label is a number, divided between two parties or more."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from splitveil.library.own_data import write_settings

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
    """Write such tables, and settings of all parties for them."""
    tables = number_tables(rows, parties=parties)
    write_settings(folder, *tables, label="amount", label_range=(LOW, HIGH))
