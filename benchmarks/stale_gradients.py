"""What does a peer learn who remembers every gradient, and what does hiding it from him cost?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.stale_gradients [--jobs 2]

Trains an example under every defense, in process, for 30 epochs and 3 seeds. The attack knows the
direction of the gap between the classes in every batch (an oracle, as in the papers): its score of
one answer is the gradient's place along that gap, and its score of an example after some epochs is
the sum of that example's scores. The leak of single batches is that of the same score on one batch,
averaged. A second attack also knows what the model predicts for every example, and how far its
label moves its gradient: it adds up log-likelihood ratios of the two labels along the gap. From
gradients of noisy labels he reads exactly those.

Prints a table, then the best test AUC of fresh and of persistent noise among the settings whose
accumulated leak stays below 0.65 and 0.75; `--plot FILE.svg` draws the course of the leak.
"""

import argparse
import itertools
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.environment import print_environment
from splitveil.active_party.defenses.noisy_label import NoisyLabel
from splitveil.active_party.training.top_trainer import StepResult, TopTrainer
from splitveil.common.privacy.covers import Covers
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.run.course import Batch
from tests.runs import ActiveRecording, build_parties, run_in_process

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"

FRESH = (1, 4, 16, 64, 256, 1024)
PERSISTENT = (1, 2, 4, 9, 16)
NOISY_LABEL = (1, 2, 4)

MARVELL = "{{name: marvell, noise: {noise}, strength: {{power_ratio: {ratio}}}}}"
LABELS = "{{name: noisy_label, mechanism: {{kind: gaussian, noise_ratio: {ratio}}}}}"

DEFENSES: Mapping[str, str] = {
    "none": "{name: none}",
    "iso, power ratio 16": "{name: iso, noise_ratio: 4}",
    "max_norm": "{name: max_norm}",
    **{f"marvell fresh {s}": MARVELL.format(noise="fresh", ratio=s) for s in FRESH},
    **{f"marvell persistent {s}": MARVELL.format(noise="persistent", ratio=s) for s in PERSISTENT},
    **{f"noisy_label gaussian {k}": LABELS.format(ratio=k) for k in NOISY_LABEL},
}


DRAWN = {
    "none": "k:",
    "max_norm": "C2-",
    "marvell fresh 1": "C0-",
    "marvell fresh 4": "C0--",
    "marvell fresh 16": "C0:",
    "marvell persistent 1": "C1-",
    "marvell persistent 4": "C1--",
    "marvell persistent 16": "C1:",
}


class Outcome(NamedTuple):
    """One run."""

    defense: str
    best_test_auc: float
    last_test_auc: float
    batch_leak: float  # mean over batches
    accumulated: list[float]  # after each epoch
    informed: float  # of the peer who knows the predictions, after the last epoch
    estimate: float  # the ledger's, after the last epoch
    bound: float  # for the peers whom the charges describe


class Accumulator(ActiveRecording):
    """Adds up every example's place along the gap of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulated: list[float] = []
        self.batch_leaks: list[float] = []
        self.informed = 0.0
        self._sums: Tensor | None = None
        self._ratios: Tensor | None = None
        self._labels: Tensor | None = None
        self.noisy_labels: Callable[[], Tensor | None] = lambda: None

    def on_step(self, batch: Batch, result: StepResult) -> None:
        assert self.rows is not None  # noqa: S101 (set by on_aligned)
        if self._sums is None or self._labels is None or self._ratios is None:
            self._sums = torch.zeros(len(self.rows), dtype=torch.float64)
            self._ratios = torch.zeros(len(self.rows), dtype=torch.float64)
            self._labels = torch.full((len(self.rows),), -1.0)
        positive = result.labels > 0.5
        raw = result.raw.double().flatten(1)
        if bool(positive.all()) or not bool(positive.any()):
            return
        gap = raw[positive].mean(0) - raw[~positive].mean(0)
        scores = result.defended.double().flatten(1) @ gap / gap.dot(gap)
        positions = torch.from_numpy(batch.positions.copy())
        self._ratios[positions] += log_likelihood_ratios(result, scores, raw @ gap / gap.dot(gap))
        self._sums[positions] += scores - scores.mean()
        self._labels[positions] = result.labels
        self.batch_leaks.append(leak_auc(scores, result.labels))

    def close_epoch(self) -> None:
        assert self._sums is not None  # noqa: S101
        assert self._labels is not None  # noqa: S101
        seen = self._labels >= 0
        self.accumulated.append(leak_auc(self._sums[seen], self._labels[seen]))
        assert self._ratios is not None  # noqa: S101
        noisy = self.noisy_labels()
        known = self._ratios if noisy is None else noisy
        self.informed = leak_auc(known[seen], self._labels[seen])


def log_likelihood_ratios(result: StepResult, answers: Tensor, raw: Tensor) -> Tensor:
    """Compare each answer with what either label would have led to, along the gap, (batch,).

    The noise is taken as Gaussian with the variance that it has in this batch.
    """
    probabilities = result.probabilities.double()
    moves = torch.nan_to_num(raw / (probabilities - result.labels.double()))
    if_positive, if_negative = (probabilities - 1) * moves, probabilities * moves
    variance = (answers - raw).square().mean().clamp(min=1e-6)
    middle = (if_positive + if_negative) / 2
    return (if_positive - if_negative) * (answers - middle) / variance


def run(task: tuple[str, str, int, int]) -> Outcome:
    """Train once; the same seed gives every defense the same rows, batches and weights."""
    example, name, seed, epochs = task
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    both = [f"contract.epochs={epochs}", f"model_seed={seed}"]
    active = [*both, f"insecure_nonce_seed={seed}", f"defense={DEFENSES[name]}"]
    passive = [*both, f"insecure_nonce_seed={seed + 1000}", "adversary=null"]
    accumulator = Accumulator()
    parties = build_parties(EXAMPLES / example, active, passive, active_seen=accumulator)
    session = parties.session
    accumulator.noisy_labels = lambda: noisy_labels_of(session.trainer)
    parties.passive.on_epoch = lambda epoch: accumulator.close_epoch()  # type: ignore[method-assign]
    parties.passive.on_step = lambda *_: None  # type: ignore[method-assign]
    run_in_process(parties)
    bounds = parties.session.leak_bounds()
    tests = [e.auc for e in accumulator.evaluations if e.split == "test"]
    return Outcome(
        name,
        max(tests),
        tests[-1],
        statistics.mean(accumulator.batch_leaks),
        accumulator.accumulated,
        accumulator.informed,
        bounds.estimate.max,
        bounds.against(Covers.CLASS_MEANS).leak_auc.max,
    )


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def print_table(outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    groups = f"{'':24}{'test AUC':>16}{'leak, one':>11}{'accumulated leak after':>26}"
    print(groups + f"{'knows':>16}{'ledger':>18}")
    columns = f"{'defense':24}{'best':>8}{'last':>8}{'batch':>11}{'1':>8}{'5':>8}{'30':>8} epochs"
    print(columns + f"{'predictions':>13}{'estimate':>9}{'bound':>11}")
    for name, runs in outcomes.items():
        courses = [r.accumulated for r in runs]
        after = [mean(c[min(e, len(c)) - 1] for c in courses) for e in (1, 5, 30)]
        print(
            f"{name:24}{mean(r.best_test_auc for r in runs):8.3f}"
            f"{mean(r.last_test_auc for r in runs):8.3f}{mean(r.batch_leak for r in runs):11.3f}"
            + "".join(f"{value:8.3f}" for value in after)
            + f"{mean(r.informed for r in runs):20.3f}{mean(r.estimate for r in runs):9.3f}"
            + f"{mean(r.bound for r in runs):11.3f}"
        )


def print_comparison(outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    leaks: dict[str, Callable[[Outcome], float]] = {
        "accumulated leak": lambda outcome: outcome.accumulated[-1],
        "leak to a peer who knows predictions": lambda outcome: outcome.informed,
    }
    for (title, leak), limit in itertools.product(leaks.items(), (0.65, 0.75)):
        print(f"best test AUC with a final {title} of at most {limit}:")
        for kind in ("marvell fresh", "marvell persistent", "noisy_label"):
            found = [
                (mean(r.best_test_auc for r in runs), name)
                for name, runs in outcomes.items()
                if name.startswith(kind) and mean(leak(r) for r in runs) <= limit
            ]
            print(f"  {kind:20}", "{:.3f} ({})".format(*max(found)) if found else "none of these")


def plot(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Draw the accumulated leak over the epochs."""
    import matplotlib as mpl  # noqa: PLC0415 (only this option needs it)

    mpl.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    mpl.rcParams |= {"svg.hashsalt": "splitveil", "font.size": 10}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, style in DRAWN.items():
        courses = [r.accumulated for r in outcomes[name]]
        course = [mean(values) for values in zip(*courses, strict=True)]
        axes.plot(range(1, len(course) + 1), course, style, label=name)
    axes.set(
        xlabel="epochs that the peer remembers", ylabel="accumulated leak AUC", ylim=(0.5, 1.01)
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def noisy_labels_of(trainer: TopTrainer | None) -> Tensor | None:
    """Return the labels on which a run with noisy labels trains."""
    if trainer is None or not isinstance(trainer.defense, NoisyLabel):
        return None
    return trainer.defense.noisy_labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", default="default_credit")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(DEFENSES), choices=list(DEFENSES))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    print_environment()
    tasks = [
        (arguments.example, name, seed, arguments.epochs)
        for name in arguments.only
        for seed in range(arguments.seeds)
    ]
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        results = pool.map(run, tasks, chunksize=1)
    print(
        f"{len(tasks)} runs in {time.monotonic() - begun:.0f} s, means of {arguments.seeds} seeds"
    )
    outcomes = {n: [r for r in results if r.defense == n] for n in arguments.only}
    print_table(outcomes)
    print_comparison(outcomes)
    if arguments.plot is not None:
        plot(outcomes, arguments.plot)


if __name__ == "__main__":
    main()
