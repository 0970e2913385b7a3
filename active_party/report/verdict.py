"""The verdict on a run: pass or fail against a target, check by check, and what to change.

The target is ``report.target_leak_auc``, or else the ``leak_auc`` of the run's budget. A bound for
anybody at or below it passes where attacks were measured and none passes it. Measured attacks by
themselves only show that a target is missed: an attack that has not been run may do better.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseContext, DefenseSettings, NoDefense
from splitveil.active_party.defenses.noisy_sums import COMPUTATIONAL
from splitveil.active_party.defenses.section import ChargeModel
from splitveil.active_party.report.run_files import RunFiles
from splitveil.active_party.report.tables import estimate_of
from splitveil.active_party.training.evaluation import read_predictions
from splitveil.common.data.settings import ONE_NUMBER
from splitveil.common.party.cover import ended_early_by
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import Estimate
from splitveil.common.record.assessment import Finding, LeakAssessment, passes_stated
from splitveil.common.record.run_record import ModelFigures
from splitveil.common.text.wording import at_least, at_most, auc_at_most

Outcome = Literal["pass", "fail", "open", "unknown"]
"""Of a check or a run: ``open`` where it was not shown, ``unknown`` where no target is set."""

_BADGES: Mapping[Outcome, str] = {
    "pass": "Meets the target",
    "fail": "Misses the target",
    "open": "Not shown",
    "unknown": "No target set",
}
_WHOSE: Mapping[Adversary, tuple[str, str]] = {
    Adversary.HONEST_BUT_CURIOUS: (
        "A company that sends what its model computes",
        " Nothing limits one that sends anything else.",
    ),
    Adversary.CLASS_MEANS: (
        "A company that does no more than compare gradients with the averages of the classes",
        " Nothing limits one that does more.",
    ),
}
_NOTHING = 0.5, "the least there is"  # target of a run that sends nothing of labels
_ROUNDING = 1e-9
_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)

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


class Check(NamedTuple):
    name: str
    outcome: Outcome
    figure: str
    accepted: str
    why: str

    @property
    def word(self) -> str:
        return "not shown" if self.outcome == "open" else self.outcome


class Change(NamedTuple):
    """A setting to change, in the form of the settings file."""

    setting: str
    why: str
    price: str


class Verdict(NamedTuple):
    """Whether a run meets its target, why, and what to change if not."""

    leak: LeakAssessment
    answer: str  # for whom there is a bound, and what it means
    strongest: str  # what the strongest attack reaches
    not_anybody: str  # why the ledger's bound holds for some peers only
    outcome: Outcome
    badge: str
    headline: str
    checks: tuple[Check, ...]
    steps: tuple[Change, ...]


def verdict_of(run: RunFiles) -> Verdict:
    """Hold a run against its target."""
    leak, (target, where) = run.assessment, target_of(run)
    passed = list(_passed(run, leak))
    checks = [
        *_leak_checks(run, target, leak),
        *_other_checks(run, leak, passed),
        *_end_checks(run),
    ]
    has_bound = any(check.name == _BOUND and check.outcome == "pass" for check in checks)
    steps = list(_steps(run, {check.name: check.outcome for check in checks}, target))
    # A bound speaks for an attack whose interval is wide, and not where nothing can be measured.
    outcomes = {
        check.outcome
        for check in checks
        if check.outcome == "fail"
        or not (check.name == _MEASURED and has_bound and leak.is_complete)
    }
    outcome: Outcome = "open" if "open" in outcomes or not outcomes else "pass"
    outcome = "fail" if "fail" in outcomes else outcome
    missed = ", ".join(check.name for check in checks if check.outcome == outcome)
    said_of_leak = leak, _answer(run, leak, passed), _strongest(run, leak), _not_anybody(run, leak)
    ended_by = ended_early_by(run.active.folder)
    if target is None:
        shown: Outcome = "fail" if leak.is_recovered or passed else "unknown"
        badge = "An attack passes a bound" if passed else _BADGES[shown]
        badge = "Labels recovered" if leak.is_recovered else badge
        if ended_by is not None and shown == "unknown":
            shown, badge = "open", "Ended early"
        said = "No target is set, so that this page cannot say whether the run is good enough."
        return Verdict(*said_of_leak, shown, badge, said, tuple(checks), tuple(steps))
    goal, badge = f"at most {target * 100:g} of 100 pairs ({where})", _BADGES[outcome]
    if outcome == "open":
        said = f"It is not shown that the run meets all that is asked: {missed}. "
    else:
        said = f"The run does not meet all that is asked: {missed}. "
    said += f"The target is {goal}."
    if outcome == "pass":
        said = f"The run meets its target, {goal}."
        if (target, where) == _NOTHING:
            badge, said = "No label revealed", ""
    if outcome == "open" and {one.name for one in checks if one.outcome == "open"} == {_ALONE}:
        badge = "No gain shown"
    if ended_by is not None and not passed:
        badge = "Ended early"
    badge = "Labels recovered" if leak.is_recovered else badge
    return Verdict(*said_of_leak, outcome, badge, said, tuple(checks), tuple(steps))


def target_of(run: RunFiles) -> tuple[float | None, str]:
    """Return the largest accepted leak AUC, and the setting that says so.

    A run that sends nothing that depends on a label needs no setting.
    """
    for section, name in (("report", "target_leak_auc"), ("run_budget", "leak_auc")):
        target = run.active.setting(section, name)
        if isinstance(target, int | float):
            return float(target), f"{section}.{name}"
    return _NOTHING if run.is_one_shot and run.guarantee == _NOTHING[0] else (None, "")


def _without_gradients(run: RunFiles, leak: LeakAssessment) -> str:
    """Say what a run sent in the place of gradients."""
    if leak.bound == 0.5 or not run.active.setting("contract", "release"):
        return "Nothing that depends on a label was sent."
    if leak.bound is None:
        return "There was no gradient to attack."
    sent = "A noisy label of each training row was"
    if leak.is_computational:
        sent = "Sums of the training rows' labels with noise were"
    return f"{sent} sent, and no gradient to attack."


def _strongest(run: RunFiles, leak: LeakAssessment) -> str:
    """Say what the strongest attack reaches, in pairs."""
    strongest = leak.strongest
    if not leak.has_gradients:
        return _without_gradients(run, leak)
    if leak.explained is not None:
        found = leak.figure_in_words(None)
        return f"The strongest attack that was run {found}. Another attack may do better."
    if strongest is None:
        was = "" if leak.is_measured else "was "
        return f"What attacks reach beyond these data {was}{leak.not_measured}."
    low, high = (min(max(end, 0.5), 1.0) for end in strongest.leak[1:])
    found = f"{strongest.leak.value * 100:.0f} of 100 ({low * 100:.0f} to {high * 100:.0f})"
    chance = ", which is no more than chance explains"
    by_chance = chance if strongest.finding is Finding.NO_LEAK_SHOWN else ""
    unknown = [one for one in leak.attacks if one.finding is Finding.TOO_FEW_ROWS]
    others = f" {len(unknown)} more {leak.not_measured}." if unknown else ""
    if strongest.finding is Finding.NOT_SEPARATED:
        return f"The strongest attack that was run reads {found}, {strongest.why}.{others}"
    if not leak.is_proved:
        others += " Another attack may do better."
    return f"The strongest attack that was run reaches {found}{by_chance}.{others}"


def _not_anybody(run: RunFiles, leak: LeakAssessment) -> str:
    """Return in words why the ledger's bound holds for some peers only."""
    peers = leak.adversary
    if peers is None or (run.is_one_shot and not run.active.setting("contract", "release")):
        return ""
    model = coverage_of(run.active.setting("defense") or {})
    adversary = model.charge.adversary
    if adversary is peers or not adversary.includes(peers):
        return COMPUTATIONAL if leak.is_computational else model.covers
    return (
        f"The charges of the defense describe {adversary.in_words}. What earlier runs revealed of "
        "these rows does not, or something besides the answers depends on labels, such as "
        "early stopping or initial weights."
    )


def coverage_of(defense: Mapping[str, Any]) -> ChargeModel:
    """Return what says whom the charges of a defense describe, by its settings as plain values."""
    return (_defense_of(defense) or NoDefense()).charge_model(DefenseContext((1,)))


def _defense_of(settings: Mapping[str, Any]) -> DefenseSettings | None:
    """Return a defense from its settings as plain values; None for those of another version."""
    try:
        return _SETTINGS.validate_python(settings)
    except ValidationError:
        return None


def _answer(run: RunFiles, leak: LeakAssessment, passed: Sequence[str]) -> str:
    """Say for whom there is a bound, and what it means; ``passed`` names figures above it."""
    ended_by = ended_early_by(run.active.folder)
    early = "" if ended_by is None else f"The run ended early, by {ended_by}. Until then: "
    others, does = "the other company", "does, it distinguishes"
    if len(run.active.setting("contract", "passive_parties") or ()) > 1:
        others, does = "the other companies", "do, they distinguish"
    whose = "its own data reveal" if others == "the other company" else "their own data reveal"
    if leak.reveals_nothing:
        return f"{early}This run tells {others} nothing of the labels beyond what {whose}."
    if leak.adversary is None or leak.bound is None or leak.above_bound:
        found = _attacked(run, leak)
        if found or leak.adversary is None or leak.bound is None:
            limits = f"Nothing in this run limits how well {others} can tell {_apart(run)}. "
            return early + (found or f"{limits}Guessing is right in 50 of 100 pairs.")
    pairs = f"{float(auc_at_most(leak.bound)) * 100:g} of 100 pairs"
    who, caveat = _WHOSE.get(leak.adversary, ("", ""))
    said = f"{who} distinguishes"
    if leak.adversary is Adversary.ANYBODY:
        said = f"Whatever {others} {does}"
        if leak.is_computational:
            said = f"As long as its cryptography holds, whatever {others} {does}"
        if not leak.is_proved:
            said = f"By what this run's own defense states, {others} {does.split()[-1]}"
    if leak.above_bound:
        reached = leak.above_bound[0].leak.value * 100
        caveat = f" An attack that was run reaches {reached:.0f}.{caveat}"
    elif passed:
        caveat = f" {passed[0]}{caveat}"
    beyond = f"in at most {pairs}, beyond what {whose}. Guessing: 50."
    return f"{early}{said} {_apart(run)} {beyond}{caveat}"


def _attacked(run: RunFiles, leak: LeakAssessment) -> str:
    """Say what an attack reached where no bound holds for anybody; empty if none leaks."""
    target, _ = target_of(run)
    missed = "" if target is None else f" Target missed: {100 * target:g}."
    recovered = "Labels recovered: an attack" if leak.is_recovered else "An attack"
    tries = "No bound holds against a company that tries."
    if leak.explained is not None and leak.explained.low > 0:
        share = f"{leak.explained.r2:.0%} of the variance that columns leave"
        return f"{recovered} explains {share}. {tries}{missed}"
    strongest = leak.strongest
    leaks = {Finding.LEAKS, Finding.ABOVE_BOUND}
    is_stated_for_all = leak.adversary is Adversary.ANYBODY
    if strongest is None or strongest.finding not in leaks or is_stated_for_all:
        return ""
    return (
        f"{recovered} told {_apart(run)} in {100 * strongest.leak.value:.0f} of 100 pairs. "
        f"{tries}{missed}"
    )


def outcome_in_words(run: RunFiles) -> str:
    """Name the label and its classes, as ``churned: yes, or another``.

    The range of a number is private: no page for the other side has it.
    """
    column, classes = run.active.setting("data", "label_column"), run.num_classes
    if column is None:
        return "not recorded"
    if classes == ONE_NUMBER:
        return f"{column}, a number; its range is in the label owner's settings"
    if classes > 2:
        names = run.active.setting("data", "classes")
        named = ", ".join(map(str, names)) if isinstance(names, list) else f"{classes} classes"
        return f"{column}: {named}"
    return f"{run.label}, or another"


def _apart(run: RunFiles) -> str:
    column = run.active.setting("data", "label_column")
    match run.num_classes:
        case classes if classes == ONE_NUMBER:
            what = f"“{column}”" if column else "a label"
            return f"{what} at one end of the range from one at the other"
        case classes if classes > 2:
            return f"a row of one class{f' of “{column}”' if column else ''} from one of any other"
        case _ if column:
            return f"a row with “{run.label}” from one without"
    return "a row with one label from one with the other"


def _passed(run: RunFiles, leak: LeakAssessment) -> Iterator[str]:
    """Yield each finding above what the ledger states."""
    for one in leak.above_bound:
        yield f"{one.attack} reaches {one.figures}, {one.why}."
    beyond = run.active.summary.of_leak.beyond
    epsilon = None if beyond is None else beyond.epsilon
    if epsilon is not None and passes_stated(epsilon, leak):
        yield (
            f"{epsilon.attack} excludes every epsilon below {at_least(epsilon.epsilon)}, more than "
            f"the {at_most(epsilon.stated or 0.0)} that the ledger states for {epsilon.stated_for}."
        )
    if alarms := run.active.summary.of_active.leak_alarms:
        yield (
            f"The leak alarm went off {alarms} time{'s' * (alarms > 1)}: an attack measured more "
            "than the ledger states for one answer."
        )


def _leak_checks(run: RunFiles, target: float | None, leak: LeakAssessment) -> Iterator[Check]:
    """Hold the bound, and the strongest attack, against the target, if there is one.

    Attacks on numbers reach no AUC to hold against it.
    """
    if target is None:
        return
    accepted, bound, strongest = f"≤ {target:g}", run.guarantee, leak.strongest
    outcome: Outcome = "fail"
    why = "The bound is above the target: an attack between the two is not excluded."
    if math.isnan(bound) or bound >= 1:
        why = "Nothing bounds what an attack that was not run may reach."
    elif bound <= target + _ROUNDING:
        outcome = "pass"
        why = "No score of any peer exceeds it, on any training label, over the whole run."
    yield Check(_BOUND, outcome, f"≤ {auc_at_most(bound)}" if bound < 1 else "none", accepted, why)
    if not leak.has_gradients or leak.explained is not None:
        return
    if strongest is None:
        yield Check(_MEASURED, "open", "–", accepted, f"Beyond features: {leak.not_measured}.")
        return
    separated = [one for one in leak.attacks if one.finding is not Finding.NOT_SEPARATED]
    if any(one.leak.low > target for one in separated):
        outcome, why = "fail", "an interval begins above."
    elif not leak.is_complete:
        outcome, why = "open", f"others {leak.not_measured}."
    elif all(one.leak.high <= target for one in leak.attacks):
        outcome, why = "pass", "all intervals end below."
    else:
        outcome, why = "open", "an interval reaches above."
    why = f"{strongest.attack} is the strongest; {why}"
    if strongest.why:
        why += f" {strongest.why[:1].upper()}{strongest.why[1:]}."
    yield Check(_MEASURED, outcome, strongest.figures, accepted, why)


def _other_checks(run: RunFiles, leak: LeakAssessment, passed: Sequence[str]) -> Iterator[Check]:
    """Check stated bounds, the budget, and the model's worth."""
    if passed:
        yield Check(_PASSED, "fail", str(len(passed)), "0", " ".join(passed))
    elif leak.adversary is not None and leak.strongest is not None:
        yield Check(_PASSED, "pass", "0", "0", "No attack that was run passed a stated bound.")
    limit, spent = run.active.setting("run_budget", "sum_kl"), run.active.summary.of_active.ledger
    if isinstance(limit, int | float) and spent is not None and spent.sum_kl.max is not None:
        held = spent.sum_kl.max <= limit * (1 + _ROUNDING)
        figure = f"sum_kl {at_most(spent.sum_kl.max)}"
        why = "The largest charge of any example, all answers together."
        yield Check(_BUDGET, "pass" if held else "fail", figure, f"≤ {limit:g}", why)
    model = run.active.summary.of_active.model
    test, found = model.test, None
    if test.auc is not None:
        found = estimate_of(test.auc, read_predictions(run.active.folder))
    figure = test.in_words(4) if found is None else found.in_words()
    least = run.active.setting("report", "min_test_auc")
    if isinstance(least, int | float) and test.auc is None:
        yield Check(_QUALITY, "open", "–", f"≥ {least:g}", "It was not measured.")
    elif isinstance(least, int | float) and test.auc is not None:
        low, high = (test.auc, test.auc) if found is None else (found.low, found.high)
        outcome: Outcome = "fail" if high < least else "pass"
        why = "Of the last epoch, on the test rows."
        if low < least <= high:
            outcome = "open"
            why = "The test rows are too few: the 95 % interval contains the smallest accepted."
        yield Check(_QUALITY, outcome, figure, f"≥ {least:g}", why)
    yield from _worth(run, model, found)


def _worth(run: RunFiles, model: ModelFigures, found: Estimate | None) -> Iterator[Check]:
    """Hold the joint model against one of the active party's own features."""
    test, alone = model.test, model.alone
    if alone is None or test.score is None or alone.score is None:
        return
    figure = test.in_words(4) if found is None else found.in_words()
    outcome: Outcome = "pass" if test.score > alone.score else "fail"
    why = _WORTH
    if outcome == "pass" and found is not None and found.low <= alone.score:
        outcome, why = "open", f"The 95 % interval contains that figure. {_WORTH}"
    refit, is_better = model.refit, outcome != "fail"
    predicts = refit is not None and run.active.setting("inference", "model") != "trained"
    score = refit.score if refit is not None and predicts else None
    if refit is not None and score is not None and (score > alone.score) is not is_better:
        has = f"The refitted model, which predicts, has {refit.in_words(4)}"
        outcome, why = "open", f"{has}, and no interval is known. {_WORTH}"
    yield Check(_ALONE, outcome, figure, alone.better_in_words, why)


def _end_checks(run: RunFiles) -> Iterator[Check]:
    if not run.active.has_ended:
        yield Check(_ENDED, "open", "no", "yes", "It was stopped, or is still running.")
    if (ended_by := ended_early_by(run.active.folder)) is not None:
        why = f"It was ended early by {ended_by}: what was agreed was not sent in full."
        yield Check(_ENDED, "open", "early", "yes", why)


def _steps(
    run: RunFiles, outcomes: Mapping[str, Outcome], target: float | None
) -> Iterator[Change]:
    """Yield what to change, the most urgent first."""
    if target is None:
        yield Change(
            "report:\n  target_leak_auc: 0.6",
            "says which leak AUC is accepted, so that this page can pass or fail the run",
            "None: it changes the report only. The command report --target-leak-auc 0.6 does the "
            "same for a run that is over.",
        )
    elif outcomes[_BOUND] != "pass":
        yield from _steps_to_a_bound(run, target)
    # A bound that was never meant for this attack needs no other run, but another defense.
    if outcomes.get(_PASSED) == "fail" and run.guarantee < 1:
        yield Change(
            "defense: {module: ...}",
            "the charges that this defense states do not describe its answers: correct them, and "
            "use no bound of this run",
            "None for the labels of this run: what was sent is known to whoever received it.",
        )
    if outcomes.get(_MEASURED) == "open" and outcomes.get(_BOUND) == "pass":
        yield Change(
            "(more aligned rows, or accept the bound)",
            "leaves rows that features predict alike, on which attacks can be measured; the bound "
            "holds without them",
            "None for the labels: the bound of the run stays the same.",
        )
    if outcomes.get(_QUALITY) in {"fail", "open"}:  # more test rows would only measure it
        yield Change(
            "(more aligned rows, more columns, or more epochs)",
            "teach the model more; where the contract leaves rows out of training, give it those",
            "More answers about the same labels, where there are more epochs: see the details.",
        )
    if outcomes.get(_ALONE) == "open":
        components = run.is_one_shot and not run.active.setting("contract", "release")
        yield Change(
            f"(more aligned rows, {'a score, ' * components}or no joint run)",
            "the test rows do not show that the feature owner's columns help: more would, or would "
            "show that they do not"
            + "; so may a score, one number that noisy labels choose and that is worth more than "
            "as many components (contract.release, bottom_model: {kind: score})" * components,
            "What another run sends, beside what this one has sent.",
        )
    if outcomes.get(_ALONE) == "fail":
        yield Change(
            "(no joint run)",
            "the passive party's features did not help; use the active party's own model",
            "None: nothing leaks.",
        )


def _steps_to_a_bound(run: RunFiles, target: float) -> Iterator[Change]:
    """Yield the settings that would bound the leak for anybody at the target."""
    if run.active.setting("initial_weights") and not run.is_one_shot:
        yield Change(
            "initial_weights: null",
            "what an earlier run's model has learned from labels shows in the answers, and is "
            "counted only where earlier_ledgers counts the noisy labels that it learned from",
            "The run starts from fresh weights, and learns again what the earlier one knew.",
        )
    defense = _defense_at(run, target)
    if defense is None:
        return
    whole = defense.model_dump(mode="json", exclude_none=True)
    changed = {"name": defense.title} | defense.model_dump(mode="json", exclude_defaults=True)
    changed["name"] = defense.title
    # Rounded up, more noise: the bound stays within the target.
    if "noise_ratio" in (mechanism := whole.get("mechanism", {})):
        mechanism["noise_ratio"] = math.ceil(1000 * mechanism["noise_ratio"]) / 1000
    if mechanism.get("posterior") == "none":  # the default
        del mechanism["posterior"]
    # The advice changes the strength: it is written even where it is the default.
    changed |= {name: whole[name] for name in ("strength", "mechanism") if name in whole}
    auc = run.active.summary.of_active.model.test.auc
    beside = "" if auc is None else f" This run, as it is set, has a test AUC of {auc:.4f}."
    yield Change(
        yaml.safe_dump({"defense": changed}, sort_keys=False).strip(),
        f"bounds the leak AUC of the whole run at {target:g} for anybody",
        f"The price is not known before a run.{beside}",
    )


def _defense_at(run: RunFiles, target: float) -> DefenseSettings | None:
    """Return a defense with that bound: the run's own, if one of its strengths has it."""
    shape = tuple(run.active.setting("contract", "cut_shape") or (1,))
    epochs = run.active.setting("contract", "epochs")
    epochs = epochs if isinstance(epochs, int) and epochs > 0 else 1
    context = DefenseContext(shape, run.num_classes, 0.5, epochs)
    own = _defense_of(run.active.setting("defense") or {})
    found = None if own is None else own.at_leak_auc(target, context)
    if found is not None:
        peers = found.charge_model(context).charge.adversary
        if peers.includes(Adversary.ANYBODY):
            return found
    several = {"posterior": "model"} if context.num_classes > 2 else {}
    other = _defense_of({"name": "noisy_label", "mechanism": {"kind": "gaussian"} | several})
    if other is None or other.objection(context) is not None:
        return None
    return other.at_leak_auc(target, context)
