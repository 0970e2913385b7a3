"""Tables in memory as the data of simulated parties: arrays, data frames, tables of pyarrow.

Each table is written as a Parquet file beside settings made for it, so that a simulation reads it
as two processes would. Numbers become numeric features, and texts categories.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet

from splitveil.common.errors import SettingsError
from splitveil.common.storage.run_folder import write_text_atomically

CONTRACT: Mapping[str, Any] = {
    "run_name": "simulated",
    "cut_shape": [16],
    "batch_size": 32,
    "epochs": 10,
    "split": {"kind": "hash", "train": 0.8, "test": 0.2},
}
ADAM = {"kind": "adam", "learning_rate": 0.001}
TOP = {"kind": "mlp", "hidden": [16]}
BOTTOM = {"kind": "mlp", "hidden": [32], "output_activation": "relu"}


def write_settings(
    folder: Path,
    active: Any,
    passive: Any,
    *,
    label: str,
    key: str | None = None,
    label_range: tuple[float, float] | None = None,
) -> None:
    """Write the parties' tables and settings files for them.

    Args:
        folder: where they are written; it is made for its owner alone.
        active: the label owner's table: a data frame, a ``pyarrow.Table``, a mapping of columns, or
            an array with one row per example, whose columns become ``x0``, ``x1``, ...
        passive: the feature owner's table, or a mapping from the names of up to eight feature
            owners to their tables; None for settings of the active party alone.
        label: the column of the active party's table that holds the labels.
        key: the column of ids that all tables have; without it, row n is the same example
            everywhere.
        label_range: the bounds of labels that are numbers; None for classes.

    Raises:
        SettingsError: a table is of another kind, or lacks a column.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owners: dict[str, Any] = {"passive": passive}
    if passive is None or _is_several(passive):
        owners = dict(passive or {})
    contract = dict(CONTRACT)
    if owners and list(owners) != ["passive"]:
        contract["passive_parties"] = list(owners)
    _write(folder / "contract.yaml", contract)
    table = as_table(active, "active")
    if label not in table.column_names:
        raise SettingsError(f"active: expected a column {label!r}, got {_listed(table)}")
    data = _data(folder, "active", table, [label], key) | {"label_column": label}
    classes = 2
    if label_range is not None:
        low, high = label_range
        data["label_range"] = {"low": float(low), "high": float(high)}
    elif (classes := _classes(table.column(label))) > 2:
        data["classes"] = classes
    _write(
        folder / "active.yaml", _settings(data) | {"top_model": TOP, "defense": {"name": "none"}}
    )
    for name, given in owners.items():
        data = _data(folder, name, as_table(given, name), [], key)
        settings = _settings(data) | {"bottom_model": BOTTOM, "party": name}
        labels = {
            "source": {"kind": "parquet", "path": "active.parquet"},
            "label_column": label,
            **({} if key is None else {"id_column": key}),
            **({"classes": classes} if classes > 2 else {}),
        }
        if label_range is None:  # the adversary's attacks tell classes apart
            settings["adversary"] = {"layers": ["cut"], "labels": labels}
        file = "passive.yaml" if len(owners) == 1 else f"passive_{name}.yaml"
        _write(folder / file, settings)


def as_table(given: Any, name: str) -> pa.Table:
    """Return a table of any kind as one of pyarrow.

    Raises:
        SettingsError: it is of another kind.
    """
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, Mapping):
        return pa.table({str(column): np.asarray(values) for column, values in given.items()})
    if type(given).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(given, preserve_index=False)
    try:
        rows = np.asarray(given)
    except ValueError as error:
        raise SettingsError(f"{name}: cannot be read as a table: {error}") from error
    if rows.ndim != 2 or rows.dtype.kind not in "biuf":
        raise SettingsError(
            f"{name}: expected a data frame, a pyarrow table, a mapping of columns or an array "
            f"(rows, columns) of numbers, got {type(given).__name__}"
        )
    return pa.table({f"x{column}": rows[:, column] for column in range(rows.shape[1])})


def _is_several(passive: Any) -> bool:
    """Return whether tables of several parties were given, and not the columns of one."""
    return isinstance(passive, Mapping) and all(
        np.ndim(table) == 2 or isinstance(table, Mapping | pa.Table) for table in passive.values()
    )


def _data(
    folder: Path, name: str, table: pa.Table, own: Sequence[str], key: str | None
) -> dict[str, Any]:
    if key is not None and key not in table.column_names:
        raise SettingsError(f"{name}: expected a column {key!r}, got {_listed(table)}")
    path = folder / f"{name}.parquet"
    parquet.write_table(table, path)
    path.chmod(0o600)
    features: dict[str, list[str]] = {"numeric": [], "categorical": []}
    for column in table.schema:
        if column.name not in {*own, key}:
            features["numeric" if _is_number(column.type) else "categorical"].append(column.name)
    chosen = {kind: names for kind, names in features.items() if names}
    return {
        "source": {"kind": "parquet", "path": path.name},
        **({} if key is None else {"id_column": key}),
        **({"features": chosen} if chosen else {}),
    }


def _settings(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "contract": "contract.yaml",
        "security": {"mode": "insecure"},
        "data": data,
        "optimizer": ADAM,
    }


def _is_number(kind: pa.DataType) -> bool:
    is_number: bool = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or bool(pa.types.is_boolean(kind) or pa.types.is_decimal(kind))


def _classes(labels: pa.ChunkedArray) -> int:
    """Return the number of classes if labels are the whole numbers from 0, else 2."""
    found = labels.unique().drop_null().to_pylist()
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in found)
    return max(found) + 1 if whole and found and max(found) > 1 and min(found) >= 0 else 2


def _listed(table: pa.Table) -> str:
    return ", ".join(map(repr, table.column_names[:20])) or "no columns"


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_text_atomically(path, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))
