"""A pool of threads for group operations; each batch is split evenly between them.

libsodium computes without the interpreter's lock, so that threads use as many cores.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from splitveil.common.alignment import ristretto


class GroupOperations(Protocol):
    """The operations that the engine needs, of one ``Ristretto`` or a ``WorkerPool``."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        """Hash each digest to the group and multiply it by the scalar."""

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        """Multiply each point by the scalar, or raise NotInGroupError."""


class WorkerPool:
    """The batch operations of a group on several cores, for several threads at once."""

    def __init__(self, num_workers: int, group: GroupOperations) -> None:
        self._group = group
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="align-worker")

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        return self._spread(self._group.mask, digests, ristretto.DIGEST_BYTES, scalar)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        return self._spread(self._group.multiply, points, ristretto.POINT_BYTES, scalar)

    def _spread(
        self,
        operation: Callable[[bytes, bytes], bytes],
        data: bytes,
        element_bytes: int,
        scalar: bytes,
    ) -> bytes:
        part = max(1, -(-len(data) // element_bytes // self._num_workers))

        def run(first: int) -> bytes:
            try:
                piece = data[first * element_bytes : (first + part) * element_bytes]
                return operation(piece, scalar)
            except ristretto.NotInGroupError as error:
                raise ristretto.NotInGroupError(first + error.position) from error

        return b"".join(self._threads.map(run, range(0, len(data) // element_bytes, part)))
