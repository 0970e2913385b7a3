"""The line between the processes of one party that compute a model together.

Rank 0 is the party: it alone has data, optimizer, connection and run folder. The other ranks, its
workers, compute shares of its batches. Tensors alone travel, over gloo and never pickled, and they
are neither encrypted nor authenticated: the line is for one machine, or for a network that belongs
to the party alone.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from splitveil.common.errors import SplitveilError

_AS_LONG_AS_IT_TAKES = timedelta(days=365)
"""Between two messages the other party's alignment may lie; a rank that dies is noticed at once."""
_FIND_EACH_OTHER_WITHIN = timedelta(minutes=10)
_ANSWERS_WITHIN = timedelta(seconds=20)


OrderKind = Literal["begin", "forward", "inputs", "weights", "ping", "end"]


class Order(NamedTuple):
    """What rank 0 wants a worker to do; what is needed for it follows."""

    kind: OrderKind
    number: int = 0
    """Of the batch."""

    rows: int = 0
    """The worker's rows of the batch; of ``begin``, the bytes of the facts that follow."""


_KINDS: tuple[OrderKind, ...] = ("begin", "forward", "inputs", "weights", "ping", "end")


class WorkerLost(SplitveilError):
    """Another process of this party is gone."""


def _raise_lost(error: Exception) -> NoReturn:
    raise WorkerLost(f"another process of this party is gone: {error}") from error


class WorkerLine:
    """Sends and receives tensors between rank 0 and its workers.

    Args:
        rank: of this process.
        size: number of processes, rank 0 included.
        on_lost: what to do if a process is gone; by default WorkerLost is raised.
    """

    def __init__(
        self, rank: int, size: int, on_lost: Callable[[Exception], NoReturn] = _raise_lost
    ) -> None:
        self.rank = rank
        self.size = size
        self.lock = threading.RLock()
        """Held by rank 0 while it and its workers do one thing together."""
        self._on_lost = on_lost
        self._is_open = True

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        on_lost: Callable[[Exception], NoReturn] = _raise_lost,
        attempt: int = 0,
        file: Path | None = None,
    ) -> "WorkerLine":
        """Wait for all processes, which find each other where the environment says, or in a file.

        ``attempt`` counts the starts of all processes: the place where they meet may outlive them
        and holds the addresses of those before. Nobody else may open ``file``. Raises WorkerLost.
        """
        try:
            if file is None:
                found = rendezvous("env://", rank, size, timeout=_FIND_EACH_OTHER_WITHIN)
                store, _, _ = next(found)
            else:
                store = dist.FileStore(str(file), size)  # type: ignore[attr-defined]
                store.set_timeout(_FIND_EACH_OTHER_WITHIN)
            dist.init_process_group(
                "gloo",
                rank=rank,
                world_size=size,
                timeout=_FIND_EACH_OTHER_WITHIN,
                store=PrefixStore(f"splitveil/{attempt}", store),
            )
        except RuntimeError as error:
            raise WorkerLost(f"this party's processes do not find each other: {error}") from error
        return cls(rank, size, on_lost)

    # ---- tensors ----

    def send(self, values: Tensor, to: int) -> "Pending":
        """Begin to send a tensor; it must not change until the transfer was waited for."""
        values = values.detach().cpu().contiguous()
        with self._noticing():
            return Pending(dist.isend(values, to), values, self._noticing)

    def begin_receiving(self, into: Tensor, source: int) -> "Pending":
        """Begin to receive a tensor in place, on the CPU."""
        with self._noticing():
            return Pending(dist.irecv(into, source), into, self._noticing)

    def receive(self, into: Tensor, source: int = 0) -> Tensor:
        """Receive a tensor in place, on the CPU, and return it."""
        return self.begin_receiving(into, source).wait()

    # ---- what precedes and surrounds them ----

    def order(self, order: Order, to: int) -> "Pending":
        """Begin to tell a worker what to do."""
        return self.send(torch.tensor([_KINDS.index(order.kind), *order[1:]]), to)

    def next_order(self) -> Order:
        """Wait for what rank 0 wants."""
        kind, number, rows = self.receive(torch.empty(3, dtype=torch.int64)).tolist()
        return Order(_KINDS[kind], number, rows)

    def begin(self, facts: dict[str, Any]) -> None:
        """Tell all workers the facts by which they build their models."""
        text = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        with self.lock:
            for worker in self.workers:
                order = self.order(Order("begin", rows=len(text)), worker)
                wait_for([order, self.send(text, worker)])

    def facts(self, order: Order) -> dict[str, Any]:
        """Receive the facts of an order to begin."""
        text = self.receive(torch.empty(order.rows, dtype=torch.uint8))
        found: dict[str, Any] = json.loads(bytes(text.tolist()))
        return found

    @property
    def workers(self) -> range:
        """The ranks of the workers."""
        return range(1, self.size)

    def check_all_alive(self) -> None:
        """Ask every worker for a sign of life, and do what is to be done if one is gone."""
        with self.lock:
            if not self._is_open:
                return
            for worker in self.workers:
                sign = torch.zeros(1)
                self.order(Order("ping"), worker).wait(_ANSWERS_WITHIN)
                self.begin_receiving(sign, worker).wait(_ANSWERS_WITHIN)

    def close(self) -> None:
        """Let the workers end; nothing is wrong if they are gone."""
        with self.lock:
            if not self._is_open:
                return
            self._is_open = False
            self._on_lost = _raise_lost
            for worker in self.workers:
                with suppress(WorkerLost):
                    self.order(Order("end"), worker).wait(_ANSWERS_WITHIN)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's only error
            self._on_lost(error)


class Pending:
    """A transfer under way."""

    def __init__(self, work: Any, values: Tensor, noticing: Callable[[], Any]) -> None:
        self._work = work
        self._values = values  # gloo reads and writes its memory until the end
        self._noticing = noticing

    def wait(self, within: timedelta = _AS_LONG_AS_IT_TAKES) -> Tensor:
        """Wait for the end of the transfer, and return the tensor."""
        with self._noticing():
            self._work.wait(within)
        return self._values


def wait_for(pending: Sequence[Pending]) -> list[Tensor]:
    """Wait for several transfers, and return their tensors."""
    return [one.wait() for one in pending]
