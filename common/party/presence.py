"""Whether a peer is there: when it was heard last, and how often it was lost and came back."""

import threading
import time
from collections.abc import Callable

from splitveil.common.party.registry import Metrics


class Presence:
    """What one party sees of the peers to which it talks."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._heard_at: dict[str, float] = {}
        self._lost: set[str] = set()
        self._away: set[str] = set()
        self._connected = metrics.gauge(
            "peer_connected",
            "1 while the peer is there, 0 before its first message and while it is away.",
            ["peer"],
        )
        self._silence = metrics.gauge(
            "peer_silence_seconds", "Seconds since the peer's last message.", ["peer"]
        )
        self._losses = metrics.counter(
            "connection_losses", "Times that the connection to the peer broke off.", ["peer"]
        )
        self._returns = metrics.counter(
            "reconnects", "Times that a peer that was lost came back.", ["peer"]
        )

    def expect(self, peer: str) -> None:
        """Name a peer before it is heard, so that its series exist from the start."""
        self._connected.labels(peer).set(0)
        self._losses.labels(peer)
        self._returns.labels(peer)

    def heard(self, peer: str) -> None:
        now = self._clock()
        with self._lock:
            is_new = peer not in self._heard_at
            self._heard_at[peer] = now
            was_lost, was_away = peer in self._lost, peer in self._away
            self._lost.discard(peer)
            self._away.discard(peer)
        if was_lost:
            self._returns.labels(peer).inc()
        if was_lost or was_away or is_new:
            self._connected.labels(peer).set(1)
        if is_new:
            self._silence.labels(peer).set_function(lambda: self.silent_s(peer) or 0.0)

    def lost(self, peer: str) -> None:
        """Note that the peer does not answer, or that its stream broke off."""
        with self._lock:
            if peer in self._lost or peer not in self._heard_at:
                return
            self._lost.add(peer)
        self._losses.labels(peer).inc()
        self._connected.labels(peer).set(0)

    def left(self, peer: str) -> None:
        """Note that the peer has gone, as one does that has nothing to ask: that is no loss."""
        with self._lock:
            if peer in self._lost or peer not in self._heard_at:
                return
            self._away.add(peer)
        self._connected.labels(peer).set(0)

    def silent_s(self, peer: str) -> float | None:
        """Return the seconds since the peer's last message; None before the first one."""
        with self._lock:
            heard_at = self._heard_at.get(peer)
        return None if heard_at is None else self._clock() - heard_at

    def is_there(self, peer: str) -> bool:
        with self._lock:
            return peer in self._heard_at and peer not in self._lost | self._away
