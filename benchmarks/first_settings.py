"""What do settings reach that ``splitveil init`` writes, if nobody edits them?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=FOLDER python -m benchmarks.first_settings [TABLE ...]

Cuts each table into the columns of two parties, runs ``splitveil init`` on both files, where the
user names some categories, and trains with what it writes: without a defense, and with
projected_labels at .60 and .55. Beside them stand gradient boosting with its defaults on all
columns that either party uses and on those of the label owner only, both with unprotected labels
and the same rows, and the settings that ``init`` wrote before there was ``kind: tabular``. Prints
the table of docs/results.md.

The report rows, the last 20 % of the common ids in the order of their BLAKE2b digests, are the test
rows. No setting was ever chosen by them: that is done with ``--development``, where the test rows
are a fifth of the other rows, and with ``--set``. A seed decides weights, batches and noise, and
with ``--development`` the fold.
"""

import argparse
import hashlib
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from benchmarks.environment import in_a_process, print_environment, status_mib
from benchmarks.step import StepTimes
from splitveil.deploy import flights
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Terms
from tests.support import simulation

FoundT = TypeVar("FoundT")
Tables = tuple[pa.Table, pa.Table]
FILES = ("own.csv", "other.csv")


class Cut(NamedTuple):
    """Who knows which columns of a table; how it was trained before; what it should reach."""

    files: tuple[str, str]
    label: str
    columns: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Those of the label owner and those of the other party; none for all of its file."""
    has_id: bool = True
    before: tuple[str, ...] = ()
    """What differs from BEFORE in the settings that init used to write."""
    targets: tuple[float, ...] = (-0.002, -0.006, -0.012)
    """The least difference from their references of "no defense", ".60" and ".55"."""
    categorical: tuple[str, ...] = ()
    """Whole numbers that are categories, as a user of ``init`` says with ``--categorical``."""


BEFORE = (
    "contract.batch_size=1024",
    "contract.epochs=30",
    "contract.schedule={}",
    "optimizer={kind: adam, learning_rate: 0.003}",
    "top_model={kind: mlp, hidden: [32]}",
    "bottom_model={kind: mlp, hidden: [64], output_activation: relu}",
)
UNDEFENDED = "defense={name: none}"
FLIGHTS = "flights x weather"

EMPLOYER = ("id", "income", "workclass", "education", "education_num", "occupation")
TAX_OFFICE = (
    *("id", "age", "marital_status", "relationship", "race", "sex", "capital_gain", "capital_loss"),
)
CLICK = ("os", "channel", "click_time", "attributed_time", "is_attributed")

CUTS = {
    "default_credit": Cut(("default_credit/guest", "default_credit/host"), "y"),
    "give_credit": Cut(("give_credit/guest", "give_credit/host"), "y"),
    "adult": Cut(
        ("adult/adult",) * 2, "income", (EMPLOYER, TAX_OFFICE), targets=(-0.010, -0.006, -0.012)
    ),
    "bank": Cut(
        ("bank/alice", "bank/bob"),
        "y",
        before=("contract.batch_size=256",),
        targets=(-0.002, -0.025),
    ),
    "talkingdata": Cut(
        ("talkingdata/talkingdata",) * 2,
        "is_attributed",
        (CLICK, ("ip", "app", "device")),
        has_id=False,
        before=("contract.epochs=10", "bottom_model.embedding_dim=8"),
        targets=(-0.002,),
        categorical=("ip", "app", "device", "os", "channel"),
    ),
    FLIGHTS: Cut(("", ""), "late", targets=(-0.012, -0.006, -0.012), categorical=("distance",)),
}

REFERENCES = {
    "boosting": "",
    "own columns": "",
    "mlp": "",
    "no defense": "boosting",
    ".60": "no defense",
    ".60 refitted": "no defense",
    ".55": "no defense",
    ".55 refitted": "no defense",
}
"""The columns: test AUCs on the same rows, and what each is compared with, seed by seed.

*Refitted* is the same model with a new top half fitted to the true labels, for the label owner's
own use; every other model is that of the last epoch.
"""

COSTS = ("CPU", "memory")
"""Of a step and of a run, as multiples of those of ``mlp``."""

Figures = dict[str, float]


class Rows(NamedTuple):
    """The rows of a table that are used."""

    seed: int
    is_development: bool = False
    training: int | None = None
    """At most so many training rows, with as many of a rare class as there are; None for all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(CUTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="use only so many training rows of each table")
    parser.add_argument("--development", action="store_true", help="leave the report rows alone")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of any party")
    parser.add_argument("--only", nargs="+", choices=(*REFERENCES, "cost"), help="some columns")
    given = parser.parse_args()
    print_environment("scikit-learn")
    # Every run would warn of its seeds.
    logging.getLogger("splitveil").setLevel(logging.ERROR)
    columns = given.only or [*REFERENCES, "cost"]
    lines = []
    for name in given.tables or CUTS:
        reached: list[Figures] = []
        for seed in range(1, given.seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                prepare(name, Path(folder), Rows(seed, given.development, given.rows))
                cpu_s = time.process_time()
                reached.append(measure(name, Path(folder), seed, given.set, columns))
                if "cost" in columns and seed == given.seeds:
                    reached[-1] |= costs(name, Path(folder), given.set, reached[-1]["rows"])
                took = time.process_time() - cpu_s
                print(f"{name}, seed {seed}: {reached[-1]}, {took:.0f} s of CPU", flush=True)
        lines.append(row(name, reached))
    print(f"\n| table | training rows | {' | '.join((*REFERENCES, *COSTS))} |")
    print("|---" * (2 + len(REFERENCES) + len(COSTS)) + "|")
    print("\n".join(lines))


def row(name: str, reached: Sequence[Figures]) -> str:
    """Return a line: each figure, and what it differs from its reference by, bold if too much."""
    cells = [f"`{name}`", f"{reached[0]['rows']:,.0f}"]
    targets = dict(zip(("no defense", ".60", ".55"), CUTS[name].targets, strict=False))
    for column, reference in REFERENCES.items():
        values = [figures[column] for figures in reached if column in figures]
        cell = mean_and_spread(values)
        if values and reference in reached[0]:
            less = [figures[column] - figures[reference] for figures in reached]
            target = targets.get(column.removesuffix(" refitted"), -1)
            bold = "**" * (statistics.mean(less) < target)
            cell += f" ({bold}{mean_and_spread(less, '+')}{bold})"
        cells.append(cell)
    cells += (f"{reached[-1][cost]:.2f}" if cost in reached[-1] else "" for cost in COSTS)
    return f"| {' | '.join(cells)} |"


def mean_and_spread(aucs: Sequence[float], sign: str = "") -> str:
    """Return ``.899 ± .003``, or the only figure."""
    if not aucs:
        return ""
    mean = f"{statistics.mean(aucs):{sign}.3f}".replace("0.", ".", 1)
    if len(aucs) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(aucs):.3f}".replace("± 0", "± ")


def measure(
    name: str, folder: Path, seed: int, changed: Sequence[str], columns: Sequence[str]
) -> Figures:
    """Return the figures of one seed."""
    run = train(folder, seed, *changed, UNDEFENDED)
    figures = {"rows": float(len(known(run.active.seen.rows).splits["train"]))}
    figures["no defense"] = last_auc(run)
    if "boosting" in columns:
        figures["boosting"] = boosted_auc(run, seed)
        figures["own columns"] = boosted_auc(run, seed, own_only=True)
    if "mlp" in columns:
        figures["mlp"] = last_auc(train(folder, seed, *BEFORE, *CUTS[name].before, UNDEFENDED))
    for column in {".60", ".55"} & set(columns):
        run = train(folder, seed, *changed, f"defense.strength.leak_auc={column}")
        figures |= {column: last_auc(run), f"{column} refitted": refitted_auc(run)}
    return figures


def train(
    folder: Path, seed: int, *changed: str, times: StepTimes | None = None
) -> simulation.Simulation:
    """Run both parties in this process, with a seed and perhaps with other settings."""
    both = [f"insecure_nonce_seed={seed}", "torch_threads=1", f"model_seed={seed}"]
    both.append("contract.split={kind: column, column: split}")
    active, passive = [*both, "leak_monitor=null"], list(both)
    for setting in changed:
        whose = setting.partition(".")[0].partition("=")[0]
        if whose in {"contract", "optimizer"} or whose.startswith("bottom"):
            passive.append(setting)
        if not whose.startswith("bottom"):
            active.append(setting)
    if UNDEFENDED not in changed:
        active.append(f"defense.insecure_noise_seed={seed}")
    seen = simulation.ActiveRecording()
    seen.on_step = lambda batch, result: None  # type: ignore[method-assign]
    settings = simulation.read_settings(folder, active, passive)
    run = simulation.build(
        settings, active_seen=seen, passive_seen={"passive": times or StepTimes()}
    )
    run.meet()
    return run


def last_auc(run: simulation.Simulation) -> float:
    return known(run.active.seen.evaluations[-1].auc)


def refitted_auc(run: simulation.Simulation) -> float:
    """Return the test AUC of the top model that a run leaves for its owner's own predictions."""
    trainer = known(run.active.session.lifecycle.phase.trainer)
    model = known(trainer.refitted())
    test = known(run.active.seen.rows).splits["test"]
    return known(known(trainer.measure(model, test)).auc)


def known(found: FoundT | None) -> FoundT:
    """Return a figure that every run of this benchmark has."""
    if found is None:
        raise RuntimeError("expected a run to its end, with test rows, whose top model is refitted")
    return found


def boosted_auc(run: simulation.Simulation, seed: int, *, own_only: bool = False) -> float:
    """Return the test AUC of gradient boosting with its defaults, on a run's own rows."""
    rows = known(run.active.seen.rows).splits
    own = known(known(run.active.session.lifecycle.phase.trainer).rows_alone())
    parts = [known(own.features)]
    if not own_only:
        (other,) = run.passive.values()
        trainer = known(other.run.trainer)
        parts.append(trainer.rows(np.arange(trainer.num_rows)))
    columns: list[NDArray[Any]] = []
    is_category: list[bool] = []
    for part in parts:
        if part.numeric is not None:
            columns += list(part.numeric.numpy().T)
        is_category += [False] * (len(columns) - len(is_category))
        for slots in [] if part.categorical is None else part.categorical.numpy().T:
            # Boosting takes 255 categories of a column: the most frequent ones.
            counts = np.bincount(slots[rows["train"]], minlength=slots.max() + 1)
            by_frequency = np.argsort(np.argsort(-counts, kind="stable"))
            columns.append(np.minimum(by_frequency[slots], 254))
            is_category.append(True)
    joined, labels = np.column_stack(columns), own.labels.numpy()
    trees = HistGradientBoostingClassifier(categorical_features=is_category, random_state=seed)
    trees.fit(joined[rows["train"]], labels[rows["train"]])
    scores = trees.predict_proba(joined[rows["test"]])[:, 1]
    return float(roc_auc_score(labels[rows["test"]], scores))


# ---- what a step costs --------------------------------------------------------------------------


def costs(name: str, folder: Path, changed: Sequence[str], num_rows: float) -> Figures:
    """Return CPU time and memory at batch 1,024 as multiples of those of ``mlp``."""
    epochs = 3 + 60_000 // int(num_rows)
    size = ("contract.batch_size=1024", f"contract.epochs={epochs}", UNDEFENDED)
    new, old = (*changed, *size), (*BEFORE, *CUTS[name].before, *size)
    cpu: dict[tuple[str, ...], list[float]] = {new: [], old: []}
    for _ in range(3):
        for each, found in cpu.items():
            times = StepTimes(time.process_time)
            train(folder, 1, *each, times=times)
            found.extend(times.step_ms())
    ms = [statistics.median(found) for found in cpu.values()]
    mib = [in_a_process(memory_of_run, folder, each) for each in cpu]
    print(f"CPU ms of a step: {ms[0]:.1f}, mlp {ms[1]:.1f}; MiB: {mib[0]:.0f}, mlp {mib[1]:.0f}")
    return {"CPU": ms[0] / ms[1], "memory": mib[0] / mib[1]}


def memory_of_run(folder: Path, changed: tuple[str, ...]) -> float:
    logging.getLogger("splitveil").setLevel(logging.ERROR)
    train(folder, 1, *changed, "contract.epochs=1")
    return status_mib("self", "VmHWM")


# ---- tables -------------------------------------------------------------------------------------


def prepare(name: str, folder: Path, rows: Rows) -> None:
    """Write both parties' files, each with a column ``split``, and their settings."""
    tables = tables_of(name)
    splits = splits_of(*tables, tables[0][CUTS[name].label].to_pylist(), rows)
    looked_at = splits
    if rows.training is not None:  # a table of as many rows, with a test split of the usual size
        tested = [key for key, split in splits.items() if split == "test"]
        unseen = set(tested[rows.training // 4 :])
        looked_at = {key: split for key, split in splits.items() if key not in unseen}
    write(name, folder, tables, looked_at)
    cut = CUTS[name]
    both = (Terms("active", folder), Terms("passive", folder))
    for terms, table, file in zip(both, tables, FILES, strict=True):
        wishes = Wishes(
            has_id=cut.has_id,
            label_column=cut.label if terms.role == "active" else None,
            categorical=tuple(one for one in cut.categorical if one in table.column_names),
        )
        initialise(folder / file, wishes, terms)
    write(name, folder, tables, splits)


def write(name: str, folder: Path, tables: Tables, splits: Mapping[str, str]) -> None:
    for table, file in zip(tables, FILES, strict=True):
        written = table.append_column("split", pa.array(map(splits.get, keys(table))))
        written = written.filter(pc.is_valid(written["split"]))
        csv.write_csv(written if CUTS[name].has_id else written.drop_columns("id"), folder / file)


def keys(table: pa.Table) -> list[str]:
    """Return the ids as runs compare them."""
    return [str(one).lower() for one in table["id"].to_pylist()]


def digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode()).digest()


def splits_of(
    own: pa.Table, other: pa.Table, labels: Sequence[object], rows: Rows
) -> dict[str, str]:
    """Return the split of each id that is used."""
    label_of = dict(zip(keys(own), labels, strict=True))
    splits = dict.fromkeys([*label_of, *keys(other)], "train")
    common = sorted(label_of.keys() & keys(other), key=digest)
    num_known = round(0.8 * len(common))
    tested = common[num_known:]
    training = common[:num_known]
    if rows.is_development:
        for key in tested:
            del splits[key]
        drawn = np.random.default_rng(rows.seed).permutation(num_known)
        tested = [common[place] for place in drawn[: num_known // 5]]
        training = [common[place] for place in drawn[num_known // 5 :]]
    if rows.training is not None:
        counts = Counter(label_of[key] for key in training)
        rarest, count = counts.most_common()[-1]
        if count < len(training) / 100:
            training.sort(key=lambda key: label_of[key] != rarest)
        for key in training[rows.training :]:
            del splits[key]
    return splits | dict.fromkeys(tested, "test")


def tables_of(name: str) -> Tables:
    """Return both parties' tables, with ids even where rows are known by their numbers."""
    if name == FLIGHTS:
        return flights_and_weather()
    own, other = map(read, CUTS[name].files, CUTS[name].columns)
    if not CUTS[name].has_id:
        ids = pa.array(map(str, range(1, len(own) + 1)))
        own, other = own.append_column("id", ids), other.append_column("id", ids)
    return own, other


def read(name: str, columns: Sequence[str]) -> pa.Table:
    """Read columns of a table below SPLITVEIL_DATA; none means all."""
    options = csv.ConvertOptions(strings_can_be_null=False)
    path = Path(os.environ["SPLITVEIL_DATA"]) / f"{name}.csv.gz"
    table = csv.read_csv(path, convert_options=options)
    return table.select(columns) if columns else table


def flights_and_weather() -> Tables:
    """Return an airline's flights, and what airports know, of 36,000 of 40,000 flights each.

    A flight is late if it arrives 15 minutes or more after schedule; the airline knows carrier,
    distance and destination.
    """
    drawn = np.random.default_rng(0)
    planned, weather, planes = flights.read_package("weather", "planes")
    planned = planned.filter(pc.is_valid(planned["arr_delay"]))
    planned = planned.take(np.sort(drawn.permutation(len(planned))[:40_000]))
    planned = planned.append_column("date", flights.days_of(planned))
    parts = (
        pc.strftime(planned["date"], "%Y-%m-%d"),
        planned["carrier"],
        pc.cast(planned["flight"], pa.string()),
        planned["origin"],
    )
    planned = planned.append_column("id", pc.binary_join_element_wise(*parts, "-"))
    planned = planned.append_column("weekday", pc.strftime(planned["date"], "%a"))
    late = pc.cast(pc.greater_equal(planned["arr_delay"], 15), pa.int8())
    own = planned.append_column("late", late).select(["id", "carrier", "distance", "dest", "late"])
    known = ["id", "month", "weekday", "hour", "origin", "time_hour", "tailnum"]
    weather = weather.drop_columns(["year", "month", "day", "hour"])
    other = planned.select(known).join(weather, ["origin", "time_hour"])
    planes = planes.select(["tailnum", "year", "seats"]).rename_columns({"year": "built"})
    other = other.join(planes, "tailnum").drop_columns(["time_hour", "tailnum"]).sort_by("id")
    own, other = (table.take(drawn.permutation(len(table))[:36_000]) for table in (own, other))
    return own, other


if __name__ == "__main__":
    main()
