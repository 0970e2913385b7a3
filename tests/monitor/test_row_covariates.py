"""What the monitor keeps of each row to predict its label, and the latest scores of attacks."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.monitor.row_covariates import (
    MAX_GAP,
    MAX_ROWS,
    MAX_VALUES,
    RowCovariates,
)
from splitveil.active_party.training.label_kinds import ClassLabels
from splitveil.common.data.features import Features
from splitveil.common.privacy.accumulation import LatestScores
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.observation import AttackScores
from splitveil.common.run.course import Batch
from tests.support.equality import same, stored

ROWS = 200
LABELS = torch.arange(ROWS) % 2


def batch_of(positions: NDArray[np.int64], epoch: int = 0) -> Batch:
    return Batch(epoch, "train", 0, positions, b"", closes_split=False, closes_epoch=False)


def step(rows: NDArray[np.int64], activation: Tensor, probabilities: Tensor) -> Step:
    return Step(
        labels=LABELS[torch.from_numpy(rows % ROWS)].float(),
        probabilities=probabilities,
        activation=activation,
    )


def visit(kept: RowCovariates, epoch: int, probabilities: Tensor, value: float) -> None:
    order = np.random.default_rng(epoch).permutation(ROWS)
    for rows in np.split(order, 2):
        seen = step(rows, torch.full((len(rows), 3), value), probabilities[torch.from_numpy(rows)])
        kept.note_step(batch_of(rows, epoch), seen)
    kept.end_epoch(epoch)


def found(kept: RowCovariates) -> Covariates:
    result = kept.result()
    assert result is not None
    return result


def knowing(certainty: float) -> Tensor:
    """Return predictions of which so many know the label, and the others nothing."""
    knows = torch.arange(ROWS) < certainty * ROWS
    return torch.where(knows, LABELS * 0.8 + 0.1, torch.full((ROWS,), 0.5))


def test_the_last_visit_of_each_row_is_kept_with_the_mean_of_its_predictions() -> None:
    kept = RowCovariates(np.arange(ROWS), ROWS, ClassLabels())
    visit(kept, 0, torch.full((ROWS,), 0.5), value=1.0)
    visit(kept, 1, torch.full((ROWS,), 0.75), value=2.0)
    result = found(kept)
    assert (result.positions == np.arange(ROWS)).all()
    assert (result.labels == LABELS.numpy()).all()
    assert (result.activations == 2.0).all()
    logit = np.log(3)
    assert result.predictions == pytest.approx(np.tile([logit, logit / 2], (ROWS, 1)), abs=1e-3)


def test_visits_of_a_model_that_has_memorised_labels_do_not_count_after_two_epochs() -> None:
    """It knows a tenth of them, which makes its AUC .05 larger than that of held-out rows."""
    kept = RowCovariates(np.arange(ROWS), ROWS, ClassLabels())
    # In the first epoch no row that is predicted was seen, in the second one each once: whatever
    # held-out rows say, both count.
    for epoch in range(3):
        visit(kept, epoch, knowing(1.0), value=float(epoch))
    assert (found(kept).activations == 1.0).all()
    kept.note_held_out(0.5 + 0.1 - MAX_GAP)  # held-out rows are known as well: that is no memory
    visit(kept, 3, knowing(0.1), value=3.0)
    assert (found(kept).activations == 3.0).all()
    kept.note_held_out(0.5)
    visit(kept, 4, knowing(0.1), value=4.0)
    assert (found(kept).activations == 3.0).all()


def test_before_the_end_of_the_first_epoch_the_rows_visited_are_known() -> None:
    kept = RowCovariates(np.arange(50, ROWS), ROWS, ClassLabels())
    assert kept.result() is None
    rows = np.array([150, 60, 3])
    kept.note_step(batch_of(rows), step(rows, torch.ones(3, 2), torch.full((3,), 0.5)))
    assert (found(kept).positions == [60, 150]).all()


def test_what_is_kept_is_finite_whatever_a_peer_sends() -> None:
    kept = RowCovariates(np.arange(ROWS), ROWS, ClassLabels())
    rows = np.arange(4)
    huge = torch.tensor([[1e30, -1e30], [0.0, 1e-40], [6e4, 1.0], [3e38, -3e38]])
    kept.note_step(batch_of(rows), step(rows, huge, torch.tensor([0.0, 1.0, torch.nan, 1e-30])))
    result = found(kept)
    assert np.isfinite(result.activations).all()
    assert np.isfinite(result.predictions).all()


def test_memory_is_bounded() -> None:
    rows = np.arange(3 * MAX_ROWS)
    kept = RowCovariates(rows, len(rows), ClassLabels())
    seen = step(rows, torch.ones(len(rows), 4, 20), torch.full((len(rows),), 0.5))
    kept.note_step(batch_of(rows), seen)
    assert found(kept).activations.shape == (MAX_ROWS, MAX_VALUES)
    assert len(RowCovariates(rows, len(rows), ClassLabels(10))._positions) == MAX_ROWS // 5


def test_several_classes_have_a_prediction_each() -> None:
    kept = RowCovariates(np.arange(ROWS), ROWS, ClassLabels(3))
    shares = torch.tensor([0.5, 0.3, 0.2]).expand(ROWS, 3)
    visit(kept, 0, shares, value=1.0)
    assert found(kept).predictions == pytest.approx(np.log([[0.5, 0.3, 0.2] * 2] * ROWS), abs=1e-3)


def test_own_features_are_kept_as_numbers_and_slots() -> None:
    kept = RowCovariates(np.arange(2, 6), 6, ClassLabels())
    rows = np.array([4, 0, 2])
    own = Features(torch.tensor([[4.5], [0.5], [2.5]]), torch.tensor([[4, 40], [0, 10], [2, 20]]))
    seen = step(rows, torch.zeros(3, 2), torch.full((3,), 0.5))
    kept.note_step(batch_of(rows), dataclasses.replace(seen, own=own))
    assert found(kept).own.tolist() == [[2.5, 2.0, 20.0], [4.5, 4.0, 40.0]]
    image = Features(image=torch.zeros(3, 1, 2, 2))
    kept.note_step(batch_of(rows), dataclasses.replace(seen, own=image))
    assert found(kept).own.shape == (2, 3)


def test_a_state_brings_everything_back() -> None:
    kept, other = (RowCovariates(np.arange(ROWS), ROWS, ClassLabels()) for _ in range(2))
    kept.note_held_out(0.75)
    visit(kept, 0, knowing(0.2), value=1.0)
    rows = np.arange(9)
    kept.note_step(batch_of(rows, 1), step(rows, torch.zeros(9, 3), torch.full((9,), 0.25)))
    state = stored(kept.state_dict())
    visit(kept, 1, knowing(0.3), value=5.0)
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    visit(other, 1, knowing(0.3), value=5.0)
    assert same(other.state_dict(), kept.state_dict())


def test_looking_within_an_epoch_changes_nothing() -> None:
    """Predictions are summed up when somebody looks: each of them once."""
    kept, watched = (RowCovariates(np.arange(ROWS), ROWS, ClassLabels()) for _ in range(2))
    for covariates in (kept, watched):
        covariates.note_held_out(0.5)
    for epoch in range(3):
        for rows in np.split(np.random.default_rng(epoch).permutation(ROWS), 4):
            predictions = torch.full((len(rows),), 0.2 + 0.1 * epoch)
            seen = step(rows, torch.full((len(rows), 3), float(epoch)), predictions)
            kept.note_step(batch_of(rows, epoch), seen)
            watched.note_step(batch_of(rows, epoch), seen)
            assert watched.result() is not None
            watched.state_dict()
        kept.end_epoch(epoch)
        watched.end_epoch(epoch)
    assert same(kept.state_dict(), watched.state_dict())


def scores_of(*values: list[float] | None, known: tuple[int, ...] = ()) -> AttackScores:
    by_target = [None if one is None else torch.tensor(one).double() for one in values]
    return AttackScores(by_target, [known] * len(values))


def test_a_later_score_replaces_an_earlier_one_and_known_rows_have_none() -> None:
    kept = LatestScores(["norm", "cosine"], num_examples=9)
    kept.add(torch.tensor([1, 3, 5]), {"norm": scores_of([0.0, 1.0, 2.0])})
    kept.add(torch.tensor([5, 7]), {"norm": scores_of([0.0, 4.0], known=(1,))})
    (result,) = kept.result()["norm"]
    assert result.positions.tolist() == [1, 3, 5]
    assert result.scores == pytest.approx([-np.sqrt(1.5), 0.0, -1.0], abs=1e-3)
    assert "cosine" not in kept.result()
    again = LatestScores(["norm"], num_examples=9)
    again.load_state_dict(stored(kept.state_dict()))
    assert same(again.state_dict(), kept.state_dict())
    for other in (LatestScores(["cosine"], 9), LatestScores(["norm"], 5)):
        with pytest.raises(ValueError, match="expected scores of"):
            other.load_state_dict(kept.state_dict())


def test_a_target_without_scores_keeps_what_it_had() -> None:
    kept = LatestScores(["cosine"], num_examples=4)
    kept.add(torch.tensor([0, 1]), {"cosine": scores_of([0.0, 1.0], [1.0, 0.0])})
    kept.add(torch.tensor([1, 0]), {"cosine": scores_of([0.0, 1.0], None)})
    assert [one.scores.tolist() for one in kept.result()["cosine"]] == [[1.0, -1.0], [1.0, -1.0]]
    assert sum(scores.nbytes for scores in kept._scores.values()) == 2 * 4 * 2
