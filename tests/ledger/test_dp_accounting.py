"""The ledger's sums against the accountants of Google's dp-accounting, which know none of its code.

Its Renyi accountant, just above order 1, gives the divergence of all answers together; its privacy
loss distributions give delta at each epsilon, and so the trade-off curve and the best AUC. They are
rounded up, on a grid of 1e-4.
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest

from splitveil.active_party.defenses import Adversary, Charge, NoisyLabelDefense, noise_digest
from splitveil.active_party.defenses.dp_bounds import delta_of
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.ledger.ledger import LeakLedger
from splitveil.common.privacy.figures import LeakBounds

accounting = pytest.importorskip("dp_accounting")
pld = pytest.importorskip("dp_accounting.pld").privacy_loss_distribution  # of 0.6 and newer
rdp = pytest.importorskip("dp_accounting.rdp")

ANY_TWO_LABELS = accounting.NeighboringRelation.REPLACE_ONE
EPSILONS = np.linspace(0, 8, 801)  # those of all responses below among them
ALPHA = np.linspace(0, 1, 4001)
ORDER = 1 + 1e-7
ROUNDED_UP = 5e-4
"""Of an AUC: what the grids of privacy losses and of errors add."""


class Draw(NamedTuple):
    """A release that is made once and may be repeated."""

    charge: Charge
    events: list[Any]


def fresh(mu: float) -> Draw:
    charge = Charge(mu**2, adversary=Adversary.ANYBODY, is_gaussian=True)
    return Draw(charge, [accounting.GaussianDpEvent(1 / mu)])


def label(key: str, kind: str, strength: float, classes: int = 2) -> Draw:
    named: dict[str, Any] = {"noise_ratio" if kind == "gaussian" else "epsilon": strength}
    charge = NoisyLabelDefense(kind=kind, **named).charge(
        classes, noise_digest(f"{kind} {strength} {key}")
    )
    chance = classes / (classes - 1 + math.exp(strength))  # of an answer at random
    events = {
        "gaussian": [accounting.GaussianDpEvent(strength)],
        "laplace": [accounting.LaplaceDpEvent(1 / strength)],
        "alibi": 2 * [accounting.LaplaceDpEvent(2 / strength)],
        "randomized_response": [accounting.RandomizedResponseDpEvent(chance, classes)],
    }
    return Draw(charge, events[kind])


def ledger_after(draws: Sequence[Draw], repeats: int) -> LeakBounds:
    ledger = LeakLedger(1)
    for charge, _ in draws:
        for _ in range(1 if not charge.noise_identity else repeats):
            ledger.charge(np.array([0]), charge)
    return ledger.bounds(np.array([0]))


def deltas_of(draws: Sequence[Draw]) -> np.ndarray:
    losses = (loss_of(event) for draw in draws for event in draw.events)
    together = reduce(pld.PrivacyLossDistribution.compose, losses)
    return np.array(together.get_delta_for_epsilon(EPSILONS))


def loss_of(event: Any) -> Any:
    match event:
        case accounting.GaussianDpEvent():
            return pld.from_gaussian_mechanism(event.noise_multiplier)
        case accounting.LaplaceDpEvent():
            return pld.from_laplace_mechanism(event.noise_multiplier)
    return pld.from_randomized_response(event.noise_parameter, event.num_buckets)


def best_auc(deltas: np.ndarray) -> float:
    """The area under the best tests' curve (Dong, Roth and Su 2022, proposition 2.12)."""
    lines = zip(np.exp(EPSILONS), deltas, strict=True)
    both = (np.maximum(1 - d - e * ALPHA, (1 - d - ALPHA) / e) for e, d in lines)
    *_, errors = accumulate(both, np.maximum, initial=np.zeros_like(ALPHA))
    return 1 - float(np.trapezoid(errors, ALPHA))


def divergence_of(draws: Sequence[Draw]) -> float:
    accountant = rdp.RdpAccountant([ORDER], ANY_TWO_LABELS)
    for event in (event for draw in draws for event in draw.events):
        accountant.compose(event)
    return 2 * float(accountant.rdp[0])  # that of either label to the other: all are symmetric


KINDS = (
    *(("gaussian", 2), ("laplace", 2), ("alibi", 2), ("alibi", 7)),
    *(("randomized_response", classes) for classes in (2, 5)),
)
ONE = {
    f"{kind} {strength} of {classes}": [label("a", kind, strength, classes)]
    for kind, classes in KINDS
    for strength in (0.1, 1.0, 4.0)
}
GAUSSIAN = {
    "six fresh answers": [fresh(0.3)] * 6,
    "answers of several strengths": [fresh(mu) for mu in (0.4, 0.5, 0.9)],
    "a noisy label": [label("a", "gaussian", 2.0)],
    "two keys and fresh answers": [
        *(label("a", "gaussian", 2.0), label("b", "gaussian", 1.5)),
        *(fresh(0.3), fresh(0.3)),
    ],
}
MIXED = {
    "three responses": [label(key, "randomized_response", 0.6) for key in "abc"],
    "a response and a fresh answer": [label("a", "randomized_response", 2.0), fresh(1.0)],
    "laplace and alibi": [label("a", "laplace", 0.8), label("b", "alibi", 1.5)],
    "every kind": [
        *(label("a", "randomized_response", 0.7), label("b", "laplace", 0.5)),
        *(label("c", "alibi", 0.9), label("d", "gaussian", 2.0), fresh(0.4), fresh(0.4)),
    ],
}
EVERY = ONE | GAUSSIAN | MIXED
OTHERS = {name: draws for name, draws in (ONE | MIXED).items() if "gaussian" not in name}


@pytest.mark.parametrize("draws", EVERY.values(), ids=EVERY)
def test_the_divergence_of_all_draws_is_the_accountant_s(draws: list[Draw]) -> None:
    """Repeated noise counts once. Rejects one draw less, and a draw charged for each repetition."""
    bounds = ledger_after(draws, repeats=7)
    assert bounds.sum_kl.max == pytest.approx(divergence_of(draws), rel=1e-6)
    assert bounds.sum_kl.max > 1.05 * divergence_of(draws[1:] or [fresh(1e-3)])
    assert bounds.sum_kl.max < 0.95 * divergence_of([*draws, draws[0]])


@pytest.mark.parametrize("draws", GAUSSIAN.values(), ids=GAUSSIAN)
def test_gaussian_mechanisms_compose_exactly(draws: list[Draw]) -> None:
    """Delta at every epsilon, and the AUC. Rejects one draw less."""
    bounds = ledger_after(draws, repeats=7)
    mu = bounds.mu_anybody
    assert mu is not None
    assert bounds.guarantee == bounds.estimate
    deltas = deltas_of(draws)
    own = np.array([delta_of(mu, epsilon) for epsilon in EPSILONS])
    assert own == pytest.approx(deltas, abs=1e-5)
    assert bounds.guarantee.max == pytest.approx(best_auc(deltas), abs=ROUNDED_UP)
    assert own != pytest.approx(deltas_of(draws[1:] or [fresh(1e-3)]), abs=1e-3)


@pytest.mark.parametrize("draws", OTHERS.values(), ids=OTHERS)
def test_no_mixture_passes_the_ledger_s_bounds(draws: list[Draw]) -> None:
    """Neither its AUC nor its epsilon; one draw is met exactly. Rejects the largest draw's bound.

    Epsilon is compared where no answer is beyond it, delta 0 but for the grid.
    """
    bounds, deltas = ledger_after(draws, repeats=7), deltas_of(draws)
    found = best_auc(deltas)
    assert found <= bounds.guarantee.max + ROUNDED_UP
    if len(draws) == 1:
        assert found == pytest.approx(bounds.guarantee.max, abs=ROUNDED_UP)
    else:
        assert bounds.guarantee.max < leak_auc_bound(bounds.sum_kl.max) - 0.01
        assert found > max(ledger_after([one], 1).guarantee.max for one in draws) + 0.02
    if bounds.epsilon is not None:
        beyond = EPSILONS - bounds.epsilon
        assert (deltas[beyond > 1e-3] < 1e-9).all()
        assert (deltas[beyond < -0.05 * bounds.epsilon] > 1e-6).all()
