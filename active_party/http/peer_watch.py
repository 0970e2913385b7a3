"""Knows whether the passive parties answer now, and with which model."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

from splitveil.active_party.http.online_status import OnlineStatus
from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.common.errors import SplitveilError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
RETRY_EVERY_S = 0.5
CHECK_TIMEOUT_S = 5.0


class Trouble(NamedTuple):
    """Why the joint model cannot answer."""

    reason: str
    since: float


class PeerWatch:
    """Asks passive parties which model they serve until all serve the right one, in a thread.

    Whoever notices that one is away calls ``lost``; a stream that ends is noticed here. Requests
    are then refused at once, until all have been asked again.
    """

    def __init__(self, clients: Sequence[EmbedClient], status: OnlineStatus) -> None:
        self._clients = clients
        self._status = status
        self._trouble: Trouble | None = Trouble("no passive party was asked yet", time.monotonic())
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(len(clients), thread_name_prefix="peer-check")
        self._thread = threading.Thread(target=self._work, name="peer-watch", daemon=True)

    def __enter__(self) -> Self:
        self._check()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._pool.shutdown()

    @property
    def trouble(self) -> Trouble | None:
        """Why the joint model cannot answer now; None if it can."""
        return self._trouble

    def lost(self, error: Exception) -> None:
        with self._lock:
            if self._trouble is None:
                self._trouble = Trouble(str(error), time.monotonic())
                logger.warning("the joint model cannot answer: %s", error)

    def _work(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            for client in self._clients:
                if client.has_lost_stream:
                    self._status.peers.lost(client.party)
                    self.lost(SplitveilError(f"passive party {client.party!r} is away"))
            if self._trouble is not None and not self._check():
                self._ended.wait(RETRY_EVERY_S)

    def _check(self) -> bool:
        """Ask all passive parties at the same time, and return whether the joint model answers."""
        reasons = [reason for reason in self._pool.map(self._reason_of, self._clients) if reason]
        if reasons:
            self._note("; ".join(reasons))
            return False
        with self._lock:
            self._trouble = None
        logger.info("all passive parties serve the model: the joint model answers")
        return True

    def _reason_of(self, client: EmbedClient) -> str | None:
        """Return why a passive party cannot be asked now, or None."""
        try:
            client.connection.renew()  # certificates may have been replaced meanwhile
            client.check_model(CHECK_TIMEOUT_S)
            client.open_stream()
        except Exception as error:
            # Over a line that was dead for a while, the old connection would need as long again to
            # notice that it is back; a new one does not.
            client.disconnect()
            self._status.peers.lost(client.party)
            if isinstance(error, SplitveilError):
                self._status.note_failed_call(error)
                return f"passive party {client.party!r}: {error}"
            logger.exception("fault while a passive party was asked for its model")
            return f"passive party {client.party!r}: {type(error).__name__}"
        self._status.peers.heard(client.party)
        return None

    def _note(self, reason: str) -> None:
        with self._lock:
            before = self._trouble
            if before is None or before.reason != reason:
                logger.warning("the joint model cannot answer: %s", reason)
            self._trouble = Trouble(reason, time.monotonic() if before is None else before.since)
