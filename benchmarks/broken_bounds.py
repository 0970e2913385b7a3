"""Which of the ledger's bounds does a peer without a label pass?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.broken_bounds [--deal-labels]

Trains an example in process under defenses of several strengths, with one peer that follows the
protocol and one that chooses its activations (`tests/bound_breakers.py`), and prints Markdown: the
AUC of each attack on the first batch, on the last and over the whole run, beside the ledger's
bound for the run. Bold is what passes it by more than chance does, which is .05 here.
``--deal-labels`` deals the labels out at random, so that features tell nothing of them.
"""

import argparse
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.environment import print_environment
from splitveil.common.text.upper_bounds import auc_at_most
from tests.attacked_run import deal_labels
from tests.bound_breakers import AttackName, Broken, run_attack

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"

CHANCE = 0.05

DEFENSES: Mapping[str, str] = {
    "`marvell` fresh, ratio 4": "{name: marvell, strength: {power_ratio: 4}}",
    "`marvell` fresh, ratio 1024": "{name: marvell, strength: {power_ratio: 1024}}",
    "`marvell` persistent, ratio 4": (
        "{name: marvell, noise: persistent, strength: {power_ratio: 4}}"
    ),
    "`marvell` persistent, ratio 1024": (
        "{name: marvell, noise: persistent, strength: {power_ratio: 1024}}"
    ),
    "`iso` fresh, noise ratio 16": "{name: iso, noise_ratio: 16}",
    "`iso` persistent, noise ratio 32": "{name: iso, noise: persistent, noise_ratio: 32}",
    "`noisy_label` gaussian, ratio 2": (
        "{name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}}"
    ),
}
PEERS: Mapping[AttackName, str] = {
    "residual_energy": "follows the protocol",
    "off_the_common_line": "chooses activations",
    "across_the_gap": "chooses activations",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", default="default_credit")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deal-labels", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print_environment()
    print("\n| defense | peer | attack | first batch | last batch | whole run | bound |")
    print("|---|---|---|---|---|---|---|")
    for title, defense in DEFENSES.items():
        for attack, peer in PEERS.items():
            found = outcome(arguments, defense, attack)
            cells = " | ".join(
                cell(value, found) for value in (found.first_batch, found.last_batch, found[2])
            )
            print(f"| {title} | {peer} | `{attack}` | {cells} | {auc_at_most(found.bound)} |")


def outcome(arguments: argparse.Namespace, defense: str, attack: AttackName) -> Broken:
    example = EXAMPLES / arguments.example
    both = [f"contract.epochs={arguments.epochs}", f"model_seed={arguments.seed}"]
    with tempfile.TemporaryDirectory() as folder:
        active = [*both, f"defense={defense}", f"noise_key_path={folder}/noise.key"]
        active += [f"insecure_nonce_seed={arguments.seed}"]
        if arguments.deal_labels:
            active += deal_labels(example, Path(folder), arguments.seed)
        passive = [*both, f"insecure_nonce_seed={arguments.seed + 1000}"]
        return run_attack(attack, example, active, passive)


def cell(value: float, found: Broken) -> str:
    return f"**{value:.3f}**" if value > found.bound + CHANCE else f"{value:.3f}"


if __name__ == "__main__":
    main()
