"""Strengths that follow from a guaranteed leak AUC: the drawn labels tell exactly that much."""

import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.interface import DefenseContext
from splitveil.active_party.defenses.iso import IsoDefense
from splitveil.active_party.defenses.label_mechanisms import (
    AlibiLabels,
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
    at_leak_auc,
    draw_noisy_labels,
    evidence,
)
from splitveil.active_party.defenses.marvell import MarvellDefense
from splitveil.active_party.defenses.noisy_label import NoisyLabelDefense
from splitveil.active_party.defenses.projected_labels import ProjectedLabelsDefense

ROWS = 60_000


@pytest.mark.parametrize(
    "mechanism",
    [
        GaussianLabels(kind="gaussian"),
        LaplaceLabels(kind="laplace", epsilon=1),
        RandomizedResponse(kind="randomized_response", epsilon=1),
        AlibiLabels(kind="alibi", epsilon=1),
    ],
    ids=lambda mechanism: mechanism.kind,
)
@pytest.mark.parametrize("leak_auc", [0.55, 0.8])
def test_the_best_score_of_drawn_labels_reaches_the_guarantee(
    mechanism: LabelMechanism, leak_auc: float
) -> None:
    """Within .01, four standard errors; rejects a guarantee that is .02 higher or lower."""
    found = at_leak_auc(mechanism, leak_auc)
    labels = (torch.arange(ROWS) % 2).float()
    key, ids = key_from_insecure_seed(5), [str(row) for row in range(ROWS)]
    scores = evidence(found, draw_noisy_labels(found, labels, key, ids))
    reached = roc_auc_score(labels.numpy(), scores.double().numpy())
    assert abs(reached - leak_auc) < 0.01


def test_settings_keep_everything_but_their_strength() -> None:
    context = DefenseContext((4,), epochs=30)
    projected = ProjectedLabelsDefense(rank=9).at_leak_auc(0.55, context)
    assert projected.rank == 9
    assert projected.strength.of_run == pytest.approx(math.sqrt(2) * stats.norm.ppf(0.55))
    noisy = NoisyLabelDefense(mechanism=LaplaceLabels(kind="laplace", epsilon=3, posterior="model"))
    found = noisy.at_leak_auc(0.55, context)
    assert found is not None
    assert isinstance(found.mechanism, LaplaceLabels)
    assert found.mechanism.posterior == "model"
    assert found.mechanism.epsilon < 0.5


@pytest.mark.parametrize(
    "settings", [MarvellDefense(), IsoDefense(), NoisyLabelDefense(top_labels="true")]
)
def test_no_strength_is_found_where_none_holds_against_everybody(
    settings: MarvellDefense | IsoDefense | NoisyLabelDefense,
) -> None:
    assert settings.at_leak_auc(0.6, DefenseContext((4,))) is None
