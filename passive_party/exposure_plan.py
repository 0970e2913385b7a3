"""Measures what activations would reveal of this party's columns, before anything is sent.

The rows come from this party's own table, without any label: the bottom model is fitted as a run
would fit it, and the columns are guessed from what it would send. A model that learns from
gradients is measured before it trains.

A score is fitted to labels that do not exist yet. The plan measures the worst case, a label owner
that knows some rows: it sends a column in the place of labels, and the score guesses that column.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from splitveil.common.data.features import FeatureEncoder, Features, RowEncoder
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.models.components import Blocks, ComponentsBottom
from splitveil.common.models.settings import CustomModel, PcaModel, ScoreModel, bins_of
from splitveil.common.party.arguments import print_json
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.record.model_files import PretrainedWeights
from splitveil.common.record.progress import ProgressBar
from splitveil.common.run.sample_order import SPLITS, Positions
from splitveil.common.text.visible_text import PlainTable, visible
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.feature_exposure import (
    LEAST_ROWS,
    ColumnExposure,
    FeatureExposure,
    Sample,
    by_targets,
    exposure_of,
    exposure_to_json,
)
from splitveil.passive_party.settings import PassiveSettings

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_USUAL_GOAL = 0.5  # the disclosure that a remedy aims at without max_exposure
MOST_FITTED = 50_000  # rows that the model is fitted to


@dataclass(frozen=True)
class ExposurePlan:
    source: str
    bottom_model: str
    is_one_shot: bool
    width: int  # the contract's: how many numbers are sent of each row
    exposures: Mapping[int, FeatureExposure]  # by width, ascending
    max_exposure: float | None = None
    by_score: tuple[ColumnExposure, ...] = ()  # from one score, fitted to the column itself
    target: str = ""  # the columns that scores guess best

    @property
    def own(self) -> FeatureExposure:
        return self.exposures[self.width]

    def widest(self, most: float) -> int | None:
        """Return the largest width whose disclosure is at most this; None if there is none."""
        fitting = (width for width, one in self.exposures.items() if one.disclosure <= most)
        return max(fitting, default=None)

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each width and column."""
        names = ("width", "column", "right", "without", "disclosure")
        found = ((at, one) for at, each in self.exposures.items() for one in each.columns)
        rows = ((at, one.name, one.right, one.without, one.gain_fraction) for at, one in found)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "bottom_model": self.bottom_model,
            "width": self.width,
            "disclosure": {str(width): one.disclosure for width, one in self.exposures.items()},
            "exposures": {str(at): exposure_to_json(one) for at, one in self.exposures.items()},
            "by_score": {one.name: [one.right, one.without] for one in self.by_score},
        }


def exposure_plan_of(
    settings: PassiveSettings, data: PartyData, *, only_own: bool = False
) -> ExposurePlan:
    """Measure the widths that the columns allow, or only the contract's.

    Raises DataError if there are too few rows, SettingsError if the contract's width is too large.
    """
    chosen, cut_shape = settings.bottom_model, settings.contract.cut_shape
    earlier, table, rows = open_earlier_model(settings), data.table, _rows(data)
    sample = Sample.draw(rows)
    if sample is None:
        raise DataError(
            f"{table.source}: {len(rows)} rows are too few to measure what activations reveal; "
            f"expected at least {LEAST_ROWS}"
        )
    fitted_to = np.sort(np.random.default_rng(0).permutation(rows)[:MOST_FITTED])
    encoder = data.fit(fitted_to, earlier, bins_of(chosen))
    if encoder is None:
        raise SettingsError("data.features: the passive party needs features")
    features = RowEncoder(encoder, table)(sample.positions)
    known, own_width = sample.known, settings.contract.cut_dim
    scores = settings.contract.scores
    widths = {own_width, *(one for one in WIDTHS if one >= scores and not only_own)}
    by_score: tuple[ColumnExposure, ...] = ()
    target = ""
    if isinstance(chosen, PcaModel) and earlier is None:
        blocks = partial(data.blocks, encoder, fitted_to)
        if isinstance(chosen, ScoreModel):
            by_score, target, sent = _with_scores(
                chosen, encoder, features, known, blocks, own_width, widths, scores
            )
        else:
            sent = _components(chosen, encoder, features, blocks, own_width, widths)
    else:
        if earlier is not None or isinstance(chosen, CustomModel) or len(cut_shape) > 1:
            widths = {own_width}  # only this one is known
        from splitveil.common.models.blocks import predict_in_blocks  # noqa: PLC0415 - torch
        from splitveil.passive_party.bottom_trainer import fresh_model  # noqa: PLC0415

        pretrained, sent = PretrainedWeights.open(chosen, settings.base_dir), {}
        for width in sorted(widths):
            shape = cut_shape if width == own_width else (width,)
            model = fresh_model(settings, encoder, shape)
            pretrained.put_into(model)
            if earlier is not None:
                earlier.put_into(model)
            sent[width] = predict_in_blocks(model, features.to("cpu")).flatten(1).numpy()
    found = {
        width: exposure_of([values.astype(np.float64)], features, encoder, known, len(data.ids))
        for width, values in sent.items()
    }
    measured = {width: one for width, one in found.items() if one is not None}
    if own_width not in measured:
        raise DataError(f"{table.source}: the activations are not finite")
    return ExposurePlan(
        table.source,
        chosen.kind,
        settings.contract.is_one_shot,
        own_width,
        measured,
        settings.max_exposure,
        by_score,
        target,
    )


def _components(
    settings: PcaModel,
    encoder: FeatureEncoder,
    features: Features,
    blocks: Blocks,
    own_width: int,
    widths: Iterable[int],
) -> dict[int, NDArray[np.float32]]:
    """Return the activations of each width; the first components are the same for all."""
    for most in sorted({*widths}, reverse=True):
        model = ComponentsBottom(settings, encoder.shapes, (most,))
        try:
            model.fit(blocks, is_final=True)
        except SettingsError:  # it is above the columns' rank
            if most <= own_width:
                raise
            continue
        values = model(features)
        return {width: values[:, :width] for width in sorted(widths) if width <= most}
    return {}


def _with_scores(
    settings: ScoreModel,
    encoder: FeatureEncoder,
    features: Features,
    known: int,
    blocks: Blocks,
    own_width: int,
    widths: Iterable[int],
    scores: int,
) -> tuple[tuple[ColumnExposure, ...], str, dict[int, NDArray[np.float32]]]:
    """Return columns guessed from a score fitted to them, the best ones, and what widths send.

    What is sent are scores of the columns that they guess best, and what follows these scores.
    """
    of_known = features.rows(slice(known))
    one = ComponentsBottom(settings, encoder.shapes, (1,))

    def fit(targets: NDArray[np.float64]) -> NDArray[np.float64]:
        weight, bias = one.scores_of(of_known, targets)
        found: NDArray[np.float64] = one.values(features, weight, one.starts) + bias
        return found

    by_score, best, target = by_targets(features, encoder, known, fit, scores)
    if scores > 1:  # as for classes: the mean over the values says nothing, nor does the last
        target = np.column_stack([target, -target.sum(1)])
    sent = {}
    for width in sorted(widths):
        model = ComponentsBottom(settings, encoder.shapes, (width,))
        try:
            moments = model.before_labels(blocks)
            model.fit_score(of_known, target, moments, encoder.names)
        except SettingsError:
            if width <= own_width:
                raise
            continue
        sent[width] = model(features)
    return by_score, best, sent


def check_exposure(settings: PassiveSettings, data: PartyData) -> None:
    """Raise SettingsError if the plan of the contract's width is above ``max_exposure``.

    Without it, only the width is checked: not even the whole table may have too few directions.
    """
    most, chosen = settings.max_exposure, settings.bottom_model
    if most is None:
        if isinstance(chosen, PcaModel) and settings.initial_weights is None:
            _check_directions(settings, chosen, data)
        return
    if exposure_plan_of(settings, data, only_own=True).own.disclosure <= most:
        return
    raise SettingsError(
        f"{limit_in_words(exposure_plan_of(settings, data))} Nothing was sent; the figures: "
        f"splitveil plan passive.yaml"
    )


def _check_directions(settings: PassiveSettings, chosen: PcaModel, data: PartyData) -> None:
    every = _rows(data)
    for rows in (every[:MOST_FITTED], every):  # a part has no more than the whole
        encoder = data.fit(rows, None, bins_of(chosen))
        if encoder is None:
            return
        model = ComponentsBottom(chosen, encoder.shapes, settings.contract.cut_shape)
        try:
            model.components(partial(data.blocks, encoder, rows), settings.contract.cut_dim)
        except SettingsError:
            if len(rows) == len(every):
                raise
        else:
            return


def _rows(data: PartyData) -> Positions:
    """Return the rows of this party's table that a model may be fitted to."""
    splits = data.table.splits
    if splits is None:
        return np.arange(len(data.ids))
    return np.flatnonzero(splits == SPLITS.index("train"))


def limit_in_words(plan: ExposurePlan) -> str:
    """Hold the contract's width against ``max_exposure``, and name what would stay within."""
    most, own, least = plan.max_exposure or 1.0, plan.own, min(plan.exposures)
    text = f"max_exposure: {most:g}; {numbers_in_words(plan.width)} per row disclose "
    text += f"{own.disclosure:.3f} of the columns (mean)"
    if own.disclosure <= most:
        return f"{text}."
    one, widest = own.strongest, plan.widest(most)
    if one is not None:
        text += (
            f", and {one.name} most of all ({one.of_100(one.right)} right guesses in 100 instead "
            f"of {one.of_100(one.without)})"
        )
    if widest is not None:
        fits = f"contract.cut_shape: [{widest}] discloses {plan.exposures[widest].disclosure:.3f}"
    elif least < plan.width or least == 1:
        fits = f"even {numbers_in_words(least)} per row disclose "
        fits += f"{plan.exposures[least].disclosure:.3f}: leave columns out of data.features"
    else:
        fits = "make contract.cut_shape smaller, or leave columns out of data.features"
    return f"{text}; {fits}."


def narrower_in_words(plan: ExposurePlan) -> str:
    """Describe what the remedy, a narrower cut, would gain for the strongest column."""
    goal = plan.max_exposure or _USUAL_GOAL
    widest = plan.widest(goal)
    if widest is None or widest >= plan.width:
        narrower = [width for width in plan.exposures if width < plan.width]
        if not narrower or plan.own.disclosure <= goal:
            return f"{numbers_in_words(plan.width)} per row: disclosure {plan.own.disclosure:.2f}."
        widest = narrower[0]
    before, after = plan.own, plan.exposures[widest]
    of_before = {one.name: one for one in before.columns}
    found = max(after.columns, key=lambda one: of_before[one.name].right - one.right)
    was = of_before[found.name]
    return (
        f"{numbers_in_words(widest)} per row instead of {plan.width} (contract.cut_shape): "
        f"{found.name} from {was.of_100(was.right)} to {found.of_100(found.right)} right guesses "
        f"in 100; mean over columns from {before.disclosure:.2f} to {after.disclosure:.2f} of what "
        "they hide."
    )


def remedy_of(
    settings: PassiveSettings,
    trainer: ComponentsTrainer,
    encoder: FeatureEncoder,
    sample: Sample,
    own: FeatureExposure,
) -> str:
    """Describe what fewer components would have revealed; "" if unknown or not needed."""
    most, width = settings.max_exposure or _USUAL_GOAL, settings.contract.cut_dim
    is_nested = settings.contract.is_one_shot and isinstance(settings.bottom_model, PcaModel)
    if not is_nested or own.disclosure <= most:
        return ""
    features, values = trainer.arrays(sample.positions), trainer.activations(sample.positions)
    found = {width: own}
    for fewer in (one for one in WIDTHS if one < width):
        one = exposure_of([values[:, :fewer]], features, encoder, sample.known, 0)
        if one is not None:
            found[fewer] = one
        if one is None or one.disclosure > most:
            break
    if len(found) == 1:
        return ""
    plan = ExposurePlan("", settings.bottom_model.kind, True, width, found, settings.max_exposure)
    return narrower_in_words(plan)


def numbers_in_words(width: int) -> str:
    return f"{width} number{'s' * (width != 1)}"


_MOST_COLUMNS = 12
_TOTALS = {"mean disclosure": "disclosure", "strongest": "strongest_disclosure"}


def plan(parsed: argparse.Namespace) -> None:
    settings: PassiveSettings = parsed.loaded
    with ProgressBar("measuring what would be given away"):
        found = exposure_plan_of(settings, PartyData.of(settings))
    if parsed.json:
        print_json(found.to_json())
    else:
        show(found, details=parsed.verbose > 0)


def show(plan: ExposurePlan, console: Console | None = None, *, details: bool = True) -> None:
    console = console or Console(file=sys.stdout, highlight=False)
    own = plan.own

    def say(text: str) -> None:
        console.print(visible(text), markup=False, soft_wrap=True)

    say("What could the label owner guess of our columns from what a run would send?")
    columns = sorted(own.columns, key=lambda one: -one.gain)
    shown = columns if details else columns[:_MOST_COLUMNS]
    scores = {one.name: one for one in plan.by_score}
    at_widths = [f"{at}{'*' * (at == plan.width)}" for at in plan.exposures]
    table = PlainTable(
        f"{plan.bottom_model}: right guesses in 100, by the numbers sent per row",
        ["column"],
        ["none", *at_widths, *(["aimed"] if scores else [])],
        caption=f"* the contract's; {own.known_rows:,} rows known, {own.rows:,} others guessed",
    )
    by_width = [{one.name: one for one in each.columns} for each in plan.exposures.values()]
    for one in shown:
        found = [each[one.name].right for each in [*by_width, scores] if one.name in each]
        table.add_row(one.name, *(f"{100 * share:.0f}" for share in (one.without, *found)))
    table.add_section()
    for name, figure in _TOTALS.items():
        shares = (getattr(each, figure) for each in plan.exposures.values())
        table.add_row(name, "0", *(f"{share:.2f}" for share in shares))
    console.print(table)
    if len(columns) > len(shown):
        say(f"{len(columns) - len(shown)} more columns count, and are shown with -v.")
    if own.unjudged:
        say(f"Not measured: {', '.join(own.unjudged)}.")
    if plan.by_score:
        say(
            "What an honest score reveals follows from labels, and cannot be known before the run. "
            f"Measured is the worst: a label owner that sends column {plan.target} of the rows it "
            "knows in the place of labels, and for “aimed” each column."
        )
    elif not plan.is_one_shot:
        say("The model is measured before it trains; expect at least as much after several epochs.")
    say(
        "Disclosure is the share of what the most frequent class (none) leaves unknown. What has "
        "been sent stays with the label owner, also for other models."
    )
    say(narrower_in_words(plan))
    if plan.max_exposure is not None:
        say(limit_in_words(plan))
