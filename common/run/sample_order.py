"""Derives the training order of examples; both parties derive it, and neither sends it.

Everything here is a pure function of the joint seed and of the aligned ids. Only SHA-256, BLAKE2b
and the raw output of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011) are used: numpy promises that a bit generator's output stays the same from version to version
and machine to machine, but not that of `Generator.permutation`.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

SplitName = Literal["train", "validation", "test"]

PassName = Literal["labels", "transfer", "sums", "activations", "train", "validation", "test"]
"""A pass over rows: over one split in each epoch. A one-shot run has no pass ``train``, but a
pass ``activations`` over the training rows; its noisy labels, if any, come down in the pass
``labels``, and its noisy sums in the pass ``sums``, after an oblivious transfer."""

SPLITS: tuple[SplitName, ...] = get_args(SplitName)
"""The names of the splits in a column; in memory, a split is its index into this tuple."""


Positions = npt.NDArray[np.int64]  # indices of examples in the common order, counted from 0
Splits = npt.NDArray[np.int8]  # the split of each of a party's own ids, as an index into ``SPLITS``
NONCE_BYTES = 32  # length of a party's share of the joint seed, and of the seed
ROWS_DIGEST_BYTES = 16  # length of a digest of a batch's ids
_ROWS_DOMAIN = b"splitveil rows 1"
_SEED_DOMAIN = b"splitveil joint seed v1"
_EPOCH_DOMAIN = b"splitveil sample order v1"
_ID_DOMAIN = b"splitveil id v1"


class SampleOrder:
    """The batches of every epoch: each position at most once per epoch, in a fresh order."""

    def __init__(
        self, seed: bytes, positions: Positions, batch_size: int, *, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"expected a batch size of at least 1, got {batch_size}")
        if positions.ndim != 1 or len(np.unique(positions)) != len(positions):
            raise ValueError("expected a one-dimensional array of positions, each at most once")
        whole, rest = divmod(len(positions), batch_size)
        self.batch_size = batch_size
        self.steps_per_epoch = whole + (1 if rest and not drop_last else 0)
        """Number of batches in an epoch."""
        if not self.steps_per_epoch:
            raise ValueError(f"{len(positions)} examples do not fill a batch of {batch_size}")
        self._seed = seed
        self._positions = positions.astype(np.int64, copy=True)
        self._shuffled: tuple[int, Positions] | None = None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The distinct numbers of rows of an epoch's batches, the last batch's last."""
        before = self.batch_size * (self.steps_per_epoch - 1)
        last = min(len(self._positions) - before, self.batch_size)
        return (self.batch_size, last) if before and last < self.batch_size else (last,)

    def epoch(self, epoch: int) -> Iterator[Positions]:
        return (self.batch(epoch, step) for step in range(self.steps_per_epoch))

    def batch(self, epoch: int, step: int) -> Positions:
        """Return one batch of one epoch, at most (batch_size,), or raise IndexError."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"expected a step below {self.steps_per_epoch}, got {step}")
        start = step * self.batch_size
        return self._shuffle(epoch)[start : start + self.batch_size]

    def _shuffle(self, epoch: int) -> Positions:
        if self._shuffled is None or self._shuffled[0] != epoch:
            key = hashlib.sha256(_EPOCH_DOMAIN + struct.pack("<Q", epoch) + self._seed).digest()
            philox = np.random.Philox(key=np.frombuffer(key, dtype="<u8", count=2))
            order = stable_order(philox.random_raw(len(self._positions)))
            shuffled = self._positions[order.astype(np.int64, copy=False)]
            shuffled.flags.writeable = False
            self._shuffled = (epoch, shuffled)
            return shuffled
        return self._shuffled[1]


def joint_seed(*nonces: bytes) -> bytes:
    """Hash the parties' nonces, in the contract's order of parties, to the 32-byte joint seed."""
    digest = hashlib.sha256(_SEED_DOMAIN)
    for nonce in nonces:
        digest.update(struct.pack("<Q", len(nonce)) + nonce)
    return digest.digest()


def rows_digest(id_digests: npt.NDArray[np.uint8]) -> bytes:
    """Return 16 bytes that differ if a batch means different ids to two parties."""
    data = np.ascontiguousarray(id_digests)
    return hashlib.blake2b(data.data, digest_size=ROWS_DIGEST_BYTES, person=_ROWS_DOMAIN).digest()


def keyed_id_digests(ids: Iterable[str], seed: bytes) -> npt.NDArray[np.uint8]:
    """Return one digest per id, (ids, 16), keyed with the joint seed.

    Ids can therefore not be chosen by their digests before the seed is known.
    """
    return np.frombuffer(keyed_digests(ids, seed, _ID_DOMAIN), dtype=np.uint8).reshape(-1, 16)


def keyed_digests(texts: Iterable[str], key: bytes, purpose: bytes) -> bytearray:
    """Return 16 bytes per text, one after another, which differ by key and by purpose."""
    keyed = hashlib.blake2b(digest_size=16, key=key, person=purpose)
    digests = bytearray()
    for text in texts:
        digest = keyed.copy()
        digest.update(text.encode())
        digests += digest.digest()
    return digests


def in_common_order(
    ids: Sequence[str], file_rows: Positions, joint_seed: bytes
) -> tuple[Positions, npt.NDArray[np.uint8]]:
    """Return common rows in the order of their ids' keyed digests, and these digests.

    That order does not depend on any file, and no party knows it before all nonces are known.
    """
    is_common = np.zeros(len(ids), dtype=np.bool_)
    is_common[file_rows] = True
    # Ids on disk are read in parts, which takes less than half the time of one after the other.
    digests = keyed_id_digests(compress(ids, is_common.tobytes()), joint_seed)
    halves = digests.view(">u8").astype(np.uint64)
    order = stable_order(halves[:, 0], halves[:, 1])
    return np.flatnonzero(is_common)[order], digests[order]


class CommonOrder(NamedTuple):
    """The rows that all parties have, in the order that is the same at all of them."""

    run_id: str  # of the run that found them
    file_rows: Positions  # this party's rows, (aligned,)
    fingerprint: str
    """Hexadecimal digest of the ids in their order under the joint seed: equal at all parties."""

    @classmethod
    def of(cls, run_id: str, ids: Sequence[str], file_rows: Positions, joint_seed: bytes) -> Self:
        rows, digests = in_common_order(ids, file_rows, joint_seed)
        return cls(run_id, rows, rows_digest(digests).hex())


def split_rows(
    digests: npt.NDArray[np.uint8], train: float, validation: float, test: float
) -> dict[SplitName, Positions]:
    """Assign each row to a split by the digest of its id; the positions, ascending."""
    fractions = (train, validation, test)
    if min(fractions) < 0 or not math.isclose(sum(fractions), 1.0):
        raise ValueError(f"expected fractions that add up to 1, got {fractions}")
    leading = np.ascontiguousarray(digests[:, :8]).view(">u8")[:, 0]
    uniform = (leading >> np.uint64(11)) * 2.0**-53  # in [0, 1), without rounding
    # The bound is counted from the end, so that test = 0 leaves no test rows.
    chosen = np.searchsorted([train, max(train, 1.0 - test)], uniform, side="right")
    return {name: np.flatnonzero(chosen == number) for number, name in enumerate(SPLITS)}


def stable_order(
    drawn: npt.NDArray[np.uint64], *ties: npt.NDArray[np.uint64]
) -> npt.NDArray[np.intp]:
    """Return the indices that sort numbers, equal ones by ``ties`` and then in their own order.

    Sorting without regard to equal ones takes a quarter of the time.
    """
    order = np.argsort(drawn)
    ordered = drawn[order]
    if (ordered[1:] == ordered[:-1]).any():
        return np.lexsort((*ties, drawn))
    return order
