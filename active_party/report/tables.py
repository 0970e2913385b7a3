"""The figures and settings that a report shows as text: key figures, summary, settings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from splitveil.active_party.report.beyond import beyond_of
from splitveil.active_party.report.bounds import bounds_of, ledger_of
from splitveil.active_party.report.figures import Finding, strongest
from splitveil.active_party.report.run_files import RunFiles, test_lines
from splitveil.active_party.report.verdict import (
    RunLevel,
    needs_of,
)
from splitveil.common.privacy.covers import Covers
from splitveil.common.record.figures import AttackFigure
from splitveil.common.record.lines import AlarmLine, AuditLine, GateLine
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most
from splitveil.common.text.wording import setting_in_words

_SECRETS = ("insecure_nonce_seed", "insecure_noise_seed")
"""Settings from which a reader could derive the noise or the batches."""
_ABSENT = "–"


class Tile(NamedTuple):
    label: str
    value: str
    note: str


class LeakRow(NamedTuple):
    """One attack on single batches of one layer."""

    party: str
    layer: str
    attack: str
    needs: str
    beats_chance: bool
    figures: tuple[str, ...]
    """Mean, 95 % of batches, worst epoch, last epoch, mean and 95 % of random scores."""


class RunLevelRow(NamedTuple):
    layer: str
    attack: str
    needs: str
    leak_auc: str
    interval: str
    examples: str
    points: tuple[str, str, str]
    """True positive rates at false positive rates of 0.1 % and 1 %, and precision at 100."""


class GateRow(NamedTuple):
    window_end: str
    attack: str
    measured: str
    limit: str
    random: str


class AlarmRow(NamedTuple):
    """An attack that measured more than the ledger's charge allows for."""

    epoch: str
    attack: str
    measured: str
    margin: str
    bound: str


class AuditRow(NamedTuple):
    """The peer's audits of one attack's scores."""

    attack: str
    replies: str
    first: str
    largest: str
    last: str


def tiles(
    run: RunFiles, findings: Sequence[Finding], accumulated: Sequence[RunLevel]
) -> Iterator[Tile]:
    """Yield the key figures of a run: first those beyond what features tell."""
    measured = beyond_of(run)
    strongest_beyond = measured.strongest()
    if strongest_beyond is not None:
        attack, found = strongest_beyond
        by = (
            f"leak AUC of {attack} among examples of which features tell the same; 95 % interval "
            f"{found.low:.3f} to {found.high:.3f}"
        )
        yield Tile("Measured beyond features", figure(found.value), by)
    if measured.epsilon is not None:
        meaning = (
            f"epsilon that {measured.epsilon.attack} excludes (delta {measured.epsilon.delta:g})"
        )
        yield Tile("Epsilon at least", at_least(measured.epsilon.epsilon), meaning)
    tests = test_lines(run)
    model = run.active.summary.of_active.model
    if model.test_number is None and (tests or model.test_auc is not None):
        meaning = "of the joint model on rows that it has not seen, in the last epoch"
        if model.test_auc_alone is not None:
            meaning += f"; the active party alone: {figure(model.test_auc_alone)}"
        yield Tile("Test AUC", figure(tests[-1].auc if tests else model.test_auc), meaning)
    best = strongest(findings)
    if best is not None:
        by = (
            f"leak AUC of {best.attack} at {best.layer}, mean; random scores "
            f"{best.random_mean:.3f}, on 95 % of batches below {best.random_q95:.3f}"
        )
        yield Tile("Measured on single batches", figure(best.mean), by)
    if accumulated:
        top = max(accumulated, key=lambda one: one.leak_auc)
        by = f"leak AUC of {top.attack} at {top.layer}, all epochs together"
        yield Tile("Measured over the run", figure(top.leak_auc), by)
    ledger = ledger_of(run)
    if ledger is not None:
        meaning = "leak AUC of the best score, if the classes are Gaussian"
        yield Tile("Estimated for the run", figure(ledger.estimate.max), meaning)
        for peers, written in bound_cells(run).items():
            meaning = f"leak AUC that no score of {peers.in_words} exceeds, on any example"
            yield Tile(f"Bound for the run: {peers}", written, meaning)


def leak_rows(findings: Sequence[Finding]) -> Iterator[LeakRow]:
    """Yield the table of attacks on single batches."""
    for found in findings:
        of_attack = (found.mean, found.q95, found.worst_epoch, found.last_epoch)
        figures = tuple(map(figure, (*of_attack, found.random_mean, found.random_q95)))
        needs = needs_of(found.attack)
        yield LeakRow(found.party, found.layer, found.attack, needs, found.beats_chance, figures)


def run_level_rows(accumulated: Sequence[RunLevel]) -> Iterator[RunLevelRow]:
    """Yield the table of attacks on the whole run."""
    for one in accumulated:
        interval = f"{figure(one.low)} to {figure(one.high)}"
        needs = needs_of(one.attack)
        auc, examples = figure(one.leak_auc), count(one.examples)
        points = (
            figure(one.tpr_at_per_mille),
            figure(one.tpr_at_percent),
            figure(one.precision_at_100),
        )
        yield RunLevelRow(one.layer, one.attack, needs, auc, interval, examples, points)


def gate_rows(run: RunFiles) -> Iterator[GateRow]:
    for line in run.active.metrics.of(GateLine):
        window_end = f"epoch {line.epoch + 1}, step {line.step + 1}"
        figures = (line.figure.leak_auc, line.limit, line.random)
        yield GateRow(window_end, _named(line.figure), *map(figure, figures))


def alarm_rows(run: RunFiles) -> Iterator[AlarmRow]:
    for line in run.active.metrics.of(AlarmLine):
        figures = (figure(line.figure.leak_auc), figure(line.margin))
        written = _ABSENT if line.bound is None else auc_at_most(line.bound)
        yield AlarmRow(str(line.epoch + 1), _named(line.figure), *figures, written)


def audit_rows(run: RunFiles) -> Iterator[AuditRow]:
    """Yield the peer's audits of its scores, one row per attack and layer."""
    replies: dict[str, list[float]] = {}
    for line in run.active.metrics.of(AuditLine):
        if line.figure.leak_auc is not None:
            replies.setdefault(_named(line.figure), []).append(line.figure.leak_auc)
    for attack, told in replies.items():
        figures = (figure(value, 2) for value in (told[0], max(told), told[-1]))
        yield AuditRow(attack, count(len(told)), *figures)


def watch_notes(run: RunFiles) -> Iterator[str]:
    """Yield a sentence about each guard against the leak: whether it was on, and its actions."""
    settings, summary = run.active.settings, run.active.summary.of_active
    alarms = summary.leak_alarms
    if alarms is not None:
        yield (
            f"The leak alarm, which compares measured leaks with the ledger's charges, went off "
            f"{alarms} time{'s' * (alarms != 1)}."
        )
    gate = settings.get("leak_gate")
    if gate:
        found = len(run.active.metrics.of(GateLine))
        ended = ", and ended the run" if summary.gate is not None and summary.gate.closed else ""
        yield (
            f"Leak gate (leak AUC at most {gate.get('max_leak_auc')} over windows of "
            f"{gate.get('window_steps')} batches, else {gate.get('action')}): "
            f"{found} finding{'s' * (found != 1)}{ended}."
        )
    else:
        yield "Leak gate: not set, so no measured leak could end the run."
    # The summary also counts audits after the checkpoint resumed from, whose lines are gone.
    told = max(len(run.active.metrics.of(AuditLine)), summary.audits_answered or 0)
    if settings.get("allow_audits") or told:
        yield (
            f"Audit calls answered: {told}. The peer chose the scores and was told their leak "
            "AUC to two digits. The ledger does not count them."
        )
    else:
        yield "Audit calls: not allowed, so the peer was not told any figure."


def summary_rows(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yield the figures of the run's summary, except those about the leak."""
    counts, active = run.active.summary.counts, run.active.summary.of_active
    batches, model = run.active.summary.of_leak.counts, active.model
    yield "aligned rows", count(counts.aligned_rows)
    yield "epochs", count(counts.epochs)
    yield "steps", count(counts.steps)
    yield "steps per second", figure(counts.steps_per_s, 1)
    if model.test_number is None:
        yield "test AUC", figure(model.test_auc, 4)
    if model.test_auc_refit is not None:
        yield "test AUC, refitted", figure(model.test_auc_refit, 4)
    if model.test_auc_alone is not None:
        yield "test AUC, active party alone", figure(model.test_auc_alone, 4)
    if model.test_auc_by_class is not None:
        yield "test accuracy", figure(model.test_accuracy, 4)
    yield "test loss", figure(model.test_loss, 4)
    yield "training loss, last epoch", figure(model.train_loss, 4)
    yield "batches attacked", count(batches.observed)
    yield "batches of one class", count(batches.skipped_one_class)
    yield "batches left out", count(batches.left_out)
    epsilon = beyond_of(run).epsilon
    if epsilon is not None:
        yield "epsilon, at least", at_least(epsilon.epsilon)
    yield "leak alarms", count(active.leak_alarms)
    yield "leak gate findings", count(None if active.gate is None else active.gate.findings)
    yield "audits answered", count(active.audits_answered)
    yield "refused messages", count(sum(active.refused_messages.values()))
    ledger = ledger_of(run)
    if ledger is not None and ledger.epsilon is not None:
        yield "label differential privacy, epsilon", f"≤ {at_most(ledger.epsilon)}"
    if run.active.summary.version is not None:
        yield "splitveil version", run.active.summary.version


def settings_tables(settings: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return one table per section of the settings; the first has settings outside sections."""
    tables: dict[str, list[tuple[str, str]]] = {"this party": []}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            tables[name] = list(flattened(value))
        else:
            tables["this party"] += flattened({name: value})
    return {name: rows for name, rows in tables.items() if rows}


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting with its dotted name, without values that would reveal the noise."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        elif name in _SECRETS and value is not None:
            yield f"{prefix}{name}", "set (not shown)"
        else:
            yield f"{prefix}{name}", setting_in_words(value)


def bound_cells(run: RunFiles) -> dict[Covers, str]:
    """Return the ledger's bound for the whole run in words, for each circle of peers."""
    bounds = bounds_of(run)
    return {peers: _bound_in_words(bounds.get(peers)) for peers in Covers}


def _bound_in_words(bound: float | None) -> str:
    if bound is None:
        return _ABSENT
    return f"≤ {auc_at_most(bound)}" if bound < 1 else "none"


def figure(value: float | None, digits: int = 3) -> str:
    """Format a figure; a dash stands for a missing one."""
    return _ABSENT if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """Format a count; a dash stands for a missing one."""
    return _ABSENT if value is None else f"{value:,}"


def _named(figure: AttackFigure) -> str:
    return f"{figure.attack} at {figure.layer}"
