"""Does any attack exclude the epsilon that a defense states?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.epsilon_bounds [--epochs 3]

Trains `default_credit` in one process under each defense, with the leak monitor on every gradient.
Prints Markdown: test AUC; the strongest attack's leak AUC of all examples and beyond features; the
largest epsilon that the observational audit excludes at 95 % confidence, with the guesses behind
it; and the smallest epsilon that the ledger states at the same delta, for whom, with the p-value of
the guesses under it. Bold is what excludes a stated epsilon at 99.9 %: of twenty tight mechanisms,
one passes its own epsilon at 95 % by chance.
"""

import argparse
import logging

import torch
import yaml

from benchmarks.environment import print_environment
from splitveil import simulate
from splitveil.common.privacy.attacks import CUT
from splitveil.common.privacy.figures import BeyondFigures, EpsilonBound
from splitveil.common.record.run_record import Summary, read_summary

DEFENSES = (
    "{name: none}",
    "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 1}}",
    "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 3}}",
    "{name: noisy_label, mechanism: {kind: laplace, epsilon: 1}}",
    "{name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}}",
    "{name: noisy_label, mechanism: {kind: alibi, epsilon: 1}}",
    "{name: marvell, noise: persistent, strength: {power_ratio: 4}}",
    "{name: iso, noise: persistent, noise_ratio: 8}",
    "{name: marvell, strength: {leak_auc: 0.6}}",
    "{name: iso, noise_ratio: 4}",
    "{name: max_norm}",
)
ATTACKS = (
    *("norm", "cosine", "spectral", "residual_energy"),
    *("accumulated_spectral", "accumulated_cosine", "accumulated_residual_energy"),
    *("hint_combiner_50", "hint_combiner_200"),
)
COLUMNS = (
    *("defense", "test AUC", "leak AUC", "beyond features"),
    *("epsilon excluded", "correct guesses", "epsilon stated", "p"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--defenses", nargs="+", default=[""], help="parts of their settings")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print_environment()
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for defense in DEFENSES:
        if any(part in defense for part in given.defenses):
            runs = simulate(
                "default_credit",
                defense=[yaml.safe_load(defense)],
                attacks=ATTACKS,
                seeds=[given.seed],
                settings={"contract.epochs": given.epochs},
                threads=1,
            )
            summary = read_summary(runs[0].path / "active")
            print(f"| `{defense}` | {' | '.join(cells(summary))} |", flush=True)


def cells(summary: Summary) -> list[str]:
    leak = summary.of_leak
    beyond = leak.beyond or BeyondFigures()
    raw = max((one.auc for one in leak.run_level.get(CUT, {}).values()), default=float("nan"))
    strongest = max(beyond.adjusted.values(), key=lambda one: one.value, default=None)
    adjusted = "–" if strongest is None else f"{strongest.value:.3f} (from {strongest.low:.3f})"
    test_auc = summary.of_active.model.test.auc
    model = "–" if test_auc is None else f"{test_auc:.3f}"
    return [model, f"{raw:.3f}", adjusted, *epsilon_cells(beyond.epsilon)]


def epsilon_cells(found: EpsilonBound | None) -> list[str]:
    if found is None:
        return ["–"] * 4
    excluded = f"**{found.epsilon:.3f}**" if found.passes_stated else f"{found.epsilon:.3f}"
    guesses = f"{found.correct} of {found.guesses}, `{found.attack}`"
    if found.stated is None:
        return [excluded, guesses, "none", "–"]
    stated = f"{found.stated:.3f}, {found.stated_for}"
    return [excluded, guesses, stated, f"{found.p_value_of_stated:.2g}"]


if __name__ == "__main__":
    main()
