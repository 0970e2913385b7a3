"""Drift after going live: the index, its windows, and what both parties' ``serve`` show of it."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Gauge
from pyarrow import parquet

from splitveil import Run, simulate
from splitveil.active_party.http.batcher import IdQuestion
from splitveil.active_party.http.programs import RateLimit
from splitveil.active_party.http.service import AnswerService, PendingReply, Rules
from splitveil.active_party.http.status import Call, OnlineStatus
from splitveil.active_party.predict.predictor import JointModel, Predictions
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import by_score, read_predictions
from splitveil.common.party.drift import Drift, reference_bins, stability_index
from splitveil.library.trained import settings_of
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.predict.service import InferenceStatus
from splitveil.passive_party.settings import PassiveSettings
from tests.support.endpoints import series_of
from tests.support.records import known

UNIFORM = np.arange(1000) / 1000
SCORES = ("splitveil_score_psi", (("score", "0"),))


def watching(values: NDArray[Any]) -> tuple[Drift, Callable[[], float | None]]:
    """Return a watch over one column, and a function that says what the gauge shows."""
    registry = CollectorRegistry()
    gauge = Gauge("psi", "", ["column"], registry=registry)
    drift = Drift(reference_bins({"x": values}), lambda rows: {"x": rows}, gauge, "rows")
    return drift, lambda: registry.get_sample_value("psi", {"column": "x"})


def test_the_index_is_that_of_a_calculation_by_hand() -> None:
    """Of shares .5 and .5, then .7 and .3: .2 ln 1.4 - .2 ln .6 = .0673 + .1022."""
    then = np.array([0.5, 0.5])
    assert stability_index(np.array([0.7, 0.3]), then) == pytest.approx(0.16946, abs=1e-5)
    assert stability_index(then, then) == 0
    # All rows in two of ten bins: 2 (.4 ln 5) + 8 (.0999 ln 1000), an empty one counting as 1e-4.
    drift, shown = watching(UNIFORM)
    drift.note(0.8 + UNIFORM / 5.001)
    assert shown() == pytest.approx(6.8083, abs=1e-3)


def test_the_same_rows_have_an_index_of_0_and_nothing_is_shown_before_a_thousand() -> None:
    drift, shown = watching(UNIFORM)
    drift.note(UNIFORM[:999])
    assert shown() is None
    drift.note(UNIFORM[999:])
    assert shown() == pytest.approx(0, abs=1e-12)
    drift.note(UNIFORM[500:])  # begins another thousand
    assert shown() == pytest.approx(0, abs=1e-12)
    drift.note(UNIFORM[500:])
    assert known(shown()) > 0.25


@pytest.mark.parametrize("values", [[0.0, 1.0] * 500, [3.0] * 1000, UNIFORM.astype(np.float32)])
def test_values_that_repeat_fall_into_the_bins_that_they_had(values: Sequence[float]) -> None:
    drift, shown = watching(np.array(values))
    drift.note(np.array(values))
    assert shown() == pytest.approx(0, abs=1e-12)
    drift.note(np.full(1000, 7.0))
    assert known(shown()) > 0.25


def test_a_warning_comes_once_a_window_and_holds_no_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drift, _ = watching(UNIFORM)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            drift.note(np.full(100, 0.123456))
    assert len(caplog.messages) == 2
    told = "drift: the last 1,000 rows differ from those of the run (PSI "
    assert all(one.startswith(told) and "0.123" not in one for one in caplog.messages)


def test_of_several_classes_the_one_whose_probabilities_moved_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scores = np.random.default_rng(6).random((1000, 3), np.float32)
    then = by_score(scores)
    assert [then[name].tolist() for name in ("0", "1", "2")] == scores.T.tolist()
    assert by_score(scores[:, 0]).keys() == {"0"}
    gauge = Gauge("psi", "", ["score"], registry=CollectorRegistry())
    drift = Drift(reference_bins(then), by_score, gauge, "predictions")
    with caplog.at_level(logging.WARNING):
        for moved in (1, 2):
            now = scores.copy()
            now[:, moved] **= 3
            drift.note(now)
            (shown,) = (one for family in gauge.collect() for one in family.samples)
            assert shown.labels == {"score": str(moved)}
            assert shown.value > 0.25
    told = "drift: the last 1,000 predictions differ from those of the run, most in {} (PSI "
    assert len(caplog.messages) == 2
    assert all(one.startswith(told.format(k)) for k, one in enumerate(caplog.messages, 1))


def test_too_few_rows_of_the_run_are_no_reference() -> None:
    drift, shown = watching(UNIFORM[:199])
    drift.note(UNIFORM)
    assert shown() is None
    assert reference_bins({"x": UNIFORM[:199]}) == {}


def psi_of(status: InferenceStatus) -> dict[str, float]:
    return {
        dict(labels)["column"]: value
        for (name, labels), value in series_of(status).items()
        if name == "splitveil_column_psi"
    }


def answering(drift: Drift) -> AnswerService:
    """Return a service whose fallback model predicts 1/2 for all ids."""
    nothing: Any = None
    predictor: Any = SimpleNamespace(model=SimpleNamespace(shape_of_row=()))
    fallback: Any = SimpleNamespace(
        predict=lambda _question, left: Predictions(
            np.full(len(left), 0.5, np.float32), np.ones(len(left), np.bool_), {}
        )
    )
    rules = Rules(1000, 1.0, None, RateLimit(None))
    service = AnswerService(predictor, nothing, nothing, nothing, rules, nothing, fallback)
    service.drift = drift
    return service


def answer(service: AnswerService, scores: NDArray[np.float32]) -> None:
    """Let a service give out scores, the fallback model's for as many ids, and none for one."""
    found = np.arange(2 * len(scores)) % 2 == 0
    values = np.full(len(found), np.nan, np.float32)
    values[found] = scores
    joint: Future[Predictions] = Future()
    joint.set_result(Predictions(values, found, {}))
    ids = [str(one) for one in range(len(found))]
    is_allowed = np.append(np.ones(len(ids), np.bool_), False)
    pending = PendingReply(IdQuestion(ids), len(is_allowed), is_allowed, joint, None)
    served = service.finish(Call("program"), pending)
    assert all(served.models.count(one) == len(scores) for one in ("joint", "fallback"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(3)
    columns, ids = rng.normal(size=(2000, 2)), range(2000)
    runs = simulate(
        active={"id": ids, "y": (columns[:, 0] > 0).astype(int)},
        passive={
            "id": ids,
            "a": columns[:, 0],
            "city": [f"c{int(abs(b) * 2)}" for b in columns[:, 1]],
        },
        label="y",
        key="id",
        settings={"contract.exchange": "one_shot", "passive.bottom_model": {"kind": "pca"}},
        runs=tmp_path_factory.mktemp("runs"),
        threads=1,
    )
    return runs[0]


def test_the_feature_owner_names_the_column_that_differs_most(run: Run, tmp_path: Path) -> None:
    """The rows of the run differ by chance; of a table with another unit, that column is named."""
    settings = settings_of(PassiveSettings, run.path / "passive", run.base_dir, "party=passive")
    ids = [str(one) for one in range(1000)]
    own = parquet.read_table(next(run.base_dir.rglob("passive*.parquet")))
    cents = own.set_column(own.column_names.index("a"), "a", pc.multiply(own.column("a"), 100))
    parquet.write_table(cents, tmp_path / "cents.parquet")
    for table, (least, most) in ((None, (0, 0.05)), (tmp_path / "cents.parquet", (0.5, 10))):
        status = InferenceStatus("passive", settings.contract)
        model = ServedModel.load(settings, torch.device("cpu"), table)
        model.drift = Drift(model.metadata, model.rows.by_column, status.drift, "rows")
        model.embed(ids[:999])
        model.embed(["nobody"])  # has no values
        assert psi_of(status) == {}
        model.embed(ids[999:])
        ((column, index),) = psi_of(status).items()
        assert least < index < most
        assert table is None or column == "a"


def test_the_label_owner_compares_the_scores_that_it_gives_out(run: Run) -> None:
    settings = settings_of(ActiveSettings, run.path / "active", run.base_dir)
    stored, status = read_predictions(run.path / "active"), OnlineStatus(settings.contract)
    assert stored is not None
    scores = (1 / (1 + np.exp(-stored.logits))).astype(np.float32)  # of the test rows
    metadata = JointModel.load(settings, torch.device("cpu")).metadata
    drift = Drift(metadata, by_score, status.drift, "predictions")
    service = answering(drift)
    answer(service, np.resize(scores, 999))
    assert SCORES not in series_of(status)
    answer(service, scores[:1])
    assert series_of(status)[SCORES] < 0.02
    answer(service, np.resize(np.sort(scores)[len(scores) // 2 :], 1000))
    assert series_of(status)[SCORES] > 0.5
