"""Runs one alignment: moves frames between an exchange and a channel until both are complete.

Each passive party aligns with the active party as if there were no other. When all have finished,
the active party says to each of them, in a share with one bit per id in the order of the pair's
sorted tags, which of the ids that the two have in common are common to all parties. A passive party
therefore learns only about its own ids, and about those only what it would learn from the training
rows.
"""

import hashlib
import hmac
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.alignment.channel import AlignChannel, Heartbeats
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.store import ExchangeStore, ExchangeStores
from splitveil.common.alignment.tried_ids import TriedIds, file_of_count
from splitveil.common.errors import AlignmentError, InvalidMessage, OutOfStep, ProtocolError
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.run.contract import AlignmentSettings
from splitveil.common.run.sample_order import Positions, Splits
from splitveil.common.text.system import num_cores
from splitveil.common.wire.limits import MASK_BYTES
from splitveil.protos.split_learning_pb2 import AlignFrame, AlignShare

_IN_TURN = frozenset({"commitment", "tags", "done"})
"""Frames that end what a party sends unprompted, in an order that the peer checks."""


class Alignment(NamedTuple):
    """The outcome of one alignment."""

    rows: Positions  # this party's rows of the common ids, in the order that both parties share
    peer_nonce: bytes
    peer_set_size: int

    nonces: tuple[bytes, ...] = ()  # the nonces of all passive parties, if there is more than one


Counting = Callable[[EcdhExchange], AbstractContextManager[None]]
"""Counts the ids that the peer tries once its hello has arrived; see ``TriedIds.counted``."""

Agree = Callable[[Alignment, AlignChannel], Alignment]
"""The step that two parties take between finding their common ids and closing the channel."""


def align(
    engine: EcdhEngine,
    ids: Sequence[str],
    channel: AlignChannel,
    *,
    nonce: bytes,
    run_id: str,
    progress: Callable[[int, int], object] = lambda *_: None,
    agree: Agree | None = None,
    splits: Splits | None = None,
    counting: Counting = lambda _: nullcontext(),
    store: ExchangeStore | None = None,
) -> Alignment:
    """Find the ids that both parties have. Always closes the channel, also after an error.

    Args:
        ids: canonical and distinct.
        progress: called with the numbers of ids of both parties that are done and in all.
        splits: the split that this party's column gives each id, if the contract splits by a
            column: the peer's column must give the same split for every common id.
        store: holds the exchange, so that another call with the same ids continues it, until it
            fails or ``store.discard`` is called; by default, another call begins afresh.

    Raises AlignmentError, PeerError or StorageError.
    """
    with ExitStack() as ending:
        ending.callback(channel.close)
        receiving = ending.enter_context(ThreadPoolExecutor(1, thread_name_prefix="align-hello"))
        with Heartbeats(channel) as line:
            # Beside what follows, which may take long: signs of life that nobody takes would fill
            # the line, and keep the peer from sending its hello.
            hello = receiving.submit(line.receive)
            exchange = engine.start(ids, nonce=nonce, run_id=run_id, splits=splits)
            if store is not None:
                exchange.store_in(store)
            line.send(exchange.hello())
            for reply in exchange.receive(hello.result()):
                line.send(reply)
            with _forgetting_failed(exchange), counting(exchange):
                _transfer(exchange, line, progress)
                while not exchange.is_complete:
                    exchange.begin_next_bucket()
                    _transfer(exchange, line, progress)
        with _forgetting_failed(exchange):
            own = Alignment(exchange.result(), exchange.peer_nonce, exchange.peer_set_size)
            return own if agree is None else agree(own, channel)


@contextmanager
def _forgetting_failed(exchange: EcdhExchange) -> Iterator[None]:
    try:
        yield
    except AlignmentError:
        exchange.forget()
        raise


def _transfer(
    exchange: EcdhExchange, channel: AlignChannel, progress: Callable[[int, int], object]
) -> None:
    """Receive in this thread and send in another.

    This thread never waits to send. If both parties did so with full buffers between them, each
    would wait forever for the other to receive. What queues up in ``replies`` instead makes its
    frames only when they are sent.
    """
    replies: SimpleQueue[Iterable[AlignFrame] | None] = SimpleQueue()
    failures: list[BaseException] = []

    def send() -> None:
        try:
            _send_all(channel, exchange.own_frames(), replies)
        except BaseException as error:  # raised by the receiving thread
            failures.append(error)
            channel.close()

    sender = threading.Thread(target=send, name="align-send", daemon=True)
    sender.start()
    try:
        while not exchange.is_bucket_complete:
            replies.put(exchange.receive(channel.receive()))
            progress(exchange.done_ids, exchange.total_ids)
    except BaseException as error:
        failures.append(error)
        channel.close()
    replies.put(None)
    sender.join()
    if failures:
        # One makes the other thread fail as well: by the closed channel, or by the files of an
        # exchange that is forgotten. What the peer did wrong is the reason wherever it did.
        faults = (e for e in failures if isinstance(e, AlignmentError | ProtocolError))
        raise next(faults, failures[0])


def _send_all(
    channel: AlignChannel,
    own_frames: Iterator[AlignFrame],
    replies: SimpleQueue[Iterable[AlignFrame] | None],
) -> None:
    for frame in own_frames:
        channel.send(frame)
        if frame.WhichOneof("body") in _IN_TURN:
            continue  # a reply was made after those that follow, and must not overtake them
        for _ in range(replies.qsize()):
            some = replies.get()
            if some is None:
                return
            for reply in some:
                channel.send(reply)
    while (some := replies.get()) is not None:
        for reply in some:
            channel.send(reply)


# ---- the engine of a party, and what it stores about its exchanges for one run ----


def build_engine(settings: AlignmentSettings) -> EcdhEngine:
    """Build a contract's engine, which uses the cores that the process may use."""
    return EcdhEngine(
        min_aligned=settings.min_aligned,
        max_set_size=settings.max_set_size,
        workers=num_cores(),
        buckets=settings.buckets,
    )


def records_of(settings: PartySettings, folder: Path) -> tuple[ExchangeStores, TriedIds]:
    most, attempts = settings.contract.alignment.max_set_size, settings.alignment_attempts
    return ExchangeStores(folder), TriedIds(most, attempts, file_of_count(folder))


Mask = npt.NDArray[np.bool_]


class Share(NamedTuple):
    """The message that ends one passive party's alignment."""

    mask: Mask
    """For each id of the pair's intersection, in the order of its tags, whether all parties have
    it."""

    nonces: tuple[bytes, ...]  # the nonces of all passive parties, in the contract's order


def share_frames(share: Share) -> Iterator[AlignFrame]:
    mask = np.packbits(share.mask, bitorder="little").tobytes()
    for chunk, first in enumerate(range(0, len(mask), MASK_BYTES)):
        nonces = () if chunk else share.nonces
        part = AlignShare(chunk=chunk, mask=mask[first : first + MASK_BYTES], nonces=nonces)
        yield AlignFrame(share=part)


def receive_share(
    channel: AlignChannel, num_ids: int, commitments: Sequence[bytes], on_wait: Callable[[], None]
) -> Share:
    """Wait for this party's share of the ids that the pair has in common, at least one."""
    mask, nonces, chunk = bytearray(), tuple[bytes, ...](), 0
    num_bytes = -(-num_ids // 8)
    while len(mask) < num_bytes:
        frame = channel.receive()
        if frame.WhichOneof("body") == "wait" and not chunk:
            on_wait()
            continue
        if frame.WhichOneof("body") != "share" or frame.share.chunk != chunk:
            raise OutOfStep(f"expected chunk {chunk} of the share that ends the alignment")
        expected = min(MASK_BYTES, num_bytes - len(mask))
        if len(frame.share.mask) != expected or (chunk and frame.share.nonces):
            raise InvalidMessage(f"expected {expected} bytes of a mask in chunk {chunk}")
        if not chunk:
            nonces = tuple(frame.share.nonces)
        mask += frame.share.mask
        chunk += 1
    hashed = [hashlib.sha256(nonce).digest() for nonce in nonces]
    if len(hashed) != len(commitments) or not all(map(hmac.compare_digest, hashed, commitments)):
        raise InvalidMessage("the passive parties' nonces do not match their commitments")
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
    if bits[num_ids:].any():
        raise InvalidMessage("the mask has more bits than the two parties have ids in common")
    return Share(bits[:num_ids], nonces)
