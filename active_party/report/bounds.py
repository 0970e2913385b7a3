"""The bounds of a run's ledger, their peers, and what attacks reach beyond features.

Figures beyond features are of the cut layer.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.noisy_sums import COMPUTATIONAL
from splitveil.active_party.defenses.section import Traits
from splitveil.active_party.report.figures import ABSENT, TableRow, figure
from splitveil.active_party.report.run_files import RunFiles, is_one_shot
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import CUT, needs_of
from splitveil.common.privacy.figures import BeyondFigures, LeakBounds
from splitveil.common.record.assessment import (
    Finding,
    LeakAssessment,
    assess_figures,
    bounds_by_peers,
)
from splitveil.common.record.run_record import LedgerLine

_SETTINGS: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)


def guarantee_of(run: RunFiles) -> float:
    """Return the bound for anybody on the leak AUC of the most exposed example; NaN without one."""
    return bounds_of(run).get(Adversary.ANYBODY, math.nan)


def assessment_of(run: RunFiles) -> LeakAssessment:
    """Judge a run's leak, by the ledger's last entry if the run has no summary."""
    defense = run.active.setting("defense") or {}
    found = assess_figures(run.active.summary.of_leak.beyond, ledger_of(run), defense)
    return replace(
        found,
        has_gradients=not is_one_shot(run),
        is_computational=_releases_sums(run),
        explained=run.active.summary.of_leak.strongest_of_numbers,
    )


def _releases_sums(run: RunFiles) -> bool:
    return bool(run.active.setting("contract", "release") == "noisy_sums")


def bounds_of(run: RunFiles) -> dict[Adversary, float]:
    """Return the bound for each adversary class, of the most exposed example; empty without any."""
    return bounds_by_peers(ledger_of(run))


def ledger_of(run: RunFiles) -> LeakBounds | None:
    """Return the ledger's last entry, or the bounds of a run abandoned after it went back."""
    if run.active.summary.of_active.ledger is not None:
        return run.active.summary.of_active.ledger
    entries = [line.bounds for line in run.active.metrics.of(LedgerLine)[-1:]]
    if run.active.ledger_ahead is not None:
        entries.append(run.active.ledger_ahead)
    return max(entries, key=lambda bounds: bounds.sum_kl.max, default=None)


def defense_of(settings: Mapping[str, Any]) -> DefenseSettings | None:
    """Return a defense from its settings as plain values; None for those of another version."""
    try:
        return _SETTINGS.validate_python(settings)
    except ValidationError:
        return None


def coverage_of(defense: Mapping[str, Any]) -> Traits:
    """Return the peers whom the charges of a defense describe, by its settings as plain values."""
    found = defense_of(defense)
    return Traits() if found is None else found.traits


def why_not_anybody(run: RunFiles, peers: Adversary) -> str:
    """Return in words why the ledger's bound holds for some peers only."""
    if is_one_shot(run) and not run.active.setting("contract", "release"):
        return ""
    adversary, why, *_ = coverage_of(run.active.settings.get("defense", {}))
    if adversary is peers or not adversary.includes(peers):
        return COMPUTATIONAL if _releases_sums(run) else why
    return (
        f"The charges of the defense describe {adversary.in_words}. What earlier runs revealed of "
        "these rows does not, or something besides the answers depends on labels, such as "
        "early stopping or initial weights."
    )


def raw_figures(run: RunFiles) -> dict[str, float]:
    """Return attack -> its leak AUC of all examples at the cut layer; of the run, or of batches."""
    leak = run.active.summary.of_leak
    batches = leak.batches.get(CUT, {})
    raw = {name: one.mean for name, one in batches.items()}
    return raw | {name: one.auc for name, one in leak.run_level.get(CUT, {}).items()}


def beyond_rows(run: RunFiles, assessment: LeakAssessment) -> Iterator[TableRow]:
    """Yield the table of attacks beyond features, the strongest first."""
    raw = raw_figures(run)
    advantage = (run.active.summary.of_leak.beyond or BeyondFigures()).advantage
    for one in assessment.attacks:
        attack, finding = one.attack, one.finding
        is_measured = finding is not Finding.TOO_FEW_ROWS
        gained = ABSENT
        if (gain := advantage.get(attack)) is not None:
            gained = gain.in_words
        cells = (
            attack,
            needs_of(attack),
            one.figures if is_measured else ABSENT,
            one.why or (finding.value if is_measured else assessment.not_measured),
            figure(raw.get(attack)),
            gained,
        )
        yield TableRow(cells, finding in {Finding.ABOVE_BOUND, Finding.LEAKS})
