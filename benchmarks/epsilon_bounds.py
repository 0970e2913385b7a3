"""Does any attack exclude the epsilon that a defense states?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.epsilon_bounds [--example adult]

Trains an example in process under each defense, with the leak monitor on every gradient, and prints
Markdown: the largest epsilon that the observational audit excludes at 95 % confidence, with the
guesses behind it, beside the epsilon that the ledger states at the same delta; and the adjusted
leak AUC of the strongest attack beside the raw one. Bold is what passes a stated epsilon.
``--deal-labels`` deals the labels out at random, so that features tell nothing of them.
"""

import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from splitveil.common.record.summary import Summary, to_json
from tests.attacked_run import deal_labels
from tests.recorded import recorders
from tests.runs import build_parties, run_in_process

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"

DEFENSES: Mapping[str, str] = {
    "none": "{name: none}",
    "noisy_label randomized_response, epsilon 1": (
        "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 1}}"
    ),
    "noisy_label laplace, epsilon 1": (
        "{name: noisy_label, mechanism: {kind: laplace, epsilon: 1}}"
    ),
    "noisy_label gaussian, noise ratio 2": (
        "{name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}}"
    ),
    "marvell, leak_auc 0.6": "{name: marvell, strength: {leak_auc: 0.6}}",
    "marvell persistent, power ratio 4": (
        "{name: marvell, noise: persistent, strength: {power_ratio: 4}}"
    ),
    "iso persistent, noise ratio 8": "{name: iso, noise: persistent, noise_ratio: 8}",
    "max_norm": "{name: max_norm}",
}
ATTACKS = "[norm, cosine, spectral, accumulated_spectral, accumulated_cosine, hint_combiner_200]"


def run(example: str, defense: str, epochs: int, *, dealt: bool) -> Summary:
    folder = EXAMPLES / example
    with tempfile.TemporaryDirectory() as scratch:
        both = [f"contract.epochs={epochs}", "model_seed=0", "insecure_nonce_seed=0"]
        active = [*both, f"defense={defense}", f"noise_key_path={scratch}/noise.key"]
        active += [f"leak_monitor={{attacks: {ATTACKS}, max_cpu_share: null, queue_batches: 512}}"]
        if dealt:
            active += deal_labels(folder, Path(scratch), 0)
        parties = build_parties(folder, active, [*both, "adversary=null"])
        with recorders(parties, Path(scratch)) as seen:
            run_in_process(parties)
        started = time.perf_counter()
        s = seen.active.summary({})
        print("summary took", time.perf_counter() - started)
        return s


if __name__ == "__main__":
    import sys

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for name in sys.argv[3].split(","):
        for k, v in DEFENSES.items():
            if k.startswith(name):
                t = time.perf_counter()
                s = to_json(run(sys.argv[1], v, int(sys.argv[2]), dealt=len(sys.argv) > 4))
                print(k, "test", s["test_auc"], "took", time.perf_counter() - t)
                for a, b in s["leak_run_level"]["cut"].items():
                    print("   raw", a, {x: y if y is None else round(y, 3) for x, y in b.items()})
                for a, b in s["adjusted_leak"].items():
                    print("   adj", a, {x: round(y, 3) for x, y in b.items()})
                for a, b in s["leak_advantage"].items():
                    print("   adv", a, {x: round(y, 3) for x, y in b.items()})
                print(
                    "   eps",
                    s.get("epsilon_lower_bound"),
                    s.get("epsilon_lower_bound_details"),
                    "stated",
                    s["ledger"].get("epsilon"),
                )
