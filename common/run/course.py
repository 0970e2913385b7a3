"""The course of a run: which rows are handled when. Both parties derive it, neither receives it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from splitveil.common.errors import AlignmentError, DataError
from splitveil.common.run.contract import ColumnSplit, Contract, HashSplit
from splitveil.common.run.messages import BatchId
from splitveil.common.run.sample_order import (
    Positions,
    SampleOrder,
    canonical_order,
    keyed_id_digests,
    positions_digest,
    split_rows,
)
from splitveil.common.run.splits import SPLITS, SplitName

HELD_OUT: tuple[SplitName, ...] = ("validation", "test")


@dataclass(frozen=True)
class AlignedRows:
    """The common rows of both parties, in the common order.

    A *position* is a place in this order and means the same example on both sides.
    """

    file_rows: Positions
    """Row of this party's own file at each position, (aligned,)."""

    splits: dict[SplitName, Positions]
    """Positions of each split, disjoint, together all."""

    order: SampleOrder
    """The order in which the training positions are handled in each epoch."""

    @classmethod
    def derive(
        cls,
        contract: Contract,
        joint_seed: bytes,
        ids: Sequence[str],
        file_rows: Positions,
        file_splits: NDArray[np.int8] | None = None,
    ) -> "AlignedRows":
        """Put the rows of the intersection into the common order and split them.

        The order is that of the ids' hashes under the joint seed: independent of both files, and
        known to neither party before both nonces are.

        Args:
            contract: says how to split, and gives the batch size.
            joint_seed: made of both parties' nonces.
            ids: this party's canonical ids, all of them.
            file_rows: indices into ``ids`` of the common ones, in any order, (aligned,).
            file_splits: each row's place in ``SPLITS``, all of them, where the contract splits
                by a column.

        Raises:
            AlignmentError: there are too few common rows for a training and a test split.
        """
        digests = keyed_id_digests((ids[row] for row in file_rows), joint_seed)
        order = canonical_order(digests)
        match contract.split:
            case HashSplit() as shares:
                splits = _by_digest(shares, digests[order])
                wanted = {name for name in splits if getattr(shares, name)}
            case ColumnSplit() as split:
                splits = _by_column(split, file_rows[order], file_splits)
                wanted = {"train", "test"}
        empty = [name for name in splits if name in wanted and not len(splits[name])]
        if empty:
            raise AlignmentError(f"{len(order)} common ids leave no row for: {', '.join(empty)}")
        if contract.drop_last and len(splits["train"]) < contract.batch_size:
            raise AlignmentError(
                f"{len(splits['train'])} training rows make no batch of {contract.batch_size}, "
                f"and drop_last is on"
            )
        samples = SampleOrder(
            joint_seed, splits["train"], contract.batch_size, drop_last=contract.drop_last
        )
        return cls(file_rows[order], splits, samples)

    def total_steps(self, contract: Contract) -> int:
        """Return the training steps of the whole run, if nothing stops it early."""
        return self.order.steps_per_epoch * contract.epochs

    def __len__(self) -> int:
        return len(self.file_rows)


def _by_digest(shares: HashSplit, digests: NDArray[np.uint8]) -> dict[SplitName, Positions]:
    parts = split_rows(digests, shares.train, shares.validation, shares.test)
    return {"train": parts["train"], "validation": parts["validation"], "test": parts["test"]}


def _by_column(
    split: ColumnSplit, file_rows: Positions, file_splits: NDArray[np.int8] | None
) -> dict[SplitName, Positions]:
    if file_splits is None:
        raise DataError(f"contract.split: this party's table was read without {split.column!r}")
    said = file_splits[file_rows]
    train, validation, test = (np.flatnonzero(said == place) for place in range(len(SPLITS)))
    return {"train": train, "validation": validation, "test": test}


def place_in_words(epoch: int, step: int) -> str:
    """Return where a run is as people count, from 1; files, settings and messages count from 0."""
    return f"epoch {epoch + 1} step {step + 1}"


@dataclass(frozen=True)
class Batch:
    """One message's worth of rows."""

    epoch: int
    split: SplitName
    step: int
    """Number of the batch within the epoch's split, from 0."""

    positions: Positions
    digest: bytes
    closes_split: bool
    """Whether it is the last batch of its split in this epoch."""

    closes_epoch: bool
    """Whether it is the last batch of its epoch."""

    @property
    def key(self) -> tuple[int, SplitName, int]:
        """What names the batch within the run."""
        return (self.epoch, self.split, self.step)

    def identity(self, run_id: str) -> BatchId:
        """Return the identity that messages about this batch carry."""
        return BatchId(run_id, self.epoch, self.step, self.split, self.digest)


def run_course(contract: Contract, rows: AlignedRows, place: int = 0) -> Iterator[Batch]:
    """Yield the batches of a run: each epoch's training rows, then its held-out rows.

    Args:
        contract: gives batch sizes and epochs.
        rows: the common rows.
        place: how many batches to leave out, because they were handled before.
    """
    held_out = [name for name in HELD_OUT if len(rows.splits[name])]
    size = contract.evaluation_batch_size
    held_out_batches = sum(math.ceil(len(rows.splits[name]) / size) for name in held_out)
    first_epoch, left_out = divmod(place, rows.order.steps_per_epoch + held_out_batches)
    for epoch in range(first_epoch, contract.epochs):
        batches = _epoch(contract, rows, held_out, epoch)
        yield from islice(batches, left_out if epoch == first_epoch else 0, None)


def is_checkpoint(contract: Contract, rows: AlignedRows, batch: Batch) -> bool:
    """Tell whether both parties save where they are after a batch."""
    if batch.split != "train":
        return batch.closes_epoch
    steps = batch.epoch * rows.order.steps_per_epoch + batch.step + 1
    return steps % contract.checkpoints.every_steps == 0 and not batch.closes_split


def _epoch(
    contract: Contract, rows: AlignedRows, held_out: Sequence[SplitName], epoch: int
) -> Iterator[Batch]:
    yield from _batches(epoch, "train", list(rows.order.epoch(epoch)), closes_epoch=False)
    for name in held_out:
        positions, size = rows.splits[name], contract.evaluation_batch_size
        parts = [positions[i : i + size] for i in range(0, len(positions), size)]
        yield from _batches(epoch, name, parts, closes_epoch=name == held_out[-1])


def _batches(
    epoch: int, split: SplitName, parts: Sequence[Positions], *, closes_epoch: bool
) -> Iterator[Batch]:
    for step, positions in enumerate(parts):
        last = step == len(parts) - 1
        digest = positions_digest(positions)
        yield Batch(epoch, split, step, positions, digest, last, last and closes_epoch)
