"""The active party as the passive party sees it, and the opening of a run: handshake, alignment."""

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from splitveil.common.alignment.channel import AlignChannel
from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.exchange import (
    Agree,
    Alignment,
    align,
    build_engine,
    receive_share,
    records_of,
)
from splitveil.common.alignment.store import ExchangeStores
from splitveil.common.alignment.tried_ids import TriedIds
from splitveil.common.errors import AlignmentError, ContractMismatch, InvalidMessage
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.party_data import PartyData
from splitveil.common.run import messages
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.run.messages import Offer, Opening
from splitveil.common.run.sample_order import Splits
from splitveil.passive_party.settings import PassiveSettings


class Peer(Protocol):
    """The requests that the active party takes. Any call may raise a ``PeerError``.

    Training and evaluation have two halves, so that this party can use the time in between.
    """

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: messages.Offer | None = None
    ) -> messages.Opening:
        """Open a run, or resume one."""

    def open_alignment(self) -> AlignChannel:
        """Open the channel between the two alignment engines."""

    def close_alignment(self) -> None:
        """Wait until the peer has the alignment's result as well."""

    def send_activation(self, activation: messages.Activation) -> None:
        """Send the activation of a training batch; ``pipeline_depth`` may wait for gradients."""

    def receive_gradient(self) -> messages.Answer:
        """Wait for the defended gradient of the oldest activation without one."""

    def send_held_out(self, activation: messages.Activation) -> None:
        """Send the activation of held-out rows; ``evaluations_ahead`` may wait for replies."""

    def receive_course(self) -> messages.Course:
        """Wait for the reply to the oldest held-out rows without one: does the run continue?"""

    def leave(self, run_id: str, reason: messages.LeaveReason) -> None:
        """Leave the run, and give the reason."""


@dataclass(frozen=True)
class Participant:
    contract: Contract
    name: str
    ids: Sequence[str]  # canonical ids, by row of the file
    file_splits: Splits | None = None  # split of each row, if the contract splits by a column

    @property
    def index(self) -> int:
        return self.contract.passive_parties.index(self.name)

    @property
    def has_companions(self) -> bool:
        return len(self.contract.passive_parties) > 1

    def handshake(self, peer: Peer, nonce: bytes, offer: Offer | None = None) -> Opening:
        """Open a run, or resume the offered one; commit to the nonce. Raises ContractMismatch."""
        opening = peer.handshake(
            self.name, self.contract.canonical_json(), _commitment(nonce), offer
        )
        if not hmac.compare_digest(opening.contract_digest, self.contract.digest()):
            raise ContractMismatch(["(the active party holds another contract)"])
        return opening


class Aligner:
    """Finds the rows that all parties have in common.

    Args:
        draw_nonce: gives this party's share of the joint seed, 32 bytes, a new one per
            alignment.
        tried: counts the ids that the active party tries; by default while this process lives.
        kept: where an unfinished exchange is kept to be resumed; by default it is not.
    """

    def __init__(
        self,
        participant: Participant,
        engine: EcdhEngine,
        draw_nonce: Callable[[], bytes],
        tried: TriedIds | None = None,
        kept: ExchangeStores | None = None,
    ) -> None:
        self.participant = participant
        self.engine = engine
        self.draw_nonce = draw_nonce
        self.tried = tried or TriedIds(participant.contract.alignment.max_set_size)
        self.kept = kept

    @classmethod
    def of(
        cls, settings: PassiveSettings, data: PartyData, folder: Path, *, fresh: bool = False
    ) -> "Aligner":
        """Build the alignment for a run in a folder; if fresh, resume nothing stored there."""
        kept, tried = records_of(settings, folder)
        if fresh:
            kept.discard()
        contract = settings.contract
        return cls(
            Participant(contract, settings.party, data.ids, data.table.splits),
            build_engine(contract.alignment),
            partial(draw_nonce, settings),
            tried,
            kept,
        )

    def align(
        self,
        peer: Peer,
        opening: Opening,
        nonce: bytes,
        on_progress: Callable[[int, int], None],
        stop_if_interrupted: Callable[[], None],
    ) -> Alignment:
        """Align with the active party, and through it with the other passive parties.

        Returns the rows of this party's file that all parties have, and the nonces of all passive
        parties in the contract's order.
        """
        has_companions = self.participant.has_companions
        store = None if self.kept is None else self.kept.of(ACTIVE)
        alignment = align(
            self.engine,
            self.participant.ids,
            peer.open_alignment(),
            nonce=nonce,
            run_id=opening.run_id,
            progress=on_progress,
            agree=self._agreeing(opening, nonce, stop_if_interrupted) if has_companions else None,
            splits=self.participant.file_splits,
            counting=partial(self.tried.counted, ACTIVE),
            store=store,
        )
        peer.close_alignment()
        if store is not None:
            store.discard()
        if alignment.peer_nonce != opening.nonce:
            raise InvalidMessage("the active party's nonce changed since the handshake")
        return alignment if has_companions else alignment._replace(nonces=(nonce,))

    def forget(self) -> None:
        if self.kept is not None:
            self.kept.discard()
        self.tried.forget()

    def _agreeing(
        self, opening: Opening, nonce: bytes, stop_if_interrupted: Callable[[], None]
    ) -> Agree:
        contract, index = self.participant.contract, self.participant.index
        if len(opening.commitments) != len(contract.passive_parties) or opening.commitments[
            index
        ] != _commitment(nonce):
            raise InvalidMessage("the handshake's reply does not hold this party's commitment")

        def agree(alignment: Alignment, channel: AlignChannel) -> Alignment:
            in_common = len(alignment.rows)
            share = receive_share(channel, in_common, opening.commitments, stop_if_interrupted)
            rows = alignment.rows[share.mask]
            if len(rows) < contract.alignment.min_aligned:
                raise AlignmentError(
                    f"too few ids to train on: {in_common} in common with the active party, "
                    f"{len(rows)} of them with all, needed {contract.alignment.min_aligned}"
                )
            return alignment._replace(rows=rows, nonces=share.nonces)

        return agree


def _commitment(nonce: bytes) -> bytes:
    return hashlib.sha256(nonce).digest()
