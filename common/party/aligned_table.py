"""Shared by both parties' ``align``: reads only a party's ids, and writes its common rows."""

import argparse
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from splitveil.common.data.converted import stamps_of
from splitveil.common.data.kinds import columns_in_parts, in_small_blocks, open_source
from splitveil.common.data.sources import TableSource
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party import command_line
from splitveil.common.party.arguments import print_json
from splitveil.common.party.endpoint import serving_status
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData, read_ids_alone
from splitveil.common.party.party_settings import PartySettings, PartySettingsT
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_folder import open_run_folder
from splitveil.common.record.table_output import check_output, replacing, writer_of
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import AlignmentContract
from splitveil.common.run.sample_order import CommonOrder

_logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 2**16

FOLDER = "alignment"  # folder of a run's alignments; each party has its own in it


Alignment = tuple[
    str, RunStatus, Callable[[PartyData, Path, Transcript | None, Interruption], CommonOrder], bool
]
"""A party's folder, status, way to find the common rows, and whether a bar shows it."""


def align(parsed: argparse.Namespace, alignment_of: Callable[[PartySettingsT], Alignment]) -> None:
    """Find the rows that all parties have, and write this party's; what both parties do alike.

    Args:
        alignment_of: called before the ids are read, to check what the connection needs.
    """
    interruption = Interruption()
    interruption.install()
    settings = aligning(parsed.loaded)
    check_outputs(settings, parsed.output, positions=parsed.positions)
    name, status, find, shows_bar = alignment_of(settings)
    stamps, own = stamps_of(settings.data.source, settings.base_dir), read_own_ids(settings)
    _logger.info("%s ids read from %s", f"{len(own.ids):,}", own.table.source)
    interruption.check()
    with (
        ProgressBar("aligning") as progress,
        serving_status(status, settings.status, interruption),
    ):
        status.alignment_bar = progress if shows_bar else None
        folder = open_run_folder(settings.runs_dir / settings.contract.run_name, FOLDER, name)
        command_line.save_resolved(settings, folder)
        with Transcript(folder, status.party) if settings.transcript else nullcontext() as written:
            order = find(own, folder, written, interruption)
    write_aligned(settings, own, stamps, order, parsed.output, positions=parsed.positions)
    num_ids, num_common = len(own.ids), len(order.file_rows)
    if parsed.json:
        counts = {"run_id": order.run_id, "ids": num_ids, "aligned": num_common}
        print_json(counts | {"fingerprint": order.fingerprint, "output": str(parsed.output)})
    _logger.info(
        "%s of %s ids are common to all parties; they are in %s, in the order with fingerprint %s",
        *(f"{num_common:,}", f"{num_ids:,}", parsed.output, order.fingerprint),
    )


def aligning(settings: PartySettingsT) -> PartySettingsT:
    if settings.contract.is_one_sided:
        raise SettingsError(
            "contract.alignment.kind: one_sided: align tells all parties which ids are common"
        )
    contract = AlignmentContract.of(settings.contract)
    return settings.model_copy(update={"contract": contract})


_POSITION = "position"


def check_outputs(settings: PartySettings, output: Path, *, positions: bool = False) -> None:
    stamps = stamps_of(settings.data.source, settings.base_dir)
    check_output(output, [path for path, *_ in stamps])
    if positions and not settings.data.id_columns:
        raise SettingsError("--positions: expected data.id_column: rows have no ids but numbers")
    if positions and _POSITION in settings.data.id_columns:
        raise SettingsError(
            f"--positions: expected an id column with another name than {_POSITION}"
        )


def read_own_ids(settings: PartySettings) -> PartyData:
    """Read a party's ids and the contract's split column, but nothing else."""
    data, contract = settings.data, settings.contract
    if not data.id_columns:
        pass  # rows are known by their numbers, and some column has to count them
    elif data.unlabelled_rows == "error":
        data = data.without_labels(features=None)
    else:
        changed: dict[str, Any] = {"class_weights": None, "weight_column": None}
        if data.features is not None:  # they say which labels are missing
            parts = ("numeric", "categorical", "timestamps", "lists")
            none: dict[str, Any] = dict.fromkeys(parts, ()) | {"sequences": {}, "image": None}
            changed["features"] = data.features.model_copy(update=none)
        data = data.model_copy(update=changed | {"weights_are_label_free": False})
    return read_ids_alone(data, settings.base_dir, contract.split, contract.ids)


def write_aligned(
    settings: PartySettings,
    data: PartyData,
    stamps: list[list[Any]],
    order: CommonOrder,
    output: Path,
    *,
    positions: bool = False,
) -> None:
    """Write the common rows in their order, or only their ids and positions in it.

    The stamps are the table's from before its ids were read.
    """
    rows = order.file_rows if data.kept is None else data.kept[order.file_rows]
    source, ordered = open_source(settings.data.source, settings.base_dir), np.sort(rows)
    names = settings.data.id_columns if positions else source.column_names()
    table = in_small_blocks(source, lambda some: _rows_of(some, ordered, names))
    if positions:
        table = table.append_column(_POSITION, _indices(np.argsort(rows)))
    if stamps_of(settings.data.source, settings.base_dir) != stamps:
        raise DataError(f"{data.table.source}: has changed since its ids were read: align again")
    with replacing(output) as file, writer_of(output, file, table.schema) as writer:
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            places = np.searchsorted(ordered, rows[first : first + _ROWS_AT_ONCE])
            writer.write_table(table.take(_indices(places)))


def _rows_of(source: TableSource, rows: NDArray[np.int64], names: Sequence[str]) -> Any:
    parts, done = [], 0
    for part in columns_in_parts(source, names):
        num_rows = len(next(iter(part.values())))
        first, last = np.searchsorted(rows, (done, done + num_rows))
        wanted = _indices(rows[first:last] - done)
        parts.append(pa.table({name: part[name].take(wanted) for name in names}))
        done += num_rows
    if done <= rows[-1]:
        raise DataError(f"{source.name}: has changed since its ids were read: align again")
    columns = dict(zip(names, pa.concat_tables(parts).columns, strict=True))
    del parts
    for name in names:
        # In one piece, because `take` looks for every row in all pieces. One column at a time, of
        # which nothing else holds the pieces, so that no more than one is in memory twice.
        columns[name] = columns[name].combine_chunks()
    return pa.table(columns)


def _indices(rows: NDArray[np.int64]) -> Any:
    return pa.array(rows, pa.int64())
