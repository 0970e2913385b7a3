"""What does each defense leave to each attack?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.leak_table [--json FILE]

Trains the examples under every defense, in process with the session and the tensors of a run over
gRPC, and attacks every gradient that the passive party receives, as it came and at the first layer
of its model. Prints Markdown: test AUC and the leak AUC of single batches, averaged over the
batches of the run, then what gathers over the run, with its 95 % interval. Means over the seeds.
``--json`` keeps all of them for every run, and of single batches also their 95 % quantile, as the
papers have it, the last epoch and the worst one.

`cosine`, `mean`, `median`, `lda` are oracles. ``regress_out`` uses the party's own activations and
``activation_spectral`` and ``activation_kmeans`` nothing else: what they find is no leak of
gradients, and neither is the part of `hint_combiner` and `completion` that the party's features
give to whoever knows as many labels (last line).
``--deal-labels`` takes that away: each run deals the labels out anew at random among the examples,
so that features reveal nothing of them, and all that an attack finds is the gradients' leak.
``--stored-rows`` attacks what the passive party can store, with `splitveil.attacks.ON_STORED_ROWS`.
"""

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.environment import print_environment
from splitveil.active_party.defenses.interface import Step
from splitveil.attacks import ON_STORED_ROWS
from splitveil.common.privacy.attacks import ATTACKS, CUT, FINAL_ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import RunFigures
from splitveil.common.run.course import Batch
from splitveil.common.text.values import to_form
from splitveil.library.auditing import audit
from tests.support.attacked_run import BATCH_ATTACKS, AttackedRun, attacked_run, deal_labels

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"
EPOCHS = {"breast_cancer": 15, "default_credit": 10}

DEFENSES = (
    "none",
    "iso, noise_ratio: 1",
    "iso, noise_ratio: 4",
    "iso, noise: persistent, noise_ratio: 8",
    "max_norm",
    "max_norm, noise: persistent",
    "max_norm_positive",
    "marvell, power_ratio: 1",
    "marvell, power_ratio: 4",
    "marvell, leak_auc: 0.6",
    "marvell, noise: persistent, power_ratio: 4",
    "noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}",
    "noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}, top_labels: true",
    "noisy_label, mechanism: {kind: laplace, epsilon: 1}",
    "noisy_label, mechanism: {kind: randomized_response, epsilon: 1}",
    "gafm",
)
COMPARED = ("accumulated_spectral", "accumulated_residual_energy", "completion_40")
"""Attacks that the monitor runs, on the same rows."""
AUDITED = ("gradients", "labels", "batches", "examples", "activations")


class Task(NamedTuple):
    """One run."""

    example: str
    defense: str
    seed: int
    epochs: int
    deals_labels: bool


def run(task: Task, **options: Any) -> AttackedRun:
    """Train once; the same seed gives every defense the same rows, batches and weights."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    both = [f"contract.epochs={task.epochs}", f"model_seed={task.seed}"]
    with tempfile.TemporaryDirectory() as folder:
        active = [
            *both,
            f"insecure_nonce_seed={task.seed}",
            f"defense={{name: {task.defense}}}",
            f"runs_dir={folder}",  # with the noise key, which all runs of an example would share
        ]
        passive = [*both, f"insecure_nonce_seed={task.seed + 1000}"]
        example = EXAMPLES / task.example  # or the folder itself, if the path is absolute
        if task.deals_labels:
            active += deal_labels(example, Path(folder), task.seed)
        return attacked_run(example, active, passive, **options)


def attack_stored_rows(task: Task) -> AttackedRun:
    """Train once, and run every attack on the rows that the passive party then has."""
    rows: list[tuple[Tensor, ...]] = []

    def store(batch: Batch, known: Step, sent: Tensor, received: Tensor) -> None:
        number = torch.full((len(sent),), len(rows))
        positions = torch.from_numpy(batch.positions.copy())
        rows.append((received, known.labels, number, positions, sent.detach()))

    trained = run(task, attacks=(), on_step=store)
    columns = map(torch.cat, zip(*rows, strict=True))
    stored: dict[str, Any] = dict(zip(AUDITED, columns, strict=True))
    leaks = {}
    for name in (*COMPARED, *ON_STORED_ROWS):
        begun = time.monotonic()
        leaks[name] = RunFigures(**audit(**stored, attacks=[name]).run[name])
        print(f"{task.defense}: {name} took {time.monotonic() - begun:.0f} s", flush=True)
    return trained._replace(run_level={"cut": leaks, "first": {}})


def figure(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def average(runs: Sequence[AttackedRun], of: Callable[[AttackedRun], float]) -> str:
    return figure(statistics.mean(of(run) for run in runs))


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def header(cells: Sequence[str]) -> list[str]:
    return [row(cells), "|" + "---|" * len(cells)]


def batch_table(runs: Mapping[str, Sequence[AttackedRun]], layer: str) -> list[str]:
    every = [run for found in runs.values() for run in found]
    attacks = [
        name
        for name in BATCH_ATTACKS
        if name in every[0].leak[layer] and ATTACKS[name].runs_at(layer)
    ]
    lines = header(["defense", "test AUC", *(f"`{name}`" for name in attacks)])
    for defense, found in runs.items():
        leaks = [figure(statistics.mean(r.leak[layer][n].mean for r in found)) for n in attacks]
        lines.append(row([defense, average(found, lambda r: r.test_aucs[-1]), *leaks]))
    floor = average(every, lambda r: statistics.mean(value for _, value in r.random))
    return [*lines, row(["random scores", "", *[floor] * len(attacks)])]


def run_table(runs: Mapping[str, Sequence[AttackedRun]]) -> list[str]:
    every = [run for found in runs.values() for run in found]
    columns = [
        (layer, name)
        for name in (*RUN_ATTACKS, *ON_STORED_ROWS)
        for layer in ("cut", "first")
        if name in every[0].run_level[layer] and (layer == CUT or name not in FINAL_ATTACKS)
    ]
    attacks = [f"`{name}`, {layer}" for layer, name in columns]
    lines = header(["defense", "test AUC", *attacks, "ledger: estimate", "bound"])
    for defense, found in runs.items():
        leaks = [interval([r.run_level[layer][name] for r in found]) for layer, name in columns]
        estimate = average(found, lambda r: r.bounds.estimate.max)
        bound = average(found, lambda r: r.bounds.against(Adversary.CLASS_MEANS).max)
        test = average(found, lambda r: r.test_aucs[-1])
        lines.append(row([defense, test, *leaks, estimate, bound]))
    alone = [
        figure(statistics.mean(run.features_alone[name] for run in every))
        if name in every[0].features_alone
        else ""
        for _, name in columns
    ]
    return [*lines, row(["own features and the hints, no gradient", "", *alone, "", ""])]


def interval(found: Sequence[RunFigures]) -> str:
    """Return the mean leak AUC with the mean ends of its interval."""
    values = zip(*(leak[:3] for leak in found), strict=True)
    area, low, high = (figure(statistics.mean(each)) for each in values)
    return f"{area} ({low}–{high})"


def print_tables(task: Task, runs: Mapping[str, Sequence[AttackedRun]]) -> None:
    first = next(iter(runs.values()))
    batches = statistics.mean(len(r.random) for r in first)
    labels = ", labels dealt out at random" if task.deals_labels else ""
    size = f"{task.epochs} epochs, {batches:.0f} batches, {len(first)} seeds"
    print(f"\n## {task.example}{labels}: {size}\n")
    for layer in first[0].leak:
        print(f"Leak AUC of single batches, {layer} layer:\n")
        print("\n".join(batch_table(runs, layer)) + "\n")
    print("Leak AUC over the run:\n")
    print("\n".join(run_table(runs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", help="one, or a folder with adversary.labels; default: both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help=f"by default {EPOCHS}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=DEFENSES, choices=DEFENSES)
    parser.add_argument("--deal-labels", action="store_true")
    parser.add_argument("--stored-rows", action="store_true", help="attack the stored rows instead")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_environment("scikit-learn", "scipy")
    kept: list[dict[str, Any]] = []
    for example in [arguments.example] if arguments.example else list(EPOCHS):
        if example == "default_credit" and "SPLITVEIL_DATA" not in os.environ:
            print(f"\n{example} left out: SPLITVEIL_DATA names no folder with data sets")
            continue
        epochs = arguments.epochs or EPOCHS.get(Path(example).name, 10)
        tasks = [
            Task(example, name, seed, epochs, arguments.deal_labels)
            for name in arguments.only
            for seed in range(arguments.seeds)
        ]
        begun = time.monotonic()
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            results = pool.map(
                attack_stored_rows if arguments.stored_rows else run, tasks, chunksize=1
            )
        found = list(zip(tasks, results, strict=True))
        runs = {name: [r for task, r in found if task.defense == name] for name in arguments.only}
        print_tables(tasks[0], runs)
        print(f"\n{len(tasks)} runs in {time.monotonic() - begun:.0f} s")
        kept += [
            to_form(task._asdict() | result._asdict() | {"bounds": result.bounds})
            for task, result in found
        ]
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
