"""Does any attack exclude the epsilon that a defense states?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.epsilon_bounds [--tables adult]

Trains each table in process under each defense, with the leak monitor on every gradient, and prints
Markdown: test AUC; the strongest attack's leak AUC of all examples and beyond what features tell;
the largest epsilon that the observational audit excludes at 95 % confidence, with the guesses
behind it; and the smallest epsilon that the ledger states at the same delta, for whom, with the
p-value of the guesses under it. Bold is what excludes a stated epsilon at 99.9 %: of twenty tight
mechanisms, one passes its own epsilon at 95 % by chance.

``--deal-labels`` deals the labels out at random, so that features tell nothing of them and the
audit presupposes nothing; the active party then has no features of its own.
"""

import argparse
import csv
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.environment import print_environment
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.attacks import CUT
from splitveil.common.record.beyond_figures import BeyondFigures, EpsilonFigures
from splitveil.common.record.run_record import read_summary
from splitveil.common.record.summary import Summary
from splitveil.experiments.in_process import run_in_process

ROOT = Path(__file__).parent.parent
EXPERIMENT = ROOT / "experiments" / "guaranteed_tradeoff.yaml"
"""Has the settings of the tables that are not examples."""

DEFENSES: Mapping[str, str] = {
    "none": "{name: none}",
    "projected_labels, leak_auc .60": "{name: projected_labels, strength: {leak_auc: 0.6}}",
    "projected_labels, leak_auc .80": "{name: projected_labels, strength: {leak_auc: 0.8}}",
    "noisy_label randomized_response, epsilon 1": (
        "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 1}}"
    ),
    "noisy_label randomized_response, epsilon 3": (
        "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 3}}"
    ),
    "noisy_label laplace, epsilon 1": (
        "{name: noisy_label, mechanism: {kind: laplace, epsilon: 1}}"
    ),
    "noisy_label gaussian, noise ratio 2": (
        "{name: noisy_label, mechanism: {kind: gaussian, noise_ratio: 2}}"
    ),
    "noisy_label alibi, epsilon 1": "{name: noisy_label, mechanism: {kind: alibi, epsilon: 1}}",
    "marvell persistent, power ratio 4": (
        "{name: marvell, noise: persistent, strength: {power_ratio: 4}}"
    ),
    "iso persistent, noise ratio 8": "{name: iso, noise: persistent, noise_ratio: 8}",
    "marvell, leak_auc .6": "{name: marvell, strength: {leak_auc: 0.6}}",
    "iso, noise ratio 4": "{name: iso, noise_ratio: 4}",
    "max_norm": "{name: max_norm}",
}
ATTACKS = (
    *("norm", "cosine", "spectral", "residual_energy"),
    *("accumulated_spectral", "accumulated_cosine", "accumulated_residual_energy"),
    *("hint_combiner_50", "hint_combiner_200"),
)
COLUMNS = (
    *("table", "defense", "test AUC", "leak AUC", "beyond features"),
    *("epsilon excluded", "correct guesses", "epsilon stated", "p"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=["default_credit", "adult"])
    parser.add_argument("--defenses", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deal-labels", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print_environment()
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for table in arguments.tables:
        for title, defense in DEFENSES.items():
            if title.startswith(tuple(arguments.defenses)):
                summary = trained(table, defense, arguments)
                print(f"| {table} | {title} | {' | '.join(cells(summary))} |", flush=True)


def trained(table: str, defense: str, arguments: argparse.Namespace) -> Summary:
    """Train once, and return the active party's summary."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_settings(folder, table, defense, arguments)
        run_in_process(folder, folder / "runs" / "audited")
        return read_summary(folder / "runs" / "audited" / "active")


def write_settings(folder: Path, table: str, defense: str, arguments: argparse.Namespace) -> None:
    """Write the three settings files of a table."""
    contract, active, passive = settings_of(table)
    common = {"model_seed": arguments.seed, "security": {"mode": "insecure"}}
    contract |= {"run_name": "audited", "epochs": arguments.epochs}
    active |= {
        **common,
        "listen": "127.0.0.1:50051",
        "defense": yaml.safe_load(defense),
        "noise_key_path": str(folder / "noise.key"),
        "insecure_nonce_seed": arguments.seed,
        "leak_monitor": {"attacks": list(ATTACKS), "max_cpu_share": None, "queue_batches": 1024},
    }
    passive |= {
        **common,
        "connect": "127.0.0.1:50051",
        "insecure_nonce_seed": arguments.seed + 1000,
    }
    for party, settings in (("contract", contract), ("active", active), ("passive", passive)):
        named = settings if party == "contract" else {"contract": "contract.yaml", **settings}
        (folder / f"{party}.yaml").write_text(yaml.safe_dump(named))
    if arguments.deal_labels:
        active["data"] = dealt(folder, arguments.seed)
        (folder / "active.yaml").write_text(yaml.safe_dump({"contract": "contract.yaml", **active}))


def settings_of(table: str) -> list[dict[str, Any]]:
    """Return contract, active and passive settings: of an example, or of a table of experiments."""
    example = ROOT / "deploy" / "examples" / table
    if example.is_dir():
        files = [example / f"{name}.yaml" for name in ("contract", "active", "passive")]
        found = [yaml.safe_load(file.read_text()) for file in files]
        found[2].pop("adversary", None)
    else:
        tables = yaml.safe_load(EXPERIMENT.read_text())["datasets"]
        found = [dict(tables[table][name]) for name in ("contract", "active", "passive")]
    return [{k: v for k, v in one.items() if k != "contract"} for one in found]


def dealt(folder: Path, seed: int) -> dict[str, Any]:
    """Write the labels to a file, permuted at random among the ids; return how they are read."""
    settings = load_party_settings(ActiveSettings, folder / "active.yaml", [])
    data = PartyData.load(settings.data, folder)
    given = np.asarray(data.table.labels)
    labels = np.random.default_rng(seed).permutation(given).astype(int)
    with (folder / "dealt.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "label"), *zip(data.ids, labels, strict=True)])
    return {
        "source": {"kind": "csv", "path": str(folder / "dealt.csv")},
        "id_column": "id",
        "label_column": "label",
    }


def cells(summary: Summary) -> list[str]:
    leak = summary.of_leak
    beyond = leak.beyond or BeyondFigures()
    raw = max((one.auc for one in leak.run_level.get(CUT, {}).values()), default=float("nan"))
    _, strongest = beyond.strongest() or ("", None)
    adjusted = "–" if strongest is None else f"{strongest.value:.3f} (from {strongest.low:.3f})"
    test_auc = summary.of_active.model.test_auc
    model = "–" if test_auc is None else f"{test_auc:.3f}"
    return [model, f"{raw:.3f}", adjusted, *epsilon_cells(beyond.epsilon)]


def epsilon_cells(found: EpsilonFigures | None) -> list[str]:
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
