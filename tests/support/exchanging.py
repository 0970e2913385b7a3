"""Two parties that exchange ids over lines that break off, and keep what they have."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from splitveil.common.alignment.channel import AlignChannel, channel_pair
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.exchange import Alignment, align
from splitveil.common.alignment.store import ExchangeStores
from splitveil.common.alignment.tried_ids import TriedIds
from splitveil.common.errors import PeerUnreachable
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import ENGINE, LONG_S, Outcome, Passing, names

OWN, PEER = names(range(100)), names(range(60, 190))


class Counting:
    """The operations of the group, which counts how many ids they were done for."""

    def __init__(self) -> None:
        self.masked = self.multiplied = 0
        self._library = ENGINE._library

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        self.masked += len(digests) // 64
        return self._library.mask(digests, scalar)

    def multiply(self, given: bytes, scalar: bytes) -> bytes:
        self.multiplied += len(given) // 32
        return self._library.multiply(given, scalar)

    def close(self) -> None:
        """Close nothing."""


class Broken(Passing):
    """A channel that breaks off instead of the frame after some others."""

    def __init__(self, channel: AlignChannel, frames: int) -> None:
        super().__init__(channel)
        self._left = frames

    def send(self, frame: pb.AlignFrame) -> None:
        if not self._left:
            self._channel.close()
            raise PeerUnreachable("the line is gone")
        self._left -= 1
        super().send(frame)


class WithoutLastFrame(Passing):
    """A channel that loses the last frame of a bucket, and breaks off after it."""

    is_gone = False

    def send(self, frame: pb.AlignFrame) -> None:
        if self.is_gone and not frame.HasField("wait"):
            self._channel.close()
            raise PeerUnreachable("the line is gone")
        self.is_gone |= frame.HasField("done")
        if not self.is_gone:
            super().send(frame)


class Pair:
    """Two parties that keep their exchange in folders.

    Args:
        folder: for all of them.
        ids: of each party.
    """

    def __init__(
        self, folder: Path, ids: tuple[list[str], list[str]] = (OWN, PEER), buckets: int = 1
    ) -> None:
        self.ids = ids
        self.groups = Counting(), Counting()
        self.kept = [ExchangeStores(folder / name) for name in ("active", "passive")]
        self.files = [kept.of("peer") for kept in self.kept]
        self.most = 200 if buckets == 1 else 700
        self.tried = [TriedIds(self.most) for _ in ids]
        self.attempts = 0
        self.loses_last_frame_of: int | None = None
        self.engines = [
            EcdhEngine(min_aligned=1, max_set_size=self.most, group=group, buckets=buckets)
            for group in self.groups
        ]

    def attempt(self, *, breaks_at: tuple[int | None, int | None] = (None, None)) -> list[Outcome]:
        """Align once, over a line that breaks off after so many frames of either party."""
        self.attempts += 1
        ends = channel_pair(deadline_s=LONG_S)
        channels: list[AlignChannel] = [
            end if frames is None else Broken(end, frames)
            for end, frames in zip(ends, breaks_at, strict=True)
        ]
        if self.loses_last_frame_of is not None:
            sender = self.loses_last_frame_of
            channels[sender] = WithoutLastFrame(ends[sender])
        run_id = f"run {self.attempts}"

        def work(index: int) -> Alignment:
            return align(
                self.engines[index],
                self.ids[index],
                channels[index],
                nonce=bytes([index, self.attempts]) * 16,
                run_id=run_id,
                counting=partial(self.tried[index].counted, "peer"),
                store=self.kept[index].of("peer"),
            )

        with ThreadPoolExecutor(2) as executor:
            outcomes = list(executor.map(lambda index: Outcome(partial(work, index)), (0, 1)))
        if all(outcome.error is None for outcome in outcomes):
            for files in self.files:  # each has heard from the other after the exchange
                files.discard()
        return outcomes

    def is_kept(self) -> list[bool]:
        return [any(path.is_file() for path in files._folder.glob("*")) for files in self.files]
