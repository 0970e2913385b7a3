"""What a score explains of numbers beyond features: by features alone, by labels, and by both."""

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.monitor.row_covariates import MAX_GAP, RowCovariates
from splitveil.active_party.training.label_kinds import NumberLabels
from splitveil.common.data.settings import LabelRange
from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.number_attacks import (
    MIN_ROWS,
    adjusted_r2,
    measure_numbers_beyond_features,
)
from splitveil.common.run.course import Batch
from tests.support.equality import same, stored

ROWS = 3_000
NEAR_NOTHING = 0.01
"""Chance alone is 1 / ROWS on average and passes this in less than one of ten thousand draws; the
seeds are fixed, and what regressions miss of the features comes on top."""


def drawn(seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, what they explain of the labels, nine tenths, and the labels."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((ROWS, 6))
    explained = features[:, 0] + np.abs(features[:, 1]) + 0.5 * features[:, 2]
    explained /= explained.std()
    return features.astype(np.float32), explained, explained + generator.standard_normal(ROWS) / 3


def test_a_score_of_features_alone_explains_nothing_beyond_them() -> None:
    features, explained, labels = drawn()
    scores = explained + 0.2 * np.random.default_rng(2).standard_normal(ROWS)
    assert np.corrcoef(scores, labels)[0, 1] ** 2 > 0.8
    found = adjusted_r2(features, labels, scores)
    assert found.r2 < NEAR_NOTHING
    assert found.low <= found.r2 <= found.high


def test_a_score_that_knows_the_labels_explains_what_features_leave() -> None:
    """Score and label share half of the score's variance beyond features."""
    features, explained, labels = drawn()
    noise = np.random.default_rng(2).standard_normal(ROWS) / 3
    found = adjusted_r2(features, labels, labels + noise)
    assert found.r2 == pytest.approx(0.5, abs=0.06)
    assert found.low < found.r2 < found.high
    assert adjusted_r2(features, labels, labels).r2 == pytest.approx(1)
    assert adjusted_r2(features, labels, -7 * labels).r2 == pytest.approx(1)
    hidden = labels - explained
    assert np.corrcoef(explained - 2 * hidden, labels)[0, 1] ** 2 < 0.75
    assert adjusted_r2(features, labels, explained - 2 * hidden).r2 > 0.9


def test_the_interval_covers_the_true_share_as_often_as_it_says() -> None:
    """Of 60 tables without features to learn from, fewer than 50 would be less likely than .001."""
    covered = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        features = generator.standard_normal((400, 1)).astype(np.float32)
        labels = generator.standard_normal(400)
        scores = labels + generator.standard_normal(400)
        found = adjusted_r2(features, labels, scores)
        covered += found.low <= 0.5 <= found.high
    assert covered >= 50


def test_what_is_constant_or_known_in_full_has_no_figure() -> None:
    features, _, labels = drawn()
    assert adjusted_r2(features, labels, np.ones(ROWS)).r2 == 0
    assert np.isnan(adjusted_r2(features, np.ones(ROWS), labels).r2)
    with pytest.raises(ValueError, match=f"at least {MIN_ROWS} rows"):
        adjusted_r2(features[:9], labels[:9], labels[:9])


def test_scores_and_covariates_meet_at_their_positions() -> None:
    features, _, labels = drawn()
    nothing = features[:, :0]
    covariates = Covariates(2 * np.arange(ROWS), features, nothing, nothing, labels)
    positions = np.arange(1000, 4000)
    scores = np.random.default_rng(3).standard_normal(3000)
    scores[positions % 2 == 0] = labels[500:2000]
    few = RunScores(np.arange(40), np.zeros(40))
    found = measure_numbers_beyond_features(
        covariates, {"reads": RunScores(positions, scores), "few": few}
    )
    assert list(found) == ["reads"]
    assert found["reads"].r2 == pytest.approx(1)


# ---- what is kept of the rows

LABELS = torch.linspace(0, 1, 200)
NUMBERS = NumberLabels(LabelRange(low=0, high=1))


def visit(kept: RowCovariates, epoch: int, predictions: Tensor, value: float) -> None:
    rows = np.random.default_rng(epoch).permutation(200)
    chosen = torch.from_numpy(rows)
    activation = torch.full((200, 3), value)
    step = Step(labels=LABELS[chosen], probabilities=predictions[chosen], activation=activation)
    batch = Batch(epoch, "train", 0, rows, b"", closes_split=False, closes_epoch=False)
    kept.note_step(batch, step)
    kept.end_epoch(epoch)


def test_visits_count_while_training_labels_are_explained_no_better_than_held_out_ones() -> None:
    kept = RowCovariates(np.arange(200), 200, NUMBERS)
    mean = torch.full((200,), 0.5)
    half_way = 0.5 + (LABELS - 0.5) / 2  # an R2 of 3/4
    kept.note_held_out(0.0)
    for epoch in range(2):
        visit(kept, epoch, mean, float(epoch))
    visit(kept, 2, half_way, 2.0)
    found = kept.result()
    assert found is not None
    assert found.features[:, 0].tolist() == [1.0] * 200
    assert found.labels == pytest.approx(LABELS.numpy())
    kept.note_held_out(0.75 - MAX_GAP / 2)
    visit(kept, 3, half_way, 3.0)
    found = kept.result()
    assert found is not None
    assert found.features[:, 0].tolist() == [3.0] * 200
    assert found.features[:, 3] == pytest.approx(half_way.numpy(), abs=1e-3)
    other = RowCovariates(np.arange(200), 200, NUMBERS)
    other.load_state_dict(stored(kept.state_dict()))
    assert same(other.state_dict(), kept.state_dict())
