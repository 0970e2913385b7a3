"""The rules of the handshake and of the alignment's end. They decide and refuse; they do nothing.

A run about which something has been answered never starts over: it resumes from a checkpoint that
all parties have. A run about which nothing has been answered may start over, with another nonce:
the passive party that was lost has seen the first one.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Self

import numpy as np

from splitveil.active_party.run.parties import Pair, PassiveParties, PassiveParty
from splitveil.active_party.run.stages import RunStages, Stage
from splitveil.common.alignment import RowIndices, Share
from splitveil.common.alignment.share import Mask
from splitveil.common.errors import AlignmentError, ContractMismatch, OutOfStep, RunStartedOver
from splitveil.common.run.contract import Contract, check_same_contract
from splitveil.common.run.messages import Offer
from splitveil.common.run.sample_order import NONCE_BYTES, Positions
from splitveil.common.text.visible_text import visible

RESUMABLE = (Stage.REJOINING, Stage.TRAINING, Stage.FINISHED)
"""Stages at which a run may resume from a checkpoint."""


class NewRun(Enum):
    REPEATED = "it was answered before, and gets the same reply"
    OPENED = "the run is opened with this party"
    STARTED_OVER = "a run about which nothing was answered is dropped for a new one"


class Resumption(Enum):
    """The outcome of a handshake for a stored run."""

    REPEATED = "it was answered before, and gets the same reply"
    JOINED = "the run resumes once every party has asked for it"
    BEGUN = "every party has to ask for it, also those that had opened the run"


class OpenRun(NamedTuple):
    run_id: str
    nonce: bytes
    """This party's share of the joint seed."""

    dropped: frozenset[str] = frozenset()
    """Ids of earlier runs of this process, about which nothing was answered."""

    resumed_at: int | None = None
    """Number of batches after which the run was last resumed in this process."""

    @classmethod
    def new(cls, nonce: bytes, dropped: frozenset[str] = frozenset()) -> Self:
        return cls(secrets.token_hex(8), nonce, dropped)

    def start_over(self, nonce: bytes) -> "OpenRun":
        return OpenRun.new(nonce, self.dropped | {self.run_id})


class Whereabouts(NamedTuple):
    """The position of a run in its course, and the positions to which it could return."""

    batch_number: int

    checkpoints: frozenset[int]


class CommonRows(NamedTuple):
    file_rows: Positions
    nonces: tuple[bytes, ...]
    """All passive parties' shares of the joint seed, in the contract's order."""

    shares: tuple[Share, ...]
    """Empty for a single passive party, which knows the common rows already."""


def check_contract(contract: Contract, canonical: str, party: str) -> None:
    check_same_contract(contract, canonical, f"party {visible(party)}")
    if party not in contract.passive_parties:
        raise ContractMismatch(["passive_parties"])


def judge_new_run(stages: RunStages, *, is_known: bool, has_answered: bool) -> NewRun:
    """Decide about a handshake for a new run.

    Args:
        stages: the run's stage.
        is_known: whether the party committed to the same nonce before.
        has_answered: whether the run has answered anything yet.

    Raises:
        OutOfStep: it has, so that it must not start over.
    """
    if stages.current is Stage.HANDSHAKEN and is_known:
        return NewRun.REPEATED
    if has_answered:
        raise OutOfStep("a handshake for a new run, where one has begun")
    return NewRun.OPENED if stages.current is Stage.WAITING else NewRun.STARTED_OVER


def check_resumption(
    stages: RunStages, parties: PassiveParties, run: OpenRun, offer: Offer, *, is_known: bool
) -> None:
    """Compare a handshake for a stored run with the run that there is."""
    if parties.is_multi_party and offer.run_id in run.dropped:
        raise RunStartedOver("a peer asks to resume a run that has started over")
    if stages.current not in RESUMABLE or offer.run_id != run.run_id or not is_known:
        raise OutOfStep("a peer asks to resume another run than this one")


def judge_resumption(
    parties: PassiveParties, run: OpenRun, where: Whereabouts, offer: Offer
) -> Resumption:
    """Decide about a handshake for the stored run, once ``check_resumption`` has accepted it."""
    if not offer.batch_numbers & where.checkpoints:
        raise OutOfStep("the parties have no checkpoint in common")
    if not parties.have_opened:
        return Resumption.JOINED
    is_there = where.batch_number == run.resumed_at in offer.batch_numbers
    return Resumption.REPEATED if parties.is_multi_party and is_there else Resumption.BEGUN


def newest_common_checkpoint(parties: PassiveParties, checkpoints: frozenset[int]) -> int:
    common = checkpoints.intersection(*(party.offer for party in parties))
    if not common:
        raise OutOfStep("the parties have no checkpoint in common")
    return max(common)


def check_nonce(party: PassiveParty, nonce: bytes) -> None:
    """Compare a party's nonce with the commitment of its handshake, in constant time."""
    committed = hashlib.sha256(nonce).digest()
    if len(nonce) != NONCE_BYTES or not hmac.compare_digest(committed, party.commitment):
        raise OutOfStep("the peer's nonce is not the one it committed to")


def common_rows(contract: Contract, pairs: Sequence[Pair]) -> CommonRows:
    """Intersect the rows that the active party has in common with each passive party."""
    nonces = tuple(pair.nonce for pair in pairs)
    if len(pairs) == 1:
        return CommonRows(pairs[0].rows, nonces, ())
    masks = _masks([pair.rows for pair in pairs])
    rows = pairs[0].rows[masks[0]]
    if len(rows) < contract.alignment.min_aligned:
        raise AlignmentError(
            f"too few ids to train on: {len(rows)} that all parties have, "
            f"needed {contract.alignment.min_aligned}"
        )
    return CommonRows(rows, nonces, tuple(Share(mask, nonces) for mask in masks))


def _masks(pairs: Sequence[RowIndices]) -> list[Mask]:
    common = pairs[0]
    for rows in pairs[1:]:
        common = np.intersect1d(common, rows, assume_unique=True)
    return [np.isin(rows, common) for rows in pairs]
