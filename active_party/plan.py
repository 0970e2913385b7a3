"""The plan of a run: a forecast of what it reveals about the labels, printed before any training.

The defense forecasts the charge of one answer (see ``defenses.forecast`` for the kinds of forecast,
and the modules of the defenses for their proofs); here it is extended to the whole run and compared
with the run's budget.
"""

import math
import sys
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from splitveil.active_party.assembly import signals_of
from splitveil.active_party.defenses.build_inputs import DefenseContext
from splitveil.active_party.defenses.forecast import ChargeForecast, Forecast
from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.active_party.defenses.marvell import power_ratio_for
from splitveil.active_party.defenses.multi_class_marvell import worst_pair_factor
from splitveil.active_party.defenses.sum_kl import (
    estimated_auc,
    sum_kl_for_estimated_auc,
    sum_kl_for_leak_auc,
)
from splitveil.active_party.ledger.bounds import auc_bound, caveats_of
from splitveil.active_party.ledger.label_signals import widest_circle
from splitveil.active_party.ledger.limit import in_words, num_answers_within
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.covers import Covers, narrowest
from splitveil.common.text.upper_bounds import at_most, auc_at_most


def stop_epoch(charge: float, epochs: int, max_sum_kl: float) -> int | None:
    """Return the epoch, from 0, in which a budget ends a run with fresh noise; None if it does not.

    Each epoch answers once about every training example. The first answer beyond the budget comes
    in the epoch after the last one that fits completely.
    """
    whole = num_answers_within(max_sum_kl, charge)
    return None if whole >= epochs else int(whole)


def print_plan(
    settings: ActiveSettings,
    data: PartyData,
    target_leak_auc: float | None = None,
    console: Console | None = None,
) -> None:
    """Print what a run with these settings would reveal, and the power ratio that meets a target.

    Args:
        settings: the active party's settings, with the contract.
        data: the label file, not yet aligned.
        target_leak_auc: AUC below which the whole run should stay.
        console: the console to print on; by default the standard output stream.
    """
    console = console or Console(file=sys.stdout, highlight=False)
    contract = settings.contract
    labels, num_classes = data.labels_of(data.ids), data.settings.num_classes
    # With more than two classes there are no positives, and charges do not depend on shares.
    pos_fraction = float(labels.double().mean()) if num_classes == 2 else 1 / num_classes
    training_rows = data.training_rows(contract.split)
    steps = training_rows / contract.batch_size
    console.print(
        f"{data.table.source}: {len(data.ids)} rows, {_shares(labels, data)}; if all of them "
        f"are aligned, about {training_rows} are trained on, in "
        f"{math.floor(steps) if contract.drop_last else math.ceil(steps)} steps of "
        f"{contract.batch_size} per epoch, {contract.epochs} epochs",
        markup=False,
        soft_wrap=True,
    )
    context = settings.defense_context(pos_fraction)
    signals = signals_of(settings)
    forecast = _narrowed(settings.defense.forecast(context), widest_circle(signals))
    console.print(_forecast_table(settings, forecast))
    teaches = settings.defense.outlook(context, training_rows)
    said = [*([teaches] if teaches else []), *(signal.why for signal in signals)]
    for line in [*said, *_remarks(settings, forecast)]:
        console.print(line, markup=False, soft_wrap=True)
    if target_leak_auc is not None:
        console.print(_target_table(target_leak_auc, contract.epochs, context))


def _shares(labels: Tensor, data: PartyData) -> str:
    """Describe the shares of the classes among the rows."""
    names = data.settings.class_names
    if not names:
        return f"{float(labels.double().mean()):.2%} positive"
    counts = torch.bincount(labels.long(), minlength=len(names)).tolist()
    shares = (f"{name!r} {n / len(labels):.1%}" for name, n in zip(names, counts, strict=True))
    return f"{len(names)} classes: {', '.join(shares)}"


def _forecast_table(settings: ActiveSettings, forecast: Forecast) -> Table:
    epochs = settings.contract.epochs
    table = Table(
        title=f"defense {settings.defense.name}: what the peer may learn of one example",
        title_justify="left",
    )
    table.add_column("noise")
    bounds = (f"leak AUC bound: {peers}" for peers in Covers)
    for heading in ("answers", "sum_kl", "leak AUC, estimated", *bounds):
        table.add_column(heading, justify="right")
    for noise, charge in forecast.charges.items():
        name = f"{noise} (configured)" if noise == forecast.configured else noise
        whole_run = charge.times(epochs) if noise == "fresh" else charge
        for answers, of_all in ((1, charge), (epochs, whole_run)):
            table.add_row(name, str(answers), *_figures(of_all))
            name = ""
    return table


def _narrowed(forecast: Forecast, peers: Covers) -> Forecast:
    """Return a forecast for no more peers than those for whom the run can have bounds."""
    charges = {
        noise: charge._replace(covers=narrowest(charge.covers, peers))
        for noise, charge in forecast.charges.items()
    }
    return forecast._replace(charges=charges)


def _remarks(settings: ActiveSettings, forecast: Forecast) -> list[str]:
    remarks = [forecast.honesty]
    if settings.data.num_classes > 2:
        remarks.append("All figures are of the pair of classes left furthest apart.")
    if forecast.charge.certainty == "unknown" or math.isfinite(forecast.charge.high):
        remarks.append(settings.defense.coverage().why)
    earlier = 0.0
    if settings.earlier_ledgers:
        book = settings.earlier_answers()
        earlier = book.most()
        remarks.append(
            f"What earlier_ledgers have told comes on top, sum_kl {at_most(earlier)} at most, "
            f"bounded for {book.covers().in_words}."
        )
    if settings.run_budget is None:
        return [*remarks, "run_budget: none is set"]
    limit, epochs = settings.run_budget.limit, settings.contract.epochs
    budget = limit.of(_caveats(forecast.charge))
    # Repeated noise exceeds the budget either with its first answer or never.
    epochs_charged = epochs if forecast.configured == "fresh" else 1
    charge = forecast.charge
    last = stop_epoch(charge.low, epochs_charged, budget)
    first = stop_epoch(charge.high, epochs_charged, budget - earlier)
    return [
        *remarks,
        f"run_budget, for {limit.peers.in_words}: {in_words(budget, _caveats(charge))}: "
        + _end_in_words(first, last, epochs, charge),
    ]


def _end_in_words(first: int | None, last: int | None, epochs: int, charge: ChargeForecast) -> str:
    """Describe when a budget ends the run.

    Args:
        first: the epoch in which the budget ends the run at the highest charge; None if it does
            not.
        last: the same epoch at the lowest charge.
        epochs: number of epochs of the run.
        charge: forecast for one answer.
    """
    if first is None:
        fits = f"all {epochs} epochs fit"
        return fits if charge.is_promise else f"{fits}, if charges are as estimated"
    if charge.low == 0:
        likely = "" if charge.certainty == "unknown" else f", not likely before epoch {first + 1}"
        return f"it may end the run in any epoch{likely}"
    if first == last and charge.is_promise:
        return f"the run ends in epoch {first + 1} of {epochs}"
    fit = f"all {epochs} epochs are" if last is None else "the run is"
    expected = f"{fit} expected to " + (
        "fit" if last is None else f"end in epoch {last + 1} of {epochs}"
    )
    if charge.is_promise:
        return f"{expected}; it does not end before epoch {first + 1}"
    sooner = (
        "" if first == last else f"; at the highest charges estimated it ends in epoch {first + 1}"
    )
    return f"{expected}{sooner}; higher charges end it sooner"


def _target_table(target: float, epochs: int, context: DefenseContext) -> Table:
    """Tabulate the power ratios of marvell that keep the whole run below a leak AUC."""
    of_several = context.num_classes > 2
    title = f"marvell's power ratio for a leak AUC of {target:g} over the whole run"
    caption = "fresh: an estimate, for classes without any spread; others are charged more"
    table = Table(
        title=f"{title}, whatever the class means" if of_several else title,
        caption=None if of_several else caption,
        caption_justify="left",
        title_justify="left",
    )
    for heading in ("noise", "answers", "by the estimate", "by the bound"):
        table.add_column(heading, justify="right" if heading != "noise" else "left")
    allowed = (sum_kl_for_estimated_auc(target), sum_kl_for_leak_auc(target))
    fresh = [_fresh_ratio(sum_kl, epochs, context) for sum_kl in allowed]
    table.add_row("fresh", str(epochs), *map(at_most, fresh))
    if not of_several:
        table.add_row("persistent", str(epochs), *(at_most(1 / sum_kl) for sum_kl in allowed))
    return table


def _fresh_ratio(sum_kl: float, epochs: int, context: DefenseContext) -> float:
    """Return the power ratio at which the fresh answers of a run leave this divergence."""
    if context.num_classes > 2:
        return worst_pair_factor(context.num_classes) * epochs / sum_kl
    return power_ratio_for(sum_kl, epochs, context.cut_dim, context.pos_fraction)


def _figures(charge: ChargeForecast) -> list[str]:
    """Write sum_kl, the estimated AUC, and the bound for each circle of peers, rounded up."""
    caveats = _caveats(charge)
    shown: list[Callable[[float], str]] = [at_most, lambda sum_kl: f"{estimated_auc(sum_kl):.3f}"]
    written = [_in_words(charge, figure) for figure in shown]
    for peers in Covers:
        described = charge.high < math.inf or charge.certainty == "unknown"
        if described and charge.covers.includes(peers):
            written.append(_in_words(charge, partial(_bound, caveats, peers)))
        else:
            written.append("none")
    return written


def _in_words(charge: ChargeForecast, figure: Callable[[float], str]) -> str:
    """Write a figure of a charge, with its certainty."""
    match charge.certainty:
        case "exact":
            return figure(charge.high)
        case "bound":
            return f"at most {figure(charge.high)}"
        case "estimate":
            return f"likely {figure(charge.low)} .. {figure(charge.high)}"
        case "unknown":
            return "not known before"


def _bound(caveats: int, peers: Covers, sum_kl: float) -> str:
    return auc_at_most(auc_bound(sum_kl, caveats, peers))


def _caveats(charge: ChargeForecast) -> int:
    of_high = LeakCharge(charge.high, covers=charge.covers, is_gaussian=charge.is_gaussian)
    return caveats_of(of_high)
