"""Prepares the training of a run once its rows are known, or known again from a stored run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import LeakBudget, Limit
from splitveil.active_party.run.answering import Answering, TrainingSetup
from splitveil.active_party.run.parties import PassivePeers
from splitveil.active_party.run.questions import AnsweredQuestions
from splitveil.active_party.training.evaluation import EarlyStop, Evaluator
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.progress import (
    CheckpointStore,
    Progress,
    RunIdentity,
    State,
    refusing_other_versions,
)
from splitveil.common.run.sample_order import NONCE_BYTES, Positions, Splits

TrainerFactory = Callable[[AlignedRows], TopTrainer]

Counting = Callable[[AccountBook], AbstractContextManager[AccountBook]]
"""Counts earlier runs again, given those counted before; no other run begins in this context."""


class OwnRows(NamedTuple):
    ids: Sequence[str]
    """Canonical id of each row."""

    splits: Splits | None = None


@dataclass(frozen=True)
class OwnRules:
    """The label owner's own decisions about a run."""

    early_stop: EarlyStop | None = None
    """Decides after each epoch whether training continues; None never stops early."""

    earlier: AccountBook = field(default_factory=AccountBook.empty)
    """The accounts of earlier runs."""

    limit: Limit | None = None
    """What no example may exceed over the whole run; None for no limit."""

    peers: Adversary = Adversary.ANYBODY
    """The strongest adversary class that a charge may describe in this run."""

    noise_seed: int | None = None
    """For tests only: makes fresh noise predictable."""

    counting: Counting = nullcontext


@dataclass
class Preparation:
    """Builds everything that depends on the common rows."""

    contract: Contract
    own: OwnRows
    rules: OwnRules
    build_trainer: TrainerFactory

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Take over what earlier runs have charged by now, and keep others from beginning."""
        with self.rules.counting(self.rules.earlier) as earlier:
            self.rules = replace(self.rules, earlier=earlier)
            yield

    def prepare(self, file_rows: Positions, seed: bytes, store: CheckpointStore) -> TrainingSetup:
        """Put the common rows in order, and build the trainer and the accounts for them."""
        ids, splits = self.own
        rows = AlignedRows.derive(self.contract, seed, ids, file_rows, splits)
        progress, trainer = Progress(self.contract, rows, store), self.build_trainer(rows)
        rules = self.rules
        budget = LeakBudget(
            ids,
            rows,
            trainer.persons,
            rules.earlier,
            rules.limit,
            rules.peers,
            reveals_validation=rules.early_stop is not None,
        )
        return TrainingSetup(self.contract, rows, progress, trainer, budget)

    def begin_with(self, stored: State) -> None:
        """Begin with the accounts of earlier runs that a stored run began with."""
        with refusing_other_versions():
            earlier = AccountBook.from_state(stored["earlier"])
        if not self.rules.earlier.runs <= earlier.runs:
            raise SettingsError(
                "other runs have charged answers about the same labels since this one began, and "
                "its accounts and budget would not count them: expected earlier_ledgers as they "
                "were; --fresh at both parties starts over and counts all"
            )
        self.rules = replace(self.rules, earlier=earlier)

    def answering(
        self,
        run_id: str,
        parties: PassivePeers,
        setup: TrainingSetup,
        questions: AnsweredQuestions,
    ) -> Answering:
        evaluator = Evaluator(self.rules.early_stop, setup.trainer.kind)
        return Answering(run_id, parties, setup, questions, evaluator)


def state_of(identity: RunIdentity, secret: bytes, setup: TrainingSetup) -> State:
    """Return the state that is stored when a run begins."""
    return {
        "run_id": identity.run_id,
        "nonce": identity.active_nonce,
        "peer_nonce": b"".join(identity.passive_nonces),
        "secret": secret,
        "file_rows": torch.from_numpy(identity.file_rows),
        "data": identity.data_digest,
        "noise_key": setup.trainer.noise_key,
        "earlier": setup.budget.earlier.state_dict(),
    }


def check_noise_key(state: State, noise_key: str) -> None:
    """Check that a stored run continues with its first noise key."""
    if state["noise_key"] != noise_key:
        raise SettingsError(
            "noise_key_path: this is not the noise key with which the run began; restore that one, "
            "or start over with --fresh at both parties: what a new key draws is charged on top"
        )


def identity_in(state: State) -> RunIdentity:
    """Return the identity of a stored run."""
    joined = state["peer_nonce"]
    nonces = (joined[i : i + NONCE_BYTES] for i in range(0, len(joined), NONCE_BYTES))
    rows, data = state["file_rows"].numpy(), state["data"]
    return RunIdentity(state["run_id"], state["nonce"], tuple(nonces), rows, data)
