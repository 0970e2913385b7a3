"""Renders the pages: the report of one run, and several runs side by side.

Figures and charts come from the other modules, words from the templates, which escape everything
that comes from settings and files.
"""

import logging
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from splitveil.active_party.report import (
    bounds,
    decision,
    distributions,
    figures,
    numbers,
    paired,
    panels,
    run_files,
    svg,
    tables,
    verdict,
)
from splitveil.active_party.report.figures import Finding
from splitveil.active_party.report.run_files import RunFiles, read_run
from splitveil.active_party.report.verdict import RunLevel, Verdict
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.report_parts import circumstances, read_traffic, render, traffic_rows
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import ATTACKS, WITHOUT_GRADIENTS
from splitveil.common.record.figures import LedgerFigures, set_aside
from splitveil.common.record.lines import AuditLine
from splitveil.common.record.run_folder import write_text_atomically
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most

logger = logging.getLogger("splitveil.active_party")

_REPORT_LATER = "once the cause is gone: splitveil active report"
_PACKAGE = "splitveil.active_party.report"
_NAME_LENGTH = 36
_EXPECTED_TO_DIFFER = {"contract.run_name", "listen", "runs_dir"}


class _Compared(NamedTuple):
    title: str
    style: str
    run: RunFiles
    series: list[run_files.LeakSeries]
    findings: dict[tuple[str, str], Finding]
    """(layer, attack) -> its figures on single batches."""
    whole_run: dict[tuple[str, str], float]
    """(layer, attack) -> its leak AUC of all epochs together."""
    verdict: Verdict
    ledger: LedgerFigures | None
    bounds: dict[Adversary, str]


def write_report(
    run_dir: Path, output: Path | None = None, target_leak_auc: float | None = None
) -> Path:
    """Write the report of a run. Returns the file written."""
    run = read_run(run_dir)
    if target_leak_auc is not None:
        run = run.with_target(target_leak_auc)
    path = output or run.folder / "active" / "report.html"
    write_text_atomically(path, report_page(run))
    return path


def write_comparison(run_dirs: Sequence[Path], output: Path) -> Path:
    """Write a page with several runs side by side, and return its path."""
    if len(run_dirs) < 2:
        raise SettingsError("--compare: expected the folders of at least two runs")
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


def report_page(run: RunFiles) -> str:
    """Return the report of one run as HTML; the same files give the same bytes."""
    series = run_files.leak_series(run)
    findings = [figures.finding_of(one) for one in series]
    adversary = run_files.adversary_series(run)
    of_active = [found for found in findings if found.party == "active"]
    measured = [*of_active, *(figures.finding_of(one) for one in adversary)]
    accumulated = verdict.run_levels(run)
    of_gradients = [found for found in findings if found.attack not in WITHOUT_GRADIENTS]
    limits = bounds.bounds_of(run)
    widest = bounds.widest_bounded(limits)
    traffic, of_leak = read_traffic(run.active.folder), run.active.summary.of_leak
    return render(
        _PACKAGE,
        "report.html.jinja",
        title=run.name,
        defense=_defense(run),
        has_ended=run.active.has_ended,
        summary=run.active.summary,
        of_active=run.active.summary.of_active,
        batches=of_leak.counts,
        verdict=_judge(run, findings, accumulated),
        decision=decision.decide(run, findings, accumulated),
        beyond=bounds.beyond_of(run),
        number_beyond=numbers.strongest_beyond(of_leak.of_numbers),
        number_strongest=numbers.strongest_attack(of_leak.of_numbers),
        best=figures.strongest(findings),
        limits=limits,
        widest=widest,
        why_not_anybody="" if widest is None else bounds.why_not_anybody(run, widest),
        raw=bounds.raw_figures(run),
        aside=set_aside(bounds.measured_of(run), bounds.guarantee_of(run)),
        of_gradients=of_gradients,
        silent=[f"{one.attack} at {one.layer}" for one in of_gradients if not one.beats_chance],
        whole_run=verdict.highest(
            [one for one in accumulated if one.attack not in WITHOUT_GRADIENTS]
        ),
        not_run=sorted(set(map(str, ATTACKS)) - {found.attack for found in findings}),
        looks_at_activations=len(of_gradients) < len(findings),
        has_passives=bool(run.passives),
        standard_errors=figures.STANDARD_ERRORS,
        bits_per_audit=verdict.BITS_PER_AUDIT,
        top=verdict.highest(accumulated),
        ledger=bounds.ledger_of(run),
        bounds=tables.bound_cells(run),
        last_test=run_files.test_lines(run)[-1:],
        gate=run.active.setting("leak_gate"),
        allows_audits=run.active.setting("allow_audits"),
        # The summary also counts audits after the checkpoint resumed from, whose lines are gone.
        audits=max(
            len(run.active.metrics.of(AuditLine)),
            run.active.summary.of_active.audits_answered or 0,
        ),
        training=[*panels.training_panels(run), *numbers.number_panels(run)],
        number_rows=list(numbers.number_rows(run)),
        of_numbers=numbers.is_of_numbers(run),
        cut_panels=[panels.leak_panel(run, one) for one in series if one.party == "active"],
        layer_panels=panels.layer_panels(run, adversary),
        layers=list(dict.fromkeys(one.layer for one in adversary)),
        step_rows=distributions.step_rows(run_files.class_histograms(run)),
        num_classes=run_files.num_classes(run),
        class_rows=list(tables.class_rows(run)),
        pair_rows=list(tables.pair_rows(run)),
        beyond_rows=list(bounds.beyond_rows(run, verdict.needs_of)),
        leak_rows=list(tables.leak_rows(measured)),
        alarm_rows=list(tables.alarm_rows(run)),
        gate_rows=list(tables.gate_rows(run)),
        audit_rows=list(tables.audit_rows(run)),
        run_level_rows=list(tables.run_level_rows(run, accumulated)),
        prior=bounds.prior_of(run),
        ledger_panels=panels.ledger_panels(run, series, accumulated),
        circumstances=list(circumstances(run.active.summary, run.active.metrics, traffic)),
        traffic_rows=traffic_rows(traffic, _only_peer(run)),
        settings=tables.settings_tables(run.active.settings),
        figure=figures.figure,
        count=figures.count,
        at_least=at_least,
        at_most=at_most,
        auc_at_most=auc_at_most,
        nan=math.nan,
        needs_of=verdict.needs_of,
        listed=verdict.listed,
        interval=numbers.interval,
    )


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Return several runs side by side as HTML."""
    tests = paired.compare_tests(runs)
    compared = [
        _compared(title, f"s{index % panels.NUM_STYLES}", run)
        for index, (title, run) in enumerate(zip(_titles(runs), runs, strict=True))
    ]
    coloured = [panels.Coloured(one.style, one.run, one.series) for one in compared]
    keys = list(dict.fromkeys((s.layer, s.attack) for one in compared for s in one.series))
    return render(
        _PACKAGE,
        "comparison.html.jinja",
        title=", ".join(one.title for one in compared),
        runs=[(one, _defense(one.run)) for one in compared],
        multi_class=any(run_files.num_classes(run) > 2 for run in runs),
        trade_off=panels.trade_off(*_dots(compared)),
        models=[run.active.summary.of_active.model for run in runs],
        tests=tests,
        keys=keys,
        whole_run_keys=list(dict.fromkeys(key for one in compared for key in one.whole_run)),
        peers_of_bounds=list(Adversary),
        figure=figures.figure,
        count=figures.count,
        training=panels.shared_training_panels(coloured),
        leak_panels={
            layer: [panels.shared_leak_panel(coloured, *key) for key in keys if key[0] == layer]
            for layer in dict.fromkeys(layer for layer, _ in keys)
        },
        sent=distributions.sent_panels(
            [(_short(one.title), run_files.class_histograms(one.run)) for one in compared]
        ),
        ledger=panels.shared_ledger_panel(coloured),
        differences=_differences(compared),
    )


def _judge(run: RunFiles, findings: Sequence[Finding], accumulated: Sequence[RunLevel]) -> Verdict:
    return (
        numbers.judge_numbers(run)
        if numbers.is_of_numbers(run)
        else verdict.judge(run, findings, accumulated)
    )


def _only_peer(run: RunFiles) -> str:
    names = run.active.setting("contract", "passive_parties")
    return str(names[0]) if isinstance(names, list) and names else "passive"


def _defense(run: RunFiles) -> str:
    return str(run.active.setting("defense", "name") or "unknown")


def _compared(title: str, style: str, run: RunFiles) -> _Compared:
    series, accumulated = run_files.leak_series(run), verdict.run_levels(run)
    findings = [figures.finding_of(one) for one in series]
    judged = _judge(run, findings, accumulated)
    return _Compared(
        title,
        style,
        run,
        series,
        {(one.layer, one.attack): one for one in findings},
        {(one.layer, one.attack): one.leak_auc for one in accumulated},
        judged,
        bounds.ledger_of(run),
        tables.bound_cells(run),
    )


def _short(title: str) -> str:
    return textwrap.shorten(title, _NAME_LENGTH, placeholder="…")


def _titles(runs: Sequence[RunFiles]) -> list[str]:
    """Return the runs' names, with the folder if two runs have the same name."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.folder})"
        for name, run in zip(names, runs, strict=True)
    ]


def _dots(compared: Sequence[_Compared]) -> tuple[list[svg.Dot], str]:
    """Return a point per run: test AUC and leak AUC, of the whole run if all runs measured it."""
    of_run = all(one.whole_run for one in compared)
    dots = []
    for one in compared:
        model, best = (
            one.run.active.summary.of_active.model,
            figures.strongest(list(one.findings.values())),
        )
        leaks = list(one.whole_run.values()) if of_run else []
        leaks += [best.mean] if best is not None and not of_run else []
        if model.test_auc is not None and leaks:
            dots.append(svg.Dot(max(leaks), model.test_auc, one.style, _short(one.title)))
    kind = "whole run" if of_run else "mean over single batches"
    return dots, f"strongest attack, {kind}"


def _differences(compared: Sequence[_Compared]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, apart from their names and addresses."""
    flat = [dict(tables.flattened(one.run.active.settings)) for one in compared]
    names = dict.fromkeys(name for settings in flat for name in settings)
    rows = [(name, [settings.get(name, "–") for settings in flat]) for name in names]
    return [row for row in rows if len(set(row[1])) > 1 and row[0] not in _EXPECTED_TO_DIFFER]
