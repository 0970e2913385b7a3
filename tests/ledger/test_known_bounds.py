"""The ledger's bounds of noisy labels: exact for one draw, and never passed by several."""

import math
from functools import partial
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor

from splitveil.active_party.defenses import (
    Adversary,
    Charge,
    DefenseContext,
    IsoDefense,
    MarvellDefense,
    NoisyLabelDefense,
    dp_bounds,
    noise_digest,
)
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.noisy_label import (
    AlibiLabels,
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
    at_leak_auc,
    draw_noisy_labels,
    evidence,
    label_leak,
)
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import Limit
from splitveil.active_party.ledger.ledger import Accounts, LeakLedger
from splitveil.common.privacy.figures import LeakBounds
from tests.ledger.test_account_book import after_run
from tests.ledger.test_adversaries import after

Numbers = npt.NDArray[np.float64]
ROWS = 200_000
LABELS = (torch.arange(ROWS) % 2).float()
IDS = [f"person-{number}" for number in range(ROWS)]
TOLERANCE = 5 * math.sqrt(2 / (6 * ROWS))
"""Five standard errors of an AUC over half positives: at most sqrt((n + m + 1) / (12 n m))."""

RESPONSE = RandomizedResponse(kind="randomized_response", epsilon=1.0)
GAUSSIAN = GaussianLabels(kind="gaussian")
ONCE: list[LabelMechanism] = [
    LaplaceLabels(kind="laplace", epsilon=1.0),
    RESPONSE,
    AlibiLabels(kind="alibi", epsilon=1.0),
]


def kind_of(mechanism: LabelMechanism) -> str:
    return mechanism.kind


def charge_of(mechanism: LabelMechanism, draw: str = "draw", num_classes: int = 2) -> Charge:
    return NoisyLabelDefense(mechanism=mechanism).charge(
        num_classes, noise_digest(f"{mechanism!r} {draw}")
    )


def bounds_after(*charges: Charge) -> LeakBounds:
    return after(*charges).bounds(np.array([0]))


def guarantee_after(*charges: Charge) -> float:
    return bounds_after(*charges).guarantee.max


def ratios_of(mechanism: LabelMechanism, seed: int) -> Tensor:
    drawn = draw_noisy_labels(mechanism, LABELS, key_from_insecure_seed(seed), IDS)
    return evidence(mechanism, drawn).double()


def best_auc(*releases: Tensor) -> float:
    """The AUC of the best score: by Neyman and Pearson, the sum of all log likelihood ratios."""
    return float(roc_auc_score(LABELS.numpy(), sum(releases, torch.zeros(ROWS)).numpy().round(9)))


@pytest.mark.parametrize("mechanism", [GAUSSIAN, *ONCE], ids=kind_of)
def test_a_label_drawn_once_is_bounded_by_the_auc_of_the_best_score(
    mechanism: LabelMechanism,
) -> None:
    """Calibrated to .60, answered about for 30 epochs, and attacked with the likelihood ratio.

    Rejects the bound that the divergence alone gives, above .65, and that of a strength 3 % off.
    """
    chosen = at_leak_auc(mechanism, 0.6)
    bounds = bounds_after(*[charge_of(chosen)] * 30)
    found = best_auc(ratios_of(chosen, seed=3))
    assert [one.max for one in bounds.by_peers().values()] == [pytest.approx(0.6, abs=1e-9)] * 3
    assert bounds.guarantee.mean == bounds.guarantee.q95 == bounds.guarantee.max
    assert abs(found - bounds.guarantee.max) < TOLERANCE
    assert leak_auc_bound(bounds.sum_kl.max) > 0.65 > found + TOLERANCE
    stronger = at_leak_auc(mechanism, 0.613)
    assert guarantee_after(charge_of(stronger)) > found + TOLERANCE
    assert bounds.estimate.max <= bounds.guarantee.max


@pytest.mark.parametrize("num_classes", [3, 10])
def test_of_several_classes_the_pair_is_bounded_exactly(num_classes: int) -> None:
    mechanism = at_leak_auc(RESPONSE, 0.6, num_classes)
    assert isinstance(mechanism, RandomizedResponse)
    labels = torch.arange(ROWS) % num_classes
    key = key_from_insecure_seed(5)
    drawn = draw_noisy_labels(mechanism, labels.float(), key, IDS, num_classes)
    log_odds = evidence(mechanism, drawn, num_classes)
    pair = labels < 2
    found = roc_auc_score(labels[pair].numpy(), (log_odds[pair, 1] - log_odds[pair, 0]).numpy())
    bounds = bounds_after(charge_of(mechanism, num_classes=num_classes))
    assert bounds.epsilon == mechanism.epsilon
    bound = bounds.guarantee.max
    assert bound == pytest.approx(0.6, abs=1e-9)
    tolerance = TOLERANCE * math.sqrt(num_classes / 2)
    assert abs(found - bound) < tolerance
    assert leak_auc_bound(label_leak(mechanism, num_classes).sum_kl) > found + tolerance
    assert (
        dp_bounds.auc_of_epsilon(mechanism.epsilon) > bound
    )  # what any e-label-DP release may reach


def curve(mu: float, alpha: Numbers) -> Numbers:
    """The trade-off curve of a Gaussian mechanism, strictly between 0 and 1."""
    normal = NormalDist()
    return np.array([normal.cdf(normal.inv_cdf(1 - one) - mu) for one in alpha])


def response_curve(epsilon: float, num_classes: int, alpha: Numbers) -> Numbers:
    """Errors of the best tests that answer by a threshold, and of chance between two of them."""
    kept = 1 / (1 + (num_classes - 1) * math.exp(-epsilon))
    swapped = (1 - kept) / (num_classes - 1)
    return np.interp(alpha, [0, swapped, 1 - kept, 1], [1, 1 - kept, swapped, 0])


def laplace_curve(epsilon: float, alpha: Numbers) -> Numbers:
    """Errors of the best test, which compares the noisy number with a threshold."""
    beta: Numbers = stats.laplace.cdf(stats.laplace.isf(alpha) - epsilon)
    return beta


ALPHA = np.concatenate([np.logspace(-12, -0.302, 300), 1 - np.logspace(-12, -0.302, 300)])


@pytest.mark.parametrize("epsilon", [0.01, 0.4, 1.0, 4.0, 15.0])
def test_the_gaussian_curve_of_a_mechanism_lies_below_its_own(epsilon: float) -> None:
    """And meets it, so that the curve of a mu 1 % smaller does not."""
    cases = [
        (dp_bounds.gaussian_of_laplace(epsilon), partial(laplace_curve, epsilon)),
        (dp_bounds.gaussian_of_epsilon(epsilon), partial(response_curve, epsilon, 2)),
    ]
    for classes in (3, 10):
        own = partial(response_curve, epsilon, classes)
        cases.append((dp_bounds.gaussian_of_response(epsilon, classes), own))
    corners = [1 / (math.exp(epsilon) + classes - 1) for classes in (2, 3, 10)]
    alpha = np.concatenate([ALPHA, corners, [math.exp(-epsilon / 2) / 2]])
    for mu, own_curve in cases:
        errors: Numbers = own_curve(alpha)
        assert (curve(mu, alpha) <= errors * (1 + 1e-7) + 1e-13).all()
        assert (curve(0.99 * mu, alpha) > errors * (1 + 1e-5)).any()


def test_no_epsilon_leaves_no_mu_and_several_numbers_add_their_squares() -> None:
    assert dp_bounds.gaussian_of_epsilon(math.inf) == math.inf
    assert dp_bounds.gaussian_of_epsilon(0.0) == 0
    assert dp_bounds.gaussian_of_response(1.3) == pytest.approx(dp_bounds.gaussian_of_epsilon(1.3))
    twice = math.hypot(dp_bounds.gaussian_of_laplace(0.7), dp_bounds.gaussian_of_laplace(0.7))
    assert dp_bounds.gaussian_of_laplace(1.4, 2) == pytest.approx(twice)


@pytest.mark.parametrize("mechanism", ONCE, ids=kind_of)
def test_a_mechanism_that_dominates_tells_no_less(mechanism: LabelMechanism) -> None:
    """Neither in its divergence nor in its AUC; by mu^2, charges of every kind add up."""
    charge = charge_of(mechanism)
    assert charge.dominating_mu is not None
    assert charge.dominating_mu**2 > charge.sum_kl
    assert dp_bounds.leak_auc_of_mu(charge.dominating_mu) > (label_leak(mechanism).leak_auc or 1)
    assert charge.dominating_mu <= dp_bounds.gaussian_of_epsilon(1.0) * (1 + 1e-12)
    fresh = Charge(0.5, adversary=Adversary.ANYBODY, is_gaussian=True)
    found = guarantee_after(charge, fresh, fresh)
    assert found == pytest.approx(dp_bounds.leak_auc_of_mu(math.sqrt(1 + charge.dominating_mu**2)))


def test_a_draw_that_comes_back_is_no_second_one_and_any_other_is() -> None:
    once, other = charge_of(RESPONSE), charge_of(RESPONSE, "another draw")
    exact = pytest.approx(dp_bounds.auc_of_epsilon(1.0), rel=1e-12)
    assert guarantee_after(once, once, Charge(0.0, adversary=Adversary.ANYBODY)) == exact
    both = guarantee_after(once, other)
    assert both == pytest.approx(
        min(dp_bounds.auc_of_epsilon(2.0), estimated_auc(2 * MU_SQUARED_OF_1))
    )
    assert guarantee_after(once, other, once) > both  # by then nobody knows that it came back
    unknown = Charge(0.01, adversary=Adversary.ANYBODY)
    together = guarantee_after(once, unknown)
    assert together == leak_auc_bound(once.sum_kl + 0.01)


MU_SQUARED_OF_1 = (2 * NormalDist().inv_cdf(1 / (1 + math.exp(-1)))) ** 2
NAMES = ("ann", "bob", "cid", "dan")


def guarantee_of(book: AccountBook, name: str) -> float:
    return book.opening_ledger([name], 1).bounds(np.array([0])).guarantee.max


def test_over_runs_only_examples_of_a_single_draw_keep_its_exact_figure() -> None:
    first, second = charge_of(RESPONSE), charge_of(RESPONSE, "another key")
    monday = after_run(AccountBook.empty(), NAMES[:2], first, first)
    tuesday = after_run(monday, NAMES[1:3], second)
    exact, both = pytest.approx(dp_bounds.auc_of_epsilon(1.0)), guarantee_after(first, second)
    assert [guarantee_of(tuesday, name) for name in NAMES] == [exact, both, exact, 0.5]
    wednesday = after_run(tuesday, NAMES[3:], second)
    assert [guarantee_of(wednesday, name) for name in NAMES] == [exact, both, exact, exact]
    beside = after_run(AccountBook.empty(), NAMES[1:3], second)
    for added in (monday.with_all_of(beside), beside.with_all_of(monday)):
        assert [guarantee_of(added, name) for name in NAMES] == [exact, both, exact, 0.5]
    # The same key again in a later run: the same draw.
    again = after_run(monday, NAMES[:3], first)
    assert [guarantee_of(again, name) for name in NAMES] == [exact, exact, exact, 0.5]


@pytest.mark.parametrize(
    ("mechanism", "num_classes"), [*((one, 2) for one in ONCE), *((one, 4) for one in ONCE[1:])]
)
def test_a_budget_allows_the_strength_of_its_auc_and_no_larger_one(
    mechanism: LabelMechanism, num_classes: int
) -> None:
    limit, ledger, at = Limit.of_leak_auc(0.6), LeakLedger(2), np.array([0, 1])

    def objection(leak_auc: float) -> str:
        chosen = at_leak_auc(mechanism, leak_auc, num_classes)
        entry = charge_of(chosen, num_classes=num_classes)
        return limit.objection(ledger.after(at, entry)) or ""

    assert objection(0.6) == ""
    assert "a leak AUC of at most 0.61" in objection(0.61)
    assert objection(0.61).endswith("a leak AUC of at most 0.600")
    # A limit to the divergence allows what it says, whatever is known besides.
    charge = charge_of(mechanism, num_classes=num_classes)
    exactly, less = Limit.of_sum_kl(charge.sum_kl), Limit.of_sum_kl(0.9 * charge.sum_kl)
    assert exactly.objection(ledger.after(at, charge)) is None
    assert less.objection(ledger.after(at, charge)) is not None


def test_a_budget_that_one_draw_uses_up_allows_no_second_one() -> None:
    chosen = at_leak_auc(RESPONSE, 0.6)
    ledger, limit = after(charge_of(chosen)), Limit.of_leak_auc(0.6)
    at = np.array([0])
    assert limit.objection(ledger.after(at, charge_of(chosen))) is None
    again = ledger.after(at, charge_of(chosen, "another key"))
    assert "would take an example to sum_kl" in (limit.objection(again) or "")
    mixed = ledger.after(at, Charge(0.01, adversary=Adversary.ANYBODY, is_gaussian=True))
    assert limit.objection(mixed) is not None
    roomy = Limit.of_leak_auc(0.66)  # Phi of mu^2 together is .646, where the divergence gives .69
    assert roomy.objection(mixed) is None


def test_what_cannot_be_an_auc_or_an_epsilon_counts_as_unknown() -> None:
    for leak_auc, epsilon in ((math.nan, math.nan), (0.4, -1.0), (1.5, math.nan)):
        charge = Charge(
            0.3,
            noise_digest("key"),
            epsilon,
            Adversary.ANYBODY,
            leak_auc=leak_auc,
            dominating_mu=epsilon,
        )
        assert (charge.leak_auc, charge.epsilon, charge.dominating_mu) == (1.0, math.inf, math.inf)
        assert guarantee_after(charge) == leak_auc_bound(0.3)
    for charge, figures in (
        (Charge(math.inf, epsilon=1.0, leak_auc=0.6), [math.inf, 1.0, math.inf, math.inf]),
        (Charge(0.0), [0.0, 0.5, 0.0, 0.0]),
        (Charge(0.3, dominating_mu=math.sqrt(0.3)), [0.3, 1.0, math.inf, 0.0]),
    ):
        assert list(Accounts.of_charge(charge)[:4]) == figures
    assert (
        guarantee_after(Charge(math.inf, noise_digest("key"), 1.0, Adversary.ANYBODY, leak_auc=0.6))
        == 1
    )


def test_a_top_model_that_knows_the_labels_leaves_the_figure_of_the_draw_and_no_epsilon() -> None:
    settings = NoisyLabelDefense(mechanism=RESPONSE, top_labels="true")
    bounds = bounds_after(
        settings.charge(2, noise_digest("draw")), settings.charge(2, noise_digest("draw"))
    )
    aucs = [one.max for one in bounds.by_peers().values()]
    exact = dp_bounds.response_auc(1.0)
    assert aucs == [1.0, exact, exact]
    assert bounds.epsilon is None
    two = bounds_after(
        settings.charge(2, noise_digest("draw")), settings.charge(2, noise_digest("other"))
    )
    assert two.honest_but_curious.max == pytest.approx(estimated_auc(2 * MU_SQUARED_OF_1))


def test_settings_keep_everything_but_their_strength() -> None:
    context = DefenseContext((4,), epochs=30)
    gaussian = NoisyLabelDefense(insecure_noise_seed=9).at_leak_auc(0.55, context)
    assert gaussian is not None
    assert gaussian.noise_seed == 9
    assert isinstance(gaussian.mechanism, GaussianLabels)
    mu = math.sqrt(2) * stats.norm.ppf(0.55)
    assert gaussian.mechanism.noise_ratio == pytest.approx(1 / mu)
    noisy = NoisyLabelDefense(mechanism=LaplaceLabels(kind="laplace", epsilon=3, posterior="model"))
    found = noisy.at_leak_auc(0.55, context)
    assert found is not None
    assert isinstance(found.mechanism, LaplaceLabels)
    assert found.mechanism.posterior == "model"
    assert found.mechanism.epsilon < 0.5


@pytest.mark.parametrize(
    "settings", [MarvellDefense(), IsoDefense(), NoisyLabelDefense(top_labels="true")]
)
def test_no_strength_is_found_where_none_holds_against_everybody(
    settings: MarvellDefense | IsoDefense | NoisyLabelDefense,
) -> None:
    assert settings.at_leak_auc(0.6, DefenseContext((4,))) is None
