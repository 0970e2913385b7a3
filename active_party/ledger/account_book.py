"""Ledgers by example instead of by row: how much earlier runs may have revealed about each label.

A run's ledger counts from zero, but an example about which two runs answer is exposed twice. So
each run leaves its accounts together with names of their examples, and a later run that is given
them starts where they ended. Accounts of examples that the later run lacks stay in its book, so a
chain of runs needs only the newest book.

An example is named by a hash of its canonical id. A person whom several rows are about has an
account, named by a hash of its entry, which is that of all of these rows: it begins with what all
of theirs reveal together (``by_person``). From then on a row's own account has only what runs
without the column charge to it, and both together count, so that none of a row's charges is lost,
whether later runs have the column or not, and to whom they ascribe the row. What runs without the
column charged to rows that a later table lacks counts for no person: nothing says whose they were.
The hashes need not be secret: the book belongs to the label owner, as do ids and entries.
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

from splitveil.active_party.ledger.ledger import Accounts, LeakLedger
from splitveil.common.errors import SettingsError
from splitveil.common.run.id_rules import rules_of_bytes
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.files import check_regular

LEDGER = "ledger.safetensors"  # file in the active party's ``checkpoint`` folder
SETTING = "earlier_ledgers"

Names = npt.NDArray[np.uint8]  # a digest for each example, (examples, 16)

_EXAMPLES = "examples"
_ID_RULES = "id_rules"
_RUNS = "runs"
_PERSONS = "persons"
_CHARGED_BY = "charged_by"
_DIGEST_BYTES = 16
_RULES_BYTES = 64 * 1024


@dataclass(frozen=True)
class AccountBook:
    """Accounts together with the names of their examples."""

    names: Names  # each once
    ledger: LeakLedger  # the accounts, in the order of the names
    id_rules: bytes = b""  # `rules_as_bytes` of the ids' canonical form
    runs: frozenset[bytes] = frozenset()  # digests of all whose charges it has
    person_of: Positions | None = None
    """Index of the account of each example's person, -1 for none, (accounts,); None for no persons.
    """

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
        others = (_EXAMPLES, _ID_RULES, _RUNS, _PERSONS)
        ledger.load_state_dict({name: part for name, part in state.items() if name not in others})
        book = cls(names.numpy(), ledger, id_rules_of(state))
        persons = state.get(_PERSONS)
        if persons is not None:
            if (
                persons.dtype != torch.int64
                or persons.shape != names.shape[:1]
                or bool(((persons < -1) | (persons >= len(names))).any())
            ):
                raise ValueError("does not say who has which accounts")
            book = replace(book, person_of=persons.numpy())
        runs = state.get(_RUNS)
        if runs is None:
            return book.of_run("") if len(book) else book  # as where no run has left it
        if runs.dtype != torch.uint8 or runs.shape[1:] != (_DIGEST_BYTES,):
            raise ValueError("does not say whose charges it has")
        return replace(book, runs=frozenset(map(bytes, runs.tolist())))

    @staticmethod
    def uncontained(books: Iterable["AccountBook"]) -> "list[AccountBook]":
        """Drop each book whose charges another book contains."""
        chosen: list[AccountBook] = []
        for book in sorted(books, key=lambda book: len(book.runs), reverse=True):
            if not any(book.runs <= other.runs for other in chosen):
                chosen.append(book)
        return chosen

    @classmethod
    def together(cls, books: Iterable["AccountBook"], id_rules: bytes) -> "AccountBook":
        """Merge several books, counting the charges of a chain of runs once."""
        return reduce(cls.with_all_of, cls.uncontained(books), cls.empty(id_rules))

    def __len__(self) -> int:
        return len(self.names)

    def worst(self) -> Accounts:
        """Return one account, (), that reveals as much as any of the book's."""
        if not len(self):
            return Accounts.empty()
        return self.total().accounts(np.arange(len(self))).worst()

    def total(self) -> LeakLedger:
        """Return all accounts, each example's added to its person's."""
        if self.person_of is None:
            return self.ledger
        total, every = LeakLedger(len(self)), np.arange(len(self))
        total.add(every, self.ledger, every)
        has_person = np.flatnonzero(self.person_of >= 0)
        total.add(has_person, self.ledger, self.person_of[has_person])
        return total

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors for ``from_state``."""
        named = {_EXAMPLES: torch.from_numpy(self.names)}
        if self.runs:
            runs = b"".join(sorted(self.runs))
            named[_RUNS] = torch.tensor(list(runs), dtype=torch.uint8).view(-1, _DIGEST_BYTES)
        if self.person_of is not None:
            named[_PERSONS] = torch.from_numpy(self.person_of)
        return self.ledger.state_dict() | named | id_rules_as_tensor(self.id_rules)

    def of_run(self, run: str) -> "AccountBook":
        """Return the book with a run added, identified by its name and charges."""
        hashed = hashlib.blake2b(run.encode(), digest_size=_DIGEST_BYTES, person=b"leak account")
        for _, part in sorted(self.state_dict().items()):
            hashed.update(part.numpy().data)
        return replace(self, runs=self.runs | {hashed.digest()})

    def as_metadata(self) -> dict[str, str]:
        """Return whose charges it has, for a file that follows from what these runs released."""
        return {_CHARGED_BY: " ".join(sorted(run.hex() for run in self.runs))}

    def counts(self, metadata: Mapping[str, str]) -> bool:
        """Return whether it has all charges that a file names in its metadata."""
        charged = metadata.get(_CHARGED_BY)
        return charged is not None and set(charged.split()) <= {run.hex() for run in self.runs}

    def with_all_of(self, other: "AccountBook") -> "AccountBook":
        """Return a book of the examples of both; accounts of the same example are added up."""
        at, names = _joined(self.names, other.names)
        ledger, own = LeakLedger(len(names)), np.arange(len(self))
        ledger.add(own, self.ledger, own)
        ledger.add(at, other.ledger, np.arange(len(other)))
        person_of = None
        if not (self.person_of is None and other.person_of is None):
            person_of, theirs = self.persons(len(names)), other.persons(len(other))
            theirs = np.where(theirs < 0, -1, at[theirs])
            before = person_of[at]
            # What an earlier person was charged stays with a row that has become another one's.
            moved = np.flatnonzero((before >= 0) & (theirs >= 0) & (before != theirs))
            ledger.add(at[moved], self.ledger, before[moved])
            person_of[at] = np.where(theirs < 0, before, theirs)
        return AccountBook(names, ledger, self.id_rules, self.runs | other.runs, person_of)

    def by_person(self, ids: Iterable[str], persons: Names) -> "AccountBook":
        """Return the book with one account for each person of these rows, `Accounts.of_groups`.

        It has what was charged to the person, to its rows, and to persons whose rows they were.
        """
        if not len(self):
            return self
        at, names = _joined(self.names, names_of(ids))
        group_of = numbered(persons)
        _, first = np.unique(group_of, return_index=True)
        of_group, names = _joined(names, persons[first])
        whose = of_group[group_of]
        before = self.persons(len(names))[at]
        every = np.arange(len(first))
        groups = np.concatenate([group_of, group_of, every])
        accounts = np.concatenate([at, before, of_group])
        pairs = (groups * len(self) + accounts)[(accounts >= 0) & (accounts < len(self))]
        groups, accounts = np.divmod(np.unique(pairs), len(self))
        grouped = self.ledger.of_groups(accounts, groups, len(first))
        ledger, is_kept = LeakLedger(len(names)), np.ones(len(names), dtype=np.bool_)
        is_kept[at] = is_kept[of_group] = False
        kept = np.flatnonzero(is_kept[: len(self)])
        ledger.add(kept, self.ledger, kept)
        ledger.add(of_group, grouped, every)
        person_of = self.persons(len(names))
        person_of[at] = np.where(whose == at, -1, whose)
        return AccountBook(names, ledger, self.id_rules, self.runs, person_of)

    def opening_ledger(self, ids: Iterable[str], num_examples: int) -> LeakLedger:
        """Return the ledger, without charges, of a run on these ids that begins with this book."""
        if not len(self):
            return LeakLedger(num_examples)
        earlier, total = LeakLedger(num_examples), self.total()
        of = indices_of(names_of(ids), self.names)
        known = np.flatnonzero(of >= 0)
        earlier.add(known, total, of[known])
        return LeakLedger(num_examples, earlier)

    def closing_book(
        self, ids: Iterable[str], ledger: LeakLedger, persons: Names | None = None
    ) -> "AccountBook":
        """Return the book of a run that began with this one.

        The ledger comes from ``opening_ledger``, with all charges since; with persons, `by_person`.
        """
        own = names_of(ids)
        persons = own if persons is None else persons
        has_person = (persons != own).any(axis=1)  # a row without one is its own person
        named, alone = np.flatnonzero(has_person), np.flatnonzero(~has_person)
        groups = numbered(persons[named])
        _, first, which = np.unique(groups, return_index=True, return_inverse=True)
        at, names = _joined(self.names, own)
        at_person, names = _joined(names, persons[named[first]])
        closed = LeakLedger(len(names))
        closed.add(at[alone], ledger, alone)
        is_carried, person_of = np.ones(len(names), dtype=np.bool_), self.person_of
        if len(named):
            whole = ledger.whole(named)
            # The release is charged to each of a person's rows in training, and to no other.
            order = np.argsort(-whole.accounts(np.arange(len(named))).sum_kl, kind="stable")
            _, most = np.unique(groups[order], return_index=True)
            closed.add(at_person, whole, order[most])
            is_carried[at[named]] = is_carried[at_person] = False
        carried = np.flatnonzero(is_carried[: len(self)])
        closed.add(carried, self.ledger, carried)
        if person_of is not None or len(named):
            person_of = self.persons(len(names))
            person_of[at[named]] = at_person[which]
        return AccountBook(names, closed, self.id_rules, self.runs, person_of)

    def persons(self, length: int) -> Positions:
        """Return a copy of ``person_of`` for so many accounts; the new ones have none."""
        persons = np.full(length, -1)
        if self.person_of is not None:
            persons[: len(self)] = self.person_of
        return persons


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
    path = folder / LEDGER
    try:
        check_regular(path)
        return AccountBook.from_state(load_file(path))
    except FileNotFoundError as error:
        raise SettingsError(
            f"{SETTING}: {folder}: there is no {LEDGER}: expected the active party's checkpoint "
            f"folder of a run that has ended. A run that was killed leaves none: start it again to "
            f"resume it"
        ) from error
    except ValueError as error:
        raise SettingsError(f"{SETTING}: {path}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{SETTING}: {path}: cannot be read") from error


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


def _joined(names: Names, others: Names) -> tuple[Positions, Names]:
    """Return the names of both, each once, and the index of each of the others among them."""
    at = indices_of(others, names)
    new = np.flatnonzero(at < 0)
    at[new] = len(names) + np.arange(len(new))
    return at, np.concatenate([names, others[new]])


def numbered(names: Names) -> Positions:
    """Return a number for each name, from 0, the same for equal ones."""
    numbers: Positions = _column(names).dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers


def _column(names: Names) -> pa.Array:
    names = np.ascontiguousarray(names)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(_DIGEST_BYTES), len(names), [None, pa.py_buffer(names)]
    )
