"""Renders the pages: the report of one run, its cover page, and several runs side by side.

Figures and charts come from the other modules, words from the templates, which escape everything
that comes from settings and files.
"""

import logging
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from splitveil.active_party.report import panels, run_files, svg, tables
from splitveil.active_party.report.run_files import RunFiles, read_run
from splitveil.active_party.report.tables import MeasuredAttack
from splitveil.active_party.report.verdict import Verdict, outcome_in_words, target_of, verdict_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import read_predictions
from splitveil.common.data.settings import ONE_NUMBER
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.cover import COVER, CheckAnswer, write_cover
from splitveil.common.party.report_parts import (
    ScaleRow,
    circumstances,
    columns_row,
    picture,
    read_traffic,
    render,
    traffic_rows,
)
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.charge import Adversary
from splitveil.common.record.assessment import LeakAssessment
from splitveil.common.record.run_folder import write_text_atomically
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import Mark, marked
from splitveil.common.text.wording import at_least, at_most, auc_at_most

logger = logging.getLogger("splitveil.active_party")

_REPORT_LATER = "once the cause is gone: splitveil report"
_PACKAGE = "splitveil.active_party.report"
_NAME_LENGTH = 36
_NOT_OURS = ScaleRow(
    "Columns: see the feature owner's cover page",
    "muted",
    said="See the feature owner's cover page.",
)


class _Compared(NamedTuple):
    title: str
    style: str
    run: RunFiles
    verdict: Verdict
    findings: dict[tuple[str, str], MeasuredAttack]  # by layer and attack, on batches
    whole_run: dict[tuple[str, str], float]  # leak AUC by layer and attack
    bounds: dict[Adversary, str]


def write_report(
    run_dir: Path, output: Path | None = None, target_leak_auc: float | None = None
) -> Path:
    """Write the report of a run. Returns the file written."""
    run = read_run(run_dir)
    if target_leak_auc is not None:
        run = run.with_target(target_leak_auc)
    path = output or run.active.folder / "report.html"
    if output is None:  # the pages name each other by their places
        _write_cover(run, verdict_of(run))
    write_text_atomically(path, report_page(run, has_cover=output is None))
    return path


def write_comparison(run_dirs: Sequence[Path], output: Path) -> Path:
    """Write a page with several runs side by side, and return its path."""
    if len(run_dirs) < 2:
        raise SettingsError("expected the folders of at least two runs")
    write_text_atomically(output, comparison_page([read_run(folder) for folder in run_dirs]))
    return output


def try_to_report(run_dir: Path) -> None:
    """Write the report of a run that is over; its results are safe even if that fails."""
    try:
        logger.info("report written to %s", write_report(run_dir))
    except SplitveilError as error:  # a full disk needs no traceback
        logger.error("%s; %s %s", error, _REPORT_LATER, run_dir)
    except Exception:
        logger.exception("the report could not be written; %s %s", _REPORT_LATER, run_dir)


def report_page(run: RunFiles, *, has_cover: bool = False) -> str:
    """Return the report of one run as HTML; the same files give the same bytes."""
    series = run_files.leak_series(run)
    findings = [tables.finding_of(one) for one in series]
    traffic, verdict = read_traffic(run.active.folder), verdict_of(run)
    names = run.active.setting("contract", "passive_parties")
    only_peer = str(names[0]) if isinstance(names, list) and names else "passive"
    return render(
        _PACKAGE,
        "report.html.jinja",
        title=run.name,
        cover=COVER if has_cover else None,
        run=run,
        verdict=verdict,
        tables=tables,
        of_numbers=run.num_classes == ONE_NUMBER,
        drawn=picture([*scales(run, verdict.leak).values()]),
        not_run=sorted(set(map(str, ATTACKS)) - {found.attack for found in findings}),
        training=panels.training_panels(run) if verdict.leak.has_gradients else [],
        leak_panels=panels.leak_panels(run, series, verdict.leak.feature_auc),
        layers=list(dict.fromkeys(one.layer for one in series)),
        leak_rows=list(tables.leak_rows(findings)),
        ledger_panel=panels.ledger_panel(run, verdict.leak),
        circumstances=list(circumstances(run.active.summary, run.active.metrics, traffic)),
        traffic_rows=traffic_rows(traffic, only_peer),
        at_least=at_least,
        at_most=at_most,
        auc_at_most=auc_at_most,
        nan=math.nan,
    )


def _write_cover(run: RunFiles, verdict: Verdict) -> None:
    """Write the label owner's cover page: its figures, and its answers to the list of checks."""
    target, _ = target_of(run)
    has_budget = any(run.active.setting("run_budget", name) for name in ("leak_auc", "sum_kl"))
    pairs = f"{100 * float(auc_at_most(run.guarantee)):g}" if run.guarantee < 1 else ""
    bound = CheckAnswer("ticked", f"At most {pairs} of 100 pairs.")
    if not pairs:
        bound = CheckAnswer("no", "There is no bound for anybody.")
    elif not verdict.leak.is_proved:
        why = "The bound is what the defense's own code states, without a proof."
        bound = CheckAnswer("no", why)
    if target is None:
        within = CheckAnswer("no", "The label owner's settings have no limit.")
    elif not run.guarantee <= target + 1e-9:
        within = CheckAnswer("no", f"There is no bound within {100 * target:g} of 100 pairs.")
    elif verdict.leak.reveals_nothing:
        within = CheckAnswer("ticked", "Nothing that was sent depends on an outcome.")
    elif not verdict.leak.is_proved:
        within = bound
    elif not has_budget:
        within = CheckAnswer("no", "No budget limits all runs together.")
    else:
        why = f"It is within {100 * target:g} of 100 pairs; a budget is set."
        within = CheckAnswer("ticked", why)
    write_cover(
        run.active.folder,
        ACTIVE,
        run.active.settings,
        run.active.summary,
        (verdict.outcome, verdict.badge, verdict.answer),
        scales(run, verdict.leak),
        {"bound": bound, "target": within},
        outcome=outcome_in_words(run),
    )


def scales(run: RunFiles, leak: LeakAssessment) -> Mapping[str, ScaleRow]:
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
            row = columns_row(*disclosed, one.setting("max_exposure"), whose)
            found[f"columns {whose}".strip()] = row
    if not any(name.startswith("columns") for name in found):
        found["columns"] = _NOT_OURS
    return found | {"model": _model(run)}


def _labels(run: RunFiles, leak: LeakAssessment) -> ScaleRow:
    target, _ = target_of(run)
    most = None if target is None else 2 * target - 1
    limit = "" if target is None else f"; limit {100 * target:g}"
    allowed = "" if target is None else f" Limit: {100 * target:g} of 100 pairs."
    if leak.bound is None or leak.adversary is None:
        said = f"No bound: nothing limits it.{allowed}"
        return ScaleRow(f"Labels: no bound{limit}", "muted", 0.0, 1.0, most=most, said=said)
    bound = float(auc_at_most(leak.bound))
    if leak.adversary is not Adversary.ANYBODY:
        held = f"{_BEHAVES[leak.adversary]} is held to {100 * bound:g} of 100 pairs"
        said = f"No bound against a company that tries; only one that {held}.{allowed}"
        return ScaleRow(f"Labels: no bound{limit}", "muted", 0.0, 1.0, most=most, said=said)
    words = f"Labels: at most {100 * bound:g} of 100 pairs{limit}"
    if leak.reveals_nothing:
        said = f"Nothing that was sent depends on one: 50 of 100 pairs, which is guessing.{allowed}"
        return ScaleRow(words, "guarantee", 0.0, 0.0, said=said)
    if not leak.is_proved:
        said = f"By what the defense states without a proof, {100 * bound:g} of 100 pairs.{allowed}"
        return ScaleRow(f"{words}, stated", "muted", 0.0, 2 * bound - 1, most=most, said=said)
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
        said = f"An attack that was run was right in {value:.0f} of 100 pairs (guessing: 50)."
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
        f"Model: {figure} {unit.partition(' in ')[0].replace('the ', '')}",
        f"{figure} {unit}, on test records",
    )
    if model.alone is not None and alone is not None:
        words += f"; own columns {model.alone.share_in_words[0]}"
        said += f"; by the label owner's own columns alone {model.alone.share_in_words[0]}"
    if model.refit is not None and run.active.setting("inference", "model") != "trained":
        said += f"; refitted, as it predicts by default, {model.refit.share_in_words[0]}"
    most = None if alone is None else max(alone, 0.0)
    return ScaleRow(words, "utility", 0.0, max(joint, 0.0), most=most, said=f"{said}.")


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Return several runs side by side as HTML."""
    predictions = [read_predictions(run.active.folder) for run in runs]
    rows = {None if one is None else one.ids.tobytes() for one in predictions}
    compared = list(_compared(runs))
    leaks = [one.verdict.leak for one in compared]
    dots = [
        svg.Dot(
            one.verdict.leak.strongest.leak.value,
            auc,
            one.style,
            textwrap.shorten(one.title, _NAME_LENGTH, placeholder="…"),
        )
        for one in compared
        if (auc := one.run.active.summary.of_active.model.test.auc) is not None
        and one.verdict.leak.strongest is not None
    ]
    return render(
        _PACKAGE,
        "comparison.html.jinja",
        title=", ".join(one.title for one in compared),
        runs=compared,
        multi_class=any(run.num_classes > 2 for run in runs),
        trade_off=panels.trade_off(dots),
        models=[run.active.summary.of_active.model for run in runs],
        same_tests=len(rows) == 1 and None not in rows,
        test_aucs=[
            tables.quality_in_words(run, one) for run, one in zip(runs, predictions, strict=True)
        ],
        keys=list(dict.fromkeys(key for one in compared for key in one.findings)),
        adjusted=list(dict.fromkeys(each.attack for leak in leaks for each in leak.attacks)),
        raw_notes=list(dict.fromkeys(leak.raw_note for leak in leaks)),
        whole_run_keys=list(dict.fromkeys(key for one in compared for key in one.whole_run)),
        peers_of_bounds=list(Adversary),
        figure=tables.figure,
        count=tables.count,
        ledger=panels.shared_ledger_panel([(one.style, one.run) for one in compared]),
        differences=_differences(compared),
    )


def _compared(runs: Sequence[RunFiles]) -> Iterator[_Compared]:
    names = [run.name for run in runs]
    for index, run in enumerate(runs):
        title = run.name if names.count(run.name) == 1 else f"{run.name} ({run.folder})"
        findings = [tables.finding_of(one) for one in run_files.leak_series(run)]
        yield _Compared(
            title,
            f"s{index % panels.NUM_STYLES}",
            run,
            verdict_of(run),
            {(one.layer, one.attack): one for one in findings},
            {key: one.auc for key, one in tables.run_levels(run).items()},
            tables.bound_cells(run),
        )


def _differences(compared: Sequence[_Compared]) -> list[tuple[str, list[str]]]:
    flat = [dict(tables.flattened(one.run.active.settings)) for one in compared]
    names = dict.fromkeys(name for settings in flat for name in settings)
    rows = [(name, [settings.get(name, "–") for settings in flat]) for name in names]
    of_one = {".".join(place) for place in marked(ActiveSettings, Mark.PER_RUN)}
    return [row for row in rows if len(set(row[1])) > 1 and row[0] not in of_one]
