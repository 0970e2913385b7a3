"""The passive party's way through a run: handshake, alignment, epochs, farewell. No I/O."""

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from common.alignment import AlignmentEngine, align
from common.contract import Contract
from common.errors import (
    AlignmentError,
    AuditRefused,
    ContractMismatch,
    Interrupted,
    InvalidMessage,
    PeerError,
    PeerLeft,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
)
from common.run_course import AlignedRows, Batch, run_course
from common.sample_order import joint_seed, positions_digest
from common.wire.audit_codec import AuditQuestion
from common.wire.tensor_codec import BatchHeader, TensorMessage
from common.wire.words import SPLIT_ON_WIRE
from passive_party.bottom_trainer import BottomTrainer
from passive_party.label_free_audit import GatheredScores
from passive_party.peer import Peer
from protos import split_learning_pb2 as pb


class RunObserver(Protocol):
    """Who is told what happens."""

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        """Part of both parties' ids has been through the alignment."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        """Both parties hold the same rows."""

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        """A gradient came for an activation, and the bottom model learned from it."""

    def on_epoch(self, epoch: int) -> None:
        """An epoch is over, its evaluation included."""


class Auditor(Protocol):
    """Whose scores the active party is asked to measure."""

    def scores_to_audit(self, epoch: int) -> Iterable[GatheredScores]:
        """Return what was gathered up to the end of an epoch, over the training rows."""

    def on_audit(self, epoch: int, scored: GatheredScores, leak_auc: float) -> None:
        """The active party measured some of it."""

    def on_audit_failed(self, epoch: int, error: PeerError) -> None:
        """The active party did not; the run goes on."""


TrainerFactory = Callable[[AlignedRows], BottomTrainer]


class PassiveRun:
    """One run with the active party.

    Args:
        contract: what both parties hold.
        party: this party's name in it.
        ids: this party's canonical ids, by row of its file.
        engine: finds the common ids.
        build_trainer: makes the trainer once the common rows are known.
        observer: is told of steps and epochs.
        nonce: this party's share of the joint seed, 32 bytes.
        interruption: returns the signal that asks this party to stop, once there is one.
        auditor: gives the scores for audits, or None for no audits.
    """

    def __init__(
        self,
        contract: Contract,
        party: str,
        ids: Sequence[str],
        engine: AlignmentEngine,
        build_trainer: TrainerFactory,
        observer: RunObserver,
        nonce: bytes,
        interruption: Callable[[], int | None] = lambda: None,
        auditor: Auditor | None = None,
    ) -> None:
        self.contract = contract
        self.trainer: BottomTrainer | None = None
        self.run_id = ""
        self._party = party
        self._ids = ids
        self._engine = engine
        self._build_trainer = build_trainer
        self._observer = observer
        self._nonce = nonce
        self._interruption = interruption
        self._auditor = auditor

    def run(self, peer: Peer) -> None:
        """Go through the whole run, and tell the peer how it ended.

        Raises:
            SplitveilError: whatever ended the run before its last step; Interrupted goes before
                what the peer says meanwhile. The trainer, if there is one by then, holds the
                model as far as it got.
        """
        try:
            rows, trainer = self._open(peer)
            self._train(peer, rows, trainer)
        except (PeerUnreachable, PeerLeft, ContractMismatch):
            # A terminal's Ctrl-C reaches both parties: then either may hear of the other's first.
            self._stop_if_interrupted()
            raise
        except SplitveilError as error:
            self._say_goodbye(peer, _reason(error))
            raise
        except BaseException:
            self._say_goodbye(peer, pb.LEAVE_REASON_FAILED)
            raise
        self._say_goodbye(peer, pb.LEAVE_REASON_FINISHED)

    def _open(self, peer: Peer) -> tuple[AlignedRows, BottomTrainer]:
        commitment = hashlib.sha256(self._nonce).digest()
        opening = peer.handshake(self._party, self.contract.canonical_json(), commitment)
        if not hmac.compare_digest(opening.contract_digest, self.contract.digest()):
            raise ContractMismatch(["(the active party holds another contract)"])
        if len(opening.nonce) != 32:
            raise InvalidMessage(f"nonce: expected 32 bytes, got {len(opening.nonce)}")
        self.run_id = opening.run_id
        seed = joint_seed(opening.nonce, self._nonce)
        alignment = align(
            self._engine,
            self._ids,
            peer.open_alignment(),
            nonce=self._nonce,
            run_id=self.run_id,
            progress=self._on_alignment_progress,
        )
        peer.close_alignment()
        if alignment.peer_nonce != opening.nonce:
            raise InvalidMessage("the active party's nonce changed since the handshake")
        rows = AlignedRows.derive(self.contract, seed, self._ids, alignment.rows)
        self.trainer = self._build_trainer(rows)
        self._observer.on_aligned(rows, seed)
        return rows, self.trainer

    def _train(self, peer: Peer, rows: AlignedRows, trainer: BottomTrainer) -> None:
        course = run_course(self.contract, rows)
        batch = next(course, None)
        features = trainer.rows(batch.positions) if batch else None
        while batch is not None and features is not None:
            self._stop_if_interrupted()
            if batch.split == "train":
                activation = trainer.forward(features)
                peer.send_activation(TensorMessage(self._header(batch), activation))
                following = next(course, None)
                features = trainer.rows(following.positions) if following else None
                reply = peer.receive_gradient()
                self._check(reply, batch)
                layers = trainer.backward(reply.values)
                self._observer.on_step(batch, activation, reply.values, layers)
            else:
                message = TensorMessage(self._header(batch), trainer.embed(features))
                stops = peer.evaluate(message) == pb.COURSE_STOP
                following = None if stops else next(course, None)
                features = trainer.rows(following.positions) if following else None
                if batch.closes_epoch:
                    self._observer.on_epoch(batch.epoch)
                    self._audit(peer, batch.epoch, rows)
            batch = following

    def _audit(self, peer: Peer, epoch: int, rows: AlignedRows) -> None:
        if self._auditor is None:
            return
        digest = positions_digest(rows.splits["train"])
        for scored in self._auditor.scores_to_audit(epoch):
            self._stop_if_interrupted()
            question = AuditQuestion(
                self.run_id, epoch, scored.attack, scored.layer, digest, scored.scores
            )
            try:
                leak_auc = peer.audit(question)
            except PeerError as error:
                self._auditor.on_audit_failed(epoch, error)
                if isinstance(error, ProtocolError) and not isinstance(error, AuditRefused):
                    continue  # it was about these scores only
                return  # where the peer is gone, the next step notices
            self._auditor.on_audit(epoch, scored, leak_auc)

    def _on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        self._stop_if_interrupted()
        self._observer.on_alignment_progress(done_ids, total_ids)

    def _stop_if_interrupted(self) -> None:
        signal_number = self._interruption()
        if signal_number is not None:
            raise Interrupted(signal_number)

    def _header(self, batch: Batch) -> BatchHeader:
        return BatchHeader(
            self.run_id, batch.epoch, batch.step, SPLIT_ON_WIRE[batch.split], batch.digest
        )

    def _check(self, reply: TensorMessage, batch: Batch) -> None:
        if reply.header != self._header(batch) or len(reply.values) != len(batch.positions):
            raise InvalidMessage(
                f"the gradient that came back is not for epoch {batch.epoch} step {batch.step}"
            )

    def _say_goodbye(self, peer: Peer, reason: "pb.LeaveReason") -> None:
        if not self.run_id:
            return  # there is no run that the peer could end
        # A goodbye that does not arrive changes nothing here: the peer notices the silence.
        with contextlib.suppress(PeerError):
            peer.leave(self.run_id, reason)


def _reason(error: SplitveilError) -> "pb.LeaveReason":
    if isinstance(error, AlignmentError):
        return pb.LEAVE_REASON_ALIGNMENT_FAILED
    if isinstance(error, Interrupted):
        return pb.LEAVE_REASON_INTERRUPTED
    return pb.LEAVE_REASON_FAILED
