"""Counts the ids that each peer has tried against this party's, over all exchanges and restarts.

``alignment.max_set_size`` bounds one exchange. A peer that takes the tags and disconnects can
return with other ids, and after enough rounds it knows every id of this party. The ids that it has
tried are therefore added up in a file that outlives the process, and beyond a small multiple of
``max_set_size`` no further exchange is accepted. An honest peer whose connection breaks sends the
same ids again, which look no different from new ones: the multiple allows for that.

An exchange is charged with all ids that the peer announces, before anything is sent that reveals
something about this party's ids. Ids that were not answered are refunded when the exchange ends,
but not if the process is killed. A run that finishes resets the count.

An exchange that is resumed asks about the same ids, because it has the same points and commitments:
its ids are charged once, whatever number of connections it takes. As an exchange it counts again
once a tag was shown, because each start draws the joint seed anew, and a peer should not be able to
draw until it likes the seed.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from splitveil.common.alignment.ecdh import EcdhExchange
from splitveil.common.errors import AlignmentError, StorageError
from splitveil.common.party.party_settings import ALIGNMENT_ATTEMPTS
from splitveil.common.record.run_folder import write_bytes_atomically

logger = logging.getLogger(__name__)

EXCHANGES_PER_ATTEMPT = 10
"""Largest number of exchanges per attempt. Bounding ids alone is not enough, because most contracts
allow large sets."""


class Tried(NamedTuple):
    """The number of ids that one peer has tried, and in how many exchanges."""

    ids: int = 0
    exchanges: int = 0


class _Count(NamedTuple):
    ids: NonNegativeInt = 0
    exchanges: NonNegativeInt = 0
    exchange: str = ""  # number of the last exchange that can be resumed
    charged: NonNegativeInt = 0  # ids that were charged for it

    def without(self, number: str) -> int:
        """Return the ids that were tried in all other exchanges than the one of this number."""
        return self.ids - (min(self.charged, self.ids) if number == self.exchange != "" else 0)


_COUNTS = TypeAdapter(dict[str, _Count], config=ConfigDict(strict=True))


class TriedIds:
    """The counts of every peer, in a file or in this process. Thread-safe.

    A peer may try ``attempts`` times ``max_set_size`` ids in all.
    """

    def __init__(
        self, max_set_size: int, attempts: int = ALIGNMENT_ATTEMPTS, path: Path | None = None
    ) -> None:
        self._max = Tried(attempts * max_set_size, attempts * EXCHANGES_PER_ATTEMPT)
        self._path = path
        self._counts = {} if path is None else _read(path)
        self._lock = threading.Lock()

    def of(self, peer: str) -> Tried:
        return Tried(*self._count_of(peer)[:2])

    @contextmanager
    def counted(self, peer: str, exchange: EcdhExchange) -> Iterator[None]:
        """Charge an exchange after the peer's hello, and refund unanswered ids when it is over."""
        announced, number = exchange.peer_set_size, exchange.number
        self._charge(peer, announced, number)
        try:
            yield
        finally:
            self._refund(peer, announced, exchange.answered_ids, number)
            if not exchange.is_complete:
                logger.warning(
                    "the exchange of ids with %s broke off; it has now tried %s ids in %d "
                    "exchanges, of at most %s in %d",
                    peer,
                    f"{self.of(peer).ids:,}",
                    self.of(peer).exchanges,
                    f"{self._max.ids:,}",
                    self._max.exchanges,
                )

    def charge(self, peer: str, num_ids: int) -> None:
        """Charge ids that are about to be answered, in no exchange of both parties' ids."""
        self._charge(peer, num_ids, "", exchanges=0)

    def forget(self) -> None:
        """Reset all counts, because the ids were exchanged for a run that has finished.

        A file that cannot be deleted is reported and does not fail a run that has its results.
        """
        with self._lock:
            self._counts = {}
            try:
                if self._path is not None:
                    self._path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s: cannot be deleted: %s", self._path, error.strerror)

    def _count_of(self, peer: str) -> _Count:
        return self._counts.get(peer, _Count())

    def _charge(self, peer: str, announced: int, number: str, exchanges: int = 1) -> None:
        with self._lock:
            before = self._count_of(peer)
            others = before.without(number)
            ids, exchanges = others + announced, before.exchanges + exchanges
            if ids > self._max.ids or exchanges > self._max.exchanges:
                where = "this process" if self._path is None else str(self._path)
                raise AlignmentError(
                    f"{peer} has tried {others:,} ids in {before.exchanges} exchanges without "
                    f"finishing a run, and announces {announced:,} more: expected at most "
                    f"{self._max.ids:,} (alignment_attempts times alignment.max_set_size) in "
                    f"{self._max.exchanges}. It may be guessing ids; if only its connection was "
                    f"bad, or it asks for predictions, raise alignment_attempts or delete the "
                    f"count: {where}"
                )
            self._write({**self._counts, peer: _Count(ids, exchanges, number, announced)})

    def _refund(self, peer: str, announced: int, answered: int, number: str) -> None:
        with self._lock:
            before = self._count_of(peer)
            # A count that was reset meanwhile no longer includes this exchange.
            ids = max(before.ids - (announced - answered), 0)
            exchanges = max(before.exchanges - (not answered), 0)
            if (ids, exchanges) == before[:2]:
                return
            after = _Count(ids, exchanges, number, min(answered, ids))
            try:
                self._write({**self._counts, peer: after})
            except StorageError as error:
                logger.warning("%s; the unanswered ids stay counted", error)

    def _write(self, counts: dict[str, _Count]) -> None:
        """Store the counts, in the file first, so that a failed write changes neither."""
        if self._path is not None:
            write_bytes_atomically(self._path, _COUNTS.dump_json(counts), mode=0o600)
        self._counts = counts


def file_of_count(folder: Path) -> Path:
    """Return the path of a run's count: beside its results, which starting over moves aside."""
    return folder.with_name(f".{folder.name}.tried-ids")


def _read(path: Path) -> dict[str, _Count]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _COUNTS.validate_json(text)
    except ValidationError as error:
        raise StorageError(
            f"{path}: expected the number of ids that each peer has tried; deleting the file "
            f"resets every peer's count to zero"
        ) from error
