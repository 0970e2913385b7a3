"""Decides whether a run may be used: pass or fail against a target, check by check.

The target is ``report.target_leak_auc``, or else the ``leak_auc`` of the run's budget. A bound for
anybody at or below it passes where attacks were measured and none passes it. Measured attacks by
themselves only show that a target is missed: an attack that has not been run may do better.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from splitveil.active_party.report import advice
from splitveil.active_party.report.bounds import guarantee_of
from splitveil.active_party.report.figures import Estimate, estimate_of
from splitveil.active_party.report.run_files import RunFiles, is_one_shot
from splitveil.active_party.training.evaluation import StoredPredictions, read_predictions
from splitveil.common.party.cover import ended_early_by
from splitveil.common.record.assessment import Finding, LeakAssessment, passes_stated
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most

Outcome = Literal["pass", "fail", "open", "unknown"]
"""Of a check or a run: ``open`` where it was not shown, ``unknown`` where no target is set."""

_WORDS: Mapping[Outcome, str] = {"pass": "pass", "fail": "fail", "open": "not shown"}
_BADGES: Mapping[Outcome, str] = {
    "pass": "Meets the target",
    "fail": "Misses the target",
    "open": "Not shown",
    "unknown": "No target set",
}

_NOTHING = 0.5, "the least there is"  # target of a run that sends nothing of labels
_ROUNDING = 1e-9


class Check(NamedTuple):
    name: str
    outcome: Outcome
    figure: str
    accepted: str
    why: str

    @property
    def word(self) -> str:
        return _WORDS[self.outcome]


class Decision(NamedTuple):
    """The verdict whether a run meets its target, why, and what to change if not."""

    outcome: Outcome
    badge: str
    headline: str
    checks: tuple[Check, ...]
    steps: tuple[advice.Change, ...]
    passed: str  # the first finding above what the ledger states; empty without any


def decide(run: RunFiles, assessment: LeakAssessment) -> Decision:
    """Hold a run against its target."""
    target, where = target_of(run)
    predictions = read_predictions(run.active.folder)
    passed = list(_passed(run, assessment))
    checks = [*_ledger_checks(run, assessment, passed), *_quality_checks(run, predictions)]
    if not run.active.has_ended:
        checks.append(Check(_ENDED, "open", "no", "yes", "It was stopped, or is still running."))
    if (ended_by := ended_early_by(run.active.folder)) is not None:
        why = f"It was ended early by {ended_by}: what was agreed was not sent in full."
        checks.append(Check(_ENDED, "open", "early", "yes", why))
    steps: list[advice.Change] = []
    if target is not None:
        bound = _bound_check(run, target)
        checks = [bound, *_measured_checks(target, assessment), *checks]
        if bound.outcome != "pass":
            steps += advice.steps_to_a_bound(run, target)
    steps += _other_steps(run, checks, target)
    outcome = _overall(checks, assessment)
    recovered = assessment.is_recovered
    shown, badge = outcome, _BADGES[outcome]
    if outcome == "open" and {one.name for one in checks if one.outcome == "open"} == {_ALONE}:
        badge = "No gain shown"
    if (target, where) == _NOTHING and outcome == "pass":
        badge = "No label revealed"
    if recovered:
        badge = "Labels recovered"
    if target is None:
        shown = "fail" if recovered or passed else "unknown"
        badge = "An attack passes a bound" if passed else _BADGES[shown]
        badge = "Labels recovered" if recovered else badge
    if ended_by is not None and not (recovered or passed):
        shown, badge = "fail" if shown == "fail" else "open", "Ended early"
    return Decision(
        shown,
        badge,
        _headline(outcome, checks, target, where),
        tuple(checks),
        tuple(steps),
        next(iter(passed), ""),
    )


def target_of(run: RunFiles) -> tuple[float | None, str]:
    """Return the largest accepted leak AUC, and the setting that says so.

    A run that sends nothing that depends on a label needs no setting.
    """
    own = run.active.setting("report", "target_leak_auc")
    if isinstance(own, int | float):
        return float(own), "report.target_leak_auc"
    budget = run.active.setting("run_budget", "leak_auc")
    if isinstance(budget, int | float):
        return float(budget), "run_budget.leak_auc"
    if is_one_shot(run) and guarantee_of(run) == _NOTHING[0]:
        return _NOTHING
    return None, ""


_BOUND = "bound for anybody"
_MEASURED = "measured attacks"
_PASSED = "attacks below the stated bounds"
_QUALITY = "test AUC"
_ALONE = "better than the active party alone"
_BUDGET = "run budget"
_ENDED = "the run has ended"
_WORTH = (
    "A model of the active party's own features only, on the same test rows: what is not better "
    "than that is worth no leak."
)


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


def _measured_checks(target: float, assessment: LeakAssessment) -> Iterator[Check]:
    """Yield the strongest attack; attacks on numbers reach no AUC to hold against the target."""
    accepted, strongest = f"≤ {target:g}", assessment.strongest
    if not assessment.has_gradients or assessment.explained is not None:
        return
    if strongest is None:
        why = f"Beyond features: {assessment.not_measured}."
        yield Check(_MEASURED, "open", "–", accepted, why)
        return
    leaks = [one.leak for one in assessment.attacks]
    separated = [one for one in assessment.attacks if one.finding is not Finding.NOT_SEPARATED]
    if any(one.leak.low > target for one in separated):
        outcome: Outcome = "fail"
        why = f"{strongest.attack} is the strongest; an interval begins above."
    elif not assessment.is_complete:
        outcome = "open"
        why = f"{strongest.attack} is the strongest; others {assessment.not_measured}."
    elif all(leak.high <= target for leak in leaks):
        outcome, why = "pass", f"{strongest.attack} is the strongest; all intervals end below."
    else:
        outcome, why = "open", f"{strongest.attack} is the strongest; an interval reaches above."
    why += f" {strongest.why[:1].upper()}{strongest.why[1:]}."
    yield Check(_MEASURED, outcome, strongest.figures, accepted, why.removesuffix(" ."))


def _passed(run: RunFiles, assessment: LeakAssessment) -> Iterator[str]:
    for one in assessment.above_bound:
        yield f"{one.attack} reaches {one.figures}, {one.why}."
    beyond = run.active.summary.of_leak.beyond
    epsilon = None if beyond is None else beyond.epsilon
    if epsilon is not None and passes_stated(epsilon, assessment):
        yield (
            f"{epsilon.attack} excludes every epsilon below {at_least(epsilon.epsilon)}, more than "
            f"the {at_most(epsilon.stated or 0.0)} that the ledger states for {epsilon.stated_for}."
        )
    if alarms := run.active.summary.of_active.leak_alarms:
        yield (
            f"The leak alarm went off {alarms} time{'s' * (alarms > 1)}: an attack measured more "
            "than the ledger states for one answer."
        )


def _ledger_checks(
    run: RunFiles, assessment: LeakAssessment, passed: Sequence[str]
) -> Iterator[Check]:
    if passed:
        yield Check(_PASSED, "fail", str(len(passed)), "0", " ".join(passed))
    elif assessment.adversary is not None and assessment.strongest is not None:
        yield Check(_PASSED, "pass", "0", "0", "No attack that was run passed a stated bound.")
    limit, spent = run.active.setting("run_budget", "sum_kl"), run.active.summary.of_active.ledger
    if isinstance(limit, int | float) and spent is not None and spent.sum_kl.max is not None:
        held = spent.sum_kl.max <= limit * (1 + _ROUNDING)
        figure = f"sum_kl {at_most(spent.sum_kl.max)}"
        why = "The largest charge of any example, all answers together."
        yield Check(_BUDGET, "pass" if held else "fail", figure, f"≤ {limit:g}", why)


def _quality_checks(run: RunFiles, predictions: StoredPredictions | None) -> Iterator[Check]:
    model = run.active.summary.of_active.model
    test, alone = model.test, model.alone
    least = run.active.setting("report", "min_test_auc")
    found = None if test.auc is None else estimate_of(test.auc, predictions)
    figure = test.in_words(4) if found is None else found.in_words()
    if isinstance(least, int | float):
        if test.auc is None:
            yield Check(_QUALITY, "open", "–", f"≥ {least:g}", "It was not measured.")
        else:
            yield _quality_check(test.auc, found, figure, float(least))
    if alone is not None and test.score is not None and alone.score is not None:
        outcome: Outcome = "pass" if test.score > alone.score else "fail"
        why = _WORTH
        if outcome == "pass" and found is not None and found.low <= alone.score:
            outcome, why = "open", f"The 95 % interval contains that figure. {_WORTH}"
        yield Check(_ALONE, outcome, figure, alone.better_in_words, why)


def _quality_check(auc: float, found: Estimate | None, figure: str, least: float) -> Check:
    accepted = f"≥ {least:g}"
    low, high = (auc, auc) if found is None else (found.low, found.high)
    if low >= least:
        return Check(_QUALITY, "pass", figure, accepted, "Of the last epoch, on the test rows.")
    if high < least:
        return Check(_QUALITY, "fail", figure, accepted, "Of the last epoch, on the test rows.")
    why = "The test rows are too few: the 95 % interval contains the smallest accepted."
    return Check(_QUALITY, "open", figure, accepted, why)


def _other_steps(
    run: RunFiles, checks: Sequence[Check], target: float | None
) -> Iterator[advice.Change]:
    outcomes = {check.name: check.outcome for check in checks}
    if target is None:
        yield advice.Change(
            "report:\n  target_leak_auc: 0.6",
            "says which leak AUC is accepted, so that this page can pass or fail the run",
            "None: it changes the report only. The command report --target-leak-auc 0.6 does the "
            "same for a run that is over.",
        )
    # A bound that was never meant for this attack needs no other run, but another defense.
    if outcomes.get(_PASSED) == "fail" and guarantee_of(run) < 1:
        yield advice.Change(
            "defense: {module: ...}",
            "the charges that this defense states do not describe its answers: correct them, and "
            "use no bound of this run",
            "None for the labels of this run: what was sent is known to the other company.",
        )
    if outcomes.get(_MEASURED) == "open" and outcomes.get(_BOUND) == "pass":
        yield advice.Change(
            "(more aligned rows, or accept the bound)",
            "leaves rows that features predict alike, on which attacks can be measured; the bound "
            "holds without them",
            "None for the labels: the bound of the run stays the same.",
        )
    if outcomes.get(_QUALITY) in {"fail", "open"}:
        yield advice.BETTER_MODEL
    if outcomes.get(_ALONE) == "open":
        yield advice.Change(
            "(more aligned rows, or no joint run)",
            "the test rows do not show that the feature owner's columns help: more would, or would "
            "show that they do not",
            "What another run sends, beside what this one has sent.",
        )
    if outcomes.get(_ALONE) == "fail":
        yield advice.Change(
            "(no joint run)",
            "the passive party's features did not help; use the active party's own model",
            "None: nothing leaks.",
        )


def _overall(checks: Sequence[Check], assessment: LeakAssessment) -> Outcome:
    has_bound = ("pass", _BOUND) in {(check.outcome, check.name) for check in checks}
    # A bound speaks for an attack whose interval is wide, and not where nothing can be measured.
    spoken_for = {_MEASURED} if has_bound and assessment.is_complete else set()
    outcomes = {check.outcome for check in checks if check.name not in spoken_for} | {
        check.outcome for check in checks if check.outcome == "fail"
    }
    if "fail" in outcomes:
        return "fail"
    return "open" if "open" in outcomes or not outcomes else "pass"


def _headline(outcome: Outcome, checks: Sequence[Check], target: float | None, where: str) -> str:
    if (target, where) == _NOTHING and outcome == "pass":
        return ""
    if target is None:
        return "No target is set, so that this page cannot say whether the run is good enough."
    goal = f"at most {target * 100:g} of 100 pairs ({where})"
    missed = ", ".join(check.name for check in checks if check.outcome == outcome)
    if outcome == "pass":
        return f"The run meets its target, {goal}."
    said = "It is not shown that the run meets" if outcome == "open" else "The run does not meet"
    return f"{said} all that is asked: {missed}. The target is {goal}."
