"""Predictions of a trained model, over mutual TLS, against the evaluation at the end of training.

Equality is of bits, on the CPU: of the probabilities that the last evaluation's logits give, asked
for together, one by one, and in another order.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from splitveil.active_party.training.predictions import probabilities_of
from tests.joint import Trained, predicting, train, write_wide_deep
from tests.several import write_several

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
SHORT = ("contract.epochs=2", "insecure_nonce_seed=4")


def trained_example(name: str, folder: Path) -> Trained:
    """Train one of the examples of this test, small ones or shipped ones with few epochs."""
    if name == "wide_deep":
        write_wide_deep(folder / name)
        return train(folder / name, folder / "runs")
    if name == "three_parties":
        write_several(folder / name)
        return train(folder / name, folder / "runs", "contract.aggregation=concat")
    return train(EXAMPLES / name, folder / "runs", *SHORT)


needs_data = pytest.mark.skipif(
    "SPLITVEIL_DATA" not in os.environ, reason="the environment names no folder of data"
)
NAMES = (
    "breast_cancer",
    "breast_cancer_two_labs",
    "digits",
    pytest.param("vehicle", marks=needs_data),
    "wide_deep",
    "three_parties",
)


@pytest.fixture(scope="module", params=NAMES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(str(request.param))
    return trained_example(str(request.param), folder)


def expected(trained: Trained) -> NDArray[np.float32]:
    """Return the probabilities of the last evaluation's logits.

    The values at the end of an odd number of values go through another sigmoid, which rounds
    otherwise: the logits are filled up.
    """
    logits = trained.test_logits
    filling = torch.zeros(-len(logits) % 64, *logits.shape[1:])
    return probabilities_of(torch.cat([logits, filling])).numpy()[: len(logits)]


def test_predictions_are_those_of_the_evaluation_at_the_end_of_training(trained: Trained) -> None:
    with predicting(trained) as predictor:
        together = [
            predictor.predict(trained.test_ids[at : at + predictor.max_ids])
            for at in range(0, len(trained.test_ids), predictor.max_ids)
        ]
        backwards = predictor.predict(trained.test_ids[:-51:-1])
        alone = [predictor.predict([one]) for one in trained.test_ids[:20]]
    found = np.concatenate([part.probabilities for part in together])
    np.testing.assert_array_equal(found, expected(trained))
    np.testing.assert_array_equal(backwards.probabilities[::-1], found[-50:])
    np.testing.assert_array_equal(np.concatenate([one.probabilities for one in alone]), found[:20])
    assert all(part.found.all() for part in together)
