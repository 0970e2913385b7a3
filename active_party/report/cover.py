"""The label owner's cover page of a run: its figures, and its answers to the list of checks."""

import math
from collections.abc import Mapping

from splitveil.active_party.report import answer, decision, run_files
from splitveil.active_party.report.bounds import guarantee_of
from splitveil.active_party.report.run_files import RunFiles
from splitveil.common.party.cover import CheckAnswer, ended_early_by, write_cover
from splitveil.common.party.report_parts import ScaleRow, columns_row
from splitveil.common.record.assessment import LeakAssessment
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.upper_bounds import auc_at_most

_NOT_OURS = ScaleRow(
    "Columns: their owner's report has the figure",
    "muted",
    said="It is on the feature owner's page.",
)


def write(run: RunFiles, leak: LeakAssessment, decided: decision.Decision) -> None:
    said = answer.answer(
        leak,
        run_files.num_classes(run),
        run_files.label_of(run),
        decided.passed,
        ended_early_by(run.active.folder),
    )
    write_cover(
        run.active.folder,
        ACTIVE,
        run.active.settings,
        run.active.summary,
        (decided.outcome, decided.badge, said),
        figures(run, leak),
        {"bound": _bound(run, leak), "target": _within_target(run)},
    )


def figures(run: RunFiles, leak: LeakAssessment) -> Mapping[str, ScaleRow]:
    """Return what labels and columns give away, and what the model is worth.

    Of a leak AUC and of a test AUC, 1/2 is 0 and 1 is 1. Of columns, only their owner has a figure:
    it is here where its files are on this machine.
    """
    found = {"labels": _labels(run, leak)}
    if leak.has_gradients:
        found["labels, measured"] = _measured(leak)
    for one in run.passives:
        if (disclosure := one.disclosure) is not None:
            whose = f" ({one.name})" * (len(run.passives) > 1)
            most = one.setting("max_exposure")
            found[f"columns{whose}"] = columns_row(disclosure, most, whose)
    if not any(name.startswith("columns") for name in found):
        found["columns"] = _NOT_OURS
    return found | {"model": _model(run)}


def _labels(run: RunFiles, leak: LeakAssessment) -> ScaleRow:
    target, _ = decision.target_of(run)
    most = None if target is None else 2 * target - 1
    limit = "" if target is None else f" Limit: {100 * target:g} of 100 pairs."
    if leak.bound is None or leak.adversary is None:
        said = f"Nothing limits it.{limit}"
        return ScaleRow("Labels: no bound", "muted", 0.0, 1.0, most=most, said=said)
    bound, how = float(auc_at_most(leak.bound)), ", computationally" * leak.is_computational
    words = f"Labels: at most {2 * bound - 1:.3f} ({leak.adversary}{how})"
    said = f"At most {100 * bound:g} of 100 pairs for {leak.adversary.in_words}{how}; guessing: 50."
    return ScaleRow(words, "guarantee", 0.0, 2 * bound - 1, most=most, said=said + limit)


def _measured(leak: LeakAssessment) -> ScaleRow:
    found, strongest = leak.share, leak.strongest
    if found is None:
        words = leak.not_measured
        said = f"It {words}.".replace("It not", "Not")
        return ScaleRow(f"Strongest attack: {words}", "muted", said=said)
    said = f"{found[2]:.0%} of the variance that columns leave."
    if strongest is not None:
        said = f"{50 + 50 * found[2]:.0f} of 100 pairs, by the strongest attack that was run."
    words = f"Strongest attack: {found[2]:.3f} ({found[0]:.3f} to {found[1]:.3f})"
    return ScaleRow(words, "measured", *found, said=said)


def _model(run: RunFiles) -> ScaleRow:
    model = run.active.summary.of_active.model
    joint, alone = model.test.share, None if model.alone is None else model.alone.share
    if joint is None:
        return ScaleRow("Model: not measured", "muted", said="Not measured.")
    figure, unit = model.test.share_in_words
    words, said = f"Model: {max(joint, 0.0):.3f}", f"{figure} {unit}, on test records"
    if model.alone is not None and alone is not None:
        words += f"; without the other columns {max(alone, 0.0):.3f}"
        said += f"; by the label owner's own columns {model.alone.share_in_words[0]}"
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
