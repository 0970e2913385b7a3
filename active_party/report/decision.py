"""Decides whether a run may be used: pass or fail against a target, check by check.

The target is ``report.target_leak_auc``, or else the ``leak_auc`` of the run's budget. A bound for
anybody at or below it passes by itself. Measured attacks can only show that a target is missed: an
attack that has not been run may do better.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from splitveil.active_party.defenses.projected.label_utility import share_of_variance
from splitveil.active_party.report.advice import (
    Price,
    Step,
    TableSize,
    price_list,
    steps_to_a_bound,
)
from splitveil.active_party.report.bounds import beyond_of, bounds_of, contradictions, guarantee_of
from splitveil.active_party.report.figures import Finding, strongest
from splitveil.active_party.report.paired import Estimate, estimate_of
from splitveil.active_party.report.run_files import RunFiles, num_classes
from splitveil.active_party.report.verdict import RunLevel
from splitveil.active_party.training.evaluation import StoredPredictions, read_predictions
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.privacy.attacks import WITHOUT_GRADIENTS
from splitveil.common.record.figures import is_clearly_above
from splitveil.common.text.upper_bounds import at_most, auc_at_most

Outcome = Literal["pass", "fail", "open"]

WORDS: Mapping[Outcome, str] = {"pass": "pass", "fail": "fail", "open": "not shown"}

_ROUNDING = 1e-9


class Check(NamedTuple):
    """One figure, held against what is accepted."""

    name: str
    outcome: Outcome
    figure: str
    accepted: str
    why: str

    @property
    def word(self) -> str:
        return WORDS[self.outcome]


class Decision(NamedTuple):
    """Whether a run meets its target, why, and what to change if not."""

    outcome: Outcome
    headline: str
    checks: tuple[Check, ...]
    steps: tuple[Step, ...]
    prices: tuple[Price, ...]
    """What the table is worth at several bounds."""
    has_target: bool

    @property
    def word(self) -> str:
        return WORDS[self.outcome] if self.has_target else "no target"


def decide(run: RunFiles, findings: Sequence[Finding], accumulated: Sequence[RunLevel]) -> Decision:
    """Hold a run against its target."""
    target, where = target_of(run)
    predictions = read_predictions(run.active.folder)
    size = _table_size(run, predictions)
    checks = [*_quality_checks(run, predictions)]
    steps: list[Step] = []
    if target is not None:
        bound = _bound_check(run, target)
        measured = _measured_check(run, target, findings, accumulated)
        # Attacks on numbers reach no AUC that could be held against the target.
        of_attacks = [] if num_classes(run) == ONE_NUMBER else [measured]
        checks = [bound, *of_attacks, *_ledger_checks(run), *checks]
        if bound.outcome != "pass":
            steps += steps_to_a_bound(run, target, size)
    else:
        checks = [*_ledger_checks(run), *checks]
    steps += _other_steps(checks, target, has_guarantee=guarantee_of(run) < 1)
    outcome = _overall(checks, has_bound=bool(checks) and _passes_by_bound(checks))
    return Decision(
        outcome,
        _headline(outcome, checks, target, where),
        tuple(checks),
        tuple(steps),
        tuple(price_list(run, target, size)),
        target is not None,
    )


def target_of(run: RunFiles) -> tuple[float | None, str]:
    """Return the largest accepted leak AUC, and the setting that says so."""
    own = run.active.setting("report", "target_leak_auc")
    if isinstance(own, int | float):
        return float(own), "report.target_leak_auc"
    budget = run.active.setting("run_budget", "leak_auc")
    if isinstance(budget, int | float):
        return float(budget), "run_budget.leak_auc"
    return None, ""


_BOUND = "bound for anybody"
_MEASURED = "measured attacks"
_DOUBTS = "attacks below the stated bounds"
_QUALITY = "test AUC"
_ALONE = "better than the active party alone"
_BUDGET = "run budget"
_WORTH = (
    "A model of the active party's own features alone, on the same test rows: what is not better "
    "than that is worth no leak."
)
_OF_LEAK = {_BOUND, _MEASURED, _DOUBTS, _BUDGET}


def _bound_check(run: RunFiles, target: float) -> Check:
    bound = guarantee_of(run)
    accepted = f"≤ {target:g}"
    if math.isnan(bound) or bound >= 1:
        why = "Nothing bounds what an attack that was not run may reach."
        return Check(_BOUND, "fail", "none", accepted, why)
    if bound <= target + _ROUNDING:
        why = "No score of any peer exceeds it, on any training label, over the whole run."
        return Check(_BOUND, "pass", f"≤ {auc_at_most(bound)}", accepted, why)
    why = "The bound is above the target: an attack between the two is not excluded."
    return Check(_BOUND, "fail", f"≤ {auc_at_most(bound)}", accepted, why)


def _measured_check(
    run: RunFiles, target: float, findings: Sequence[Finding], accumulated: Sequence[RunLevel]
) -> Check:
    accepted = f"≤ {target:g}"
    adjusted = beyond_of(run).adjusted
    if adjusted:
        above = [name for name, found in adjusted.items() if is_clearly_above(found, target)]
        name = max(above or adjusted, key=lambda one: adjusted[one].value)
        found = adjusted[name]
        figure = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
        if above:
            why = f"{name} is above it by more than three standard errors, beyond features."
            return Check(_MEASURED, "fail", figure, accepted, why)
        if all(one.high <= target for one in adjusted.values()):
            why = f"Beyond features, {name} is the strongest; all 95 % intervals end below."
            return Check(_MEASURED, "pass", figure, accepted, why)
        why = f"Beyond features, {name} is the strongest; an interval reaches above the target."
        return Check(_MEASURED, "open", figure, accepted, why)
    return _raw_check(accepted, target, findings, accumulated)


def _raw_check(
    accepted: str, target: float, findings: Sequence[Finding], accumulated: Sequence[RunLevel]
) -> Check:
    whole = [one for one in accumulated if one.attack not in WITHOUT_GRADIENTS]
    top = max(whole, key=lambda one: one.leak_auc, default=None)
    best = strongest(findings)
    if top is not None and (best is None or top.leak_auc >= best.mean):
        value, by = top.leak_auc, f"{top.attack}, over the whole run"
    elif best is not None:
        value, by = best.mean, f"{best.attack}, on single batches"
    else:
        return Check(_MEASURED, "open", "–", accepted, "No attack was run.")
    if value <= target:
        return Check(_MEASURED, "pass", f"{value:.3f}", accepted, f"The strongest is {by}.")
    why = (
        f"The strongest is {by}. The figure contains what features say, which was not measured "
        "apart."
    )
    return Check(_MEASURED, "open", f"{value:.3f}", accepted, why)


def _ledger_checks(run: RunFiles) -> Iterator[Check]:
    doubts = list(contradictions(run, bounds_of(run)))
    alarms = run.active.summary.of_active.leak_alarms or 0
    if alarms:
        doubts.append("The leak alarm went off: an attack passed the charge of one answer.")
    if doubts:
        yield Check(_DOUBTS, "fail", str(len(doubts)), "0", doubts[0])
    elif bounds_of(run):
        yield Check(_DOUBTS, "pass", "0", "0", "No attack that was run passed a stated bound.")
    limit, spent = run.active.setting("run_budget", "sum_kl"), run.active.summary.of_active.ledger
    if isinstance(limit, int | float) and spent is not None and spent.sum_kl.max is not None:
        held = spent.sum_kl.max <= limit * (1 + _ROUNDING)
        figure = f"sum_kl {at_most(spent.sum_kl.max)}"
        why = "The largest charge of any example, all answers together."
        yield Check(_BUDGET, "pass" if held else "fail", figure, f"≤ {limit:g}", why)


def _quality_checks(run: RunFiles, predictions: StoredPredictions | None) -> Iterator[Check]:
    model = run.active.summary.of_active.model
    least = run.active.setting("report", "min_test_auc")
    if model.test_number is not None and model.test_rmse_alone is not None:
        rmse, alone = model.test_number.rmse, model.test_rmse_alone
        outcome: Outcome = "pass" if rmse < alone else "fail"
        yield Check(_ALONE, outcome, f"RMSE {rmse:.4g}", f"< {alone:.4g}", _WORTH)
    if model.test_auc is None:
        return
    found = estimate_of(model.test_auc, predictions)
    figure = f"{model.test_auc:.4f}" if found is None else found.in_words()
    if isinstance(least, int | float):
        yield _quality_check(model.test_auc, found, figure, float(least))
    if model.test_auc_alone is not None:
        better = model.test_auc > model.test_auc_alone
        outcome = "pass" if better else "fail"
        yield Check(_ALONE, outcome, figure, f"> {model.test_auc_alone:.4f}", _WORTH)


def _quality_check(auc: float, found: Estimate | None, figure: str, least: float) -> Check:
    accepted = f"≥ {least:g}"
    low, high = (auc, auc) if found is None else (found.low, found.high)
    if low >= least:
        return Check(_QUALITY, "pass", figure, accepted, "Of the last epoch, on the test rows.")
    if high < least:
        return Check(_QUALITY, "fail", figure, accepted, "Of the last epoch, on the test rows.")
    why = "The test rows are too few to tell: the 95 % interval contains the smallest accepted."
    return Check(_QUALITY, "open", figure, accepted, why)


def _other_steps(
    checks: Sequence[Check], target: float | None, *, has_guarantee: bool
) -> Iterator[Step]:
    failed = {check.name for check in checks if check.outcome == "fail"}
    if target is None:
        yield Step(
            "report:\n  target_leak_auc: 0.6",
            "says which leak AUC is accepted, so that this page can pass or fail the run",
            "None: it changes the report alone. The command report --target-leak-auc 0.6 does the "
            "same for a run that is over.",
        )
    # A bound that was never meant for this attack needs no other run, but another defense.
    if _DOUBTS in failed and has_guarantee:
        yield Step(
            "model_seed: 1",
            "repeats the run to tell chance from a wrong bound: use no bound of this run before "
            "that is known",
            "One more run, whose answers about the same labels add up with this one's in its "
            "ledger: use labels that are allowed to be known.",
        )
    if _QUALITY in failed:
        yield Step(
            "report:\n  target_leak_auc: …",
            "accepts a larger leak for a better model; or align more rows",
            "The list of prices below says what the same table is worth at other bounds.",
        )
    if (_QUALITY, "open") in {(check.name, check.outcome) for check in checks}:
        yield Step(
            "split: {kind: hash, train: 0.6, test: 0.4}",
            "in the contract: twice as many test rows make the interval narrower by 30 %",
            "A quarter of the training rows, or none if more rows are aligned instead.",
        )
    if _ALONE in failed:
        yield Step(
            "(no joint run)",
            "the passive party's features did not help; use the active party's own model",
            "None: nothing leaks.",
        )


def _passes_by_bound(checks: Sequence[Check]) -> bool:
    return any(check.name == _BOUND and check.outcome == "pass" for check in checks)


def _overall(checks: Sequence[Check], *, has_bound: bool) -> Outcome:
    outcomes = [
        # A bound speaks for all attacks, those included whose interval is too wide to tell.
        "pass"
        if has_bound and check.name == _MEASURED and check.outcome == "open"
        else check.outcome
        for check in checks
    ]
    if "fail" in outcomes:
        return "fail"
    return "open" if "open" in outcomes or not outcomes else "pass"


def _headline(outcome: Outcome, checks: Sequence[Check], target: float | None, where: str) -> str:
    if target is None:
        return (
            "No target is set, so this page cannot say whether the run is good enough: set "
            "report.target_leak_auc to the largest leak AUC that you accept."
        )
    goal = f"the target of leak AUC {target:g} ({where})"
    missed = [check.name for check in checks if check.outcome == outcome]
    if outcome == "pass":
        return f"The run meets {goal}, and its bound holds for anybody."
    verb = "fails" if outcome == "fail" else "is not shown"
    if not any(name in _OF_LEAK for name in missed):
        return f"The run meets {goal}, but another check {verb}: {', '.join(missed)}."
    if outcome == "open":
        return f"It is not shown that the run meets {goal}: {', '.join(missed)}."
    return f"The run does not meet {goal}: {', '.join(missed)}."


def _table_size(run: RunFiles, predictions: StoredPredictions | None) -> TableSize | None:
    aligned = run.active.summary.counts.aligned_rows
    share = run.active.setting("contract", "split", "train")
    if aligned is None or predictions is None or not len(predictions.labels):
        return None
    if isinstance(share, int | float):
        rows = round(aligned * share)
    else:
        rows = aligned - len(predictions.labels)
    classes = num_classes(run)
    if classes == ONE_NUMBER:
        return TableSize(rows, share_of_variance(float(predictions.labels.var())))
    fraction = float(predictions.labels.mean()) if classes == 2 else 1 / classes
    return TableSize(rows, fraction)
