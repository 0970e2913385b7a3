"""A pool of worker processes for group operations; each batch is split evenly between them.

The workers are plain child processes with a pipe each instead of ``multiprocessing`` workers. Those
import the party's main module and with it PyTorch (seconds and hundreds of megabytes each), and
survive when the party is killed. These workers exit when their pipe closes.

Start the pool before opening the first gRPC channel: gRPC's threads and forking do not mix.
"""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from splitveil.common.alignment import ristretto
from splitveil.common.errors import SplitveilError


class GroupOperations(Protocol):
    """The operations that the engine needs, of one ``Ristretto`` or a ``WorkerPool`` of them."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        """Hash each digest to the group and multiply it by the scalar."""

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        """Multiply each point by the scalar, or raise NotInGroupError."""

    def close(self) -> None: ...


class WorkerPool:
    """The batch operations of ``Ristretto`` on several cores, for several threads at once."""

    def __init__(self, num_workers: int, library_name: str) -> None:
        self._workers = [_Worker(library_name) for _ in range(num_workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="align-worker")

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        return self._spread(ristretto.MASK, digests, ristretto.DIGEST_BYTES, scalar)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        return self._spread(ristretto.MULTIPLY, points, ristretto.POINT_BYTES, scalar)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _spread(self, operation: int, data: bytes, element_bytes: int, scalar: bytes) -> bytes:
        num_elements = len(data) // element_bytes
        part = max(1, -(-num_elements // len(self._workers)))

        def run(first: int) -> bytes:
            piece = data[first * element_bytes : (first + part) * element_bytes]
            try:
                return self._on_idle(lambda worker: worker.run(operation, piece, scalar))
            except ristretto.NotInGroupError as error:
                raise ristretto.NotInGroupError(first + error.position) from error

        return b"".join(self._threads.map(run, range(0, num_elements, part)))

    def _on_idle(self, work: Callable[["_Worker"], bytes]) -> bytes:
        worker = self._idle.get()
        try:
            return work(worker)
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self, library_name: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a file of ours
            [sys.executable, "-I", ristretto.__file__, library_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, operation: int, data: bytes, scalar: bytes) -> bytes:
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None:
            raise SplitveilError("an alignment worker has no pipe")
        try:
            requests.write(ristretto.REQUEST.pack(operation, scalar, len(data)) + data)
            requests.flush()
            header = replies.read(ristretto.REPLY.size)
        except OSError as error:
            raise SplitveilError("an alignment worker process ended unexpectedly") from error
        if len(header) < ristretto.REPLY.size:
            raise SplitveilError("an alignment worker process ended unexpectedly")
        position, length = ristretto.REPLY.unpack(header)
        if position >= 0:
            raise ristretto.NotInGroupError(position)
        return replies.read(length)

    def close(self) -> None:
        # Closes both pipes and waits. After a worker has died, buffered bytes cannot be flushed.
        with suppress(BrokenPipeError), self._process:
            pass
