"""What a run records of its attacks beyond the features, and holds against its ledger."""

import copy
import logging
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.monitor.recorder import (
    ActiveRecorder,
    hold_against,
    log_beyond,
    stated_epsilon,
)
from splitveil.active_party.report import write_report
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import (
    AdjustedFigures,
    AdvantageFigures,
    BeyondFigures,
    EpsilonBound,
    LeakBounds,
    LeakFigures,
    Spread,
)
from splitveil.common.record.assessment import assess_figures
from splitveil.common.record.run_record import METRICS, Summary, write_summary
from tests.support.defenses import write_own_defenses
from tests.support.recorders import record, recorders
from tests.support.records import summary_of
from tests.support.runs import build_parties, run_in_process, write_example
from tests.support.tables import write_classes

ALL = "attacks=[norm, spectral, lda, accumulated_spectral, accumulated_cosine, hint_combiner_50]"
ROWS = 1_500


def test_without_a_defense_attacks_pass_what_features_tell(tmp_path: Path) -> None:
    active, passive = (
        party.summary
        for party in record(tmp_path, [f"leak_monitor.{ALL}"], [f"adversary.{ALL}"], ROWS)
    )
    # Only an evaluation can know how well features predict labels: the passive party does not.
    assert not passive.keys() & {"adjusted_leak", "leak_advantage", "epsilon_lower_bound"}
    adjusted, raw = active["adjusted_leak"], active["leak_run_level"]["cut"]
    assert set(adjusted) == {*active["leak"]["cut"], *raw}
    for attack in ("spectral", "lda", "accumulated_spectral"):
        assert adjusted[attack]["value"] > 0.95
    for found in adjusted.values():
        assert found["low"] <= found["value"] <= found["high"]
    assert ROWS / 2 < active["adjusted_rows"] <= ROWS
    assert 0.6 < active["feature_auc"] < 0.99
    # The prior knows as many labels as the attack.
    gains = active["leak_advantage"]
    assert set(gains) == {"accumulated_spectral", "hint_combiner_50"}
    assert gains["accumulated_spectral"]["prior"] == pytest.approx(0.5)
    assert 0.6 < gains["hint_combiner_50"]["prior"] < 0.99
    for attack, gain in gains.items():
        assert gain["value"] == pytest.approx(raw[attack]["auc"] - gain["prior"])
    details = active["epsilon_lower_bound_details"]
    assert active["epsilon_lower_bound"] > 2
    assert details["attack"] in adjusted
    assert details["attack"] != "lda"  # whose score of a row knows the labels of the others
    assert details["correct"] <= details["guesses"] <= details["pairs"]
    assert details["p_value"] < 0.05
    assert details["stated"] is None


def test_a_stated_epsilon_stands_beside_the_measured_one(tmp_path: Path) -> None:
    """One draw of labels in twenty may exclude what is stated; two of three hardly ever do."""
    mechanism = "{kind: randomized_response, epsilon: 1}"
    excluded = 0
    for seed in (1, 2, 3):
        drawn = f"{{name: noisy_label, mechanism: {mechanism}, insecure_noise_seed: {seed}}}"
        own = [f"leak_monitor.{ALL}", f"defense={drawn}"]
        active = record(tmp_path / str(seed), own, ["adversary=null"], ROWS)[0].summary
        details = active["epsilon_lower_bound_details"]
        assert details["stated"] == active["ledger"]["epsilon"] == 1.0
        assert details["stated_for"] == "anybody"
        is_excluded = active["epsilon_lower_bound"] >= 1.0
        assert is_excluded == (details["p_value_of_stated"] <= 0.05)
        excluded += is_excluded
    assert excluded <= 1


def test_several_classes_are_measured_by_the_pair_told_apart_best(tmp_path: Path) -> None:
    write_classes(tmp_path, rows=1_500)
    parties = build_parties(tmp_path, [], ["adversary=null"])
    with recorders(parties, tmp_path) as both:
        run_in_process(parties)
    found = both.active.summary({}).form()
    for attack in ("cosine", "accumulated_cosine"):
        assert found["adjusted_leak"][attack]["value"] > 0.9
    assert found["adjusted_leak"]["norm"]["value"] < found["adjusted_leak"]["cosine"]["value"]
    assert set(found["leak_advantage"]) == {"accumulated_spectral"}
    assert 0 < found["adjusted_rows"] < 1_000  # those of the pair of classes
    assert 0.5 <= found["feature_auc"] <= 1.0
    assert found["epsilon_lower_bound"] >= 0.0


def test_too_few_rows_exclude_no_epsilon() -> None:
    """The summary has a bound all the same: 0, without details."""
    written = Summary(leak=LeakFigures(beyond=EXPLAINED)).form()
    assert written["epsilon_lower_bound"] == 0.0
    assert "epsilon_lower_bound_details" not in written


OVERSTATED = '''
from splitveil.active_party.defenses import Adversary, noise_digest

class Overstated(Defense):
    """Sends bare gradients and states an epsilon of 1/10 for anybody."""

    def __init__(self, context, noise):
        pass

    def defend(self, batch):
        charge = Charge(0.1, noise_digest("bare"), 0.1, Adversary.ANYBODY)
        return Defended(release(batch.gradients, batch.gradients), charge)
'''


def test_a_run_whose_attacks_pass_its_statements_says_so_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = write_own_defenses(tmp_path, "defense_that_overstates")
    with (tmp_path / f"{module}.py").open("a") as source:
        source.write(OVERSTATED)
    monkeypatch.syspath_prepend(tmp_path)
    write_example(tmp_path, rows=ROWS)
    defense = f"defense={{name: custom, module: '{module}:Overstated'}}"
    parties = build_parties(tmp_path, [f"leak_monitor.{ALL}", defense], ["adversary=null"])
    with recorders(parties, tmp_path) as both:
        run_in_process(parties)
    with caplog.at_level(logging.INFO):
        summary = both.active.summary({})
    assert "measuring what the attacks reveal beyond features" in caplog.text
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("exclude the epsilon of 0.1 that the ledger states for anybody" in m for m in logged)
    assert any("spectral, feature-adjusted leak AUC 1.0" in message for message in logged)
    write_summary(tmp_path / "active", summary)
    (tmp_path / "active" / "settings.yaml").write_text("defense: {name: custom}")
    page = unescape(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Labels recovered" in page
    assert "excludes every epsilon below" in page
    assert "By what this run's own defense states" in page


def test_a_resumed_run_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recorder loads its own state after the first epoch, as a new process does."""
    own = [f"leak_monitor.{ALL}"]
    expected = record(tmp_path / "undisturbed", own, ["adversary=null"], ROWS)[0].summary
    on_epoch = ActiveRecorder.on_epoch

    def forgetting(self: ActiveRecorder, epoch: int) -> None:
        on_epoch(self, epoch)
        if epoch == 0:
            state = copy.deepcopy(self.state_dict())
            covariates: Any = self._watch._covariates
            latest = covariates._latest
            noted = covariates._labels, covariates._visits, latest.activations, latest.logits
            for tensor in noted:
                tensor.zero_()
            self.load_state_dict(state)

    monkeypatch.setattr(ActiveRecorder, "on_epoch", forgetting)
    found = record(tmp_path / "resumed", own, ["adversary=null"], ROWS)[0].summary
    for key in ("adjusted_leak", "leak_advantage", "epsilon_lower_bound_details"):
        assert found[key] == expected[key]


# ---- held against the ledger ----


def bounds(leak_auc: float, mu: float | None = None, epsilon: float | None = None) -> LeakBounds:
    spread = Spread(leak_auc, leak_auc, leak_auc)
    return LeakBounds(Spread(1, 1, 1), spread, spread, spread, spread, epsilon, mu, mu, mu)


OWN_DEFENSE = {"name": "custom"}
MEASURED = EpsilonBound(1.5, "norm", 400, 350, 1000, 0.95, 1e-5, 0.0)
EXPLAINED = BeyondFigures({"norm": AdjustedFigures(0.52, 0.49, 0.55)})
BEYOND = BeyondFigures(
    {"norm": AdjustedFigures(0.70, 0.68, 0.72), "cosine": AdjustedFigures(0.52, 0.49, 0.55)},
    {"accumulated_spectral": AdvantageFigures(0.1, 0.05, 0.15, 0.6)},
    MEASURED,
)


def test_a_gaussian_mechanism_states_its_epsilon_at_the_delta_of_the_audit() -> None:
    """Of mu 1: 4.38 at delta 1e-5, by the inverse of Balle and Wang's formula."""
    for epsilon, expected in ((None, 4.377), (2.0, 2.0)):
        found = stated_epsilon(bounds(0.76, mu=1.0, epsilon=epsilon), 1e-5)
        assert found is not None
        assert found[0] == pytest.approx(expected, abs=2e-3)
        assert found[1] is Adversary.ANYBODY
    for without in (bounds(0.76), bounds(1.0, mu=float("inf"))):
        assert stated_epsilon(without, 1e-5) is None
        assert hold_against(BEYOND, without) == hold_against(BEYOND, None) == BEYOND


@pytest.mark.parametrize(("epsilon", "passed"), [(1.4, True), (1.47, False), (1.6, False)])
def test_an_alarm_needs_an_epsilon_that_is_clearly_excluded(
    epsilon: float, *, passed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    held = hold_against(BEYOND, bounds(0.9, epsilon=epsilon))
    assert held.epsilon is not None
    assert held.epsilon.passes_stated is passed
    log_beyond(held, bounds(0.9, epsilon=epsilon), {"name": "noisy_label"})
    assert "LEAK ALARM" not in caplog.text  # what is proved is never in doubt
    log_beyond(held, bounds(0.9, epsilon=epsilon), OWN_DEFENSE)
    assert ("LEAK ALARM" in caplog.text) is passed


@pytest.mark.parametrize(
    ("bound", "passed"),
    [
        (0.67, True),
        (0.69, False),
        (float("nan"), False),
    ],
)
def test_an_adjusted_figure_clearly_above_a_bound_raises_an_alarm(
    bound: float, *, passed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        log_beyond(BEYOND, bounds(bound), OWN_DEFENSE)
    assert ("LEAK ALARM: norm, feature-adjusted leak AUC 0.700" in caplog.text) is passed
    assert "ALARM: cosine" not in caplog.text
    by_chance = "above the bound of 0.690 by no more than chance explains"
    assert (by_chance in caplog.text) is (bound == 0.69)


def test_the_report_shows_every_figure_beyond_features(tmp_path: Path) -> None:
    active = tmp_path / "active"
    active.mkdir()
    beyond = replace(BEYOND, advantage={"norm": AdvantageFigures(0.1, 0.05, 0.15, 0.6)})
    write_summary(active, Summary(leak=LeakFigures(beyond=beyond)))
    (active / METRICS).write_text("")
    (active / "settings.yaml").write_text("{}")
    page = unescape(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "0.700 (0.680 to 0.720)</td>" in page
    assert "an epsilon below 1.500 is excluded (delta 1e-05, 95% confidence)" in page
    assert "+0.100 (+0.050 to +0.150)</td>" in page
    assert page.index('id="beyond"') < page.index('id="watch"')


@pytest.mark.parametrize(
    "form",
    [
        {"adjusted_leak": {"norm": {"value": 10**400, "low": 0.1, "high": 0.2}}},
        {"adjusted_leak": [1], "leak_advantage": {"norm": 3}},
        {"epsilon_lower_bound": "x", "epsilon_lower_bound_details": {"attack": "norm"}},
        {"epsilon_lower_bound": 1.0, "epsilon_lower_bound_details": {"attack": 3, "guesses": -1}},
    ],
)
def test_figures_of_another_form_are_left_out(form: dict[str, Any]) -> None:
    assert summary_of(form).of_leak.beyond == BeyondFigures()


def test_an_alarm_and_a_clear_leak_come_before_larger_figures_that_may_be_chance() -> None:
    wide, above = AdjustedFigures(0.62, 0.49, 0.74), AdjustedFigures(0.64, 0.63, 0.65)
    leaking, unknown = AdjustedFigures(0.55, 0.54, 0.56), AdjustedFigures(0.9, 0.3, 1.0)
    figures = {"norm": wide, "cosine": above, "spectral": leaking, "kmeans": unknown}
    found = assess_figures(BeyondFigures(figures), bounds(0.6), OWN_DEFENSE)
    assert [one.attack for one in found.attacks] == ["cosine", "spectral", "norm", "kmeans"]
    assert "more than the 0.600 that the ledger states for anybody" in found.in_words
    proved = assess_figures(BeyondFigures(figures), bounds(0.6), {})
    assert [one.attack for one in proved.attacks] == ["spectral", "cosine", "norm", "kmeans"]
    assert not proved.above_bound
