"""Renders the pages: the report of one run, and several runs side by side.

Figures and charts come from the other modules, words from the templates, which escape everything
that comes from settings and files.
"""

import logging
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from splitveil.active_party.report import cover, panels, run_files, svg, tables
from splitveil.active_party.report.run_files import RunFiles, read_run
from splitveil.active_party.report.tables import MeasuredAttack
from splitveil.active_party.report.verdict import Verdict, verdict_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import read_predictions
from splitveil.common.data.label_range import ONE_NUMBER
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.cover import COVER
from splitveil.common.party.report_parts import (
    circumstances,
    picture,
    read_traffic,
    render,
    traffic_rows,
)
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.charge import Adversary
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
        cover.write(run, verdict_of(run))
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
        drawn=picture([*cover.figures(run, verdict.leak).values()]),
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
