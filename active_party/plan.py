"""The plan of a run: what it would tell of the labels, before any training.

It knows the defense, the epochs and the labels, and not yet the gradients. For ``marvell`` that is
enough up to the spread of the classes: the ledger gives spread no credit, so that an answer is
charged at least what the solution for classes without any leaves (u = v = 0). The solver, which
plans for the spreads that are there, may move noise away from the gap, shift it from one class to
the other, or count on the spread instead of it. What that adds to a charge K is of the order of K^2
as long as the spreads are not larger than the squared gap; the plan shows the range from K to
K (1 + K).

With several classes the charge is that of the pair left furthest apart. ``marvell`` then gives
spread no credit when it places its noise, so that what is known of a charge is exact: the strengths
other than a power ratio s are met by every batch, and a ratio leaves a pair between 1/s and
(K - 1)(1 + sqrt(K - 1))/(2 s), whatever the means of the K classes.
"""

import math
import sys
from decimal import ROUND_CEILING, Context
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from active_party.defenses import DefenseSettings
from active_party.defenses.label_noise import label_leak
from active_party.defenses.persistent import repeated_sum_kl
from active_party.defenses.settings import (
    DetectionError,
    GafmDefense,
    IsoDefense,
    LeakAuc,
    MarvellDefense,
    NoDefense,
    NoisyLabelDefense,
    PowerRatio,
    SumKl,
    is_credited,
)
from active_party.defenses.strength import allowed_sum_kl
from active_party.defenses.sum_kl import (
    leak_auc_bound,
    power_for_sum_kl,
    solve_noise,
    sum_kl_for_leak_auc,
)
from active_party.ledger import ROUNDING, estimated_auc
from active_party.settings import ActiveSettings
from common.party_data import PartyData

NoiseKind = Literal["fresh", "persistent"]


class Charge(NamedTuple):
    """Between what bounds a divergence will lie."""

    low: float
    high: float

    def times(self, answers: int) -> "Charge":
        """Return what some answers with noise of their own add up to."""
        return Charge(self.low * answers, self.high * answers)


def fresh_charge_of_several(defense: DefenseSettings, cut_dim: int, num_classes: int) -> Charge:
    """Foretell the charge of one answer with noise of its own, for three classes or more.

    Args:
        defense: which one, and how strong.
        cut_dim: width of the cut layer.
        num_classes: how many classes there are.
    """
    match defense:
        case MarvellDefense(strength=PowerRatio() as strength):
            ratio = strength.power_ratio
            return Charge(1 / ratio, worst_pair_factor(num_classes) / ratio)
        case MarvellDefense(strength=(SumKl() | DetectionError() | LeakAuc()) as strength):
            return Charge(allowed_sum_kl(strength), allowed_sum_kl(strength))
        case _:
            return fresh_charge(defense, cut_dim, 1 / num_classes)


def worst_pair_factor(num_classes: int) -> float:
    """Return what a power ratio times the divergence of the worst pair may reach at most.

    With Z the K class means around their centre, in rows and over sqrt K, and singular values r_k,
    the noise is h r_k along each direction, where h times the sum of the r_k is the power. A pair's
    gap is sqrt K r_k (u_ik - u_jk), and the sum over k of (u_ik - u_jk)^2 at most 2: the pair is
    left 2 K r_1 / h at most. The sum of the r_k^2 is at most c (K - 1)/(2 K), c the longest squared
    gap, and r_1 times the sum of K - 1 values r_k at most (1 + sqrt(K - 1))/2 times that.
    """
    return (num_classes - 1) * (1 + math.sqrt(num_classes - 1)) / 2


def fresh_charge(defense: DefenseSettings, cut_dim: int, pos_fraction: float) -> Charge:
    """Foretell the charge of one answer with noise of its own.

    Args:
        defense: which one, and how strong.
        cut_dim: width of the cut layer.
        pos_fraction: share of positives among the training rows, above 0 and below 1.
    """
    match defense:
        case NoDefense():
            return Charge(math.inf, math.inf)
        case MarvellDefense(strength=PowerRatio() as strength):
            ratio = strength.power_ratio
            charge = solve_noise(0.0, 0.0, 1.0, cut_dim, pos_fraction, ratio).sum_kl
        case MarvellDefense(strength=(SumKl() | DetectionError() | LeakAuc()) as strength):
            charge = allowed_sum_kl(strength)
        case IsoDefense():
            # A batch's class means are at most twice its largest norm apart: c/(t/d max|g|^2)
            # <= 4 d/t.
            ratio = defense.amplitude**2
            return Charge(0.0, 4 * cut_dim / ratio if ratio else math.inf)
        case GafmDefense() if not is_credited(defense, cut_dim):
            return Charge(math.inf, math.inf)
        case _:
            return Charge(0.0, math.inf)
    return Charge(charge, charge * (1 + charge))


def repeated_charge(defense: DefenseSettings, cut_dim: int, num_classes: int = 2) -> Charge:
    """Foretell the charge of noise that is drawn once per example, and of all its repeats."""
    match defense:
        case MarvellDefense():
            charge = repeated_sum_kl(defense.strength)
        case IsoDefense():
            charge = cut_dim / defense.amplitude**2 if defense.amplitude else math.inf
        case NoisyLabelDefense():
            charge, _ = label_leak(defense.mechanism, num_classes)
        case GafmDefense(composed_with=NoisyLabelDefense() as behind):
            return repeated_charge(behind, cut_dim)
        case _:
            charge = math.inf
    return Charge(charge, charge)


def power_ratio_for(sum_kl: float, answers: int, cut_dim: int, pos_fraction: float) -> float:
    """Return marvell's power ratio at which some fresh answers together leave this divergence."""
    return power_for_sum_kl(0.0, 0.0, 1.0, cut_dim, pos_fraction, sum_kl / answers)


def stop_epoch(charge: float, epochs: int, max_sum_kl: float) -> int | None:
    """Return the epoch, from 0, in which a budget ends a run with fresh noise; None if it does not.

    Each epoch answers once about every training example. The first answer too many comes in the
    epoch after the last one that fits whole.
    """
    whole = math.inf if charge == 0 else max_sum_kl * (1 + ROUNDING) // charge
    return None if whole >= epochs else int(whole)


def print_plan(
    settings: ActiveSettings,
    data: PartyData,
    target_leak_auc: float | None = None,
    console: Console | None = None,
) -> None:
    """Print what a run with these settings would tell, and what a target would take.

    Args:
        settings: with the contract.
        data: the label file, aligned with nobody's yet.
        target_leak_auc: AUC that the whole run shall stay below.
        console: prints elsewhere.
    """
    console = console or Console(file=sys.stdout, highlight=False)
    contract, defense = settings.contract, settings.defense
    labels, num_classes = data.labels_of(data.ids), data.settings.num_classes
    # Of several classes none is the positives: no charge depends on their shares.
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
    charges = _charges(defense, contract.aggregate_dim, pos_fraction, num_classes)
    console.print(_forecast_table(settings, charges))
    for line in _remarks(settings, charges, num_classes):
        console.print(line, markup=False, soft_wrap=True)
    if target_leak_auc is not None and num_classes > 2:
        console.print(_target_of_several(target_leak_auc, contract.epochs, num_classes))
    elif target_leak_auc is not None:
        console.print(
            _target_table(target_leak_auc, contract.epochs, contract.aggregate_dim, pos_fraction)
        )


def _shares(labels: Tensor, data: PartyData) -> str:
    """Say how the classes share the rows."""
    names = data.settings.class_names
    if not names:
        return f"{float(labels.double().mean()):.2%} positive"
    counts = torch.bincount(labels.long(), minlength=len(names)).tolist()
    shares = (f"{name!r} {n / len(labels):.1%}" for name, n in zip(names, counts, strict=True))
    return f"{len(names)} classes: {', '.join(shares)}"


def _charges(
    defense: DefenseSettings, cut_dim: int, pos_fraction: float, num_classes: int
) -> dict[NoiseKind, Charge]:
    charges: dict[NoiseKind, Charge] = {}
    if num_classes > 2:
        if _configured_noise(defense) == "persistent":
            return {"persistent": repeated_charge(defense, cut_dim, num_classes)}
        return {"fresh": fresh_charge_of_several(defense, cut_dim, num_classes)}
    if isinstance(defense, GafmDefense):  # it has one kind of noise, which the settings decide
        if _configured_noise(defense) == "persistent":
            return {"persistent": repeated_charge(defense, cut_dim)}
        return {"fresh": fresh_charge(defense, cut_dim, pos_fraction)}
    if not isinstance(defense, NoisyLabelDefense):
        charges["fresh"] = fresh_charge(defense, cut_dim, pos_fraction)
    if not isinstance(defense, NoDefense):
        charges["persistent"] = repeated_charge(defense, cut_dim)
    return charges


def _forecast_table(settings: ActiveSettings, charges: dict[NoiseKind, Charge]) -> Table:
    epochs, configured = settings.contract.epochs, _configured_noise(settings.defense)
    table = Table(
        title=f"defense {settings.defense.name}: what the peer may learn of one example",
        title_justify="left",
    )
    for heading in ("noise", "answers", "sum_kl", "leak AUC, estimated", "leak AUC, guaranteed"):
        table.add_column(heading, justify="right" if heading != "noise" else "left")
    for noise, charge in charges.items():
        name = f"{noise} (configured)" if noise == configured else noise
        whole_run = charge.times(epochs) if noise == "fresh" else charge
        for answers, of_all in ((1, charge), (epochs, whole_run)):
            table.add_row(name, str(answers), *_in_words(of_all))
            name = ""
    return table


def _remarks(
    settings: ActiveSettings, charges: dict[NoiseKind, Charge], num_classes: int
) -> list[str]:
    remarks = [_honesty(settings.defense, settings.contract.aggregate_dim)]
    if num_classes > 2:
        remarks = [
            _honesty_of_several(settings.defense, settings.contract.aggregate_dim),
            "All figures are of the pair of classes left furthest apart.",
        ]
    if settings.earlier_ledgers:
        remarks.append(
            f"What earlier_ledgers have told comes on top, sum_kl "
            f"{at_most(settings.earlier_answers().most())} at most."
        )
    if settings.run_budget is None:
        return [*remarks, "run_budget: none is set"]
    budget, epochs = settings.run_budget.max_sum_kl, settings.contract.epochs
    noise = _configured_noise(settings.defense)
    # Repeated noise either passes the budget with its first answer or never.
    epochs_charged = epochs if noise == "fresh" else 1
    last, first = (stop_epoch(charge, epochs_charged, budget) for charge in charges[noise])
    known = charges[noise].low > 0
    return [
        *remarks,
        f"run_budget: sum_kl {budget:.4g}, guaranteed leak AUC {leak_auc_bound(budget):.4f}: "
        + _end_in_words(first, last, epochs, known=known),
    ]


def at_most(bound: float) -> str:
    """Return an upper bound in four digits, rounded up: it is one in print, too."""
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(bound)):.4g}"


def _honesty(defense: DefenseSettings, cut_dim: int) -> str:
    """Say how far the forecast can be relied on."""
    match defense:
        case NoDefense():
            said = "Raw gradients tell the label outright."
        case NoisyLabelDefense(top_labels="noisy"):
            said = "Exact, whatever the gradients."
        case NoisyLabelDefense():
            said = "Of the noisy labels alone: with top_labels true there is no proof."
        case GafmDefense():
            said = _honesty_of_gafm(defense, cut_dim)
        case MarvellDefense(noise="persistent") | IsoDefense(noise="persistent"):
            said = "Charges of persistent noise depend on the strength alone."
        case MarvellDefense():
            said = (
                "The lower figure is that of classes without any spread, the least there can be. "
                "Where their spreads differ the charges are higher, most of all late in training; "
                "the upper figure allows for spreads about as large as the squared gap. At power "
                "ratios near 1 a batch that the model fits well may even be charged without bound."
            )
        case IsoDefense():
            said = (
                "The charge of fresh noise depends on the gradients. The figure holds for every "
                "batch of both classes, and is far too high for most."
            )
        case _ if defense.noise == "persistent":
            said = f"The ledger gives persistent {defense.name} no credit."
        case _:
            said = (
                f"The charge of {defense.name} depends on the gradients alone: nothing can be said "
                "before the run. Its ledger tells after each epoch."
            )
    return said


def _honesty_of_several(defense: DefenseSettings, cut_dim: int) -> str:
    match defense:
        case MarvellDefense(strength=PowerRatio()):
            return (
                "Every batch is charged between the two, by how its class means lie: the lower "
                "figure is that of one long gap, (classes - 1)/ratio that of classes all equally "
                "far apart. Batches before every class was seen are charged nothing."
            )
        case MarvellDefense():
            return "Met by every batch, whatever its class means."
        case _:
            return _honesty(defense, cut_dim)


def _honesty_of_gafm(defense: GafmDefense, cut_dim: int) -> str:
    behind = defense.composed_with
    if isinstance(behind, NoisyLabelDefense):
        return _honesty(behind, cut_dim)
    if not is_credited(defense, cut_dim):
        return (
            "gafm hides labels from norms and class means. A peer that knows its own activations "
            "can read them: the ledger gives no credit."
        )
    return (
        f"The charge of gafm with {behind.name} depends on the gradients alone: nothing can be "
        "said before the run. Its ledger tells after each epoch."
    )


def _end_in_words(first: int | None, last: int | None, epochs: int, *, known: bool) -> str:
    if first is None:
        return f"all {epochs} epochs fit"
    if not known:
        return f"it may end the run in any epoch from {first + 1} on"
    expected = (
        f"all {epochs} epochs fit"
        if last is None
        else f"the run ends in epoch {last + 1} of {epochs}"
    )
    sooner = "" if first == last else f"; at the highest charges it ends in epoch {first + 1}"
    return f"{expected}{sooner}"


def _target_table(target: float, epochs: int, cut_dim: int, pos_fraction: float) -> Table:
    table = Table(
        title=f"marvell's power ratio for a leak AUC of {target:g} over the whole run",
        title_justify="left",
    )
    for heading in ("noise", "answers", "by the estimate", "by the guarantee"):
        table.add_column(heading, justify="right" if heading != "noise" else "left")
    allowed = (2 * NormalDist().inv_cdf(target) ** 2, sum_kl_for_leak_auc(target))
    fresh = (power_ratio_for(sum_kl, epochs, cut_dim, pos_fraction) for sum_kl in allowed)
    table.add_row("fresh", str(epochs), *(f"{ratio:.4g}" for ratio in fresh))
    table.add_row("persistent", str(epochs), *(f"{1 / sum_kl:.4g}" for sum_kl in allowed))
    return table


def _target_of_several(target: float, epochs: int, num_classes: int) -> Table:
    table = Table(
        title=f"marvell's power ratio for a leak AUC of {target:g} over the whole run, whatever "
        "the class means",
        title_justify="left",
    )
    for heading in ("noise", "answers", "by the estimate", "by the guarantee"):
        table.add_column(heading, justify="right" if heading != "noise" else "left")
    allowed = (2 * NormalDist().inv_cdf(target) ** 2, sum_kl_for_leak_auc(target))
    ratios = (worst_pair_factor(num_classes) * epochs / sum_kl for sum_kl in allowed)
    table.add_row("fresh", str(epochs), *(f"{ratio:.4g}" for ratio in ratios))
    return table


def _configured_noise(defense: DefenseSettings) -> NoiseKind:
    match defense:
        case NoDefense():
            return "fresh"
        case NoisyLabelDefense() | GafmDefense(composed_with=NoisyLabelDefense()):
            return "persistent"
        case GafmDefense():
            return "fresh"
        case _:
            return defense.noise


def _in_words(charge: Charge) -> list[str]:
    if charge.low == 0:
        unknown = "not known before"
        if math.isinf(charge.high):
            return [unknown] * 3
        return [f"at most {value}" for value in _in_words(Charge(charge.high, charge.high))]
    return [
        low if low == high else f"{low} .. {high}"
        for low, high in (
            (f"{charge.low:.4g}", f"{charge.high:.4g}"),
            (f"{estimated_auc(charge.low):.3f}", f"{estimated_auc(charge.high):.3f}"),
            (f"{leak_auc_bound(charge.low):.3f}", f"{leak_auc_bound(charge.high):.3f}"),
        )
    ]
