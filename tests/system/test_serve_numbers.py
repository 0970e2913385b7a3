"""Predictions of labels that are numbers: values in the label's unit, never probabilities.

Equality is of bits, on the CPU, with the evaluation at the end of training.
"""

from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from splitveil.active_party.predict.batch import PredictionPlan
from splitveil.active_party.training.label_kinds import NumberLabels
from splitveil.common.data.settings import LabelRange
from tests.support import inference
from tests.support.inference import Trained, answering, asked, free_port, predicting, train
from tests.support.tables import HIGH, LOW, number_tables, write_numbers
from tests.support.waiting import wait_until

FALLBACK = "serving.fallback=true"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("numbers")
    write_numbers(folder / "settings", rows=400)
    return train(folder / "settings", folder / "runs", "contract.epochs=3", active=(FALLBACK,))


def evaluated(trained: Trained) -> NDArray[np.float32]:
    shares = np.clip(trained.test_logits.numpy() + np.float32(0.5), 0, 1).astype(np.float64)
    return (LOW + shares * (HIGH - LOW)).astype(np.float32)


def test_answers_have_the_bits_of_predict_and_of_the_evaluation(trained: Trained) -> None:
    ids = trained.test_ids[:50]
    with predicting(trained) as predictor:
        predicted = predictor.predict(ids).probabilities
    with asked(trained) as program:
        answer, nobody = program.ask([*ids, "nobody"]), program.ask(["nobody"])
        page = program.get("/openapi.json").body
    *known, unknown = answer.body["values"]
    np.testing.assert_array_equal(np.array(known, np.float32), evaluated(trained)[:50])
    np.testing.assert_array_equal(np.array(known, np.float32), predicted)
    assert unknown is None
    assert nobody.status == 404
    described = page["components"]["schemas"]
    fields = {"values", "found", "model", "run_id", "why_fallback"}
    assert fields == set(answer.body) == set(nobody.body)
    assert fields == set(described["NumberReply"]["properties"])
    assert "PredictReply" not in described
    answers = page["paths"]["/predict"]["post"]["responses"]
    for status in ("200", "404"):
        schema = answers[status]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith("/NumberReply")


def test_the_fallback_answers_in_the_label_s_unit(trained: Trained) -> None:
    ids, port = trained.test_ids, free_port()
    with ExitStack() as resources:
        with inference.serving_passive(trained.passive("passive"), port):
            program = resources.enter_context(answering(trained, FALLBACK, ports={"passive": port}))
            joined = program.ask(ids)
        wait_until(lambda: program.get("/readyz").body["model"] == "fallback")
        alone = program.ask(ids)
    assert set(joined.body["model"]) == {"joint"}
    assert set(alone.body["model"]) == {"fallback"}
    values = np.array(alone.body["values"], np.float32)
    labels = number_tables(400)[0]["amount"]
    errors = values - labels[[int(row) - 1 for row in ids]]
    assert trained.alone is not None
    assert trained.alone.rmse is not None
    assert np.sqrt(np.square(errors).mean()) == pytest.approx(trained.alone.rmse, rel=1e-4)


def test_the_output_has_a_column_of_values() -> None:
    plan = PredictionPlan("model", "", NumberLabels(LabelRange(low=LOW, high=HIGH)))
    schema = plan.schema(pa.schema({"id": pa.string()}))
    assert schema.names == ["id", "canonical_id", "value", "found"]
