"""The cover page that both sides of a run sign: its facts are those of settings and summary."""

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitveil.active_party.report import write_report
from splitveil.common.party.cover import CHECKS
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.figures import LeakBounds, PredictionFigures, Spread
from splitveil.common.record.run_folder import mark_as_ended
from splitveil.common.record.run_record import (
    ActiveFigures,
    AlignmentLine,
    ModelFigures,
    Provenance,
    RunCounts,
    Summary,
    write_summary,
)
from splitveil.passive_party.feature_exposure import ColumnExposure, FeatureExposure
from splitveil.passive_party.report_page import write_exposure, write_passive_report
from tests.support.markdown import ROOT
from tests.support.records import append_lines

CONTRACT = {
    "run_name": "loans",
    "identities": {"active": "bank.example", "passive": "shop.example"},
    "cut_shape": [4],
    "exchange": "one_shot",
    "alignment": {"max_set_size": 1200},
}
OWN = {
    "security": {"mode": "mtls"},
    "data": {"label_column": "defaulted", "positive_label": "yes"},
    "defense": {"name": "none"},
    "run_budget": {"leak_auc": 0.6},
    "report": {"target_leak_auc": 0.6},
}
THEIRS = {
    "party": "passive",
    "security": {"mode": "mtls"},
    "bottom_model": {"kind": "pca"},
    "max_exposure": 0.5,
}
ENDED = Provenance("2026-01-02T03:04:05+00:00", "Linux", "3.12.1", "2.11.0")


def write_both(
    folder: Path,
    contract: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    bound: float = 0.5,
    right: float = 0.6,
    ended_after: Sequence[str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a run's files on two machines and both pages; return the facts of both covers."""
    agreed = CONTRACT | (contract or {})
    active, passive = folder / "own" / "active", folder / "theirs" / "passive"
    spread = Spread(bound, bound, bound)
    model = ModelFigures(PredictionFigures(auc=0.8), alone=PredictionFigures(auc=0.7))
    for party in (active, passive):
        party.mkdir(parents=True)
        if ended_after is not None:
            lines = [
                {"time": "2026-01-02T03:04:05+00:00", "direction": "sent", "bytes": 9, "kind": kind}
                for kind in ended_after
            ]
            (party / "transcript.jsonl").write_text("\n".join(map(json.dumps, lines)))
            mark_as_ended(party, {"ended_by": "run_budget"})
    ledger = LeakBounds(Spread(0.1, 0.1, 0.1), spread, spread, spread, spread)
    counts = RunCounts(1000, 5 if agreed["exchange"] == "gradients" else None)
    of_active = ActiveFigures(model=model, ledger=ledger)
    for party, settings, summary in (
        (active, OWN | (own or {}), Summary(counts=counts, active=of_active, provenance=ENDED)),
        (passive, THEIRS, Summary(counts=counts, provenance=ENDED)),
    ):
        append_lines(party, AlignmentLine(1000, 800 if party == active else 1200))
        (party / "settings.yaml").write_text(yaml.safe_dump(settings | {"contract": agreed}))
        write_summary(party, summary)
    column = ColumnExposure("salary", "number", right, 0.2, 0.01)
    write_exposure(passive, FeatureExposure(500, 4, (column,), 1200, ()))
    write_report(active.parent)
    write_passive_report(passive.parent)
    ours, others = (json.loads((one / "cover.json").read_text()) for one in (active, passive))
    return ours, others


def answers(facts: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["answer"] for one in facts["checks"]}


def words_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8").partition("<main>")[2]
    return " ".join(unescape(re.sub("<[^>]*>", " ", text)).split())


def test_the_facts_are_those_of_both_summaries(tmp_path: Path) -> None:
    ours, theirs = write_both(tmp_path)
    assert ours["sentence"].startswith("This run tells the other company nothing of the labels")
    assert [one["identity"] for one in ours["parties"]] == ["bank.example", "shop.example"]
    figures = ours["figures"]
    assert "of 100 pairs in the right order (guessing: 50), on test" in figures["model"]["said"]
    assert (figures["labels"]["high"], figures["labels"]["most"]) == (0, None)
    assert figures["model"]["high"] == pytest.approx(2 * 0.8 - 1)
    assert figures["model"]["most"] == pytest.approx(2 * 0.7 - 1)
    assert figures["columns"]["high"] is None
    assert theirs["figures"]["columns"]["high"] == pytest.approx((0.6 - 0.2) / (1 - 0.2))
    assert theirs["figures"]["columns"]["most"] == 0.5
    assert theirs["figures"]["labels"]["high"] == 0
    assert theirs["figures"]["model"]["high"] is None
    same = ("run", "run_id", "contract_sha256", "parties", "common_rows", "exchanged", "ended")
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert ours["common_rows"] == 1000
    assert "73" not in words_of(tmp_path / "theirs" / "passive" / "cover.html")


def test_each_page_has_the_colour_of_its_report_and_links_to_it(tmp_path: Path) -> None:
    for right, colour in ((0.6, "within"), (0.9, "fail")):
        folder = tmp_path / colour
        write_both(folder, right=right, bound=0.7)
        for party, outcome in (("own/active", "fail"), ("theirs/passive", colour)):
            cover, report = (folder / party / f"{name}.html" for name in ("cover", "report"))
            for page in (cover, report):
                assert f'class="verdict {outcome}"' in page.read_text(encoding="utf-8")
            assert 'href="cover.html"' in report.read_text(encoding="utf-8")
            assert 'href="report.html"' in cover.read_text(encoding="utf-8")


def test_the_checks_are_those_of_the_guide(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guide" / "data-protection.md").read_text(encoding="utf-8")
    listed = [line[6:].replace("`", "") for line in guide.splitlines() if line.startswith("- [ ]")]
    assert listed == [*CHECKS.values()]
    ours, theirs = map(answers, write_both(tmp_path))
    by_people = ("columns", "membership", "predictions", "keys", "contract")
    common = {
        **dict.fromkeys(by_people, "by hand"),
        "bound": "ticked",
        **dict.fromkeys(("sums", "rows", "figure"), "does not apply"),
    }
    other = {"limit": "other page", "lists": "other page"}
    assert ours == {**common, "target": "ticked", **other}
    assert theirs == {**common, "target": "other page", **dict.fromkeys(other, "ticked")}


def test_the_program_ticks_nothing_that_only_people_know(tmp_path: Path) -> None:
    facts = write_both(tmp_path, {"release": "noisy_labels"}, {"defense": {"name": "noisy_label"}})
    for found in map(answers, facts):
        for name in ("figure", "columns", "membership", "predictions", "keys", "contract", "rows"):
            assert found[name] == "by hand"


@pytest.mark.parametrize(
    ("contract", "own", "bound", "ours", "theirs"),
    [
        ({"exchange": "gradients"}, {}, 1.0, {"bound": "no", "target": "no"}, {}),
        (
            {"exchange": "gradients"},
            {"defense": {"name": "noisy_label"}},
            0.6,
            {"bound": "ticked", "target": "ticked", "rows": "by hand"},
            {"bound": "other page", "rows": "by hand"},
        ),
        (  # a bound that is stated without a proof
            {"exchange": "gradients"},
            {"defense": {"name": "custom", "module": "own:Own"}},
            0.6,
            {"bound": "no", "target": "no"},
            {"bound": "other page"},
        ),
        (
            {"exchange": "gradients"},
            {"defense": {"name": "noisy_label"}, "run_budget": {}},
            0.6,
            {"bound": "ticked", "target": "no"},
            {},
        ),
        (
            {"release": "noisy_sums"},
            {"defense": {"name": "noisy_label"}},
            0.7,
            {"bound": "ticked", "target": "no", "sums": "by hand"},
            {"bound": "other page", "sums": "by hand"},
        ),
        (
            {"alignment": {"kind": "one_sided"}},
            {"security": {"mode": "insecure"}},
            0.5,
            {"membership": "ticked", "predictions": "ticked", "keys": "no"},
            {"membership": "ticked", "predictions": "ticked", "keys": "by hand"},
        ),
    ],
)
def test_the_program_ticks_what_settings_and_figures_show(
    tmp_path: Path,
    contract: dict[str, Any],
    own: dict[str, Any],
    bound: float,
    ours: dict[str, str],
    theirs: dict[str, str],
) -> None:
    found, others = map(answers, write_both(tmp_path, contract, own, bound))
    assert found.items() >= ours.items()
    assert others.items() >= theirs.items()


def test_no_page_names_a_column_an_attack_or_what_only_experts_read(tmp_path: Path) -> None:
    write_both(tmp_path, {"exchange": "gradients"}, {"defense": {"name": "noisy_label"}}, 0.6)
    for party in ("own/active", "theirs/passive"):
        words = words_of(tmp_path / party / "cover.html")
        assert "salary" not in words
        for word in (*ATTACKS, "eature-adjusted", "ECE", "ositive row", "ositive from"):
            assert not re.search(rf"\b{word}", words), word
    words = words_of(tmp_path / "own/active/cover.html")
    assert "a row with “defaulted: yes” from one without in at most 60 of 100 pairs" in words
    assert "for each record in training: numbers that correct the model (gradients)" in words
    assert "in each of 5 epochs" in words
    assert "outcome defaulted: yes, or another" in words
    assert "Outcomes can be read from them as far as no bound on labels limits it" in words
    others = words_of(tmp_path / "theirs/passive/cover.html")
    assert "and 50 of the most exposed column's. Limit: 50." in others
    assert "those simple methods turn right; no bound" in others
    assert "defaulted" not in others
    assert "60 of 100" not in others


SUMS = ("Align reply", "Train request", "Train reply", "Train request")  # its sums are missing


@pytest.mark.parametrize(
    ("contract", "kinds", "sent", "not_sent"),
    [
        ({"release": "noisy_sums"}, SUMS, "every id", "4 numbers.*sums of"),
        ({"release": "noisy_sums"}, (*SUMS, "Train reply"), "sums of", "4 numbers"),
        # Of a transfer that was begun again, the first may have ended.
        ({"release": "noisy_sums"}, ("Handshake request",) * 2 + SUMS, "sums of", "4 numbers"),
        ({"exchange": "gradients"}, SUMS, "gradients", "^$"),
        ({"release": "noisy_labels"}, SUMS[:2], "every id", "4 numbers.*its outcome"),
        ({}, ("Handshake reply",), "of outcomes: nothing", "every id.*4 numbers"),
    ],
)
def test_a_run_that_ended_early_is_not_green_and_lists_what_was_sent(
    tmp_path: Path, contract: dict[str, Any], kinds: Sequence[str], sent: str, not_sent: str
) -> None:
    facts = write_both(tmp_path, contract, ended_after=kinds)
    for one, party in zip(facts, ("own/active", "theirs/passive"), strict=True):
        assert one["verdict"] == "Ended early"
        assert one["outcome"] not in {"pass", "within"}
        assert "ended early, by run_budget" in one["sentence"]
        assert sent in " ".join(row["what"] for row in one["exchanged"])
        assert re.search(not_sent, " ".join(one["not_sent"]))
        page = (tmp_path / party / "report.html").read_text(encoding="utf-8")
        assert f'class="verdict {one["outcome"]}"' in page
        assert "Ended early" in page
    numbers_left = "4 numbers" not in " ".join(facts[1]["not_sent"])
    assert ("Of each record:" in words_of(tmp_path / "theirs/passive/report.html")) is numbers_left


def test_a_page_elsewhere_neither_writes_nor_names_a_cover(tmp_path: Path) -> None:
    write_both(tmp_path)
    for folder, write in (
        (tmp_path / "own", write_report),
        (tmp_path / "theirs", write_passive_report),
    ):
        page = write(folder, tmp_path / "elsewhere.html")
        assert "cover.html" not in page.read_text(encoding="utf-8")
        assert not (tmp_path / "cover.html").exists()
