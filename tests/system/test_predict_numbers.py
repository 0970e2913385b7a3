"""Predictions of labels that are numbers are in the label's unit, and those of the evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.active_party.predict.parts import Plan
from tests.joint import predicting, train
from tests.numbers import HIGH, LOW, write_numbers


@pytest.mark.parametrize("parties", [1, 2])
def test_predictions_are_those_of_the_evaluation_in_the_label_s_unit(
    tmp_path: Path, parties: int
) -> None:
    write_numbers(tmp_path / "settings", rows=300, parties=parties)
    trained = train(tmp_path / "settings", tmp_path / "runs", "contract.epochs=3")
    with predicting(trained) as predictor:
        found = predictor.predict(trained.test_ids)
    shares = torch.clamp(trained.test_logits + 0.5, 0, 1).numpy().astype(np.float64)
    np.testing.assert_array_equal(
        found.probabilities, (LOW + shares * (HIGH - LOW)).astype(np.float32)
    )
    assert found.probabilities.ndim == 1
    assert trained.test.number is not None


def test_the_output_has_a_column_of_values() -> None:
    schema = Plan("model", "", (), (LOW, HIGH)).schema()
    assert schema.names == ["id", "value", "found"]
