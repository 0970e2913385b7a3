"""What do settings reach that ``splitveil init`` writes, if nobody edits them?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=FOLDER python -m benchmarks.first_settings [TABLE ...]

Cuts each table into the columns of two parties, runs ``splitveil init`` on both files, and trains
with what it writes, once with the defense that it recommends and once without any. Beside them
stands gradient boosting on all columns that either party uses, with unprotected labels and the same
training and test rows. A seed decides split, batches and noise. Prints the table of
docs/results.md.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from benchmarks.environment import print_environment
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.own_models import Fitting
from splitveil.common.data.settings import DataSettings
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.run.course import AlignedRows
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Terms
from tests.support import simulation

FoundT = TypeVar("FoundT")


class Cut(NamedTuple):
    """Who knows which columns of a table."""

    active_file: str
    active: tuple[str, ...]
    """Columns of the label owner; empty for all of its own file."""
    passive_file: str
    passive: tuple[str, ...]
    label: str
    has_id: bool = True


EMPLOYER = ("id", "income", "workclass", "education", "education_num", "occupation")
TAX_OFFICE = ("id", "age", "marital_status", "relationship", "race", "sex", "capital_gain")

CUTS = {
    "adult": Cut(
        "adult/adult", EMPLOYER, "adult/adult", (*TAX_OFFICE, "capital_loss", "split"), "income"
    ),
    "bank": Cut("bank/alice", (), "bank/bob", (), "y"),
    "give_credit": Cut("give_credit/guest", (), "give_credit/host", (), "y"),
    "talkingdata": Cut(
        "talkingdata/talkingdata",
        ("os", "channel", "click_time", "attributed_time", "is_attributed"),
        "talkingdata/talkingdata",
        ("ip", "app", "device"),
        "is_attributed",
        has_id=False,
    ),
}


class Reached(NamedTuple):
    """Test AUCs on the same rows."""

    train_rows: int
    written: float
    """At the last epoch, with the settings as they were written."""
    refitted: float
    """The same model with the top half fitted to the true labels, for the label owner's own use."""
    undefended: float
    """With ``defense: none``, and else the same settings."""
    boosting: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(CUTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="use only so many rows of each table")
    given = parser.parse_args()
    print_environment("scikit-learn")
    # Every run would warn of its seeds.
    logging.getLogger("splitveil").setLevel(logging.ERROR)
    lines = []
    for name in given.tables or CUTS:
        with tempfile.TemporaryDirectory() as folder:
            cut(name, Path(folder), given.rows)
            reached = []
            for seed in range(1, given.seeds + 1):
                cpu_s = time.process_time()
                reached.append(measure(name, Path(folder), seed))
                took = time.process_time() - cpu_s
                print(f"{name}, seed {seed}: {reached[-1]}, {took:.0f} s of CPU", flush=True)
            lines.append(row(name, reached))
    print("\n| table | training rows | as written | refitted | no defense | gradient boosting |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


def row(name: str, reached: Sequence[Reached]) -> str:
    columns = list(zip(*reached, strict=True))
    rows = f"{min(columns[0]):,}"
    return f"| `{name}` | {rows} | " + " | ".join(map(mean_and_spread, columns[1:])) + " |"


def mean_and_spread(aucs: Sequence[float]) -> str:
    """Return ``.899 ± .003``, or the only figure."""
    mean = f"{statistics.mean(aucs):.3f}".removeprefix("0")
    if len(aucs) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(aucs):.3f}".replace("± 0", "± ")


def measure(name: str, folder: Path, seed: int) -> Reached:
    run = train(folder, seed, f"defense.insecure_noise_seed={seed}")
    undefended = train(folder, seed, "defense={name: none}")
    return Reached(
        len(rows_of(run).splits["train"]),
        last_auc(run),
        refitted_auc(run),
        last_auc(undefended),
        boosted_auc(CUTS[name], folder, run),
    )


def train(folder: Path, seed: int, *overrides: str) -> simulation.Simulation:
    """Run both parties in this process, with a seed and perhaps with other settings."""
    shared = [f"insecure_nonce_seed={seed}", "torch_threads=1"]
    own = [*shared, "leak_monitor=null", *overrides]
    run = simulation.build(simulation.read_settings(folder, own, shared))
    run.meet()
    return run


def rows_of(run: simulation.Simulation) -> AlignedRows:
    return known(run.active.seen.rows)


def last_auc(run: simulation.Simulation) -> float:
    return known(run.active.seen.evaluations[-1].auc)


def refitted_auc(run: simulation.Simulation) -> float:
    """Return the test AUC of the top model that a run leaves for its owner's own predictions."""
    settings, trainer = run.active.settings, known(run.active.session.lifecycle.phase.trainer)
    fitting = Fitting(
        lambda model: build_optimizer(settings.optimizer, model),
        settings.contract.batch_size,
        settings.model_seed,
    )
    model = known(trainer.refitted(fitting))
    return known(known(trainer.measure(model, rows_of(run).splits["test"])).auc)


def known(found: FoundT | None) -> FoundT:
    """Return a figure that every run of this benchmark has."""
    if found is None:
        raise RuntimeError("expected a run to its end, with test rows, whose top model is refitted")
    return found


def cut(name: str, folder: Path, num_rows: int | None = None) -> None:
    """Write both parties' files and settings, of so many rows with all of a rare class, or all."""
    parts = CUTS[name]
    own, other = read(parts.active_file, parts.active), read(parts.passive_file, parts.passive)
    rows = chosen_rows(own[parts.label], num_rows)
    own = own.take(rows)
    if parts.has_id:
        other = other.filter(pc.is_in(other["id"], value_set=own["id"].combine_chunks()))
        other = other.take(np.random.default_rng(6).permutation(len(other)))
    else:
        other = other.take(rows)
    csv.write_csv(own, folder / "own.csv")
    csv.write_csv(other, folder / "other.csv")
    wishes = Wishes(has_id=parts.has_id)
    initialise(folder / "own.csv", wishes, Terms("active", folder))
    initialise(folder / "other.csv", wishes, Terms("passive", folder))


def read(name: str, columns: Sequence[str]) -> pa.Table:
    """Read columns of a table below SPLITVEIL_DATA; none means all."""
    options = csv.ConvertOptions(strings_can_be_null=False)
    path = Path(os.environ["SPLITVEIL_DATA"]) / f"{name}.csv.gz"
    table = csv.read_csv(path, convert_options=options)
    return table.select(columns) if columns else table


def chosen_rows(labels: pa.ChunkedArray, num_rows: int | None) -> np.ndarray:
    """Return some rows: all of a rare class, and as many others as there is room for."""
    values = np.array(labels.to_pylist()).astype(str)
    if num_rows is None:
        return np.arange(len(values))
    drawn = np.random.default_rng(5).permutation(len(values))
    rarest = min(set(values), key=lambda value: int((values == value).sum()))
    if (values == rarest).mean() < 0.01:
        drawn = np.concatenate([np.flatnonzero(values == rarest), drawn[values[drawn] != rarest]])
    return np.sort(drawn[:num_rows])


def boosted_auc(parts: Cut, folder: Path, run: simulation.Simulation) -> float:
    """Return the test AUC of gradient boosting with its defaults, on a run's own split."""
    owner = run.active.settings
    (other,) = (party.settings for party in run.passive.values())
    own_part = features(owner.data, folder / "own.csv")
    other_part = features(other.data, folder / "other.csv")
    labels, place = labels_of(owner, parts, folder)
    rows = rows_of(run)
    train, test = (place[rows.file_rows[rows.splits[split]]] for split in ("train", "test"))
    trees = HistGradientBoostingClassifier(
        categorical_features=own_part[1] + other_part[1], random_state=0
    )
    joined = np.column_stack([own_part[0], other_part[0]])
    trees.fit(joined[train], labels[train])
    return float(roc_auc_score(labels[test], trees.predict_proba(joined[test])[:, 1]))


def labels_of(owner: ActiveSettings, parts: Cut, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels in the order of ids, and the place of each file row in that order."""
    table = csv.read_csv(folder / "own.csv")
    column = owner.data.id_column
    ids = range(len(table)) if column is None else table[column].to_pylist()
    order = np.arange(len(table)) if column is None else np.argsort(np.array(ids).astype(str))
    labels = np.array(table[parts.label].to_pylist()).astype(str)[order]
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order))
    return labels == (owner.data.positive_label or "1"), place


def features(data: DataSettings, path: Path) -> tuple[np.ndarray, list[bool]]:
    """Return a party's features for trees, its rows in the order of their ids.

    Returns:
        (rows, columns), and for each column whether its numbers are codes of categories.
    """
    table = csv.read_csv(path, convert_options=csv.ConvertOptions(strings_can_be_null=False))
    if data.id_column is not None:
        table = table.take(np.argsort(np.array(table[data.id_column].to_pylist()).astype(str)))
    settings = known(data.features)
    columns, is_category = [], []
    gaps = settings.missing_texts
    for column in settings.numeric:
        values = [str(cell) for cell in table[column].to_pylist()]
        columns.append(np.array([np.nan if cell in gaps else float(cell) for cell in values]))
        is_category.append(False)
    for column in settings.categorical:
        texts = np.array([str(cell) for cell in table[column].to_pylist()])
        _, codes, counts = np.unique(texts, return_inverse=True, return_counts=True)
        by_frequency = np.argsort(np.argsort(-counts, kind="stable"))
        columns.append(np.minimum(by_frequency[codes], 254).astype(float))
        is_category.append(True)
    return np.column_stack(columns), is_category


if __name__ == "__main__":
    main()
