"""Predictions of many ids in parts: what is kept, what is done again, and what is refused."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pyarrow import parquet

from splitveil.active_party.inference import parts as parts_module
from splitveil.active_party.inference.batch import BatchPrediction, check_lengths
from splitveil.active_party.inference.parts import Parts, Plan, digest_of_ids
from splitveil.active_party.inference.predictor import Predictor
from splitveil.common.errors import (
    DataError,
    Interrupted,
    PeerUnreachable,
    SettingsError,
    StorageError,
)
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.storage.table_output import check_output
from splitveil.passive_party.inference.service import InferenceService
from tests.joint import Trained, predicting, train, write_wide_deep

IMPATIENT = ReconnectSettings(max_s=0.3, first_wait_s=0.05)
PATIENT = ReconnectSettings(max_s=300, first_wait_s=0.01, longest_wait_s=0.01)
REQUEST = 20
PART = 100


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("small")
    write_wide_deep(folder)
    return train(folder, folder / "runs")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_ROWS", PART)
    monkeypatch.setattr(Predictor, "max_ids", property(lambda _: REQUEST))


IDS = [f"row-{number:04d}" for number in range(480)] + ["nobody"] * 5


def plan(model: str = "one") -> Plan:
    return Plan(digest_of_ids(IDS), len(IDS), model, "", ())


def predict(
    predictor: Predictor,
    output: Path,
    *,
    reconnect: ReconnectSettings = IMPATIENT,
    interruption: Interruption | None = None,
    model: str = "one",
) -> list[int]:
    """Predict all ids, and return the reported progress."""
    contract = predictor.clients[0].connection.contract
    batch = BatchPrediction(predictor, contract, reconnect, interruption or Interruption())
    reported: list[int] = []
    batch.run(IDS, Parts(output, plan(model)), reported.append)
    return reported


def column(path: Path) -> NDArray[Any]:
    return np.asarray(parquet.read_table(path).column("probability").to_numpy())


@pytest.fixture(scope="module")
def undisturbed(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> NDArray[Any]:
    output = tmp_path_factory.mktemp("undisturbed") / "all.parquet"
    with predicting(trained) as predictor:
        predict(predictor, output)
    found = column(output)
    assert np.isnan(found).sum() == 5
    return found


def failing_after(requests: int, monkeypatch: pytest.MonkeyPatch, *, times: int = 10**6) -> None:
    """Let the passive party lose its connections after a number of requests, a number of times."""
    reply: Callable[..., Any] = InferenceService._reply
    seen, failed = [0], [0]

    def failing(self: InferenceService, request: Any, context: Any) -> Any:
        seen[0] += 1
        if seen[0] > requests and failed[0] < times:
            failed[0] += 1
            context.cancel()
            return None
        return reply(self, request, context)

    monkeypatch.setattr(InferenceService, "_reply", failing)


def test_a_lost_connection_is_opened_again_and_changes_no_bit(
    trained: Trained, undisturbed: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_after(7, monkeypatch, times=3)
    output = tmp_path / "all.parquet"
    with predicting(trained) as predictor:
        reported = predict(predictor, output, reconnect=PATIENT)
    np.testing.assert_array_equal(column(output), undisturbed)
    assert sum(reported) == len(IDS)


def test_a_prediction_that_broke_off_goes_on_with_its_finished_parts(
    trained: Trained, undisturbed: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "all.parquet"
    with monkeypatch.context() as patch:
        failing_after(2 * PART // REQUEST + 3, patch)
        with predicting(trained) as predictor, pytest.raises(PeerUnreachable, match="max_s"):
            predict(predictor, output)
    kept = sorted(path.name for path in (tmp_path / "all.parquet.parts").iterdir())
    assert kept == ["part-00000000.parquet", "part-00000001.parquet", "plan.json"]
    assert not output.exists()
    with predicting(trained) as predictor:
        reported = predict(predictor, output)
    assert reported[0] == 2 * PART
    np.testing.assert_array_equal(column(output), undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet"]
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def test_parts_of_another_prediction_are_not_used(trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "all.parquet"
    other = Parts(output, plan("another model"))
    found = np.zeros(PART, np.float32)
    other.write(0, IDS[:PART], found, np.ones(PART, np.bool_))
    with predicting(trained) as predictor:
        assert predict(predictor, output)[0] == 0
    assert (column(output)[:PART] != 0).any()


def test_a_signal_stops_between_two_questions(trained: Trained, tmp_path: Path) -> None:
    interruption = Interruption()
    output = tmp_path / "all.parquet"
    with predicting(trained) as predictor:
        contract = predictor.clients[0].connection.contract
        batch = BatchPrediction(predictor, contract, IMPATIENT, interruption)
        done = 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            if done >= PART:
                interruption.signal_number = 15

        with pytest.raises(Interrupted):
            batch.run(IDS, Parts(output, plan()), advance)
    assert not output.exists()
    assert done < 2 * PART


def test_nothing_is_asked_for_a_prediction_that_is_finished_but_for_its_output(
    trained: Trained, undisturbed: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a full disk: all parts are there."""
    output = tmp_path / "all.parquet"

    def full(_: Parts) -> None:
        raise StorageError("full")

    with predicting(trained) as predictor:
        with monkeypatch.context() as patch:
            patch.setattr(Parts, "join", full)
            with pytest.raises(StorageError):
                predict(predictor, output)
        failing_after(0, monkeypatch)
        assert predict(predictor, output) == [len(IDS)]
    np.testing.assert_array_equal(column(output), undisturbed)


def test_a_damaged_plan_starts_over(tmp_path: Path) -> None:
    output = tmp_path / "all.parquet"
    found = np.zeros(PART, np.float32)
    Parts(output, plan()).write(0, IDS[:PART], found, np.ones(PART, np.bool_))
    assert next(iter(Parts(output, plan()).missing())).start == PART
    (tmp_path / "all.parquet.parts" / "plan.json").write_text(json.dumps({"classes": 7})[:-1])
    assert next(iter(Parts(output, plan()).missing())).start == 0


def test_several_classes_have_a_column_each(tmp_path: Path) -> None:
    three = Plan("digest", 2, "one", "", ("bus", "van", "car"))
    parts = Parts(tmp_path / "all.csv", three)
    values = np.array([[0.25, 0.25, 0.5], [np.nan] * 3], np.float32)
    parts.write(0, ["a", "b"], values, np.array([True, False]))
    parts.join()
    assert (tmp_path / "all.csv").read_text().splitlines() == [
        '"id","probability_bus","probability_van","probability_car","found"',
        '"a",0.25,0.25,0.5,true',
        '"b",,,,false',
    ]


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_asked(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError, match=r"\.parquet or \.csv"):
        check_output(tmp_path / "all.txt")
    with pytest.raises(SettingsError, match="no folder"):
        check_output(tmp_path / "absent" / "all.csv")


def test_ids_too_long_for_a_message_are_counted_and_not_quoted() -> None:
    check_lengths(["x" * 1024, "ä" * 512], "ids.txt")
    with pytest.raises(DataError, match=r"ids\.txt: 2 ids have more than 1,024 bytes"):
        check_lengths(["x" * 1025, "ä" * 513, "short"], "ids.txt")
