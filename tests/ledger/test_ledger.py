"""The leak ledger: its sums, its bounds, its state, and the alarm that compares leaks with it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from splitveil.active_party.defenses import Charge, noise_digest
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound
from splitveil.active_party.ledger.ledger import LeakLedger
from splitveil.active_party.monitor.leak_watch import MIN_BATCHES, LeakAlarm
from splitveil.common.privacy.audit import AuditedBatch
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import LeakBounds, Spread
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.record.run_record import AlarmLine


@pytest.mark.parametrize("identity", [b"", noise_digest("one key")])
@pytest.mark.parametrize("sum_kl", [math.nan, -0.1])
def test_a_charge_that_is_no_divergence_counts_as_infinite(sum_kl: float, identity: bytes) -> None:
    """Compared with NaN no budget is ever passed, and no ledger that holds one is read again."""
    ledger, positions = LeakLedger(3), np.arange(2)
    charge = Charge(sum_kl, identity)
    assert ledger.after(positions, charge).sum_kl.max() == math.inf
    ledger.charge(positions, charge)
    again = LeakLedger(3)
    again.load_state_dict(ledger.state_dict())
    assert again.accounts(np.arange(3)).sum_kl.max() == math.inf


def of_class_means(bounds: LeakBounds) -> Spread:
    return bounds.against(Adversary.CLASS_MEANS)


def account(*charges: Charge) -> float:
    ledger = LeakLedger(3)
    one = np.array([1])
    for charge in charges:
        announced = ledger.after(one, charge).sum_kl.max()
        ledger.charge(one, charge)
        assert announced == ledger.bounds(one).sum_kl.max
    assert ledger.bounds(np.array([0, 2])).sum_kl.max == 0
    return ledger.bounds(one).sum_kl.max


def test_fresh_charges_add_up_and_of_repeated_noise_the_largest_counts() -> None:
    a, b = Charge(0.5, noise_digest("a")), Charge(0.25, noise_digest("b"))
    assert account(Charge(0.5), Charge(0.25)) == 0.75
    assert account(a, Charge(0.125, noise_digest("a")), a) == 0.5
    assert account(Charge(0.125, noise_digest("a")), a) == 0.5
    assert account(a, Charge(1.0), a) == 1.5
    assert account(a, b, Charge(0.5, noise_digest("b"))) == 1.0
    assert account(a, b, a) == 1.25  # what comes back after another is never charged too little
    assert account(Charge(math.inf)) == math.inf


def test_an_answer_that_tells_nobody_anything_changes_no_account() -> None:
    """As a gradient that was computed from releases, which were charged when they were told."""
    ledger = LeakLedger(6)
    ledger.charge(np.array([0, 2, 4]), Charge(0.25, adversary=Adversary.ANYBODY, is_gaussian=True))
    before = save(ledger.state_dict())
    nothing = Charge(0.0, adversary=Adversary.ANYBODY, is_gaussian=True)
    ledger.charge(np.arange(6), nothing)
    assert save(ledger.state_dict()) == before
    ledger.charge(np.arange(6), Charge(0.0))  # this one holds for few peers
    assert save(ledger.state_dict()) != before


def test_charges_of_the_kinds_that_are_known_are_entered_like_the_first() -> None:
    gaussian = Charge(0.25, adversary=Adversary.ANYBODY, is_gaussian=True)
    other = Charge(0.25, adversary=Adversary.ANYBODY)
    ledger = LeakLedger(4)
    for positions, charge in (([0, 1], gaussian), ([1, 2], other), ([0, 1, 2, 3], gaussian)):
        ledger.charge(np.array(positions), charge)
        ledger.charge(np.array(positions), charge)
    bounds = [ledger.bounds(np.array([row])).guarantee.max for row in range(4)]
    for expected, charges in (
        (bounds[0], [gaussian] * 4),
        (bounds[1], [gaussian] * 2 + [other] * 2 + [gaussian] * 2),
        (bounds[2], [other] * 2 + [gaussian] * 2),
        (bounds[3], [gaussian] * 2),
    ):
        alone = LeakLedger(1)
        for charge in charges:
            alone.charge(np.array([0]), charge)
        assert alone.bounds(np.array([0])).guarantee.max == expected
    assert bounds[3] < bounds[0] < bounds[1]


def test_bounds_are_those_of_the_accounts_one_by_one() -> None:
    ledger = LeakLedger(1000)
    charges = np.random.default_rng(3).gamma(2.0, 0.4, size=1000)
    for position, charge in enumerate(charges):
        ledger.charge(np.array([position]), Charge(float(charge)))
    bounds = ledger.bounds(np.arange(1000))
    for found, values in (
        (bounds.sum_kl, charges),
        (bounds.estimate, np.array([estimated_auc(k) for k in charges])),
        (of_class_means(bounds), np.array([leak_auc_bound(k) for k in charges])),
    ):
        assert found.max == pytest.approx(values.max(), rel=1e-12)
        assert np.mean(values <= found.q95) == pytest.approx(0.95, abs=0.0011)
        assert values.mean() - 1e-12 <= found.mean <= values.mean() + 1 / 4096
    flat = bounds.form()
    assert flat["knows_class_means_only_q95"] == of_class_means(bounds).q95
    assert flat["anybody_q95"] == flat["honest_but_curious_mean"] == 1


def test_a_restored_ledger_resumes_where_the_saved_one_was() -> None:
    ledger, batch = LeakLedger(5), np.array([1, 3])
    ledger.charge(batch, Charge(0.25))
    ledger.charge(batch, Charge(0.5, noise_digest("key a"), epsilon=1.0))
    stored = save({name: value.contiguous() for name, value in ledger.state_dict().items()})
    assert b"key a" not in stored
    restored = LeakLedger(5)
    restored.load_state_dict(load(stored))
    for same in (ledger, restored):
        same.charge(batch, Charge(0.5, noise_digest("key a"), epsilon=1.0))
    everything = np.arange(5)
    assert restored.bounds(everything) == ledger.bounds(everything)
    assert restored.bounds(everything).sum_kl.max == 0.75


DOUBLE, BYTES = torch.float64, torch.uint8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"identity": None}, "expected the state of a ledger"),
        ({"current_excess": None}, "expected the state of a ledger"),
        ({"settled_sum_kl": torch.zeros(4, dtype=DOUBLE)}, r"sum_kl: expected .* shape \(3,\)"),
        ({"settled_sum_kl": torch.full((3,), -1.0, dtype=DOUBLE)}, "no negative numbers"),
        ({"current_sum_kl": torch.full((3,), math.nan, dtype=DOUBLE)}, "no negative numbers"),
        ({"settled_caveats": torch.zeros(2, dtype=BYTES)}, "caveats: expected"),
        ({"settled_caveats": torch.zeros(3, dtype=torch.int64)}, "caveats: expected"),
        ({"current_caveats": torch.full((3,), 128, dtype=BYTES)}, "caveats: expected known"),
        ({"settled_excess": torch.ones(3, dtype=torch.float32)}, "excess: expected"),
        ({"settled_epsilon": torch.full((3,), math.nan, dtype=DOUBLE)}, "no negative numbers"),
        ({"current_leak_auc": torch.full((3,), 0.4, dtype=DOUBLE)}, "expected AUCs of 0.5 to 1"),
        ({"settled_leak_auc": torch.full((3,), 1.1, dtype=DOUBLE)}, "expected AUCs of 0.5 to 1"),
    ],
)
def test_a_state_that_cannot_be_this_ledgers_is_refused(
    damage: dict[str, Tensor | None], message: str
) -> None:
    ledger = LeakLedger(3)
    ledger.charge(np.arange(3), Charge(0.5, noise_digest("key a"), epsilon=1.0))
    state = ledger.state_dict() | damage
    with pytest.raises(ValueError, match=message):
        LeakLedger(3).load_state_dict({name: v for name, v in state.items() if v is not None})


def alarms_for(true_auc: float, charge: float, positives: int, batches: int, seed: int) -> int:
    """Let an attack of a known AUC look at batches with 20 % positives, and judge the epoch."""
    generator, alarm = np.random.default_rng(seed), LeakAlarm(lambda _: None)
    shift = math.sqrt(2) * torch.special.ndtri(torch.tensor(true_auc, dtype=torch.float64)).item()
    labels = torch.tensor([1.0] * positives + [0.0] * 4 * positives)
    for step in range(batches):
        alarm.note_charge(0, charge)
        scores = torch.from_numpy(generator.normal(size=len(labels)))
        random = torch.from_numpy(generator.normal(size=len(labels)))
        leak = {"cut": {"norm": leak_auc(scores + shift * labels, labels)}}
        alarm.note_leak(AuditedBatch(0, step, leak, leak_auc(random, labels)))
    alarm.judge_measured()
    return alarm.alarms


def test_the_alarm_is_silent_at_the_bound_however_small_the_batches_and_loud_above_it() -> None:
    charge = 0.0625
    bound = leak_auc_bound(charge)
    for positives in (2, 6, 50):
        silent = (alarms_for(bound, charge, positives, 40, seed) for seed in range(20))
        assert sum(silent) == 0
    assert all(alarms_for(bound + 0.15, charge, 50, 40, seed) for seed in range(8))
    assert alarms_for(0.99, charge, 50, MIN_BATCHES - 1, seed=1) == 0
    assert alarms_for(0.99, charge, 50, MIN_BATCHES, seed=1) == 1
    assert alarms_for(0.99, math.inf, 50, 40, seed=1) == 0


def test_short_epochs_are_judged_together_and_by_their_own_charges() -> None:
    found: list[AlarmLine] = []
    alarm = LeakAlarm(found.append)
    for epoch in range(4):
        alarm.note_charge(epoch, 0.01 if epoch < 3 else math.inf)
        for step in range(MIN_BATCHES // 3 + 1):
            alarm.note_leak(AuditedBatch(epoch, step, {"cut": {"norm": 0.9 + step / 1000}}, 0.5))
        alarm.note_charge(epoch + 1, math.inf if epoch == 3 else 0.01)
        alarm.judge_measured()
        assert [line.figure[:2] for line in found] == [("cut", "norm")] * (epoch >= 2)


def test_bounds_have_flat_names_and_leave_out_an_epsilon_that_is_none() -> None:
    bounds: LeakBounds = LeakLedger(1).bounds(np.array([0]))
    assert bounds.form()["epsilon"] == 0.0
    assert bounds.form().keys() >= {"sum_kl_max", "estimate_mean", "anybody_q95"}
    assert "epsilon" not in replace(bounds, epsilon=None).form()


def test_the_larger_of_two_bounds_is_that_of_the_larger_sums_to_the_last_bit() -> None:
    """Rounding may take the AUC of a larger divergence below that of a smaller one."""

    def bounds(largest: float, guarantee: float, epsilon: float | None) -> LeakBounds:
        sums, aucs = Spread(largest, 1.0, 0.5), Spread(guarantee, 0.8, 0.7)
        return LeakBounds(sums, aucs, aucs, aucs, aucs, epsilon)

    less, more = bounds(53.6, 1.0, 1.0), bounds(58.6, 1.0 - 1e-16, 2.0)
    assert more.or_more(less) is more
    assert more.or_more(None) is more
    assert less.or_more(more).sum_kl == more.sum_kl
    assert less.or_more(more).epsilon == 2.0
    assert less.or_more(replace(more, epsilon=None)).epsilon is None
