"""What attacks tell beyond what features tell, in words and as a table.

These figures lead the verdict wherever a run has them: a leak AUC of all examples together contains
what features tell, which no defense of gradients can hide. All of them are of the cut layer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from splitveil.active_party.report.bounds import guarantee_of
from splitveil.active_party.report.figures import ABSENT, Row, figure
from splitveil.active_party.report.run_files import RunFiles
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import CUT
from splitveil.common.record.figures import (
    AdjustedFigures,
    BeyondFigures,
    EpsilonFigures,
    is_clearly_above,
    passed_bounds,
    set_aside,
)
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most

_KNOWS_NOTHING = 1e-3
"""Leak AUC over one half that rounding may leave of a prior without any label."""


def measured_of(run: RunFiles) -> BeyondFigures:
    """Return all figures of a run's attacks beyond features; empty ones if it was not measured."""
    return run.active.summary.of_leak.beyond or BeyondFigures()


def beyond_of(run: RunFiles) -> BeyondFigures:
    """Return what a run's attacks tell beyond features; empty figures if it was not measured.

    Figures that say nothing of gradients are left out; ``in_words`` names them.
    """
    found = measured_of(run)
    aside = set_aside(found, guarantee_of(run))
    kept = {name: one for name, one in found.adjusted.items() if name not in aside}
    return replace(found, adjusted=kept)


def tells_something(beyond: BeyondFigures) -> bool:
    """Return whether an attack tells labels beyond features, by more than chance explains."""
    return any(is_clearly_above(found, 0.5) for found in beyond.adjusted.values())


def raw_figures(run: RunFiles) -> dict[str, float]:
    """Return attack -> its leak AUC of all examples at the cut layer; of the run, or of batches."""
    leak = run.active.summary.of_leak
    batches = leak.batches.get(CUT, {})
    raw = {name: one.mean for name, one in batches.items() if one.mean is not None}
    return raw | {name: one.auc for name, one in leak.run_level.get(CUT, {}).items()}


class Prior(NamedTuple):
    """What the attacker's own features tell of the labels, without any gradient."""

    leak_auc: float
    attack: str
    """The attack that knows as many labels as this prior was fitted to."""


def prior_of(run: RunFiles) -> Prior | None:
    """Return the strongest of the attacker's own models; None if none knows anything.

    Each is a model of the passive party's activations, fitted to as many labels as an attack is
    told: the joint model's AUC would say what both parties' features tell together, which no
    attacker has.
    """
    advantage = beyond_of(run).advantage
    found = [Prior(one.prior, attack) for attack, one in advantage.items()]
    best = max(found, key=lambda one: one.leak_auc, default=None)
    return best if best is not None and best.leak_auc > 0.5 + _KNOWS_NOTHING else None


def headline(found: AdjustedFigures, attack: str, *, knows: str, recovers: bool) -> str:
    """Return the strongest attack's success as the beginning of a sentence."""
    if recovers:
        return (
            f"Anyone who keeps the gradients of this run{knows} recovers the labels: AUC "
            f"{found.value:.3f} among examples of which features tell the same"
        )
    if is_clearly_above(found, 0.5):
        return (
            f"Beyond what features tell, gradients reveal something about the labels: {attack} "
            f"reaches AUC {found.value:.3f} among examples of which features tell the same"
        )
    return (
        "No attack that was run tells more of the labels than features do: the strongest reaches "
        f"AUC {found.value:.3f} among examples of which features tell the same, where chance gives "
        "about 0.5"
    )


def in_words(run: RunFiles) -> Iterator[str]:
    """Yield sentences about the strongest attack, its raw figure, its advantage and epsilon."""
    beyond = beyond_of(run)
    strongest = beyond.strongest()
    if strongest is not None:
        attack, found = strongest
        raw = raw_figures(run).get(attack)
        beside = "" if raw is None else f" Among all examples it reaches {raw:.3f}."
        yield (
            f"Strongest beyond features: {attack}, with an adjusted leak AUC of {found.value:.3f} "
            f"(95 % interval {found.low:.3f} to {found.high:.3f}).{beside}"
        )
    if beyond.advantage:
        attack, gain = max(beyond.advantage.items(), key=lambda item: item[1].value)
        yield (
            f"Largest advantage over the attacker's own features: {attack} gains {gain.value:.3f} "
            f"of AUC ({gain.low:.3f} to {gain.high:.3f}) over the {gain.prior:.3f} that a model of "
            "the activations reaches with as many labels."
        )
    if beyond.epsilon is not None:
        yield _epsilon_in_words(beyond.epsilon)
    measured = measured_of(run)
    aside = set_aside(measured, guarantee_of(run))
    if aside:
        yield (
            f"Adjusted figures of {', '.join(aside)} lie above the proved bound, while guesses are "
            "no better than chance: features all but tell these labels, or the rows are too few, "
            "and the figures are left out."
        )


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
            f"{attack} measured {found.value:.3f} beyond what features tell, more than the "
            f"{auc_at_most(bounds[peers])} that the ledger states for {peers.in_words}: that bound "
            "does not describe this attack on these gradients."
        )


def beyond_rows(run: RunFiles, needs: Callable[[str], str]) -> Iterator[Row]:
    """Yield the table of attacks beyond features; ``needs`` says what an attack has to know."""
    beyond, raw = beyond_of(run), raw_figures(run)
    for attack, found in beyond.adjusted.items():
        adjusted = (f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}")
        gained = (ABSENT,) * 3
        if (gain := beyond.advantage.get(attack)) is not None:
            interval = f"{gain.low:+.3f} to {gain.high:+.3f}"
            gained = (f"{gain.value:+.3f}", interval, f"{gain.prior:.3f}")
        cells = (attack, needs(attack), *adjusted, figure(raw.get(attack)), *gained)
        yield Row(cells, is_clearly_above(found, 0.5))


def _epsilon_in_words(found: EpsilonFigures) -> str:
    guessed = f"{found.attack} guesses {found.correct:,} of {found.guesses:,} labels right"
    stated = (
        "The ledger states no epsilon."
        if found.stated is None
        else f"The ledger states {at_most(found.stated)} for {found.stated_for}."
    )
    if not found.epsilon:
        return f"No epsilon of label differential privacy is excluded: {guessed}. {stated}"
    return (
        f"Label differential privacy with an epsilon below {at_least(found.epsilon)} is excluded "
        f"(delta {found.delta:g}, {found.confidence:.0%} confidence): {guessed}, where features "
        f"alone give even odds. {stated}"
    )
