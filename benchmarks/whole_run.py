"""How fast is a whole run of two processes, beside the same model in one process?

    python -m benchmarks.whole_run [--rounds 3] [--only shipped mtls] [--threads]
        [--rows 67000] [--features 64] [--epochs 20] [--rtt 40 --rate 100]
    python -m benchmarks.whole_run --sizes 10000 100000 1000000 --features 16 --epochs 3
    SPLITVEIL_DATA=FOLDER python -m benchmarks.whole_run --init 20000 [--rounds 3]
        [--rtt 100 --rate 100] [--nvflare PYTHON]

A split MLP 64-256-128 | 128-64-1 on 67,000 synthetic rows, batch 1,024, Adam, float32, one torch
thread per process. Each round runs, one after the other:

- ``monolithic``: the same model in one process;
- ``mtls``: both parties' `splitveil run` as a user calls them, with the
  defense ``none`` and without audits;
- ``shipped``: mutual TLS, ``noisy_label``, the default audits of both parties, and their
  status pages;
- ``marvell``, ``none``: the same with ``marvell``, and without a defense;
- ``..., depth N``: the same with ``pipeline_depth: N``.

A figure is that of whole epochs after the first, with whatever lies between two epochs. CPU time is
that of both processes, also until the first step and from the last evaluation to the end, and with
``--threads`` by thread. Memory is each process's largest resident set (VmHWM). Ratios are those of
medians over the rounds.

``--sizes`` runs ``shipped`` once with each number of rows, and prints what each part of a run costs
and how it grows: with exponent 1, ten times the rows cost ten times as much.

``--init`` compares one pass with gradients, both of cut 64, over a whole job: with the settings
that ``splitveil init`` writes for so many rows of ``default_credit``, from the start of the first
process to both reports, over mutual TLS, and again over the line of ``--rtt``. Beside them,
scikit-learn's boosting in one process reads both files, joins them by id, and is fitted and tested
on the joined rows; and with ``--nvflare PYTHON``, NVIDIA FLARE's recipes work on the same files
(``benchmarks.nvflare_job``).
"""

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.environment import free_port, in_a_process, print_environment, status_mib
from benchmarks.first_settings import FILES, MODES, Rows, is_of, prepare
from benchmarks.slow_line import Line, between
from splitveil.deploy.authority import PartyFolder, make_certificates
from splitveil.experiments.preparation import write_columns

BARE: dict[str, Any] = {"leak_monitor": None, "defense": {"name": "none"}}
CUT, BATCH = 128, 1024
NAMES = {"active": "active.splitveil", "passive": "passive.splitveil"}
ENDS = ("first_step_s", "first_step_cpu_s", "ending_s", "ending_cpu_s")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.02
MOST_THREADS = 12

Parties = dict[str, "subprocess.Popen[bytes]"]


class Work(NamedTuple):
    """The table and the length of a run."""

    rows: int = 67_000
    features: int = 64
    epochs: int = 20

    @property
    def training(self) -> int:
        return self.rows * 9 // 10


class Cost(NamedTuple):
    """What whole epochs cost; CPU time is that of all processes."""

    steps_per_s: float
    cpu_ms: float
    """For one step."""
    memory_mib: tuple[float, ...]
    """The largest resident set of each process; the active party comes last."""
    first_step_s: float = 0.0
    """From the start of the processes."""
    first_step_cpu_s: float = 0.0
    ending_s: float = 0.0
    """From the last evaluation to the exit of the last process."""
    ending_cpu_s: float = 0.0
    threads_ms: Mapping[str, float] | None = None
    """CPU time of one step in each thread."""
    disk_mb: float = 0.0
    """All files of both parties."""


def table(work: Work) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(work.rows, work.features, generator=generator)
    return x, (x[:, 0] + torch.randn(work.rows, generator=generator) > 1).float()


def monolithic(work: Work) -> Cost:
    """Train the whole model in this process as parties do; the first epoch does not count."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bottom = (nn.Linear(work.features, 256), nn.ReLU(), nn.Linear(256, CUT), nn.ReLU())
    model = nn.Sequential(*bottom, nn.Linear(CUT, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    x, labels = table(work)
    for epoch in range(work.epochs):
        if epoch == 1:
            wall, cpu = time.perf_counter(), time.process_time()
        for rows in torch.split(torch.randperm(work.training), BATCH):
            optimizer.zero_grad()
            predicted = model(x.index_select(0, rows))[:, 0]
            loss = binary_cross_entropy_with_logits(predicted, labels.index_select(0, rows))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            model(x[work.training :])
    steps = -(-work.training // BATCH) * (work.epochs - 1)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(steps / wall_s, 1e3 * cpu_s / steps, (status_mib("self", "VmHWM"),))


def write_settings(folder: Path, work: Work) -> None:
    x, labels = table(work)
    ids = np.array([f"{row:09d}" for row in range(work.rows)])
    write_columns(folder / "active.parquet", id=ids, label=labels.numpy().astype(np.int64))
    write_columns(folder / "passive.parquet", id=ids, x=x.numpy())
    contract = {
        "run_name": "whole",
        "cut_shape": [128],
        "batch_size": BATCH,
        "epochs": work.epochs,
        "split": {"kind": "hash", "train": 0.9, "test": 0.1},
    }
    own: dict[str, dict[str, Any]] = {
        "active": {"top_model": {"kind": "mlp", "hidden": [64]}},
        "passive": {"bottom_model": {"kind": "mlp", "hidden": [256], "output_activation": "relu"}},
    }
    columns: dict[str, dict[str, Any]] = {
        "active": {"label_column": "label"},
        "passive": {"features": {"numeric": "x*"}},
    }
    for party, values in own.items():
        values |= {"contract": "contract.yaml", "device": "cpu", "torch_threads": 1}
        values["optimizer"] = {"kind": "adam", "learning_rate": 0.001}
        source = {"kind": "parquet", "path": f"{party}.parquet"}
        values["data"] = {"source": source, "id_column": "id", **columns[party]}
    for name, values in {"contract": contract, **own}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    make_certificates(folder / "certificates", NAMES)


def cost_of_run(
    folder: Path,
    work: Work,
    line: Line | None,
    *,
    defense: str | None = None,
    depth: int = 1,
) -> Cost:
    """Run both parties as commands, and watch the active party's metrics and both processes.

    Without a defense nothing is audited, and no party has a status page.
    """
    port = free_port()
    own: dict[str, dict[str, Any]] = {
        "passive": {"adversary": None},
        "active": {"listen": f"127.0.0.1:{port}", **BARE},
    }
    if defense is not None:
        own["passive"] = {"status": f"127.0.0.1:{free_port()}"}
        own["active"] |= {"status": f"127.0.0.1:{free_port()}", "defense": {"name": defense}}
        del own["active"]["leak_monitor"]
    with tempfile.TemporaryDirectory() as runs, between(port, line) as nearest:
        own["passive"]["connect"] = f"127.0.0.1:{nearest}"
        for party, values in own.items():
            settings = yaml.safe_load((folder / f"{party}.yaml").read_text()) | values
            settings["security"] = security(folder, party)
            (folder / f"{party}-now.yaml").write_text(yaml.safe_dump(settings))
        begun, ended_before_s = time.monotonic(), cpu_of_ended()
        options = ["--runs", runs, f"--set=contract.pipeline_depth={depth}"]
        parties = {party: start(party, folder / f"{party}-now.yaml", options) for party in own}
        try:
            metrics = Path(runs) / "whole" / "active" / "metrics.jsonl"
            found = watch(parties, metrics, begun, work.epochs)
            ending, spent_s = time.monotonic(), cpu_of(parties)
            most = wait_for_end(parties)
            written = sum(path.stat().st_size for path in Path(runs).rglob("*") if path.is_file())
        finally:
            for process in parties.values():
                process.kill()
    return found._replace(
        ending_s=time.monotonic() - ending,
        ending_cpu_s=cpu_of_ended() - ended_before_s - spent_s,
        memory_mib=most,
        disk_mb=written / 1e6,
    )


def security(folder: Path, party: str) -> dict[str, str]:
    own = PartyFolder(folder / "certificates" / party)
    files = {"certificate": own.certificate, "private_key": own.private_key}
    return {name: str(path) for name, path in (files | {"authority": own.authority}).items()}


def start(party: str, settings: Path, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    program = f"splitveil.{party}_party"
    command = [sys.executable, "-m", program, "run", str(settings), "-qq"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *options], env=environment, stdout=subprocess.DEVNULL)


def watch(parties: Parties, metrics: Path, begun: float, epochs: int) -> Cost:
    """Follow a run's metrics until its last epoch has ended."""
    first = (0.0, 0.0)
    ends: list[tuple[float, float, int]] = []
    threads: list[dict[str, float]] = []
    steps = 0
    for text in lines_of(metrics, parties):
        line = json.loads(text)
        if line.get("kind") == "train":
            steps += 1
            if steps == 1:
                first = time.monotonic() - begun, cpu_of(parties)
        if line.get("kind") == "test":
            ends.append((time.monotonic(), cpu_of(parties), steps))
            threads.append(cpu_by_thread(parties))
        if len(ends) == epochs:
            break
    (from_s, from_cpu_s, before), (to_s, to_cpu_s, after) = ends[0], ends[-1]
    rate = (after - before) / (to_s - from_s)
    cpu_ms = 1e3 * (to_cpu_s - from_cpu_s) / (after - before)
    threads_ms = {
        thread: 1e3 * (cpu_s - threads[0].get(thread, 0.0)) / (after - before)
        for thread, cpu_s in threads[-1].items()
    }
    return Cost(rate, cpu_ms, (), *first, threads_ms=threads_ms)


def lines_of(path: Path, parties: Parties) -> Iterator[str]:
    """Yield each line of a file as it is written.

    Raises:
        SystemExit: a party ended before the reader had what it needs.
    """
    while not path.exists() and all(process.poll() is None for process in parties.values()):
        time.sleep(POLL_S)
    with path.open() as file:
        rest = ""
        while True:
            *whole, rest = (rest + file.read()).split("\n")
            yield from whole
            if not whole and any(process.poll() for process in parties.values()):
                raise SystemExit("a party failed")
            time.sleep(POLL_S)


def cpu_of(parties: Parties) -> float:
    """Return the CPU seconds of running processes, with those of threads that have ended."""
    ticks = 0
    for process in parties.values():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / CLOCK_TICKS


def cpu_by_thread(parties: Parties) -> dict[str, float]:
    """Return the CPU seconds of each live thread; that of the attacks has a niceness."""
    found = {}
    for party, process in parties.items():
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            name, _, rest = (task / "stat").read_text().rpartition(") ")
            fields = rest.split()
            thread = f"{party} {name.replace('(', '')}, nice {fields[16]}"
            found[thread] = sum(map(int, fields[11:13])) / CLOCK_TICKS
    return found


def cpu_of_ended() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def wait_for_end(parties: Parties) -> tuple[float, ...]:
    """Wait until all processes have ended, and return the largest memory of each, in MiB.

    Raises:
        SystemExit: one of them failed.
    """
    most = dict.fromkeys(parties, 0.0)
    while True:
        is_over = all(process.poll() is not None for process in parties.values())
        for party, process in parties.items():
            if process.returncode:  # the other one would wait for it
                raise SystemExit(f"the {party} party ended with exit code {process.returncode}")
            most[party] = max(most[party], status_mib(process.pid, "VmHWM"))
        if is_over:
            return tuple(most.values())
        time.sleep(POLL_S)


# ---- with the settings of init -------------------------------------------------------------------


def print_jobs(num_rows: int, rounds: int, line: Line | None, nvflare: str | None) -> None:
    """Print the time and CPU time of both parties, what they exchange, and their memory."""
    lines = {"": None} | ({", slow line": line} if line else {})
    in_one = {"joined": [sys.executable, "-c", JOINED]}
    if nvflare:
        in_one["NVIDIA FLARE"] = [nvflare, "-c", "import nvflare_job; nvflare_job.main()"]
    found: dict[str, list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare("default_credit", folder, Rows(1, training=round(0.8 * num_rows)))
        make_certificates(folder / "certificates", NAMES)
        for _ in range(rounds):
            for mode in ("PCA 64", "no defense"):
                for name, one in lines.items():
                    found.setdefault(mode + name, []).append(job(folder, one, MODES[mode]))
            for name, call in in_one.items():
                found.setdefault(name, []).append(program(call, folder))
            print({name: costs[-1] for name, costs in found.items()}, flush=True)
    print("\n| | wall, s | CPU s | MB on the wire | MiB, active | MiB, passive |")
    print("|---" * 6 + "|")
    for mode, measured in found.items():
        middle = [statistics.median(values) for values in zip(*measured, strict=True)]
        print(f"| {mode} | {' | '.join(f'{x:.1f}' for x in middle)} |")


def job(folder: Path, line: Line | None, changed: Sequence[str]) -> tuple[float, ...]:
    """Run both parties with their files and changed settings; return what ``print_jobs`` prints."""
    port, carried = free_port(), multiprocessing.Value("Q")
    line = (line or Line())._replace(carried=carried)
    begun, ended_before_s = time.monotonic(), cpu_of_ended()
    with tempfile.TemporaryDirectory() as runs, between(port, line) as nearest:
        addresses = {
            "active": f"listen=127.0.0.1:{port}",
            "passive": f"connect=127.0.0.1:{nearest}",
        }
        parties = {}
        for party, address in addresses.items():
            chosen = [address, "contract.split={kind: column, column: split}"]
            chosen += [one for one in changed if is_of(one, party)]
            # What init limits: the figures compare runs, whatever they give away.
            chosen.append({"active": "run_budget=null", "passive": "max_exposure=null"}[party])
            options = ["--runs", runs, *(f"--set={one}" for one in chosen)]
            parties[party] = start(party, folder / f"{party}.yaml", options)
        try:
            memory_mib = wait_for_end(parties)
        finally:
            for process in parties.values():
                process.kill()
        took_s = time.monotonic() - begun
    return took_s, cpu_of_ended() - ended_before_s, carried.value / 1e6, *memory_mib


JOINED = """
import sys
import numpy as np
from pyarrow import csv
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

own, other = (csv.read_csv(path) for path in sys.argv[1:])
theirs = other.drop_columns("split")
table = own.join(theirs, "id", join_type="inner", right_suffix="_other")
labels, is_test = table["y"].to_numpy(), table["split"].to_numpy() == "test"
x = np.column_stack([column.to_numpy() for column in table.drop_columns(["id", "y", "split"])])
trees = HistGradientBoostingClassifier().fit(x[~is_test], labels[~is_test])
print(roc_auc_score(labels[is_test], trees.decision_function(x[is_test])))
"""


def program(call: Sequence[str], folder: Path) -> tuple[float, ...]:
    """Run a program on both parties' files; return its seconds and CPU seconds."""
    begun, ended_before_s = time.monotonic(), cpu_of_ended()
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([*call, *(folder / file for file in FILES)], env=os.environ | paths, check=True)
    return time.monotonic() - begun, cpu_of_ended() - ended_before_s


# ---- the table ----------------------------------------------------------------------------------


def runs_in(folder: Path, work: Work, line: Line | None) -> dict[str, Callable[[], Cost]]:
    runs: dict[str, Callable[[], Cost]] = {"monolithic": partial(in_a_process, monolithic, work)}
    of_users = {"mtls": None, "shipped": "noisy_label", "marvell": "marvell", "none": "none"}
    for name, defense in of_users.items():
        run = partial(cost_of_run, folder, work, line, defense=defense)
        runs |= {name: run} | {f"{name}, depth {n}": partial(run, depth=n) for n in (2, 4)}
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of the runs")
    parser.add_argument("--threads", action="store_true", help="CPU time by thread, too")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of rows to compare")
    parser.add_argument("--init", type=int, metavar="ROWS", help="whole jobs of so many rows")
    parser.add_argument("--nvflare", metavar="PYTHON", help="an interpreter that has NVIDIA FLARE")
    for name, value in Work()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rtt", type=float, default=0.0, help="of the line, in milliseconds")
    parser.add_argument("--rate", type=float, default=1000.0, help="of the line, in Mbit/s")
    given = parser.parse_args()
    if given.epochs < 2:
        parser.error("--epochs: expected at least 2, of which the first is not measured")
    torch.set_num_threads(1)
    print_environment("grpcio")
    work = Work(given.rows, given.features, given.epochs)
    line = Line(given.rtt / 2e3, given.rate * 1e6 / 8) if given.rtt else None
    if given.init:
        print_jobs(given.init, given.rounds, line, given.nvflare)
        return
    if given.sizes:
        print_growth(work, given.sizes)
        return
    found: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_settings(Path(scratch), work)
        runs = runs_in(Path(scratch), work, line)
        for _ in range(given.rounds):
            for name in given.only or runs:
                found.setdefault(name, []).append(runs[name]())
                print(f"{name}: {found[name][-1].steps_per_s:.1f} steps/s", flush=True)
                by_thread = ((given.threads and found[name][-1].threads_ms) or {}).items()
                for thread, ms in sorted(by_thread, key=lambda one: -one[1])[:MOST_THREADS]:
                    print(f"  {ms:5.2f} ms/step: {thread}")
    middle = {name: median_of(costs) for name, costs in found.items()}
    print_table(middle)


def print_table(middle: dict[str, Cost]) -> None:
    print("\n| | steps/s | of monolithic | CPU ms/step ", end="")
    print("| first step | CPU | end | CPU | MiB active | MiB passive |")
    print("|---" * 10 + "|")
    whole = middle.get("monolithic")
    for name, cost in middle.items():
        cells = [
            f"{cost.steps_per_s:.1f}",
            f"{cost.steps_per_s / whole.steps_per_s:.2f}" if whole else "-",
            f"{cost.cpu_ms:.1f}",
            *(f"{getattr(cost, field):.1f} s" if cost.first_step_s else "-" for field in ENDS),
            *["-"] * (2 - len(cost.memory_mib)),
            *(f"{mib:.0f}" for mib in reversed(cost.memory_mib)),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def print_growth(work: Work, sizes: Sequence[int]) -> None:
    print("\n| rows | first step, s | CPU s | CPU ms/step | end, CPU s ", end="")
    print("| MiB active | MiB passive | MB on disk |")
    print("|---" * 8 + "|")
    fields = ("first_step_s", "first_step_cpu_s", "cpu_ms", "ending_cpu_s")
    before: tuple[float, ...] = ()
    for rows in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            in_a_process(write_settings, Path(scratch), work._replace(rows=rows))
            cost = cost_of_run(Path(scratch), work._replace(rows=rows), None, defense="noisy_label")
        parts = (getattr(cost, name) for name in fields)
        now = (rows, *parts, *reversed(cost.memory_mib), cost.disk_mb)
        print("|", " | ".join(f"{x:,.4g}" for x in now), "|", flush=True)
        if before:
            grown = [math.log(x / y) for x, y in zip(now, before, strict=True)]
            print("| exponent |", " | ".join(f"{x / grown[0]:.2f}" for x in grown[1:]), "|")
        before = now


def median_of(costs: list[Cost]) -> Cost:
    fields = ("steps_per_s", "cpu_ms", *ENDS)
    middle = {field: statistics.median(getattr(cost, field) for cost in costs) for field in fields}
    memory = zip(*(cost.memory_mib for cost in costs), strict=True)
    return Cost(**middle, memory_mib=tuple(statistics.median(mib) for mib in memory))


if __name__ == "__main__":
    main()
