"""A peer that uses two exponents learns of common ids that the other party misses.

Either half of what it computes will do: its tags of the other's points, or its own points. A proof
about the tags would refuse the first peer and not the second, which moreover chooses what to hide:
this is why there are no such proofs (docs/decisions.md).
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.run.sample_order import Splits
from splitveil.protos import split_learning_pb2 as pb
from tests.support.aligned import ENGINE, align_both, common_ids, names, points_frame, split

pytestmark = pytest.mark.usefixtures("small_chunks")

GROUP = ristretto.load()
HIDDEN = set(names(range(20, 40)))
"""Ids that the dishonest peer would hide from the other party."""


class TwoExponents(EcdhEngine):
    def __init__(self, kind: Literal["points", "tags"]) -> None:
        super().__init__(min_aligned=1, max_set_size=1000)
        self.kind = kind
        self.second = GROUP.random_scalar()
        self.points_of_other = b""
        self.exchange: EcdhExchange | None = None

    def start(
        self, ids: Sequence[str], *, nonce: bytes, run_id: str, splits: Splits | None = None
    ) -> EcdhExchange:
        exchange = super().start(ids, nonce=nonce, run_id=run_id, splits=splits)
        self.exchange = exchange
        if self.kind == "points":
            exchange.own_frames = lambda: self._points(exchange)  # type: ignore[method-assign]
        received = exchange._tags.note_answered

        def note(points: bytes, tags: bytes) -> None:
            self.points_of_other += points
            if self.kind == "tags":  # of every second point, whatever its id
                wrong = _tags(points, self.second)
                pairs = zip(split(tags, 16), split(wrong, 16), strict=True)
                tags = b"".join(pair[i % 2] for i, pair in enumerate(pairs))
            received(points, tags)

        exchange._tags.note_answered = note  # type: ignore[method-assign]
        return exchange

    def _points(self, exchange: EcdhExchange) -> Iterator[pb.AlignFrame]:
        rows = exchange._require_order().tolist()
        for chunk, first in enumerate(range(0, len(rows), 16)):
            points = b""
            for row in rows[first : first + 16]:
                text = exchange._ids[row]
                scalar = self.second if text in HIDDEN else exchange._scalar
                points += GROUP.mask(ristretto.digest_ids([text]), scalar)
            exchange._tags.note_sent(points)
            yield points_frame(chunk, points)
        yield from exchange._tags.commit()

    def learned(self) -> set[str]:
        """Return the ids of its own that it knows the other party to have."""
        assert self.exchange is not None
        by_either = {
            *split(_tags(self.points_of_other, self.exchange._scalar), 16),
            *split(_tags(self.points_of_other, self.second), 16),
        }
        own = split(bytes(self.exchange._tags.own), 16)
        rows = self.exchange._require_order().tolist()
        return {
            self.exchange._ids[row] for row, tag in zip(rows, own, strict=True) if tag in by_either
        }


def _tags(points: bytes, scalar: bytes) -> bytes:
    return b"".join(product[:16] for product in split(GROUP.multiply(points, scalar), 32))


@pytest.mark.parametrize("kind", ["points", "tags"])
def test_a_peer_with_two_exponents_learns_what_the_other_party_misses(
    kind: Literal["points", "tags"],
) -> None:
    mine, theirs = names(range(60)), names(range(10, 80))
    common = set(mine) & set(theirs)
    peer = TwoExponents(kind)
    honest, dishonest = align_both((mine, theirs), engines=(ENGINE, peer))
    found = set(common_ids(mine, honest))
    assert peer.learned() == common
    assert found < common
    assert set(common_ids(theirs, dishonest)) == found, "the other party notices nothing"
    if kind == "points":
        assert found == common - HIDDEN
