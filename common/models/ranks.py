"""The processes of one party that compute a model together, over ``torch.distributed``.

Rank 0 is the party: it says what all do next, by orders. Then every rank calls the same methods
here, in the same order. On CPUs tensors travel over gloo, on GPUs over NCCL; nothing is pickled,
and nothing is encrypted. Ranks on one machine prove that they belong together; those on several
are on a network that belongs to the party alone.
"""

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from splitveil.common.errors import SettingsError, SplitveilError

CPU = torch.device("cpu")

_AS_LONG_AS_IT_TAKES = timedelta(days=365)
"""Between two orders the other party's alignment may lie; a rank that dies is noticed at once."""
_WITHIN = timedelta(minutes=10)
"""Until all ranks are there, and for what they do together."""
_ANSWERS_WITHIN = timedelta(seconds=20)

_SECRET = "what only ranks know"  # noqa: S105 - its name
_BUCKET_BYTES = 25_000_000

OrderKind = Literal["begin", "load", "forward", "inputs", "weights", "state", "ping", "end"]
_KINDS: tuple[OrderKind, ...] = get_args(OrderKind)


class Order(NamedTuple):
    """A command of rank 0 to all ranks."""

    kind: OrderKind
    number: int  # of the batch
    content: Tensor  # positions of rows or something else, as bytes, (bytes,) uint8; perhaps none


class RankLost(SplitveilError):
    """Another process of this party is gone."""


def raise_lost(error: Exception) -> NoReturn:
    """Raise RankLost."""
    raise RankLost("another process of this party is gone, or hangs") from error


class Ranks:
    """Moves rows between the ranks, and adds up what each has.

    Row ``p`` of the common order belongs to rank ``p % size``. If a process is gone, ``on_lost``
    says what to do; by default RankLost is raised.

    All processes find each other where the environment says, or in a file. ``attempt`` counts their
    starts: the place where they meet may outlive them and holds the addresses of those before.
    Nobody else may open ``file``: it holds a secret, and each rank proves that it knows it
    before anything else travels. Raises RankLost.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device = CPU,
        on_lost: Callable[[Exception], NoReturn] = raise_lost,
        attempt: int = 0,
        file: Path | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.lock = threading.RLock()
        """Held by rank 0 while all ranks do one thing together."""
        self._device = device
        self._peers = [other for other in range(size) if other != rank]
        self._on_lost = on_lost
        self._is_open = True
        try:
            if file is None:
                store, _, _ = next(rendezvous("env://", rank, size, timeout=_WITHIN))
            else:
                store = dist.FileStore(str(file), size)  # type: ignore[attr-defined]
                store.set_timeout(_WITHIN)
                if not rank:
                    store.set(_SECRET, secrets.token_hex(32))
            dist.init_process_group(
                "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
                rank=rank,
                world_size=size,
                timeout=_WITHIN,
                store=PrefixStore(f"splitveil/{attempt}", store),
            )
        except RuntimeError as error:
            raise RankLost("this party's processes do not find each other") from error
        if file is not None:
            self._prove(store.get(_SECRET), attempt)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)

    def _prove(self, secret: bytes, attempt: int) -> None:
        """Raise RankLost unless all know the secret: any program may be first to connect."""

        def proof(*way: int) -> Tensor:
            return as_bytes(hmac.digest(secret, f"{way} {attempt}".encode(), "sha256"))

        found = {peer: torch.zeros(32, dtype=torch.uint8) for peer in self._peers}
        self.move({peer: proof(self.rank, peer) for peer in self._peers}, found)
        for peer, shown in found.items():
            own = bytes(proof(peer, self.rank).numpy())
            if not hmac.compare_digest(bytes(shown.numpy()), own):
                dist.destroy_process_group()
                raise RankLost(f"what connected as rank {peer} is no process of this party")

    # ---- what rank 0 wants ----

    def order(
        self,
        kind: OrderKind,
        number: int = 0,
        content: Tensor | None = None,
        within: timedelta | None = None,
    ) -> None:
        """Say what all ranks do next; only at rank 0."""
        given = (torch.empty(0) if content is None else content.cpu()).view(torch.uint8)
        header = torch.tensor([_KINDS.index(kind), number, len(given)])
        self.move(dict.fromkeys(self._peers, header), within=within)
        self._broadcast(given)

    def next_order(self) -> Order:
        """Wait for what rank 0 wants; show that this rank lives whenever it asks."""
        header = torch.empty(3, dtype=torch.int64)
        while True:
            self.move({}, {0: header}, _AS_LONG_AS_IT_TAKES)
            kind, number, length = header.tolist()
            content = self._broadcast(torch.empty(length, dtype=torch.uint8))
            if _KINDS[kind] != "ping":
                return Order(_KINDS[kind], number, content)
            self.move({0: torch.ones(1)})

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Raise SettingsError unless all ranks have the same facts; call it first of all."""
        texts = self.gather(as_bytes(json.dumps(facts, sort_keys=True).encode()))
        first, *others = (json.loads(bytes(text.tolist())) for text in texts)
        for rank, found in enumerate(others, start=1):
            different = [name for name in first if found.get(name) != first[name]]
            if different:
                raise SettingsError(
                    f"{', '.join(different)}: rank {rank} differs from rank 0: give all ranks the "
                    f"same settings and the same versions"
                )
        if self._device.type == "cuda":  # NCCL's first operation has to be that of all ranks
            self.add_up([torch.zeros(1, device=self._device)])

    def check_all_alive(self) -> None:
        """Ask every rank for a sign of life, and handle the loss of any."""
        with self.lock:
            if self._is_open:
                self.order("ping", within=_ANSWERS_WITHIN)
                self.move({}, {rank: torch.zeros(1) for rank in self._peers}, _ANSWERS_WITHIN)

    def close(self) -> None:
        """Leave the others; rank 0 lets them end. Nothing is wrong if they are gone."""
        with self.lock:
            if self._is_open:
                self._is_open = False
                self._on_lost = raise_lost
                with suppress(RankLost):
                    if not self.rank:
                        self.order("end", within=_ANSWERS_WITHIN)
                dist.destroy_process_group()

    # ---- tensors ----

    def move(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor] | None = None,
        within: timedelta | None = None,
    ) -> None:
        """Send tensors to some ranks and receive others in place; those without values stay."""
        with self._noticing():
            transfers = [
                dist.P2POp(way, tensor, rank)
                for way, tensors in ((dist.isend, sent), (dist.irecv, received or {}))
                for rank, tensor in tensors.items()
                if tensor.numel()
            ]
            for one in dist.batch_isend_irecv(transfers) if transfers else ():
                one.wait(within or _WITHIN)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return what every rank has, at all ranks; it may be of any length."""
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(own)
        self.add_up([counts])
        found = [own.new_empty(count, *own.shape[1:]) for count in counts.tolist()]
        self.move(dict.fromkeys(self._peers, own), {peer: found[peer] for peer in self._peers})
        found[self.rank] = own
        return found

    def gather_rows(self, own: Tensor, owners: Tensor) -> Tensor:
        """Return the rows of all ranks in their order, (rows, ...), at rank 0; elsewhere the own.

        ``owners`` has the rank of each row, (rows,).
        """
        own = own.detach().contiguous()
        if self.rank:
            self.move({0: own})
            return own
        found = own.new_empty(len(owners), *own.shape[1:])
        places = {rank: _places(owners, rank, own.device) for rank in range(self.size)}
        parts = {rank: own.new_empty(len(places[rank]), *own.shape[1:]) for rank in self._peers}
        self.move({}, parts)
        for rank, part in {0: own, **parts}.items():
            found[places[rank]] = part
        return found

    def scatter_rows(self, rows: Tensor | None, owners: Tensor, like: Tensor) -> Tensor:
        """Return this rank's rows of those that rank 0 has, as ``like`` but for their number."""
        if rows is None:
            found = like.new_empty(int((owners == self.rank).sum()), *like.shape[1:])
            self.move({}, {0: found})
            return found
        rows = rows.detach()
        parts = [rows[_places(owners, rank, rows.device)] for rank in range(self.size)]
        self.move({rank: parts[rank] for rank in self._peers})
        return parts[0]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Add up what all ranks have, in place; every rank gets the same bits."""
        with self._noticing():
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    def add_up_gradients(self, like: Sequence[Tensor], own: list[Tensor | None]) -> None:
        """Add up the gradients of all ranks, in place; None where no rank has one.

        Dense ones travel in buckets; of sparse ones the rows alone do.
        """
        forms = [[one is not None, one is not None and one.is_sparse] for one in own]
        self.add_up([flags := torch.tensor(forms, dtype=torch.int32)])
        dense: dict[torch.dtype, list[int]] = {}
        for at, (is_there, is_sparse) in enumerate(flags.tolist()):
            if is_sparse:
                own[at] = self._sum_of_sparse(_filled(own[at], like[at]))
            elif is_there:
                dense.setdefault(like[at].dtype, []).append(at)
        for places in dense.values():
            flat = torch.cat([_filled(own[at], like[at]).flatten() for at in places])
            self.add_up(torch.split(flat, _BUCKET_BYTES // flat.element_size()))
            parts = torch.split(flat, [like[at].numel() for at in places])
            for at, part in zip(places, parts, strict=True):
                own[at] = part.view_as(like[at])

    def _sum_of_sparse(self, own: Tensor) -> Tensor:
        """Return the sum of sparse gradients, added up in the order of the ranks everywhere."""
        own = (own if own.is_sparse else own.to_sparse(1)).coalesce()
        indices = torch.cat(self.gather(own.indices().T.contiguous())).T
        values = torch.cat(self.gather(own.values()))
        found = torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=True)
        return found.coalesce()

    def _broadcast(self, values: Tensor) -> Tensor:
        if values.numel():
            with self._noticing():
                dist.broadcast(values, 0)
        return values

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # that of gloo and NCCL
            self._on_lost(error)


def as_bytes(content: bytes) -> Tensor:
    """Return bytes as a tensor, (bytes,) uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _places(owners: Tensor, rank: int, device: torch.device) -> Tensor:
    return (owners == rank).nonzero().squeeze(1).to(device)


def _filled(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.detach()
