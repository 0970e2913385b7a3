"""Keeps finished predictions in parts, so that an interrupted command goes on where it stopped.

    predictions.parquet.parts/plan.json              what is predicted, and with which model
    predictions.parquet.parts/part-00000000.parquet  the first rows, and so on

The parts become the output in the end, and their folder is deleted. Predictions are about labels:
the files are readable by their owner only.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from splitveil.common.storage.run_folder import write_json_atomically
from splitveil.common.storage.table_output import refusing_to_write, replacing, writer_of

logger = logging.getLogger(__name__)

PART_ROWS = 2**17
"""Rows of a part: what an interrupted command has to do again at most."""

_PLAN = "plan.json"


class Plan(NamedTuple):
    """What is predicted. Parts of another plan are not continued."""

    ids_digest: str
    num_rows: int
    model: str
    """Identity and kind of the model."""
    source: str
    """Where the rows come from."""
    classes: tuple[str, ...]
    """Names of the classes; empty if there are two, or none."""
    within: tuple[float, float] | None = None
    """The bounds of a label that is a number; None if labels are classes."""

    def schema(self) -> pa.Schema:
        """Return the columns of the output."""
        if self.within is not None:
            names = ["value"]
        else:
            names = [f"probability_{name}" for name in self.classes] or ["probability"]
        columns = [pa.field(name, pa.float32()) for name in names]
        ids, found = (
            pa.field(name, kind, nullable=False)
            for name, kind in (("id", pa.string()), ("found", pa.bool_()))
        )
        return pa.schema([ids, *columns, found])


def digest_of_ids(ids: Sequence[str]) -> str:
    """Return a hexadecimal digest of ids in their order."""
    found = hashlib.sha256()
    for start in range(0, len(ids), PART_ROWS):
        found.update("\0".join([*ids[start : start + PART_ROWS], ""]).encode())
    return found.hexdigest()


class Parts:
    """The finished rows of one output.

    Args:
        output: the file that they will become.
        plan: what is predicted.
    """

    def __init__(self, output: Path, plan: Plan) -> None:
        """Open the parts of an interrupted command, or begin without any.

        Raises:
            StorageError: the folder cannot be used.
        """
        self.folder = output.with_name(f"{output.name}.parts")
        self._output = output
        self._plan = plan
        self._schema = plan.schema()
        with refusing_to_write(self.folder):
            if self._planned() != json.loads(json.dumps(plan._asdict())):
                if self.folder.exists():
                    logger.warning("%s: parts of another prediction: starting over", self.folder)
                    shutil.rmtree(self.folder)
                self.folder.mkdir(0o700)
                write_json_atomically(self.folder / _PLAN, plan._asdict())

    def missing(self) -> Iterator[slice]:
        """Yield the rows of each part that is not finished."""
        for start in range(0, self._plan.num_rows, PART_ROWS):
            if not self._path(start).exists():
                yield slice(start, min(start + PART_ROWS, self._plan.num_rows))

    def write(
        self,
        start: int,
        ids: Sequence[str],
        probabilities: NDArray[np.float32],
        found: NDArray[np.bool_],
    ) -> None:
        """Write a part.

        Args:
            start: its first row.
            ids: of its rows.
            probabilities: (rows,) or (rows, classes).
            found: whether a row has probabilities, (rows,).

        Raises:
            StorageError: it cannot be written.
        """
        columns = probabilities[:, None] if probabilities.ndim == 1 else probabilities
        arrays = [pa.array(ids, pa.string())]
        arrays += [pa.array(column, pa.float32(), mask=~found) for column in columns.T]
        table = pa.Table.from_arrays([*arrays, pa.array(found)], schema=self._schema)
        with replacing(self._path(start)) as file:
            parquet.write_table(table, file)

    def num_found(self) -> int:
        """Return the number of rows with a prediction; every part has to be finished."""
        found = (
            parquet.read_table(path, columns=["found"]).column("found") for path in self._paths()
        )
        return sum(int(np.count_nonzero(column.to_numpy())) for column in found)

    def join(self) -> None:
        """Write the output, and delete the parts; every part has to be finished.

        Raises:
            StorageError: the output cannot be written; the parts stay.
        """
        with replacing(self._output) as file, writer_of(self._output, file, self._schema) as writer:
            for path in self._paths():
                writer.write_table(parquet.read_table(path, schema=self._schema))
        with refusing_to_write(self.folder):
            shutil.rmtree(self.folder)

    def _planned(self) -> object:
        try:
            return json.loads((self.folder / _PLAN).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _paths(self) -> list[Path]:
        return [self._path(start) for start in range(0, self._plan.num_rows, PART_ROWS)]

    def _path(self, start: int) -> Path:
        return self.folder / f"part-{start // PART_ROWS:08d}.parquet"
