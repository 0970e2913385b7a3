"""Interfaces of alignment engines and exchanges, and the result of an alignment."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.alignment.store import ExchangeStore
from splitveil.protos.split_learning_pb2 import AlignFrame

RowIndices = npt.NDArray[np.int64]

Splits = npt.NDArray[np.int8]
"""The number of the split that this party's column gives each of its own ids."""


class CountedExchange(Protocol):
    """The part of an exchange from which the peer's ids are counted."""

    @property
    def peer_set_size(self) -> int:
        """The number of ids that the peer has, as it has announced."""

    @property
    def answered_ids(self) -> int:
        """The number of the peer's ids for which tags have been computed."""

    @property
    def number(self) -> str:
        """The number of a stored exchange, the same if it is resumed; empty if it is not stored."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will be sent or is expected."""


class AlignmentExchange(CountedExchange, Protocol):
    """The rules of one alignment: takes received frames, returns frames to send, does no I/O.

    ``own_frames`` is iterated in one thread while another thread calls ``receive``. Buckets are
    exchanged one after another.
    """

    @property
    def peer_nonce(self) -> bytes:
        """The peer's share of the joint seed, from its hello."""

    @property
    def done_ids(self) -> int:
        """The number of ids of both parties that have been processed, out of ``total_ids``."""

    @property
    def total_ids(self) -> int:
        """The number of ids of both parties."""

    def store_in(self, store: ExchangeStore) -> None:
        """Store the exchange, and resume the one that is stored; call it first of all."""

    def forget(self) -> None:
        """Delete what is stored."""

    def hello(self) -> AlignFrame:
        """Return the frame that opens the exchange."""

    def own_frames(self) -> Iterator[AlignFrame]:
        """Yield the frames that are sent unprompted; only after the peer's hello was received."""

    def receive(self, frame: AlignFrame) -> Iterable[AlignFrame]:
        """Process the peer's next frame and return the frames to send in reply."""

    @property
    def is_bucket_complete(self) -> bool:
        """Whether nothing more of this bucket will be sent or is expected."""

    def begin_next_bucket(self) -> None:
        """Go on to the next bucket, or raise AlignmentError."""

    def result(self) -> RowIndices:
        """Return the rows of the common ids, in the common order, or raise AlignmentError."""


class AlignmentEngine(Protocol):
    """Holds the resources that outlive one alignment."""

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> AlignmentExchange:
        """Start one alignment, with fresh keys."""


class Alignment(NamedTuple):
    """The outcome of one alignment."""

    rows: RowIndices  # this party's rows of the common ids, in the order that both parties share
    peer_nonce: bytes
    peer_set_size: int

    nonces: tuple[bytes, ...] = ()  # the nonces of all passive parties, if there is more than one


Counting = Callable[[AlignmentExchange], AbstractContextManager[None]]
"""Counts the ids that the peer tries once its hello has arrived; see ``TriedIds.counted``."""

Agree = Callable[[Alignment, AlignChannel], Alignment]
"""The step that two parties take between finding their common ids and closing the channel."""
