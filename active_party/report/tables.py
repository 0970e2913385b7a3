"""The rows of a report's tables, and the figures in them: of a run's series, and of predictions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

from splitveil.active_party.report import run_files
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import StoredPredictions, read_predictions
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.adjusted_auc import placements
from splitveil.common.privacy.attacks import CUT, NUMBER_ATTACKS, needs_of
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import (
    STANDARD_ERRORS,
    BeyondFigures,
    ClassFigures,
    Estimate,
    PredictionFigures,
    RunFigures,
)
from splitveil.common.record.assessment import Finding, LeakAssessment, bounds_by_peers
from splitveil.common.record.run_record import AlarmLine, find_summary
from splitveil.common.settings import Mark, marked
from splitveil.common.text.wording import auc_at_most, setting_in_words

ABSENT = "–"
_NORMAL_975 = 1.959963984540054
_CLOSE = 1e-4  # difference of an AUC from the recorded one that rounding may make
_NOT_ALONE = "not measured (serving.fallback)"


class TableRow(NamedTuple):
    """One row of a table."""

    cells: tuple[str, ...]
    is_strong: bool = False  # whether its first number is written in bold


class MeasuredAttack(NamedTuple):
    """One attack on single batches of one layer, over the whole run."""

    party: str
    layer: str
    attack: str
    batches: int
    mean: float
    q95: float
    last_epoch: float
    worst_epoch: float  # mean of the epoch with the highest mean
    random_mean: float
    random_q95: float
    beats_chance: bool  # whether its mean exceeds random scores' by more than chance explains


def finding_of(series: run_files.LeakSeries) -> MeasuredAttack:
    """Summarise an attack over the run."""
    gains = series.leak - series.random
    means = [series.leak[series.epochs == epoch].mean() for epoch in np.unique(series.epochs)]
    enough = len(gains) > 1
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if enough else math.inf
    return MeasuredAttack(
        series.party,
        series.layer,
        series.attack,
        len(gains),
        float(series.leak.mean()),
        float(np.quantile(series.leak, 0.95)),
        float(means[-1]),
        float(max(means)),
        float(series.random.mean()),
        float(np.quantile(series.random, 0.95)),
        beats_chance=float(gains.mean()) > STANDARD_ERRORS * error,
    )


def estimate_of(recorded: float, predictions: StoredPredictions | None) -> Estimate | None:
    """Return the recorded AUC of a run with its interval; None where that is not known.

    The interval is that of DeLong et al. (Biometrics 44, 1988). With several classes it is the mean
    over the classes, each against the rest.
    """
    if predictions is None:
        return None
    labels, logits = predictions.labels, predictions.logits
    scores = {1: logits} if logits.ndim == 1 else dict(enumerate(softmax(logits, axis=1).T))
    members = {one: labels == one for one in scores}
    measured = [one for one, of in members.items() if min(of.sum(), (~of).sum()) > 1]
    if not measured:
        return None
    # The sum of the squared terms, one for each row, is the variance.
    auc, terms = 0.0, np.zeros(len(labels))
    for one in measured:
        placed = placements(scores[one], members[one])
        auc += placed.auc / len(measured)
        for rows, of in zip((members[one], ~members[one]), placed[:2], strict=True):
            size = len(of) * (len(of) - 1.0)
            terms[rows] += (of - placed.auc) / math.sqrt(size) / len(measured)
    half = _NORMAL_975 * math.sqrt(float(terms @ terms))
    if abs(auc - recorded) > _CLOSE:
        return None
    return Estimate(auc, max(auc - half, 0.0), min(auc + half, 1.0))


def figure(value: float | None, digits: int = 3) -> str:
    """Format a figure; a dash stands for a missing one."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """Format a count; a dash stands for a missing one."""
    return ABSENT if value is None else f"{value:,}"


def raw_figures(run: run_files.RunFiles) -> dict[str, float]:
    """Return attack -> its leak AUC of all examples at the cut layer; of the run, or of batches."""
    leak = run.active.summary.of_leak
    batches = leak.batches.get(CUT, {})
    raw = {name: one.mean for name, one in batches.items()}
    return raw | {name: one.auc for name, one in leak.run_level.get(CUT, {}).items()}


def beyond_rows(run: run_files.RunFiles, assessment: LeakAssessment) -> Iterator[TableRow]:
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


def leak_rows(findings: Sequence[MeasuredAttack]) -> Iterator[TableRow]:
    """Yield the table of attacks on single batches of one layer."""
    for found in findings:
        of_attack = (found.mean, found.q95, found.worst_epoch, found.last_epoch)
        figures = map(figure, (*of_attack, found.random_mean, found.random_q95))
        where = (found.party, found.layer, found.attack, needs_of(found.attack))
        yield TableRow((*where, *figures), found.beats_chance)


def number_rows(run: run_files.RunFiles) -> Iterator[TableRow]:
    """Yield the attacks on numbers: R2 beyond features with its interval, then other R2."""
    for attack, found in run.active.summary.of_leak.of_numbers.items():
        beyond, is_clear = (ABSENT, ABSENT), False
        if found.beyond is not None:
            beyond = (figure(found.beyond.r2), found.beyond.interval)
            is_clear = found.beyond.low > 0
        others = map(figure, (found.r2, found.q95, found.last_epoch, found.random))
        needs = NUMBER_ATTACKS.get(attack, "not known here")
        yield TableRow((attack, needs, *beyond, *others, count(found.examples)), is_clear)


def run_levels(run: run_files.RunFiles) -> dict[tuple[str, str], RunFigures]:
    """Return (layer, attack) -> figures of the attacks on the gradients of all epochs together."""
    found: dict[tuple[str, str], RunFigures] = {}
    for party in run.parties:
        for name, attacks in party.summary.of_leak.run_level.items():
            for attack, figures in attacks.items():
                found.setdefault((party.layer(name), attack), figures)
    return found


def run_level_rows(run: run_files.RunFiles) -> Iterator[TableRow]:
    """Yield the table of attacks on the whole run; with more than two classes, with the worst pair.

    The last three figures are the true positive rates at false positive rates of 0.1 % and 1 %, and
    the precision at 100.
    """
    pairs: dict[tuple[str, str], str] = {}
    for party in run.parties:
        for name, attacks in party.summary.of_leak.run_level_by_class.items():
            for attack, found in attacks.items():
                pairs.setdefault((party.layer(name), attack), " and ".join(found.worst_pair))
    for (layer, attack), one in run_levels(run).items():
        pair = [pairs.get((layer, attack), "")] if run.num_classes > 2 else []
        interval = f"{figure(one.low)} to {figure(one.high)}"
        points = map(figure, (one.tpr_at_per_mille, one.tpr_at_percent, one.precision_at_100))
        of_attack = (layer, attack, needs_of(attack), *pair, figure(one.auc))
        yield TableRow((*of_attack, interval, count(one.examples), *points))


def completion_in_words(run: run_files.RunFiles) -> list[str]:
    """Say what heads with known labels read from the trained bottom model's activations."""
    found: dict[tuple[str, str], RunFigures] = {}
    for party in (*run.passives, run.active):  # a passive party has its features to compare with
        for attack, one in party.summary.of_leak.run_level.get(CUT, {}).items():
            if attack.startswith("completion_"):
                found.setdefault((party.layer(CUT), attack), one)
    return [
        f"{attack}{'' if layer == CUT else f' at {layer}'} reaches leak AUC {figure(one.auc)} "
        f"({figure(one.low)} to {figure(one.high)}), "
        + (
            "and how much of it features reveal was not measured (adversary.labels)"
            if one.over_features is None
            else f"{one.over_features.in_words} over features with the same labels"
        )
        for (layer, attack), one in found.items()
    ]


def test_rows(run: run_files.RunFiles) -> Iterator[tuple[str, str]]:
    """Yield the model's figures on test rows, and the baselines it has to beat."""
    model, predictions = run.active.summary.of_active.model, read_predictions(run.active.folder)
    whose = "both" if len(run.active.setting("contract", "passive_parties") or ()) < 2 else "all"
    unit = "" if model.test.rmse is None else ", in the label's unit"
    joint = f"test {model.test.main}, {whose} companies' data{unit}"
    yield joint, quality_in_words(run, predictions, 3)
    if model.refit is not None and run.active.setting("inference", "model") != "trained":
        yield "the same, refitted: predicts by default", model.refit.in_words(3)
    undefended = None if predictions is None else _undefended(run, predictions)
    if undefended is not None:
        yield "both, without a defense", undefended.in_words(3)
    alone = model.alone
    yield "our own data only", _NOT_ALONE if alone is None else alone.in_words(3)
    if model.test.constant_rmse is not None:
        yield "the mean of all labels", f"{model.test.constant_rmse:.4g}"


def group_rows(run: run_files.RunFiles) -> Iterator[TableRow]:
    """Yield the predictions by group; the mean is strong where chance does not explain its miss."""
    for one in run.active.summary.of_active.model.groups or ():
        actual, mean = one.actual, one.predicted
        is_off = actual is not None and mean is not None and not actual.low <= mean <= actual.high
        estimates = (actual, one.selected, one.auc)
        words = (ABSENT if found is None else found.in_words(3) for found in estimates)
        yield TableRow((one.group, figure(mean), *words, count(one.rows)), is_off)


def quality_in_words(
    run: run_files.RunFiles, predictions: StoredPredictions | None, digits: int = 4
) -> str:
    """Return a run's main test figure, an AUC with its interval where its predictions were kept."""
    test = run.active.summary.of_active.model.test
    if test.score is None:
        test = next((line.figures for line in run_files.test_lines(run)[-1:]), test)
    found = None if test.auc is None else estimate_of(test.auc, predictions)
    return test.in_words(digits) if found is None else found.in_words(digits)


def _undefended(run: run_files.RunFiles, own: StoredPredictions) -> PredictionFigures | None:
    with suppress(SettingsError):  # a damaged run beside this one
        for folder in run_files.undefended_beside(run):
            summary, other = find_summary(folder), read_predictions(folder)
            if summary is None or other is None or other.training_rows != own.training_rows:
                continue
            if np.array_equal(other.ids, own.ids):
                return summary.of_active.model.test
    return None


def pair_rows(run: run_files.RunFiles) -> Iterator[TableRow]:
    """Yield the worst pair of each attack on single batches, on average."""
    for party in run.parties:
        for layer, attack, found in _of_batches(party):
            name, leak = found.worst_class() or ("", None)
            pair = (" and ".join(found.worst_pair), found.worst_pair_auc, found.worst_pair_random)
            of_class = (name, figure(leak), figure(found.random.get(name)))
            yield TableRow((party.name, layer, attack, pair[0], *map(figure, pair[1:]), *of_class))


def class_rows(run: run_files.RunFiles) -> Iterator[TableRow]:
    """Yield a row per class: test AUC, and the largest leak AUC of an attack against the rest."""
    test_aucs = run.active.summary.of_active.model.test.auc_by_class
    found = [
        (f"{attack} at {layer}", figures.classes)
        for party in run.parties
        for layer, attack, figures in _of_batches(party)
    ]
    for name, test_auc in test_aucs.items():
        leaks = {attack: auc for attack, aucs in found if (auc := aucs.get(name)) is not None}
        worst = max(leaks, key=lambda attack: leaks[attack], default="")
        yield TableRow((name, figure(test_auc), figure(leaks.get(worst)), worst))


def _of_batches(party: run_files.PartyFiles) -> Iterator[tuple[str, str, ClassFigures]]:
    for name, attacks in party.summary.of_leak.by_class.items():
        for attack, found in attacks.items():
            yield party.layer(name), attack, found


def alarm_rows(run: run_files.RunFiles) -> Iterator[TableRow]:
    for line in run.active.metrics.of(AlarmLine):
        figures = map(figure, (line.figure.leak_auc, line.margin))
        named = f"{line.figure.attack} at {line.figure.layer}"
        bound = ABSENT if line.bound is None else auc_at_most(line.bound)
        yield TableRow((str(line.epoch + 1), named, *figures, bound), is_strong=True)


def settings_tables(settings: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return one table per section of the settings; the first has settings outside sections."""
    tables: dict[str, list[tuple[str, str]]] = {"this party": []}
    for name, value in flattened(settings):
        section, _, inner = name.partition(".")
        tables.setdefault(section if inner else "this party", []).append((inner or name, value))
    return {name: rows for name, rows in tables.items() if rows}


def flattened(settings: Mapping[str, Any], *place: str) -> Iterator[tuple[str, str]]:
    """Yield every setting with its dotted name, without values that would reveal the noise."""
    for name, value in settings.items():
        inner = (*place, name)
        if isinstance(value, Mapping) and value:
            yield from flattened(value, *inner)
        else:
            is_hidden = inner in marked(ActiveSettings, Mark.HIDDEN) and value is not None
            yield ".".join(inner), "set (not shown)" if is_hidden else setting_in_words(value)


def bound_cells(run: run_files.RunFiles) -> dict[Adversary, str]:
    """Return the ledger's bound for the whole run in words, for each adversary class."""
    cells = {
        peers: f"≤ {auc_at_most(bound)}" if bound < 1 else "none"
        for peers, bound in bounds_by_peers(run.ledger).items()
    }
    return dict.fromkeys(Adversary, ABSENT) | cells
