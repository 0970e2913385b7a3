"""What do GAFM's gradients reveal, over the whole course, and a peer who knows its activations?

    SPLITVEIL_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.gafm [--seeds 2] [--epochs 300]

Trains Spambase as in GAFM's paper (57 features to 16 to a cut of one number, batch 1028, Adam 1e-4,
70/30) in process. Norm, mean and median are the paper's attacks, each on single batches. "knows f"
is a peer who uses what it has anyway, its own activations, and knows no label; "f alone" is what
those say without any gradient. Figures are means over an epoch's batches of more than 200 rows.
"""

import argparse
import gzip
import logging
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.environment import print_environment
from benchmarks.step import write_parties
from splitveil.active_party.run.session import ActiveSession
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.run.course import Batch
from tests.support.runs import (
    ACTIVE,
    CONTRACT,
    PASSIVE,
    PassiveRecording,
    build_parties,
    run_in_process,
)

DEFENSES = {
    "none": "{name: none}",
    "marvell, sum_kl 0.64": "{name: marvell, strength: {sum_kl: 0.64}}",
    "gafm": "{name: gafm}",
    "gafm, persistent": "{name: gafm, response: persistent}",
    "gafm, ce_only": "{name: gafm, terms: ce_only}",
    "gafm, gan_only": "{name: gafm, terms: gan_only}",
    "gafm + marvell, sum_kl 0.64": (
        "{name: gafm, composed_with: {name: marvell, strength: {sum_kl: 0.64}}}"
    ),
}
READINGS = ("norm", "mean", "median", "knows f", "f alone")


def read_labels(answers: Tensor, activation: Tensor) -> Tensor:
    """Score answers about a cut of one number, each (batch, 1), as one who knows its activation.

    In GAFM all but the softened label is a smooth function of the activation: fits that and two
    levels, one for each side of 1/2, in turns. Which level is the positives' is left open.
    """
    f, given = (part[:, 0].detach().double().numpy() for part in (activation, answers))
    knots = np.quantile(f, np.linspace(0, 1, 8)[1:-1])
    smooth = [np.ones_like(f), f, 1 / (1 + np.exp(-f)), *(np.maximum(f - k, 0) for k in knots)]
    design = np.stack(smooth, axis=1)
    rest = given - design @ np.linalg.lstsq(design, given, rcond=None)[0]
    fits = []
    for start in (rest, np.median(f) - f):
        side = np.where(start < 0, 1.0, -1.0)
        for _ in range(50):
            with_side = np.column_stack([design, side])
            fitted = np.linalg.lstsq(with_side, given, rcond=None)[0]
            rest = given - design @ fitted[:-1]
            side = np.where(rest * fitted[-1] > 0, 1.0, -1.0)
        fits.append((float(((given - with_side @ fitted) ** 2).sum()), rest))
    return torch.from_numpy(-min(fits, key=lambda fit: fit[0])[1])


class Reader(PassiveRecording):
    """Reads every gradient as it arrives; the labels only say how well."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[tuple[int, list[float]]] = []
        self.session: ActiveSession | None = None

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        if len(received) <= 200:
            return
        trainer = None if self.session is None else self.session.lifecycle.phase.trainer
        if trainer is None:
            raise RuntimeError("an answer before there is a trainer")
        labels, rows = trainer.labels_of(batch.positions), received.double()
        pos, neg = rows[labels == 1], rows[labels == 0]
        scores = [
            rows.norm(dim=1),
            nearer(rows, pos.mean(dim=0), neg.mean(dim=0)),
            nearer(rows, pos.median(dim=0).values, neg.median(dim=0).values),
            read_labels(received, sent),
            sent[:, 0].detach(),
        ]
        self.readings.append((batch.epoch, [leak_auc(score, labels) for score in scores]))

    def mean(self, epochs: range) -> list[float]:
        found = [values for epoch, values in self.readings if epoch in epochs]
        return [statistics.fmean(column) for column in zip(*found, strict=True)]


def nearer(rows: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    """Score rows by how much nearer they are to one point than to another."""
    nearness: Tensor = (rows - neg).norm(dim=1) - (rows - pos).norm(dim=1)
    return nearness


def write_spambase(data: Path, folder: Path, epochs: int) -> None:
    """Write both parties' files and settings."""
    with gzip.open(data / "spambase" / "spambase.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", skiprows=1)
    names = ",".join(f"x{column}" for column in range(57))
    texts = {
        "active.csv": ["id,label", *(f"m{i},{int(row[-1])}" for i, row in enumerate(rows))],
        "passive.csv": [
            f"id,{names}",
            *(f"m{i}," + ",".join(map(str, row[:-1])) for i, row in enumerate(rows)),
        ],
    }
    for name, lines in texts.items():
        (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    contract = CONTRACT | {
        "cut_shape": [1],
        "batch_size": 1028,
        "evaluation_batch_size": 4096,
        "epochs": epochs,
        "split": {"kind": "hash", "train": 0.7, "validation": 0.0, "test": 0.3},
    }
    model = {"kind": "mlp", "hidden": [16], "activation": "leaky_relu"}
    optimizer = {"kind": "adam", "learning_rate": 1e-4}
    labels = {
        "source": {"kind": "csv", "path": "active.csv"},
        "id_column": "id",
        "label_column": "label",
    }
    active = ACTIVE | {"top_model": model, "optimizer": optimizer, "data": labels}
    passive = PASSIVE | {"bottom_model": model, "optimizer": optimizer}
    write_parties(folder, contract, active, passive)


def train(folder: Path, defense: str, seed: int) -> tuple[float, Reader]:
    """Return the test AUC after the last epoch, and what was read on the way."""
    seeds = [f"model_seed={seed}", f"insecure_nonce_seed={seed}"]
    reader = Reader()
    parties = build_parties(folder, [*seeds, f"defense={defense}"], seeds, passive_seen=reader)
    reader.session = parties.session
    run_in_process(parties)
    return parties.active.evaluations[-1].auc, reader


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=DEFENSES, default=list(DEFENSES))
    chosen = parser.parse_args(arguments)
    logging.disable()
    print_environment()
    last = chosen.epochs
    spans = {"first epoch": range(1), "to 50": range(50), "last 10": range(last - 10, last)}
    print(f"| defense | seed | test AUC | epochs | {' | '.join(READINGS)} |")
    print("|---|---|---|---|" + "---|" * len(READINGS))
    with tempfile.TemporaryDirectory() as folder:
        write_spambase(Path(os.environ["SPLITVEIL_DATA"]), Path(folder), last)
        for name in chosen.only:
            for seed in range(1, chosen.seeds + 1):
                test_auc, reader = train(Path(folder), DEFENSES[name], seed)
                for span, epochs in spans.items():
                    figures = " | ".join(f"{value:.2f}" for value in reader.mean(epochs))
                    print(f"| {name} | {seed} | {test_auc:.3f} | {span} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
