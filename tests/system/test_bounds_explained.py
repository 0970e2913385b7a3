"""No page, table or log line of a real run shows a figure above a bound without explaining it."""

import io
import logging
import re
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from splitveil import simulate
from splitveil.active_party.report import read_run, write_comparison, write_report
from splitveil.active_party.report.comparison_table import comparison_table
from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS
from splitveil.common.record.assessment import LeakAssessment, print_summary

TARGET = {"active.report.target_leak_auc": 0.6, "contract.epochs": 2}
NOISY = {
    "name": "noisy_label",
    "top_labels": "noisy",
    "mechanism": {"kind": "gaussian", "noise_ratio": 2.8},
}
DEFENSES: dict[str, Any] = {"none": "none", "marvell": "marvell", "max_norm": "max_norm"}
DEFENSES |= {"noisy_label": NOISY}
TABLES = {
    "breast_cancer": tuple(DEFENSES),
    "predictable": ("none", "marvell", "noisy_label"),
    "dealt": ("none", "marvell", "max_norm", "noisy_label"),
    "rare": ("max_norm", "noisy_label"),
}
ATTACK = "|".join(sorted(map(str, [*ATTACKS, *RUN_ATTACKS]), key=len, reverse=True))
SHOWN = re.compile(rf"\b(?:{ATTACK}|[Ss]trongest attack)\b")
CELL = r"<(?:tr|p|li|figure)\b.*?</(?:tr|p|li|figure)>"
EXPLAINED = (
    "contains what features reveal anyway",
    "features included",
    "more than the ",
    "above the ",
    "which no bound limits",
    "nothing limits one that does more",
)


def table(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    x, noise = rng.normal(size=(700, 6)), rng.normal(size=700)
    scores = noise if name == "dealt" else x[:, 0] + x[:, 4] + noise / 2
    labels = (scores > np.quantile(scores, 0.9 if name == "rare" else 0.6)).astype(int)
    passive = {f"p{column}": x[:, column] for column in range(2, 6)}
    return {"active": {"a": x[:, 0], "b": x[:, 1], "label": labels}, "passive": passive}


class Shown(NamedTuple):
    leak: LeakAssessment
    log: list[str]
    page: str
    tables: str
    folder: Path


@pytest.fixture(scope="module", params=TABLES)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Shown]:
    folder, logger, lines = tmp_path_factory.mktemp("runs"), logging.getLogger("splitveil"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = {}
    source = {} if request.param == "breast_cancer" else table(request.param)
    example = None if source else "breast_cancer"
    try:
        for name in TABLES[request.param]:
            lines.clear()
            own = folder / name
            simulate(
                example, **source, defense=DEFENSES[name], settings=TARGET, threads=1, runs=own
            )
            (path,) = (one.parent for one in own.glob("*/active"))
            run = read_run(path)
            printed = io.StringIO()
            console = Console(width=400, file=printed)
            print_summary("active", run.active.summary, console=console)
            console.print(comparison_table("runs", {name: run.active.summary}))
            page = write_report(path).read_text(encoding="utf-8")
            found[name] = Shown(run.assessment, [*lines], page, printed.getvalue(), path)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return found


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", " ", html.replace("<wbr>", ""))).split())


def figures_above(text: str, bound: float) -> list[str]:
    """Return the figures of attacks above a bound in a text, without ends of intervals."""
    text = re.sub(
        r"\d\.\d{3} to \d\.\d{3}|(?:not a leak|Model|other columns):? \d\.\d{3}", "", text
    )
    figures = re.findall(r"(?<![\d.])(?:0\.\d{3}|1\.000)(?!\d)", text) if SHOWN.search(text) else []
    return [figure for figure in figures if float(figure) > bound + 0.001]


def unexplained(html: str, bound: float) -> Iterator[str]:
    """Yield what attacks reach above a bound in sections that do not say what that means."""
    for section in re.split("(?=<section)", html[html.index("<main") :]):
        words = text_of(section)
        if any(one in words.lower() for one in EXPLAINED):
            continue
        for cell in re.findall(CELL, section, re.DOTALL):
            if figures_above(text_of(cell), bound):
                yield text_of(cell)


def test_no_figure_stands_above_a_bound_without_its_explanation(runs: Mapping[str, Shown]) -> None:
    for defense, shown in runs.items():
        bound = 1.0 if shown.leak.bound is None else shown.leak.bound
        assert not list(unexplained(shown.page, bound)), defense
        for line in [*shown.log, *shown.tables.splitlines()]:
            if figures_above(line, bound):
                assert any(one in line for one in EXPLAINED), (defense, line)


def test_log_page_and_tables_say_the_same(runs: Mapping[str, Shown]) -> None:
    for defense, shown in runs.items():
        said = f"feature-adjusted leak AUC, strongest attack: {shown.leak.in_words}"
        assert said in shown.log, defense
        first_screen = text_of(shown.page[: shown.page.index("<details")])
        assert said[1:] in text_of(shown.page), defense
        strongest = shown.leak.strongest
        assert shown.leak.figure_in_words(strongest) in shown.tables, defense
        in_both = shown.leak.not_measured if strongest is None else strongest.figures
        assert shown.tables.count(in_both) >= 2, defense
        why = "" if strongest is None else strongest.why
        assert " ".join(shown.tables.split()).count(why) >= 2, defense
        assert shown.page.count('class="badge') == 1, defense
        is_green = 'class="verdict pass"' in shown.page
        assert not (is_green and (strongest is None or defense != "noisy_label")), defense
        if strongest is None:
            assert f"cannot be measured on {shown.leak.rows:,} rows" in first_screen, defense


def test_a_comparison_explains_figures_above_bounds(
    runs: Mapping[str, Shown], tmp_path: Path
) -> None:
    folders = [one.folder for one in runs.values()]
    page = write_comparison(folders, tmp_path / "c.html").read_text(encoding="utf-8")
    for defense, shown in runs.items():
        said = shown.leak.figure_in_words(shown.leak.strongest)
        assert said in text_of(page[: page.index('id="figures"')]), defense
    assert page.index("contains what features reveal anyway") < page.index("mean over batches")


def test_an_unexplained_figure_is_noticed() -> None:
    explained = "<main><section><p>norm 0.700, more than the 0.600 that the ledger states</p>"
    assert not list(unexplained(explained, 0.6))
    assert list(unexplained("<main><section><p>norm 0.700 (bound 0.600)</p>", 0.6))
