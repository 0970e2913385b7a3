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
    answer,
    bounds,
    cover,
    decision,
    figures,
    panels,
    run_files,
    svg,
    tables,
)
from splitveil.active_party.report.decision import Decision
from splitveil.active_party.report.figures import MeasuredAttack
from splitveil.active_party.report.run_files import RunFiles, read_run
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import read_predictions
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.cover import COVER
from splitveil.common.party.report_parts import (
    circumstances,
    picture,
    read_traffic,
    render,
    traffic_rows,
)
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import ATTACKS, needs_of
from splitveil.common.privacy.figures import LeakBounds
from splitveil.common.record.assessment import LeakAssessment
from splitveil.common.record.run_folder import write_text_atomically
from splitveil.common.settings import Mark, marked
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most

logger = logging.getLogger("splitveil.active_party")

_REPORT_LATER = "once the cause is gone: splitveil report"
_PACKAGE = "splitveil.active_party.report"
_NAME_LENGTH = 36


class _Compared(NamedTuple):
    title: str
    style: str
    run: RunFiles
    findings: dict[tuple[str, str], MeasuredAttack]  # by layer and attack, on batches
    whole_run: dict[tuple[str, str], float]  # leak AUC by layer and attack
    leak: LeakAssessment
    strongest: str  # the strongest attack and its figure, or why there is none
    decision: Decision
    ledger: LeakBounds | None
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
        leak = bounds.assessment_of(run)
        cover.write(run, leak, decision.decide(run, leak))
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
    logger.info("writing the report")
    try:
        logger.info("report written to %s", write_report(run_dir))
    except SplitveilError as error:  # a full disk needs no traceback
        logger.error("%s; %s %s", error, _REPORT_LATER, run_dir)
    except Exception:
        logger.exception("the report could not be written; %s %s", _REPORT_LATER, run_dir)


def report_page(run: RunFiles, *, has_cover: bool = False) -> str:
    """Return the report of one run as HTML; the same files give the same bytes."""
    series = run_files.leak_series(run)
    findings = [figures.finding_of(one) for one in series]
    traffic, of_leak = read_traffic(run.active.folder), run.active.summary.of_leak
    leak = bounds.assessment_of(run)
    decided = decision.decide(run, leak)
    classes = run_files.num_classes(run)
    return render(
        _PACKAGE,
        "report.html.jinja",
        title=run.name,
        cover=COVER if has_cover else None,
        defense=_defense(run),
        has_ended=run.active.has_ended,
        summary=run.active.summary,
        of_active=run.active.summary.of_active,
        batches=of_leak.counts,
        leak=leak,
        decision=decided,
        question=answer.QUESTION,
        answer=answer.answer(run, leak, decided.passed, decision.target_of(run)[0]),
        strongest=answer.strongest_in_words(leak),
        drawn=picture([*cover.figures(run, leak).values()]),
        epsilon=of_leak.beyond and of_leak.beyond.epsilon,
        why_not_anybody=""
        if leak.adversary is None
        else bounds.why_not_anybody(run, leak.adversary),
        test_aucs=list(tables.test_rows(run)),
        not_run=sorted(set(map(str, ATTACKS)) - {found.attack for found in findings}),
        has_passives=bool(run.passives),
        ledger=bounds.ledger_of(run),
        training=panels.training_panels(run) if leak.has_gradients else [],
        number_rows=list(tables.number_rows(run)),
        of_numbers=run_files.is_of_numbers(run),
        leak_panels=panels.leak_panels(run, series, leak.feature_auc),
        layers=list(dict.fromkeys(one.layer for one in series)),
        num_classes=classes,
        class_rows=list(tables.class_rows(run)),
        pair_rows=list(tables.pair_rows(run)),
        beyond_rows=list(bounds.beyond_rows(run, leak)),
        leak_rows=list(tables.leak_rows(findings)),
        alarm_rows=list(tables.alarm_rows(run)),
        run_level_rows=list(tables.run_level_rows(run)),
        ledger_panel=panels.ledger_panel(run, leak),
        circumstances=list(circumstances(run.active.summary, run.active.metrics, traffic)),
        traffic_rows=traffic_rows(traffic, _only_peer(run)),
        completion=tables.completion_in_words(run),
        settings=tables.settings_tables(run.active.settings),
        figure=figures.figure,
        count=figures.count,
        at_least=at_least,
        at_most=at_most,
        auc_at_most=auc_at_most,
        nan=math.nan,
        needs_of=needs_of,
    )


def comparison_page(runs: Sequence[RunFiles]) -> str:
    """Return several runs side by side as HTML."""
    predictions = [read_predictions(run.active.folder) for run in runs]
    rows = {None if one is None else one.ids.tobytes() for one in predictions}
    compared = [
        _compared(title, f"s{index % panels.NUM_STYLES}", run)
        for index, (title, run) in enumerate(zip(_titles(runs), runs, strict=True))
    ]
    keys = list(dict.fromkeys(key for one in compared for key in one.findings))
    return render(
        _PACKAGE,
        "comparison.html.jinja",
        title=", ".join(one.title for one in compared),
        runs=[(one, _defense(one.run)) for one in compared],
        multi_class=any(run_files.num_classes(run) > 2 for run in runs),
        trade_off=panels.trade_off(_dots(compared)),
        models=[run.active.summary.of_active.model for run in runs],
        same_tests=len(rows) == 1 and None not in rows,
        test_aucs=[
            tables.quality_in_words(run, one) for run, one in zip(runs, predictions, strict=True)
        ],
        keys=keys,
        adjusted=list(dict.fromkeys(each.attack for one in compared for each in one.leak.attacks)),
        raw_notes=list(dict.fromkeys(one.leak.raw_note for one in compared)),
        whole_run_keys=list(dict.fromkeys(key for one in compared for key in one.whole_run)),
        peers_of_bounds=list(Adversary),
        figure=figures.figure,
        count=figures.count,
        ledger=panels.shared_ledger_panel([(one.style, one.run) for one in compared]),
        differences=_differences(compared),
    )


def _only_peer(run: RunFiles) -> str:
    names = run.active.setting("contract", "passive_parties")
    return str(names[0]) if isinstance(names, list) and names else "passive"


def _defense(run: RunFiles) -> str:
    return str(run.active.setting("defense", "name") or "unknown")


def _compared(title: str, style: str, run: RunFiles) -> _Compared:
    findings = [figures.finding_of(one) for one in run_files.leak_series(run)]
    leak = bounds.assessment_of(run)
    return _Compared(
        title,
        style,
        run,
        {(one.layer, one.attack): one for one in findings},
        {key: one.auc for key, one in tables.run_levels(run).items()},
        leak,
        leak.figure_in_words(leak.strongest),
        decision.decide(run, leak),
        bounds.ledger_of(run),
        tables.bound_cells(run),
    )


def _short(title: str) -> str:
    return textwrap.shorten(title, _NAME_LENGTH, placeholder="…")


def _titles(runs: Sequence[RunFiles]) -> list[str]:
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({run.folder})"
        for name, run in zip(names, runs, strict=True)
    ]


def _dots(compared: Sequence[_Compared]) -> list[svg.Dot]:
    dots = []
    for one in compared:
        auc, strongest = one.run.active.summary.of_active.model.test.auc, one.leak.strongest
        if auc is not None and strongest is not None:
            dots.append(svg.Dot(strongest.leak.value, auc, one.style, _short(one.title)))
    return dots


def _differences(compared: Sequence[_Compared]) -> list[tuple[str, list[str]]]:
    flat = [dict(tables.flattened(one.run.active.settings)) for one in compared]
    names = dict.fromkeys(name for settings in flat for name in settings)
    rows = [(name, [settings.get(name, "–") for settings in flat]) for name in names]
    of_one = {".".join(place) for place in marked(ActiveSettings, Mark.PER_RUN)}
    return [row for row in rows if len(set(row[1])) > 1 and row[0] not in of_one]
