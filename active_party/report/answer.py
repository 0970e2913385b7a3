"""The answer to the report's question, for laypeople in statistics: in words."""

from collections.abc import Mapping

from splitveil.active_party.report.run_files import RunFiles, label_of, num_classes
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.party.cover import ended_early_by
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.assessment import Finding, LeakAssessment
from splitveil.common.text.upper_bounds import auc_at_most

QUESTION = "How well are our labels revealed to any other company, beyond what its own data reveal?"
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


def answer(run: RunFiles, assessment: LeakAssessment, passed: str, target: float | None) -> str:
    """Say for whom there is a bound, and what it means; ``passed`` names figures above it."""
    ended_by = ended_early_by(run.active.folder)
    early = "" if ended_by is None else f"The run ended early, by {ended_by}. Until then: "
    others, does = "the other company", "does, it distinguishes"
    if len(run.active.setting("contract", "passive_parties") or ()) > 1:
        others, does = "the other companies", "do, they distinguish"
    whose = "its own data reveal" if others == "the other company" else "their own data reveal"
    if assessment.adversary is Adversary.ANYBODY and assessment.bound == 0.5:
        return f"{early}This run tells {others} nothing of the labels beyond what {whose}."
    if assessment.adversary is None or assessment.bound is None or assessment.above_bound:
        found = _attacked(run, assessment, target)
        if found or assessment.adversary is None or assessment.bound is None:
            limits = f"Nothing in this run limits how well {others} can tell {_apart(run)}. "
            return early + (found or f"{limits}Guessing is right in 50 of 100 pairs.")
    pairs = f"{float(auc_at_most(assessment.bound)) * 100:g} of 100 pairs"
    who, caveat = _WHOSE.get(assessment.adversary, ("", ""))
    said = f"{who} distinguishes"
    if assessment.adversary is Adversary.ANYBODY:
        said = f"Whatever {others} {does}"
        if assessment.is_computational:
            said = f"As long as its cryptography holds, whatever {others} {does}"
        if not assessment.is_proved:
            said = f"By what this run's own defense states, {others} {does.split()[-1]}"
    if assessment.above_bound:
        reached = assessment.above_bound[0].leak.value * 100
        caveat = f" An attack that was run reaches {reached:.0f}.{caveat}"
    elif passed:
        caveat = f" {passed}{caveat}"
    beyond = f"in at most {pairs}, beyond what {whose}. Guessing: 50."
    return f"{early}{said} {_apart(run)} {beyond}{caveat}"


def _attacked(run: RunFiles, assessment: LeakAssessment, target: float | None) -> str:
    """Say what an attack reached where no bound holds for anybody; empty if none leaks."""
    missed = "" if target is None else f" Target missed: {100 * target:g}."
    recovered = "Labels recovered: an attack" if assessment.is_recovered else "An attack"
    tries = "No bound holds against a company that tries."
    if assessment.explained is not None and assessment.explained.low > 0:
        share = f"{assessment.explained.r2:.0%} of the variance that columns leave"
        return f"{recovered} explains {share}. {tries}{missed}"
    strongest = assessment.strongest
    leaks = {Finding.LEAKS, Finding.ABOVE_BOUND}
    is_stated_for_all = assessment.adversary is Adversary.ANYBODY
    if strongest is None or strongest.finding not in leaks or is_stated_for_all:
        return ""
    return (
        f"{recovered} told {_apart(run)} in {100 * strongest.leak.value:.0f} of 100 pairs. "
        f"{tries}{missed}"
    )


def strongest_in_words(assessment: LeakAssessment) -> str:
    """Say what the strongest attack reaches, in pairs."""
    strongest = assessment.strongest
    if not assessment.has_gradients:
        if assessment.bound == 0.5:
            return "Nothing that depends on a label was sent."
        sent = "A noisy label of each training row was"
        if assessment.is_computational:
            sent = "Sums of the training rows' labels with noise were"
        return f"{sent} sent, and no gradient to attack."
    if assessment.explained is not None:
        found = assessment.figure_in_words(None)
        return f"The strongest attack that was run {found}. Another attack may do better."
    if strongest is None:
        was = "" if assessment.is_measured else "was "
        return f"What attacks reach beyond these data {was}{assessment.not_measured}."
    low, high = (min(max(end, 0.5), 1.0) for end in strongest.leak[1:])
    found = f"{strongest.leak.value * 100:.0f} of 100 ({low * 100:.0f} to {high * 100:.0f})"
    chance = ", which is no more than chance explains"
    by_chance = chance if strongest.finding is Finding.NO_LEAK_SHOWN else ""
    unknown = [one for one in assessment.attacks if one.finding is Finding.TOO_FEW_ROWS]
    others = f" {len(unknown)} more {assessment.not_measured}." if unknown else ""
    if strongest.finding is Finding.NOT_SEPARATED:
        return f"The strongest attack that was run reads {found}, {strongest.why}.{others}"
    if not assessment.is_proved:
        others += " Another attack may do better."
    return f"The strongest attack that was run reaches {found}{by_chance}.{others}"


def outcome(run: RunFiles) -> str:
    """Name the label and its classes, as ``churned: yes, or another``.

    The range of a number is private: no page for the other side has it.
    """
    column, classes = run.active.setting("data", "label_column"), num_classes(run)
    if column is None:
        return "not recorded"
    if classes == ONE_NUMBER:
        return f"{column}, a number; its range is in the label owner's settings"
    if classes > 2:
        names = run.active.setting("data", "classes")
        named = ", ".join(map(str, names)) if isinstance(names, list) else f"{classes} classes"
        return f"{column}: {named}"
    return f"{label_of(run)}, or another"


def _apart(run: RunFiles) -> str:
    column = run.active.setting("data", "label_column")
    match num_classes(run):
        case classes if classes == ONE_NUMBER:
            what = f"“{column}”" if column else "a label"
            return f"{what} at one end of the range from one at the other"
        case classes if classes > 2:
            return f"a row of one class{f' of “{column}”' if column else ''} from one of any other"
        case _ if column:
            return f"a row with “{label_of(run)}” from one without"
    return "a row with one label from one with the other"
