"""The part of a recorder that is the same at both parties: metrics, and progress through a run."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rich.console import Console

from splitveil.common.record.lines import AlignmentLine, Line
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.training_progress import TrainingProgress
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows
from splitveil.common.text.log_lines import writes_json
from splitveil.common.text.output import printing_console


class RunRecorder:
    """Writes metrics and shows progress; a party's recorder adds what that party observes.

    Args:
        on_line: called with each line of the metrics once it is written.
    """

    def __init__(self, folder: Path, on_line: Callable[[Line], None] | None = None) -> None:
        self.aligned_rows = 0
        self.console: Console | None = None
        """Where progress is shown; None for the standard error stream."""
        self._folder = folder
        self._resources = ExitStack()
        self._of_run = ExitStack()
        """Closed when the run is aligned again, and with the recorder."""
        self._metrics = self._resources.enter_context(MetricsLog(folder, on_line=on_line))
        self._progress: TrainingProgress | None = None
        self._steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _begin_run(self, rows: AlignedRows) -> None:
        """End what belongs to an earlier alignment, and note the new one."""
        self._of_run.close()
        self._of_run = self._resources.enter_context(ExitStack())
        self.aligned_rows = len(rows)
        self._metrics.steps_per_epoch = rows.order.steps_per_epoch
        self._metrics.write(AlignmentLine(len(rows)))

    def _show_progress(self, party: str, rows: AlignedRows, contract: Contract) -> None:
        console = self.console or printing_console(stderr=True, plain=writes_json())
        bar = TrainingProgress(party, rows.total_steps(contract), console=console)
        self._progress = self._of_run.enter_context(bar)
