"""Says which setting to change where a run misses its target, and the price of the change."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from splitveil.active_party.defenses import DefenseContext, DefenseSettings
from splitveil.active_party.ledger.budget import LEARNED_FROM_LABELS
from splitveil.active_party.report.bounds import defense_of
from splitveil.active_party.report.run_files import RunFiles, is_one_shot, num_classes
from splitveil.common.privacy.adversary import Adversary


class Change(NamedTuple):
    """A setting to change, in the form of the settings file."""

    setting: str
    why: str
    price: str


BETTER_MODEL = Change(
    "(more aligned rows, more columns, or more epochs)",
    "teach the model more; where the contract leaves rows out of training, give it those",
    "More answers about the same labels, where there are more epochs: see the details.",
)
"""The step from a test AUC that is too low; more test rows would only measure it."""


def steps_to_a_bound(run: RunFiles, target: float) -> Iterator[Change]:
    """Yield the settings that would bound the leak for anybody at the target."""
    if run.active.setting("initial_weights") and not is_one_shot(run):
        yield Change(*_without(*LEARNED_FROM_LABELS))
    defense = defense_at(run, target)
    if defense is None:
        return
    whole = defense.model_dump(mode="json", exclude_none=True)
    changed = defense.model_dump(mode="json", exclude_defaults=True) | {"name": defense.title}
    # Rounded up, more noise: the bound stays within the target.
    if "noise_ratio" in (mechanism := whole.get("mechanism", {})):
        mechanism["noise_ratio"] = math.ceil(1000 * mechanism["noise_ratio"]) / 1000
    if whole.get("mechanism", {}).get("posterior") == "none":  # the default
        del whole["mechanism"]["posterior"]
    # The advice changes the strength: it is written even where it is the default.
    changed |= {name: whole[name] for name in ("strength", "mechanism") if name in whole}
    why = f"bounds the leak AUC of the whole run at {target:g} for anybody"
    price = f"The price is not known before a run.{_beside(run)}"
    yield Change(_as_yaml({"defense": _named_first(changed)}), why, price)


def defense_at(run: RunFiles, target: float) -> DefenseSettings | None:
    """Return a defense with that bound: the run's own, if one of its strengths has it."""
    context = _context(run)
    own = defense_of(run.active.setting("defense") or {})
    found = None if own is None else own.at_leak_auc(target, context)
    if found is not None and found.traits.adversary.includes(Adversary.ANYBODY):
        return found
    several = {"posterior": "model"} if context.num_classes > 2 else {}
    other = defense_of({"name": "noisy_label", "mechanism": {"kind": "gaussian"} | several})
    if other is None or other.objection(context) is not None:
        return None
    return other.at_leak_auc(target, context)


def _context(run: RunFiles) -> DefenseContext:
    shape = tuple(run.active.setting("contract", "cut_shape") or (1,))
    epochs = run.active.setting("contract", "epochs")
    return DefenseContext(
        shape,
        num_classes(run),
        0.5,
        epochs if isinstance(epochs, int) and epochs > 0 else 1,
    )


def _without(setting: str, why: str) -> tuple[str, str, str]:
    price = "The run starts from fresh weights, and learns again what the earlier one knew."
    return f"{setting}: null", why, price


def _beside(run: RunFiles) -> str:
    auc = run.active.summary.of_active.model.test.auc
    return "" if auc is None else f" This run, with its own settings, has a test AUC of {auc:.4f}."


def _named_first(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": values["name"]} | {n: value for n, value in values.items() if n != "name"}


def _as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False).strip()
