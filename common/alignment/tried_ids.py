"""How many ids each other party has tried on this one's, over all exchanges and all starts.

``alignment.max_set_size`` bounds one exchange. A peer that takes the tags and breaks off can come
again with other ids, and after enough rounds it knows every id of this party. So what it has tried
is added up, in a file that outlives the process, and beyond a few times ``max_set_size`` there is
no further exchange. An honest peer whose connection breaks brings the same ids again, which cannot
be told from others: the few times are for that.

An exchange is charged with all ids that the peer announces, before anything is sent that says
something of this party's; what was not answered is given back when the exchange ends, which a
process that is killed does not come to. A run that finishes starts the count anew.
"""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from splitveil.common.errors import AlignmentError, StorageError
from splitveil.common.party.party_settings import ALIGNMENT_ATTEMPTS
from splitveil.common.storage.run_folder import write_bytes_atomically

logger = logging.getLogger(__name__)

EXCHANGES_PER_ATTEMPT = 10
"""How many exchanges there may be for each of those times: most contracts allow large sets."""


class Answered(Protocol):
    """What has to be known of an exchange."""

    @property
    def peer_set_size(self) -> int:
        """How many ids the peer has announced."""

    @property
    def answered_ids(self) -> int:
        """How many of them were answered."""

    @property
    def is_complete(self) -> bool:
        """Whether it came to its end."""


class Tried(NamedTuple):
    """What one peer has tried."""

    ids: int = 0
    exchanges: int = 0


class TriedIds:
    """Counts for every peer. Any thread may ask.

    Args:
        max_set_size: most ids of one exchange.
        attempts: so many times that is what a peer may try in all.
        path: of the file with the count, None for one that ends with the process.

    Raises:
        StorageError: there is a file that cannot be read.
    """

    def __init__(
        self, max_set_size: int, attempts: int = ALIGNMENT_ATTEMPTS, path: Path | None = None
    ) -> None:
        self._max = Tried(attempts * max_set_size, attempts * EXCHANGES_PER_ATTEMPT)
        self._path = path
        self._tried = {} if path is None else _read(path)
        self._lock = threading.Lock()

    def of(self, peer: str) -> Tried:
        """Return what a peer has tried so far."""
        return self._tried.get(peer, Tried())

    @contextmanager
    def counted(self, peer: str, exchange: Answered) -> Iterator[None]:
        """Charge an exchange, and give back what was not answered once it is over.

        Args:
            peer: the other party's name.
            exchange: the peer's hello has come.

        Raises:
            AlignmentError: the peer has tried enough.
            StorageError: the count cannot be written.
        """
        announced = exchange.peer_set_size
        self._begin(peer, announced)
        try:
            yield
        finally:
            answered = exchange.answered_ids
            self._give_back(peer, announced - answered, is_void=not answered)
            if not exchange.is_complete:
                logger.warning(
                    "the exchange of ids with %s broke off; it has tried %s ids in %d exchanges, "
                    "of at most %s in %d",
                    peer,
                    f"{self.of(peer).ids:,}",
                    self.of(peer).exchanges,
                    f"{self._max.ids:,}",
                    self._max.exchanges,
                )

    def forget(self) -> None:
        """Start the count anew: the ids were exchanged for a run that has finished.

        A file that cannot be deleted is said so, and fails no run whose results are there.
        """
        with self._lock:
            self._tried = {}
            try:
                if self._path is not None:
                    self._path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s: cannot be deleted: %s", self._path, error.strerror)

    def _begin(self, peer: str, announced: int) -> None:
        with self._lock:
            before = self.of(peer)
            after = Tried(before.ids + announced, before.exchanges + 1)
            if after.ids > self._max.ids or after.exchanges > self._max.exchanges:
                raise AlignmentError(self._refusal(peer, before, announced))
            self._write({**self._tried, peer: after})

    def _give_back(self, peer: str, ids: int, *, is_void: bool) -> None:
        with self._lock:
            before = self.of(peer)
            # A count that was begun anew meanwhile holds nothing of this exchange.
            after = Tried(max(before.ids - ids, 0), max(before.exchanges - is_void, 0))
            if after == before:
                return
            try:
                self._write({**self._tried, peer: after})
            except StorageError as error:
                logger.warning("%s; what was not answered stays counted", error)

    def _write(self, tried: dict[str, Tried]) -> None:
        """Keep a count; in the file first, so that the process never knows less than it."""
        if self._path is not None:
            write_bytes_atomically(self._path, json.dumps(tried).encode(), 0o600)
        self._tried = tried

    def _refusal(self, peer: str, before: Tried, announced: int) -> str:
        where = "this process" if self._path is None else str(self._path)
        return (
            f"{peer} has tried {before.ids:,} ids in {before.exchanges} exchanges that led to no "
            f"finished run, and announces {announced:,} more: expected at most {self._max.ids:,} "
            f"(alignment_attempts times alignment.max_set_size) in {self._max.exchanges}. It may "
            f"be guessing ids; if its connection was only bad, delete the count: {where}"
        )


def file_of_count(folder: Path) -> Path:
    """Return where the count of a run is: beside its results, which a new beginning moves aside."""
    return folder.with_name(f".{folder.name}.tried-ids")


def _read(path: Path) -> dict[str, Tried]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return {str(peer): _tried(value) for peer, value in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(
            f"{path}: expected the count of the ids that each peer has tried; deleting it "
            f"lets every peer begin from zero"
        ) from error


def _tried(value: Any) -> Tried:
    ids, exchanges = value
    if type(ids) is not int or type(exchanges) is not int or min(ids, exchanges) < 0:
        raise ValueError(value)
    return Tried(ids, exchanges)
