"""Alignment without cryptography, for parties that are one process and read the same disk.

Multiplying every id by two secret scalars takes longer than training on a small table. What comes
out, the set of common ids, does not depend on it, and neither does their order, which follows from
the joint seed. So a run whose ids were compared in the clear has the same bits.
"""

from splitveil.common.alignment import AlignmentEngine
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.ristretto import DIGEST_BYTES, POINT_BYTES
from splitveil.common.run.contract import AlignmentSettings


class ClearGroup:
    """Leaves digests of ids as they are: whoever sees them can look up any id."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:  # noqa: ARG002
        """Return the first bytes of each digest in the place of a point."""
        starts = range(0, len(digests), DIGEST_BYTES)
        return b"".join(digests[start : start + POINT_BYTES] for start in starts)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:  # noqa: ARG002
        return points

    def close(self) -> None:
        """There are no resources."""


def clear_engine(settings: AlignmentSettings) -> AlignmentEngine:
    """Build an engine that compares ids in the clear. Never use it between two processes."""
    return EcdhEngine(
        min_aligned=settings.min_aligned,
        max_set_size=settings.max_set_size,
        group=ClearGroup(),
    )
