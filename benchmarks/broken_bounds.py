"""Which of the bounds that a ledger states do peers pass, and with which reading?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.broken_bounds [--deal-labels]

Trains an example in process under defenses of several strengths, with the peers of
`tests/malicious.py`: one follows the protocol, and the others choose their activations. Prints
Markdown: the strongest reading of each peer that knows nothing but the bytes, and of one that knows
predictions and slopes as well, each by its AUC over the whole run, beside the ledger's bounds for
the run. Bold is what passes the bound for peers who know class means only, by more than four
standard errors of chance. ``--deal-labels`` deals the labels out at random, so that features tell
nothing of them.
"""

import argparse
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch

from benchmarks.environment import print_environment
from splitveil.common.privacy.covers import Covers
from splitveil.common.text.upper_bounds import auc_at_most
from tests.attacked_run import deal_labels
from tests.malicious import Attacked, PeerName, ReadingName, attack

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"

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
    "`projected_labels`, .6": "{name: projected_labels, strength: {leak_auc: 0.6}}",
}
TOLD: frozenset[ReadingName] = frozenset({"informed", "targets"})
"""Readings that know predictions and slopes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", default="default_credit")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deal-labels", action="store_true")
    parser.add_argument("--peers", nargs="*", default=["honest", "groups"], choices=PEERS)
    parser.add_argument("--only", nargs="*", default=list(DEFENSES), choices=list(DEFENSES))
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print_environment()
    columns = ["knows bytes alone", "knows predictions", *(f"bound: {peers}" for peers in Covers)]
    print(f"\n| defense | peer | {' | '.join(columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    for title in arguments.only:
        for peer in arguments.peers:
            found = outcome(arguments, DEFENSES[title], peer)
            cells = [strongest(found, set(found.readings) - TOLD), strongest(found, TOLD)]
            cells += [bound_in_words(bound) for bound in found.bounds.values()]
            print(f"| {title} | {peer} | {' | '.join(cells)} |", flush=True)


PEERS: tuple[PeerName, ...] = get_args(PeerName)


def outcome(arguments: argparse.Namespace, defense: str, peer: PeerName) -> Attacked:
    example = EXAMPLES / arguments.example
    both = [f"contract.epochs={arguments.epochs}", f"model_seed={arguments.seed}"]
    with tempfile.TemporaryDirectory() as folder:
        active = [*both, f"defense={defense}", f"noise_key_path={folder}/noise.key"]
        active += [f"insecure_nonce_seed={arguments.seed}"]
        if arguments.deal_labels:
            active += deal_labels(example, Path(folder), arguments.seed)
        passive = [*both, f"insecure_nonce_seed={arguments.seed + 1000}"]
        return attack(peer, example, active, passive)


def strongest(found: Attacked, names: set[ReadingName] | frozenset[ReadingName]) -> str:
    """Return the reading with the largest AUC over the whole run, of either sign."""
    aucs = {name: max(one.whole_run, 1 - one.whole_run) for name, one in found.readings.items()}
    name = max(names, key=lambda name: aucs[name])
    beyond = found.beyond(found.bounds[Covers.CLASS_MEANS])
    words = f"{aucs[name]:.3f} `{name}`"
    return f"**{words}**" if name in beyond else words


def bound_in_words(bound: float) -> str:
    return "none" if bound >= 1 else auc_at_most(bound)


if __name__ == "__main__":
    main()
