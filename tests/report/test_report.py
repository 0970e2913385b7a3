"""The report: its input, figures and sentences, and that it always opens."""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from markupsafe import escape
from sklearn.metrics import roc_auc_score

from splitveil.active_party.defenses.sum_kl import estimated_auc
from splitveil.active_party.report import (
    read_run,
    report_page,
    try_to_report,
    write_comparison,
    write_report,
)
from splitveil.active_party.report.bounds import coverage_of
from splitveil.active_party.report.distributions import auc_of_counts, random_q95
from splitveil.active_party.report.figures import finding_of, windows
from splitveil.active_party.report.run_files import leak_series
from splitveil.active_party.report.verdict import is_oracle, judge, needs_of, run_levels
from splitveil.common.errors import SettingsError
from splitveil.common.party.report_parts import breakable
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import BatchAttackName, RunAttackName
from splitveil.common.record.figures import (
    AdjustedFigures,
    AdvantageFigures,
    AttackFigure,
    BeyondFigures,
    LeakFigures,
    LedgerFigures,
    RunFigures,
    SpreadFigures,
)
from splitveil.common.record.lines import (
    AlarmLine,
    AuditLine,
    EpochLeakLine,
    EvaluationLine,
    GateLine,
    HistogramLine,
    LeakLine,
    LedgerLine,
    Line,
)
from splitveil.common.record.run_record import METRICS, SUMMARY, write_summary
from splitveil.common.record.summary import (
    ActiveFigures,
    EarlierAnswers,
    GateFigures,
    ModelFigures,
    RunCounts,
    Summary,
)
from tests.support.records import append_lines

EPOCHS, STEPS = 3, 30
ATTACKS = ("norm", "cosine", "spectral")
CHANCE = {"norm": 0.57, "cosine": 0.57, "spectral": 0.57}
ORACLES = {"cosine", "informed", "mean", "median", "lda"}
ORACLES |= {"accumulated_cosine", "accumulated_informed"}
NOISY_LABELS = {"defense": {"name": "noisy_label", "top_labels": "noisy"}}
HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


def write_party(
    folder: Path,
    leak: Mapping[str, Mapping[str, float]],
    *,
    bound: float | None = None,
    settings: Mapping[str, Any] | None = None,
    summary: Summary | None = None,
) -> None:
    """Write one party's files: constant leak AUCs with a little noise, as a run writes them.

    Args:
        folder: the party's.
        leak: layer -> attack -> mean leak AUC.
        bound: the ledger's for the peers whom the defense's charges describe, if this is the active
            party.
        settings: besides the run's name.
        summary: its counts are those of the lines.
    """
    folder.mkdir(parents=True)
    values = {"defense": {"name": "marvell", "noise": "fresh"}} | dict(settings or {})
    adversary = coverage_of(values["defense"]).adversary
    rng = np.random.default_rng(1)
    lines: list[Line] = []
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            noise = float(rng.normal(0, 0.02))
            figures = tuple(
                AttackFigure(layer, attack, min(1.0, mean + float(rng.normal(0, 0.02))))
                for layer, attacks in leak.items()
                for attack, mean in attacks.items()
            )
            lines.append(LeakLine(epoch, step, figures, 0.57 + noise))
        if bound is not None:
            anybody, honest, class_means = (
                SpreadFigures(*[bound if adversary.includes(peers) else 1.0] * 3)
                for peers in Adversary
            )
            bounds = LedgerFigures(
                SpreadFigures(*[0.1 * (epoch + 1)] * 3),
                SpreadFigures(*[estimated_auc(0.1)] * 3),
                anybody,
                honest,
                class_means,
            )
            lines.append(LedgerLine(epoch, bounds))
            lines.append(EvaluationLine(epoch, "test", 0.5 / (epoch + 1), 0.8, None, 0.4))
    append_lines(folder, *lines)
    counts = RunCounts(aligned_rows=1000, epochs=EPOCHS, steps=EPOCHS * STEPS)
    write_summary(folder, replace(summary or Summary(), counts=counts))
    named = {"contract": {"run_name": "small"}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(named | values))


def write_run(
    run_dir: Path,
    leak: Mapping[str, float] | None = None,
    bound: float = 0.7,
    test_auc: float = 0.8,
    **options: Any,
) -> Path:
    leak = CHANCE if leak is None else leak
    summary = options.get("summary", Summary())
    model = ModelFigures(test_auc=test_auc)
    options["summary"] = replace(summary, active=replace(summary.of_active, model=model))
    write_party(run_dir / "active", {"cut": leak} if leak else {}, bound=bound, **options)
    return run_dir


def of_active(**figures: Any) -> Summary:
    """Return a summary of the active party with some figures."""
    return Summary(active=ActiveFigures(**figures))


def of_run(**attacks: RunFigures) -> Summary:
    """Return a summary with figures of attacks on the cut layer that gather over the run."""
    return Summary(leak=LeakFigures(run_level={"cut": attacks}))


def verdict_of(run_dir: Path) -> tuple[str, str, str]:
    """Return the level of a run, the page's reasons for it, and what the page says is not known."""
    run = read_run(run_dir)
    verdict = judge(run, [finding_of(one) for one in leak_series(run)], run_levels(run))
    page = report_page(run)
    section = page[page.index(f'<p class="headline">{escape(verdict.headline)}') :]
    text = re.sub("<[^>]*>", "", section[: section.index("<dl")])
    words, _, left = " ".join(unescape(text).split()).partition(" Not measured ")
    return verdict.level, words, left


class Tags(HTMLParser):
    """Collects what a browser would take for markup."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_windows_are_quantiles_of_consecutive_batches() -> None:
    values = np.arange(90, dtype=np.float64)
    found = windows(values, values)
    assert len(found.median) == 6
    first = values[:15]
    assert found.median[0] == np.median(first)
    assert (found.low[0], found.high[0]) == tuple(np.quantile(first, (0.1, 0.9)))


@pytest.mark.parametrize(
    ("leak", "whole_run", "level", "said"),
    [
        (
            {"cosine": 0.99, "spectral": 0.97},
            {},
            "recovered",
            [r"^Anyone who keeps these gradients recovers the labels with AUC 0\.9[67]\d"],
        ),
        (
            {"cosine": 0.96},
            {},
            "recovered",
            ["keeps these gradients and knows one clean gradient of a positive"],
        ),
        (
            {"norm": 0.65},
            {},
            "leaking",
            [
                r"AUC 0\.6[45]\d, where chance gives 0\.5[67]\d",
                r"chance \(by 4 standard errors\): cosine at cut and spectral at cut",
            ],
        ),
        (
            {},
            {"accumulated_spectral": RunFigures(0.93, 0.91, 0.95)},
            "recovered",
            ["^Anyone who keeps the gradients of this run recovers", "interval 0.910 to 0.950"],
        ),
        (
            {},
            {
                "accumulated_spectral": RunFigures(0.61, 0.58, 0.64),
                "hint_combiner_50": RunFigures(0.92, 0.9, 0.94),
            },
            "recovered",
            ["^Anyone who .* this run and knows 50 labels of the run recovers .* AUC 0.920"],
        ),
    ],
)
def test_a_verdict_begins_with_the_strongest_attack_and_what_it_needs(
    tmp_path: Path,
    leak: dict[str, float],
    whole_run: dict[str, RunFigures],
    level: str,
    said: list[str],
) -> None:
    run_dir = write_run(tmp_path, CHANCE | leak, bound=1.0, summary=of_run(**whole_run))
    found, words, left = verdict_of(run_dir)
    assert found == level
    assert all(re.search(text, words) for text in said), words
    assert ("only the ledger covers the whole run" in left) is not bool(whole_run)
    assert "The ledger excludes nothing" in words


def test_a_verdict_counts_no_attack_that_reads_no_gradient(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, CHANCE | {"activation_spectral": 0.95}, settings=NOISY_LABELS)
    level, words, left = verdict_of(run_dir)
    assert level == "bounded"
    assert "activation_spectral" not in words
    assert "forward activations" not in left
    assert "baseline, without gradients" in write_report(tmp_path).read_text(encoding="utf-8")
    level, words, _ = verdict_of(write_run(tmp_path / "unmonitored", leak={}))
    assert level == "unknown"
    assert words.startswith("No attack was run")


@pytest.mark.parametrize(
    ("bound", "level", "said"),
    [
        (0.7, "bounded", "guarantees at most 0.700"),
        (0.97, "unbounded", "guarantees at most 0.970"),
        (1.0, "unbounded", "nothing bounds the whole run"),
    ],
)
def test_no_leak_found_is_not_yet_protection(
    tmp_path: Path, bound: float, level: str, said: str
) -> None:
    run_dir = write_run(tmp_path, bound=bound, settings=NOISY_LABELS)
    found, words, left = verdict_of(run_dir)
    assert found == level
    assert "no guarantee" not in words
    assert "No attack that was run did better than chance on single batches" in words
    assert said in words
    assert "only the ledger covers the whole run" in left
    assert "Layers before the cut" in left
    assert "forward activations" in left


@pytest.mark.parametrize(
    ("defense", "said"),
    [
        ({"name": "marvell", "noise": "fresh"}, "a peer that looks across the gap"),
        ({"name": "marvell", "noise": "persistent"}, "one that chooses its activations"),
        ({"name": "iso", "noise": "persistent"}, "one that chooses its activations"),
        ({"name": "iso", "noise": "fresh"}, "such as the energy of single rows"),
        ({"name": "gafm", "composed_with": {"name": "iso", "noise": "fresh"}}, "class means of a"),
        ({"name": "noisy_label", "top_labels": "true"}, "one that chooses activations to make"),
    ],
)
def test_a_bound_that_does_not_hold_for_every_peer_says_for_whom(
    tmp_path: Path, defense: Mapping[str, Any], said: str
) -> None:
    level, words, _ = verdict_of(write_run(tmp_path, settings={"defense": defense}))
    peers = coverage_of(defense).adversary.in_words
    assert level == "unbounded"
    assert f"the ledger has a bound of 0.700 for {peers}, and none for others." in words
    assert "and no guarantee" in words
    assert said in words


def test_a_bound_that_is_narrower_than_the_defense_s_says_what_may_have_narrowed_it(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path, settings={"defense": {"name": "marvell", "noise": "persistent"}})
    settings = yaml.safe_load((run_dir / "active" / "settings.yaml").read_text())
    settings |= NOISY_LABELS
    (run_dir / "active" / "settings.yaml").write_text(yaml.safe_dump(settings))
    words = verdict_of(run_dir)[1]
    assert "The charges of the defense describe anybody. What earlier runs revealed" in words


def test_a_ledger_that_an_attack_disproves_bounds_nothing(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, summary=of_active(leak_alarms=2), settings=NOISY_LABELS)
    level, words, _ = verdict_of(run_dir)
    assert level == "unbounded"
    assert "alarm went off 2 times" in words


@pytest.mark.parametrize(("low", "disproved"), [(0.72, True), (0.69, False)])
def test_a_run_level_leak_surely_above_a_bound_is_pointed_out(
    tmp_path: Path, low: float, disproved: object
) -> None:
    whole_run = of_run(accumulated_spectral=RunFigures(0.75, low, 0.78))
    run_dir = write_run(tmp_path, bound=0.7, summary=whole_run)
    said = "more than the 0.700 that the ledger states for a peer that knows class means only"
    assert (said in verdict_of(run_dir)[1]) == disproved


def test_a_raw_figure_contradicts_no_bound_where_the_adjusted_one_is_set_aside(
    tmp_path: Path,
) -> None:
    """Too few rows were left for guesses, so that nothing is known of either figure."""
    whole_run = of_run(accumulated_spectral=RunFigures(0.93, 0.91, 0.95))
    few = BeyondFigures({"accumulated_spectral": AdjustedFigures(0.99, 0.96, 1.0)})
    levels = {"cut": {"accumulated_spectral": RunFigures(0.93, 0.91, 0.95)}}
    known = Summary(leak=LeakFigures(run_level=levels, beyond=few))
    for name, summary in (("raw alone", whole_run), ("adjusted", known)):
        run_dir = write_run(tmp_path / name, bound=0.6, summary=summary, settings=NOISY_LABELS)
        level, words, _ = verdict_of(run_dir)
        disproved = name == "raw alone"
        assert ("more than the 0.600 that the ledger states for anybody" in words) == disproved
        assert level == ("recovered" if disproved else "bounded")
        assert words.startswith("The rows are too few to say what attacks tell") != disproved


def test_accumulated_leak_stands_beside_the_ledger_epoch_by_epoch(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    before = write_report(run_dir).read_text(encoding="utf-8")
    for epoch, leak in enumerate((0.6, 0.7, 0.8123)):
        gathered = AttackFigure("cut", "accumulated_spectral", leak)
        append_lines(run_dir / "active", EpochLeakLine(epoch, (gathered,)))
    after = write_report(run_dir).read_text(encoding="utf-8")
    assert "accumulated_spectral (0.812)" not in before
    assert "accumulated_spectral (0.812)" in after
    assert "<title>3: 0.8123</title>" in after


def test_a_passive_party_of_another_run_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_party(tmp_path / "passive", {"first": {"norm": 0.8}})
    write_summary(tmp_path / "passive", Summary(counts=RunCounts(aligned_rows=1000, steps=7)))
    assert read_run(tmp_path).passives == ()
    assert "another run" in verdict_of(tmp_path)[2]


def test_each_of_several_passive_parties_has_layers_of_its_own(tmp_path: Path) -> None:
    parties = {
        "contract": {"run_name": "three", "passive_parties": ["ads", "bank", "../x", "gone"]}
    }
    write_run(tmp_path, {"norm": 0.6}, settings=parties)
    bank = of_run(accumulated_spectral=RunFigures(0.97, 0.96, 0.98))
    write_party(tmp_path / "ads", {"cut": {"norm": 0.7}, "first": {"norm": 0.8}})
    write_party(tmp_path / "bank", {"cut": {"norm": 0.95}}, summary=bank)
    write_party(tmp_path / "passive", {"cut": {"norm": 1.0}})  # of an earlier run with one party
    run = read_run(tmp_path)
    assert [party.name for party in run.parties] == ["active", "ads", "bank"]
    found = {(f.party, f.layer): f.mean for f in map(finding_of, leak_series(run))}
    assert set(found) == {
        ("active", "cut"),
        ("ads", "ads: cut"),
        ("ads", "ads: first"),
        ("bank", "bank: cut"),
    }
    assert math.isclose(found["bank", "bank: cut"], 0.95, abs_tol=0.02)
    assert "bank: cut" in verdict_of(tmp_path)[1]
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert all(f">{layer}<" in page for layer in ("ads: cut", "ads: first", "bank: cut"))


def test_the_same_files_give_the_same_page_from_either_folder(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "active" / "report.html"
    first = path.read_bytes()
    assert write_report(tmp_path / "active").read_bytes() == first
    assert (tmp_path / "active" / "report.html").read_bytes() == first


def test_the_page_holds_every_chart_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path, settings={"run_budget": {"sum_kl": 2.0}})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    charts = page.count('role="img"')
    assert charts == len(ATTACKS) + 2 + 2  # leak, ledger and divergence, loss and test AUC
    assert page.startswith("<!DOCTYPE html>")
    assert "//" not in page
    assert "@import" not in page
    assert "url(" not in page
    parsed = Tags(page)
    assert "script" not in parsed.tags
    assert not [value for name, value in parsed.attributes if name == "src"]
    assert {value for name, value in parsed.attributes if name == "href"} == {"data:,"}


@pytest.mark.parametrize("page", ["report", "comparison"])
def test_what_settings_and_metrics_say_never_becomes_markup(tmp_path: Path, page: str) -> None:
    hostile = {"contract": {"run_name": HOSTILE}, "data": {HOSTILE: [HOSTILE]}}
    write_run(tmp_path / "a", {HOSTILE.replace("/", ""): 0.6, "norm": 0.6}, settings=hostile)
    write_run(tmp_path / "b")
    harmless = write_run(tmp_path / "c", {"other": 0.6, "norm": 0.6}, settings={"data": {"x": [1]}})
    output = tmp_path / "page.html"

    def tags(run_dir: Path) -> Tags:
        if page == "comparison":
            write_comparison([run_dir, tmp_path / "b"], output)
        else:
            write_report(run_dir, output)
        return Tags(output.read_text(encoding="utf-8"))

    def but_line_ends(found: Tags) -> list[str]:
        return [tag for tag in found.tags if tag != "wbr"]  # names have them where they can break

    attacked = tags(tmp_path / "a")
    assert but_line_ends(attacked) == but_line_ends(tags(harmless))
    assert not [name for name, _ in attacked.attributes if name.startswith("on")]


def test_names_can_end_a_line_after_underscores_and_dots_and_never_become_markup() -> None:
    assert breakable("defense.noise_ratio") == "defense.<wbr>noise_<wbr>ratio"
    assert breakable("0.5 of <b>a_b") == "0.5 of &lt;b&gt;a_<wbr>b"
    assert breakable(None) == "None"


def test_seeds_that_would_give_the_noise_away_are_not_shown(tmp_path: Path) -> None:
    defense = {"name": "marvell", "noise": "fresh", "insecure_noise_seed": 90210}
    settings = {"defense": defense, "insecure_nonce_seed": 80309}
    page = write_report(write_run(tmp_path, settings=settings)).read_text(encoding="utf-8")
    assert "90210" not in page
    assert "80309" not in page
    assert page.count("set (not shown)") == 2


def test_settings_are_written_without_python_s_notation(tmp_path: Path) -> None:
    settings = {
        "optimizer": {"weight_decay": 0.00001, "betas": [0.9, 0.999], "nesterov": False},
        "data": {"missing_texts": ["", "NA"], "columns": [{"name": "x", "unit": None}], "none": {}},
    }
    page = write_report(write_run(tmp_path, settings=settings)).read_text(encoding="utf-8")
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    for setting, shown in (
        ("weight_decay", "1e-5"),
        ("betas", "0.9, 0.999"),
        ("nesterov", "no"),
        ("missing_texts", "(empty), NA"),
        ("columns", "name x, unit none"),
        ("none", "none"),
    ):
        assert cells[cells.index(setting) + 1] == shown


def test_a_run_that_was_killed_still_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "active" / SUMMARY).unlink()
    metrics = tmp_path / "active" / METRICS
    metrics.write_text(metrics.read_text()[:-20])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "no summary" in page
    assert page.count('role="img"') == len(ATTACKS) + 2 + 2


def test_a_run_that_had_no_step_yet_still_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "active").mkdir()
    (tmp_path / "active" / METRICS).write_text("")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "No attack was run" in page
    assert 'role="img"' not in page


def test_a_comparison_shows_each_run_and_the_settings_that_differ(tmp_path: Path) -> None:
    for name, power in (("weak", 1.0), ("strong", 9.0)):
        settings = {
            "contract": {"run_name": name, "epochs": 3},
            "defense": {"name": "marvell", "noise": "fresh", "strength": {"power_ratio": power}},
        }
        write_run(tmp_path / name, {"norm": 0.6 + 0.1 / power}, settings=settings)
    output = write_comparison([tmp_path / "weak", tmp_path / "strong"], tmp_path / "c.html")
    page = output.read_text(encoding="utf-8")
    assert page.count('role="img"') == 1 + 1 + 1 + 2  # trade-off, norm, ledgers, training
    differing = page[page.index("Settings that differ") :]
    assert "defense.<wbr>strength.<wbr>power_<wbr>ratio" in differing  # where a line may end
    assert "contract.<wbr>epochs" not in differing
    assert "contract.run_name" not in differing


def test_a_report_that_fails_is_logged_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "active").mkdir()
    with caplog.at_level(logging.ERROR):
        try_to_report(tmp_path)
    (record,) = caplog.records
    assert "expected a run's folder" in record.message
    assert record.exc_info is None
    with pytest.raises(SettingsError):
        write_report(tmp_path)


def counted(epoch: int) -> list[Line]:
    """Return the lines of one batch: raw classes that lie apart, and defended ones that do not."""
    counts = {
        "before/negative": (30, 0, 0, 0),
        "before/positive": (0, 0, 0, 10),
        "after/negative": (0, 15, 15, 0),
        "after/positive": (0, 5, 5, 0),
    }
    norms, cosines = (-2.0, -1.95, -1.9, -1.85, -1.8), (-1.0, -0.5, 0.0, 0.5, 1.0)
    return [
        HistogramLine(epoch, 0, "log10_norm", norms, counts),
        HistogramLine(epoch, 0, "cosine", cosines, counts),
    ]


def test_gradients_by_class_are_shown_step_by_step_before_and_after(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    without = write_report(run_dir).read_text(encoding="utf-8")
    assert "Gradients by class" not in without
    append_lines(
        run_dir / "active", *counted(0), *counted(2), *counted(2)
    )  # the last batch counted twice
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert page.count('role="img"') == without.count('role="img"') + 2 * 4
    assert "Step 1 (epoch 1): 10 positives, 30 negatives; 95 % of random scores below" in page
    assert "Step 61 (epoch 3)" in page
    for title, leak in (("Norm, before", "1.000"), ("Direction, after", "0.500")):
        caption = f'{title}<span class="note">leak AUC {leak}'
        assert page.count(caption) == 2
    drawn = Tags(page[page.index('id="classes"') :]).attributes
    for style in ("negative", "positive"):
        assert drawn.count(("class", f"area {style}")) == 2 * 4 + 1  # and in the legend


def test_the_leak_auc_of_counts_is_that_of_the_examples_in_their_bins() -> None:
    rng = np.random.default_rng(3)
    negatives, positives = rng.integers(0, 20, 12), rng.integers(0, 9, 12)
    scores = np.repeat(np.tile(np.arange(12), 2), np.concatenate([negatives, positives]))
    labels = np.repeat([0, 1], [negatives.sum(), positives.sum()])
    expected = roc_auc_score(labels, scores)
    found = auc_of_counts(negatives.astype(np.float64), positives.astype(np.float64))
    assert found == pytest.approx(max(expected, 1 - expected), abs=1e-12)
    assert found > 0.5


def test_random_scores_stay_below_the_floor_on_95_of_100_batches() -> None:
    """Accepts the share promised, to four standard errors, and rejects a bound of one side only."""
    rng = np.random.default_rng(5)
    labels = np.repeat([0, 1], [40, 15])
    ranks = rng.random((2000, 55)).argsort(axis=1).argsort(axis=1)
    # Of the 600 pairs, those in which the positive has the higher score.
    aucs = (ranks[:, labels == 1].sum(axis=1) - 15 * 14 / 2) / 600
    assert aucs[0] == pytest.approx(roc_auc_score(labels, ranks[0]))
    leak = np.maximum(aucs, 1 - aucs)
    assert float((leak < random_q95(40, 15)).mean()) == pytest.approx(0.95, abs=0.02)
    one_sided = 0.5 + (random_q95(40, 15) - 0.5) * 1.645 / 1.96
    assert float((leak < one_sided).mean()) != pytest.approx(0.95, abs=0.02)


def test_every_layer_of_the_passive_party_has_its_line_in_each_attack_s_chart(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path, CHANCE)
    write_party(run_dir / "passive", {"cut": CHANCE, "first": CHANCE | {"spectral": 0.95}})
    page = write_report(run_dir).read_text(encoding="utf-8")
    layered = page[page.index("Layer by layer") : page.index("<h3>Figures")]
    assert layered.count('role="img"') == len(ATTACKS)
    assert layered.count(">first</text>") == layered.count(">cut</text>") == len(ATTACKS)
    table = page[page.index("<h3>Figures") : page.index("Bold:")]
    assert table.count("<td>active</td><td>cut</td>") == len(ATTACKS)
    assert table.count("<td>passive</td><td>cut</td>") == len(ATTACKS)
    assert table.count("<td>passive</td><td>first</td>") == len(ATTACKS)
    assert "recovers the labels" in verdict_of(run_dir)[1]


def test_each_leak_chart_shows_the_random_floor_and_what_the_attacker_s_features_tell(
    tmp_path: Path,
) -> None:
    """The attacker's own features, and not the joint model, whose AUC no attacker reaches."""
    beyond = BeyondFigures(advantage={"accumulated_hint_40": AdvantageFigures(0.1, 0.0, 0.2, 0.71)})
    summary = replace(of_active(), leak=LeakFigures(beyond=beyond))
    page = write_report(write_run(tmp_path / "a", test_auc=0.8768, summary=summary)).read_text()
    for style in ("floor", "baseline"):
        drawn = Tags(page).attributes.count(("class", f"line {style}"))
        # And in the legend; the ledger's chart has the attacker's features, too.
        assert drawn == len(ATTACKS) + 1 + (style == "baseline")
    assert "own features reach 0.710 without any gradient" in page
    leak_section = page[page.index('id="leak"') : page.index('id="watch"')]
    assert "0.877" not in leak_section
    without = write_report(write_run(tmp_path / "b", test_auc=0.8768)).read_text("utf-8")
    assert 'class="line baseline"' not in without


def test_what_was_noticed_and_told_stands_in_tables(tmp_path: Path) -> None:
    settings = {
        "leak_gate": {"max_leak_auc": 0.65, "window_steps": 50, "action": "stop"},
        "allow_audits": True,
    }
    earlier = LedgerFigures(
        SpreadFigures(max=0.1), knows_class_means_only=SpreadFigures(max=0.6172)
    )
    summary = of_active(
        leak_alarms=1,
        gate=GateFigures(findings=1, closed=True),
        audits_answered=3,
        earlier_answers=EarlierAnswers(1234, earlier),
    )
    levels = {"cut": {"accumulated_spectral": RunFigures(0.75, 0.72, 0.78, 12345)}}
    summary = replace(summary, leak=LeakFigures(run_level=levels))
    run_dir = write_run(tmp_path / "noticed", settings=settings, summary=summary, bound=0.7)
    append_lines(
        run_dir / "active",
        GateLine(1, 7, AttackFigure("cut", "norm", 0.7654), random=0.5712, limit=0.65),
        AlarmLine(2, AttackFigure("cut", "cosine", 0.9123), margin=0.0123, bound=0.6123),
        *(AuditLine(e, AttackFigure("cut", "norm", 0.6 + e / 10)) for e in range(3)),
    )
    page = write_report(run_dir).read_text(encoding="utf-8")
    watched = page[page.index('id="watch"') : page.index('id="training"')]
    for text in (
        *("went off 1 time.", "1 finding, and ended the run", "Audit calls answered: 3."),
        *("epoch 2, step 8", "norm at cut", "0.765", "0.571"),
        *("cosine at cut", "0.912", "0.012", "0.613"),
        *(">3</td>", ">0.60</td>", ">0.80</td>"),
    ):
        assert text in watched, text
    words = verdict_of(run_dir)[1]
    assert "The leak gate ended the run" in words
    assert "The peer was told 3 leak AUCs" in words
    assert "they answered about 1,234 of the training rows, at most AUC 0.618" in words
    assert '<td class="number">0.720 to 0.780</td><td class="number">12,345</td>' in page
    without = write_report(write_run(tmp_path / "without")).read_text(encoding="utf-8")
    assert "Leak gate: not set" in without
    assert "Audit calls: not allowed" in without
    assert "Earlier runs" not in without
    assert "Findings of the leak gate" not in without


@pytest.mark.parametrize("attack", [*get_args(BatchAttackName), *get_args(RunAttackName)])
def test_what_an_attack_needs_is_known_of_each(attack: str) -> None:
    assert needs_of(attack) != "not known here"
    assert is_oracle(attack) is (attack in ORACLES)


def test_a_comparison_shows_what_each_run_sent_by_class(tmp_path: Path) -> None:
    for name in ("a", "b"):
        append_lines(write_run(tmp_path / name) / "active", *counted(0), *counted(2))
    output = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html")
    page = output.read_text(encoding="utf-8")
    sent = page[page.index('id="sent"') : page.index('id="ledger"')]
    assert sent.count('role="img"') == 2 * 2
    assert "direction, leak AUC 0.500" in sent
    assert "leak AUC 1.000" not in sent  # what was before the defense was not sent


DEEP = "[" * 100_000
HUGE = 10**400
HOSTILE_SUMMARIES: list[dict[str, Any]] = [
    {"leak_run_level": {"cut": {"norm": {"auc": 0.9, "low": "x", "high": [], "examples": {}}}}},
    {"leak_run_level": {"cut": {"norm": {"auc": HUGE}}}},
    {"leak_run_level": {"cut": {"norm": HUGE}}},
    {"leak_run_level": {"cut": [1]}},
    {"leak_classes": {"cut": {"norm": {"classes": [1], "worst_pair": "x"}}}},
    {"leak_classes": {"cut": {"norm": {"classes": {"a": HUGE}}}}},
    {"leak_classes": 3},
]


HOSTILE_LINES: list[dict[str, Any]] = [
    {"kind": "leak", "epoch": HUGE, "step": "x"},
    {"kind": "leak", "epoch": 0, "first/norm_leak_auc": HUGE},
    {"kind": "leak", "epoch": 0, "step": 0, "first/norm_leak_auc": HUGE},
    {"kind": ["leak"]},
]


def test_a_passive_party_s_figures_of_another_form_are_left_out(tmp_path: Path) -> None:
    """Its files come from another company: the active party's own figures are still shown."""
    write_run(tmp_path, {"norm": 0.6})
    passive = tmp_path / "passive"
    write_party(passive, {"cut": {"norm": 0.6}})
    written = json.loads((passive / SUMMARY).read_text())
    with (passive / METRICS).open("a") as metrics:
        for line in HOSTILE_LINES:
            metrics.write(json.dumps(line) + "\n")
        metrics.write(f"{DEEP}\n")
    for summary in HOSTILE_SUMMARIES:
        (passive / SUMMARY).write_text(json.dumps(written | summary))
        assert "</html>" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "text"), [("summary.json", DEEP), ("settings.yaml", DEEP), ("settings.yaml", "a: [")]
)
def test_a_passive_party_s_file_that_is_none_is_refused_in_words(
    tmp_path: Path, file: str, text: str
) -> None:
    write_run(tmp_path)
    write_party(tmp_path / "passive", {"cut": {"norm": 0.6}})
    (tmp_path / "passive" / file).write_text(text)
    with pytest.raises(SettingsError, match=rf"{file}: not valid"):
        write_report(tmp_path)
