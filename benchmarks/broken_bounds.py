"""Which of the ledger's bounds does a peer without a label pass?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.broken_bounds [--deal-labels]

Trains an example in process under defenses of several strengths, with one peer that follows the
protocol and one that sends one long vector for each group of rows (`tests/support/malicious.py`),
and prints Markdown: the AUC of each reading on the first batch, the last and over the whole run,
beside the ledger's bound for the run and whom it is for. Bold is what passes it by more than chance
does, which is .05 here. The reading ``informed`` is given predictions and slopes.
``--deal-labels`` deals the labels out at random, so that features reveal nothing of them.
"""

import argparse
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.environment import print_environment
from splitveil.common.text.wording import auc_at_most
from tests.support.attacked_run import deal_labels
from tests.support.malicious import Attacked, attack

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"

CHANCE = 0.05

DEFENSES = (
    "marvell, power_ratio: 4",
    "marvell, power_ratio: 1024",
    "marvell, noise: persistent, power_ratio: 4",
    "marvell, noise: persistent, power_ratio: 1024",
    "iso, noise_ratio: 16",
    "iso, noise: persistent, noise_ratio: 32",
    "noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}",
)
PEERS: Mapping[str, str] = {"honest": "follows the protocol", "groups": "chooses activations"}
READINGS: tuple[str, ...] = (
    *("residual_energy", "off_the_common_line", "across_the_gap", "informed"),
)


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
    print("\n| defense | peer | reading | first batch | last batch | whole run | bound | for |")
    print("|---|---|---|---|---|---|---|---|")
    for defense in DEFENSES:
        for peer, what in PEERS.items():
            found = outcome(arguments, defense, peer)
            for reading in READINGS:
                read = found.readings[reading]
                figures = (read.first_batch, read.last_batch, read.whole_run)
                cells = " | ".join(cell(value, found.bound) for value in figures)
                bound = f"{auc_at_most(found.bound)} | {found.adversary}"
                print(f"| `{defense}` | {what} | `{reading}` | {cells} | {bound} |", flush=True)


def outcome(arguments: argparse.Namespace, defense: str, peer: str) -> Attacked:
    example = EXAMPLES / arguments.example
    both = [f"contract.epochs={arguments.epochs}", f"model_seed={arguments.seed}"]
    with tempfile.TemporaryDirectory() as folder:
        active = [*both, f"defense={{name: {defense}}}", f"runs_dir={folder}"]
        active += [f"insecure_nonce_seed={arguments.seed}"]
        if arguments.deal_labels:
            active += deal_labels(example, Path(folder), arguments.seed)
        passive = [*both, f"insecure_nonce_seed={arguments.seed + 1000}"]
        return attack(peer, example, active, passive)


def cell(value: float, bound: float) -> str:
    return f"**{value:.3f}**" if value > bound + CHANCE else f"{value:.3f}"


if __name__ == "__main__":
    main()
