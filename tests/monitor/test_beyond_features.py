"""What a run records of its attacks beyond the features, and holds against its ledger."""

import copy
import json
import logging
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from splitveil.active_party.ledger.bounds import LeakBounds, PeerBound, Spread
from splitveil.active_party.monitor.stated import hold_against, log_beyond, stated_epsilon
from splitveil.active_party.report import write_report
from splitveil.active_party.report.run_files import read_run
from splitveil.active_party.report.verdict import judge
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.figures import (
    AdjustedFigures,
    AdvantageFigures,
    BeyondFigures,
    EpsilonFigures,
    LeakFigures,
    set_aside,
)
from splitveil.common.record.run_record import METRICS, read_summary, write_summary
from splitveil.common.record.summary import Summary
from splitveil.common.record.summary_tables import print_summary
from tests.support.own_defenses import write_own_defenses
from tests.support.recorded import recorders
from tests.support.runs import build_parties, run_in_process, write_example
from tests.support.several_classes import write_classes

ALL = "attacks=[norm, spectral, lda, accumulated_spectral, accumulated_cosine, hint_combiner_50]"
ROWS = 1_500


def recorded(folder: Path, *active: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run both parties, and return both summaries as they are written."""
    write_example(folder, rows=ROWS)
    parties = build_parties(folder, [f"leak_monitor.{ALL}", *active], [f"adversary.{ALL}"])
    with recorders(parties, folder) as both:
        run_in_process(parties)
    return both.active.summary({}).form(), both.passive.summary().form()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return recorded(tmp_path_factory.mktemp("bare"))


def test_every_attack_is_measured_beyond_features(
    bare: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Without a defense the strong ones tell all labels; only an evaluation can know that."""
    active, passive = bare
    adjusted = active["adjusted_leak"]
    assert set(adjusted) == {*active["leak"]["cut"], *active["leak_run_level"]["cut"]}
    for attack in ("spectral", "lda", "accumulated_spectral"):
        assert adjusted[attack]["value"] > 0.95
    for found in adjusted.values():
        assert found["low"] <= found["value"] <= found["high"]
    assert not passive.keys() & {"adjusted_leak", "leak_advantage", "epsilon_lower_bound"}


def test_the_prior_knows_as_many_labels_as_the_attack(
    bare: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    active, _ = bare
    gains, raw = active["leak_advantage"], active["leak_run_level"]["cut"]
    assert set(gains) == {"accumulated_spectral", "hint_combiner_50"}
    assert gains["accumulated_spectral"]["prior"] == pytest.approx(0.5)
    assert 0.6 < gains["hint_combiner_50"]["prior"] < 0.99
    for attack, gain in gains.items():
        assert gain["value"] == pytest.approx(raw[attack]["auc"] - gain["prior"])


def test_bare_gradients_exclude_every_small_epsilon(
    bare: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    active, _ = bare
    details = active["epsilon_lower_bound_details"]
    assert active["epsilon_lower_bound"] > 2
    assert details["attack"] in active["adjusted_leak"]
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
        active, _ = recorded(tmp_path / str(seed), f"defense={drawn}")
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
    assert found["epsilon_lower_bound"] >= 0.0


def test_too_few_rows_exclude_no_epsilon(tmp_path: Path) -> None:
    """The summary has a bound all the same: 0, without details."""
    figures = BeyondFigures({"norm": AdjustedFigures(0.52, 0.49, 0.55)})
    write_summary(tmp_path, Summary(leak=LeakFigures(beyond=figures)))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["epsilon_lower_bound"] == 0.0
    assert "epsilon_lower_bound_details" not in written
    assert read_summary(tmp_path).of_leak.beyond == figures


OVERSTATED = '''

class Overstated(Defense):
    """Sends bare gradients and states an epsilon of 1/10 for anybody."""

    def __init__(self, context, noise):
        pass

    def defend(self, batch):
        report = DefenseReport(0.0, charge=LeakCharge(0.1, "bare", 0.1, Adversary.ANYBODY))
        return Defended(release(batch.gradients, batch.gradients), report)
'''


def test_a_run_whose_attacks_pass_its_statements_says_so_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In its log, in the verdict and in the report, which lead with it."""
    module = write_own_defenses(tmp_path, "defense_that_overstates")
    source = tmp_path / f"{module}.py"
    imported = "from splitveil.active_party.defenses.interface import Adversary\n"
    source.write_text(source.read_text() + imported + OVERSTATED)
    monkeypatch.syspath_prepend(tmp_path)
    write_example(tmp_path, rows=ROWS)
    defense = f"defense={{name: custom, module: '{module}:Overstated'}}"
    parties = build_parties(tmp_path, [f"leak_monitor.{ALL}", defense], ["adversary=null"])
    with recorders(parties, tmp_path) as both:
        run_in_process(parties)
    with caplog.at_level(logging.INFO):
        summary = both.active.summary({})
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert any("exclude the epsilon of 0.1 that the ledger states for anybody" in m for m in logged)
    assert any("spectral reaches a leak AUC of" in message for message in logged)
    write_summary(tmp_path / "active", summary)
    (tmp_path / "active" / "settings.yaml").write_text("{}")
    verdict = judge(read_run(tmp_path), [], [])
    assert verdict.level == "recovered"
    assert "excludes every epsilon below" in verdict.doubts[0]
    assert "among examples that features predict alike" in verdict.headline
    assert "excludes every epsilon below" in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    """The state goes through the recorder in the middle of a run that goes on."""
    found = []
    for name in ("undisturbed", "resumed"):
        folder = tmp_path / name
        write_example(folder, rows=ROWS)
        parties = build_parties(folder, [f"leak_monitor.{ALL}"], ["adversary=null"])
        with recorders(parties, folder) as both:
            if name == "resumed":
                parties.session.lifecycle.observer = _Forgetful(both.active)
            run_in_process(parties)
        found.append(both.active.summary({}).form())
    for key in ("adjusted_leak", "leak_advantage", "epsilon_lower_bound_details"):
        assert found[0][key] == found[1][key]


class _Forgetful:
    """A recorder that loads its own state after the first epoch, as a new process does."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def on_epoch(self, epoch: int) -> None:
        self._recorder.on_epoch(epoch)
        if epoch == 0:
            state = copy.deepcopy(self._recorder.state_dict())
            covariates = self._recorder._watch._covariates
            latest = covariates._latest
            noted = covariates._labels, covariates._visits, latest.activations, latest.logits
            for tensor in noted:
                tensor.zero_()
            self._recorder.load_state_dict(state)


# ---- held against the ledger ----


def bounds(leak_auc: float, mu: float | None = None, epsilon: float | None = None) -> LeakBounds:
    spread = Spread(leak_auc, leak_auc, leak_auc)
    of_peers = tuple(PeerBound(spread, mu) for _ in Adversary)
    return LeakBounds(Spread(1, 1, 1), spread, of_peers, epsilon)


MEASURED = EpsilonFigures(1.5, "norm", 400, 350, 1000, 0.95, 1e-5, 0.0)
BEYOND = BeyondFigures(
    {"norm": AdjustedFigures(0.70, 0.68, 0.72), "cosine": AdjustedFigures(0.52, 0.49, 0.55)},
    {"accumulated_spectral": AdvantageFigures(0.1, 0.05, 0.15, 0.6)},
    MEASURED,
)


def test_a_gaussian_mechanism_states_its_epsilon_at_the_delta_of_the_audit() -> None:
    """Of mu 1: 4.38 at delta 1e-5, by the inverse of Balle and Wang's formula."""
    found = stated_epsilon(bounds(0.76, mu=1.0), 1e-5)
    assert found is not None
    assert found.epsilon == pytest.approx(4.377, abs=2e-3)
    assert found.peers is Adversary.ANYBODY
    smaller = stated_epsilon(bounds(0.76, mu=1.0, epsilon=2.0), 1e-5)
    assert smaller is not None
    assert smaller.epsilon == 2.0


def test_bounds_without_an_epsilon_state_none() -> None:
    assert stated_epsilon(bounds(0.76), 1e-5) is None
    assert stated_epsilon(bounds(1.0, mu=float("inf")), 1e-5) is None
    assert hold_against(BEYOND, bounds(0.76)) == BEYOND
    assert hold_against(BEYOND, None) == BEYOND


@pytest.mark.parametrize(("epsilon", "passed"), [(1.4, True), (1.47, False), (1.6, False)])
def test_an_alarm_needs_an_epsilon_that_is_clearly_excluded(
    epsilon: float, *, passed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    held = hold_against(BEYOND, bounds(0.9, epsilon=epsilon))
    assert held.epsilon is not None
    assert held.epsilon.passes_stated is passed
    log_beyond(held, bounds(0.9, epsilon=epsilon))
    assert ("LEAK ALARM" in caplog.text) is passed


UNSURE = MEASURED._replace(p_value=0.2)
FEW = MEASURED._replace(stated=2.0, stated_for="anybody", pairs=500, p_value_of_stated=0.2)


@pytest.mark.parametrize(
    ("epsilon", "bound", "passed", "aside"),
    [
        (MEASURED, 0.66, True, []),
        # The lower end of the interval, two standard errors below, is .68: three are needed.
        (MEASURED, 0.69, False, []),
        # Of few rows, adjusted figures show what the model of the features has not learned.
        (UNSURE, 0.6, False, ["norm"]),
        (UNSURE, 0.75, False, []),
        (UNSURE, float("nan"), False, []),
        # Guesses of 569 patients were better than chance, and an adjusted figure was .87 at .60.
        (FEW, 0.6, False, ["norm"]),
        (FEW._replace(p_value_of_stated=0.01), 0.6, True, []),
        (FEW._replace(pairs=1000), 0.6, True, []),
        (FEW._replace(stated_for="honest-but-curious"), 0.6, True, []),
        # Features decide all but a few dozen of 300 digits, and the figure was .99 at .60.
        (None, 0.6, False, ["norm"]),
    ],
)
def test_an_adjusted_figure_above_a_bound_raises_an_alarm_or_is_set_aside(
    epsilon: EpsilonFigures | None,
    bound: float,
    aside: list[str],
    *,
    passed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = replace(BEYOND, epsilon=epsilon)
    log_beyond(held, bounds(bound))
    assert ("norm reaches a leak AUC of 0.700 beyond the features" in caplog.text) is passed
    assert "cosine reaches" not in caplog.text
    assert list(set_aside(held, bound)) == aside


def test_without_rows_to_guess_a_bound_that_is_not_for_anybody_is_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    by_peers = (bounds(1.0).by_peers[0], *bounds(0.6).by_peers[1:])
    log_beyond(replace(BEYOND, epsilon=None), bounds(0.6)._replace(by_peers=by_peers))
    assert "norm reaches a leak AUC of 0.700" in caplog.text


# ---- verdict and report ----


def page_of(folder: Path, beyond: BeyondFigures) -> tuple[str, str]:
    """Return the verdict's words and the report of a run with these figures alone."""
    active = folder / "active"
    active.mkdir(parents=True)
    write_summary(active, Summary(leak=LeakFigures(beyond=beyond)))
    (active / METRICS).write_text("")
    (active / "settings.yaml").write_text("{}")
    verdict = judge(read_run(folder), [], [])
    page = write_report(folder).read_text(encoding="utf-8")
    return f"{verdict.level} {verdict.headline} {unescape(page)}", page


def test_the_verdict_leads_with_what_features_do_not_tell(tmp_path: Path) -> None:
    words, page = page_of(tmp_path, BEYOND)
    assert words.startswith("leaking Beyond the features, gradients reveal something")
    assert "norm, with an adjusted leak AUC of 0.700 (95 % interval 0.680 to 0.720)" in words
    assert "an epsilon below 1.500 is excluded (delta 1e-05, 95% confidence)" in words
    assert "gains 0.100 of AUC (0.050 to 0.150) over the 0.600" in words
    assert page.index('id="beyond"') < page.index('id="watch"')
    assert "Measured beyond features" in page


def test_a_leak_that_features_explain_is_none(tmp_path: Path) -> None:
    """The adjusted figure may be chance: its interval reaches below 1/2."""
    figures = BeyondFigures({"norm": AdjustedFigures(0.52, 0.49, 0.55)})
    words, _ = page_of(tmp_path, figures)
    assert words.startswith("unbounded No attack that was run tells more of the labels than feat")


def test_the_verdict_names_the_recovering_attack_that_needs_least(tmp_path: Path) -> None:
    recovered = {
        "lda": AdjustedFigures(1.0, 0.99, 1.0),
        "spectral": AdjustedFigures(0.97, 0.96, 0.98),
    }
    words, _ = page_of(tmp_path, BeyondFigures(recovered))
    assert words.startswith(
        "recovered Anyone who keeps the gradients of this run recovers the labels: AUC 0.970"
    )


@pytest.mark.parametrize(
    "summary",
    [
        {"adjusted_leak": {"norm": {"value": 10**400, "low": 0.1, "high": 0.2}}},
        {"adjusted_leak": [1], "leak_advantage": {"norm": 3}},
        {"epsilon_lower_bound": "x", "epsilon_lower_bound_details": {"attack": "norm"}},
        {"epsilon_lower_bound": 1.0, "epsilon_lower_bound_details": {"attack": 3, "guesses": -1}},
    ],
)
def test_figures_of_another_form_are_left_out(tmp_path: Path, summary: dict[str, Any]) -> None:
    active = tmp_path / "active"
    active.mkdir()
    (active / "summary.json").write_text(json.dumps(summary))
    (active / METRICS).write_text("")
    (active / "settings.yaml").write_text("{}")
    assert read_run(tmp_path).active.summary.of_leak.beyond == BeyondFigures()
    assert "</html>" in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_end_of_a_run_prints_the_adjusted_figures(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary("active party", Summary(leak=LeakFigures(beyond=BEYOND)))
    printed = capsys.readouterr().out
    assert "feature-adjusted leak AUC" in printed
    assert "0.680 .. 0.720" in printed
