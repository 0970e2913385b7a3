"""The leak ledger for other trainers: what all answers about each example may have revealed.

It is the ledger of a run (`splitveil.active_party.ledger`), which adds up charges by example and
knows the peers that a charge holds for, behind an interface that needs no run.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from torch import Tensor

from splitveil.active_party.ledger import account_book
from splitveil.active_party.ledger.budget import Limit
from splitveil.active_party.ledger.ledger import LeakLedger, auc_bound
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.ids import canonical_ids
from splitveil.common.privacy.charge import Adversary, Charge, holds_against
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record.model_files import save_tensors
from splitveil.common.run.id_rules import rules_as_bytes, rules_of_bytes
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.wording import at_most, auc_at_most
from splitveil.library.frames import Frame, Row, Tabular, frame

Rows: TypeAlias = Sequence[int] | Sequence[str] | Positions | Tensor | None
"""Positions of examples, their ids if the ledger knows ids, or None for all of them."""


class Ledger(Tabular):
    """One account per example, for any trainer that answers about examples.

        ledger = Ledger(10_000)
        if not ledger.would_exceed(0.01, rows, adversary="anybody", leak_auc=0.65):
            ledger.charge(0.01, rows, adversary="anybody")
        ledger.guarantee().guarantee.max   # the AUC that no score of anybody exceeds

    Charge an answer before it leaves, and never take a charge back.

    Args:
        examples: the number of examples, or their ids, each once.

    Raises:
        DataError: an id is empty or occurs twice.
    """

    def __init__(self, examples: int | Iterable[str]) -> None:
        self._names: account_book.Names | None = None
        self._form = CanonicalForm()
        count = examples
        if not isinstance(count, int):
            ids = canonical_ids([str(one) for one in count], "Ledger")
            self._names, count = account_book.names_of(ids), len(ids)
        self._accounts = LeakLedger(count)

    @classmethod
    def load(cls, folder: str | Path) -> "Ledger":
        """Load the ledger that a run or ``save`` wrote, as to ``runs/NAME/active/checkpoint``.

        Ids are then compared by the rules of that run's contract.

        Raises SettingsError if there is none, or it cannot be read.
        """
        book = account_book.open_book(Path(folder))
        ledger = cls(len(book))
        ledger._names, ledger._accounts = book.names, book.total()
        ledger._form = CanonicalForm(rules_of_bytes(book.id_rules))
        return ledger

    def __len__(self) -> int:
        return len(self._accounts)

    def charge(
        self,
        charge: Charge | float,
        rows: Rows = None,
        *,
        adversary: Adversary | str | None = None,
        is_gaussian: bool = False,
    ) -> None:
        """Charge one answer.

        Args:
            charge: what it adds to each example: the symmetrised divergence between the answers of
                the two labels, or a `Charge` with noise identity and epsilon.
            rows: the examples that it is about, each once; all by default.
            adversary: the peers whom a plain divergence describes: ``anybody``,
                ``honest-but-curious`` or ``knows class means only``. Required for a number.
            is_gaussian: whether a plain divergence is mu squared of a Gaussian mechanism.

        Raises:
            ValueError: a number comes without ``adversary``, or a row is unknown or given twice.
        """
        self._accounts.charge(self._positions(rows), _charge(charge, adversary, is_gaussian))

    def guarantee(self, rows: Rows = None) -> LeakBounds:
        """Return the bounds on all answers so far, over some examples; all by default.

        ``guarantee(...).guarantee`` is the AUC that no score of anybody exceeds, as ``max``,
        ``q95`` and ``mean`` over the examples; ``against(peers)`` is the same for fewer peers. An
        AUC of 1 is no bound.

        Raises ValueError if there are no examples, or a row is unknown or given twice.
        """
        positions = self._positions(rows)
        if not len(positions):
            raise ValueError("expected at least one example, got none")
        return self._accounts.bounds(positions)

    def would_exceed(
        self,
        charge: Charge | float,
        rows: Rows = None,
        *,
        adversary: Adversary | str | None = None,
        is_gaussian: bool = False,
        leak_auc: float | None = None,
        sum_kl: float | None = None,
        peers: Adversary | str = Adversary.ANYBODY,
    ) -> bool:
        """Return whether an answer would take an example beyond a limit; nothing is charged.

        The first four arguments are those of ``charge``.

        Args:
            charge, rows, adversary, is_gaussian: the answer.
            leak_auc: the limit as an AUC, above 0.5 and below 1; this or ``sum_kl``.
            sum_kl: the limit as a divergence, above 0.
            peers: the peers for whom the limit has to hold. An account that does not describe them
                exceeds every limit.

        Raises:
            ValueError: as for ``charge``, or there is not exactly one limit, or it is out of range.
        """
        limit = _limit(leak_auc, sum_kl, Adversary(peers))
        positions = self._positions(rows)
        if not len(positions):
            return False
        reached = self._accounts.after(positions, _charge(charge, adversary, is_gaussian))
        return limit.objection(reached) is not None

    def frame(self, rows: Rows = None) -> Frame:
        """Return the accounts, one row per example, as a data frame (else a ``pyarrow.Table``).

        Its columns are ``sum_kl``, the strongest ``adversary`` class that the account describes,
        and the bound for each adversary class. ``rows`` are all examples by default.
        """
        positions = self._positions(rows)
        found = self._accounts.accounts(positions)
        accounts = ((position, found.at(at)) for at, position in enumerate(positions))
        return frame(
            {
                "example": int(position),
                "sum_kl": float(one.sum_kl),
                "adversary": str(one.adversary),
                **{
                    peers.column: auc_bound(one) if holds_against(int(one.caveats), peers) else 1.0
                    for peers in Adversary
                },
            }
            for position, one in accounts
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the accounts as tensors for ``load_state_dict``."""
        if self._names is None:
            return self._accounts.state_dict()
        rules = rules_as_bytes(self._form.rules)
        return account_book.AccountBook(self._names, self._accounts, rules).state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the accounts that ``state_dict`` returned.

        Raises ValueError if the state is of other examples, or does not come from a ledger.
        """
        if self._names is None:
            self._accounts.load_state_dict(state)
            return
        book = account_book.AccountBook.from_state(state)
        if len(book) != len(self) or not np.array_equal(book.names, self._names):
            raise ValueError("expected the accounts of the same ids in the same order")
        self._accounts = book.total()

    def save(self, folder: str | Path) -> Path:
        """Write ``checkpoint/ledger.safetensors`` into a folder, and return the file's path.

        Name that ``checkpoint`` in ``earlier_ledgers`` of a run's settings.

        Raises:
            ValueError: the ledger knows no ids, so that a run could not find its examples again.
            StorageError: the file cannot be written.
        """
        if self._names is None:
            raise ValueError("expected a ledger with ids: Ledger(ids), not Ledger(number)")
        path = Path(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return save_tensors(path, account_book.LEDGER, self.state_dict())

    def _table(self) -> tuple[str, Sequence[Row], str]:
        title = f"Ledger of {len(self):,} examples: bounds on the leak AUC"
        if not len(self):
            return title, [], "no examples"
        bounds = self.guarantee()
        rows = [
            {"peers": str(one), "max": max_auc, "95 %": q95, "mean": mean}
            for one in Adversary
            for max_auc, q95, mean in [map(auc_at_most, bounds.against(one))]
        ]
        return title, rows, f"largest sum_kl: {at_most(bounds.sum_kl.max)}; 1 is no bound"

    def _positions(self, rows: Rows) -> Positions:
        if rows is None:
            return np.arange(len(self))
        given = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows)
        if given.dtype.kind in "UO" and len(given):
            if self._names is None:
                raise ValueError("expected positions: this ledger knows no ids")
            ids = canonical_ids([str(one) for one in rows], "rows", self._form)
            given = account_book.indices_of(account_book.names_of(ids), self._names)
        elif given.dtype == bool:
            if given.shape != (len(self),):
                raise ValueError(f"expected a mask of {len(self)} examples, got {given.shape}")
            given = np.flatnonzero(given)
        positions: Positions = given.astype(np.int64)
        if len(positions) and (positions.min() < 0 or positions.max() >= len(self)):
            raise ValueError(f"expected examples of this ledger, which has {len(self)}")
        if len(np.unique(positions)) < len(positions):
            raise ValueError("expected each example once")
        return positions


def _charge(
    charge: Charge | float,
    adversary: Adversary | str | None,
    is_gaussian: bool,  # noqa: FBT001 - handed on from keywords
) -> Charge:
    if isinstance(charge, Charge):
        if adversary is not None or is_gaussian:
            raise ValueError("adversary and is_gaussian: a Charge says both itself")
        return charge
    if adversary is None:
        names = ", ".join(repr(str(one)) for one in Adversary)
        raise ValueError(f"adversary: expected the peers whom the charge describes: {names}")
    return Charge(float(charge), adversary=Adversary(adversary), is_gaussian=is_gaussian)


def _limit(leak_auc: float | None, sum_kl: float | None, peers: Adversary) -> Limit:
    if (leak_auc is None) == (sum_kl is None):
        raise ValueError("expected one limit: leak_auc or sum_kl")
    if leak_auc is not None:
        if not 0.5 < leak_auc < 1:
            raise ValueError(f"leak_auc: expected an AUC above 0.5 and below 1, got {leak_auc}")
        return Limit.of_leak_auc(leak_auc, peers)
    if sum_kl is None or not sum_kl > 0:
        raise ValueError(f"sum_kl: expected a divergence above 0, got {sum_kl}")
    return Limit.of_sum_kl(sum_kl, peers)
