"""The figures and settings that a report shows as text: key figures, summary, settings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from splitveil.active_party.report.beyond import beyond_of
from splitveil.active_party.report.bounds import bounds_of, ledger_of
from splitveil.active_party.report.figures import ABSENT, Finding, Row, count, figure, strongest
from splitveil.active_party.report.run_files import PartyFiles, RunFiles, num_classes, test_lines
from splitveil.active_party.report.verdict import RunLevel, needs_of
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.figures import AttackFigure, ClassFigures, LeakByClass
from splitveil.common.record.lines import AlarmLine, AuditLine, GateLine
from splitveil.common.text.upper_bounds import at_least, at_most, auc_at_most
from splitveil.common.text.wording import setting_in_words

_SECRETS = ("insecure_nonce_seed", "insecure_noise_seed")
"""Settings from which a reader could derive the noise or the batches."""


class Tile(NamedTuple):
    label: str
    value: str
    note: str


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


def leak_rows(findings: Sequence[Finding]) -> Iterator[Row]:
    """Yield the table of attacks on single batches of one layer."""
    for found in findings:
        of_attack = (found.mean, found.q95, found.worst_epoch, found.last_epoch)
        figures = map(figure, (*of_attack, found.random_mean, found.random_q95))
        where = (found.party, found.layer, found.attack, needs_of(found.attack))
        yield Row((*where, *figures), found.beats_chance)


def run_level_rows(run: RunFiles, accumulated: Sequence[RunLevel]) -> Iterator[Row]:
    """Yield the table of attacks on the whole run; with several classes, with the pair told best.

    The last three figures are the true positive rates at false positive rates of 0.1 % and 1 %, and
    the precision at 100.
    """
    pairs: dict[tuple[str, str], str] = {}
    for party in run.parties:
        for name, attacks in _by_class(party).run_level.items():
            for attack, found in attacks.items():
                pairs.setdefault((party.layer(name), attack), " and ".join(found.worst_pair))
    for one in accumulated:
        pair = [pairs.get((one.layer, one.attack), "")] if num_classes(run) > 2 else []
        interval = f"{figure(one.low)} to {figure(one.high)}"
        points = map(figure, (one.tpr_at_per_mille, one.tpr_at_percent, one.precision_at_100))
        of_attack = (one.layer, one.attack, needs_of(one.attack), *pair, figure(one.leak_auc))
        yield Row((*of_attack, interval, count(one.examples), *points))


def pair_rows(run: RunFiles) -> Iterator[Row]:
    """Yield the pair that each attack on single batches tells apart best on average."""
    for party in run.parties:
        for layer, attack, found in _of_batches(party):
            name, leak = found.worst_class() or ("", None)
            pair = (" and ".join(found.worst_pair), found.worst_pair_auc, found.worst_pair_random)
            of_class = (name, figure(leak), figure(found.random.get(name)))
            yield Row((party.name, layer, attack, pair[0], *map(figure, pair[1:]), *of_class))


def class_rows(run: RunFiles) -> Iterator[Row]:
    """Yield one row per class: its test AUC, and its largest leak AUC against the rest.

    The leak AUC is the mean over batches of the attack for which it is largest.
    """
    test_aucs = run.active.summary.of_active.model.test_auc_by_class or {}
    found = [
        (f"{attack} at {layer}", figures.classes)
        for party in run.parties
        for layer, attack, figures in _of_batches(party)
    ]
    for name, test_auc in test_aucs.items():
        leaks = {attack: auc for attack, aucs in found if (auc := aucs.get(name)) is not None}
        worst = max(leaks, key=lambda attack: leaks[attack], default="")
        yield Row((name, figure(test_auc), figure(leaks.get(worst)), worst))


def _of_batches(party: PartyFiles) -> Iterator[tuple[str, str, ClassFigures]]:
    for name, attacks in _by_class(party).batches.items():
        for attack, found in attacks.items():
            yield party.layer(name), attack, found


def _by_class(party: PartyFiles) -> LeakByClass:
    return party.summary.of_leak.by_class or LeakByClass({}, {})


def gate_rows(run: RunFiles) -> Iterator[Row]:
    for line in run.active.metrics.of(GateLine):
        window_end = f"epoch {line.epoch + 1}, step {line.step + 1}"
        figures = map(figure, (line.figure.leak_auc, line.limit, line.random))
        yield Row((window_end, _named(line.figure), *figures), is_strong=True)


def alarm_rows(run: RunFiles) -> Iterator[Row]:
    for line in run.active.metrics.of(AlarmLine):
        figures = map(figure, (line.figure.leak_auc, line.margin))
        bound = ABSENT if line.bound is None else auc_at_most(line.bound)
        yield Row((str(line.epoch + 1), _named(line.figure), *figures, bound), is_strong=True)


def audit_rows(run: RunFiles) -> Iterator[Row]:
    """Yield the peer's audits of its scores, one row per attack and layer."""
    replies: dict[str, list[float]] = {}
    for line in run.active.metrics.of(AuditLine):
        if line.figure.leak_auc is not None:
            replies.setdefault(_named(line.figure), []).append(line.figure.leak_auc)
    for attack, told in replies.items():
        figures = (figure(value, 2) for value in (told[0], max(told), told[-1]))
        yield Row((attack, count(len(told)), *figures))


def watch_notes(run: RunFiles) -> Iterator[str]:
    """Yield a sentence about each guard against the leak: whether it was on, and its actions."""
    summary = run.active.summary.of_active
    alarms = summary.leak_alarms
    if alarms is not None:
        yield (
            f"The leak alarm, which compares measured leaks with the ledger's charges, went off "
            f"{alarms} time{'s' * (alarms != 1)}."
        )
    gate = run.active.setting("leak_gate")
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
    if run.active.setting("allow_audits") or told:
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


def bound_cells(run: RunFiles) -> dict[Adversary, str]:
    """Return the ledger's bound for the whole run in words, for each adversary class."""
    bounds = bounds_of(run)
    return {peers: _bound_in_words(bounds.get(peers)) for peers in Adversary}


def _bound_in_words(bound: float | None) -> str:
    if bound is None:
        return ABSENT
    return f"≤ {auc_at_most(bound)}" if bound < 1 else "none"


def _named(figure: AttackFigure) -> str:
    return f"{figure.attack} at {figure.layer}"
