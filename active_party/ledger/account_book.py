"""Ledgers by example instead of by place: what earlier runs may have told of each label.

By itself a run's ledger counts from nothing, but an example that two runs answer about tells twice.
So each run leaves its accounts together with what names their examples, and a later one that is
given them begins where they ended. Accounts of examples that the later run does not have stay in
its book, so that a chain of runs needs the newest book alone.

An example is named by a hash of its canonical id. That is no secret: the book is the label owner's
own, as the ids are.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from splitveil.active_party.ledger.ledger import LeakLedger
from splitveil.common.run.sample_order import Positions

Names = npt.NDArray[np.uint8]
"""A digest for each example, (examples, 16)."""

_EXAMPLES = "examples"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class AccountBook:
    """Accounts, and whose they are."""

    names: Names
    """Each once."""

    ledger: LeakLedger
    """In the same order."""

    @classmethod
    def empty(cls) -> "AccountBook":
        """Return the book before the first run."""
        return cls(np.empty((0, _DIGEST_BYTES), dtype=np.uint8), LeakLedger(0))

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "AccountBook":
        """Return the book of which these are the tensors.

        Raises:
            ValueError: they are no book's.
        """
        names = state.get(_EXAMPLES)
        if names is None or names.dtype != torch.uint8 or names.shape[1:] != (_DIGEST_BYTES,):
            raise ValueError("does not say whose accounts these are")
        ledger = LeakLedger(len(names))
        ledger.load_state_dict({name: part for name, part in state.items() if name != _EXAMPLES})
        return cls(names.numpy(), ledger)

    def __len__(self) -> int:
        return len(self.names)

    def most(self) -> float:
        """Return the largest divergence of any account."""
        everybody = np.arange(len(self))
        return self.ledger.bounds(everybody).sum_kl.max if len(self) else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return what ``from_state`` takes."""
        return self.ledger.state_dict() | {_EXAMPLES: torch.from_numpy(self.names)}

    def with_all_of(self, other: "AccountBook") -> "AccountBook":
        """Return a book of the examples of both: what both told of one, they told together."""
        at = _places(other.names, self.names)
        new = np.flatnonzero(at < 0)
        at[new] = len(self) + np.arange(len(new))
        ledger, own = LeakLedger(len(self) + len(new)), np.arange(len(self))
        ledger.add(own, self.ledger, own)
        ledger.add(at, other.ledger, np.arange(len(other)))
        return AccountBook(np.concatenate([self.names, other.names[new]]), ledger)

    def begun(self, ids: Iterable[str], num_examples: int) -> LeakLedger:
        """Return the ledger with which a run begins.

        Args:
            ids: canonical ones in the common order.
            num_examples: how many.
        """
        ledger = LeakLedger(num_examples)
        if len(self):
            of = _places(_names(ids), self.names)
            known = np.flatnonzero(of >= 0)
            ledger.add(known, self.ledger, of[known])
        return ledger

    def closed(self, ids: Iterable[str], ledger: LeakLedger) -> "AccountBook":
        """Return the book that a run leaves which began with this one.

        Args:
            ids: canonical ones in the common order.
            ledger: the run's, as ``begun`` returned it and with all charges since.
        """
        names = _names(ids)
        others = np.flatnonzero(_places(self.names, names) < 0)
        return AccountBook(
            np.concatenate([names, self.names[others]]), ledger.followed_by(self.ledger, others)
        )


def _names(ids: Iterable[str]) -> Names:
    digests = (
        hashlib.blake2b(one.encode(), digest_size=_DIGEST_BYTES, person=b"leak account").digest()
        for one in ids
    )
    texts = np.fromiter(digests, dtype=f"S{_DIGEST_BYTES}")  # one by one: there may be millions
    return texts.view(np.uint8).reshape(-1, _DIGEST_BYTES)


def _places(of: Names, among: Names) -> Positions:
    """Return where each name stands among others; -1 where it does not."""
    found = pc.index_in(_column(of), value_set=_column(among))
    places: Positions = pc.fill_null(found, -1).to_numpy().astype(np.int64)
    return places


def _column(names: Names) -> pa.Array:
    names = np.ascontiguousarray(names)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_DIGEST_BYTES), len(names), [None, pa.py_buffer(names)]
    )
