"""Accounts over several runs: what they add up, for whom, and that the sum is what counts."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.torch import load, save

from splitveil.active_party.defenses import Charge, noise_digest
from splitveil.active_party.ledger.account_book import AccountBook, persons_of
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.privacy.charge import Adversary, holds_against

CHARGES = [2.0**-number for number in range(5)]
MONDAY, TUESDAY = ("ann", "bob", "eve"), ("eve", "dan", "ann")


def after_run(book: AccountBook, ids: Sequence[str], *charges: Charge) -> AccountBook:
    ledger = book.opening_ledger(ids, len(ids))
    for charge in charges:
        ledger.charge(np.arange(len(ids)), charge)
    return AccountBook.from_state(load(save(book.closing_book(ids, ledger).state_dict())))


def gaussian(sum_kl: float, noise: bytes = b"") -> Charge:
    return Charge(sum_kl, noise, is_gaussian=True)


def divergence_of(book: AccountBook, one: str) -> float:
    return book.opening_ledger([one], 1).bounds(np.arange(1)).sum_kl.max


def of(book: AccountBook, ids: str = "ann bob eve dan fay") -> list[float]:
    return [divergence_of(book, one) for one in ids.split()]


def test_charges_of_fresh_noise_add_up_for_the_same_id_wherever_it_stands() -> None:
    monday = after_run(AccountBook.empty(), MONDAY, Charge(0.25), Charge(0.5))
    assert of(monday) == [0.75, 0.75, 0.75, 0, 0]
    tuesday = after_run(monday, TUESDAY, Charge(1.0))
    assert of(tuesday) == [1.75, 0.75, 1.75, 1.0, 0]
    wednesday = after_run(tuesday, ("bob", "fay"), Charge(2.0))
    assert of(wednesday) == [1.75, 2.75, 1.75, 1.0, 2.0]
    assert len(wednesday) == 5


def test_what_is_charged_to_a_person_counts_for_all_of_its_rows_in_any_run() -> None:
    def after(book: AccountBook, ids: list[str], people: list[str]) -> AccountBook:
        """Return the book of a run that answers about its last row, and so about that person."""
        persons = persons_of(np.array(people, dtype=object), ids)
        book = book.by_person(ids, persons)
        ledger = book.opening_ledger(ids, len(ids))
        rows = np.flatnonzero((persons == persons[-1]).all(axis=1))
        ledger.charge(rows, gaussian(0.5, noise_digest(f"{len(book)}")))
        closed = book.closing_book(ids, ledger, persons)
        return AccountBook.from_state(load(save(closed.state_dict())))

    monday = after(AccountBook.empty(), ["a", "b", "c"], ["", "bob", "ann"])
    tuesday = after(monday, ["c", "b", "d"], ["ann", "bob", "ann"])
    assert of(tuesday, "a b c d") == [0, 0, 1.0, 1.0]
    wednesday = after(tuesday, ["x", "e"], ["", "ann"])
    assert of(wednesday, "a b c d e x") == [0, 0, 1.5, 1.5, 1.5, 0]
    assert len(wednesday) == 6 + 2
    # A row that becomes another person's brings along what was revealed about it.
    again = after(wednesday, ["c", "f"], ["bob", "ann"])
    assert of(again, "b c d e f") == [1.5, 1.5, 2.0, 2.0, 2.0]
    # Before anybody was named, a row was charged by itself: two of mu 1/2 are one of mu 1.
    book = after_run(AccountBook.empty(), ["c", "g"], gaussian(0.25))
    named = after(book, ["c", "h", "g"], ["ann", "ann", "ann"])
    assert of(named, "c h g") == [1.5, 1.5, 1.5]
    assert of(after(named, ["k"], ["ann"]), "k") == [2.0]
    # What no Gaussian mechanism covers has no bound for two rows together.
    book = after_run(AccountBook.empty(), ["c", "g"], Charge(0.25))
    assert of(after(book, ["c", "h"], ["ann", "ann"]), "c h") == [0.75, 0.75]
    assert of(after(book, ["c", "g"], ["ann", "ann"]), "c g") == [math.inf, math.inf]
    # An id that reads like somebody's name is nobody.
    assert of(after(wednesday, ["ann"], [""]), "ann") == [0.5]


class Run(NamedTuple):
    """One run of a history: its rows with their persons, and the charge of one answer about some.

    Without the column of persons, the answer is about the rows themselves.
    """

    people: dict[str, str]
    about: set[str]
    charge: float
    adversary: Adversary
    is_named: bool


def history(seed: int) -> list[Run]:
    """Return five runs of mixed defenses; rows come, go, and change persons."""
    draw, runs = random.Random(seed), list[Run]()
    for number in range(5):
        rows = draw.sample("abcdefg", draw.randint(1, 7))
        people = {row: draw.choice(["", "ann", "bob", "eve"]) for row in rows}
        is_named = draw.random() < 0.6
        about = set(draw.sample(rows, draw.randint(1, len(rows))))
        if is_named:  # a release covers persons
            whose = {people[row] for row in about} - {""}
            about |= {row for row in rows if people[row] in whose}
        # Powers of two: sums are exact, and say which runs are in them.
        peers = Adversary.ANYBODY if is_named else draw.choice(list(Adversary))
        runs.append(Run(people, about, CHARGES[number], peers, is_named))
    return runs


def as_one(book: AccountBook, run: Run) -> AccountBook:
    rows = list(run.people)
    persons = persons_of(np.array(list(run.people.values()), dtype=object), rows)
    named = persons if run.is_named else None
    book = book if named is None else book.by_person(rows, named)
    ledger = book.opening_ledger(rows, len(rows))
    about = np.array([rows.index(row) for row in sorted(run.about)])
    ledger.charge(about, Charge(run.charge, adversary=run.adversary, is_gaussian=True))
    closed = book.closing_book(rows, ledger, named)
    return AccountBook.from_state(load(save(closed.of_run(str(run)).state_dict())))


class PlainAccounts:
    """The rule for rows and persons in plain numbers."""

    def __init__(self) -> None:
        self.own = defaultdict[str, float](float)
        """Of each row, apart from what its person was charged."""
        self.shared = defaultdict[str, float](float)
        """Of each person."""
        self.person: dict[str, str] = {}
        """Whose row each row was the last time that a run said so."""

    def of(self, row: str) -> float:
        return self.own[row] + self.shared[self.person.get(row, "")]

    def add(self, run: Run) -> None:
        alone = {row for row in run.about if not (run.is_named and run.people[row])}
        named = {row: who for row, who in run.people.items() if run.is_named and who}
        unnamed = {row: "" for row in run.people if run.is_named and row not in named}
        begun = dict[str, float]()
        for row, who in (named | unnamed).items():
            rows = [one for one in named if named[one] == who] or [row]
            persons = {who, *(self.person.get(one, "") for one in rows)} - {""}
            accounts = [self.own[one] for one in rows] + [self.shared[one] for one in persons]
            charged = [one for one in accounts if one]
            begun[row] = charged[0] if len(charged) == 1 else sum(map(math.sqrt, charged)) ** 2
        for row, who in named.items():
            self.shared[who] = begun[row] + run.charge * (row in run.about)
            self.own[row], self.person[row] = 0, who
        for row in unnamed:
            self.own[row], self.person[row] = begun[row], ""
        for row in alone:
            self.own[row] += run.charge


def revealing(runs: Sequence[Run], row: str, person: str) -> list[Run]:
    """Return the runs that are about a row, or about the person whose row it is."""
    return [
        run
        for run in runs
        if row in run.about
        or (run.is_named and person and person in {run.people[one] for one in run.about})
    ]


def units_of(run: Run, rows: set[str]) -> int:
    """Return how many charges of a run are about some rows: mu of a change of all is their sum."""
    return len({(run.is_named and run.people[row]) or row for row in rows & run.about})


@pytest.mark.parametrize("seed", range(20))
def test_the_account_of_a_row_has_all_that_mixed_runs_revealed_of_it_and_of_its_person(
    seed: int,
) -> None:
    book, plain, runs = AccountBook.empty(), PlainAccounts(), list[Run]()
    for run in history(seed):
        book, runs = as_one(book, run), [*runs, run]
        plain.add(run)
        for row in "abcdefg":
            account = book.opening_ledger([row], 1).accounts(np.array([0])).at(0)
            found, caveats = account.sum_kl, int(account.caveats)
            assert found == pytest.approx(plain.of(row))
            ever = revealing(runs, row, plain.person.get(row, ""))
            assert found >= 0.999999 * sum(one.charge for one in ever)
            for peers in Adversary:
                described = all(one.adversary.includes(peers) for one in ever)
                assert described or not holds_against(caveats, peers)
    rows = list("abcdefg")
    people = np.array(random.Random(seed).choices(["", "ann", "bob", "eve"], k=7), dtype=object)
    grouped = book.by_person(rows, persons_of(people, rows))
    for row, who in zip(rows, people, strict=True):
        own = {one for one, its in zip(rows, people, strict=True) if its and its == who} | {row}
        divergence = divergence_of(grouped, row)
        assert divergence >= 0.999999 * sum(one.charge * units_of(one, own) ** 2 for one in runs)


def test_every_byte_of_a_name_counts() -> None:
    ids = [str(number) for number in range(2000)]
    book = after_run(AccountBook.empty(), ids, Charge(0.5))
    assert (book.names[:, -1] == 0).any()
    found = book.opening_ledger(ids, len(ids)).bounds(np.arange(len(ids))).sum_kl
    assert (found.mean, found.max) == (0.5, 0.5)
    assert divergence_of(book, "2000") == 0


def test_noise_that_two_runs_repeat_counts_once() -> None:
    same, other = (Charge(0.5, noise_digest(name), epsilon=1.0) for name in ("key one", "key two"))
    monday = after_run(AccountBook.empty(), MONDAY, same)
    again = after_run(monday, TUESDAY, Charge(0.75, noise_digest("key one"), epsilon=2.0))
    assert of(again) == [0.75, 0.5, 0.75, 0.75, 0]
    added = after_run(monday, TUESDAY, other)
    assert of(added) == [1.0, 0.5, 1.0, 0.5, 0]
    # An account that stayed behind is of the noise of its time, also for whoever comes next.
    assert of(after_run(added, ("bob",), other)) == [1.0, 1.0, 1.0, 0.5, 0]


def test_epsilon_adds_up_over_runs_and_not_by_closing_a_book() -> None:
    def epsilon(book: AccountBook) -> float | None:
        return book.ledger.bounds(np.arange(len(book))).epsilon

    one, other = (
        Charge(0.5, noise_digest(name), epsilon=1.0, adversary=Adversary.ANYBODY)
        for name in ("key one", "key two")
    )
    monday = after_run(AccountBook.empty(), MONDAY, one)
    assert epsilon(monday) == 1.0
    assert epsilon(after_run(monday, ("dan",), one)) == 1.0
    assert epsilon(after_run(monday, TUESDAY, other)) == 2.0
    assert epsilon(after_run(monday, TUESDAY, Charge(0.5))) is None


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b"), ("", "b"), ("a", ""), ("", "")])
def test_books_of_runs_beside_each_other_add_up_in_any_order(
    names: tuple[str, str],
) -> None:
    first, second = (
        Charge(charge, noise_digest(name) if name else b"")
        for charge, name in zip((0.5, 0.25), names, strict=True)
    )
    one = after_run(AccountBook.empty(), MONDAY, first)
    two = after_run(AccountBook.empty(), TUESDAY, second)
    both = 0.5 if names == ("a", "a") else 0.75
    for book in (one.with_all_of(two), two.with_all_of(one)):
        assert of(book) == [both, 0.5, both, 0.25, 0]
        assert len(book) == 4


def test_what_has_no_bound_stays_without_one() -> None:
    monday = after_run(AccountBook.empty(), MONDAY, Charge(math.inf))
    assert of(after_run(monday, TUESDAY, Charge(0.5))) == [math.inf] * 3 + [0.5, 0]


@pytest.mark.parametrize("break_it", ["no names", "narrow", "negative", "too few"])
def test_what_is_no_book_is_refused(break_it: str) -> None:
    state = after_run(AccountBook.empty(), MONDAY, Charge(0.5)).state_dict()
    match break_it:
        case "no names":
            del state["examples"]
        case "narrow":
            state["examples"] = state["examples"][:, :8]
        case "negative":
            state["settled_sum_kl"] = -state["settled_sum_kl"]
        case "too few":
            state["examples"] = state["examples"][:2]
    with pytest.raises(ValueError, match=r"accounts|expected"):
        AccountBook.from_state(state)


def test_a_row_without_a_person_has_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "active.csv").write_text("id,own1,person\na,1,x\nb,2,\nc,3,x\nd,4,\n")
    given = {"source": {"kind": "csv", "path": "active.csv"}, "id_column": "id"}
    settings = DataSettings.model_validate(given | {"features": {"numeric": ["own1"]}})
    subjects = read_subjects(settings, tmp_path, "person")
    first, second, third, fourth = map(bytes, persons_of(subjects, "abcd"))
    assert first == third
    assert len({first, second, fourth}) == 3
    with pytest.raises(DataError, match="nobody"):
        read_subjects(settings, tmp_path, "nobody")
    with pytest.raises(SettingsError, match="'own1' is a feature, too"):
        read_subjects(settings, tmp_path, "own1")
