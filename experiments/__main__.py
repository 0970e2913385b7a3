"""The command ``python -m splitveil.experiments``: list, run, report.

``NAME`` is a file of this folder without its ending, or the path of any file. Results go to
``experiments/results/NAME/``: ``results.parquet``, ``table.md``, ``plots/``, and the runs
themselves under ``cells/``. Finished cells are not run again.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.arguments import Parser
from splitveil.common.record.run_folder import AS_USUAL, claimed, write_text_atomically
from splitveil.common.text.visible_text import visible_lines
from splitveil.common.text.wording import add_version
from splitveil.experiments.cells import Cell, Choice, plan, problems
from splitveil.experiments.collection import circumstances_of, collect, read_rows, write_rows
from splitveil.experiments.execution import is_finished, run_cells
from splitveil.experiments.plots import PlottingUnavailable, draw
from splitveil.experiments.preparation import prepare
from splitveil.experiments.settings import Experiment, experiment_names, load_experiment, rows_of
from splitveil.experiments.table import markdown

DEFAULT_OUTPUT = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        exit_code: int = options.action(options)
    except SplitveilError as error:
        sys.stderr.write(f"experiments: {visible_lines(str(error))}\n")
        return error.exit_code
    return exit_code


def _list(_options: argparse.Namespace) -> int:
    for name in experiment_names():
        _, experiment, _ = load_experiment(name)
        rows = sum(len(rows_of(*variant)) for variant in experiment.variants.items())
        _say(f"{name}: {experiment.title}")
        _say(
            f"    {len(experiment.datasets) * rows} cells per seed, {experiment.seeds} seeds by "
            "default"
        )
    return 0


def _run(options: argparse.Namespace) -> int:
    name, experiment, base_dir = load_experiment(options.name)
    only, overrides = tuple(options.only), tuple(options.overrides)
    choice = Choice(options.size, options.seeds, only, options.device, overrides)
    cells = plan(experiment, base_dir, choice)
    results = _results(options, name)
    prepared = (options.output / "prepared").resolve()
    judged = [(cell, _why_refused(cell, prepared)) for cell in cells]
    runnable = [cell for cell, why in judged if not why]
    refused = [(cell, why) for cell, why in judged if why]
    waiting = [cell for cell in runnable if not is_finished(cell, results)]
    _say(
        f"{name}: {len(cells)} cells; {len(runnable) - len(waiting)} have run, {len(waiting)} to "
        f"run, {len(refused)} cannot be run"
    )
    _say_refused(refused)
    if not runnable:
        return SettingsError.exit_code
    failures = []
    with claimed(
        results, "another process is running this experiment; wait, or use another --output"
    ):
        try:
            endings = run_cells(
                *(waiting, results, prepared),
                jobs=options.jobs,
                threads=options.threads,
                in_process=experiment.in_process,
            )
            for number, ending in enumerate(endings, start=1):
                progress = f"[{number}/{len(waiting)}] {ending.cell.name}"
                if ending.has_failed:
                    _say(f"{progress}: FAILED with exit code {ending.exit_code}")
                    _say(ending.last_lines)
                    failures.append(ending.exit_code)
                else:
                    _say(f"{progress}: done in {ending.wall_s:.0f} s")
        finally:
            finished = [cell for cell in runnable if is_finished(cell, results)]
            if finished:
                command = shlex.join(["python", "-m", "splitveil.experiments", *_words(options)])
                rows = [row for c in finished for row in collect(name, options.size, c, results)]
                circumstances = {"command": command}
                for key in ("machine", "python", "torch", "splitveil"):
                    found = {str(circumstances_of(cell, results)[key]) for cell in finished}
                    circumstances[key] = ", ".join(sorted(found))
                write_rows(results / "results.parquet", rows, circumstances)
                _show(name, experiment, results)
    return failures[0] if failures else 0


def _report(options: argparse.Namespace) -> int:
    name, experiment, _ = load_experiment(options.name)
    results = _results(options, name)
    _show(name, experiment, results)
    return 0


def _why_refused(cell: Cell, prepared: Path) -> list[str]:
    why = problems(cell, prepared)
    if not why and cell.prepare is not None:
        try:
            prepare(cell.prepare, prepared)
        except SplitveilError as error:
            why = [str(error)]
    return why


def _show(name: str, experiment: Experiment, results: Path) -> None:
    rows, circumstances = read_rows(results / "results.parquet")
    page = markdown(name, experiment, rows, circumstances)
    write_text_atomically(results / "table.md", page, AS_USUAL)
    _say(page)
    try:
        drawn = draw(experiment.plots, rows, results / "plots")
    except PlottingUnavailable as error:
        sys.stderr.write(f"experiments: {error}\n")
        drawn = []
    if drawn:
        links = "\n".join(f"![{plot.stem}](plots/{plot.name})" for plot in drawn)
        write_text_atomically(results / "table.md", f"{page}\n{links}\n", AS_USUAL)
    _say(f"{results / 'table.md'}")


def _results(options: argparse.Namespace, name: str) -> Path:
    ending = "" if options.size == "full" else f"-{options.size}"
    folder: Path = options.output.resolve() / f"{name}{ending}"
    return folder


def _words(options: argparse.Namespace) -> list[str]:
    """Return the command line that reproduces the same figures."""
    words = ["run", str(options.name)]
    words += ["--size", options.size] if options.size != "full" else []
    words += ["--seeds", str(options.seeds)] if options.seeds else []
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--only", *options.only] if options.only else []
    return words + (["--set", *options.overrides] if options.overrides else [])


def _say_refused(refused: Iterable[tuple[Cell, list[str]]]) -> None:
    """Print each reason once for all rows of a data set that share it."""
    rows: dict[tuple[str, str], dict[str, None]] = {}
    for cell, why in refused:
        rows.setdefault((cell.dataset, "; ".join(why)), {})[cell.variant] = None
    for (dataset, why_not), variants in rows.items():
        _say(f"cannot run {dataset}, {', '.join(variants)}: {why_not}")


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(visible_lines(text), markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m splitveil.experiments",
        description="Reproduce published tables and figures.",
        example="run guaranteed_tradeoff --quick",
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the experiments").set_defaults(action=_list)
    purpose, example = "run what has not run yet, then report", "guaranteed_tradeoff --quick"
    run = _add(commands.add_parser("run", help=purpose, example=example))
    run.set_defaults(action=_run)
    run.add_argument(
        "--seeds", type=_positive, help="number of runs of each variant, with seeds 0, 1, ..."
    )
    run.add_argument(
        "--jobs", type=_positive, default=1, help="number of cells that run side by side"
    )
    run.add_argument("--threads", type=_positive, default=1, help="number of cores of each party")
    run.add_argument(
        "--device", default="cpu", help="device of both parties: cpu, cuda, cuda:N, auto"
    )
    run.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="ROW",
        help="run only these data sets, variants, or DATASET/VARIANT",
    )
    run.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="PARTY.NAME=VALUE",
        help="a setting to override in every cell",
    )
    purpose = "rewrite table and plots from results.parquet"
    report = commands.add_parser("report", help=purpose, example="guaranteed_tradeoff")
    _add(report).set_defaults(action=_report)
    return parser


def _add(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("name", help="name of an experiment, or path of its file")
    command.add_argument("--size", default="full", help="a size that the file defines")
    command.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="--size quick"
    )
    command.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder of results")
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
