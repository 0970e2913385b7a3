"""The ways in which columns are guessed, beside scikit-learn's."""

import numpy as np
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

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
