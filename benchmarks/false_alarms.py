"""How often does a run raise a leak alarm where nothing leaks, and where something does?

    OMP_NUM_THREADS=1 python -m benchmarks.false_alarms [--rows 600] [--repetitions 75]

Draws tables whose labels features reveal by interactions, rings and parities as well as by lines,
trains a network on other rows of the same table, and attacks what it would send about these rows
with the product's own attacks and measure. The network knows of the features whatever it has
learned. Its gradients are those of targets that it drew by itself (``nothing``), those of other
rows' labels (``dealt``), or those of the rows' labels, of which a share is wrong (``leak``). Prints
Markdown: runs with an alarm against a stated bound, and with a leak found.
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from benchmarks.environment import print_environment
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.figures import BeyondFigures, LeakBounds, Spread
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.leakage import ClassIndices, Floats
from splitveil.common.privacy.observation import Observation
from splitveil.common.privacy.settings import DEFAULT_ATTACKS
from splitveil.common.record.assessment import Finding, assess_figures

BOUND = 0.55  # stated for peers that know class means only
WRONG = 0.3  # share of wrong labels where there is a leak: the truth is an AUC of .7
EPOCHS, BATCH = 4, 150
KINDS = ("nothing", "dealt", "leak")
ATTACKS = (*DEFAULT_ATTACKS, "informed", "accumulated_informed")

Table = Callable[[int, np.random.Generator], tuple[Floats, ClassIndices]]


def made(**settings: Any) -> Table:
    """Return a table of ``make_classification``."""

    def drawn(rows: int, generator: np.random.Generator) -> tuple[Floats, ClassIndices]:
        seed = int(generator.integers(1 << 31))
        features, labels = datasets.make_classification(rows, random_state=seed, **settings)
        return features, labels

    return drawn


def decided(num_features: int, decide: Callable[[Floats], Floats], noise: float = 0.0) -> Table:
    """Return a table of uniform features in (-1, 1) whose labels are the sign of a function."""

    def drawn(rows: int, generator: np.random.Generator) -> tuple[Floats, ClassIndices]:
        features = generator.uniform(-1, 1, (rows, num_features))
        labels = (decide(features) > 0) ^ (generator.random(rows) < noise)
        return features, labels.astype(np.int64)

    return drawn


def friedman(make: Callable[..., tuple[Floats, Floats]], share: float) -> Table:
    def drawn(rows: int, generator: np.random.Generator) -> tuple[Floats, ClassIndices]:
        features, values = make(rows, noise=0.5, random_state=int(generator.integers(1 << 31)))
        return features, (values > np.quantile(values, 1 - share)).astype(np.int64)

    return drawn


def points(make: Callable[..., tuple[Floats, ClassIndices]], **settings: Any) -> Table:
    return lambda rows, generator: make(
        rows, random_state=int(generator.integers(1 << 31)), **settings
    )


TABLES: Mapping[str, Table] = {
    "10 informative of 20": made(n_features=20, n_informative=10),
    "10 informative, 8 clusters": made(n_features=20, n_informative=10, n_clusters_per_class=8),
    "10 informative, labels flipped": made(n_features=20, n_informative=10, flip_y=0.3),
    "5 informative, 3 % positive": made(n_features=12, n_informative=5, weights=[0.97]),
    "20 informative of 100": made(n_features=100, n_informative=20),
    "2 informative of 60": made(n_features=60, n_informative=2),
    "moons": points(datasets.make_moons, noise=0.2),
    "moons, close": points(datasets.make_moons, noise=0.35),
    "rings": points(datasets.make_circles, noise=0.1, factor=0.6),
    "parity of 2": decided(6, lambda x: x[:, 0] * x[:, 1]),
    "parity of 2, labels flipped": decided(6, lambda x: x[:, 0] * x[:, 1], 0.1),
    "parity of 3": decided(6, lambda x: x[:, 0] * x[:, 1] * x[:, 2]),
    "chequerboard": decided(2, lambda x: np.sin(6 * x[:, 0]) * np.sin(6 * x[:, 1])),
    "product of sines": decided(8, lambda x: np.sin(4 * x[:, 0]) + np.sin(4 * x[:, 1] * x[:, 2])),
    "sphere of 10": decided(10, lambda x: (x**2).sum(axis=1) - 3.2, 0.05),
    "largest of 4": decided(8, lambda x: x[:, :4].argmax(axis=1) - 1.5),
    "hidden plane": decided(12, lambda x: x.sum(axis=1), 0.2),
    "Gaussian quantiles": lambda rows, generator: datasets.make_gaussian_quantiles(
        n_samples=rows, n_features=6, n_classes=2, random_state=int(generator.integers(1 << 31))
    ),
    "Friedman 1": friedman(datasets.make_friedman1, 0.5),
    "Friedman 2, 5 % positive": friedman(datasets.make_friedman2, 0.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--repetitions", type=int, default=75)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    print_environment("scikit-learn")
    heads = (
        "table",
        "features' AUC: both, functions, boosting",
        *(f"{kind}: alarms, leaks" for kind in KINDS),
    )
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    sums = np.zeros((len(KINDS), 3), np.int64)
    for name in given.tables:
        counts, aucs = np.zeros_like(sums), list[tuple[float | None, ...]]()
        for seed in range(given.first_seed, given.first_seed + given.repetitions):
            # Few repetitions show that a leak is found; many, that none is where there is none.
            which = {4: 1, 9: 2}.get(seed % 10, 0)
            found = measured(TABLES[name], given.rows, seed, KINDS[which])
            if found is None:
                continue
            counts[which] += np.array(outcome(found))
            if which != 1 and found.feature_auc is not None:
                trees = found.feature_auc_of_trees
                aucs.append((found.feature_auc, found.feature_auc_of_functions, trees))
        sums += counts
        cells = " | ".join(f"{alarms}, {leaks} of {runs}" for alarms, leaks, runs in counts)
        features = (
            ", ".join(f"{auc:.3f}" for auc in np.mean(np.array(aucs, float), axis=0))
            if aucs
            else "–"
        )
        print(f"| {name} | {features} | {cells} |", flush=True)
    cells = " | ".join(f"{alarms}, {leaks} of {runs}" for alarms, leaks, runs in sums)
    print(f"| all | | {cells} |")


def outcome(found: BeyondFigures) -> tuple[bool, bool, bool]:
    """Return whether there is an alarm, and a leak; and that something was measured."""
    bound = Spread(BOUND, BOUND, BOUND)
    none = Spread(1.0, 1.0, 1.0)
    assessed = assess_figures(found, LeakBounds(bound, bound, none, none, bound), {})
    leaks = any(one.finding in {Finding.LEAKS, Finding.ABOVE_BOUND} for one in assessed.attacks)
    return bool(assessed.above_bound), leaks, True


def measured(table: Table, rows: int, seed: int, kind: str) -> BeyondFigures | None:
    """Train on rows, and attack what would be sent about as many others."""
    generator = np.random.default_rng([seed, rows])
    torch.manual_seed(seed)
    features, labels = table(2 * rows, generator)
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    values = torch.from_numpy(features).float()
    network = Network(features.shape[1])
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    states = []
    for _ in range(3 * EPOCHS):
        for chosen in torch.split(torch.randperm(rows), 64):
            optimizer.zero_grad()
            logits = network(*network.sent(values[chosen]))[:, 0]
            wanted = torch.from_numpy(labels[:rows][chosen.numpy()]).float()
            loss = nn.functional.binary_cross_entropy_with_logits(logits, wanted)
            torch.autograd.backward(loss)
            optimizer.step()
        states.append(network.answers(values[rows:]))
    states = states[2::3]
    of_rows = labels[rows:]
    targets = {
        "nothing": generator.random(rows) < states[-1][1].numpy(),
        "dealt": of_rows.astype(bool),
        "leak": of_rows ^ (generator.random(rows) < WRONG),
    }[kind]
    if kind == "dealt":
        of_rows = generator.permutation(of_rows)
    audit = LeakAudit(ATTACKS, num_examples=rows, keeps_scores=True)
    wanted = torch.from_numpy(targets.astype(np.float32))
    tested = torch.from_numpy(of_rows)
    for epoch, (_sent, likely, slopes) in enumerate(states):
        gradients = (likely - wanted)[:, None] * slopes
        for step, chosen in enumerate(torch.split(torch.randperm(rows), BATCH)):
            sent_back = {"cut": gradients[chosen]}
            known = KnownPredictions(likely[chosen], slopes[chosen])
            seen = Observation(
                epoch, step, sent_back, tested[chosen], positions=chosen, predictions=known
            )
            audit.observe(replace(seen, clues=audit.clues(seen, b"", sent_back)))
    logits = torch.stack([likely.logit().clamp(-30, 30) for _, likely, _ in states])
    predictions = torch.stack([logits[-1], logits.mean(dim=0)], dim=1).numpy()
    own = features[rows:, network.num_passive :].astype(np.float32)
    covariates = Covariates(np.arange(rows), states[-1][0].numpy(), predictions, own, of_rows)
    return audit.beyond_features(covariates)


class Network(nn.Module):
    """A split network: half of the features below the cut, the others above."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_passive = (num_features + 1) // 2
        own = num_features - self.num_passive
        self.bottom = nn.Sequential(
            nn.Linear(self.num_passive, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()
        )
        self.top = nn.Sequential(nn.Linear(16 + own, 32), nn.ReLU(), nn.Linear(32, 1))

    def sent(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.bottom(values[:, : self.num_passive]), values[:, self.num_passive :]

    def forward(self, sent: Tensor, own: Tensor) -> Tensor:
        logits: Tensor = self.top(torch.cat([sent, own], dim=1))
        return logits

    def answers(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return activations, predictions, and the slopes of the logit in the activations."""
        sent, own = self.sent(values)
        sent = sent.detach().requires_grad_()
        logits = self(sent, own)[:, 0]
        (slopes,) = torch.autograd.grad(logits.sum(), sent)
        return sent.detach(), logits.detach().sigmoid(), slopes


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
