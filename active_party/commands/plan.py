"""``splitveil plan active.yaml``: forecasts what a run will reveal about the labels."""

import argparse
import sys

from rich.console import Console

from splitveil.active_party.earlier_runs import answers_before
from splitveil.active_party.ledger.ledger import estimate_of
from splitveil.active_party.planned import Plan, bound_in_words, forecast_in_words, plan_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.arguments import print_json
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.charge import Adversary
from splitveil.common.text.visible_text import PlainTable, visible
from splitveil.common.text.wording import at_most


def plan(parsed: argparse.Namespace) -> None:
    settings: ActiveSettings = parsed.loaded
    data = PartyData.of(settings)
    planned = plan_of(settings, data, parsed.target_leak_auc, answers_before(settings))
    if parsed.json:
        print_json(planned.to_json())
    else:
        show(planned, details=parsed.verbose > 0)
    if planned.ends_at_once:
        raise SettingsError(
            f"{parsed.settings}: run_budget: the first answer exceeds it, so that the run would "
            "end before anything is trained: expected a larger limit, or a defense that reveals "
            "less"
        )


def show(plan: Plan, console: Console | None = None, *, details: bool = True) -> None:
    console = console or Console(file=sys.stdout, highlight=False)

    def say(text: str) -> None:
        console.print(visible(text), markup=False, soft_wrap=True)

    say(f"What would a run with {plan.defense} reveal about the labels, and to whom?")
    table = PlainTable("", ["to a passive party that"], ["bound on the leak AUC, 0.5 to 1"])
    for peers, meaning in _PEERS.items():
        table.add_row(meaning, bound_in_words(plan.of_run, peers))
    console.print(table)
    say(_verdict(plan))
    if details:
        rows = plan.data
        say(
            f"{rows.source}: {rows.rows:,} rows, {rows.shares}; if all of them are aligned, about "
            f"{rows.training_rows:,} are trained on, in {rows.steps_per_epoch:,} steps of "
            f"{rows.batch_size} per epoch, {rows.epochs} epochs"
        )
        console.print(_forecast_table(plan))
    for line in plan.remarks if details else plan.brief:
        say(line)
    if (target := plan.target) is not None:
        of_several = target.holds_for_any_means
        title = f"marvell's power ratio for a leak AUC of {target.leak_auc:g} over the whole run"
        caption = "fresh: an estimate, for classes without any spread; others are charged more"
        table = PlainTable(
            f"{title}, whatever the class means" if of_several else title,
            caption="" if of_several else caption,
        )
        for heading in ("noise", "answers", "by the estimate", "by the bound"):
            table.add_column(heading, justify="right" if heading != "noise" else "left")
        for noise, answers, *ratios in target.ratios:
            table.add_row(noise, str(answers), *map(at_most, ratios))
        console.print(table)


_PEERS = {
    Adversary.ANYBODY: "does whatever it likes (anybody)",
    Adversary.HONEST_BUT_CURIOUS: "follows the protocol (honest-but-curious)",
    Adversary.CLASS_MEANS: "only compares gradients with class means",
}


def _verdict(plan: Plan) -> str:
    charge = plan.of_run
    peers = next((one for one in Adversary if bound_in_words(charge, one) != "none"), None)
    if peers is None:
        return (
            f"Nothing limits what a run with {plan.defense} reveals to a peer of any kind; "
            f"defense: {{name: noisy_label}} limits it for anybody."
        )
    to = f"To a passive party that {_PEERS[peers].partition(' (')[0]}"
    bound, answers = bound_in_words(charge, peers).removeprefix("at most "), plan.of_run.answers
    if not charge.is_promise:
        return f"{to}, the leak AUC is {bound}: no promise, and only a run_budget sets a limit."
    return (
        f"{to}, {'the run reveals' if answers == 1 else f'all {answers} epochs together reveal'} "
        f"the labels with a leak AUC of at most {bound}, beyond what features say anyway."
    )


def _forecast_table(plan: Plan) -> PlainTable:
    table = PlainTable(f"defense {plan.defense}: what the peer may learn of one example", lead=2)
    table.add_column("noise")
    bounds = (f"leak AUC bound: {peers}" for peers in Adversary)
    for heading in ("answers", "sum_kl", "leak AUC, estimated", *bounds):
        table.add_column(heading, justify="right")
    named = ""
    for one in dict.fromkeys(plan.answers):
        name = f"{one.noise} (configured)" if one.noise == plan.noise else one.noise
        table.add_row(
            "" if name == named else name,
            str(one.answers),
            forecast_in_words(one, lambda account: at_most(float(account.sum_kl))),
            forecast_in_words(one, lambda account: f"{estimate_of(account):.3f}"),
            *(bound_in_words(one, peers) for peers in Adversary),
        )
        named = name
    return table
