"""Board and alert rules name metrics that a real run exports, and the board all of them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from splitveil.active_party.http.status import OnlineStatus
from splitveil.common.run.contract import Contract
from splitveil.passive_party.predict.service import InferenceStatus
from tests.support.endpoints import Series, series_of, watched_run
from tests.support.markdown import ROOT
from tests.support.runs import write_example
from tests.support.tables import write_numbers

DEPLOY = ROOT / "deploy"
BOARD = DEPLOY / "grafana" / "splitveil.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
RULE_TESTS = DEPLOY / "prometheus" / "rules.test.yml"
OF_PROMETHEUS = {"up": {"instance", "job"}}
"""Series that Prometheus adds itself, with their labels."""
ADDED = {"instance", "job"}
"""Labels that it adds to every series."""
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset", "group_left"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


class Selector(NamedTuple):
    name: str
    labels: frozenset[str]


def selectors(expression: str) -> Iterator[Selector]:
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    text = re.sub(r"\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", text)
    for found in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\()?", text):
        name, after = found[1], found[2] or ""
        if after == "(" or name in WORDS or name in ("Inf", "NaN"):
            continue
        labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", after)
        yield Selector(name, frozenset(labels))


def grouped_by(expression: str) -> set[str]:
    lists = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    return {label.strip() for one in lists for label in one.split(",") if label.strip()}


def shown_by(template: str) -> set[str]:
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", template))


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return loaded


def targets() -> list[dict[str, str]]:
    """Return all queries of the board; a row that is closed has its panels inside."""
    rows = board()["panels"]
    panels = [*rows, *(panel for row in rows for panel in row.get("panels", ()))]
    return [target for panel in panels for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = sorted({one["expr"] for one in targets()} | {rule["expr"] for rule in rules()})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the metrics of both parties that train and serve: name -> names of labels."""
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    watched = watched_run(
        folder,
        tmp_path_factory.mktemp("watched"),
        "defense={name: marvell, strength: {power_ratio: 4}}",
        "run_budget={sum_kl: 1000, adversary: knows class means only}",
    )
    found: dict[str, set[str]] = {}
    contract = Contract(run_name="small", cut_shape=(4,), batch_size=8, epochs=3)
    # Those of serve exist before the first request (tests/system/test_served_status.py).
    serving = (OnlineStatus(contract), InferenceStatus("passive", contract))
    for one in serving:  # but for this one, which needs a thousand rows
        one.drift.labels("age").set(0.1)
    of_numbers = tmp_path_factory.mktemp("numbers")
    write_numbers(of_numbers, rows=300)
    shorter = ("contract.epochs=1",)
    numbers = watched_run(of_numbers, tmp_path_factory.mktemp("watched_numbers"), *shorter)
    series: Series = series_of(watched.active) | series_of(watched.passive)
    series |= series_of(numbers.active) | series_of(numbers.passive)
    for name, labels in (*series, *series_of(serving[0]), *series_of(serving[1])):
        found.setdefault(name, set()).update(dict(labels))
    return found | OF_PROMETHEUS


def test_the_board_opens_with_five_panels_and_closed_rows() -> None:
    first, *others = board()["panels"]
    assert not first["collapsed"]
    assert [panel["type"] for panel in others] == ["stat"] * 5 + ["row"] * (len(others) - 5)
    assert all(row["collapsed"] and row["panels"] for row in others[5:])


def test_every_query_reads_metrics_and_labels_that_a_run_exports(
    exported: dict[str, set[str]],
) -> None:
    for expression in EXPRESSIONS:
        used = list(selectors(expression))
        assert used
        assert {one.name for one in used} - exported.keys() == set()
        for one in used:
            assert one.labels - exported[one.name] - ADDED == set(), one.name
        known = ADDED.union(*(exported[one.name] for one in used))
        assert grouped_by(expression) - known == set(), expression
        texts = [one["legendFormat"] for one in targets() if one["expr"] == expression]
        texts += [
            text
            for rule in rules()
            if rule["expr"] == expression
            for text in rule["annotations"].values()
        ]
        assert set().union(*map(shown_by, texts)) - known == set(), expression


def test_every_alert_says_what_is_wrong_and_how_bad_and_is_seen_to_fire() -> None:
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    tests = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fires == {rule["alert"] for rule in rules()}


def test_the_board_shows_every_metric_of_the_run(exported: dict[str, set[str]]) -> None:
    """All but the constant one, whose labels choose what the board shows."""
    asked = {one.name for target in targets() for one in selectors(target["expr"])}
    own = {name for name in exported if name.startswith("splitveil_")}
    assert own - asked - {"splitveil_run_info"} == set()


def promtool(*words: str) -> str:
    done = subprocess.run(
        ["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_accepts_its_files_and_the_alerts_fire_as_their_tests_say() -> None:
    promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "rules.test.yml")


@needs_promtool
def test_prometheus_can_parse_every_query_of_the_board(tmp_path: Path) -> None:
    """A query is valid where a recording rule of it is; the board's variables are words."""
    texts = [one["expr"].replace("$instance", "here") for one in targets()]
    recorded = [{"record": f"board:{i}", "expr": text} for i, text in enumerate(texts)]
    file = tmp_path / "board.yml"
    group = {"name": "board", "rules": recorded}
    file.write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")
    assert f"{len(texts)} rules found" in promtool("check", "rules", str(file))
