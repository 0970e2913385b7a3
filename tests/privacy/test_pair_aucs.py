"""AUCs of several classes against scikit-learn's, and against the definition."""

from itertools import permutations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from splitveil.common.privacy.leakage import OneClass, pair_aucs


def problem(seed: int, *, ties: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scores of which classes have different means, and which may be tied."""
    generator = np.random.default_rng(seed)
    places = generator.choice(4, size=300, p=[0.5, 0.3, 0.15, 0.05])
    scores = generator.normal(size=300) + np.array([0.0, 0.3, -0.4, 1.0])[places]
    return (np.round(scores * 2) if ties else scores), places


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_pair_and_every_class_is_that_of_scikit_learn(seed: int, ties: bool) -> None:
    scores, places = problem(seed, ties=ties)
    found = pair_aucs(scores, places, 4)
    for i, j in permutations(range(4), 2):
        of_pair = (places == i) | (places == j)
        expected = roc_auc_score(places[of_pair] == i, scores[of_pair])
        assert found.pairs[i, j] == pytest.approx(expected, abs=1e-12)
    for i in range(4):
        assert found.one_vs_rest[i] == pytest.approx(roc_auc_score(places == i, scores), abs=1e-12)


def test_the_score_of_one_class_is_measured_for_that_class_alone() -> None:
    scores, places = problem(7, ties=True)
    found, of_one = pair_aucs(scores, places, 4), pair_aucs(scores, places, 4, of_class=2)
    assert np.array_equal(of_one.pairs[2], found.pairs[2], equal_nan=True)
    assert of_one.one_vs_rest[2] == found.one_vs_rest[2]
    others = [0, 1, 3]
    assert np.isnan(of_one.pairs[others]).all()
    assert np.isnan(of_one.one_vs_rest[others]).all()


def test_the_worst_pair_is_found_whichever_way_its_scores_point() -> None:
    scores = np.array([0.0, 1.0, 5.0, 6.0, -3.0, 2.0, -4.0, 3.0])
    places = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    assert pair_aucs(scores, places, 4).worst_pair() == (0, 1)
    assert pair_aucs(-scores, places, 4).worst() == 1.0


def test_a_class_without_examples_has_no_auc_and_disturbs_no_other() -> None:
    scores, places = problem(6, ties=False)
    found, more = pair_aucs(scores, places, 4), pair_aucs(scores, places, 6)
    assert np.array_equal(more.pairs[:4, :4], found.pairs, equal_nan=True)
    assert np.isnan(more.pairs[4:]).all()
    assert np.isnan(more.one_vs_rest[4:]).all()
    assert more.worst_pair() == found.worst_pair()
    with pytest.raises(OneClass):
        pair_aucs(scores, np.zeros(300, dtype=np.int64), 4).worst_pair()


@pytest.mark.parametrize(
    ("scores", "places"), [(np.array([np.nan, 1.0]), [0, 1]), (np.zeros(3), [0, 1])]
)
def test_impossible_scores_are_refused(scores: np.ndarray, places: list[int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        pair_aucs(scores, np.array(places), 2)
