"""The report's figures by class: the quality of predictions, and the classes told apart best."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from splitveil.active_party.report.run_files import PartyFiles, RunFiles
from splitveil.active_party.report.tables import figure
from splitveil.common.record.leak_figures import ClassFigures, LeakByClass


class PairRow(NamedTuple):
    """One attack on single batches of one layer, or on the whole run."""

    party: str
    layer: str
    attack: str
    pair: str
    leak_auc: str
    random: str
    worst_class: str
    class_leak_auc: str
    class_random: str


class ClassRow(NamedTuple):
    name: str
    test_auc: str
    leak_auc: str
    attack: str


def pair_rows(run: RunFiles) -> Iterator[PairRow]:
    """Yield the pair that each attack on single batches tells apart best on average."""
    for party in run.parties:
        for layer, attack, found in _of_batches(party):
            name, leak = found.worst_class() or ("", None)
            yield PairRow(
                party.name,
                layer,
                attack,
                " and ".join(found.worst_pair),
                figure(found.worst_pair_auc),
                figure(found.worst_pair_random),
                name,
                figure(leak),
                figure(found.random.get(name)),
            )


def run_pairs(run: RunFiles) -> Mapping[tuple[str, str], str]:
    """Return (layer, attack) -> the two classes that the whole run tells apart best."""
    pairs: dict[tuple[str, str], str] = {}
    for party in run.parties:
        for name, attacks in _by_class(party).run_level.items():
            for attack, found in attacks.items():
                pairs.setdefault((party.layer(name), attack), " and ".join(found.worst_pair))
    return pairs


def class_table(run: RunFiles) -> list[ClassRow]:
    """Return one row per class: its test AUC, and its largest leak AUC against the rest.

    The leak AUC is the mean over batches of the attack for which it is largest.
    """
    test_aucs = run.active.summary.of_active.model.test_auc_by_class or {}
    found = [
        (f"{attack} at {layer}", figures.classes)
        for party in run.parties
        for layer, attack, figures in _of_batches(party)
    ]
    rows = []
    for name, test_auc in test_aucs.items():
        leaks = {attack: auc for attack, aucs in found if (auc := aucs.get(name)) is not None}
        worst = max(leaks, key=lambda attack: leaks[attack], default="")
        rows.append(ClassRow(name, figure(test_auc), figure(leaks.get(worst)), worst))
    return rows


def _of_batches(party: PartyFiles) -> Iterator[tuple[str, str, ClassFigures]]:
    for name, attacks in _by_class(party).batches.items():
        for attack, found in attacks.items():
            yield party.layer(name), attack, found


def _by_class(party: PartyFiles) -> LeakByClass:
    return party.summary.of_leak.by_class or LeakByClass({}, {})
