"""What a report says of several classes: how well each is predicted, and which are told apart."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from splitveil.active_party.report.run_files import PartyFiles, RunFiles
from splitveil.active_party.report.tables import figure


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
    """One class."""

    name: str
    test_auc: str
    leak_auc: str
    attack: str


def pair_rows(run: RunFiles) -> Iterator[PairRow]:
    """Yield what attacks on single batches tell apart best, as means over the batches."""
    for party in run.parties:
        for layer, attack, found in _of_attacks(party, "leak_classes"):
            name, leak = _worst_class(found)
            random = (found.get("random") or {}).get(name)
            yield PairRow(
                party.name,
                layer,
                attack,
                " and ".join(map(str, found.get("worst_pair") or ())),
                figure(found.get("worst_pair_auc")),
                figure(found.get("worst_pair_random")),
                name,
                figure(leak),
                figure(random),
            )


def run_pairs(run: RunFiles) -> Mapping[tuple[str, str], str]:
    """Return (layer, attack) -> the two classes that the whole run tells apart best."""
    pairs: dict[tuple[str, str], str] = {}
    for party in run.parties:
        for layer, attack, found in _of_attacks(party, "leak_run_level_classes"):
            pairs.setdefault((layer, attack), " and ".join(map(str, found.get("worst_pair") or ())))
    return pairs


def class_table(run: RunFiles) -> list[ClassRow]:
    """Return one row per class: its test AUC, and its largest leak AUC against the rest.

    The leak AUC is the mean over batches of the attack for which it is largest.
    """
    test_aucs = run.active.summary.get("test_auc_by_class") or {}
    found = [
        (f"{attack} at {layer}", figures.get("classes") or {})
        for party in run.parties
        for layer, attack, figures in _of_attacks(party, "leak_classes")
    ]
    rows = []
    for name, test_auc in test_aucs.items():
        leaks = {attack: aucs[name] for attack, aucs in found if _is_number(aucs.get(name))}
        worst = max(leaks, key=lambda attack: leaks[attack], default="")
        rows.append(ClassRow(str(name), figure(test_auc), figure(leaks.get(worst)), worst))
    return rows


def _of_attacks(party: PartyFiles, kind: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    written = party.summary.get(kind)
    for layer, attacks in written.items() if isinstance(written, dict) else ():
        for attack, found in attacks.items() if isinstance(attacks, dict) else ():
            if isinstance(found, dict):
                yield party.layer(str(layer)), str(attack), found


def _worst_class(found: Mapping[str, Any]) -> tuple[str, float]:
    written = found.get("classes")
    named = written.items() if isinstance(written, dict) else ()
    classes = {str(name): auc for name, auc in named if _is_number(auc)}
    name = max(classes, key=lambda one: classes[one], default="")
    return name, classes.get(name, math.nan)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300
