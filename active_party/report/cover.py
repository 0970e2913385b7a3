"""The label owner's cover page of a run: its figures, and its answers to the list of checks."""

import math
from collections.abc import Mapping

from splitveil.active_party.report import answer, decision
from splitveil.active_party.report.bounds import guarantee_of
from splitveil.active_party.report.run_files import RunFiles
from splitveil.common.party.cover import CheckAnswer, write_cover
from splitveil.common.party.report_parts import ScaleRow, columns_row
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.assessment import LeakAssessment
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.upper_bounds import auc_at_most

_NOT_OURS = ScaleRow(
    "Columns: see the feature owner's cover page",
    "muted",
    said="See the feature owner's cover page.",
)


def write(run: RunFiles, leak: LeakAssessment, decided: decision.Decision) -> None:
    said = answer.answer(run, leak, decided.passed, decision.target_of(run)[0])
    write_cover(
        run.active.folder,
        ACTIVE,
        run.active.settings,
        run.active.summary,
        (decided.outcome, decided.badge, said),
        figures(run, leak),
        {"bound": _bound(run, leak), "target": _within_target(run)},
        outcome=answer.outcome(run),
    )


def figures(run: RunFiles, leak: LeakAssessment) -> Mapping[str, ScaleRow]:
    """Return what labels and columns give away, and what the model is worth.

    Of a leak AUC and of a test AUC, 1/2 is 0 and 1 is 1; words give pairs of 100. Of columns, only
    their owner has a figure: it is here where its files are on this machine.
    """
    found = {"labels": _labels(run, leak)}
    if leak.has_gradients:
        found["labels, measured"] = _measured(run, leak)
    for one in run.passives:
        if (disclosed := one.disclosure) is not None:
            whose = f"({one.name})" * (len(run.passives) > 1)
            found[f"columns {whose}".strip()] = columns_row(
                *disclosed, one.setting("max_exposure"), whose
            )
    if not any(name.startswith("columns") for name in found):
        found["columns"] = _NOT_OURS
    return found | {"model": _model(run)}


def _labels(run: RunFiles, leak: LeakAssessment) -> ScaleRow:
    target, _ = decision.target_of(run)
    most = None if target is None else 2 * target - 1
    limit = "" if target is None else f"; limit {100 * target:g}"
    allowed = "" if target is None else f" Limit: {100 * target:g}."
    if leak.bound is None or leak.adversary is None:
        said = f"No bound: nothing limits it.{allowed}"
        return ScaleRow(f"Labels: no bound{limit}", "muted", 0.0, 1.0, most=most, said=said)
    bound = float(auc_at_most(leak.bound))
    if leak.adversary is not Adversary.ANYBODY:
        held = f"{_BEHAVES[leak.adversary]} is held to {100 * bound:g} of 100 pairs"
        said = f"No bound against a company that tries; only one that {held}.{allowed}"
        return ScaleRow(f"Labels: no bound{limit}", "muted", 0.0, 1.0, most=most, said=said)
    words = f"Labels: at most {100 * bound:g} of 100 pairs{limit}"
    if leak.bound == 0.5:
        said = f"Nothing that was sent depends on one: 50 of 100 pairs, which is guessing.{allowed}"
        return ScaleRow(words, "guarantee", 0.0, 0.0, said=said)
    counted = (
        "all training rows of a person together" if leak.is_of_persons else "each training row"
    )
    said = (
        f"At most {100 * bound:g} of 100 pairs, guessing: 50.{allowed} It counts {counted}, in "
        "this run and the earlier ones counted with it, beyond what the columns say."
    )
    if leak.is_computational:
        said += (
            " It rests on the cryptography that the report names; no cryptographer has reviewed "
        )
        said += "its code."
    return ScaleRow(words, "guarantee", 0.0, 2 * bound - 1, most=most, said=said)


_BEHAVES = {
    Adversary.HONEST_BUT_CURIOUS: "sends what its model computes",
    Adversary.CLASS_MEANS: "only compares gradients with the averages of the classes",
}


def _measured(run: RunFiles, leak: LeakAssessment) -> ScaleRow:
    found, strongest = leak.share, leak.strongest
    if found is None:
        words = leak.not_measured
        said = f"It {words}.".replace("It not", "Not")
        return ScaleRow(f"Attack: {words}", "muted", said=said)
    low, high, value = found
    words = f"{value:.0%} of the variance ({low:.0%} to {high:.0%})"
    said = f"An attack that was run explains {value:.0%} of the variance that columns leave."
    if strongest is not None:
        low, high, value = (50 + 50 * one for one in found)
        words = f"{value:.0f} of 100 pairs ({low:.0f} to {high:.0f})"
        said = f"An attack that was run was right in {value:.0f} of 100 pairs."
    left_out = run.active.summary.of_leak.counts.much_left_out
    said += f" {left_out.replace(' (leak_monitor.max_cpu_share)', '')}"
    return ScaleRow(f"Attack: {words}", "measured", *found, said=said.strip())


def _model(run: RunFiles) -> ScaleRow:
    model = run.active.summary.of_active.model
    joint, alone = model.test.share, None if model.alone is None else model.alone.share
    if joint is None:
        return ScaleRow("Model: not measured", "muted", said="Not measured.")
    figure, unit = model.test.share_in_words
    words, said = (
        f"Model: {figure} {unit.partition(' in ')[0]}",
        f"{figure} {unit}, on test records",
    )
    if model.alone is not None and alone is not None:
        words += f"; own columns {model.alone.share_in_words[0]}"
        said += f"; by the label owner's own columns alone {model.alone.share_in_words[0]}"
    if model.refit is not None and run.active.setting("inference", "model") != "trained":
        said += f"; refitted, as it predicts by default, {model.refit.share_in_words[0]}"
    most = None if alone is None else max(alone, 0.0)
    return ScaleRow(words, "utility", 0.0, max(joint, 0.0), most=most, said=f"{said}.")


def _bound(run: RunFiles, leak: LeakAssessment) -> CheckAnswer:
    bound = guarantee_of(run)
    if math.isnan(bound) or bound >= 1:
        return CheckAnswer("no", "There is no bound for anybody.")
    if not leak.is_proved:
        return CheckAnswer(
            "no", "The bound is what the defense's own code states, without a proof."
        )
    return CheckAnswer("ticked", f"At most {100 * float(auc_at_most(bound)):g} of 100 pairs.")


def _within_target(run: RunFiles) -> CheckAnswer:
    target, _ = decision.target_of(run)
    if target is None:
        return CheckAnswer("no", "The label owner's settings have no limit.")
    if not guarantee_of(run) <= target + 1e-9:
        return CheckAnswer("no", f"There is no bound within {100 * target:g} of 100 pairs.")
    if not (
        run.active.setting("run_budget", "leak_auc") or run.active.setting("run_budget", "sum_kl")
    ):
        return CheckAnswer("no", "No budget limits all runs together.")
    return CheckAnswer("ticked", f"It is within {100 * target:g} of 100 pairs; a budget is set.")
