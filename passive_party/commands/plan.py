"""``splitveil plan passive.yaml``: measures what a run would reveal of the columns."""

import argparse
import sys

from rich.console import Console

from splitveil.common.party.json_output import print_json
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.progress import ProgressBar
from splitveil.common.text.visible_text import PlainTable, visible
from splitveil.passive_party.exposure_plan import (
    ExposurePlan,
    exposure_plan_of,
    limit_in_words,
    narrower_in_words,
)
from splitveil.passive_party.settings import PassiveSettings

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
