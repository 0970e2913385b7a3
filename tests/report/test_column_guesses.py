"""The ways in which columns are guessed, beside scikit-learn's."""

import numpy as np
import numpy.typing as npt
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.settings import PcaModel
from splitveil.passive_party.feature_exposure import Column, right_guesses

ROWS, KNOWN = 1500, 400


def test_columns_are_guessed_as_by_scikit_learn() -> None:
    """All guesses are the same but those within a rounding error: fewer than 1 in 100."""
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(ROWS, 3))
    sent = hidden @ generator.normal(size=(3, 20)) + generator.normal(size=(ROWS, 20))
    sent = (sent - sent.mean(axis=0)) / sent.std(axis=0)
    number = Column.of("number", "number", hidden[:, 0])
    category = Column.of("category", "category", np.round(2 * hidden[:, 1]).clip(-3, 3))
    found = right_guesses(sent, [number, category], KNOWN, has_network=False)
    for column, (by_means, by_vote, *rest) in zip((number, category), found, strict=True):
        known, asked = column.classes[:KNOWN], column.judged[KNOWN:]
        means = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=1e-6)
        vote = KNeighborsClassifier(15, weights=lambda far: 1 / (far + 1e-6))
        for model, ours in ((means, by_means), (vote, by_vote)):
            guessed = model.fit(sent[:KNOWN], known).predict(sent[KNOWN:])
            assert np.mean((column.judged_as[guessed] == asked) != ours) < 0.01
        assert len(rest) == (column is number)
        for ours in rest:
            predicted = Ridge(1e-6).fit(sent[:KNOWN], column.values[:KNOWN]).predict(sent[KNOWN:])
            nearest = np.abs(predicted[:, None] - column.values).argmin(axis=1)
            assert np.mean((column.classes[nearest] == asked) != ours) < 0.01


@pytest.mark.parametrize(
    ("width", "alone", "permuted", "at_mean"), [(1, 0.52, 0.68, 0.98), (4, 0.77, 0.87, 0.98)]
)
def test_a_second_copy_without_a_column_gives_the_column_away(
    width: int, alone: float, permuted: float, at_mean: float
) -> None:
    """Shares of quarters that are guessed right, which are .25 without anything that was sent.

    What a linear model sends of a row, less what it sends of the row without the column, is a
    function of the column alone, less its value at what stood there: the mean, or another row's
    value, whose part goes away in the mean over five permutations.
    """
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(2000, 8)) @ (np.eye(8) + 0.25)
    edges = np.quantile(numbers, np.linspace(0, 1, 17), axis=0).T
    places = [np.interp(x, at, np.arange(17)) for x, at in zip(numbers.T, edges, strict=True)]
    every = np.stack(places, axis=1).astype(np.float32)
    model = ComponentsBottom(PcaModel(kind="pca"), FeatureShapes(8, bins=(16,) * 8), (width,))
    model.fit(lambda: [Features(every)], is_final=True)

    def sent(first: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        changed = np.column_stack([first, every[:, 1:]]).astype(np.float32)
        return model(Features(changed)).astype(np.float64)

    own, column = sent(places[0]), Column.of("first", "number", places[0])
    orders = [generator.permutation(2000) for _ in range(5)]
    differences = own - np.mean([sent(places[0][order]) for order in orders], axis=0)

    def right(values: npt.NDArray[np.float64]) -> float:
        (found,) = right_guesses(values, [column], 1000, has_network=False)
        return max(float(one.mean()) for one in found)

    assert right(own) < alone
    assert right(np.hstack([own, differences])) > permuted
    assert right(own - sent(np.full(2000, 8.0))) > at_mean
