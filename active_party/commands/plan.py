"""``splitveil active plan``: what a run will reveal about the labels, before any training."""

import argparse
import math
import sys
from collections.abc import Callable

from rich.console import Console

from splitveil.active_party.defenses.forecast import ChargeForecast
from splitveil.active_party.earlier_runs import answers_before
from splitveil.active_party.ledger.bounds import auc_bound, estimate_of
from splitveil.active_party.planned import Plan, Target, known_of_forecast, plan_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party import command_line
from splitveil.common.party.json_output import print_json
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.text.upper_bounds import at_most, auc_at_most
from splitveil.common.text.visible_text import PlainTable


def plan(parsed: argparse.Namespace) -> None:
    """Print the plan of a run, from its settings and labels."""
    settings = command_line.load_settings(ActiveSettings, parsed, "active")
    data = PartyData.of(settings)
    planned = plan_of(settings, data, parsed.target_leak_auc, answers_before(settings))
    if parsed.json:
        print_json(planned.to_json())
    else:
        show(planned)


def show(plan: Plan, console: Console | None = None) -> None:
    """Print a plan; by default on the standard output."""
    console = console or Console(file=sys.stdout, highlight=False)
    rows = plan.data
    console.print(
        f"{rows.source}: {rows.rows} rows, {rows.shares}; if all of them "
        f"are aligned, about {rows.training_rows} are trained on, in "
        f"{rows.steps_per_epoch} steps of "
        f"{rows.batch_size} per epoch, {rows.epochs} epochs",
        markup=False,
        soft_wrap=True,
    )
    console.print(_forecast_table(plan))
    for line in plan.remarks:
        console.print(line, markup=False, soft_wrap=True)
    if plan.target is not None:
        console.print(_target_table(plan.target))


def _forecast_table(plan: Plan) -> PlainTable:
    table = PlainTable(f"defense {plan.defense}: what the peer may learn of one example", lead=2)
    table.add_column("noise")
    bounds = (f"leak AUC bound: {peers}" for peers in Adversary)
    for heading in ("answers", "sum_kl", "leak AUC, estimated", *bounds):
        table.add_column(heading, justify="right")
    named = ""
    for one in plan.answers:
        name = f"{one.noise} (configured)" if one.is_configured else one.noise
        table.add_row("" if name == named else name, str(one.answers), *_figures(one.charge))
        named = name
    return table


def _target_table(target: Target) -> PlainTable:
    """Tabulate the power ratios of marvell that keep the whole run below a leak AUC."""
    of_several = target.holds_for_any_means
    title = f"marvell's power ratio for a leak AUC of {target.leak_auc:g} over the whole run"
    caption = "fresh: an estimate, for classes without any spread; others are charged more"
    table = PlainTable(
        f"{title}, whatever the class means" if of_several else title,
        caption="" if of_several else caption,
    )
    for heading in ("noise", "answers", "by the estimate", "by the bound"):
        table.add_column(heading, justify="right" if heading != "noise" else "left")
    for one in target.ratios:
        ratios = map(at_most, (one.by_estimate, one.by_bound))
        table.add_row(one.noise, str(one.answers), *ratios)
    return table


def _figures(charge: ChargeForecast) -> list[str]:
    """Write sum_kl, the estimated AUC, and the bound for each adversary class, rounded up."""
    known = known_of_forecast(charge)
    shown: list[Callable[[float], str]] = [
        at_most,
        lambda sum_kl: f"{estimate_of(sum_kl, known):.3f}",
    ]
    written = [_in_words(charge, figure) for figure in shown]
    for peers in Adversary:
        described = charge.high < math.inf or charge.certainty == "unknown"
        if described and charge.adversary.includes(peers):
            written.append(_in_words(charge, lambda sum_kl: auc_at_most(auc_bound(sum_kl, known))))
        else:
            written.append("none")
    return written


def _in_words(charge: ChargeForecast, figure: Callable[[float], str]) -> str:
    match charge.certainty:
        case "exact":
            return figure(charge.high)
        case "bound":
            return f"at most {figure(charge.high)}"
        case "estimate":
            return f"likely {figure(charge.low)} .. {figure(charge.high)}"
        case "unknown":
            return "not known before"
