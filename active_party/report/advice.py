"""Says which setting to change where a run misses its target, and the price of the change.

Prices are what is known without another run: the number of rows with unprotected labels that a
table is worth at a bound (``defenses.projected.label_utility``), beside the test AUC that this run
measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from splitveil.active_party.defenses import DefenseContext, DefenseSettings
from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.active_party.defenses.projected.label_utility import label_utility
from splitveil.active_party.ledger.label_signals import LabelUses, label_signals
from splitveil.active_party.report.bounds import defense_of
from splitveil.active_party.report.run_files import RunFiles, num_classes
from splitveil.common.privacy.adversary import Adversary

TYPICAL_BOUNDS = (0.55, 0.6, 0.65, 0.7, 0.8)

_RANK = 96  # default number of sums of ``projected_labels``


class Step(NamedTuple):
    """A setting to change, in the form of the settings file."""

    setting: str
    why: str
    price: str


class Price(NamedTuple):
    """The worth of the run's table at a bound for anybody."""

    leak_auc: float
    rows: float  # rows with unprotected labels that would teach as much, at most
    share: float
    is_target: bool


class TableSize(NamedTuple):
    training_rows: int
    pos_fraction: float  # with several classes, that of a class of average size


def steps_to_a_bound(run: RunFiles, target: float, size: TableSize | None) -> Iterator[Step]:
    """Yield the settings that would bound the leak for anybody at the target."""
    uses = LabelUses(
        begins_with_labels=bool(run.active.setting("initial_weights")),
    )
    for signal in label_signals(uses):
        yield Step(*_without(signal.setting, signal.why))
    defense = defense_at(run, target)
    if defense is None:
        return
    whole = defense.model_dump(mode="json", exclude_none=True)
    changed = defense.model_dump(mode="json", exclude_defaults=True) | {"name": defense.title}
    # The strength is what is changed: it is written even where it is the default.
    changed |= {name: whole[name] for name in ("strength",) if name in whole}
    why = f"bounds the leak AUC of the whole run at {target:g} for anybody"
    teaches = (
        "" if size is None else defense.utility_in_words(_context(run, size), size.training_rows)
    )
    price = teaches or "The price is not known before a run."
    yield Step(_as_yaml({"defense": _named_first(changed)}), why, f"{price}{_beside(run)}")


def better_model(run: RunFiles, prices: Sequence[Price]) -> Step:
    """Return the step from a test AUC that is too low; more test rows would only measure it."""
    now = next((one for one in prices if one.is_target), None)
    weaker = next((one for one in prices if now and one.leak_auc > now.leak_auc), None)
    if now is None or weaker is None or run.active.setting("defense", "name") == "none":
        return Step(
            "(more aligned rows, more columns, or more epochs)",
            "teach the model more; where the contract leaves rows out of training, give it those",
            "More answers about the same labels, where there are more epochs: see the ledger.",
        )
    return Step(
        f"report:\n  target_leak_auc: {weaker.leak_auc:g}",
        f"accepts a weaker bound, at which the training rows are worth {weaker.rows:,.0f} rows "
        f"with unprotected labels instead of {now.rows:,.0f}; the defense's strength has to follow",
        f"The other company may distinguish {weaker.leak_auc * 100:g} of 100 pairs instead of "
        f"{now.leak_auc * 100:g}. More aligned rows help without that price.",
    )


def defense_at(run: RunFiles, target: float) -> DefenseSettings | None:
    """Return a defense with that bound: the run's own, if one of its strengths has it."""
    context = _context(run, None)
    own = defense_of(run.active.setting("defense") or {})
    found = None if own is None else own.at_leak_auc(target, context)
    if found is not None and found.traits.coverage.adversary.includes(Adversary.ANYBODY):
        return found
    other = defense_of({"name": "projected_labels", "strength": {"leak_auc": target}})
    return None if other is None or other.objection(context) is not None else other


def price_list(run: RunFiles, target: float | None, size: TableSize | None) -> list[Price]:
    """Return what the run's table is worth under ``projected_labels`` at several bounds."""
    if size is None or size.training_rows < 1 or not 0 < size.pos_fraction < 1:
        return []
    rank = run.active.setting("defense", "rank")
    rank = rank if isinstance(rank, int) and rank > 0 else _RANK
    classes = num_classes(run)
    bounds = sorted({*TYPICAL_BOUNDS, *([] if target is None else [target])})
    found = []
    for bound in bounds:
        mu = mu_of_leak_auc(bound)
        worth = label_utility(size.training_rows, size.pos_fraction, mu, rank, classes)
        found.append(Price(bound, worth.rows, worth.share, bound == target))
    return found


def _context(run: RunFiles, size: TableSize | None) -> DefenseContext:
    shape = tuple(run.active.setting("contract", "cut_shape") or (1,))
    epochs = run.active.setting("contract", "epochs")
    return DefenseContext(
        shape,
        num_classes(run),
        0.5 if size is None else size.pos_fraction,
        epochs if isinstance(epochs, int) and epochs > 0 else 1,
    )


def _without(setting: str, why: str) -> tuple[str, str, str]:
    price = "The run starts from fresh weights, and learns again what the earlier one knew."
    return f"{setting}: null", why, price


def _beside(run: RunFiles) -> str:
    auc = run.active.summary.of_active.model.test_auc
    return "" if auc is None else f" This run, with its own settings, has a test AUC of {auc:.4f}."


def _named_first(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": values["name"]} | {n: value for n, value in values.items() if n != "name"}


def _as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False).strip()
