"""What do settings reach that ``splitveil init`` writes, and what do one-pass runs reach?

    OMP_NUM_THREADS=1 SPLITVEIL_DATA=FOLDER python -m benchmarks.first_settings [TABLE ...]

Cuts each table into the columns of two parties, runs ``splitveil init`` on both files, where the
user names some categories, and trains with what it writes in several ways (``MODES``): with
gradients and no defense, and in one pass, with principal components or with a score fitted to
noisy labels or to noisy sums of labels. Of each way it prints

- the test AUC of the network that the label owner predicts with, and of the mean of its logits and
  those of gradient boosting on what was received;
- the bound on what anybody learns of a label, and what a passive party with 400 labels predicts of
  the test rows from its activations;
- what somebody who knows 1,000 rows learns of each of the passive party's columns from the
  activations of others (``passive_party.feature_exposure``): the share of what was unknown without
  them, in the mean over columns and of the strongest one. In runs with gradients these are the
  activations of the last epoch, which are less than what was sent.

Gradient boosting with its defaults, on all columns that either party uses and on those of the label
owner only, has unprotected labels and the same rows. ``--results`` keeps figures in a file, which
later calls add to, and ``--picture`` draws test AUC over disclosure.

The report rows, the last 20 % of the common ids in the order of their BLAKE2b digests, are the test
rows. No setting was ever chosen by them: that is done with ``--development``, where the test rows
are a fifth of the other rows, and with ``--set``. A seed decides weights, batches and noise, and
with ``--development`` the fold.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
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
import torch
from numpy.typing import NDArray
from PIL import Image
from pyarrow import csv
from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import nn

from benchmarks.environment import print_environment
from splitveil.common.data.features import Features
from splitveil.common.errors import SettingsError
from splitveil.deploy import flights
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import initialise
from splitveil.deploy.init.proposal import Terms
from splitveil.experiments.preparation import images_of
from splitveil.passive_party.feature_exposure import Sample, measure_exposure
from tests.support import simulation

FoundT = TypeVar("FoundT")
Tables = tuple[pa.Table, pa.Table]
FILES = ("own.csv", "other.csv")


class Cut(NamedTuple):
    """Who knows which columns of a table."""

    files: tuple[str, str]
    label: str
    columns: tuple[Sequence[str], Sequence[str]] = ((), ())
    """Those of the label owner and those of the other party; none for all of its file."""
    has_id: bool = True
    categorical: tuple[str, ...] = ()
    """Whole numbers that are categories, as a user of ``init`` says with ``--categorical``."""


UNDEFENDED = "defense={name: none}"
FLIGHTS = "flights x weather"

EMPLOYER = ("id", "income", "workclass", "education", "education_num", "occupation")
TAX_OFFICE = (
    *("id", "age", "marital_status", "relationship", "race", "sex", "capital_gain", "capital_loss"),
)
CLICK = ("os", "channel", "click_time", "attributed_time", "is_attributed")
ADVERTISER = (
    *("click", "C1", "banner_pos", "device_type", "device_conn_type"),
    *(f"C{number}" for number in range(14, 22)),
)
PUBLISHER = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
COUNTS = tuple(f"I{number}" for number in range(1, 14))
CODES = tuple(f"C{number}" for number in range(1, 27))

CUTS = {
    "default_credit": Cut(("default_credit/guest", "default_credit/host"), "y"),
    FLIGHTS: Cut(("", ""), "late", categorical=("distance",)),
    "imdb": Cut(("", ""), "positive"),
    "bank": Cut(("bank/alice", "bank/bob"), "y"),
    "give_credit": Cut(("give_credit/guest", "give_credit/host"), "y"),
    "spambase": Cut(("spambase/spambase",) * 2, "label", has_id=False),
    "talkingdata": Cut(
        ("talkingdata/talkingdata",) * 2,
        "is_attributed",
        (CLICK, ("ip", "app", "device")),
        has_id=False,
        categorical=("ip", "app", "device", "os", "channel"),
    ),
    "criteo": Cut(("criteo/criteo",) * 2, "click", (("click", *COUNTS), CODES), has_id=False),
    "avazu": Cut(
        ("avazu/avazu",) * 2,
        "click",
        (ADVERTISER, PUBLISHER),
        has_id=False,  # spreadsheets have shortened some
        categorical=(*ADVERTISER[1:], *PUBLISHER),
    ),
    "digits": Cut(("", ""), "is_odd"),
    "adult": Cut(("adult/adult",) * 2, "income", (EMPLOYER, TAX_OFFICE)),
    "melanoma": Cut(("", ""), "is_melanoma"),
}

NOISE_RATIO = 1 / (math.sqrt(2) * statistics.NormalDist().inv_cdf(0.6))
RELEASE = (
    "contract.release=noisy_labels",
    f"defense={{name: noisy_label, mechanism: {{kind: gaussian, noise_ratio: {NOISE_RATIO:.4f}}}}}",
)
SUMS = ("contract.release=noisy_sums", RELEASE[1])


def one_pass(width: int, model: str, *others: str) -> tuple[str, ...]:
    """Return settings of a run that sends so many numbers of each row once."""
    cut = ("contract.exchange=one_shot", f"contract.cut_shape=[{width}]")
    return (*cut, f"bottom_model={{kind: {model}}}", *(others or [UNDEFENDED]))


MODES = {
    "no defense": (
        "contract.exchange=gradients",
        "contract.cut_shape=[64]",
        "bottom_model={kind: tabular, hidden: [], output_activation: relu}",
        "optimizer={kind: adamw, learning_rate: 0.004, weight_decay: 0.01}",
        UNDEFENDED,
    ),
    "PCA 64": one_pass(64, "pca"),
    "score": one_pass(1, "score", *RELEASE),
    "PCA 16": one_pass(16, "pca"),
    "PCA 4": one_pass(4, "pca"),
    "score + 3 components": one_pass(4, "score", *RELEASE),
    "score + 2 columns": one_pass(9, "score, columns: 2", *RELEASE),
    "PCA 1": one_pass(1, "pca"),
    "score from sums": one_pass(1, "score", *SUMS),
}
"""Settings of each way; those with two components of two columns leave out columns of few values.

A width beyond the rank of the columns, which a run refuses, becomes the rank.
"""

BOUNDS = {mode: ".60" if "score" in mode else ".50" for mode in MODES} | {"no defense": "none"}

Figures = dict[str, Any]


class Rows(NamedTuple):
    """The rows of a table that are used."""

    seed: int
    is_development: bool = False
    training: int | None = None
    """At most so many training rows, with as many of a rare class as there are; None for all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[[], *CUTS], metavar="TABLE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="at most so many training rows")
    parser.add_argument("--development", action="store_true", help="leave the report rows alone")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="*", default=list(MODES), choices=MODES, metavar="MODE")
    parser.add_argument("--results", type=Path, help="figures as lines of JSON; those in it stand")
    parser.add_argument("--picture", type=Path, help="an SVG of what --results holds")
    given = parser.parse_args()
    print_environment("scikit-learn")
    # Every run would warn of its seeds.
    logging.getLogger("splitveil").setLevel(logging.ERROR)
    lines: list[Figures] = []
    if given.results is not None and given.results.exists():
        lines = [json.loads(line) for line in given.results.read_text().splitlines()]
    done = {(line["table"], line["seed"], line["mode"]) for line in lines}
    for name in given.tables or CUTS:
        for seed in range(1, given.seeds + 1):
            modes = [mode for mode in given.only if (name, seed, mode) not in done]
            with tempfile.TemporaryDirectory() as folder:
                if modes:
                    prepare(name, Path(folder), Rows(seed, given.development, given.rows))
                for mode in modes:
                    cpu_s = time.process_time()
                    found = {"table": name, "seed": seed, "mode": mode}
                    found |= measure(Path(folder), seed, mode, given.set)
                    found["cpu_s"] = round(time.process_time() - cpu_s)
                    lines.append(found)
                    print(json.dumps(found), flush=True)
                    if given.results is not None:
                        with given.results.open("a") as file:
                            print(json.dumps(found), file=file)
        print_table(name, [line for line in lines if line["table"] == name])
    if given.picture is not None:
        draw(lines, given.picture)


def print_table(name: str, lines: Sequence[Figures]) -> None:
    """Print what each way reaches, and what it differs from no defense by, seed by seed."""
    of = {(line["mode"], line["seed"]): line for line in lines}
    plain = [line for line in lines if "boosting" in line]
    if plain:
        alone, joined = (
            mean_and_spread([line[key] for line in plain]) for key in ("own columns", "boosting")
        )
        print(
            f"\n`{name}`, {plain[0]['rows']:,} training rows; boosting: label owner's columns ",
            end="",
        )
        print(f"{alone}, all columns {joined}\n")
    print("| sent | label bound | test AUC | less no defense | with boosting | 400 labels", end="")
    print(" | columns: mean | strongest |\n|---|---|---|---|---|---|---|---|")
    for mode in MODES:
        found = [line for line in lines if line["mode"] == mode and "auc" in line]
        if not found:
            continue
        less: list[list[float]] = [[], []]
        for line in found:
            if ("no defense", line["seed"]) in of:
                reference = of["no defense", line["seed"]]["auc"]
                less[0].append(line["auc"] - reference)
                less[1].append(line["mixed"] - reference)
        cells = [mode, BOUNDS[mode], mean_and_spread([line["auc"] for line in found])]
        cells += (mean_and_spread(part, "+") for part in less)
        cells += (mean_and_spread([line[key] for line in found]) for key in ("completion", "mean"))
        strongest = mean_and_spread([line["strongest"] for line in found])
        print(f"| {' | '.join(cells)} | {strongest} `{found[0]['column']}` |")
    for line in lines:
        if "informed" in line:
            print(
                f"\n{line['mode']}, seed {line['seed']}: the noisy label has AUC "
                f"{line['noisy']:.3f}, with the score {line['informed']:.3f}, and the score of "
                f"rows whose labels were not released {line['score']:.3f}"
            )


def mean_and_spread(values: Sequence[float], sign: str = "") -> str:
    """Return ``.899 ± .003``, or the only figure."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):{sign}.3f}".replace("0.", ".", 1)
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):.3f}".replace("± 0", "± ")


def draw(lines: Sequence[Figures], path: Path) -> None:
    """Draw test AUC over the mean disclosure of columns, a panel for each table."""
    import matplotlib as mpl  # noqa: PLC0415 (an extra)

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "splitveil", "svg.fonttype": "none", "font.size": 8})
    from matplotlib import pyplot  # noqa: PLC0415

    names = [name for name in CUTS if any(line["table"] == name for line in lines)]
    height = -(-len(names) // 3)
    figure, grid = pyplot.subplots(height, 3, figsize=(12, 3.2 * height), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for name, axes in zip(names, grid.flat, strict=False):
        axes.set(
            title=name, xlabel="columns given away, mean", ylabel="test AUC", xlim=(-0.03, 1.3)
        )
        axes.grid(alpha=0.25)
        for mode in MODES:
            found = [line for line in lines if (line["table"], line["mode"]) == (name, mode)]
            found = [line for line in found if "auc" in line]
            if not found:
                continue
            x, y = (statistics.mean(line[key] for line in found) for key in ("mean", "auc"))
            axes.plot(x, y, "os^"[("score" in mode) + 2 * (BOUNDS[mode] == ".50")], color="C0")
            axes.annotate(mode, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def measure(folder: Path, seed: int, mode: str, changed: Sequence[str]) -> Figures:
    """Return the figures of one way; only why, if its settings are refused."""
    try:
        run = train(folder, seed, *changed, *MODES[mode])
    except SettingsError as error:
        return {"refused": str(error)}
    trainer = known(run.active.session.lifecycle.trainer)
    rows = known(run.active.seen.rows).splits
    (passive,) = run.passive.values()
    bottom = known(passive.run.trainer)
    test = rows["test"]
    logits, labels = (part.numpy() for part in known(trainer.logits(test, refitted(run))))
    sent = np.concatenate(
        [
            np.asarray(bottom.embed(bottom.rows(part))).reshape(len(part), -1)
            for part in np.array_split(np.arange(bottom.num_rows), 20)
        ]
    )
    figures: Figures = {"rows": len(rows["train"]), "auc": float(roc_auc_score(labels, logits))}
    if mode == "no defense":
        figures["boosting"] = boosted_auc(run, seed)
        figures["own columns"] = boosted_auc(run, seed, own_only=True)
    mixed = logits + boosted(run, seed, sent)
    figures["mixed"] = float(roc_auc_score(labels, mixed))
    own = known(trainer.rows_alone()).labels.numpy()
    few = np.random.default_rng(seed).permutation(rows["train"])[:400]
    figures["completion"] = 0.5
    if len(np.unique(own[few])) > 1:  # of a rare class, few rows may hold none
        completed = LogisticRegression(max_iter=1000).fit(sent[few], own[few])
        guesses = completed.decision_function(sent[test])
        figures["completion"] = float(roc_auc_score(labels, guesses))
    encoder = known(known(passive.builder).encoder)
    sample = Sample.draw(np.arange(bottom.num_rows))
    found = known(measure_exposure(bottom, encoder, bottom.num_rows, sample))
    shares = {one.name: one.gain_fraction for one in found.columns}
    figures["column"] = max(shares, key=lambda name: shares[name])
    figures |= {"mean": statistics.mean(shares.values()), "strongest": max(shares.values())}
    if mode == "score":
        noisy = known(trainer.defense.released_labels(torch.from_numpy(rows["train"].copy()))[0])
        figures |= informed(noisy.numpy().ravel(), sent[rows["train"], :1], own[rows["train"]])
        figures["score"] = float(roc_auc_score(labels, sent[test, 0]))
    return figures


def informed(noisy: NDArray[Any], score: NDArray[Any], labels: NDArray[Any]) -> Figures:
    """Return with which AUC noisy labels tell labels, and with the score beside them."""
    both = np.column_stack([noisy, score])
    guess = LogisticRegression().fit(both, labels).decision_function(both)
    return {
        "noisy": float(roc_auc_score(labels, noisy)),
        "informed": float(roc_auc_score(labels, guess)),
    }


def train(folder: Path, seed: int, *changed: str) -> simulation.Simulation:
    """Run both parties in this process, with a seed and perhaps with other settings."""
    both = [f"insecure_nonce_seed={seed}", "torch_threads=1", f"model_seed={seed}"]
    both.append("contract.split={kind: column, column: split}")
    # What a run may disclose is measured here, not limited.
    active = [*both, "leak_monitor=null", "run_budget=null"]
    passive = [*both, "max_exposure=null"]
    for setting in changed:
        active += [setting] * is_of(setting, "active")
        passive += [setting] * is_of(setting, "passive")
    if any("noisy_label" in setting for setting in changed):
        active.append(f"defense.insecure_noise_seed={seed}")
    seen = simulation.ActiveRecording()
    seen.on_step = lambda batch, result: None  # type: ignore[method-assign]
    settings = simulation.read_settings(folder, active, passive)
    nothing = simulation.PassiveRecording()
    nothing.on_step = lambda batch, sent, received, layers: None  # type: ignore[method-assign]
    run = simulation.build(settings, active_seen=seen, passive_seen={"passive": nothing})
    run.meet()
    return run


def is_of(setting: str, party: str) -> bool:
    """Return whether a party's file takes a setting ``name=value``."""
    whose = setting.partition(".")[0].partition("=")[0]
    is_of_bottom = whose.startswith("bottom")
    is_of_both = whose in {"contract", "optimizer"}
    return is_of_both or is_of_bottom is (party == "passive")


def refitted(run: simulation.Simulation) -> nn.Module:
    """Return the top model that a run leaves for its owner's own predictions."""
    trainer, contract = run.active.session.lifecycle.trainer, run.active.settings.contract
    return known(known(trainer).refitted(may_stay=not contract.is_one_shot))


def refitted_auc(run: simulation.Simulation) -> float:
    """Return the test AUC of that model."""
    trainer = known(run.active.session.lifecycle.trainer)
    test = known(run.active.seen.rows).splits["test"]
    return known(trainer.kind.measure(*known(trainer.logits(test, refitted(run)))).auc)


def known(found: FoundT | None) -> FoundT:
    """Return a figure that every run of this benchmark has."""
    if found is None:
        raise RuntimeError("expected a run to its end, with test rows, whose top model is refitted")
    return found


def boosted_auc(run: simulation.Simulation, seed: int, *, own_only: bool = False) -> float:
    """Return the test AUC of gradient boosting with its defaults, on a run's own rows."""
    test = known(run.active.seen.rows).splits["test"]
    own = known(known(run.active.session.lifecycle.trainer).rows_alone())
    others: list[Features | NDArray[Any]] = []
    if not own_only:
        (other,) = run.passive.values()
        trainer = known(other.run.trainer)
        others.append(trainer.rows(np.arange(trainer.num_rows)))
    return float(roc_auc_score(own.labels.numpy()[test], boosted(run, seed, *others)))


def boosted(
    run: simulation.Simulation, seed: int, *others: Features | NDArray[Any]
) -> NDArray[Any]:
    """Return the test rows' logits by boosting on the label owner's columns and on others."""
    rows = known(run.active.seen.rows).splits
    own = known(known(run.active.session.lifecycle.trainer).rows_alone())
    columns: list[NDArray[Any]] = []
    is_category: list[bool] = []
    for part in [known(own.features), *others]:
        if isinstance(part, np.ndarray):
            columns += list(part.T)
            continue
        if part.numeric is not None:
            columns += list(np.asarray(part.numeric).T)
        is_category += [False] * (len(columns) - len(is_category))
        for slots in [] if part.categorical is None else np.asarray(part.categorical).T:
            # Boosting takes 255 categories of a column: the most frequent ones.
            counts = np.bincount(slots[rows["train"]], minlength=slots.max() + 1)
            by_frequency = np.argsort(np.argsort(-counts, kind="stable"))
            columns.append(np.minimum(by_frequency[slots], 254))
            is_category.append(True)
    is_category += [False] * (len(columns) - len(is_category))
    joined = np.column_stack(columns)
    trees = HistGradientBoostingClassifier(categorical_features=is_category, random_state=seed)
    trees.fit(joined[rows["train"]], own.labels.numpy()[rows["train"]])
    logits: NDArray[Any] = trees.decision_function(joined[rows["test"]])
    return logits


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
    contract = folder / "contract.yaml"
    limited = re.sub(r"max_set_size: \d+", f"max_set_size: {len(splits)}", contract.read_text())
    contract.write_text(limited)  # of all test rows, more than init has seen


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
    cut = CUTS[name]
    if name == FLIGHTS:
        return flights_and_weather()
    if name == "imdb":
        packed = np.load(Path(os.environ["SPLITVEIL_DATA"]) / "imdb/imdb_top500.npz")
        words = np.unpackbits(packed["x_bits"][:25_000], axis=1, count=500)
        return in_halves(words, cut.label, packed["y"][:25_000])
    if name == "digits":
        images, digits = load_digits(return_X_y=True)
        return in_halves(images, cut.label, digits % 2)
    if name == "melanoma":  # means of 7 x 7 pixels and one colour
        with np.load(Path(os.environ["SPLITVEIL_DATA"]) / "melanoma/melanoma84_jpeg.npz") as packed:
            shrunk = [image.resize((12, 12), Image.Resampling.BOX) for image in images_of(packed)]
            return in_halves(
                np.array([np.asarray(one).ravel() for one in shrunk]), cut.label, packed["y"]
            )
    own, other = map(read, cut.files, cut.columns)
    if name == "spambase":
        own, other = own.select([*range(28), cut.label]), other.select(range(28, 57))
    if not cut.has_id:
        ids = pa.array(map(str, range(1, len(own) + 1)))
        own, other = own.append_column("id", ids), other.append_column("id", ids)
    return own, other


def in_halves(values: NDArray[Any], label: str, labels: NDArray[Any]) -> Tables:
    """Return tables of the first and of the second half of the columns."""
    names = [f"x{number}" for number in range(values.shape[1])]
    whole = pa.table([pa.array(column) for column in values.T], names)
    whole = whole.append_column("id", pa.array(f"r{row}" for row in range(len(labels))))
    half = len(names) // 2
    own = whole.select([*names[:half], "id"]).append_column(label, pa.array(labels))
    return own, whole.select([*names[half:], "id"])


def read(name: str, columns: Sequence[str]) -> pa.Table:
    """Read columns of a table below SPLITVEIL_DATA; none means all."""
    options = csv.ConvertOptions(strings_can_be_null=False)
    folder = Path(os.environ["SPLITVEIL_DATA"])
    reading, parsing = csv.ReadOptions(), csv.ParseOptions()
    is_criteo = name == "criteo/criteo"
    path = folder / f"{name}.{'tsv' if is_criteo else 'csv'}.gz"
    if is_criteo:  # which has no header line
        reading = csv.ReadOptions(column_names=["click", *COUNTS, *CODES])
        parsing = csv.ParseOptions(delimiter="\t")
    table = csv.read_csv(path, reading, parsing, options)
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
