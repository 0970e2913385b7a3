"""The final figures of several runs of one example, side by side."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import read_yaml
from splitveil.common.text.upper_bounds import auc_at_most
from splitveil.common.text.visible_text import cell

Leak = Mapping[str, Mapping[str, Mapping[str, float | None]]]
"""Layer -> attack -> figure -> value, as in ``summary.json``."""


class RunResults(NamedTuple):
    """What a run's two summaries say."""

    active: Mapping[str, Any]
    passive: Mapping[str, Any]

    @property
    def leak(self) -> Leak:
        """What the gradients gave away at each layer.

        At the cut layer the active party's figures, whose oracle attacks know a clean gradient; at
        earlier layers the passive party's, who alone sees those.
        """
        return self._of_both("leak")

    @property
    def run_level(self) -> Leak:
        """What all gradients of the run together gave away, of the same parties."""
        return self._of_both("leak_run_level")

    def _of_both(self, name: str) -> Leak:
        leak: dict[str, Mapping[str, Mapping[str, float]]] = dict(self.passive.get(name) or {})
        return leak | dict(self.active.get(name) or {})


def read_results(run_dir: Path) -> RunResults:
    """Read the summaries that all parties wrote at the end of a run."""
    active = _read(run_dir / ACTIVE / "summary.json")
    contract = read_yaml(run_dir / ACTIVE / "settings.yaml").get("contract")
    parties = contract.get("passive_parties", []) if isinstance(contract, dict) else []
    if len(parties) <= 1:
        return RunResults(active, _read(run_dir / "passive" / "summary.json"))
    found = {str(name): _read(run_dir / str(name) / "summary.json") for name in parties}
    return RunResults(active, {name: _by_party(found, name) for name in ("leak", "leak_run_level")})


def comparison_table(title: str, results: Mapping[str, RunResults]) -> Table:
    """Return a table with one column per run and one row per figure."""
    caption = (
        "leak AUC at a layer: mean over batches, 95 % quantile (that of random scores); "
        "below, leak AUC of the whole run"
    )
    if any(r.active.get("leak_classes") for r in results.values()):
        caption += "; of the pair of classes told apart best"
    table = Table(title=cell(title), caption=caption)
    table.add_column("", no_wrap=True)
    for name in results:
        table.add_column(cell(name), justify="right")
    table.add_row("aligned rows", *(f"{r.active['aligned_rows']:,}" for r in results.values()))
    rows = [("test AUC", "test_auc", 4), ("steps/s", "steps_per_s", 1)]
    if any("test_accuracy" in r.active for r in results.values()):
        rows.insert(1, ("test accuracy", "test_accuracy", 4))
    for label, name, digits in rows:
        table.add_row(label, *(_number(r.active.get(name), digits) for r in results.values()))
    table.add_section()
    for layer, attack in _pairs(r.leak for r in results.values()):
        cells = [_leak_cell(r.leak.get(layer, {}).get(attack)) for r in results.values()]
        table.add_row(cell(f"{layer}: {attack} leak AUC"), *cells)
    table.add_section()
    for layer, attack in _pairs(r.run_level for r in results.values()):
        found = (r.run_level.get(layer, {}).get(attack, {}) for r in results.values())
        cells = [_number(figures.get("auc"), 3) for figures in found]
        table.add_row(cell(f"{layer}: {attack}"), *cells)
    ledgers = [r.active.get("ledger") or {} for r in results.values()]
    table.add_row("ledger: estimate", *(_number(one.get("estimate_max"), 3) for one in ledgers))
    table.add_row("ledger: guarantee", *(_at_most(one.get("guarantee_max")) for one in ledgers))
    return table


def _by_party(found: Mapping[str, Mapping[str, Any]], name: str) -> Leak:
    """Return the layers of several passive parties, each with its party's name."""
    return {
        f"{party}: {layer}": attacks
        for party, summary in found.items()
        for layer, attacks in (summary.get(name) or {}).items()
    }


def _read(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def _pairs(leaks: Iterable[Leak]) -> list[tuple[str, str]]:
    """Return every layer and attack that any of the runs measured."""
    pairs = ((layer, a) for leak in leaks for layer, attacks in leak.items() for a in attacks)
    return list(dict.fromkeys(pairs))


def _leak_cell(figures: Mapping[str, float | None] | None) -> str:
    if figures is None:
        return "-"
    mean, q95, floor = (_number(figures[name], 3) for name in ("mean", "q95", "random_q95"))
    return f"{mean}  {q95} ({floor})"


def _number(value: float | None, digits: int) -> str:
    """Format a figure; JSON has null for one that could not be measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def _at_most(value: float | None) -> str:
    """Format an upper bound, rounded up: never below what it bounds."""
    return "-" if value is None else auc_at_most(value)
