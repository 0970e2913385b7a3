"""Ledgers by example instead of by row: how much earlier runs may have revealed about each label.

A run's ledger counts from zero, but an example about which two runs answer is exposed twice. So
each run leaves its accounts together with names of their examples, and a later run that is given
them starts where they ended. Accounts of examples that the later run lacks stay in its book, so a
chain of runs needs only the newest book.

An example is named by a hash of its canonical id. A person whom several rows are about has an
account besides, named by a hash of its entry: what any run has revealed about one of these rows
counts for all of them. The hashes need not be secret: the book belongs to the label owner, as do
ids and entries.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from splitveil.active_party.ledger.bounds import NOTHING, KnownBounds, strongest_adversary
from splitveil.active_party.ledger.ledger import Exposure, LeakLedger
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.run.id_rules import rules_of_bytes
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.files import check_regular

LEDGER = "ledger.safetensors"  # file in the active party's ``checkpoint`` folder
SETTING = "earlier_ledgers"

Names = npt.NDArray[np.uint8]  # a digest for each example, (examples, 16)

_EXAMPLES = "examples"
_ID_RULES = "id_rules"
_RUNS = "runs"
_DIGEST_BYTES = 16
_RULES_BYTES = 64 * 1024


@dataclass(frozen=True)
class AccountBook:
    """Accounts together with the names of their examples."""

    names: Names  # each once
    ledger: LeakLedger  # the accounts, in the order of the names
    id_rules: bytes = b""  # `rules_as_bytes` of the ids' canonical form
    runs: frozenset[bytes] = frozenset()  # digests of all whose charges it has

    @classmethod
    def empty(cls, id_rules: bytes = b"") -> "AccountBook":
        return cls(np.empty((0, _DIGEST_BYTES), dtype=np.uint8), LeakLedger(0), id_rules)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> "AccountBook":
        """Rebuild a book from its tensors; raises ValueError if they are not of a book."""
        names = state.get(_EXAMPLES)
        if names is None or names.dtype != torch.uint8 or names.shape[1:] != (_DIGEST_BYTES,):
            raise ValueError("does not say whose accounts these are")
        ledger = LeakLedger(len(names))
        others = (_EXAMPLES, _ID_RULES, _RUNS)
        ledger.load_state_dict({name: part for name, part in state.items() if name not in others})
        book = cls(names.numpy(), ledger, id_rules_of(state))
        runs = state.get(_RUNS)
        if runs is None:
            return book.of_run("") if len(book) else book  # as where no run has left it
        if runs.dtype != torch.uint8 or runs.shape[1:] != (_DIGEST_BYTES,):
            raise ValueError("does not say whose charges it has")
        return replace(book, runs=frozenset(map(bytes, runs.tolist())))

    @staticmethod
    def uncontained(books: Iterable["AccountBook"]) -> "list[AccountBook]":
        """Return the books without those of which another one has all charges."""
        chosen: list[AccountBook] = []
        for book in sorted(books, key=lambda book: len(book.runs), reverse=True):
            if not any(book.runs <= other.runs for other in chosen):
                chosen.append(book)
        return chosen

    @classmethod
    def together(cls, books: Iterable["AccountBook"], id_rules: bytes) -> "AccountBook":
        """Return several books as one, in which what a chain of runs charged counts once."""
        return reduce(cls.with_all_of, cls.uncontained(books), cls.empty(id_rules))

    def __len__(self) -> int:
        return len(self.names)

    def most(self) -> float:
        """Return the largest divergence among all accounts, 0 if there are none."""
        return self._exposure().most if len(self) else 0.0

    def known(self) -> KnownBounds:
        """Return what is known of every account besides its divergence, (3,)."""
        known: KnownBounds = np.column_stack([self._exposure().known, NOTHING]).max(axis=1)
        return known

    def adversary(self) -> Adversary:
        """Return the strongest adversary class that every account describes."""
        return strongest_adversary(int(np.bitwise_or.reduce(self._exposure().caveats)))

    def _exposure(self) -> Exposure:
        return self.ledger.exposure(np.arange(len(self)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors from which ``from_state`` rebuilds the book."""
        named = {_EXAMPLES: torch.from_numpy(self.names)}
        if self.runs:
            runs = b"".join(sorted(self.runs))
            named[_RUNS] = torch.tensor(list(runs), dtype=torch.uint8).view(-1, _DIGEST_BYTES)
        return self.ledger.state_dict() | named | id_rules_as_tensor(self.id_rules)

    def of_run(self, run_id: str) -> "AccountBook":
        """Return the book as that of a run; if the run charges more later, as that of another."""
        hashed = hashlib.blake2b(run_id.encode(), digest_size=_DIGEST_BYTES, person=b"leak account")
        for _, part in sorted(self.state_dict().items()):
            hashed.update(part.numpy().data)
        return replace(self, runs=self.runs | {hashed.digest()})

    def with_all_of(self, other: "AccountBook") -> "AccountBook":
        """Return a book of the examples of both; accounts of the same example are added up."""
        at = indices_of(other.names, self.names)
        new = np.flatnonzero(at < 0)
        at[new] = len(self) + np.arange(len(new))
        ledger, own = LeakLedger(len(self) + len(new)), np.arange(len(self))
        ledger.add(own, self.ledger, own)
        ledger.add(at, other.ledger, np.arange(len(other)))
        names, runs = np.concatenate([self.names, other.names[new]]), self.runs | other.runs
        return AccountBook(names, ledger, self.id_rules, runs)

    def opening_ledger(
        self, ids: Iterable[str], num_examples: int, persons: Names | None = None
    ) -> LeakLedger:
        """Return the ledger with which a run on these canonical ids begins."""
        ledger = LeakLedger(num_examples)
        if len(self):
            of = indices_of(names_of(ids), self.names)
            if persons is not None:
                of_person = indices_of(persons, self.names)
                of = np.where(of_person < 0, of, of_person)
            known = np.flatnonzero(of >= 0)
            ledger.add(known, self.ledger, of[known])
        return ledger

    def closing_book(
        self, ids: Iterable[str], ledger: LeakLedger, persons: Names | None = None
    ) -> "AccountBook":
        """Return the book that a run leaves if it began with this one.

        The ledger is that of ``opening_ledger`` with all charges since. A person's account is that
        of its most exposed row.
        """
        names = names_of(ids)
        of = np.arange(len(names))
        if persons is not None:
            largest_first = np.argsort(-ledger.exposure(of).sum_kl)
            _, first = np.unique(persons[largest_first], axis=0, return_index=True)
            rows = largest_first[first]
            rows = rows[indices_of(persons[rows], names) < 0]
            of, names = np.concatenate([of, rows]), np.concatenate([names, persons[rows]])
        others = np.flatnonzero(indices_of(self.names, names) < 0)
        whole = LeakLedger(len(names) + len(others))
        whole.add(np.arange(len(names)), ledger, of)
        carried = np.arange(len(names), len(whole))
        whole.add(carried, self.ledger, others, is_counted=True)
        names = np.concatenate([names, self.names[others]])
        return AccountBook(names, whole, self.id_rules, self.runs)


def open_books(folders: Sequence[Path], id_rules: bytes = b"") -> AccountBook:
    """Read the books of earlier runs, from their ``checkpoint`` folders, and return them as one.

    What a chain of runs charged counts once. Raises SettingsError as ``open_book``, and if a book's
    ids were compared by other rules.
    """
    books = [open_book(folder) for folder in folders]
    for folder, book in zip(folders, books, strict=True):
        check_id_rules(book.id_rules, id_rules, f"{SETTING}: {folder}")
    return AccountBook.together(books, id_rules)


def open_book(folder: Path) -> AccountBook:
    """Read the book of one run, whatever its rules for ids; SettingsError if it cannot be read."""
    ended = "that has ended. A run that was killed leaves none: start it again to resume it"
    state = tensors_of_run(folder / LEDGER, SETTING, ended)
    try:
        return AccountBook.from_state(state)
    except ValueError as error:
        raise SettingsError(f"{SETTING}: {folder / LEDGER}: {error}") from error


def tensors_of_run(path: Path, setting: str, which: str) -> dict[str, Tensor]:
    """Read a file of the checkpoint folder that a setting names; ``which`` says of which run."""
    try:
        check_regular(path)
        return load_file(path)
    except FileNotFoundError as error:
        raise SettingsError(
            f"{setting}: {path.parent}: there is no {path.name}: expected the active party's "
            f"checkpoint folder of a run {which}"
        ) from error
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{setting}: {path}: cannot be read") from error


def id_rules_as_tensor(id_rules: bytes) -> dict[str, Tensor]:
    """Return what a file of examples says about their canonical form; nothing without rules."""
    return {_ID_RULES: torch.tensor(list(id_rules), dtype=torch.uint8)} if id_rules else {}


def id_rules_of(state: Mapping[str, Tensor]) -> bytes:
    """Return a file's rules for ids, as bytes; raises ValueError if it holds something else."""
    stored = state.get(_ID_RULES)
    if stored is None:
        return b""
    if stored.dtype != torch.uint8 or stored.ndim != 1 or len(stored) > _RULES_BYTES:
        raise ValueError("does not say by which rules its ids were compared")
    rules_of_bytes(rules := bytes(stored.tolist()))
    return rules


def check_id_rules(id_rules: bytes, expected: bytes, where: str) -> None:
    """Check that a file names examples as this run does: under other names none would be found."""
    if id_rules != expected:
        raise SettingsError(
            f"{where}: its run compared ids by other rules than this contract's ids, so that no "
            f"example of it would be recognised: expected the same rules"
        )


def persons_of(subjects: npt.NDArray[np.object_], ids: Iterable[str]) -> Names:
    """Return the name of each row's person, (rows, 16); a row without one, "", has its id's."""
    without = (subjects == "")[:, None]
    return np.where(without, names_of(ids), names_of(subjects, b"leak person"))


def names_of(ids: Iterable[str], purpose: bytes = b"leak account") -> Names:
    """Return a digest of each canonical id, (ids, 16)."""
    digests = (
        hashlib.blake2b(one.encode(), digest_size=_DIGEST_BYTES, person=purpose).digest()
        for one in ids
    )
    texts = np.fromiter(digests, dtype=f"S{_DIGEST_BYTES}")  # one by one: there may be millions
    return texts.view(np.uint8).reshape(-1, _DIGEST_BYTES)


def indices_of(of: Names, among: Names) -> Positions:
    """Return the index of each name among others, -1 for a name that is not among them."""
    at = pc.index_in(_column(of), value_set=_column(among))
    indices: Positions = pc.fill_null(at, -1).to_numpy().astype(np.int64)
    return indices


def _column(names: Names) -> pa.Array:
    names = np.ascontiguousarray(names)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_DIGEST_BYTES), len(names), [None, pa.py_buffer(names)]
    )
