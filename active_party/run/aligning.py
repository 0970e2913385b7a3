"""A run that ends with the alignment: the calls of the protocol, and what follows from them.

Handshakes, alignments, shares and goodbyes are those of a training. Once the common rows are known,
the run has finished, and any other message is out of step.
"""

from collections.abc import Callable
from typing import ClassVar, NoReturn

from splitveil.active_party.run.lifecycle import Lifecycle, OwnRows
from splitveil.active_party.run.observer import Unobserved
from splitveil.active_party.run.parties import JointRows
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import Stage
from splitveil.common.errors import OutOfStep
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.sample_order import CommonOrder, joint_seed


class AlignmentLifecycle(Lifecycle):
    """The lifecycle of a run that finishes as soon as the common rows are known."""

    common: JointRows | None = None

    def begin(self, common: JointRows) -> None:
        self.common = common
        for party, share in zip(self.parties, common.shares, strict=False):
            party.share = share
        # Callers hold the lock: nobody sees the stage in between.
        self.stages.move_to(Stage.TRAINING)
        self.stages.move_to(Stage.FINISHED)

    def start_over(self, nonce: bytes) -> None:
        """Drop the common rows as well, for a party that has not heard of the end."""
        self.common = None
        if self.stages.current is Stage.FINISHED:
            self.stages.move_to(Stage.TRAINING)
        super().start_over(nonce)

    def save(self, *, soon: bool = False) -> None:
        """Do nothing: a party that was lost aligns anew."""


class AlignmentSession(ActiveSession):
    lifecycle_type: ClassVar[type[Lifecycle]] = AlignmentLifecycle

    def __init__(self, contract: Contract, own: OwnRows, draw_nonce: Callable[[], bytes]) -> None:
        super().__init__(contract, own, _train_nothing, Unobserved(), draw_nonce)

    def common_order(self) -> CommonOrder:
        common = getattr(self.lifecycle, "common", None)
        if not isinstance(common, JointRows):
            raise OutOfStep("the common rows are not known yet")
        seed = joint_seed(self.lifecycle.run.nonce, *common.nonces)
        return CommonOrder.of(self.run_id, self.ids, common.file_rows, seed)


def _train_nothing(rows: AlignedRows) -> NoReturn:
    raise OutOfStep(f"a run that only aligns was to train on {len(rows)} rows")
