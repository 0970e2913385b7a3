"""The passive party's part in a run: opening, training, leaving, and resuming where needed.

If either party was restarted, the run resumes from the newest checkpoint that all parties have.
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

from splitveil.common import errors
from splitveil.common.alignment.exchange import Alignment
from splitveil.common.record.run_store import NoStore
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import LeaveReason, ModelIdentity, Offer, Opening
from splitveil.common.run.progress import (
    CheckpointStore,
    Phase,
    Phases,
    Progress,
    RunIdentity,
    refusing_other_versions,
)
from splitveil.common.run.sample_order import NONCE_BYTES, Positions, joint_seed
from splitveil.common.text.imports import fault_of_own_code
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.opening import Aligner, Peer
from splitveil.passive_party.training import RunObserver, Training

_MAX_ALIGNMENTS = 20
"""Alignments that one process starts because the peer was lost during the previous one."""

_MAX_DAMAGED = 3  # alignments among these that may be due to an invalid message of the previous one
TrainerFactory = Callable[[AlignedRows], ComponentsTrainer]

ResultT = TypeVar("ResultT")


class PassiveRun:
    def __init__(
        self,
        aligner: Aligner,
        build_trainer: TrainerFactory,
        observer: RunObserver,
        store: CheckpointStore | None = None,
        interruption: Callable[[], int | None] = lambda: None,
        phases: Phases | None = None,
    ) -> None:
        self.aligner = aligner
        self.contract = aligner.participant.contract
        self.observer = observer
        self.run_id = ""  # the run that the active party has opened; empty before that
        self._me = aligner.participant
        self._build_trainer = build_trainer
        self._store = store or NoStore()
        self._interruption = interruption
        self._phases = phases or Phases()
        self._nonce = b""
        self._training: Training | None = None

    @property
    def trainer(self) -> ComponentsTrainer | None:
        return None if self._training is None else self._training.trainer

    @property
    def model_identity(self) -> ModelIdentity:
        """The training that produced the bottom model so far."""
        number = 0 if self._training is None else self._training.progress.batch_number
        return ModelIdentity(self.run_id, number)

    def run(self, peer: Peer) -> None:
        """Take part in the whole run, and tell the peer how it ended, or raise SplitveilError."""
        try:
            self._go_through(peer)
        except (errors.PeerUnreachable, errors.PeerLeft, errors.ContractMismatch):
            # Ctrl-C in a terminal reaches both parties, so either may hear about the other's first.
            self._stop_if_interrupted()
            raise
        except errors.SplitveilError as error:
            if self._training is not None and not isinstance(error, errors.StorageError):
                self._training.save_if_between_steps()
            reason = LeaveReason.FAILED
            if isinstance(error, errors.AlignmentError):
                reason = LeaveReason.ALIGNMENT_FAILED
            elif isinstance(error, errors.Interrupted):
                reason = LeaveReason.INTERRUPTED
            self._say_goodbye(peer, reason)
            raise
        except BaseException as error:
            self._say_goodbye(peer, LeaveReason.FAILED)
            # A bottom model is given no labels, so that the text of its errors holds none.
            own = fault_of_own_code(error, shows_text=True)
            if own is None:
                raise
            raise own from error
        if not self._me.has_companions:
            self._say_goodbye(peer, LeaveReason.FINISHED)

    def _go_through(self, peer: Peer) -> None:
        training = self.reopen()
        if training is None:
            training = self._patiently(self._open, peer)
        elif not training.progress.is_over:
            training = self._resume(peer, training)
        while True:
            with contextlib.suppress(errors.PeerRestarted):
                if not training.progress.is_over:
                    training.follow_course(peer, self._stop_if_interrupted)
                self._part_from_others(peer)
                return
            training = self._resume(peer, training)

    # ---- opening ----

    def _patiently(self, begin: Callable[[Peer], ResultT], peer: Peer) -> ResultT:
        damaged = 0
        for _ in range(_MAX_ALIGNMENTS - 1):
            try:
                return begin(peer)
            except (errors.PeerUnreachable, errors.PeerRestarted, errors.ProtocolError) as error:
                damaged += isinstance(error, errors.ProtocolError)
                # If not even a handshake was answered, the peer has been awaited long enough.
                if not self.run_id or damaged > _MAX_DAMAGED:
                    raise
                self._stop_if_interrupted()
                self.run_id = ""
        return begin(peer)

    def _align(self, peer: Peer) -> tuple[Opening, Alignment]:
        self._nonce = self.aligner.draw_nonce()
        opening = self._handshake(peer)
        if len(opening.nonce) != NONCE_BYTES:
            raise errors.InvalidMessage(
                f"nonce: expected {NONCE_BYTES} bytes, got {len(opening.nonce)}"
            )
        self.run_id = opening.run_id
        with self._phases(Phase.ALIGNMENT):
            found = self.aligner.align(
                peer, opening, self._nonce, self._on_alignment_progress, self._stop_if_interrupted
            )
        return opening, found

    def _open(self, peer: Peer) -> Training:
        opening, found = self._align(peer)
        seed = joint_seed(opening.nonce, *found.nonces)
        training, rows = self._prepare(found.rows, seed)
        self._store.save_run(
            {
                "run_id": self.run_id,
                "nonce": self._nonce,
                "peer_nonce": opening.nonce,
                "passive_nonces": list(found.nonces),
                "file_rows": rows.file_rows,
                "data": training.trainer.data_digest,
            }
        )
        training.save()
        return training

    def _handshake(self, peer: Peer, offer: Offer | None = None) -> Opening:
        with self._phases(Phase.WAIT):
            opening = self._me.handshake(peer, self._nonce, offer)
        self.observer.on_opened(opening.run_id)
        return opening

    def _prepare(self, file_rows: Positions, seed: bytes) -> tuple[Training, AlignedRows]:
        me = self._me
        rows = AlignedRows.derive(self.contract, seed, me.ids, file_rows, me.file_splits)
        trainer = self._build_trainer(rows)
        progress = Progress(self.contract, rows, self._store)
        self._training = Training(self.run_id, rows, trainer, progress, self.observer, self._phases)
        with self._phases(Phase.RECORD):
            self.observer.on_aligned(rows, seed)
        return self._training, rows

    def _on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        self._stop_if_interrupted()
        self.observer.on_alignment_progress(done_ids, total_ids)

    # ---- resuming ----

    def reopen(self) -> Training | None:
        stored = self._store.run()
        checkpoints = [] if stored is None else self._store.checkpoints()
        if stored is None or not checkpoints:
            return None
        with refusing_other_versions():
            identity = RunIdentity(
                stored["run_id"],
                stored["peer_nonce"],
                tuple(stored["passive_nonces"]),
                stored["file_rows"],
                stored["data"],
            )
            seed, self._nonce = identity.seed, stored["nonce"]
        self.run_id = identity.run_id
        identity.check_rows(len(self._me.ids))
        training, _ = self._prepare(identity.file_rows, seed)
        identity.check_data(training.trainer.data_digest)
        training.restore(checkpoints[-1])
        return training

    def _resume(self, peer: Peer, training: Training) -> Training:
        if training.progress.is_over and not self._me.has_companions:
            return training  # the peer completes the rest without this party
        if not self._store.keeps:
            raise errors.PeerLeft("the peer was restarted, and this party keeps no checkpoints")
        offer = Offer(self.run_id, frozenset(self._store.checkpoints()))
        try:
            opening = self._handshake(peer, offer)
        except errors.StartedOver:
            if training.progress.batch_number:
                raise
            self.run_id = ""
            return self._patiently(self._open, peer)
        except errors.ProtocolError as error:
            raise errors.ProtocolError(
                "the active party cannot resume this run; to start over, start both parties with "
                "--fresh"
            ) from error
        if opening.run_id != self.run_id or opening.resumes_at not in offer.batch_numbers:
            raise errors.InvalidMessage("the active party resumes another run than this one")
        training.restore(opening.resumes_at)
        return training

    # ---- ending ----

    def _stop_if_interrupted(self) -> None:
        signal_number = self._interruption()
        if signal_number is not None:
            raise errors.Interrupted(signal_number)

    def _part_from_others(self, peer: Peer) -> None:
        """Leave, then wait for the other parties: all go back with one that has to resume."""
        if not self._me.has_companions:
            return
        try:
            peer.leave(self.run_id, LeaveReason.FINISHED)
        except errors.PeerRestarted:
            raise
        except errors.PeerError:
            return  # it changes nothing here: the peer notices the silence

    def _say_goodbye(self, peer: Peer, reason: LeaveReason) -> None:
        if not self.run_id:
            return  # there is no run that the peer could end
        # A goodbye that does not arrive changes nothing here: the peer notices the silence.
        with contextlib.suppress(errors.PeerError):
            peer.leave(self.run_id, reason)
