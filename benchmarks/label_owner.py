"""What does a label owner learn of the feature owner's columns, honest or not?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=FOLDER python -m benchmarks.label_owner [TABLE ...]

It knows all columns of 800 of 3,000 common rows in training, and guesses each column of the
others: a number's quarter, a category's level. Prints, for each width of the cut and each attack of
`tests.support.label_owner`, the test AUC, the mean share of right guesses from its own columns
alone, with what the trained bottom model sends, and with what was sent in some epochs besides, and
the last share for each column that an attack was after; and the resultant of the second epoch's
gradients, the length of their sum over the sum of their lengths, which a watch could look at.
``people`` is the table of independent columns of `tests/system/test_label_owner.py`.

``lie`` is an honest run whose labels are the last of these columns, above 0 or not, or a coin where
the label owner does not know the row (of ``people``); ``fsha, centred`` is ``fsha`` less the mean
of each batch; ``--watch`` has honest runs with each defense besides.
"""

import argparse
import csv
import logging
import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.environment import print_environment
from benchmarks.first_settings import CUTS, FILES, Rows, prepare
from splitveil.active_party.defenses.interface import Step
from tests.support import label_owner, simulation

EPOCHS = 9
WIDTHS = (1, 4, 64)
WANTED = {"people": label_owner.UNNEEDED, "default_credit": ("x1", "x3", "x4")}
"""Of the second: sex, marital status and age."""
DEFENSES = ("marvell", "max_norm", "iso", "noisy_label", "gafm")


class Centred(label_owner.Fsha):
    def gradient(self, result: Step, positions: Tensor, epoch: int) -> Tensor:
        found = super().gradient(result, positions, epoch)
        return found - found.mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=[*WANTED], help="people, " + ", ".join(CUTS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--rows", type=int, default=3000, help="in training")
    parser.add_argument("--watch", action="store_true", help="least and most resultant, no guesses")
    parser.add_argument("--only", nargs="+", help="attacks, and with --watch defenses")
    given = parser.parse_args()
    print_environment()
    logging.getLogger("splitveil").setLevel(logging.ERROR)
    label_owner.ATTACKS["fsha, centred"] = Centred
    seeds = range(1, given.seeds + 1)
    attacks = given.only or [*label_owner.ATTACKS, *(DEFENSES if given.watch else ["lie"])]
    if given.watch:
        for name, attack in product(given.tables, attacks):
            runs = [run(name, w, attack, n, given.rows, 2) for w in given.widths for n in seeds]
            found = [resultant(one) for one in runs]
            print(f"{name}, {attack}: {min(found):.2f} to {max(found):.2f}", flush=True)
        return
    print("| table | cut | attack | test AUC | own | trained | run | wanted | resultant |")
    print("|---" * 9 + "|")
    for name, width, attack in product(given.tables, given.widths, attacks):
        if attack == "lie" and name != "people":
            continue
        runs = [run(name, width, attack, seed, given.rows) for seed in seeds]
        figures = [figures_of(one, WANTED[name]) for one in runs]
        cells = [f"{statistics.mean(one):.3f}" for one in zip(*figures, strict=True)]
        cells[4:-1] = [" ".join(cells[4:-1])]
        print(f"| {name} | {width} | {attack} | {' | '.join(cells)} |", flush=True)


def run(
    name: str, width: int, attack: str, seed: int, rows: int, epochs: int = EPOCHS
) -> label_owner.Stolen:
    wanted = WANTED.get(name, ())
    both = [f"contract.cut_shape=[{width}]", f"contract.epochs={epochs}", "torch_threads=1"]
    both += [f"{one}={seed}" for one in ("model_seed", "insecure_nonce_seed")]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        if name == "people":
            label_owner.write_people(folder, lies_about_x6=attack == "lie")
            known = label_owner.KNOWN
        else:
            both.append("contract.split={kind: column, column: split}")
            prepare(name, folder, Rows(seed, is_development=True, training=rows))
            known = known_ids(folder, seed)
        defense = attack if attack in DEFENSES else "none"
        own = [*both, f"defense={{name: {defense}}}", "leak_monitor=null"]
        settings = simulation.read_settings(folder, own, both)
        sent = attack if attack in label_owner.ATTACKS else "honest"
        return label_owner.steal(settings, known, sent, wanted)


def resultant(stolen: label_owner.Stolen) -> float:
    received, epochs = stolen.run.passive["passive"].seen.received, len(stolen.epochs)
    steps = len(received) // epochs
    second = torch.cat(received[steps : 2 * steps]).flatten(1)
    return float(second.sum(0).norm() / second.norm(dim=1).sum())


def figures_of(stolen: label_owner.Stolen, wanted: Sequence[str]) -> Sequence[float]:
    """Return the figures of one run, in the order of the columns."""
    auc = stolen.run.active.seen.evaluations[-1].figures.auc
    alone = own_columns(stolen)
    ends = range(EPOCHS // len(wanted) - 1, EPOCHS, EPOCHS // len(wanted))
    last, *others = (torch.cat([alone, one], dim=1) for one in (stolen.last, *stolen.epochs[ends]))
    guessed = [stolen.right(alone), stolen.right(last), stolen.right(last, *others)]
    means = [statistics.mean(right.values()) for right in guessed]
    return [auc or 0.0, *means, *(guessed[-1][one] for one in wanted), resultant(stolen)]


def own_columns(stolen: label_owner.Stolen) -> Tensor:
    trainer = stolen.run.active.session.lifecycle.trainer
    alone = None if trainer is None else trainer.rows_alone()
    if alone is None or alone.features is None:
        raise RuntimeError("expected a label owner with columns of its own")
    numbers, slots = alone.features.numeric, alone.features.categorical
    parts = [] if numbers is None else [numbers]
    parts += [] if slots is None else [one_hot(column).float() for column in slots.T]
    return torch.cat(parts, dim=1)


def known_ids(folder: Path, seed: int) -> frozenset[str]:
    with (folder / FILES[0]).open() as file:
        rows = enumerate(csv.DictReader(file), start=1)
        ids = [row.get("id", str(n)).lower() for n, row in rows if row["split"] == "train"]
    return frozenset(np.random.default_rng(seed).permutation(sorted(ids))[:800].tolist())


if __name__ == "__main__":
    main()
