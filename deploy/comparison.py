"""The final figures of several runs of one example, side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group

from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.figures import BatchFigures, LeakFigures, LedgerFigures
from splitveil.common.record.run_record import read_summary
from splitveil.common.record.summary import Summary
from splitveil.common.record.values import ByAttack, ValueT
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import read_yaml
from splitveil.common.text.upper_bounds import auc_at_most
from splitveil.common.text.visible_text import PlainTable

_RUNS_BESIDE = 3


class RunResults(NamedTuple):
    active: Summary
    passives: Mapping[str, Summary]
    """Prefix of a party's layer names -> its summary."""

    def leaks(self, part: Callable[[LeakFigures], ByAttack[ValueT]]) -> ByAttack[ValueT]:
        """Return a part of all parties' figures at each layer.

        At the cut layer these are the active party's, whose oracle attacks know a clean gradient;
        at earlier layers those of the passive party, the only one that sees these.
        """
        of_passives = {
            f"{prefix}{layer}": attacks
            for prefix, summary in self.passives.items()
            for layer, attacks in part(summary.of_leak).items()
        }
        return of_passives | dict(part(self.active.of_leak))


def read_results(run_dir: Path) -> RunResults:
    """Read the summaries that all parties wrote at the end of a run."""
    active = read_summary(run_dir / ACTIVE)
    contract = read_yaml(run_dir / ACTIVE / "settings.yaml").get("contract")
    parties = contract.get("passive_parties", []) if isinstance(contract, dict) else []
    if len(parties) <= 1:
        return RunResults(active, {"": read_summary(run_dir / "passive")})
    names = map(str, parties)
    return RunResults(active, {f"{name}: ": read_summary(run_dir / name) for name in names})


def comparison_table(title: str, results: Mapping[str, RunResults]) -> Group:
    """Return a table with one column per run and one row per figure, and further ones below it."""
    runs = list(results.items())
    parts = (dict(runs[at : at + _RUNS_BESIDE]) for at in range(0, len(runs), _RUNS_BESIDE))
    return Group(*(_table(title, part) for part in parts))


def _table(title: str, results: Mapping[str, RunResults]) -> PlainTable:
    caption = (
        "leak AUC at a layer: mean over batches, 95 % quantile (that of random scores); "
        "below, leak AUC of the whole run"
    )
    runs = list(results.values())
    if any(run.active.of_leak.by_class for run in runs):
        caption += "; of the pair of classes separated best"
    table = PlainTable(title, caption=caption)
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    counts = [run.active.counts for run in runs]
    models = [run.active.of_active.model for run in runs]
    table.add_row("aligned rows", *(f"{of_run.aligned_rows or 0:,}" for of_run in counts))
    table.add_row("test AUC", *(_number(model.test_auc, 4) for model in models))
    if any(model.test_auc_by_class is not None for model in models):
        table.add_row("test accuracy", *(_number(model.test_accuracy, 4) for model in models))
    table.add_row("steps/s", *(_number(of_run.steps_per_s, 1) for of_run in counts))
    _add_leaks(table, runs)
    ledgers = [run.active.of_active.ledger or LedgerFigures() for run in runs]
    table.add_row("ledger: estimate", *(_number(one.estimate.max, 3) for one in ledgers))
    for peers in Adversary:
        bounds = (_at_most(one.against(peers).max) for one in ledgers)
        table.add_row(f"bound: {peers}", *bounds)
    return table


def _add_leaks(table: PlainTable, runs: Sequence[RunResults]) -> None:
    table.add_section()
    for place, figures in _by_attack([run.leaks(lambda leak: leak.batches) for run in runs]):
        table.add_row(f"{place} leak AUC", *map(_leak_cell, figures))
    table.add_section()
    for place, of_runs in _by_attack([run.leaks(lambda leak: leak.run_level) for run in runs]):
        aucs = [None if measured is None else measured.auc for measured in of_runs]
        table.add_row(place, *(_number(auc, 3) for auc in aucs))


def _by_attack(
    leaks: Sequence[ByAttack[ValueT]],
) -> Iterator[tuple[str, list[ValueT | None]]]:
    """Yield each attack at each layer with the figures of all runs."""
    pairs = ((layer, a) for leak in leaks for layer, attacks in leak.items() for a in attacks)
    for layer, attack in dict.fromkeys(pairs):
        yield f"{layer}: {attack}", [leak.get(layer, {}).get(attack) for leak in leaks]


def _leak_cell(figures: BatchFigures | None) -> str:
    if figures is None:
        return "-"
    mean, q95, floor = (_number(n, 3) for n in (figures.mean, figures.q95, figures.random_q95))
    return f"{mean}  {q95} ({floor})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _at_most(value: float | None) -> str:
    """Format an upper bound, rounded up: never below what it bounds."""
    if value is None:
        return "-"
    return auc_at_most(value) if value < 1 else "none"
