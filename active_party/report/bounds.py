"""What a run's ledger bounds, in words: for whom, and for whom not."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.section import AGAINST_CLASS_MEANS, Coverage
from splitveil.active_party.report.run_files import RunFiles
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.figures import LedgerFigures
from splitveil.common.record.lines import LedgerLine
from splitveil.common.text.upper_bounds import auc_at_most

NO_BOUND = 0.999
"""Bound at and above which a ledger excludes nothing."""
_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)


def guarantee_of(run: RunFiles) -> float:
    """Return the bound for anybody on the leak AUC of the most exposed example; NaN without one."""
    return bounds_of(run).get(Adversary.ANYBODY, math.nan)


def bounds_of(run: RunFiles) -> dict[Adversary, float]:
    """Return the bound for each adversary class, of the most exposed example; empty without any."""
    ledger = ledger_of(run)
    found = {} if ledger is None else {peers: ledger.against(peers).max for peers in Adversary}
    return {peers: bound for peers, bound in found.items() if bound is not None}


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


def coverage_of(defense: Mapping[str, Any]) -> Coverage:
    """Return the peers whom the charges of a defense describe.

    Args:
        defense: the settings of the defense as plain values, as a run's summary has them.
    """
    try:
        return _SETTINGS.validate_python(defense).traits.coverage
    except ValidationError:
        return AGAINST_CLASS_MEANS


def _why(run: RunFiles, peers: Adversary) -> str:
    adversary, why = coverage_of(run.active.settings.get("defense", {}))
    if adversary is peers or not adversary.includes(peers):
        return why
    return (
        f"The charges of the defense describe {adversary.in_words}. What earlier runs told of "
        "these rows does not, or something besides the answers tells of labels, such as "
        "allow_audits, a leak gate that stops the run, or initial weights."
    )


def in_full(run: RunFiles, bounds: Mapping[Adversary, float]) -> Iterator[str]:
    """Yield sentences about the bounds of a run, and about the peers for whom there is none."""
    if not bounds:
        yield "The run has no ledger entry, so nothing bounds what its answers revealed."
        return
    peers = widest_bounded(bounds)
    if peers is None:
        yield "The ledger excludes nothing: over the whole run it has no bound for any peer."
        return
    ledger = ledger_of(run)
    estimate = None if ledger is None else ledger.estimate.max
    verb = "guarantees" if peers is Adversary.ANYBODY else "states"
    yield (
        f"Over the whole run the ledger {verb} at most AUC {auc_at_most(bounds[peers])} for any "
        f"score of {peers.in_words} on all answers together, for the most exposed example"
        + ("." if estimate is None else f", and estimates {estimate:.3f}.")
    )
    if peers is not Adversary.ANYBODY:
        yield f"That is a bound for {peers.in_words} alone, and no guarantee. {_why(run, peers)}"
    earlier = run.active.summary.of_active.earlier_answers
    if earlier is not None:
        most = earlier.bounds.against(peers).max
        yield (
            f"Earlier runs are included: they answered about {earlier.examples or 0:,} of the "
            f"training rows, at most AUC {auc_at_most(math.nan if most is None else most)} for "
            f"{peers.in_words}."
        )
