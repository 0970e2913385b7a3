"""``splitveil align passive.yaml``: finds the rows that all parties have, without training."""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from splitveil.common.errors import OutOfStep, PeerError, PeerLeft, PeerRestarted, ProtocolError
from splitveil.common.party import aligned_table
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import LeaveReason
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import CommonOrder, joint_seed
from splitveil.passive_party.grpc_peer import checked_connection
from splitveil.passive_party.opening import Aligner, Peer
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from splitveil.passive_party.training import RunObserver

_MAX_RETURNS = 20
"""Alignments that one process completes because another party was lost before its goodbye."""


class AlignmentObserver:
    def __init__(
        self, on_opened: Callable[[str], None], on_progress: Callable[[int, int], None]
    ) -> None:
        self._on_opened = on_opened
        self._on_progress = on_progress

    def on_opened(self, run_id: str) -> None:
        self._on_opened(run_id)

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        self._on_progress(done_ids, total_ids)

    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    on_aligned = on_step = on_epoch = on_resumed = load_state_dict = _ignore

    def state_dict(self) -> State:
        return {}


class AlignmentRun(PassiveRun):
    def __init__(
        self,
        aligner: Aligner,
        observer: RunObserver,
        interruption: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__(aligner, _train_nothing, observer, interruption=interruption)
        self._found: CommonOrder | None = None

    def common_order(self) -> CommonOrder:
        """Return the common rows, in the common order, or raise OutOfStep."""
        if self._found is None:
            raise OutOfStep("the common rows are not known yet")
        return self._found

    def _go_through(self, peer: Peer) -> None:
        # If another passive party was lost before it had its rows, all align again.
        for _ in range(_MAX_RETURNS):
            with contextlib.suppress(PeerRestarted):
                self._found = self._patiently(self._order, peer)
                self._part_from_others(peer)
                return
        raise PeerLeft("other parties were lost too often")

    def _part_from_others(self, peer: Peer) -> None:
        if not self._me.has_companions:
            return
        try:
            peer.leave(self.run_id, LeaveReason.FINISHED)
        except (ProtocolError, PeerRestarted) as error:
            # A party that was lost has begun another run, whose order is another one.
            raise PeerRestarted from error
        except PeerError:
            return  # it changes nothing here: the peer notices the silence

    def _order(self, peer: Peer) -> CommonOrder:
        opening, found = self._align(peer)
        seed = joint_seed(opening.nonce, *found.nonces)
        return CommonOrder.of(self.run_id, self.aligner.participant.ids, found.rows, seed)


def _train_nothing(rows: AlignedRows) -> NoReturn:
    raise OutOfStep(f"a run that only aligns was to train on {len(rows)} rows")


def align(parsed: argparse.Namespace) -> None:
    aligned_table.align(parsed, _alignment_of)


def _alignment_of(settings: PassiveSettings) -> aligned_table.Alignment:
    connect, status = checked_connection(settings), RunStatus(settings.party, settings.contract)

    def show(done_ids: int, total_ids: int) -> None:
        status.enter_stage("aligning")
        status.note_alignment(done_ids, total_ids)

    def find(
        data: PartyData, folder: Path, transcript: Transcript | None, interruption: Interruption
    ) -> CommonOrder:
        aligner = Aligner.of(settings, data, folder)
        run = AlignmentRun(aligner, AlignmentObserver(status.name_run, show), interruption)
        with connect(transcript, status, interruption) as peer:
            status.enter_stage("waiting")
            run.run(peer)
        aligner.forget()
        return run.common_order()

    return settings.folder_name(), status, find, True
