"""The messages of a run, in the project's own words: no protobuf, no gRPC, no disk.

Both state machines speak in these types. ``splitveil.common.wire`` translates them to bytes and
back, and nothing else does.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

from splitveil.common.run.sample_order import PassName

if TYPE_CHECKING:
    from torch import Tensor

DefendedGradient = NewType("DefendedGradient", "Tensor")
"""A gradient that may leave the active party, or that has left it.

Only defenses create one, and the decoder of what has arrived at the passive party. An ``Answer``
carries nothing else, so mypy refuses code that would send a raw gradient.
"""


class BatchId(NamedTuple):
    run_id: str
    epoch: int
    step: int  # number of the batch within the epoch's split, from 0
    split: PassName
    rows_digest: bytes
    """Keyed digest of the rows' ids, to notice that the parties mean different rows."""


@dataclass(frozen=True)
class Activation:
    """The passive party's output at the cut layer for one batch."""

    batch: BatchId
    values: Tensor  # (rows, *cut_shape); of a party without a network, an array


@dataclass(frozen=True)
class Answer:
    """The active party's reply to a training activation, or one passive party's part of it."""

    batch: BatchId
    values: DefendedGradient  # (rows, *cut_shape)


def bytes_of(values: Tensor | NDArray[np.uint8]) -> bytes:
    """Return the bytes of a message of an oblivious transfer."""
    return np.asarray(values).tobytes()


def tensor_of(message: bytes) -> Tensor:
    """Return bytes as the values of an activation or an answer, (bytes,) uint8."""
    import torch  # noqa: PLC0415 - what reads ids uses this module, too, and needs no torch

    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


class Course(Enum):
    """The active party's reply to held-out activations."""

    CONTINUE = "continue"
    STOP = "stop"  # the run ends here; only on the last batch of an epoch


class Offer(NamedTuple):
    """A run that a passive party can resume."""

    run_id: str
    batch_numbers: frozenset[int]  # numbers of batches after which it has a checkpoint


class Opening(NamedTuple):
    """The active party's reply to a handshake."""

    run_id: str
    contract_digest: bytes  # SHA-256 of the active party's canonical contract
    nonce: bytes  # the active party's share of the joint seed
    resumes_at: int | None = None
    """Number of batches done where all parties resume; None for a new run."""

    commitments: tuple[bytes, ...] = ()
    """Commitments to the nonces of all passive parties, if there is more than one."""


class LeaveReason(Enum):
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    ALIGNMENT_FAILED = "alignment failed"
    FAILED = "failed"


ID_MARKS = string.punctuation.replace("~", "") + " "
# The kinds of characters that are compared, each with its pattern in RE2's syntax.
ID_CHARACTERS = {mark: re.escape(mark) for mark in ID_MARKS} | {
    "0": r"\p{Nd}",
    "A": r"\p{Lu}",
    "a": r"\p{Ll}",
    "~": r"[^\x00-\x7f]",
}


class IdForm(NamedTuple):
    """The notation of a party's ids, as ``protos`` explains it."""

    most: str = ""
    some: str = ""
    length: int = 0
    hexadecimal: bool = False
    leading_zeros: bool = False
    decimal_point: bool = False
    shortened: bool = False

    @property
    def characters(self) -> frozenset[str]:
        """The kinds of characters that more than a few of the ids have."""
        return frozenset(self.most + self.some)

    @property
    def has_letters(self) -> bool:
        """Whether more than a few of the ids have letters."""
        return not self.characters.isdisjoint("Aa")


class ModelIdentity(NamedTuple):
    """The training that produced a party's half of the model."""

    run_id: str
    batch_number: int  # number of batches of the run's course that the weights have seen

    def __str__(self) -> str:
        return f"run {self.run_id} after {self.batch_number:,} batches"


class Embedded(NamedTuple):
    """A passive party's answer about some ids."""

    known: NDArray[np.bool_]  # whether it answers for an id, (ids,)
    values: Tensor
    """The activations of the known ids only, in their order, (known ids, *cut_shape); of a party
    without a network, an array."""
