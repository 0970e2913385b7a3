"""The leak ledger and the run's budget on the session itself: charges, and the end of a run."""

import io
import json
import math
from contextlib import nullcontext
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from splitveil.active_party.defenses import NoisyLabelDefense
from splitveil.active_party.defenses.noisy_label import at_leak_auc
from splitveil.active_party.defenses.sum_kl import (
    leak_auc_bound,
    power_for_sum_kl,
    sum_kl_for_leak_auc,
)
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.planned import stop_epoch
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import BudgetExhausted, Interrupted, PeerLeft, SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.run_record import write_summary
from splitveil.common.text.wording import at_most
from splitveil.common.wire.status import error_from, status_for
from tests.support.peers import FaultyPeer, StopsAtFirstStep
from tests.support.plans import printed_plan
from tests.support.runs import Parties, build_parties, run_in_process

MARVELL = "defense={name: marvell, strength: {power_ratio: 16}}"
REPEATABLE = "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 1}"
LONGER = "contract.epochs=5"


def parties_with(folder: Path, *active: str) -> Parties:
    return build_parties(folder, active, [o for o in active if o.startswith("contract.")])


def test_each_epoch_charges_every_training_example_once_and_no_other(example: Path) -> None:
    parties = parties_with(example, MARVELL)
    run_in_process(parties)
    rows, ledger = parties.active.rows, parties.session.lifecycle.answering.budget.course
    assert rows is not None
    bounds = parties.session.leak_bounds()
    assert bounds.sum_kl.max == pytest.approx(2 / 16, rel=0.02)
    assert bounds.sum_kl.mean == pytest.approx(2 / 16, rel=0.02)
    held_out = np.concatenate([rows.splits["validation"], rows.splits["test"]])
    assert ledger.bounds(held_out).sum_kl.max == 0
    assert [epoch for epoch, _ in parties.active.ledger] == [0, 1]
    assert parties.active.ledger[1][1] == bounds
    assert parties.active.ledger[0][1].sum_kl.max < bounds.sum_kl.max


def test_replays_are_charged_nothing(example: Path) -> None:
    quiet, faulty = parties_with(example, REPEATABLE), parties_with(example, REPEATABLE)
    run_in_process(quiet)
    run_in_process(faulty, lambda s, e: FaultyPeer(s, e, loses=lambda count: count % 2 == 0))
    assert faulty.session.leak_bounds() == quiet.session.leak_bounds()


def test_without_a_defense_the_ledger_promises_nothing(example: Path) -> None:
    parties = parties_with(example)
    run_in_process(parties)
    assert parties.session.leak_bounds().sum_kl.max == math.inf
    for one in parties.session.leak_bounds().by_peers().values():
        assert one.mean == pytest.approx(1)
    assert set(parties.session.leak_bounds().mu_by_peers().values()) == {None}


def budget_of_class_means(limit: str) -> str:
    return f"run_budget={{{limit}, adversary: knows class means only}}"


def bound(bounds: LeakBounds) -> float:
    return bounds.against(Adversary.CLASS_MEANS).max


@pytest.mark.parametrize("limit", ["leak_auc: 0.7", f"sum_kl: {sum_kl_for_leak_auc(0.7)}"])
def test_the_answer_that_would_pass_the_budget_is_never_given(example: Path, limit: str) -> None:
    parties = parties_with(example, REPEATABLE, LONGER, budget_of_class_means(limit))
    free = parties_with(example, REPEATABLE, LONGER)
    with pytest.raises(BudgetExhausted) as caught:
        run_in_process(parties)
    run_in_process(free)
    session, rows = parties.session, parties.active.rows
    assert rows is not None
    assert session.stage is Stage.ENDED
    assert session.lifecycle.error is caught.value
    steps = rows.order.steps_per_epoch
    assert "epoch 4 step 1" in str(caught.value)
    assert len(parties.active.sent) == len(parties.passive.received) == 3 * steps
    bounds = session.leak_bounds()
    assert bound(bounds) <= 0.7
    assert parties.active.ledger[-1] == (3, bounds)
    # The free run's ledger names the step, too: one epoch more passes.
    assert free.active.ledger[2][1] == bounds
    assert bound(free.active.ledger[3][1]) > 0.7
    # What was given until then is what a run without a budget would have got.
    sent = zip(parties.active.sent, free.active.sent, strict=False)
    assert all(torch.equal(one, other) for one, other in sent)


def test_a_stopped_run_stays_stopped_and_learns_nothing_from_the_refused_step(
    example: Path,
) -> None:
    parties = parties_with(example, MARVELL, budget_of_class_means("sum_kl: 0.01"))
    peer = StopsAtFirstStep(parties.session, parties.engine)
    with pytest.raises(Interrupted):
        parties.run.run(peer)
    before = {name: value.clone() for name, value in trainer_state(parties).items()}
    for _ in range(2):
        with pytest.raises(BudgetExhausted, match=r"epoch 1 step 1 .* 0\.062"):
            parties.session.exchange(peer.kept)
    parties.session.finish_step()
    assert all(torch.equal(value, before[name]) for name, value in trainer_state(parties).items())
    assert parties.session.leak_bounds().sum_kl.max == 0
    assert parties.active.sent == []


def trainer_state(parties: Parties) -> dict[str, torch.Tensor]:
    assert parties.session.lifecycle.trainer is not None
    return parties.session.lifecycle.trainer.model.state_dict()


def test_the_peer_is_told_nothing_of_ledger_or_budget() -> None:
    status = status_for(BudgetExhausted("epoch 3 step 1: sum_kl 0.25, budget 0.2067"))
    assert status.details == "ended-for-good: this party has ended the run"
    assert isinstance(error_from(status.code, status.details), PeerLeft)


GAFM_TOP = "top_model={kind: mlp, hidden: [4]}"
BUDGET = budget_of_class_means("sum_kl: 1")
NOISY_LABEL = (
    "{name: noisy_label, top_labels: noisy, mechanism: {kind: randomized_response, epsilon: 1}}"
)
STRONG_MARVELL = "{name: marvell, strength: {power_ratio: 16}}"
ONE = "contract.cut_shape=[1]"


@pytest.mark.parametrize(
    ("defense", "others", "holds"),
    [
        ("name: iso, noise_ratio: 0", [], False),
        ("name: max_norm, noise: persistent", [], False),
        ("name: max_norm_positive, noise: persistent", [], False),
        ("name: gafm", [GAFM_TOP], False),
        ("name: gafm, composed_with: {name: max_norm}", [GAFM_TOP], False),
        ("name: gafm, composed_with: {name: marvell}", [GAFM_TOP], False),
        ("name: gafm, terms: gan_only, composed_with: {name: iso}", [GAFM_TOP], False),
        ("name: iso", [], True),
        ("name: max_norm", [], True),
        (f"name: gafm, composed_with: {STRONG_MARVELL}", [GAFM_TOP, ONE], True),
        ("name: gafm, composed_with: {name: iso, noise_ratio: 4}", [GAFM_TOP], True),
        (f"name: gafm, composed_with: {NOISY_LABEL}", [GAFM_TOP], True),
    ],
)
def test_a_budget_that_the_first_answer_would_pass_is_refused_before_the_run(
    example: Path, defense: str, others: list[str], holds: bool
) -> None:
    """Rightly: that is where the ledger of a run without it has no bound after an epoch."""
    overrides = [f"defense={{{defense}, insecure_noise_seed: 1}}", *others]
    refusal = r"run_budget: .* every budget.* or run_budget to null"
    with nullcontext() if holds else pytest.raises(SettingsError, match=refusal):
        load_party_settings(ActiveSettings, example / "active.yaml", [*overrides, BUDGET])
    free = parties_with(example, *overrides)
    run_in_process(free)
    assert (free.active.ledger[0][1].sum_kl.max < math.inf) is holds


def test_a_run_that_stops_before_its_first_evaluation_has_a_summary_all_the_same(
    example: Path, tmp_path: Path
) -> None:
    parties = parties_with(example, MARVELL, budget_of_class_means("sum_kl: 0.01"))
    with ActiveRecorder(parties.active_settings, tmp_path) as recorder:
        parties.session.lifecycle.observer = recorder
        with pytest.raises(BudgetExhausted):
            run_in_process(parties)
    summary = recorder.summary({})
    assert (summary.counts.epochs, summary.counts.steps) == (0, 0)
    assert summary.of_active.model.test.auc is None
    assert summary.of_active.ledger is not None
    assert summary.of_active.ledger.anybody.max == 0.5
    assert {one["leak_auc"] for one in summary.form()["bounds"]} == {0.5}
    print_summary("active party", summary, console=Console(file=io.StringIO()))


# Ratios that the budget holds 2.3, 4.5, 8.5 and 22.7 times: charges of a few percent more or less
# than foretold are of the same epoch.
@pytest.mark.parametrize("power_ratio", [4, 8, 15, 40])
def test_the_plan_names_the_epoch_in_which_the_run_then_stops(
    example: Path, power_ratio: int
) -> None:
    overrides = [
        f"defense={{name: marvell, strength: {{power_ratio: {power_ratio}}}}}",
        budget_of_class_means("leak_auc: 0.8"),
        "contract.epochs=25",
    ]
    parties = parties_with(example, *overrides)
    with pytest.raises(BudgetExhausted):
        run_in_process(parties)
    stopped_in = parties.active.ledger[-1][0]
    expected = f"the run is expected to end in epoch {stopped_in + 1} of"
    assert expected in printed_plan(example, *overrides)


def test_the_plan_admits_what_it_cannot_know(example: Path) -> None:
    unknown = printed_plan(
        example, "defense={name: max_norm}", budget_of_class_means("leak_auc: 0.7")
    )
    assert "not known before" in unknown
    assert "it may end the run in any epoch" in unknown
    limit = budget_of_class_means("sum_kl: 0.3")
    iso = printed_plan(example, "defense={name: iso, noise_ratio: 8}", limit)
    assert "likely 0 .. 0.25" in iso  # 4 d/t with d = 4, t = 64
    assert "it may end the run in any epoch, not likely before epoch 2" in iso
    assert "no credit" in printed_plan(example, "defense={name: max_norm, noise: persistent}")
    assert "reveal the label outright" in printed_plan(example)


def test_the_plan_s_power_ratio_keeps_a_run_below_its_target(example: Path) -> None:
    text = printed_plan(example, MARVELL, "contract.epochs=5", target=0.75)
    positive = labels_of(example).mean()
    ratio = power_for_sum_kl(0, 0, 1, 4, positive, sum_kl_for_leak_auc(0.75) / 5)
    assert at_most(ratio) in text
    strength = f"defense={{name: marvell, strength: {{power_ratio: {ratio}}}}}"
    parties = parties_with(example, strength, "contract.epochs=5")
    run_in_process(parties)
    reached = bound(parties.session.leak_bounds())
    assert reached == pytest.approx(0.75, abs=0.003)
    assert reached == leak_auc_bound(parties.session.leak_bounds().sum_kl.max)


def labels_of(folder: Path) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    lines = (folder / "active.csv").read_text().splitlines()[1:]
    return np.array([float(line.split(",")[1]) for line in lines])


def test_the_epoch_of_the_end_is_the_one_after_the_last_that_fits() -> None:
    assert stop_epoch(0.25, epochs=10, max_sum_kl=0.9) == 3
    assert stop_epoch(0.25, epochs=10, max_sum_kl=1.0) == 4
    assert stop_epoch(0.25, epochs=3, max_sum_kl=1.0) is None
    assert stop_epoch(0.25, epochs=4, max_sum_kl=1.0) is None
    assert stop_epoch(2.0, epochs=4, max_sum_kl=1.0) == 0
    assert stop_epoch(math.inf, epochs=4, max_sum_kl=1.0) == 0
    assert stop_epoch(0.0, epochs=4, max_sum_kl=1.0) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run_budget={leak_auc: 0.7}"], "without a defense"),
        ([MARVELL, "run_budget={leak_auc: 0.7, sum_kl: 1}"], "exactly one of leak_auc, sum_kl"),
        ([MARVELL, "run_budget={}"], "exactly one of leak_auc, sum_kl"),
        ([MARVELL, "run_budget={leak_auc: 0.5}"], "more than 0.5"),
        ([MARVELL, "run_budget={sum_kl: 0}"], "more than 0"),
        ([MARVELL, "run_budget={leak: 0.7}"], "exactly one of leak_auc, sum_kl"),
        ([MARVELL, "run_budget={leak_auc: 0.7}"], "marvell has no bound for anybody, only for"),
        (
            [MARVELL, "run_budget={leak_auc: 0.7, adversary: honest-but-curious}"],
            "marvell has no bound for an honest-but-curious peer.* energy of single rows",
        ),
        (["defense={name: iso}", "run_budget={sum_kl: 1}"], "iso has no bound for anybody"),
        (["defense={name: max_norm}", "run_budget={sum_kl: 1}"], "max_norm has no bound"),
        (
            ["defense={name: marvell, noise: persistent}", "run_budget={leak_auc: 0.8}"],
            "Expected adversary: honest-but-curious in run_budget, or a defense with a bound",
        ),
        (
            ["defense={name: noisy_label, top_labels: true}", "run_budget={leak_auc: 0.8}"],
            "noisy_label has no bound for anybody",
        ),
        (
            [
                "defense={name: noisy_label}",
                "run_budget={leak_auc: 0.8}",
                "early_stopping_epochs=3",
            ],
            "early_stopping_epochs leaves no bound for anybody",
        ),
        (
            [MARVELL, "run_budget={leak_auc: 0.8, adversary: everybody}"],
            r"adversary: expected 'anybody'",
        ),
    ],
)
def test_a_budget_that_cannot_be_meant_or_that_no_charge_describes_is_refused_before_the_run(
    example: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(SettingsError, match=f"run_budget.*{message}") as caught:
        load_party_settings(ActiveSettings, example / "active.yaml", overrides)
    assert caught.value.exit_code == 2


def summary_of(parties: Parties, folder: Path) -> dict[str, Any]:
    with ActiveRecorder(parties.active_settings, folder) as recorder:
        parties.session.lifecycle.observer = recorder
        run_in_process(parties)
    write_summary(folder, recorder.summary({}))
    written: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return written


@pytest.mark.parametrize("ratio", [0.5, 2, 8])
def test_gaussian_noisy_labels_have_their_exact_figure_for_anybody(
    example: Path, tmp_path: Path, ratio: float
) -> None:
    noise = f"mechanism: {{kind: gaussian, noise_ratio: {ratio}}}, insecure_noise_seed: 1"
    auc = NormalDist().cdf(1 / (ratio * math.sqrt(2)))
    # A limit just above the exact figure: that for any distributions would not fit into it.
    limit = f"run_budget={{leak_auc: {auc + 1e-6}}}"
    parties = parties_with(example, f"defense={{name: noisy_label, {noise}}}", limit)
    for bound, adversary in zip(summary_of(parties, tmp_path)["bounds"], Adversary, strict=True):
        assert bound == {
            "adversary": adversary,
            "leak_auc": pytest.approx(auc, rel=1e-12),
            "mu": pytest.approx(1 / ratio, rel=1e-12),
        }


DRAWN_ONCE = ["randomized_response", "laplace", "alibi"]


def noisy_labels(kind: str, leak_auc: float) -> str:
    settings = NoisyLabelDefense.model_validate({"mechanism": {"kind": kind, "epsilon": 1}})
    chosen = at_leak_auc(settings.mechanism, leak_auc)
    mechanism = f"{{kind: {kind}, epsilon: {chosen.model_dump()['epsilon']!r}}}"
    return f"defense={{name: noisy_label, mechanism: {mechanism}, insecure_noise_seed: 1}}"


@pytest.mark.parametrize("kind", DRAWN_ONCE)
def test_noisy_labels_that_are_drawn_once_have_the_exact_figure_of_their_draw(
    example: Path, tmp_path: Path, kind: str
) -> None:
    """In plan, ledger and summary, and held against the budget, over several epochs.

    By the divergence alone it would be above .65, and the first answer refused.
    """
    fits, limit = noisy_labels(kind, 0.6), "run_budget={leak_auc: 0.6}"
    parties = parties_with(example, fits, limit, LONGER)
    written = summary_of(parties, tmp_path)
    for bound, adversary in zip(written["bounds"], Adversary, strict=True):
        assert bound == {
            "adversary": adversary,
            "leak_auc": pytest.approx(0.6, abs=1e-9),
            "mu": None,
        }
    bounds = parties.session.leak_bounds()
    assert bounds.guarantee.mean == bounds.guarantee.max >= bounds.estimate.max
    assert leak_auc_bound(bounds.sum_kl.max) > 0.65
    plan = printed_plan(example, fits, limit, LONGER)
    assert "a leak AUC of at most 0.600: all 5 epochs fit" in plan
    assert plan.count(" 0.600 ") >= 2 * len(Adversary)  # of one answer, and of the whole run


@pytest.mark.parametrize("kind", DRAWN_ONCE)
def test_noisy_labels_above_the_budget_are_refused_at_the_first_answer(
    example: Path, kind: str
) -> None:
    above, limit = noisy_labels(kind, 0.61), "run_budget={leak_auc: 0.6}"
    with pytest.raises(
        BudgetExhausted, match=r"step 1 .* a leak AUC of at most 0\.610 for anybody"
    ):
        run_in_process(parties_with(example, above, limit))
    assert "the run ends in epoch 1 of 2" in printed_plan(example, above, limit)


def test_a_summary_has_all_columns_and_1_where_there_is_no_bound(
    example: Path, tmp_path: Path
) -> None:
    bounds = summary_of(parties_with(example, MARVELL), tmp_path)["bounds"]
    assert [one["adversary"] for one in bounds] == list(Adversary)
    assert [one["leak_auc"] for one in bounds[:2]] == [1.0, 1.0]
    assert 0.5 < bounds[2]["leak_auc"] < 0.7
    assert [one["mu"] for one in bounds] == [None, None, None]


def test_early_stopping_takes_the_bound_for_anybody_away(example: Path, tmp_path: Path) -> None:
    noisy = "defense={name: noisy_label, insecure_noise_seed: 1}"
    stopping = "early_stopping_epochs=100"
    bounds = summary_of(parties_with(example, noisy, stopping), tmp_path)["bounds"]
    assert bounds[0]["leak_auc"] == 1
    assert bounds[1]["leak_auc"] == bounds[2]["leak_auc"] < 0.7
    assert [one["mu"] for one in bounds] == [None, 0.5, 0.5]


def test_a_release_is_held_against_the_budget_by_its_exact_figure(
    example: Path, tmp_path: Path
) -> None:
    mu = math.sqrt(2) * NormalDist().inv_cdf(0.6)
    noisy = (
        f"defense={{name: noisy_label, mechanism: {{kind: gaussian, noise_ratio: {1 / mu}}}, "
        f"insecure_noise_seed: 1}}"
    )
    fits = summary_of(parties_with(example, noisy, "run_budget={leak_auc: 0.6}"), tmp_path)
    assert fits["bounds"][0]["leak_auc"] == pytest.approx(0.6, rel=1e-9)
    assert fits["bounds"][0]["mu"] == pytest.approx(mu, rel=1e-9)
    parties = parties_with(example, noisy, "run_budget={leak_auc: 0.59}")
    with pytest.raises(BudgetExhausted, match=r"run_budget: epoch 1 .* would take .* for anybody"):
        run_in_process(parties)
    assert parties.session.leak_bounds().sum_kl.max == 0
