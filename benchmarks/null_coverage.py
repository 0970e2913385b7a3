"""Do the intervals of the feature-adjusted leak AUC cover the truth?

    OMP_NUM_THREADS=1 python -m benchmarks.null_coverage [--rows 500 2000] [--repetitions 100]

Draws tables whose features decide labels with known probabilities, and scores whose AUC among rows
of the same features is known: some are functions of features, of other rows' labels or of noise
(1/2), others contain the row's own label. Prints Markdown: for each score the share of the 95 %
intervals that cover the truth, and the mean figure, which is above 1/2 for a score that knows
nothing because an inverted one counts as well; and the intervals' mean width.
"""

import argparse
import functools
import warnings
from collections.abc import Iterator

import numpy as np
from scipy.special import expit
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.tree import DecisionTreeClassifier

from benchmarks.environment import print_environment
from splitveil.common.privacy.adjusted_auc import Mask
from splitveil.common.privacy.beyond_features import adjusted_leak
from splitveil.common.privacy.cross_fitting import FeatureModels, TooFewRows
from splitveil.common.privacy.leakage import Floats
from splitveil.common.privacy.observational_audit import ScoredRows

NUM_FEATURES = 8
KINDS = ((0.65, 0.5), (0.95, 0.5), (0.99, 0.5), (0.65, 0.05), (0.95, 0.05), (0.99, 0.05))
"""AUC of the features, and share of positives."""

SCORES = (
    *("probability", "function", "overfitted", "epochs"),
    *("label, .6", "label, .75", "label, 1"),
    *("+ 2 log-odds, .6", "+ 2 feature, .6", "+ 2 log-odds, .75", "+ 2 feature, .75"),
)
"""The labels' true probability; a smooth function of features; a tree fitted to other rows' labels;
a sum of predictions over five epochs; labels of which a share is right; labels with noise and twice
the standardised log-odds, or a feature."""
TRUTHS = (0.5, 0.5, 0.5, 0.5, 0.6, 0.75, 1.0, 0.6, 0.6, 0.75, 0.75)
"""Their AUC among rows of the same features."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[500, 2_000, 20_000])
    parser.add_argument("--repetitions", type=int, default=100)
    given = parser.parse_args()
    print_environment()
    header = ("rows", "features' AUC", "positives", *SCORES, "width")
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for rows in given.rows:
        for auc, share in KINDS:
            repeated = [measured(rows, auc, share, seed) for seed in range(given.repetitions)]
            figures = np.array([one for one in repeated if one])  # repetition, score, figure
            values, lows, highs, truths = np.moveaxis(figures, 2, 0)
            covered = ((lows <= truths) & (truths <= highs)).mean(axis=0)
            of_scores = zip(covered, values.mean(axis=0), strict=True)
            cells = " | ".join(f"{hits:.0%} ({value:.3f})" for hits, value in of_scores)
            width = (highs - lows).mean()
            print(f"| {rows:,} | {auc:.2f} | {share:.0%} | {cells} | {width:.2f} |", flush=True)


def measured(rows: int, auc: float, share: float, seed: int) -> list[tuple[float, ...]]:
    """Return each score's figure, its interval and the truth; nothing for a class of one row."""
    generator = np.random.default_rng([seed, rows])
    slope, offset = slope_and_offset(auc, share)
    features = generator.normal(size=(rows, NUM_FEATURES))
    log_odds = slope * shape_of(features) + offset
    labels = generator.random(rows) < expit(log_odds)
    models = FeatureModels.of(features, labels.astype(np.int64))
    try:
        predictions = models.predictions(labels.astype(np.int64))[:, 1]
    except TooFewRows:
        return []
    scores = scores_of(features, log_odds, labels, generator)
    scored = (ScoredRows(np.arange(rows), one, labels, predictions) for one in scores)
    return [(*adjusted_leak(models, one), truth) for one, truth in zip(scored, TRUTHS, strict=True)]


def scores_of(
    features: Floats, log_odds: Floats, labels: Mask, generator: np.random.Generator
) -> Iterator[Floats]:
    rows, standard = len(labels), (log_odds - log_odds.mean()) / log_odds.std()
    yield expit(log_odds)
    yield np.sin(features[:, 0]) + features[:, 1] * features[:, 5]
    tree = DecisionTreeClassifier(min_samples_leaf=3, random_state=0)
    yield cross_val_predict(tree, features, labels, cv=4, method="predict_proba")[:, 1]
    epochs = [expit(log_odds * part / 5 + generator.normal(size=rows) / 3) for part in range(1, 6)]
    yield np.sum(epochs, axis=0)
    for truth in (0.6, 0.75, 1.0):
        yield (labels ^ (generator.random(rows) >= truth)).astype(np.float64)
    for truth in (0.6, 0.75):
        noise = generator.normal(size=rows) / (2**0.5 * norm.ppf(truth))
        yield labels + 2 * standard + noise
        yield labels + 2 * features[:, 5] + noise


@functools.cache
def slope_and_offset(auc: float, share: float) -> tuple[float, float]:
    """Return what gives labels drawn from the features this AUC and this share of positives."""
    generator = np.random.default_rng(0)
    shape = shape_of(generator.normal(size=(20_000, NUM_FEATURES)))
    uniform = generator.random(20_000)
    low, high = 0.0, 60.0
    for _ in range(20):
        slope = (low + high) / 2
        odds = np.log(share / (1 - share))
        offsets = np.linspace(-8 * slope + odds, 8 * slope + odds, 400)
        shares = np.array([expit(slope * shape[:2_000] + one).mean() for one in offsets])
        offset = float(np.interp(share, shares, offsets))
        labels = uniform < expit(slope * shape + offset)
        reached = roc_auc_score(labels, shape) if 0 < labels.sum() < len(labels) else 0.5
        low, high = (slope, high) if reached < auc else (low, slope)
    return slope, offset


def shape_of(features: Floats) -> Floats:
    """Return what log-odds grow with: lines and bends, each of a single feature."""
    lines: Floats = features[:, :3] @ np.array([0.8, 0.5, 0.3])
    return lines + 0.5 * np.abs(features[:, 3]) + 0.3 * np.tanh(2 * features[:, 4])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
