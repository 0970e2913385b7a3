"""The passive party's way through a run: handshake, alignment, epochs, farewell. No I/O.

Where either party was restarted, the run goes on from the newest checkpoint that both have.
"""

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from splitveil.common.alignment import (
    Agree,
    AlignChannel,
    Alignment,
    AlignmentEngine,
    Splits,
    TriedIds,
    align,
    receive_share,
)
from splitveil.common.errors import (
    AlignmentError,
    AuditRefused,
    ContractMismatch,
    DataError,
    Interrupted,
    InvalidMessage,
    NothingBegun,
    PeerError,
    PeerLeft,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
    StorageError,
)
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.run.course import (
    AlignedRows,
    Batch,
    is_checkpoint,
    place_in_words,
    run_course,
)
from splitveil.common.run.messages import (
    Activation,
    Answer,
    AuditQuestion,
    Course,
    LeaveReason,
    Offer,
    Opening,
)
from splitveil.common.run.progress import State, refusing_other_versions
from splitveil.common.run.sample_order import Positions, joint_seed, positions_digest
from splitveil.common.storage.run_store import RunStore
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.passive_party.label_free_audit import GatheredScores
from splitveil.passive_party.peer import Peer

_MAX_ALIGNMENTS = 20
"""How often one process aligns anew because the peer was lost meanwhile."""

_MAX_DAMAGED = 3
"""How often it aligns anew because a message of the alignment was not what it has to be."""


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

    def on_resumed(self, epoch: int | None) -> None:
        """The run goes on from a checkpoint, in an epoch, or None where there is nothing left."""

    def state_dict(self) -> State:
        """Return what was seen so far, for a checkpoint."""

    def load_state_dict(self, state: State) -> None:
        """Forget what was seen since."""


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
        draw_nonce: gives this party's share of the joint seed, 32 bytes, anew for each alignment.
        interruption: returns the signal that asks this party to stop, once there is one.
        auditor: gives the scores for audits, or None for no audits.
        store: where checkpoints go, and come from; None for a run that cannot be gone on with.
        file_splits: split of each row of this party's file, where the contract splits by a column.
        tried: counts the ids that the active party tries; by default while this process lives.
        on_opened: called whenever the active party has opened the run, or goes on with it.
    """

    def __init__(
        self,
        contract: Contract,
        party: str,
        ids: Sequence[str],
        engine: AlignmentEngine,
        build_trainer: TrainerFactory,
        observer: RunObserver,
        draw_nonce: Callable[[], bytes],
        interruption: Callable[[], int | None] = lambda: None,
        auditor: Auditor | None = None,
        store: RunStore | None = None,
        file_splits: Splits | None = None,
        tried: TriedIds | None = None,
        on_opened: Callable[[], None] = lambda: None,
    ) -> None:
        self.contract = contract
        self._on_opened = on_opened
        self._file_splits = file_splits
        self.trainer: BottomTrainer | None = None
        self.run_id = ""
        self._party = party
        self._ids = ids
        self._engine = engine
        self._tried = tried or TriedIds(contract.alignment.max_set_size)
        self._build_trainer = build_trainer
        self._observer = observer
        self._draw_nonce = draw_nonce
        self._nonce = b""
        self._interruption = interruption
        self._auditor = auditor
        self._store = store
        self._rows: AlignedRows | None = None
        self._place = 0
        self._is_over = False
        self._unobserved: tuple[Batch, Tensor, Tensor, dict[str, Tensor]] | None = None

    def run(self, peer: Peer) -> None:
        """Go through the whole run, and tell the peer how it ended.

        Raises:
            SplitveilError: whatever ended the run before its last step; Interrupted goes before
                what the peer says meanwhile. The trainer, if there is one by then, holds the
                model as far as it got.
        """
        try:
            if not self._reopen():
                self._open_patiently(peer)
            elif not self._is_over:
                self._go_on(peer)
            while True:
                with contextlib.suppress(PeerRestarted):
                    if not self._is_over:
                        self._train(peer)
                    self._part_from_others(peer)
                    break
                self._go_on(peer)
        except (PeerUnreachable, PeerLeft, ContractMismatch):
            # A terminal's Ctrl-C reaches both parties: then either may hear of the other's first.
            self._stop_if_interrupted()
            raise
        except SplitveilError as error:
            self._save_if_between_steps(error)
            self._say_goodbye(peer, _reason(error))
            raise
        except BaseException:
            self._say_goodbye(peer, LeaveReason.FAILED)
            raise
        if not self._has_several:
            self._say_goodbye(peer, LeaveReason.FINISHED)

    # ---- opening ----

    def _open_patiently(self, peer: Peer) -> None:
        """Open a new run, from the handshake again where the alignment does not come to its end."""
        damaged = 0
        for attempt in range(_MAX_ALIGNMENTS):
            try:
                self._open(peer)
            except (PeerUnreachable, PeerRestarted, ProtocolError) as error:
                damaged += isinstance(error, ProtocolError)
                # Where not even a handshake was answered, the peer has been waited for long enough.
                if not self.run_id or attempt == _MAX_ALIGNMENTS - 1 or damaged > _MAX_DAMAGED:
                    raise
                self._stop_if_interrupted()
                self.run_id = ""
            else:
                return

    def _handshake(self, peer: Peer, offer: Offer | None) -> Opening:
        commitment = hashlib.sha256(self._nonce).digest()
        canonical = self.contract.canonical_json()
        opening = peer.handshake(self._party, canonical, commitment, offer)
        if not hmac.compare_digest(opening.contract_digest, self.contract.digest()):
            raise ContractMismatch(["(the active party holds another contract)"])
        self._on_opened()
        return opening

    def _open(self, peer: Peer) -> None:
        self._nonce = self._draw_nonce()
        opening = self._handshake(peer, None)
        if len(opening.nonce) != 32:
            raise InvalidMessage(f"nonce: expected 32 bytes, got {len(opening.nonce)}")
        self.run_id = opening.run_id
        alignment = align(
            self._engine,
            self._ids,
            peer.open_alignment(),
            nonce=self._nonce,
            run_id=self.run_id,
            progress=self._on_alignment_progress,
            agree=self._agree_with_all(opening) if self._has_several else None,
            splits=self._file_splits,
            counting=partial(self._tried.counted, ACTIVE),
        )
        peer.close_alignment()
        if alignment.peer_nonce != opening.nonce:
            raise InvalidMessage("the active party's nonce changed since the handshake")
        nonces = alignment.nonces if self._has_several else (self._nonce,)
        rows, trainer = self._prepare(alignment.rows, joint_seed(opening.nonce, *nonces))
        if self._store is not None:
            self._store.save_run(
                {
                    "run_id": self.run_id,
                    "nonce": self._nonce,
                    "peer_nonce": opening.nonce,
                    "passive_nonces": list(nonces),
                    "file_rows": torch.from_numpy(rows.file_rows),
                    "data": trainer.data_digest,
                }
            )
        self._save(trainer)

    def _agree_with_all(self, opening: Opening) -> Agree:
        """Return what finds the ids that all parties have, of those that this pair has."""
        place = self.contract.passive_parties.index(self._party)
        own = hashlib.sha256(self._nonce).digest()
        if (
            len(opening.commitments) != len(self.contract.passive_parties)
            or opening.commitments[place] != own
        ):
            raise InvalidMessage("the handshake's reply does not hold this party's commitment")

        def agree(alignment: Alignment, channel: AlignChannel) -> Alignment:
            in_common = len(alignment.rows)
            share = receive_share(
                channel, in_common, opening.commitments, self._stop_if_interrupted
            )
            rows = alignment.rows[share.mask]
            if len(rows) < self.contract.alignment.min_aligned:
                raise AlignmentError(
                    f"too few ids to train on: {in_common} in common with the active party, "
                    f"{len(rows)} of them with all, needed {self.contract.alignment.min_aligned}"
                )
            return alignment._replace(rows=rows, nonces=share.nonces)

        return agree

    def _prepare(self, file_rows: Positions, seed: bytes) -> tuple[AlignedRows, BottomTrainer]:
        """Make all that the common rows are needed for."""
        self._rows = AlignedRows.derive(
            self.contract, seed, self._ids, file_rows, self._file_splits
        )
        self.trainer = self._build_trainer(self._rows)
        self._observer.on_aligned(self._rows, seed)
        self._place = 0
        return self._rows, self.trainer

    # ---- going on ----

    def _reopen(self) -> bool:
        """Take up the run in the store, if there is one, and say so."""
        stored = None if self._store is None else self._store.run()
        if self._store is None or stored is None:
            return False
        places = self._store.checkpoints()
        if not places:
            return False
        self.run_id, self._nonce = stored["run_id"], stored["nonce"]
        file_rows = stored["file_rows"].numpy()
        if len(file_rows) and int(file_rows.max()) >= len(self._ids):
            raise _other_data()
        with refusing_other_versions():
            seed = joint_seed(stored["peer_nonce"], *stored["passive_nonces"])
        _, trainer = self._prepare(file_rows, seed)
        if trainer.data_digest != stored["data"]:
            raise _other_data()
        self._restore(places[-1])
        return True

    def _go_on(self, peer: Peer) -> None:
        """Agree with the peer on a checkpoint, and go back to it."""
        if self._is_over and not self._has_several:
            return  # whatever the peer has left to do, it does without this party
        if self._store is None:
            raise PeerLeft("the peer was restarted, and this party keeps no checkpoints")
        offer = Offer(self.run_id, frozenset(self._store.checkpoints()))
        try:
            opening = self._handshake(peer, offer)
        except NothingBegun:
            if self._place:
                raise
            self.run_id = ""
            self._open_patiently(peer)
            return
        except ProtocolError as error:
            raise ProtocolError(
                "the active party cannot go on with this run; to begin anew, start both with "
                "--fresh"
            ) from error
        if opening.run_id != self.run_id or opening.resumes_at not in offer.batch_numbers:
            raise InvalidMessage("the active party goes on with another run than this one")
        self._restore(opening.resumes_at)

    def _restore(self, place: int) -> None:
        if self._store is None or self.trainer is None or self._rows is None:
            raise RuntimeError("no state without a store and a trainer")
        state = self._store.load(place)
        with refusing_other_versions():
            self._place, self._is_over = place, state["is_over"]
            self.trainer.load_state_dict(state["trainer"])
            self._observer.load_state_dict(state["observer"])
        following = None if self._is_over else next(self._course(), None)
        self._observer.on_resumed(None if following is None else following.epoch)

    def _save(self, trainer: BottomTrainer, *, soon: bool = False) -> None:
        if self._store is None:
            return
        state: State = {
            "trainer": trainer.state_dict(),
            "observer": self._observer.state_dict(),
            "is_over": self._is_over,
        }
        save = self._store.save_soon if soon else self._store.save
        save(self._place, state)

    def _save_if_between_steps(self, error: SplitveilError) -> None:
        if isinstance(error, StorageError) or self.trainer is None or self._rows is None:
            return
        if self.trainer.is_between_steps and self._place:
            self._save(self.trainer)

    # ---- training ----

    def _course(self) -> Iterator[Batch]:
        if self._rows is None:
            raise RuntimeError("no course before the rows are known")
        return run_course(self.contract, self._rows, self._place)

    def _train(self, peer: Peer) -> None:
        rows, trainer = self._rows, self.trainer
        if rows is None or trainer is None:
            raise RuntimeError("no training before the rows are known")
        try:
            self._follow_course(peer, trainer, rows)
        finally:
            self._finish_step()

    def _follow_course(self, peer: Peer, trainer: BottomTrainer, rows: AlignedRows) -> None:
        course = self._course()
        batch = next(course, None)
        features = trainer.rows(batch.positions) if batch else None
        while batch is not None and features is not None:
            self._stop_if_interrupted()
            if batch.split == "train":
                activation = trainer.forward(features)
                peer.send_activation(Activation(batch.identity(self.run_id), activation))
                self._finish_step()
                following = next(course, None)
                features = trainer.rows(following.positions) if following else None
                reply = peer.receive_gradient()
                self._check(reply, batch)
                layers = trainer.backward(reply.values)
                self._place += 1
                self._unobserved = (batch, activation, reply.values, layers)
            else:
                self._finish_step()
                held_out = Activation(batch.identity(self.run_id), trainer.embed(features))
                stops = peer.evaluate(held_out) is Course.STOP
                if stops and not batch.closes_epoch:
                    raise InvalidMessage("the run is said to be over in the midst of an epoch")
                self._place += 1
                following = None if stops else next(course, None)
                features = trainer.rows(following.positions) if following else None
                self._is_over = following is None  # what ends the audits must not end that
                if batch.closes_epoch:
                    self._observer.on_epoch(batch.epoch)
                    self._audit(peer, batch.epoch, rows)
            self._is_over = following is None
            if is_checkpoint(self.contract, rows, batch):
                self._finish_step()
                self._save(trainer, soon=not self._is_over)
            batch = following

    def _finish_step(self) -> None:
        """Tell of the step before: while the peer works on the next one, which nobody waits for."""
        if self._unobserved is not None:
            step, self._unobserved = self._unobserved, None
            self._observer.on_step(*step)

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
            except PeerRestarted:
                raise
            except PeerError as error:
                self._auditor.on_audit_failed(epoch, error)
                if isinstance(error, ProtocolError) and not isinstance(error, AuditRefused):
                    continue  # it was about these scores only
                return  # where the peer is gone, the next step notices
            self._auditor.on_audit(epoch, scored, leak_auc)

    def _on_alignment_progress(self, done_ids: int, total_ids: int) -> None:
        self._stop_if_interrupted()
        self._observer.on_alignment_progress(done_ids, total_ids)

    @property
    def _has_several(self) -> bool:
        """Whether there are other passive parties."""
        return len(self.contract.passive_parties) > 1

    def _stop_if_interrupted(self) -> None:
        signal_number = self._interruption()
        if signal_number is not None:
            raise Interrupted(signal_number)

    def _check(self, reply: Answer, batch: Batch) -> None:
        if reply.batch != batch.identity(self.run_id) or len(reply.values) != len(batch.positions):
            raise InvalidMessage(
                "the gradient that came back is not for " + place_in_words(batch.epoch, batch.step)
            )

    def _part_from_others(self, peer: Peer) -> None:
        """Say goodbye and wait until all do: another party may yet have to go back."""
        if not self._has_several:
            return
        try:
            peer.leave(self.run_id, LeaveReason.FINISHED)
        except PeerRestarted:
            raise
        except PeerError:
            return  # it changes nothing here: the peer notices the silence

    def _say_goodbye(self, peer: Peer, reason: LeaveReason) -> None:
        if not self.run_id:
            return  # there is no run that the peer could end
        # A goodbye that does not arrive changes nothing here: the peer notices the silence.
        with contextlib.suppress(PeerError):
            peer.leave(self.run_id, reason)


def _other_data() -> DataError:
    return DataError(
        "this party's data are not those that the run began with; put them back, or begin anew "
        "with --fresh"
    )


def _reason(error: SplitveilError) -> LeaveReason:
    if isinstance(error, AlignmentError):
        return LeaveReason.ALIGNMENT_FAILED
    if isinstance(error, Interrupted):
        return LeaveReason.INTERRUPTED
    return LeaveReason.FAILED
