"""The engine ``rr22`` and its exchanges: a worker gets hashed ids, and frames carry its bytes.

Both parties hash their ids with a key that follows from the run and both nonces, so that hashes of
one exchange say nothing about another, and give them to their workers. The common order is that of
the common hashes. What a worker writes is checked against this party's own ids, and both
parties' results against each other, as in every engine.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from splitveil.common.alignment.hello import check_hello
from splitveil.common.alignment.interface import RowIndices, Splits
from splitveil.common.alignment.kept import ExchangeFiles
from splitveil.common.alignment.outcome import Sizes, agreed_rows, check_digests
from splitveil.common.alignment.rr22.process import Worker
from splitveil.common.alignment.rr22.tunnel import Tunnel
from splitveil.common.alignment.sorted_tags import SortedTags, Tags
from splitveil.common.alignment.tag_lists import TAG
from splitveil.common.alignment.tag_sets import CommonRows
from splitveil.common.data.ids import NORMALISATION
from splitveil.common.data.stored_ids import encoded
from splitveil.common.errors import AlignmentError, InvalidMessage, OutOfStep, SplitveilError
from splitveil.common.party.loopback_ports import free_port
from splitveil.common.wire.limits import TAG_BYTES
from splitveil.protos import split_learning_pb2 as pb

ENGINE = "rr22-spu"
VERSION = 1

_DOMAIN = b"splitveil alignment rr22 1\x00"
_BEAT_S = 2.0
_LEAST_TIME_S, _TIME_PER_ID_S = 300.0, 1e-3
_LEAST_BYTES, _BYTES_PER_ID = 64 * 2**20, 256


class RunningWorker(Protocol):
    """What an exchange asks of a worker; see ``Worker``."""

    def wait(self) -> int:
        """Wait until it has ended."""

    def common(self) -> Tags:
        """Return the tags that both parties have."""

    def close(self) -> None:
        """End it, and delete what it has written."""


StartWorker = Callable[[int, Sequence[int], Tags], RunningWorker]
"""Starts a worker with a rank, both ranks' ports and this party's tags."""


class Rr22Engine:
    """Starts exchanges.

    Args:
        python: the interpreter that has spu; see ``check_interpreter``.
        min_aligned: the smallest intersection that is accepted.
        max_set_size: the largest set that is accepted from either party.
        start_worker: starts another worker, in tests.
    """

    def __init__(
        self,
        *,
        python: Path,
        min_aligned: int,
        max_set_size: int,
        start_worker: StartWorker | None = None,
    ) -> None:
        def start(rank: int, ports: Sequence[int], tags: Tags) -> RunningWorker:
            return Worker(python, rank, ports, tags)

        self._start_worker = start_worker or start
        self._min_aligned = min_aligned
        self._max_set_size = max_set_size

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> "Rr22Exchange":
        """Start one alignment.

        Args:
            ids: from ``canonical_ids``.
            nonce: this party's share of the joint seed.
            run_id: from the handshake.
            splits: the split that this party's column gives each id, if there is such a column.

        Raises:
            AlignmentError: the set is empty or larger than the contract allows.
        """
        if not 0 < len(ids) <= self._max_set_size:
            raise AlignmentError(f"expected 1 to {self._max_set_size} own ids, got {len(ids)}")
        hello = pb.AlignHello(
            engine=ENGINE,
            version=VERSION,
            normalisation=NORMALISATION,
            tag_bytes=TAG_BYTES,
            set_size=len(ids),
            nonce=nonce,
            run_id=run_id,
        )
        return Rr22Exchange(
            ids, hello, self._start_worker, (self._min_aligned, self._max_set_size), splits
        )

    def close(self) -> None:
        """Do nothing: every exchange ends its own worker."""


class Rr22Exchange:
    """One alignment; ``own_frames`` is iterated in one thread, and ``receive`` called in another.

    Args:
        ids: from ``canonical_ids``.
        hello: this party's.
        start_worker: starts the worker once the peer's hello is here.
        limits: the smallest intersection and the largest set that are accepted.
        splits: of this party's rows, if the contract splits by a column.
    """

    def __init__(
        self,
        ids: Sequence[str],
        hello: pb.AlignHello,
        start_worker: StartWorker,
        limits: tuple[int, int],
        splits: Splits | None,
    ) -> None:
        self._ids = ids
        self._hello = hello
        self._start_worker = start_worker
        self._min_aligned, self._max_set_size = limits
        self._splits = splits
        self._peer_hello: pb.AlignHello | None = None
        self._tunnel: Tunnel | None = None
        self._worker: RunningWorker | None = None
        self._tags: Tags = np.empty(0, np.bytes_)
        self._has_sent = False
        self._found: CommonRows | None = None
        self._own_done: pb.AlignDone | None = None
        self._peer_done: pb.AlignDone | None = None
        self._ended = threading.Event()
        """Set when this party's worker has a result, or never will."""
        self._until = 0.0

    @property
    def peer_nonce(self) -> bytes:
        """The peer's share of the joint seed, from its hello."""
        return self._require_hello().nonce

    @property
    def peer_set_size(self) -> int:
        """The number of ids that the peer has."""
        return int(self._require_hello().set_size)

    @property
    def announced_ids(self) -> int:
        """The number of the peer's ids that are exchanged: all of them."""
        return self.peer_set_size

    @property
    def done_ids(self) -> int:
        """The number of ids of both parties that have been processed: all of them, or none."""
        return self.total_ids if self._found is not None else 0

    @property
    def total_ids(self) -> int:
        """The number of ids of both parties together."""
        return len(self._ids) + self.peer_set_size

    @property
    def answered_ids(self) -> int:
        """The number of ids that the peer may have learned about: all, once bytes were sent."""
        return self.peer_set_size if self._has_sent else 0

    @property
    def number(self) -> str:
        """Empty, because no such exchange is kept."""
        return ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will be sent or is expected."""
        return self._own_done is not None and self._peer_done is not None

    def keep_in(self, files: ExchangeFiles) -> None:
        """Delete what another engine has kept: an exchange of this one begins afresh."""
        files.discard()

    def forget(self) -> None:
        """Do nothing: nothing is kept."""

    def close(self) -> None:
        """Kill the worker, delete its files, and close its connections."""
        self._ended.set()
        if self._worker is not None:
            self._worker.close()
        if self._tunnel is not None:
            self._tunnel.close()

    def hello(self) -> pb.AlignFrame:
        """Return the frame that opens the exchange."""
        return pb.AlignFrame(hello=self._hello)

    def own_frames(self) -> Iterator[pb.AlignFrame]:
        """Yield the worker's bytes until it has ended, then what this party has found.

        Raises:
            SplitveilError: the worker has failed, or takes too long.
        """
        tunnel, worker = self._running()
        while (frame := tunnel.next(_BEAT_S)) is not None:
            if time.monotonic() > self._until:
                worker.close()  # so that nobody waits for it to take bytes
                raise SplitveilError("the rr22 worker took too long, and was ended")
            self._has_sent |= bool(frame.data)
            yield pb.AlignFrame(tunnel=frame)
        if self._ended.is_set():
            return  # the other thread has failed, and has closed everything
        try:
            self._found = self._rows_of(worker.common())
            self._own_done = pb.AlignDone(
                count=len(self._found.rows),
                digest=self._found.digest.digest(),
                split_digest=self._found.split_digest(self._splits),
            )
        finally:
            self._ended.set()
        yield pb.AlignFrame(done=self._own_done)

    def receive(self, frame: pb.AlignFrame) -> Iterable[pb.AlignFrame]:
        """Process the peer's next frame.

        Raises:
            AlignmentError: the peer uses another engine or other parameters.
            InvalidMessage, OutOfStep, TooLarge: the peer broke a rule of the protocol.
            SplitveilError: this party's worker cannot be started.
        """
        match frame.WhichOneof("body"):
            case "hello":
                self._begin(frame.hello)
            case "tunnel":
                self._running()[0].receive(frame.tunnel)
            case "done":
                self._receive_done(frame.done)
            case _:
                raise InvalidMessage("the alignment frame is empty, or of another engine")
        return ()

    def result(self) -> RowIndices:
        """Return the rows of the common ids, in the order that both parties share.

        Raises:
            AlignmentError: the parties disagree, or have too few ids in common.
            OutOfStep: the exchange is not complete.
        """
        sizes = Sizes(len(self._ids), self.peer_set_size, self._min_aligned)
        rows = None if self._found is None else self._found.rows
        return agreed_rows(sizes, rows, self._own_done, self._peer_done)

    def _begin(self, peer: pb.AlignHello) -> None:
        own = self._hello
        if self._peer_hello is not None:
            raise OutOfStep("received a second alignment hello")
        check_hello(own, peer, self._max_set_size)
        if peer.nonce == own.nonce:
            raise InvalidMessage("the other party has sent this party's own nonce back")
        self._peer_hello = peer
        nonces = sorted((own.nonce, peer.nonce))
        self._tags = tags_of(self._ids, own.run_id, nonces)
        total = self.total_ids
        self._until = time.monotonic() + _LEAST_TIME_S + _TIME_PER_ID_S * total
        worker_port = free_port()
        self._tunnel = Tunnel(worker_port, _LEAST_BYTES + _BYTES_PER_ID * total)
        rank = nonces.index(own.nonce)
        ports = [worker_port, self._tunnel.port]
        self._worker = self._start_worker(rank, ports if rank == 0 else ports[::-1], self._tags)
        waiting = threading.Thread(target=self._worker.wait, name="rr22-wait", daemon=True)
        waiting.start()
        threading.Thread(
            target=self._tunnel.end_with, args=(waiting,), name="rr22-end", daemon=True
        ).start()

    def _receive_done(self, done: pb.AlignDone) -> None:
        self._running()
        if self._peer_done is not None:
            raise OutOfStep("the other party is done twice")
        check_digests(done)
        # The peer's worker has ended, and with it the bytes that this party's waits for.
        self._ended.wait(max(self._until - time.monotonic(), 0.0))
        if self._own_done is None:
            raise SplitveilError("the rr22 worker found nothing although the other party's did")
        self._peer_done = done

    def _rows_of(self, common: Tags) -> CommonRows:
        """Look up the tags that the worker found; a tag that is not of an own id is its error."""
        found, own = SortedTags(common), SortedTags(self._tags)
        places = own.find(found)
        if found.has_repeats or (places < 0).any():
            raise SplitveilError("the rr22 worker's result holds other ids than this party's")
        return CommonRows(own.order[places], hashlib.sha256(found.tags.tobytes()))

    def _running(self) -> tuple[Tunnel, RunningWorker]:
        self._require_hello()
        if self._tunnel is None or self._worker is None:
            raise OutOfStep("the alignment hello was refused")
        return self._tunnel, self._worker

    def _require_hello(self) -> pb.AlignHello:
        if self._peer_hello is None:
            raise OutOfStep("expected an alignment hello before anything else")
        return self._peer_hello


def tags_of(ids: Sequence[str], run_id: str, nonces: Sequence[bytes]) -> Tags:
    """Return the keyed hash of each id, (ids,).

    Args:
        ids: from ``canonical_ids``.
        run_id: from the handshake.
        nonces: of both parties, in their order as bytes.
    """
    key = hashlib.sha256(_DOMAIN + run_id.encode() + b"\x00" + b"".join(nonces))
    tags, copy = bytearray(), key.copy
    for text in encoded(ids):
        state = copy()
        state.update(text)
        tags += state.digest()[:TAG_BYTES]
    return np.frombuffer(tags, TAG)
