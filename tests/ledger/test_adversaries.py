"""For whom the ledger's bounds hold: adversary classes, exact Gaussian figures, and old books."""

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from splitveil.active_party.defenses import Adversary, Charge, noise_digest
from splitveil.active_party.defenses.sum_kl import leak_auc_bound, sum_kl_for_leak_auc
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import (
    EARLY_STOPPING,
    LEARNED_FROM_LABELS,
    LEARNED_FROM_RELEASES,
    LabelSignal,
    Limit,
    objection_to,
    widest_adversary,
)
from splitveil.active_party.ledger.ledger import LeakLedger
from splitveil.common.privacy.charge import narrowest
from splitveil.common.privacy.figures import LeakBounds

ANYBODY, HONEST, WEAK = Adversary
EVERYBODY_COVERED = Charge(0.3, adversary=ANYBODY)
GAUSSIAN = Charge(0.3, adversary=ANYBODY, is_gaussian=True)
IDS = ("ann", "bob", "cid")


def after(*charges: Charge, of: int = 1) -> LeakLedger:
    ledger = LeakLedger(of)
    for charge in charges:
        ledger.charge(np.arange(of), charge)
    return ledger


def columns(ledger: LeakLedger) -> list[float]:
    bounds = ledger.bounds(np.arange(len(ledger)))
    return [bounds.against(peers).max for peers in Adversary]


def exact(mu: float) -> float:
    return NormalDist().cdf(mu / math.sqrt(2))


def test_a_charge_describes_its_own_adversaries_and_weaker_ones() -> None:
    bound = leak_auc_bound(0.3)
    assert columns(after(Charge(0.3, adversary=ANYBODY))) == [bound, bound, bound]
    assert columns(after(Charge(0.3, adversary=HONEST))) == [1, bound, bound]
    assert columns(after(Charge(0.3, adversary=WEAK))) == [1, 1, bound]
    assert narrowest(HONEST, ANYBODY) is HONEST
    assert narrowest() is ANYBODY


def test_the_narrowest_charge_of_an_account_decides_and_stays() -> None:
    mixed = after(Charge(0.1, adversary=HONEST), Charge(0.1, adversary=WEAK), EVERYBODY_COVERED)
    assert columns(mixed) == [1, 1, pytest.approx(leak_auc_bound(0.5), rel=1e-12)]


def test_an_answer_that_tells_a_weak_peer_nothing_still_bounds_nobody_else() -> None:
    bound = pytest.approx(exact(math.sqrt(0.3)), rel=1e-12)
    assert columns(after(GAUSSIAN, Charge(0.0))) == [1, 1, bound]
    nothing = Charge(0.0, adversary=ANYBODY)
    assert columns(after(GAUSSIAN, nothing)) == [bound] * 3


def test_one_charge_of_unknown_distribution_takes_the_exact_figure_away() -> None:
    bounds = after(GAUSSIAN, Charge(0.2, adversary=ANYBODY)).bounds(np.array([0]))
    assert bounds.mu_by_peers()[ANYBODY] is None
    assert bounds.guarantee.max == pytest.approx(leak_auc_bound(0.5), rel=1e-12)


def test_mu_is_that_of_the_most_exposed_example_and_of_covered_ones_alone() -> None:
    ledger = after(GAUSSIAN, of=3)
    ledger.charge(np.array([2]), GAUSSIAN)
    assert list(ledger.bounds(np.arange(3)).mu_by_peers().values()) == [math.sqrt(0.6)] * 3
    ledger.charge(np.array([0]), Charge(0.0, adversary=WEAK))
    assert list(ledger.bounds(np.arange(3)).mu_by_peers().values()) == [None, None, math.sqrt(0.6)]
    assert ledger.bounds(np.array([1, 2])).mu_by_peers()[ANYBODY] == math.sqrt(0.6)


def test_bounds_of_mixed_accounts_are_those_of_each_one() -> None:
    """The mean and the quantile are rounded up, by less than a cell of the square root."""
    generator = np.random.default_rng(7)
    ledger, found = LeakLedger(600), np.empty(600)
    for position, sum_kl in enumerate(generator.gamma(2.0, 0.2, size=600)):
        is_gaussian, adversary = bool(position % 2), (ANYBODY, HONEST, ANYBODY)[position % 3]
        best = 0.55 if position % 5 else 1.0
        charge = Charge(float(sum_kl), adversary=adversary, is_gaussian=is_gaussian, leak_auc=best)
        ledger.charge(np.array([position]), charge)
        bound = exact(math.sqrt(sum_kl)) if is_gaussian else leak_auc_bound(float(sum_kl))
        found[position] = min(bound, best) if adversary is ANYBODY else 1.0
    spread = ledger.bounds(np.arange(600)).against(ANYBODY)
    assert spread.max == found.max() == 1
    assert found.mean() <= spread.mean <= found.mean() + 1e-3
    covered = np.flatnonzero(found < 1)
    spread = ledger.bounds(covered).against(ANYBODY)
    assert spread.max == pytest.approx(found[covered].max(), rel=1e-12)
    assert np.quantile(found[covered], 0.95) - 1e-9 <= spread.q95
    assert spread.q95 <= np.quantile(found[covered], 0.96)


def test_whom_accounts_describe_survives_the_file_and_the_adding_up_of_books(
    tmp_path: Path,
) -> None:
    """A history of marvell, then noisy labels: nothing bounds anybody on its rows."""
    monday = AccountBook.empty().closing_book(IDS[:2], after(Charge(0.1), of=2))
    save_file(monday.state_dict(), tmp_path / "book")
    read = AccountBook.from_state(load_file(tmp_path / "book"))
    assert read.worst().adversary is WEAK
    begun = read.opening_ledger(IDS, 3)
    begun.charge(np.arange(3), GAUSSIAN)
    assert columns(begun)[0] == 1
    alone = begun.bounds(np.array([2]))
    assert alone.guarantee.max == pytest.approx(exact(math.sqrt(0.3)), rel=1e-12)
    tuesday = AccountBook.empty().closing_book(IDS[1:], after(GAUSSIAN, of=2))
    both = tuesday.with_all_of(read)
    assert both.worst().adversary is WEAK
    assert tuesday.worst().adversary is ANYBODY
    bob = both.opening_ledger(["bob"], 1).bounds(np.array([0]))
    assert bob.sum_kl.max == pytest.approx(0.4)
    assert [one.max for one in bob.by_peers().values()][:2] == [1, 1]
    carried = read.closing_book(IDS[2:], read.opening_ledger(IDS[2:], 1))
    assert carried.worst().adversary is WEAK


def test_a_limit_in_aucs_allows_a_gaussian_mechanism_its_exact_divergence() -> None:
    """At .6: mu^2 = 2 Phi^-1(.6)^2 = .128, where any other account may only reach .026."""
    limit, general = Limit.of_leak_auc(0.6), sum_kl_for_leak_auc(0.6)
    exactly = 2 * NormalDist().inv_cdf(0.6) ** 2
    assert general < 0.5 * exactly
    ledger, at = LeakLedger(1), np.array([0])

    def objection(sum_kl: float, *, is_gaussian: bool) -> str | None:
        charge = Charge(sum_kl, adversary=ANYBODY, is_gaussian=is_gaussian)
        return limit.objection(ledger.after(at, charge))

    assert objection(exactly, is_gaussian=True) is None
    assert objection(general, is_gaussian=False) is None
    assert "a leak AUC of at most 0.6" in (objection(1.01 * exactly, is_gaussian=True) or "")
    assert "the budget is sum_kl 0.0" in (objection(1.01 * general, is_gaussian=False) or "")


@pytest.mark.parametrize("peers", list(Adversary))
def test_a_limit_objects_to_whom_an_account_does_not_describe(peers: Adversary) -> None:
    limit = Limit.of_sum_kl(1.0, peers)
    for adversary in Adversary:
        reached = LeakLedger(1).after(np.array([0]), Charge(0.1, adversary=adversary))
        objection = limit.objection(reached)
        assert (objection is None) == adversary.includes(peers)
        if objection is not None:
            assert f"without a bound for {peers.in_words}" in objection
            assert f"is bounded for {adversary.in_words}" in objection


def test_a_tiny_account_among_others_does_not_hide_a_large_one_of_another_kind() -> None:
    ledger = LeakLedger(2)
    ledger.charge(np.array([0]), Charge(0.05, adversary=ANYBODY))
    ledger.charge(np.array([1]), Charge(0.12, adversary=ANYBODY, is_gaussian=True))
    objection = Limit.of_leak_auc(0.6).objection(ledger.accounts(np.arange(2)))
    assert objection is not None
    assert "take an example to sum_kl 0.05," in objection


def test_the_larger_of_two_bounds_is_as_narrow_as_either() -> None:
    def bounds(*charges: Charge) -> LeakBounds:
        return after(*charges).bounds(np.array([0]))

    course, both = bounds(GAUSSIAN), bounds(GAUSSIAN, Charge(0.0))
    assert course.or_more(both).guarantee.max == 1
    assert course.or_more(both).mu_by_peers()[ANYBODY] is None
    assert both.or_more(course) is both


@pytest.mark.parametrize(
    ("signals", "strongest", "setting"),
    [
        ((), ANYBODY, None),
        ((EARLY_STOPPING,), HONEST, "early_stopping_epochs"),
        ((LEARNED_FROM_LABELS,), HONEST, "initial_weights"),
        ((LEARNED_FROM_RELEASES, EARLY_STOPPING), HONEST, "initial_weights"),
    ],
)
def test_whatever_else_depends_on_training_labels_voids_the_bound_for_anybody(
    signals: tuple[LabelSignal, ...], strongest: Adversary, setting: str | None
) -> None:
    assert widest_adversary(signals) is strongest
    for peers in Adversary:
        objection = objection_to(peers, signals)
        assert (objection is None) == strongest.includes(peers)
        if objection is not None:
            assert objection.startswith(f"{setting} leaves no bound for anybody")


def test_an_epsilon_is_stated_only_where_every_charge_describes_anybody() -> None:
    """Label-DP is a promise to everybody: beside early stopping, say, nobody can give it."""
    drawn = Charge(0.5, noise_digest("key"), epsilon=1.0, adversary=ANYBODY)
    for charges, expected in (
        ([drawn, drawn], 1.0),
        ([drawn.narrowed(HONEST)], None),
        ([drawn, Charge(0.0, adversary=WEAK)], None),
        ([drawn, Charge(0.0, adversary=ANYBODY)], 1.0),
    ):
        assert after(*charges).bounds(np.array([0])).epsilon == expected
