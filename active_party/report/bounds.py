"""What a run's ledger bounds and what attacks reach beyond features, in words.

Figures beyond features lead the verdict wherever a run has them: a leak AUC of all examples
together contains what features reveal, which no defense of gradients can hide. All of them are of
the cut layer.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.section import AGAINST_CLASS_MEANS, Coverage
from splitveil.active_party.report.figures import ABSENT, TableRow, figure
from splitveil.active_party.report.run_files import RunFiles
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import CUT
from splitveil.common.record.assessment import NO_BOUND, bounds_by_peers
from splitveil.common.record.figures import (
    BeyondFigures,
    LedgerFigures,
    is_clearly_above,
    passed_bounds,
    set_aside,
)
from splitveil.common.record.lines import LedgerLine
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most

_KNOWS_NOTHING = 1e-3
"""Leak AUC over one half that rounding may leave of a prior without any label."""
_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)


def guarantee_of(run: RunFiles) -> float:
    """Return the bound for anybody on the leak AUC of the most exposed example; NaN without one."""
    return bounds_of(run).get(Adversary.ANYBODY, math.nan)


def bounds_of(run: RunFiles) -> dict[Adversary, float]:
    """Return the bound for each adversary class, of the most exposed example; empty without any."""
    return bounds_by_peers(ledger_of(run))


def ledger_of(run: RunFiles) -> LedgerFigures | None:
    """Return the ledger's last entry, or the bounds of a run abandoned after it went back."""
    if run.active.summary.of_active.ledger is not None:
        return run.active.summary.of_active.ledger
    entries = [line.bounds for line in run.active.metrics.of(LedgerLine)[-1:]]
    if run.active.ledger_ahead is not None:
        entries.append(run.active.ledger_ahead)
    return max(entries, key=_most, default=None)


def _most(bounds: LedgerFigures) -> float:
    largest = bounds.sum_kl.max
    return math.inf if largest is None else largest  # infinite divergences are written as null


def in_short(bounds: Mapping[Adversary, float]) -> str:
    """Return the bound for the strongest adversary class that has one, as a part of a sentence."""
    peers = widest_bounded(bounds)
    if peers is None:
        return "nothing bounds the whole run"
    bound = auc_at_most(bounds[peers])
    if peers is Adversary.ANYBODY:
        return f"the ledger guarantees at most {bound} for the whole run"
    return (
        f"over the whole run the ledger has a bound of {bound} for {peers.in_words}, and none for "
        "others"
    )


def widest_bounded(bounds: Mapping[Adversary, float]) -> Adversary | None:
    """Return the strongest adversary class for whom a bound says anything, if any."""
    return next((p for p in Adversary if bounds.get(p, math.inf) < NO_BOUND), None)


def defense_of(settings: Mapping[str, Any]) -> DefenseSettings | None:
    """Return a defense from its settings as plain values; None for those of another version."""
    try:
        return _SETTINGS.validate_python(settings)
    except ValidationError:
        return None


def coverage_of(defense: Mapping[str, Any]) -> Coverage:
    """Return the peers whom the charges of a defense describe, by its settings as plain values."""
    found = defense_of(defense)
    return AGAINST_CLASS_MEANS if found is None else found.traits.coverage


def why_not_anybody(run: RunFiles, peers: Adversary) -> str:
    """Return in words why the ledger's bound holds for some peers only."""
    adversary, why = coverage_of(run.active.settings.get("defense", {}))
    if adversary is peers or not adversary.includes(peers):
        return why
    return (
        f"The charges of the defense describe {adversary.in_words}. What earlier runs revealed of "
        "these rows does not, or something besides the answers depends on labels, such as "
        "allow_audits, a leak gate that stops the run, or initial weights."
    )


def measured_of(run: RunFiles) -> BeyondFigures:
    """Return all figures of a run's attacks beyond features; empty ones if it was not measured."""
    return run.active.summary.of_leak.beyond or BeyondFigures()


def beyond_of(run: RunFiles) -> BeyondFigures:
    """Return what a run's attacks reveal beyond features; empty figures if it was not measured.

    Figures that say nothing of gradients are left out; ``in_words`` names them.
    """
    found = measured_of(run)
    aside = set_aside(found, guarantee_of(run))
    adjusted = {name: one for name, one in found.adjusted.items() if name not in aside}
    return replace(found, adjusted=adjusted)


def reveals_something(beyond: BeyondFigures) -> bool:
    """Return whether an attack reveals labels beyond features, by more than chance explains."""
    return any(is_clearly_above(found, 0.5) for found in beyond.adjusted.values())


def raw_figures(run: RunFiles) -> dict[str, float]:
    """Return attack -> its leak AUC of all examples at the cut layer; of the run, or of batches."""
    leak = run.active.summary.of_leak
    batches = leak.batches.get(CUT, {})
    raw = {name: one.mean for name, one in batches.items() if one.mean is not None}
    return raw | {name: one.auc for name, one in leak.run_level.get(CUT, {}).items()}


class Prior(NamedTuple):
    """What the attacker's own features reveal of the labels, without any gradient."""

    leak_auc: float
    attack: str
    """The attack that knows as many labels as this prior was fitted to."""


def prior_of(run: RunFiles) -> Prior | None:
    """Return the strongest of the attacker's own models; None if none knows anything.

    Each is a model of the passive party's activations, fitted to as many labels as an attack
    knows: the joint model's AUC would say what both parties' features reveal together, which no
    attacker has.
    """
    advantage = beyond_of(run).advantage
    found = [Prior(one.prior, attack) for attack, one in advantage.items()]
    best = max(found, key=lambda one: one.leak_auc, default=None)
    return best if best is not None and best.leak_auc > 0.5 + _KNOWS_NOTHING else None


def contradictions(run: RunFiles, bounds: Mapping[Adversary, float]) -> Iterator[str]:
    """Yield sentences about every statement of the ledger that attacks pass beyond features."""
    beyond = beyond_of(run)
    epsilon = beyond.epsilon
    if epsilon is not None and epsilon.stated is not None and epsilon.passes_stated:
        yield (
            f"{epsilon.attack} excludes every epsilon below {at_least(epsilon.epsilon)}, more than "
            f"the {at_most(epsilon.stated)} that the ledger states for {epsilon.stated_for}: its "
            "figures do not describe these gradients."
        )
    for attack, found, peers in passed_bounds(beyond, bounds):
        yield (
            f"{attack} measured {found.value:.3f} beyond the features, more than the "
            f"{auc_at_most(bounds[peers])} that the ledger states for {peers.in_words}: that bound "
            "does not describe this attack on these gradients."
        )


def beyond_rows(run: RunFiles, needs: Callable[[str], str]) -> Iterator[TableRow]:
    """Yield the table of attacks beyond features; ``needs`` says what an attack has to know."""
    beyond, raw = beyond_of(run), raw_figures(run)
    for attack, found in beyond.adjusted.items():
        adjusted = (f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}")
        gained = (ABSENT,) * 3
        if (gain := beyond.advantage.get(attack)) is not None:
            interval = f"{gain.low:+.3f} to {gain.high:+.3f}"
            gained = (f"{gain.value:+.3f}", interval, f"{gain.prior:.3f}")
        cells = (attack, needs(attack), *adjusted, figure(raw.get(attack)), *gained)
        yield TableRow(cells, is_clearly_above(found, 0.5))
