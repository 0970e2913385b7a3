"""The answer to the report's question, for laypeople in statistics: in words."""

from collections.abc import Mapping

from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.assessment import Finding, LeakAssessment
from splitveil.common.text.upper_bounds import auc_at_most

QUESTION = "How well are our labels revealed to the other company, beyond what its own data reveal?"
_WHOSE: Mapping[Adversary, tuple[str, str]] = {
    Adversary.ANYBODY: ("Whatever the other company does, it", ""),
    Adversary.HONEST_BUT_CURIOUS: (
        "A company that sends what its model computes",
        " Nothing limits one that sends anything else.",
    ),
    Adversary.CLASS_MEANS: (
        "A company that does no more than compare gradients with the averages of the classes",
        " Nothing limits one that does more.",
    ),
}


def answer(
    assessment: LeakAssessment, num_classes: int, label: str, passed: str, ended_by: str | None
) -> str:
    """Say for whom there is a bound, and what it means; ``passed`` names figures above it.

    ``label`` names the positive one of two classes, as ``churned: yes``.
    """
    if ended_by is not None:
        said = answer(assessment, num_classes, label, passed, None)
        return f"The run ended early, by {ended_by}. Of what was sent until then: {said}"
    distinguishes = _distinguishes(num_classes, label)
    if assessment.adversary is None or assessment.bound is None:
        return (
            f"Nothing in this run limits how well the other company {distinguishes}. Guessing is "
            "right in 50 of 100 pairs."
        )
    if assessment.adversary is Adversary.ANYBODY and assessment.bound == 0.5:
        return "This run tells nobody anything of the labels beyond what their own data reveal."
    pairs = f"{float(auc_at_most(assessment.bound)) * 100:g} of 100 pairs"
    who, others = _WHOSE[assessment.adversary]
    if assessment.adversary is Adversary.ANYBODY and not assessment.is_proved:
        who, others = "By what this run's own defense states, the other company", ""
    if assessment.above_bound:
        reached = assessment.above_bound[0].leak.value * 100
        others = f" An attack that was run reaches {reached:.0f}.{others}"
    elif passed:
        others = f" {passed}{others}"
    return (
        f"{who} {distinguishes} in at most {pairs}, beyond what its own data reveal. Guessing: 50."
        f"{others}"
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


def _distinguishes(num_classes: int, label: str) -> str:
    if num_classes == ONE_NUMBER:
        return "distinguishes a label at one end of the range from one at the other"
    if num_classes > 2:
        return "distinguishes rows of two classes, even of those that are separated best,"
    if label:
        return f"distinguishes a row with “{label}” from one without"
    return "distinguishes a row with one label from one with the other"
