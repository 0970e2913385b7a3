"""The settings in an experiment's file: data sets, variants, figures and plots.

    datasets:                 # each with the same variants
      spambase:
        contract: {...}       # as in a party's files; run name, addresses and security are not
        active: {...}         # needed, because the runner sets them
        passive: {...}
    variants:
      marvell:
        active: {defense: {name: marvell}}
        sweep: {active.defense.strength.power_ratio: [1, 4]}      # variants marvell 1, marvell 4
    figures:                  # the columns of the table
      norm: {statistic: q95, layer: cut, attack: norm}
    published:
      source: reference to the publication
      values: {spambase: {marvell 4: {norm: 0.53}}}

Later parts of the settings update earlier parts, section by section: the example's files, the
dataset, the size, the variant, the dataset's own settings for the variant, the command line.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from splitveil.common.errors import SettingsError
from splitveil.common.settings import Section, read_yaml, validate
from splitveil.common.text.yaml_text import OWN_PLAN

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=+ -]{0,59}$")]
"""Name of a dataset, variant or figure, in tables and (with ``-`` for blanks) folders."""

PassiveName = Annotated[str, StringConstraints(pattern=r"^passive_[A-Za-z0-9_.-]{1,56}$")]
"""Name of one passive party among several: in the contract, its settings file and its results."""

Party = Literal["active", "passive"] | PassiveName
Swept = bool | int | float | str

Settings = dict[str, dict[str, Any]]
"""``contract``, ``active`` and ``passive``, each as in its own file. If there is more than one
passive party, ``passives`` has the complete settings of each by its name, and ``passive`` is
unused."""

GUARANTEE = "guarantee"
"""Name in a sweep of the leak AUC that no peer can exceed."""

Spread = Literal["deviation", "error"]

FOLDER = Path(__file__).parent


class Overlay(Section):
    """Settings that update others; a section changes only the names that it contains."""

    contract: dict[str, Any] = Field(default_factory=dict)
    """Settings of the contract."""

    active: dict[str, Any] = Field(default_factory=dict)
    """Settings of the active party."""

    passive: dict[str, Any] = Field(default_factory=dict)
    """Settings of the passive party, or of all passive parties if there is more than one."""

    passives: dict[PassiveName, dict[str, Any]] = Field(default_factory=dict)
    """Differing settings of each passive party among several, by its name in the contract."""

    def parts(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name) for name in ("contract", "active", "passive", "passives")}


class Dataset(Overlay):
    """One data set with its models and its schedule."""

    example: str | None = None
    """Folder with ``contract.yaml``, ``active.yaml`` and ``passive.yaml`` to start from, relative
    to the experiment's file."""

    prepare: (
        Literal["flights", "imdb", "melanoma", "melanoma_grey64", "talkingdata_days"] | None
    ) = None
    """Table to make from the raw files first; ``${PREPARED}`` in a path stands for its folder."""

    after: str | None = None
    """Data set earlier in the file: each cell of this data set starts with the weights of that data
    set's cell with the same variant and seed."""

    like: str | None = None
    """Another experiment, whose data set of this name has all settings that are not set here."""

    variants: dict[Label, Overlay] = Field(default_factory=dict)
    """Differing settings of variants on this data set, by the variant's name."""


class Variant(Overlay):
    """One row of the table, or with a sweep one row per combination of values."""

    sweep: dict[str, tuple[Swept, ...]] = Field(default_factory=dict)
    """Setting, such as ``active.defense.noise_ratio``, -> its values; more than one setting gives
    every combination. ``guarantee`` stands for the strength of the defense: its values are leak
    AUCs of the whole run that no peer can exceed, and the strength follows from them exactly."""

    @model_validator(mode="after")
    def _sweeps_over_settings(self) -> "Variant":
        for name, values in self.sweep.items():
            is_setting = name.partition(".")[0] in self.parts() and "." in name
            if not is_setting and name != GUARANTEE:
                raise ValueError(
                    f"sweep: {name}: expected active.NAME, passive.NAME or contract.NAME, or "
                    f"{GUARANTEE}"
                )
            if not values:
                raise ValueError(f"sweep: {name}: expected at least one value")
            if name == GUARANTEE and not all(
                isinstance(value, float) and 0.5 < value < 1 for value in values
            ):
                raise ValueError(f"sweep: {name}: expected numbers above 0.5 and below 1")
        return self


class Size(Overlay):
    """A shorter or smaller form of the experiment."""

    seeds: PositiveInt | None = None
    """Default number of seeds."""

    datasets: dict[Label, Overlay] = Field(default_factory=dict)
    """Settings that differ on a single data set."""


class Figure(Section):
    """One figure of a run, as named in the results."""

    statistic: str
    """For instance ``test_auc``, ``best_test_auc``, ``calibration_error``, ``steps_per_s``; for an
    attack ``mean``, ``q95``, ``first_epoch``, ``last_epoch``, ``worst_epoch``, ``run_level``, and
    at the cut layer ``adjusted``: what it reveals beyond features, over the run; for model
    completion at the passive party ``over_features``."""

    party: Party = "active"
    """The party that measured it: at the cut layer both do, and the active party's oracles know
    more."""

    layer: str | None = None
    """Layer of the passive party's model; ``cut`` for the gradients as received."""

    attack: str | None = None
    """The attack."""

    less: str | None = None
    """Row of the table whose figure for the same seed is subtracted. Seeds differ in their test
    rows far more than defenses do, and all defenses of a seed share these rows."""

    less_statistic: str | None = None
    """The statistic of that row, if it is another one: a model that was fitted again is compared
    with one that need not be."""

    title: str | None = None
    """Heading of the column; by default the figure's name."""

    @model_validator(mode="after")
    def _attacks_a_layer(self) -> "Figure":
        if (self.layer is None) != (self.attack is None):
            raise ValueError("name a layer and an attack, or neither")
        return self


class Published(Section):
    """Published figures for comparison."""

    source: str
    """Reference to the publication."""

    values: dict[Label, dict[Label, dict[Label, float]]]
    """Data set -> variant -> figure -> value."""


class TradeOffPlot(Section):
    """Leak over test AUC, one panel per layer and attack, one curve per variant of the file."""

    kind: Literal["trade_off"]

    utility: str = "best_test_auc"
    """Statistic on the horizontal axis."""

    less: str | None = None
    """Row of the table whose utility for the same seed is subtracted, as for a figure."""

    floor: str | None = None
    """Row of the table whose gradients contain nothing to learn from: its utility is drawn as a
    line, and a defense that costs more is worse than no gradient at all."""

    leak: str = "q95"
    """Statistic on the vertical axis."""

    attacks: tuple[str, ...] = ()
    """The attacks to draw; all by default."""


class CoursePlot(Section):
    """Leak over the steps or epochs of the run, one panel per layer and attack."""

    kind: Literal["course"]

    over: Literal["steps", "epochs"] = "steps"
    """Single batches, averaged over up to 200 intervals of the run; or epochs, for which
    accumulated attacks have their own figures."""

    attacks: tuple[str, ...] = ()
    """The attacks to draw; all by default."""


class EpochPlot(Section):
    """A figure that does not belong to an attack, over the epochs, such as ``epoch_test_auc``."""

    kind: Literal["epochs"]

    statistic: str = "epoch_test_auc"
    """The statistic to draw."""


class SweepPlot(Section):
    """A figure over the swept value, one curve per variant of the file, in one panel.

    Rows without a swept value are lines across the panel.
    """

    kind: Literal["sweep"]

    statistic: str = "test_auc"
    """The figure on the vertical axis; for rows that lack it, ``test_auc``."""

    less: str | None = None
    """Row of the table whose ``test_auc`` for the same seed is subtracted."""

    axis: str
    """Name of the horizontal axis."""

    datasets: tuple[str, ...] = ()
    """The data sets to draw; all by default."""


class ClassesPlot(Section):
    """Quantiles (5, 50, 95 %) of each class's gradients over the epochs, of an example's own loss.

    The passive party's ``adversary`` needs ``labels`` and ``store_received``. The norm, and in
    ``gradients_fig2`` also how far the prediction is from the label, and the logit's slope.
    """

    kind: Literal["classes"]


Plot = Annotated[
    TradeOffPlot | CoursePlot | EpochPlot | SweepPlot | ClassesPlot, Field(discriminator="kind")
]


class Experiment(Section):
    """One published table or figure, or one of our own."""

    title: str
    """Heading of the table."""

    about: str
    """The question, and the differences from the published experiment."""

    seeds: PositiveInt = 10
    """Number of runs of each variant, with seeds 0, 1, ..."""

    spread: Spread = "deviation"
    """The figure behind a mean: the standard deviation over the seeds, or the standard error."""

    in_process: bool = False
    """Run both parties in one process: several times faster, with the same bits except for models
    with dropout. For two parties; without checkpoints."""

    datasets: dict[Label, Dataset] = Field(min_length=1)
    """The data sets to train on."""

    variants: dict[Label, Variant] = Field(min_length=1)
    """The variants to compare."""

    sizes: dict[Label, Size] = Field(default_factory=dict)
    """Forms other than the full one, by the name that ``--size`` takes; ``quick`` is a smoke test.
    """

    figures: dict[Label, Figure] = Field(min_length=1)
    """The columns of the table."""

    published: Published | None = None
    """Published figures for comparison."""

    plots: tuple[Plot, ...] = ()
    """The plots to draw."""

    @model_validator(mode="after")
    def _names_are_known(self) -> "Experiment":
        known = set(self.variants)
        before: list[str] = []
        for name, dataset in self.datasets.items():
            _refuse_unknown(f"datasets.{name}.variants", dataset.variants, known)
            if dataset.after is not None and dataset.after not in before:
                raise ValueError(
                    f"datasets.{name}.after: expected a data set that is earlier in the file"
                )
            before.append(name)
        for name, size in self.sizes.items():
            _refuse_unknown(f"sizes.{name}.datasets", size.datasets, set(self.datasets))
        if self.published is not None:
            self._check_published(self.published)
        return self

    def _check_published(self, published: Published) -> None:
        rows = {row for name, variant in self.variants.items() for row in rows_of(name, variant)}
        _refuse_unknown("published.values", published.values, set(self.datasets))
        for dataset, variants in published.values.items():
            _refuse_unknown(f"published.values.{dataset}", variants, rows)
            for variant, figures in variants.items():
                where = f"published.values.{dataset}.{variant}"
                _refuse_unknown(where, figures, set(self.figures))


def rows_of(name: str, variant: Variant) -> dict[str, dict[str, Swept]]:
    """Return the swept settings of each of a variant's rows, by the row's name."""
    combinations = itertools.product(*variant.sweep.values())
    return {
        " ".join([name, *map(str, values)]): dict(zip(variant.sweep, values, strict=True))
        for values in combinations
    }


def load_experiment(name_or_path: str) -> tuple[str, Experiment, Path]:
    """Return an experiment's name, its content, and the folder its paths are relative to."""
    path = Path(name_or_path)
    if path.suffix != ".yaml":
        path = FOLDER / f"{name_or_path}.yaml"
        if not path.is_file():
            names = ", ".join(experiment_names())
            raise SettingsError(f"{name_or_path}: unknown experiment; expected one of {names}")
    experiment = validate(Experiment, read_yaml(path, OWN_PLAN), str(path))
    datasets = {key: _completed(key, own) for key, own in experiment.datasets.items()}
    return path.stem, experiment.model_copy(update={"datasets": datasets}), path.parent


def experiment_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``base`` updated with the values of ``over``, section by section.

    A section with another ``kind``, ``name`` or ``mode`` replaces the whole section: the settings
    of an mlp make no sense for a convolution.
    """
    if any(key in over and over[key] != base.get(key) for key in ("kind", "name", "mode")):
        return dict(over)
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        is_section = isinstance(value, Mapping) and isinstance(below, dict)
        result[name] = overlaid(below or {}, value) if is_section else value
    return result


def _completed(name: str, dataset: Dataset) -> Dataset:
    if dataset.like is None:
        return dataset
    _, other, _ = load_experiment(dataset.like)
    if name not in other.datasets:
        raise SettingsError(f"datasets.{name}.like: {dataset.like} has no such data set")
    base, own = (one.model_dump(exclude_unset=True) for one in (other.datasets[name], dataset))
    return Dataset.model_validate(overlaid(base, own))


def _refuse_unknown(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)}: expected {', '.join(sorted(known))}")
