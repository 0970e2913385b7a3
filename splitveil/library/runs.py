"""Several runs side by side: every defense with every seed of a simulation."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, overload

from splitveil.active_party.report import write_comparison
from splitveil.common.privacy.adversary import Adversary
from splitveil.library.example_ledger import Ledger
from splitveil.library.frames import Row, as_html, frame
from splitveil.library.recorded_run import Kind, Run

KindOfSeveral: TypeAlias = Literal["runs", "defenses"] | Kind
_MEASURED = ("test_auc", "strongest_leak_auc", *(peers.column for peers in Adversary))


class PlannedRun(NamedTuple):
    defense: str
    """The title of the defense."""
    seed: int


class Runs(Sequence[Run]):
    """The runs of a simulation, in the order in which they ran."""

    def __init__(self, runs: Mapping[PlannedRun, Run], folder: Path) -> None:
        self.folder = folder
        self._runs = dict(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | list[Run]:
        return list(self._runs.values())[index]

    def __len__(self) -> int:
        return len(self._runs)

    def of(self, defense: str | None = None, seed: int | None = None) -> list[Run]:
        """Return the runs with a defense, given by its title, or a seed, or both."""
        return [
            run
            for planned, run in self._runs.items()
            if defense in {None, planned.defense} and seed in {None, planned.seed}
        ]

    @property
    def defenses(self) -> list[str]:
        """The titles of the defenses."""
        return list(dict.fromkeys(planned.defense for planned in self._runs))

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(planned.seed for planned in self._runs))

    @property
    def summary(self) -> Mapping[str, Mapping[str, Any]]:
        """Run name -> the active party's summary."""
        return {run.name: run.summary for run in self}

    @property
    def bounds(self) -> Mapping[str, Mapping[str, float]]:
        """Defense -> peers -> the largest bound of its runs, each by itself; 1 is no bound."""
        return {
            defense: {
                str(peers): max(run.bounds.get(str(peers), 1.0) for run in self.of(defense))
                for peers in Adversary
            }
            for defense in self.defenses
        }

    @property
    def ledger(self) -> Ledger:
        """The ledger of the only run.

        Raises:
            ValueError: there are several, each with a ledger of its own.
        """
        if len(self) != 1:
            raise ValueError(f"expected one run, got {len(self)}: choose one, as in runs[0].ledger")
        return self[0].ledger

    def frame(self, of: KindOfSeveral = "runs") -> Any:
        """Return the figures of all runs as one data frame, with columns ``defense`` and ``seed``.

        Args:
            of: what a row is about. ``runs``: one run. ``defenses``: mean and standard deviation
                over the seeds of one defense. All others as in ``Run.frame``.

        Raises:
            ValueError: there is no such kind of frame.
        """
        return frame(self.rows(of))

    def rows(self, of: KindOfSeveral = "runs") -> list[Row]:
        """Return the rows of a frame as mappings, column -> value; errors as for ``frame``."""
        if of == "defenses":
            return list(self._of_defenses())
        if of == "runs":
            # The title says more than the name that a run's own overview has.
            return [
                {**self._head(planned), **run.overview(), "defense": planned.defense}
                for planned, run in self._runs.items()
            ]
        if of not in get_args(Kind):
            expected = ("runs", "defenses", *get_args(Kind))
            raise ValueError(f"expected one of {', '.join(expected)}, got {of!r}")
        return [
            {**self._head(planned), **row}
            for planned, run in self._runs.items()
            for row in run.rows(of)
        ]

    def report(self, output: str | Path | None = None) -> Path:
        """Write the report of the only run, or a comparison of several, and return its path.

        By default it is ``active/report.html`` in the only run's folder, or ``comparison.html``
        beside the folders of several.

        Raises:
            StorageError: the file cannot be written.
        """
        path = None if output is None else Path(output)
        if len(self) == 1:
            return self[0].report(path)
        return write_comparison([run.path for run in self], path or self.folder / "comparison.html")

    def __repr__(self) -> str:
        return f"Runs({len(self)} runs of {', '.join(self.defenses)} in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        rows = self.rows("defenses")
        return as_html(f"{len(self)} runs", rows, "Means over seeds; sd is a standard deviation.")

    @staticmethod
    def _head(planned: PlannedRun) -> dict[str, object]:
        return {"defense": planned.defense, "seed": planned.seed}

    def _of_defenses(self) -> Iterator[Row]:
        for defense in self.defenses:
            runs = [run.overview() for run in self.of(defense)]
            row: dict[str, object] = {"defense": defense, "seeds": len(runs)}
            for name in _MEASURED:
                values = [value for run in runs if isinstance(value := run[name], float)]
                row[name] = statistics.fmean(values) if values else None
                if not name.startswith("bound"):
                    row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
            yield row
