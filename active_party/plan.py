"""The plan of a run: what it would tell of the labels, before any training.

It knows the defense, the epochs and the labels, and not yet the gradients. So a charge is foretold
in one of four ways:

    exact       the strength alone decides: persistent noise, noisy labels, no credit at all
    bound       no gradient is charged more; proved where it is computed
    estimate    what batches are charged that are as the estimate assumes. Others are charged more,
                up to infinity, and so may the run be
    unknown     the gradients alone decide

Fresh ``marvell`` for two classes is an estimate: the ledger gives spread no credit, and an answer
to classes without any (u = v = 0) is charged the K of that solution at the labels' share of
positives. The solver plans for the spreads that are there and may move noise away from the gap,
shift it from one class to the other, or count on the spread instead of it, and leave a class bare.
What that adds to K is of the order of K^2 as long as the spreads are not larger than the squared
gap; the plan shows K to K (1 + K). Late in training the spreads are larger, or one of them is: then
nothing bounds the charge. A batch with fewer positives than their share may be charged less.

Fresh ``iso`` is an estimate, too: 4 d/t bounds the charge of a batch that holds all classes. The
last rows of an epoch, small batches and rare classes make batches that do not; there a mean of
earlier batches stands in, which may lie anywhere, or there is none, and the charge is infinite.

With several classes the charge is that of the pair left furthest apart. ``marvell`` then gives
spread no credit when it places its noise, so that its charges are bounded as long as the noise is
fitted to the batch itself (``statistics: batch``): the strengths other than a power ratio s are met
by every batch, and a ratio leaves a pair (K - 1)(1 + sqrt(K - 1))/(2 s) at most, whatever the means
of the K classes. Fitted to earlier batches, it may meet a gap that was not there before.
"""

import math
import sys
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.label_noise import label_leak
from splitveil.active_party.defenses.persistent import repeated_sum_kl
from splitveil.active_party.defenses.settings import (
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
from splitveil.active_party.defenses.strength import allowed_sum_kl
from splitveil.active_party.defenses.sum_kl import (
    leak_auc_bound,
    power_for_sum_kl,
    solve_noise,
    sum_kl_for_leak_auc,
)
from splitveil.active_party.ledger.budget import num_answers_within
from splitveil.active_party.ledger.ledger import estimated_auc
from splitveil.active_party.ledger.limits_of_guarantees import limit_of_guarantee
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.text.upper_bounds import at_most, auc_at_most

NoiseKind = Literal["fresh", "persistent"]


Certainty = Literal["exact", "bound", "estimate", "unknown"]


class Charge(NamedTuple):
    """What is known of a divergence before the run."""

    low: float
    high: float
    certainty: Certainty
    """Whether it is ``high`` (then ``low`` is, too), at most ``high``, likely between the two, or
    anything at all."""

    def times(self, answers: int) -> "Charge":
        """Return what some answers with noise of their own add up to."""
        return self._replace(low=self.low * answers, high=self.high * answers)

    @classmethod
    def exactly(cls, sum_kl: float) -> "Charge":
        """Return a charge that the settings decide."""
        return cls(sum_kl, sum_kl, "exact")

    @property
    def is_promise(self) -> bool:
        """Whether no run is charged more than ``high``."""
        return self.certainty in ("exact", "bound")


UNKNOWN = Charge(0.0, math.inf, "unknown")


def fresh_charge_of_several(defense: DefenseSettings, cut_dim: int, num_classes: int) -> Charge:
    """Foretell the charge of one answer with noise of its own, for three classes or more.

    For ``marvell`` with ``statistics: batch`` it is a bound: the ledger charges the largest entry
    of ``pair_divergences`` at a spread of 0. For a power ratio s, ``worst_pair_factor`` proves that
    no entry is above factor/s. The other strengths choose the power P as that of a trial solution
    times its largest entry over what they allow, and without spread every entry falls as 1/P. An
    answer without signal is charged 0.

    Args:
        defense: which one, and how strong.
        cut_dim: width of the cut layer.
        num_classes: how many classes there are.
    """
    match defense:
        case MarvellDefense(strength=PowerRatio() as strength):
            low = 1 / strength.power_ratio
            high = worst_pair_factor(num_classes) / strength.power_ratio
        case MarvellDefense(strength=(SumKl() | DetectionError() | LeakAuc()) as strength):
            low = high = allowed_sum_kl(strength)
        case _:
            return fresh_charge(defense, cut_dim, 1 / num_classes)
    return Charge(low, high, "bound" if defense.statistics == "batch" else "estimate")


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
    """Foretell the charge of one answer with noise of its own: never a bound, see the module.

    Args:
        defense: which one, and how strong.
        cut_dim: width of the cut layer.
        pos_fraction: share of positives among the training rows, above 0 and below 1.
    """
    match defense:
        case NoDefense():
            return Charge.exactly(math.inf)
        case MarvellDefense(strength=PowerRatio() as strength):
            ratio = strength.power_ratio
            charge = solve_noise(0.0, 0.0, 1.0, cut_dim, pos_fraction, ratio).sum_kl
        case MarvellDefense(strength=(SumKl() | DetectionError() | LeakAuc()) as strength):
            charge = allowed_sum_kl(strength)
        case IsoDefense():
            # A batch's own class means are at most twice its largest norm apart:
            # c/(t/d max|g|^2) <= 4 d/t.
            ratio = defense.amplitude**2
            if not ratio:
                return Charge.exactly(math.inf)
            return Charge(0.0, 4 * cut_dim / ratio, "estimate")
        case GafmDefense() if not is_credited(defense, cut_dim):
            return Charge.exactly(math.inf)
        case _:
            return UNKNOWN
    return Charge(charge, charge * (1 + charge), "estimate")


def repeated_charge(defense: DefenseSettings, cut_dim: int, num_classes: int = 2) -> Charge:
    """Foretell the charge of noise that is drawn once per example, and of all its repeats.

    Exact: the charge is a constant of the defense, and of one noise identity the largest counts.
    """
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
    return Charge.exactly(charge)


def power_ratio_for(sum_kl: float, answers: int, cut_dim: int, pos_fraction: float) -> float:
    """Return marvell's power ratio at which some fresh answers together leave this divergence."""
    return power_for_sum_kl(0.0, 0.0, 1.0, cut_dim, pos_fraction, sum_kl / answers)


def stop_epoch(charge: float, epochs: int, max_sum_kl: float) -> int | None:
    """Return the epoch, from 0, in which a budget ends a run with fresh noise; None if it does not.

    Each epoch answers once about every training example. The first answer too many comes in the
    epoch after the last one that fits whole.
    """
    whole = num_answers_within(max_sum_kl, charge)
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
    if math.isfinite(charges[_configured_noise(settings.defense)].high):
        remarks += filter(None, [limit_of_guarantee(settings.defense.model_dump(mode="json"))])
    earlier = settings.earlier_answers().most() if settings.earlier_ledgers else 0.0
    if settings.earlier_ledgers:
        remarks.append(
            f"What earlier_ledgers have told comes on top, sum_kl {at_most(earlier)} at most."
        )
    if settings.run_budget is None:
        return [*remarks, "run_budget: none is set"]
    budget, epochs = settings.run_budget.max_sum_kl, settings.contract.epochs
    noise = _configured_noise(settings.defense)
    # Repeated noise either passes the budget with its first answer or never.
    epochs_charged = epochs if noise == "fresh" else 1
    charge = charges[noise]
    last = stop_epoch(charge.low, epochs_charged, budget)
    first = stop_epoch(charge.high, epochs_charged, budget - earlier)
    bound = auc_at_most(leak_auc_bound(budget))
    return [
        *remarks,
        f"run_budget: sum_kl {at_most(budget)}, guaranteed leak AUC {bound}: "
        + _end_in_words(first, last, epochs, charge),
    ]


def _honesty(defense: DefenseSettings, cut_dim: int) -> str:
    """Say how far the forecast can be relied on."""
    match defense:
        case NoDefense():
            said = "Raw gradients tell the label outright."
        case NoisyLabelDefense(top_labels="noisy"):
            said = "Exact, whatever the gradients."
        case NoisyLabelDefense():
            said = "Charges of noisy labels depend on their mechanism alone."
        case GafmDefense():
            said = _honesty_of_gafm(defense, cut_dim)
        case MarvellDefense(noise="persistent") | IsoDefense(noise="persistent"):
            said = "Charges of persistent noise depend on the strength alone."
        case MarvellDefense():
            said = (
                "An estimate, and no bound. The lower figure is that of classes without any "
                "spread. Where their spreads differ the charges are higher, most of all late in "
                "training; the upper figure allows for spreads about as large as the squared gap. "
                "A run may be charged more, up to infinity, where the model fits a batch well."
            )
        case IsoDefense():
            said = (
                "An estimate, and no bound. The charge of fresh noise depends on the gradients. "
                "The upper figure holds for every batch that holds all classes, and is far too "
                "high for most. A batch that lacks one is charged by earlier batches, and may be "
                "charged more, up to infinity."
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
                "Bounds for every batch, whatever its class means: 1/ratio is charged for one long "
                "gap, (classes - 1)/ratio for classes all equally far apart, and nothing before "
                "every class was seen." + _of_earlier_statistics(defense)
            )
        case MarvellDefense():
            return "Met by every batch, whatever its class means." + _of_earlier_statistics(defense)
        case _:
            return _honesty(defense, cut_dim)


def _of_earlier_statistics(defense: MarvellDefense) -> str:
    if defense.statistics == "batch":
        return ""
    return (
        " That is an estimate where statistics are of earlier batches: a gap that is longer than "
        "it was is charged more, and one that was not there without bound."
    )


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


def _end_in_words(first: int | None, last: int | None, epochs: int, charge: Charge) -> str:
    """Say when a budget ends the run.

    Args:
        first: the epoch in which it does at the highest charge; None if it does not.
        last: the same at the lowest charge.
        epochs: of the run.
        charge: of one answer.
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


def _target_table(target: float, epochs: int, cut_dim: int, pos_fraction: float) -> Table:
    table = Table(
        title=f"marvell's power ratio for a leak AUC of {target:g} over the whole run",
        caption="fresh: an estimate, for classes without any spread; others are charged more",
        caption_justify="left",
        title_justify="left",
    )
    for heading in ("noise", "answers", "by the estimate", "by the guarantee"):
        table.add_column(heading, justify="right" if heading != "noise" else "left")
    allowed = (2 * NormalDist().inv_cdf(target) ** 2, sum_kl_for_leak_auc(target))
    fresh = (power_ratio_for(sum_kl, epochs, cut_dim, pos_fraction) for sum_kl in allowed)
    table.add_row("fresh", str(epochs), *(at_most(ratio) for ratio in fresh))
    table.add_row("persistent", str(epochs), *(at_most(1 / sum_kl) for sum_kl in allowed))
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
    table.add_row("fresh", str(epochs), *(at_most(ratio) for ratio in ratios))
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
    """Write sum_kl, estimated and guaranteed AUC of a charge, bounds rounded up."""
    lows, highs = (
        (at_most(kl), f"{estimated_auc(kl):.3f}", auc_at_most(leak_auc_bound(kl)))
        for kl in (charge.low, charge.high)
    )
    match charge.certainty:
        case "exact":
            return list(highs)
        case "bound":
            return [f"at most {high}" for high in highs]
        case "estimate":
            return [f"likely {low} .. {high}" for low, high in zip(lows, highs, strict=True)]
        case "unknown":
            return ["not known before"] * 3
