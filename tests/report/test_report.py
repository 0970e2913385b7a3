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
from typing import Any

import numpy as np
import pytest
import yaml

from splitveil.active_party.defenses.sum_kl import estimated_auc
from splitveil.active_party.report import read_run, try_to_report, write_comparison, write_report
from splitveil.active_party.report.panels import windows
from splitveil.active_party.report.run_files import leak_series
from splitveil.active_party.report.tables import finding_of
from splitveil.active_party.report.verdict import coverage_of, verdict_of
from splitveil.common.errors import SettingsError
from splitveil.common.party.report_parts import breakable
from splitveil.common.privacy.attacks import BUILT_IN_NAMES, NUMBER_ATTACKS, is_oracle, needs_of
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import (
    AdjustedFigures,
    AdvantageFigures,
    AttackFigure,
    BatchCounts,
    BeyondFigures,
    LeakBounds,
    LeakFigures,
    PredictionFigures,
    RunFigures,
    Spread,
)
from splitveil.common.privacy.number_attacks import BATCH_ATTACKS, RIDGE, TOP
from splitveil.common.record.run_record import (
    METRICS,
    SUMMARY,
    ActiveFigures,
    AlarmLine,
    EarlierAnswers,
    EvaluationLine,
    LeakLine,
    LedgerLine,
    Line,
    ModelFigures,
    RunCounts,
    Summary,
    write_summary,
)
from splitveil.common.text.visible_text import visible_lines
from tests.support.records import append_lines

EPOCHS, STEPS = 3, 30
ATTACKS = ("norm", "cosine", "spectral")
CHANCE = {"norm": 0.57, "cosine": 0.57, "spectral": 0.57}
ORACLES = {"cosine", "informed", "mean", "median", "lda"}
ORACLES |= {"accumulated_cosine", "accumulated_informed"}
NOISY_LABELS = {"defense": {"name": "noisy_label", "top_labels": "noisy"}}
HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
HOSTILE += "\x1b[2J\x07\u202e"


def write_party(
    folder: Path,
    leak: Mapping[str, Mapping[str, float]],
    *,
    bound: float | None = None,
    settings: Mapping[str, Any] | None = None,
    summary: Summary | None = None,
) -> None:
    """Write one party's files, with leak AUCs (layer -> attack -> mean) that vary a little.

    Those of the active party have a bound, for the peers whom the defense's charges describe.
    """
    folder.mkdir(parents=True)
    values = {"defense": {"name": "marvell", "noise": "fresh"}} | dict(settings or {})
    adversary = coverage_of(values["defense"]).charge.adversary
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
            sums, estimate, anybody, honest, means = (
                Spread(one, one, one)
                for one in (
                    *(0.1 * (epoch + 1), estimated_auc(0.1)),
                    *(bound if adversary.includes(peers) else 1.0 for peers in Adversary),
                )
            )
            figures_of_ledger = LeakBounds(sums, estimate, anybody, honest, means)
            lines.append(LedgerLine(epoch, figures_of_ledger))
            lines.append(
                EvaluationLine(epoch, "test", PredictionFigures(0.5 / (epoch + 1), 0.8), 0.4)
            )
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
    model = ModelFigures(PredictionFigures(auc=test_auc))
    options["summary"] = replace(summary, active=replace(summary.of_active, model=model))
    write_party(run_dir / "active", {"cut": leak} if leak else {}, bound=bound, **options)
    return run_dir


def of_active(**figures: Any) -> Summary:
    return Summary(active=ActiveFigures(**figures))


def of_run(**attacks: RunFigures) -> Summary:
    """Return a summary with attacks on the cut layer that gather over the run."""
    return Summary(leak=LeakFigures(run_level={"cut": attacks}))


JARGON = ("feature_adjusted", "Feature_adjusted", "ECE", "(ECE)", "positive")


def page_of(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def words_of(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", "", html)).split())


def first_screen(run_dir: Path) -> str:
    page = page_of(run_dir)
    assert page.count('class="badge') == 1
    words = words_of(page[page.index("<main") : page.index("<details")])
    assert len(words.split()) <= 300
    return words


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


TARGET = {"report": {"target_leak_auc": 0.7}}
CLASS_MEANS = "A company that does no more than compare gradients with the averages of the classes"
OWN_DEFENSE = {"defense": {"name": "custom", "module": "own:Own"}}
PERSISTENT = {"defense": {"name": "marvell", "noise": "persistent"}}


def adjusted(value: float, **others: AdjustedFigures) -> Summary:
    found = {"norm": AdjustedFigures(value, value - 0.03, value + 0.02), **others}
    beyond = BeyondFigures(found, {}, None, 443, 0.81, 0.79, 0.81)
    return Summary(leak=LeakFigures(beyond=beyond))


@pytest.mark.parametrize(
    ("settings", "bound", "summary", "outcome", "badge", "said"),
    [
        (
            NOISY_LABELS | TARGET,
            0.7,
            adjusted(0.52),
            "pass",
            "Meets the target",
            (
                "Whatever the other company does, it distinguishes a row with “defaulted: yes” "
                "from one without in at most 70 of 100 pairs, beyond what its own data reveal. "
                "Guessing: 50. The strongest attack that was run reaches 52 of 100 (50 to 54), "
                "which is no more than chance explains. The run meets its target"
            ),
        ),
        # Where nothing was measured, or on too few rows, no run is green.
        (NOISY_LABELS | TARGET, 0.7, Summary(), "open", "Not shown", "data was not measured"),
        (
            NOISY_LABELS | TARGET,
            0.7,
            adjusted(0.5, norm=AdjustedFigures(0.7, 0.4, 0.95)),
            "open",
            "Not shown",
            "cannot be measured on 443 rows",
        ),
        (
            NOISY_LABELS | TARGET,
            0.7,
            adjusted(0.52, cosine=AdjustedFigures(0.6, 0.4, 0.85)),
            "open",
            "Not shown",
            "1 more cannot be measured on 443 rows.",
        ),
        (
            TARGET,
            0.6,
            adjusted(0.9),
            "fail",
            "Labels recovered",
            (
                "Labels recovered: an attack told a row with “defaulted: yes” from one without in "
                "90 of 100 pairs. No bound holds against a company that tries. Target missed: 70."
            ),
        ),
        # A bound that is proved is never in doubt: what is above it comes from the features.
        (
            NOISY_LABELS | TARGET,
            0.6,
            adjusted(0.9),
            "pass",
            "Meets the target",
            (
                "reads 90 of 100 (87 to 92), more than the 0.600 that is proved for anybody, so "
                "that it contains what features reveal: the models of these (AUC 0.790 by "
                "functions, 0.810 by boosting) cannot separate them from gradients. The run meets "
                "its target"
            ),
        ),
        (NOISY_LABELS, 0.6, adjusted(0.95), "unknown", "No target set", "is proved for anybody"),
        (
            OWN_DEFENSE,
            0.6,
            adjusted(0.8),
            "fail",
            "An attack passes a bound",
            (
                "By what this run's own defense states, the other company distinguishes a row with "
                "“defaulted: yes” from one without in at most 60 of 100 pairs, beyond what its own "
                "data reveal. Guessing: 50. An attack that was run reaches 80."
            ),
        ),
        (NOISY_LABELS, 0.7, adjusted(0.52), "unknown", "No target set", "No target is set"),
        ({}, 1.0, adjusted(0.52), "unknown", "No target set", "Nothing in this run limits"),
        (
            {},
            1.0,
            adjusted(0.95),
            "fail",
            "Labels recovered",
            "from one without in 95 of 100 pairs. No b",
        ),
        (TARGET, 1.0, adjusted(0.52), "fail", "Misses the target", "Nothing in this run limits"),
        (TARGET, 0.7, adjusted(0.52), "fail", "Misses the target", CLASS_MEANS),
        (PERSISTENT, 0.7, adjusted(0.5), "unknown", "No target set", "Nothing limits one that se"),
    ],
)
def test_the_first_screen_answers_with_one_badge(
    tmp_path: Path,
    settings: dict[str, Any],
    bound: float,
    summary: Summary,
    outcome: str,
    badge: str,
    said: str,
) -> None:
    label = {"data": {"label_column": "defaulted", "positive_label": "yes"}}
    run_dir = write_run(tmp_path, bound=bound, summary=summary, settings=label | settings)
    words, run = first_screen(run_dir), read_run(run_dir)
    assert said in words
    assert badge in words
    page = page_of(run_dir)
    assert f'class="verdict {outcome}"' in page
    verdict = verdict_of(run)
    assert verdict.leak.in_words in words_of(page)
    assert not [word for word in (*ATTACKS, *JARGON) if word in words.replace("-", "_").split()]
    assert verdict.outcome == outcome


def test_labels_of_several_classes_and_numbers_have_sentences_of_their_own(tmp_path: Path) -> None:
    for data, said in (
        ({"classes": 3}, "a row of one class from one of any other in at most 70 of 100 pairs"),
        ({"label_range": [0, 1]}, "a label at one end of the range from one at the other"),
    ):
        run_dir = write_run(tmp_path / str(len(said)), settings=NOISY_LABELS | {"data": data})
        assert said in first_screen(run_dir)


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
    words = words_of(page_of(write_run(tmp_path, settings={"defense": defense})))
    peers = coverage_of(defense).charge.adversary.in_words
    assert f"No score of {peers} exceeds AUC 0.700" in words
    assert "no bound for anybody else" in words
    assert said in words


def test_a_bound_that_is_narrower_than_the_defense_s_says_what_may_have_narrowed_it(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path, settings=PERSISTENT)
    settings = yaml.safe_load((run_dir / "active" / "settings.yaml").read_text())
    settings |= NOISY_LABELS
    (run_dir / "active" / "settings.yaml").write_text(yaml.safe_dump(settings))
    words = words_of(page_of(run_dir))
    assert "The charges of the defense describe anybody. What earlier runs revealed" in words


def test_an_alarm_leaves_no_bound_that_passes(tmp_path: Path) -> None:
    summary = replace(adjusted(0.52), active=ActiveFigures(leak_alarms=2))
    run_dir = write_run(tmp_path, summary=summary, settings=TARGET)
    words = first_screen(run_dir)
    assert "Guessing: 50. The leak alarm went off 2 times: an attack measured more than" in words
    assert "Misses the target" in words


def test_a_raw_figure_passes_no_bound_and_is_explained(tmp_path: Path) -> None:
    summary = adjusted(0.52)
    levels = {"cut": {"accumulated_spectral": RunFigures(0.93, 0.91, 0.95)}}
    summary = replace(summary, leak=replace(summary.of_leak, run_level=levels))
    run_dir = write_run(tmp_path, summary=summary, settings=NOISY_LABELS | TARGET)
    assert "Meets the target" in first_screen(run_dir)
    raw = page_of(run_dir).partition('id="leak"')[2].partition("</section>")[0]
    assert "0.930" in raw
    assert "contains what features reveal anyway, AUC 0.810 here" in raw


@pytest.mark.parametrize(("left_out", "is_said"), [(3, False), (28, True)])
def test_batches_that_were_left_out_are_said_where_they_change_a_figure(
    tmp_path: Path, left_out: int, *, is_said: bool
) -> None:
    counts = BatchCounts(99 - left_out, 1, left_out)
    summary = replace(adjusted(0.52), leak=replace(adjusted(0.52).of_leak, counts=counts))
    words = first_screen(write_run(tmp_path, summary=summary))
    said = "The monitor left 28% of the batches out (leak_monitor.max_cpu_share)"
    assert (said in words) is is_said


OVER_FEATURES = AdvantageFigures(0.06, 0.05, 0.07, 0.74)


@pytest.mark.parametrize(
    ("attack", "over", "said"),
    [
        ("completion_40", OVER_FEATURES, "0.820), +0.060 (+0.050 to +0.070) over features with"),
        ("completion_40", None, "0.820), and how much of it features reveal was not measured"),
        ("accumulated_spectral", None, "what features reveal): not measured"),
    ],
)
def test_the_limits_say_what_the_trained_bottom_model_gives_away(
    tmp_path: Path, attack: str, over: AdvantageFigures | None, said: str
) -> None:
    figures = RunFigures(0.8, 0.78, 0.82, over_features=over)
    page = page_of(write_run(tmp_path, summary=of_run(**{attack: figures})))
    watched = page.partition('id="watch"')[2].partition("</section>")[0]
    assert "which no bound limits" in watched
    assert said in watched


def test_a_passive_party_of_another_run_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_party(tmp_path / "passive", {"first": {"norm": 0.8}})
    write_summary(tmp_path / "passive", Summary(counts=RunCounts(aligned_rows=1000, steps=7)))
    (tmp_path / "passive" / "exposure.json").write_text('{"disclosure": 0.25}')
    assert read_run(tmp_path).passives == ()
    page = page_of(tmp_path)
    assert "another run" in page
    assert "Columns: see the feature owner&#39;s cover page</text>" in page
    assert "Labels: no bound</text>" in page


def test_each_of_several_passive_parties_has_layers_of_its_own(tmp_path: Path) -> None:
    parties = {
        "contract": {"run_name": "three", "passive_parties": ["ads", "bank", "../x", "gone"]}
    }
    write_run(tmp_path, {"norm": 0.6}, settings=parties)
    bank = of_run(accumulated_spectral=RunFigures(0.97, 0.96, 0.98))
    limited = {"max_exposure": 0.5}
    write_party(tmp_path / "ads", {"cut": {"norm": 0.7}, "first": {"norm": 0.8}}, settings=limited)
    (tmp_path / "ads" / "exposure.json").write_text('{"disclosure": 0.25}')
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
    page = page_of(tmp_path)
    assert all(f">{layer}<" in page for layer in ("ads: cut", "ads: first", "bank: cut"))
    assert "Columns (ads): 25 of 100; limit 50</text>" in page
    assert "Columns (bank)" not in page
    assert "revealed to the other companies, beyond what their own data reveal?" in page
    assert "the other company" not in page


def test_the_same_files_give_the_same_page_from_either_folder(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path))
    first = path.read_bytes()
    assert path == write_report(tmp_path / "active") == tmp_path / "active" / "report.html"
    assert path.read_bytes() == first


def test_the_page_holds_every_chart_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path, settings={"run_budget": {"sum_kl": 2.0}})
    page = page_of(tmp_path)
    charts = page.count('role="img"')
    # The picture; leak, ledger, loss and test AUC.
    assert charts == 1 + len(ATTACKS) + 1 + 2
    assert page.startswith("<!DOCTYPE html>")
    assert "//" not in page
    assert "@import" not in page
    assert "url(" not in page
    parsed = Tags(page)
    assert "script" not in parsed.tags
    assert not [value for name, value in parsed.attributes if name == "src"]
    assert {value for name, value in parsed.attributes if name == "href"} == {
        "data:,",
        "cover.html",
    }


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
        text = output.read_text(encoding="utf-8")
        assert visible_lines(text) == text
        return Tags(text)

    def but_line_ends(found: Tags) -> list[str]:
        return [tag for tag in found.tags if tag != "wbr"]  # names have them where they can break

    attacked = tags(tmp_path / "a")
    assert but_line_ends(attacked) == but_line_ends(tags(harmless))
    assert not [name for name, _ in attacked.attributes if name.startswith("on")]


def test_names_can_end_a_line_after_underscores_and_dots_and_never_become_markup() -> None:
    assert breakable("0.5 of <b>a_b") == "0.5 of &lt;b&gt;a_<wbr>b"
    assert breakable("defense.name") == "defense.<wbr>name"


def test_seeds_that_would_give_the_noise_away_are_not_shown(tmp_path: Path) -> None:
    defense = {"name": "marvell", "noise": "fresh", "insecure_noise_seed": 90210}
    settings = {"defense": defense, "insecure_nonce_seed": 80309}
    page = page_of(write_run(tmp_path, settings=settings))
    assert "90210" not in page
    assert "80309" not in page
    assert page.count("set (not shown)") == 2


def test_settings_are_written_without_python_s_notation(tmp_path: Path) -> None:
    settings = {
        "optimizer": {"weight_decay": 0.00001, "betas": [0.9, 0.999], "nesterov": False},
        "data": {"missing_texts": ["", "NA"], "columns": [{"name": "x", "unit": None}]},
    }
    page = page_of(write_run(tmp_path, settings=settings))
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    shown = {name: cells[cells.index(name) + 1] for values in settings.values() for name in values}
    assert list(shown.values()) == ["1e-5", "0.9, 0.999", "no", "(empty), NA", "name x, unit none"]


def test_a_run_that_was_killed_or_had_no_step_yet_still_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "active" / SUMMARY).unlink()
    metrics = tmp_path / "active" / METRICS
    metrics.write_text(metrics.read_text()[:-20])
    page = page_of(tmp_path)
    assert "no summary" in page
    assert page.count('role="img"') == 1 + len(ATTACKS) + 1 + 2
    metrics.write_text("")
    page = page_of(tmp_path)
    assert "was not measured" in page
    assert page.count('role="img"') == 1


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


def test_every_layer_of_the_passive_party_has_its_line_in_each_attack_s_chart(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path, CHANCE)
    write_party(run_dir / "passive", {"cut": CHANCE, "first": CHANCE | {"spectral": 0.95}})
    page = page_of(run_dir)
    section = page[page.index('id="leak"') :]
    layered = section[: section.index("<table")]
    assert layered.count('role="img"') == len(ATTACKS)
    assert layered.count(">first</text>") == layered.count(">cut</text>") == len(ATTACKS)
    table = section[: section.index("Bold:")]
    assert table.count("<td>active</td><td>cut</td>") == len(ATTACKS)
    assert "<td>passive</td><td>cut</td>" not in table  # the same gradients, measured twice
    assert table.count("<td>passive</td><td>first</td>") == len(ATTACKS)


def test_each_leak_chart_shows_what_features_reveal(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a", summary=adjusted(0.6)))
    # And in the legend; the model's test AUC is no figure of an attacker.
    assert Tags(page).attributes.count(("class", "line baseline")) == len(ATTACKS) + 1
    assert 'class="line baseline"' not in page_of(write_run(tmp_path / "b"))


def test_what_was_noticed_and_told_stands_in_tables(tmp_path: Path) -> None:
    earlier = LeakBounds(Spread(max=0.1), knows_class_means_only=Spread(max=0.6172))
    summary = of_active(
        leak_alarms=1,
        earlier_answers=EarlierAnswers(1234, earlier),
    )
    levels = {"cut": {"accumulated_spectral": RunFigures(0.75, 0.72, 0.78, 12345)}}
    summary = replace(summary, leak=LeakFigures(run_level=levels))
    run_dir = write_run(tmp_path / "noticed", summary=summary, bound=0.7)
    append_lines(
        run_dir / "active",
        AlarmLine(2, AttackFigure("cut", "cosine", 0.9123), margin=0.0123, bound=0.6123),
    )
    page = page_of(run_dir)
    watched = page[page.index('id="watch"') : page.index('id="training"')]
    for text in (
        "went off 1 time.",
        *("cosine at cut", "0.912", "0.012", "0.613"),
    ):
        assert text in watched, text
    words = words_of(page)
    assert "they answered about 1,234 of the training rows, at most AUC 0.618" in words
    assert '<td class="number">0.720 to 0.780</td><td class="number">12,345</td>' in page
    assert "<td>accumulated_<wbr>spectral</td>" in page  # wraps where the page is narrow
    without = page_of(write_run(tmp_path / "without"))
    assert "Earlier runs" not in without


def test_what_an_attack_needs_is_known_of_each() -> None:
    assert "not known here" not in map(needs_of, BUILT_IN_NAMES)
    assert set(filter(is_oracle, BUILT_IN_NAMES)) == ORACLES
    assert {*BATCH_ATTACKS, TOP, RIDGE} == set(NUMBER_ATTACKS)


def test_a_comparison_shows_each_run_and_the_settings_that_differ(tmp_path: Path) -> None:
    for name, power in (("weak", 1.0), ("strong", 9.0)):
        settings = {
            "contract": {"run_name": name, "epochs": 3},
            "defense": {"name": "marvell", "noise": "fresh", "strength": {"power_ratio": power}},
        }
        write_run(tmp_path / name, {"norm": 0.6 + 0.1 / power}, settings=settings)
    output = write_comparison([tmp_path / "weak", tmp_path / "strong"], tmp_path / "c.html")
    page = output.read_text(encoding="utf-8")
    differing = page[page.index("Settings that differ") :]
    assert "defense.<wbr>strength.<wbr>power_<wbr>ratio" in differing  # where a line may end
    assert "contract.<wbr>epochs" not in differing
    assert "contract.run_name" not in differing


DEEP = "[" * 100_000
HUGE = 10**400
HOSTILE_SUMMARIES: list[dict[str, Any]] = [
    {"leak_run_level": {"cut": {"norm": {"auc": 0.9, "low": "x", "high": [], "examples": {}}}}},
    {"leak_run_level": {"cut": {"norm": {"auc": HUGE}}}},
    {"leak_run_level": {"cut": [1]}},
    {"leak_classes": {"cut": {"norm": {"classes": [1], "worst_pair": "x"}}}},
    {"leak_classes": {"cut": {"norm": {"classes": {"a": HUGE}}}}},
    {"leak_classes": 3},
]
HOSTILE_LINES: list[dict[str, Any]] = [
    {"kind": "leak", "epoch": HUGE, "step": "x"},
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
        assert "</html>" in page_of(tmp_path)


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
