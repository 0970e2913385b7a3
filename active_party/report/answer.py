"""The answer to the report's question, for laypeople in statistics: words and a picture."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from splitveil.active_party.report.run_files import PartyFiles
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.party.report_parts import ScaleRow, columns_row, picture
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.figures import NumberBeyond
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


def answer(assessment: LeakAssessment, num_classes: int, passed: str) -> str:
    """Say for whom there is a bound, and what it means; ``passed`` names figures above it."""
    distinguishes = _distinguishes(num_classes)
    if assessment.adversary is None or assessment.bound is None:
        return (
            f"Nothing in this run limits how well the other company {distinguishes}. Guessing is "
            "right in 50 of 100 pairs."
        )
    if assessment.adversary is Adversary.ANYBODY and assessment.bound == 0.5:
        return "This run tells nobody anything of our labels beyond what their own data reveal."
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


def number_in_words(found: NumberBeyond | None) -> str:
    """Say what the strongest attack explains of labels that are numbers."""
    if found is None:
        return "What attacks explain beyond these data was not measured."
    return (
        f"The strongest attack that was run explains {found.r2:.0%} ({found.interval}) of "
        "the variance that features leave. Another attack may do better."
    )


def drawn(
    assessment: LeakAssessment,
    of_number: NumberBeyond | None,
    target: float | None,
    passives: Sequence[PartyFiles],
) -> Markup:
    """Draw what labels and columns give away on one scale; a leak AUC of 1/2 is 0, and 1 is 1.

    Of columns, only their owner has a figure: it is drawn where its files are on this machine.
    """
    most = None if target is None else 2 * target - 1
    rows = [ScaleRow("Labels: no bound", "muted", 0.0, 1.0, most=most)]
    if assessment.bound is not None:
        share = 2 * float(auc_at_most(assessment.bound)) - 1
        words = f"Labels: at most {share:.3f} ({assessment.adversary})"
        rows = [ScaleRow(words, "guarantee", 0.0, share, most=most)]
    if assessment.has_gradients:
        rows.append(_attack_row(assessment, of_number))
    columns = [
        columns_row(found, one.setting("max_exposure"), f" ({one.name})" * (len(passives) > 1))
        for one in passives
        if (found := one.disclosure) is not None
    ]
    unknown = ScaleRow("Columns: their owner's report has the figure", "muted")
    return picture([*rows, *(columns or [unknown])])


def _attack_row(assessment: LeakAssessment, of_number: NumberBeyond | None) -> ScaleRow:
    strongest = assessment.strongest
    if of_number is not None:
        found = of_number.low, of_number.high, of_number.r2
    elif strongest is not None:
        leak = (strongest.leak.low, strongest.leak.high, strongest.leak.value)
        low, high, value = (max(2 * one - 1, 0.0) for one in leak)
        found = low, high, value
    else:
        return ScaleRow(f"Strongest attack: {assessment.not_measured}", "muted")
    words = f"Strongest attack: {found[2]:.3f} ({found[0]:.3f} to {found[1]:.3f})"
    return ScaleRow(words, "measured", *found)


def _distinguishes(num_classes: int) -> str:
    if num_classes == ONE_NUMBER:
        return "distinguishes a label at one end of the range from one at the other"
    if num_classes > 2:
        return "distinguishes rows of two classes, even of those that are separated best,"
    return "distinguishes a positive from a negative row"
