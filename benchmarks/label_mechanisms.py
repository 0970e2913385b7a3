"""What does each mechanism of noisy labels cost, at one guarantee for the whole run?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.label_mechanisms [--leak-auc 0.6]

Trains an example in process with each mechanism at the strength at which no score of any peer
exceeds the leak AUC over the whole run, exactly (`exact_auc`), and prints Markdown: the best test
AUC over the epochs and that of the last one, means over seeds, and their differences from the same
seeds without a defense with standard errors.
"""

import argparse
import logging
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.environment import print_environment
from splitveil import simulation
from splitveil.active_party.defenses.exact_auc import (
    auc_of_epsilon,
    gaussian_auc,
    laplace_auc,
    strength_for_auc,
)

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"


def defenses(leak_auc: float, epochs: int) -> Mapping[str, str]:
    """Return each defense at the strength whose best AUC over the run is ``leak_auc``."""
    mu = strength_for_auc(gaussian_auc, leak_auc)
    epsilon = strength_for_auc(auc_of_epsilon, leak_auc)
    laplace = strength_for_auc(laplace_auc, leak_auc)
    alibi = strength_for_auc(lambda strength: laplace_auc(strength, 2), leak_auc)
    gaussian = f"kind: gaussian, noise_ratio: {1 / mu}"
    response = f"kind: randomized_response, epsilon: {epsilon}"
    prior = f"kind: with_prior, epsilon: {epsilon}, parts: 2, epochs_per_part: {epochs // 6 or 1}"
    batches = f"kind: projected_batches, noise_ratio: {math.sqrt(epochs) / mu}"
    mechanisms = {
        "`gaussian`": gaussian,
        "`gaussian`, posterior": f"{gaussian}, posterior: model",
        "`laplace`": f"kind: laplace, epsilon: {laplace}",
        "`laplace`, posterior": f"kind: laplace, epsilon: {laplace}, posterior: model",
        "`randomized_response`": response,
        "`randomized_response`, posterior": f"{response}, posterior: model",
        "`alibi`": f"kind: alibi, epsilon: {alibi}",
        "`with_prior`, 2 parts": prior,
        "`with_prior`, 2 parts, prediction where certain": f"{prior}, if_certain: prediction",
        "`projected_batches`, rank 16": f"{batches}, rank: 16",
        "`projected_batches`, rank 32": f"{batches}, rank: 32",
    }
    noisy = {title: f"name: noisy_label, mechanism: {{{one}}}" for title, one in mechanisms.items()}
    return noisy | {
        "`projected_labels`": f"name: projected_labels, strength: {{leak_auc: {leak_auc}}}"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", default="default_credit")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--leak-auc", type=float, default=0.6)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print_environment()
    print(f"\n{arguments.example}, {arguments.epochs} epochs, {arguments.seeds} seeds\n")
    print("| mechanism | best test AUC | last | best, against none | last, against none |")
    print("|---|---|---|---|---|")
    bare = [test_aucs(arguments, "name: none", seed) for seed in range(arguments.seeds)]
    best, last = (statistics.fmean(one) for one in zip(*bare, strict=True))
    print(f"| none | {best:.3f} | {last:.3f} | | |", flush=True)
    for title, defense in defenses(arguments.leak_auc, arguments.epochs).items():
        found = [test_aucs(arguments, defense, seed) for seed in range(arguments.seeds)]
        cells = [f"{statistics.fmean(one):.3f}" for one in zip(*found, strict=True)]
        for place in range(2):
            gains = [one[place] - none[place] for one, none in zip(found, bare, strict=True)]
            cells.append(f"{statistics.fmean(gains):+.3f} ± {standard_error(gains):.3f}")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


def test_aucs(arguments: argparse.Namespace, defense: str, seed: int) -> tuple[float, float]:
    """Train once, and return the best test AUC over the epochs and the last one."""
    both = [f"contract.epochs={arguments.epochs}", f"model_seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        active = [*both, f"defense={{{defense}}}", f"noise_key_path={folder}/noise.key"]
        active += [f"insecure_nonce_seed={seed}", "leak_monitor=null"]
        passive = [*both, f"insecure_nonce_seed={seed + 1000}", "adversary=null"]
        settings = simulation.read_settings(EXAMPLES / arguments.example, active, passive)
        parties = simulation.build(settings)
        parties.meet()
    evaluations = parties.active.seen.evaluations
    aucs = [one.auc for one in evaluations if one.split == "test"]
    return max(aucs), aucs[-1]


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


if __name__ == "__main__":
    main()
