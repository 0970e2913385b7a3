"""The outcome of a run that ends with the alignment: the common rows, in the common order."""

from collections.abc import Sequence
from typing import NamedTuple, Self

from splitveil.common.run.sample_order import Positions, in_common_order, rows_digest


class CommonOrder(NamedTuple):
    """The rows that all parties have, in the order that is the same at all of them."""

    run_id: str  # of the run that found them
    file_rows: Positions  # this party's rows, (aligned,)
    fingerprint: str
    """Hexadecimal digest of the ids in their order under the joint seed: equal at all parties."""

    @classmethod
    def of(cls, run_id: str, ids: Sequence[str], file_rows: Positions, joint_seed: bytes) -> Self:
        """Put common rows in order.

        Args:
            file_rows: indices into ``ids`` of the common ids, in any order, (aligned,).
        """
        rows, digests = in_common_order(ids, file_rows, joint_seed)
        return cls(run_id, rows, rows_digest(digests).hex())
