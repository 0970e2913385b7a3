"""Do the intervals of the feature-adjusted leak AUC cover the truth?

    OMP_NUM_THREADS=1 python -m benchmarks.null_coverage [--rows 500 2000] [--repetitions 100]

Draws tables whose features decide labels with known probabilities, and scores whose AUC among rows
of the same features is known: some are functions of features, of other rows' labels or of noise
(1/2), others contain the row's own label. Prints Markdown: rows x features x score, with the share
of the 95 % intervals that cover the truth, the mean figure and the mean width.
"""

import argparse
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.tree import DecisionTreeClassifier

from benchmarks.environment import print_environment
from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.beyond_features import Covariates, measure_beyond_features
from splitveil.common.privacy.leakage import Floats

NUM_FEATURES = 8
KINDS = ((0.65, 0.5), (0.95, 0.5), (0.99, 0.5), (0.65, 0.05), (0.95, 0.05), (0.99, 0.05))
"""AUC of the features, and share of positives."""

Mask = npt.NDArray[np.bool_]


class Drawn(NamedTuple):
    """A table with known probabilities."""

    features: Floats
    log_odds: Floats
    labels: Mask


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[500, 2_000, 20_000])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", type=int, default=range(len(KINDS)))
    given = parser.parse_args()
    print_environment()
    print("\n| rows | features' AUC | positives | score | truth | covered | mean | width |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in given.rows:
        for auc, share in (KINDS[kind] for kind in given.kinds):
            found: dict[tuple[str, float], list[tuple[float, float, float]]] = defaultdict(list)
            for seed in range(given.repetitions):
                for name, truth, figure in measured(rows, auc, share, seed):
                    found[name, truth].append(figure)
            for (name, truth), figures in found.items():
                values, lows, highs = np.array(figures).T
                covered = ((lows <= truth + 1e-9) & (truth - 1e-9 <= highs)).mean()
                cells = (f"{covered:.0%}", f"{values.mean():.3f}", f"{(highs - lows).mean():.3f}")
                line = (str(rows), f"{auc:.2f}", f"{share:.0%}", name, f"{truth:.2f}", *cells)
                print(f"| {' | '.join(line)} |", flush=True)


def measured(
    rows: int, auc: float, share: float, seed: int
) -> Iterator[tuple[str, float, tuple[float, float, float]]]:
    """Yield each score's name, its truth and its figure with the interval, not folded to 1/2."""
    generator = np.random.default_rng([seed, rows])
    table = drawn(rows, *slope_and_offset(auc, share), generator)
    positions, nothing = np.arange(rows), np.zeros((rows, 0), np.float32)
    scores = {name: (truth, values) for name, truth, values in scores_of(table, generator)}
    found = measure_beyond_features(
        Covariates(
            positions,
            table.features.astype(np.float32),
            nothing,
            nothing,
            table.labels.astype(np.int64),
        ),
        {name: [RunScores(positions, values)] for name, (_, values) in scores.items()},
        {},
    )
    if found is not None:
        for name, figure in found.adjusted.items():
            yield name, scores[name][0], figure


def drawn(rows: int, slope: float, offset: float, generator: np.random.Generator) -> Drawn:
    features = generator.normal(size=(rows, NUM_FEATURES))
    log_odds = slope * _shape(features) + offset
    return Drawn(features, log_odds, generator.random(rows) < expit(log_odds))


def scores_of(table: Drawn, generator: np.random.Generator) -> Iterator[tuple[str, float, Floats]]:
    """Yield scores with the AUC that they have among rows of the same features."""
    features, log_odds, labels = table
    rows, standard = len(labels), (log_odds - log_odds.mean()) / log_odds.std()
    yield "probability", 0.5, expit(log_odds)
    yield "function of features", 0.5, np.sin(features[:, 0]) + features[:, 1] * features[:, 5]
    tree = DecisionTreeClassifier(min_samples_leaf=3, random_state=0)
    overfitted = cross_val_predict(tree, features, labels, cv=4, method="predict_proba")[:, 1]
    yield "overfitted model", 0.5, overfitted
    epochs = [expit(log_odds * part / 5 + generator.normal(size=rows) / 3) for part in range(1, 6)]
    yield "sum over epochs", 0.5, np.sum(epochs, axis=0)
    for truth in (0.6, 0.75, 1.0):
        wrong = generator.random(rows) >= truth
        yield f"label, {truth:.0%} right", truth, (labels ^ wrong).astype(np.float64)
    for truth in (0.6, 0.75):
        noise = generator.normal(size=rows) / (2**0.5 * norm.ppf(truth))
        yield f"label + 2 log-odds + noise, {truth}", truth, labels + 2 * standard + noise
        yield f"label + 2 feature + noise, {truth}", truth, labels + 2 * features[:, 5] + noise


@functools.cache
def slope_and_offset(auc: float, share: float) -> tuple[float, float]:
    """Return what gives labels drawn from the features this AUC and this share of positives."""
    generator = np.random.default_rng(0)
    shape = _shape(generator.normal(size=(20_000, NUM_FEATURES)))
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


def _shape(features: Floats) -> Floats:
    """Return what log-odds grow with: lines and bends, each of a single feature."""
    lines = features[:, :3] @ np.array([0.8, 0.5, 0.3])
    bends: Floats = 0.5 * np.abs(features[:, 3]) + 0.3 * np.tanh(2 * features[:, 4])
    return lines + bends


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
