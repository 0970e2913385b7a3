"""The course of a run: the order of its batches. Both parties derive it; neither receives it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from splitveil.common.errors import AlignmentError, DataError
from splitveil.common.run import sample_order
from splitveil.common.run.contract import (
    DTYPE_BYTES,
    TRANSFER_ROWS,
    ColumnSplit,
    Contract,
    HashSplit,
)
from splitveil.common.run.messages import BatchId

HELD_OUT: tuple[sample_order.SplitName, ...] = ("validation", "test")

MAX_EVALUATIONS_AHEAD = 16
EVALUATION_BYTES_AHEAD = 4 * 1024 * 1024  # what a line of 1 Gbit/s and a round trip of 30 ms holds


@dataclass(frozen=True)
class AlignedRows:
    """The common rows of all parties, in the common order.

    A *position* is an index into this order and means the same example at every party.
    """

    file_rows: sample_order.Positions  # row of this party's own file at each position, (aligned,)
    splits: dict[sample_order.SplitName, sample_order.Positions]
    """Positions of each split; disjoint, and together all positions."""

    order: sample_order.SampleOrder  # the order of the training positions in each epoch
    id_digests: NDArray[np.uint8]
    """Digest of the id at each position, keyed with the joint seed, (aligned, 16)."""
    own_rows: int = 0  # of this party's whole file

    @classmethod
    def derive(
        cls,
        contract: Contract,
        joint_seed: bytes,
        ids: Sequence[str],
        file_rows: sample_order.Positions,
        file_splits: NDArray[np.int8] | None = None,
    ) -> "AlignedRows":
        """Put the rows of the intersection into the common order and split them.

        ``file_splits`` has the index into ``SPLITS`` of every row of the file, if a column splits
        them.
        """
        file_rows, digests = sample_order.in_common_order(ids, file_rows, joint_seed)
        match contract.split:
            case HashSplit() as shares:
                splits = sample_order.split_rows(
                    digests, shares.train, shares.validation, shares.test
                )
                wanted = {name for name in splits if getattr(shares, name)}
            case ColumnSplit() as split:
                splits = _by_column(split, file_rows, file_splits)
                wanted = {"train", "test"}
        empty = [name for name in splits if name in wanted and not len(splits[name])]
        if empty:
            raise AlignmentError(f"{len(digests)} common ids leave no row for: {', '.join(empty)}")
        if contract.drop_last and len(splits["train"]) < contract.batch_size:
            raise AlignmentError(
                f"{len(splits['train'])} training rows do not fill a batch of "
                f"{contract.batch_size}, and drop_last is on"
            )
        samples = sample_order.SampleOrder(
            joint_seed, splits["train"], contract.batch_size, drop_last=contract.drop_last
        )
        return cls(file_rows, splits, samples, digests, len(ids))

    @classmethod
    def of_whole_table(cls, contract: Contract, num_rows: int) -> "AlignedRows":
        """Take all rows of a party that does not learn which are common."""
        rows, none = np.arange(num_rows), np.empty(0, np.int64)
        order = sample_order.SampleOrder(bytes(32), rows, contract.batch_size, drop_last=False)
        digests = np.zeros((num_rows, 16), np.uint8)
        return cls(rows, {"train": rows, "validation": none, "test": none}, order, digests)

    def total_steps(self, contract: Contract) -> int:
        """Return the number of training steps of the whole run, unless it stops early."""
        return self.order.steps_per_epoch * contract.epochs

    def digest_of(self, positions: sample_order.Positions) -> bytes:
        """Digest the ids at some positions, in this order; equal at parties that mean the same."""
        return sample_order.rows_digest(self.id_digests.take(positions, axis=0))

    def __len__(self) -> int:
        return len(self.file_rows)


def _by_column(
    split: ColumnSplit, file_rows: sample_order.Positions, file_splits: NDArray[np.int8] | None
) -> dict[sample_order.SplitName, sample_order.Positions]:
    if file_splits is None:
        raise DataError(f"contract.split: this party's table was read without {split.column!r}")
    said = file_splits[file_rows]
    train, validation, test = (
        np.flatnonzero(said == index) for index in range(len(sample_order.SPLITS))
    )
    return {"train": train, "validation": validation, "test": test}


def batch_in_words(epoch: int, step: int) -> str:
    """Return a batch's epoch and step, counted from 1; files and messages count them from 0."""
    return f"epoch {epoch + 1} step {step + 1}"


@dataclass(frozen=True)
class Batch:
    epoch: int
    split: sample_order.PassName
    step: int  # number of the batch within the epoch's split, from 0
    positions: sample_order.Positions
    digest: bytes  # keyed digest of the rows' ids
    closes_split: bool  # whether it is the last batch of its split in this epoch
    closes_epoch: bool  # whether it is the last batch of its epoch

    @property
    def is_answered(self) -> bool:
        """Whether the reply is a tensor that depends on labels."""
        return self.split in ("train", "labels", "transfer", "sums")

    @property
    def key(self) -> tuple[int, sample_order.PassName, int]:
        return (self.epoch, self.split, self.step)

    def identity(self, run_id: str) -> BatchId:
        return BatchId(run_id, self.epoch, self.step, self.split, self.digest)


def run_course(contract: Contract, rows: AlignedRows, batch_number: int = 0) -> Iterator[Batch]:
    """Yield the batches of a run: each epoch's training rows, then its held-out rows.

    A one-shot run has one epoch, with each row once.
    """
    held_out = [name for name in HELD_OUT if len(rows.splits[name])]
    if contract.is_one_shot:
        yield from islice(_one_shot(contract, rows, held_out), batch_number, None)
        return
    counts = (len(rows.splits[name]) for name in held_out)
    held_out_batches = sum(math.ceil(one / contract.evaluation_batch_size) for one in counts)
    first_epoch, left_out = divmod(batch_number, rows.order.steps_per_epoch + held_out_batches)
    for epoch in range(first_epoch, contract.epochs):
        batches = _epoch(contract, rows, held_out, epoch)
        yield from islice(batches, left_out if epoch == first_epoch else 0, None)


def _one_shot(
    contract: Contract, rows: AlignedRows, held_out: Sequence[sample_order.SplitName]
) -> Iterator[Batch]:
    size, train = contract.evaluation_batch_size, rows.splits["train"]
    passes: list[tuple[sample_order.PassName, Iterable[sample_order.Positions]]] = []
    if contract.releases_sums:
        passes += [("transfer", chain([train], _parts(train, TRANSFER_ROWS))), ("sums", [train])]
    elif contract.release is not None:
        passes.append(("labels", _parts(train, size)))
    passes.append(("activations", _parts(train, size)))
    passes += [(name, _parts(rows.splits[name], size)) for name in held_out]
    for name, parts in passes:
        yield from _batches(rows, 0, name, list(parts), closes_epoch=name == passes[-1][0])


def is_checkpoint(contract: Contract, rows: AlignedRows, batch: Batch) -> bool:
    if batch.split != "train":
        return batch.closes_epoch or (batch.is_answered and batch.closes_split)
    steps = batch.epoch * rows.order.steps_per_epoch + batch.step + 1
    return steps % contract.checkpoint_steps == 0 and not batch.closes_split


def needs_all_gradients(contract: Contract, rows: AlignedRows, batch: Batch) -> bool:
    """Return whether no activation may be computed before a training batch's gradient is there.

    So it is with ``pipeline_depth`` 1 after every batch, otherwise before an evaluation and before
    a checkpoint. It follows from the contract only, and so does the course of the weights.
    """
    is_last = batch.closes_split or is_checkpoint(contract, rows, batch)
    return contract.pipeline_depth == 1 or is_last


TRANSFERS_AHEAD = 4  # messages of an oblivious transfer that may wait for replies at once


def evaluations_ahead(contract: Contract) -> int:
    """Return how many activations of held-out rows may wait for replies at once, at least 2.

    Their weights do not change in between, so this changes no bit. It follows from the contract
    only, because the active party keeps as many replies as may be lost with a connection.
    """
    row_bytes = contract.cut_dim * DTYPE_BYTES[contract.cut_dtype]
    batches = EVALUATION_BYTES_AHEAD // (contract.evaluation_batch_size * row_bytes)
    return min(max(batches, 2), MAX_EVALUATIONS_AHEAD)


def _epoch(
    contract: Contract, rows: AlignedRows, held_out: Sequence[sample_order.SplitName], epoch: int
) -> Iterator[Batch]:
    yield from _batches(rows, epoch, "train", list(rows.order.epoch(epoch)), closes_epoch=False)
    for name in held_out:
        parts = list(_parts(rows.splits[name], contract.evaluation_batch_size))
        yield from _batches(rows, epoch, name, parts, closes_epoch=name == held_out[-1])


def _parts(positions: sample_order.Positions, size: int) -> Iterator[sample_order.Positions]:
    return (positions[start : start + size] for start in range(0, len(positions), size))


def _batches(
    rows: AlignedRows,
    epoch: int,
    split: sample_order.PassName,
    parts: Sequence[sample_order.Positions],
    *,
    closes_epoch: bool,
) -> Iterator[Batch]:
    for step, positions in enumerate(parts):
        last = step == len(parts) - 1
        digest = rows.digest_of(positions)
        yield Batch(epoch, split, step, positions, digest, last, last and closes_epoch)
