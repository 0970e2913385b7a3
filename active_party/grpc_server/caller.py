"""What the active party knows of one passive party whose calls it answers."""

import threading
import time
from collections.abc import Callable

import grpc

from splitveil.active_party.grpc_server.stream_slots import StreamSlots
from splitveil.common.alignment import ExchangeFiles, StreamChannel
from splitveil.common.status.presence import Presence


class Caller:
    def __init__(
        self, name: str, presence: Presence, exchange_files: ExchangeFiles | None = None
    ) -> None:
        self.name = name
        self.exchange_files = exchange_files
        self._presence = presence
        self._has_outcome = False
        self._counting = threading.Lock()
        self._open_streams = 0
        self.heard_at = time.monotonic()
        self.aligning = threading.Lock()
        self.exchange_of_ids: StreamChannel | None = None
        self.align_slots = StreamSlots()
        self.train_slots = StreamSlots()
        self.evaluate_slots = StreamSlots()

    @property
    def is_talking(self) -> bool:
        """Whether a stream of this party is open, so that it can be told something."""
        return self._open_streams > 0 or self.exchange_of_ids is not None

    def hear(self) -> None:
        """Restart the clock of this party's silence."""
        self.heard_at = time.monotonic()

    def align_again(self) -> None:
        """Note that another exchange of ids begins."""
        self._has_outcome = False

    def is_aligned(self) -> None:
        """Note a message that shows that this party has the outcome of the exchange of ids."""
        if not self._has_outcome and self.exchange_files is not None:
            self.exchange_files.discard()
        self._has_outcome = True

    def arrive(self) -> None:
        self.hear()
        self._presence.heard(self.name)

    def opened_stream(self, context: grpc.ServicerContext, is_over: Callable[[], bool]) -> None:
        """Note that a stream of tensors is open; if the last one ends too early, the peer is lost.

        A killed peer's stream may look as if it had been closed.
        """

        def ended() -> None:
            with self._counting:
                self._open_streams -= 1
                is_last = self._open_streams == 0
            if is_last and not is_over():
                self._presence.lost(self.name)

        with self._counting:
            self._open_streams += 1
        if not context.add_callback(ended):
            ended()
