"""Forecasts what a run will reveal about the labels, before any training.

The defense forecasts the charge of one answer (see ``defenses.section`` for its kinds,
and the modules of the defenses for their proofs); here it is extended to the whole run and compared
with the run's budget.
"""

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from splitveil.active_party.assembly import signals_of
from splitveil.active_party.defenses.interface import DefenseContext
from splitveil.active_party.defenses.marvell import (
    MarvellDefense,
    power_ratio_for,
    worst_pair_factor,
)
from splitveil.active_party.defenses.noisy_sums import COMPUTATIONAL
from splitveil.active_party.defenses.section import ChargeModel
from splitveil.active_party.defenses.sum_kl import sum_kl_for_estimated_auc, sum_kl_for_leak_auc
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.budget import num_answers_within, widest_adversary
from splitveil.active_party.ledger.ledger import Accounts, auc_bound, estimate_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import Persons
from splitveil.active_party.training.label_kinds import kind_of
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.privacy.charge import Adversary, narrowest
from splitveil.common.record.run_folder import finite_or_null
from splitveil.common.text.wording import at_most, auc_at_most

_FEW_ROWS = 200  # noise at a bound of .60 then hides a correlation of .3 with the label


class PlannedRows(NamedTuple):
    """The label owner's file, and the steps that it makes if all of its rows are aligned."""

    source: str
    rows: int
    shares: str
    """The shares of the classes, or the spread of the numbers, in words."""
    training_rows: int
    steps_per_epoch: int
    batch_size: int
    epochs: int


class Target(NamedTuple):
    leak_auc: float
    ratios: tuple[tuple[str, int, float, float], ...]
    """The noise, the number of answers, and the power ratio by the estimate and by the bound."""
    holds_for_any_means: bool
    """True if the ratios hold for any class means, as with several classes."""


class Plan(NamedTuple):
    defense: str
    data: PlannedRows
    noise: str  # that is set, ``fresh`` or ``persistent``
    answers: tuple[ChargeModel, ...]
    """One answer and all answers of a run, for each kind of noise."""
    remarks: tuple[str, ...]
    """Sentences about the reliability of the figures, other signals and those in brief."""
    brief: tuple[str, ...] = ()
    """Sentences needed to read the bounds: the labels they are about, and what limits or adds to
    them."""
    target: Target | None = None
    earlier: str = ""
    """The leakage of earlier runs, by themselves and with this run; empty if none."""
    persons: str = ""  # what a bound for each person costs; empty if it is for each row
    ends_at_once: bool = False  # the run's budget does not allow the first answer

    @property
    def of_run(self) -> ChargeModel:
        """All answers of a run, with the noise that is set."""
        return next(one for one in self.answers[1::2] if one.noise == self.noise)

    def rows(self) -> list[dict[str, Any]]:
        """Return plain values, column -> value; None if unknown or not bounded."""
        return [
            {"noise": one.noise, "configured": one.noise == self.noise} | _row(one)
            for one in self.answers
        ]

    def bounds_in_short(self) -> str:
        """Say in one line what bounds the leak AUC of the whole run, and for whom."""
        bounds = {peers: bound_in_words(self.of_run, peers) for peers in Adversary}
        groups = groupby(Adversary, key=bounds.__getitem__)
        each = [f"{bound} for {next(peers).in_words}" for bound, peers in groups]
        shown = "none" if set(bounds.values()) == {"none"} else ", ".join(each)
        whose = ", for each person" * bool(self.persons)
        return f"bound on the leak AUC of the whole run: {shown}{whose}"

    def to_json(self) -> dict[str, Any]:
        target = self.target
        return {
            "defense": self.defense,
            "data": self.data._asdict(),
            "answers": self.rows(),
            "remarks": list(self.remarks),
            "target": None
            if target is None
            else {
                "leak_auc": target.leak_auc,
                "power_ratios": [
                    finite_or_null(
                        {"noise": noise, "answers": answers, "by_estimate": one, "by_bound": other}
                    )
                    for noise, answers, one, other in target.ratios
                ],
            },
        }


def plan_of(
    settings: ActiveSettings,
    data: PartyData,
    target_leak_auc: float | None = None,
    earlier: AccountBook | None = None,
) -> Plan:
    if target_leak_auc is not None and not 0.5 < target_leak_auc < 1:
        raise SettingsError(
            f"--target-leak-auc: expected an AUC between 0.5 and 1, got {target_leak_auc}"
        )
    contract = settings.contract
    labels, num_classes = data.labels_at(np.arange(len(data.ids))), data.settings.num_classes
    # Without two classes there are no positives, and charges do not depend on shares.
    pos_fraction = float(labels.double().mean()) if num_classes == 2 else 1 / num_classes
    training_rows = data.training_rows(contract.split)
    steps = training_rows / contract.batch_size
    rows = PlannedRows(
        data.table.source,
        len(data.ids),
        kind_of(data.settings).describe(labels),
        training_rows,
        math.floor(steps) if contract.drop_last else math.ceil(steps),
        contract.batch_size,
        contract.epochs,
    )
    persons, most_rows, whose = Persons.of(settings, data), 1, ""
    book = settings.earlier_answers() if earlier is None else earlier
    if persons is not None:
        book, most_rows = book.by_person(data.ids, persons.names), persons.most_rows
        whose = _of_persons(settings, persons, training_rows)
    context = settings.defense_context(pos_fraction, most_rows)
    signals = signals_of(settings, book)
    widest, epochs = widest_adversary(signals), 1 if contract.is_one_shot else contract.epochs
    model = settings.defense.charge_model(context).narrowed(widest)
    answers = [
        one.narrowed(widest).over(count)
        for one in settings.defense.charge_models(context)
        for count in (1, epochs)
    ]
    said = [signal.why for signal in signals]
    together = _with_earlier(book, model.over(epochs))
    brief = tuple(filter(None, (whose, *_brief(settings, model, book, together))))
    said.append(model.said)
    is_known = model.certainty == "unknown" or math.isfinite(model.high)
    if is_known and not contract.is_one_shot:
        said.append(model.covers)
    budget = settings.run_budget
    if budget is None:
        said.append("run_budget: none is set")
        ends_at_once = False
    else:
        allowed = float(budget.limit.of(accounts_of(model)[1]))
        ends_at_once = stop_epoch(model.low, 1, allowed) is not None
    return Plan(
        settings.defense.name,
        rows,
        model.noise,
        tuple(answers),
        (*said, *brief),
        brief,
        None
        if target_leak_auc is None or MarvellDefense().objection(context) is not None
        else _target(target_leak_auc, contract.epochs, context),
        together,
        whose,
        ends_at_once,
    )


def stop_epoch(charge: float, epochs: int, max_sum_kl: float) -> int | None:
    """Return the epoch, from 0, when a budget ends a run with fresh noise, or None."""
    whole = num_answers_within(max_sum_kl, charge)
    return None if whole >= epochs else int(whole)


def _row(answers: ChargeModel) -> dict[str, Any]:
    known, (least, most) = answers.certainty != "unknown", accounts_of(answers)
    is_bounded = known and math.isfinite(answers.high)
    figures = {"sum_kl": lambda one: float(one.sum_kl), "estimated_leak_auc": estimate_of}
    pairs = {name: (of(least), of(most)) if known else None for name, of in figures.items()}
    for peers in Adversary:
        holds = is_bounded and answers.charge.adversary.includes(peers)
        pairs[peers.column] = (auc_bound(least), auc_bound(most)) if holds else None
    return {
        "answers": answers.answers,
        "certainty": answers.certainty,
        **{
            f"{name}{end}": None if pair is None else finite_or_null(pair[place])
            for name, pair in pairs.items()
            for place, end in enumerate(("_least", ""))
        },
    }


def _of_persons(settings: ActiveSettings, persons: Persons, training_rows: int) -> str:
    most = persons.most_rows
    times = most if settings.contract.releases_sums else math.sqrt(most)
    # Signal to noise is sqrt(n) / (k sqrt(g)) of noisy labels, and n / (k g) of sums.
    worth = training_rows // most
    return (
        f"defense.subject_column: bounds are for each of {persons.number} persons, who have at "
        f"most {most} training rows each: noise is {times:.3g} times as large as for a bound of "
        f"each row, and leaves the signal-to-noise ratio of {worth} rows"
        f"{', too few for a score' * (worth < _FEW_ROWS)}."
    )


def _with_earlier(book: AccountBook, charge: ChargeModel) -> str:
    if book.ledger.reveals_nothing:
        return ""
    before = book.worst()
    peers = narrowest(before.adversary, charge.charge.adversary)
    both = auc_bound(before.together(accounts_of(charge)[1]))
    together = (
        f"together with this run {auc_at_most(both)}, bounded for {peers.in_words}"
        if charge.is_promise
        else "what this run adds is not known before"
    )
    return (
        f"What earlier runs have revealed comes on top, sum_kl {at_most(float(before.sum_kl))} at "
        f"most, a leak AUC of {auc_at_most(auc_bound(before))}, bounded for "
        f"{before.adversary.in_words}; {together}."
    )


def _brief(
    settings: ActiveSettings, charge: ChargeModel, book: AccountBook, together_in_words: str
) -> Iterator[str]:
    yield kind_of(settings.data).meaning_of_bounds
    if settings.contract.releases_sums:
        yield COMPUTATIONAL
    yield together_in_words
    if settings.run_budget is None:
        return
    before, (_, account) = book.worst(), accounts_of(charge)
    limit, contract = settings.run_budget.limit, settings.contract
    epochs = 1 if contract.is_one_shot else contract.epochs
    # Repeated noise exceeds the budget either with its first answer or never.
    epochs_charged = epochs if charge.noise == "fresh" else 1
    last = stop_epoch(charge.low, epochs_charged, float(limit.of(account)))
    left = float(limit.of(before.together(account)) - before.sum_kl)
    first = stop_epoch(charge.high, epochs_charged, left)
    ends = _end_in_words(first, last, epochs, charge)
    yield f"run_budget, for {limit.peers.in_words}: {limit.in_words(account)}: {ends}"


def _end_in_words(first: int | None, last: int | None, epochs: int, charge: ChargeModel) -> str:
    if first is None:
        fits = "the run fits" if epochs == 1 else f"all {epochs} epochs fit"
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


def _target(leak_auc: float, epochs: int, context: DefenseContext) -> Target:
    is_multi_class = context.num_classes > 2
    low, high = sum_kl_for_estimated_auc(leak_auc), sum_kl_for_leak_auc(leak_auc)

    def fresh(sum_kl: float) -> float:
        if is_multi_class:
            return worst_pair_factor(context.num_classes) * epochs / sum_kl
        return power_ratio_for(sum_kl, epochs, context.cut_dim, context.pos_fraction)

    ratios: tuple[tuple[str, int, float, float], ...] = (
        ("fresh", epochs, fresh(low), fresh(high)),
    )
    if not is_multi_class:
        ratios += (("persistent", epochs, 1 / low, 1 / high),)
    return Target(leak_auc, ratios, is_multi_class)


def bound_in_words(charge: ChargeModel, peers: Adversary) -> str:
    """Write the bound on the leak AUC for some peers, rounded up; ``none`` without one."""
    described = charge.high < math.inf or charge.certainty == "unknown"
    if not (described and charge.charge.adversary.includes(peers)):
        return "none"

    return forecast_in_words(charge, lambda one: auc_at_most(auc_bound(one)))


def forecast_in_words(charge: ChargeModel, figure: Callable[[Accounts], str]) -> str:
    """Write a figure of an account with this charge, and how certain it is."""
    least, most = accounts_of(charge)
    match charge.certainty:
        case "exact":
            return figure(most)
        case "bound":
            return f"at most {figure(most)}"
        case "estimate":
            return f"likely {figure(least)} .. {figure(most)}"
        case "unknown":
            return "not known before"


def accounts_of(charge: ChargeModel) -> tuple[Accounts, Accounts]:
    """Return the accounts, (), that are charged the lowest and the highest divergence forecast."""
    most = Accounts.of_charge(charge.charge)
    return most._replace(sum_kl=np.asarray(charge.low)), most
