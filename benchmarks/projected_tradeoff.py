"""What do projected labels cost a model, and what do other stages, ranks and bounds?

    SPLITVEIL_DATA=... python -m benchmarks.projected_tradeoff default_credit \
        [--leak-auc 0.6] [--stages 8] [--rank 96] [--rows 19200] [--seeds 5] [--equal-shares]

Trains both halves of a split MLP in one process, without the protocol between them, on labels and
on targets, with the same seeds: 64 hidden units below and 32 above a cut of 32, batches of 1,024,
Adam with 0.003, 30 epochs. Prints test AUCs (of the best epoch, of the last one, and of a top model
fitted to the labels at the end), each as a mean with its paired difference from no defense and the
standard error of that; the AUC of the targets against the labels among rows of nearly the same
prediction, which is what they tell of labels beyond the features; and for comparison with
`plan` what no defense reaches with as many rows as the outlook promises.
"""

import argparse
import csv
import gzip
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.environment import print_environment
from splitveil.active_party.defenses.gaussian_dp import mu_of_leak_auc
from splitveil.active_party.defenses.noise import InsecureSeededNoise
from splitveil.active_party.defenses.projection.design import design, stage_shares, stage_sigma
from splitveil.active_party.defenses.projection.features import RowChunk
from splitveil.active_party.defenses.projection.outlook import outlook
from splitveil.active_party.defenses.projection.posterior import Posterior
from splitveil.active_party.defenses.projection.release import draw_release

EPOCHS, BATCH, LEARNING_RATE, REFIT_EPOCHS = 30, 1024, 3e-3, 8


class Table(NamedTuple):
    """Rows of both parties: of the one without labels, of the one with labels, and labels."""

    passive: Tensor
    own: Tensor
    labels: Tensor

    def at(self, rows: Tensor) -> "Table":
        return Table(self.passive[rows], self.own[rows], self.labels[rows])


class Outcome(NamedTuple):
    """What one run leads to."""

    best: float
    last: float
    refit: float
    adjusted: float


class Halves(nn.Module):
    """Bottom and top model."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        hidden = nn.Linear(table.passive.shape[1], 64)
        self.bottom = nn.Sequential(hidden, nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.hidden, self.output = nn.Linear(32 + table.own.shape[1], 32), nn.Linear(32, 1)

    def top(self, cut: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and hidden units."""
        hidden = self.hidden(torch.cat([cut, own], dim=1)).relu()
        return self.output(hidden)[:, 0], hidden

    @torch.no_grad()
    def facts(self, cut: Tensor, own: Tensor) -> RowChunk:
        logits, hidden = self.top(cut, own)
        slopes = ((hidden > 0) * self.output.weight) @ self.hidden.weight[:, :32]
        return RowChunk(cut, own, hidden, logits, slopes)

    @torch.no_grad()
    def auc(self, table: Table) -> float:
        return auc(self.top(self.bottom(table.passive), table.own)[0], table.labels)


class Stages:
    """Makes the targets of a run, as the defense does."""

    def __init__(self, given: argparse.Namespace, seed: int) -> None:
        count = given.stages
        self._mu, self._rank, self._count = mu_of_leak_auc(given.leak_auc), given.rank, count
        self._shares = [1 / count] * count if given.equal_shares else stage_shares(count)
        self._noise, self._next = InsecureSeededNoise(1000 + seed), 0
        self._posterior = Posterior(given.memory_mib * 2**20)

    def targets(self, epoch: int, facts: RowChunk, labels: Tensor) -> Tensor:
        if self._next < self._count and epoch >= self._next * EPOCHS // self._count:

            def chunks() -> Iterator[RowChunk]:
                yield facts

            rows = design(chunks, len(labels), self._rank, earlier=self._posterior.released)
            sigma = stage_sigma(self._mu, self._shares[self._next])
            self._posterior.add(rows, draw_release(rows, labels, sigma, self._noise))
            self._next += 1
        return self._posterior.targets(torch.sigmoid(facts.logits))


def train(train: Table, test: Table, seed: int, stages: Stages | None) -> Outcome:
    """Train both halves, on labels or on targets, then the top half alone on labels."""
    torch.manual_seed(seed)
    halves = Halves(train)
    with torch.no_grad():
        cut = halves.bottom(train.passive)
    targets, aucs = train.labels, []
    optimizer = torch.optim.Adam(halves.parameters(), LEARNING_RATE)
    for epoch in range(EPOCHS):
        if stages is not None:
            targets = stages.targets(epoch, halves.facts(cut, train.own), train.labels)
        cut = cut.clone()
        for rows in torch.split(torch.randperm(len(targets)), BATCH):
            activation = halves.bottom(train.passive[rows])
            cut[rows] = activation.detach()
            step(optimizer, halves.top(activation, train.own[rows])[0], targets[rows])
        aucs.append(halves.auc(test))
    adjusted = within_strata(targets, torch.sigmoid(halves.facts(cut, train.own).logits), train)
    return Outcome(max(aucs), aucs[-1], refitted(halves, train, test), adjusted)


def refitted(halves: Halves, train: Table, test: Table) -> float:
    with torch.no_grad():
        cut = halves.bottom(train.passive)
    top = [*halves.hidden.parameters(), *halves.output.parameters()]
    optimizer = torch.optim.Adam(top, LEARNING_RATE)
    for _ in range(REFIT_EPOCHS):
        for rows in torch.split(torch.randperm(len(cut)), BATCH):
            step(optimizer, halves.top(cut[rows], train.own[rows])[0], train.labels[rows])
    return halves.auc(test)


def step(optimizer: torch.optim.Optimizer, logits: Tensor, targets: Tensor) -> None:
    loss: Tensor = binary_cross_entropy_with_logits(logits, targets)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def within_strata(targets: Tensor, predictions: Tensor, table: Table, strata: int = 100) -> float:
    """Return the AUC of targets among pairs of rows in the same hundredth of the predictions."""
    higher, pairs = 0.0, 0.0
    for rows in torch.tensor_split(predictions.argsort(), strata):
        labels = table.labels[rows]
        count = float(labels.sum() * (1 - labels).sum())
        if count:
            higher, pairs = higher + count * auc(targets[rows], labels), pairs + count
    return higher / pairs


def auc(scores: Tensor, labels: Tensor) -> float:
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort(stable=True)] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positives = float(labels.sum())
    below = float(ranks[labels > 0].sum()) - positives * (positives + 1) / 2
    return below / (positives * (len(labels) - positives))


def read_table(name: str) -> Table:
    """Return default_credit as its two files divide it, or adult with its numbers as own."""
    folder = Path(os.environ["SPLITVEIL_DATA"]) / name
    if name == "default_credit":
        own = {row["id"]: row for row in read_csv(folder / "guest.csv.gz")}
        host = read_csv(folder / "host.csv.gz")
        labels = [float(own[row["id"]]["y"]) for row in host]
        passive = [numbers(row, [f"x{n}" for n in range(10)]) for row in host]
        mine = [numbers(own[row["id"]], [f"x{n}" for n in range(13)]) for row in host]
        return as_table(np.array(passive), np.array(mine), labels)
    rows = read_csv(folder / "adult.csv.gz")
    texts = ["workclass", "education", "marital_status", "occupation"]
    texts += ["relationship", "race", "sex", "native_country"]
    counts = ["age", "education_num", "hours_per_week", "capital_gain", "capital_loss"]
    heavy = [3, 4]  # columns of many zeros and a long tail
    amounts = np.array([numbers(row, counts) for row in rows])
    amounts[:, heavy] = np.log1p(amounts[:, heavy])
    columns = [np.array([row[text].strip() for row in rows]) for text in texts]
    indicators = [column == value for column in columns for value in np.unique(column)]
    frequent = np.array([column for column in indicators if column.sum() >= 20]).T
    return as_table(frequent, amounts, [float(row["income"].strip() == ">50K") for row in rows])


def read_csv(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def numbers(row: dict[str, str], names: Sequence[str]) -> list[float]:
    return [float(row[name]) for name in names]


def as_table(
    passive: "np.typing.NDArray[np.float64]",
    own: "np.typing.NDArray[np.float64]",
    labels: Sequence[float],
) -> Table:
    def standardised(values: "np.typing.NDArray[np.float64]") -> Tensor:
        scaled = (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-9)
        return torch.from_numpy(scaled).float()

    return Table(standardised(passive.astype(float)), standardised(own), torch.tensor(labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["default_credit", "adult"])
    parser.add_argument("--leak-auc", type=float, default=0.6)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rank", type=int, default=96)
    parser.add_argument("--memory-mib", type=int, default=256)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--equal-shares", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_environment()
    whole = read_table(given.table)
    order = torch.randperm(len(whole.labels), generator=torch.Generator().manual_seed(1))
    cut = len(order) * 4 // 5
    training, test = whole.at(order[: min(cut, given.rows or cut)]), whole.at(order[cut:])
    seeds = range(given.seeds)
    plain = [train(training, test, seed, None) for seed in seeds]
    show(f"no defense, {len(training.labels)} rows", plain, plain)
    made = [train(training, test, seed, Stages(given, seed)) for seed in seeds]
    show(f"projected labels, bound {given.leak_auc}", made, plain)
    share = float(training.labels.mean())
    promised = outlook(len(training.labels), share, mu_of_leak_auc(given.leak_auc), given.rank)
    fewer = training.at(torch.arange(round(promised.rows)))
    fewer_plain = [train(fewer, test, seed, None) for seed in seeds]
    show(f"no defense, {len(fewer.labels)} rows, the outlook's", fewer_plain, plain)


def show(name: str, outcomes: Sequence[Outcome], plain: Sequence[Outcome]) -> None:
    shown = []
    for field in Outcome._fields:
        values = [getattr(outcome, field) for outcome in outcomes]
        text = f"{field} {statistics.mean(values):.4f}"
        if outcomes is not plain and field != "adjusted":
            moves = [v - getattr(p, field) for v, p in zip(values, plain, strict=True)]
            error = statistics.stdev(moves) / len(moves) ** 0.5 if len(moves) > 1 else 0.0
            text += f" ({statistics.mean(moves):+.4f} ± {error:.4f})"
        shown.append(text)
    print(f"{name}: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
