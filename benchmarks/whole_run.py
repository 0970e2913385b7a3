"""How fast is a whole run of two processes, beside one process and beside bare sockets?

    python -m benchmarks.whole_run [--rounds 3] [--only shipped mtls] [--threads]

A split MLP 64-256-128 | 128-64-1 on 67,000 synthetic rows, batch 1,024, Adam, float32, one torch
thread per process. Each round runs, one after the other:

- ``monolithic``: the whole model in one process;
- ``gloo``: two processes, `torch.distributed` send and receive on the loopback, nothing else;
- ``gloo ahead``: the same, the passive party one batch ahead;
- ``insecure``, ``mtls``: `splitveil active run` and `splitveil passive run` as a user calls them,
  with the defense ``none`` and without audits;
- ``shipped``: mutual TLS, ``marvell`` and the default audits;
- ``..., depth 2``: the same with ``pipeline_depth: 2``;
- ``shipped without ...``: the same with one part left out.

A figure is that of whole epochs after the first: steps, the evaluation of the held-out rows, and
whatever lies between two epochs. CPU time is that of both processes together, also until the first
step and from the last evaluation to the end. With ``--threads`` the threads that took most of it
follow. Memory is the largest resident set (VmHWM) of each process over its whole life, and its
ratio is that to ``monolithic``, the 16.4 MiB of features taken off where they are. Ratios are those
of medians over the rounds. Aims: as shipped at least 0.80 of ``monolithic`` and 0.70 of ``gloo``;
``mtls`` at least ``monolithic``; CPU per step at most 1.35 of gloo's (insecure), 1.6 (mtls); memory
at most 1.25 of ``monolithic``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from benchmarks.bare_gloo import (
    BATCH,
    EPOCHS,
    FEATURES,
    MARKS,
    ROWS,
    STEPS,
    cost_of_mark,
    free_port,
    table,
)
from benchmarks.environment import print_environment
from benchmarks.processes import (
    Parties,
    cpu_by_thread,
    cpu_of,
    cpu_of_ended,
    lines_of,
    wait_for_end,
)
from splitveil.deploy.authority import PartyFolder, make_certificates

NO_AUDITS: dict[str, Any] = {"leak_monitor": None}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "defense": {"defense": {"name": "none"}},
    "audits": NO_AUDITS,
    "transcript": {"transcript": False},
}
NAMES = {"active": "active.splitveil", "passive": "passive.splitveil"}
ENDS = ("first_step_s", "first_step_cpu_s", "ending_s", "ending_cpu_s")
TABLE_MIB = ROWS * FEATURES * 4 / 2**20
"""The features; the one process and the passive party have them."""


class Cost(NamedTuple):
    """What whole epochs cost."""

    steps_per_s: float
    cpu_ms: float
    """Of all processes, for one step."""
    first_step_s: float = 0.0
    """From the start of the processes to the first step."""
    ending_s: float = 0.0
    """From the last evaluation to the exit of the last process."""
    threads: Mapping[str, float] = MappingProxyType({})
    """CPU milliseconds for one step, by party and thread."""
    first_step_cpu_s: float = 0.0
    """Of both processes, until the first step."""
    ending_cpu_s: float = 0.0
    """Of both processes, from the last evaluation."""
    memory_mib: tuple[float, ...] = ()
    """The largest resident set of each process; the active party or rank 1 comes last."""


def cost_of(mark: str) -> Cost:
    taken = cost_of_mark(mark)
    steps = STEPS * (EPOCHS - 1)
    wall_s, cpu_s = max(of.wall_s for of in taken), sum(of.cpu_s for of in taken)
    memory = tuple(of.memory_mib for of in taken)
    return Cost(steps / wall_s, 1e3 * cpu_s / steps, memory_mib=memory)


def write_settings(folder: Path) -> None:
    x, labels = table()
    ids = np.array([f"{row:09d}" for row in range(ROWS)])
    np.savez(folder / "active.npz", id=ids, label=labels.numpy().astype(np.int64))
    np.savez(folder / "passive.npz", id=ids, x=x.numpy())
    contract = {
        "run_name": "whole",
        "cut_shape": [128],
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "split": {"kind": "hash", "train": 0.9, "test": 0.1},
    }
    common = {"contract": "contract.yaml", "device": "cpu", "torch_threads": 1}
    active = common | {
        "data": {
            "source": {"kind": "npz", "path": "active.npz"},
            "id_column": "id",
            "label_column": "label",
        },
        "top_model": {"kind": "mlp", "hidden": [64]},
        "optimizer": {"kind": "adam", "learning_rate": 0.001},
    }
    passive = common | {
        "data": {
            "source": {"kind": "npz", "path": "passive.npz"},
            "id_column": "id",
            "features": {"numeric": "x*"},
        },
        "bottom_model": {"kind": "mlp", "hidden": [256], "output_activation": "relu"},
        "optimizer": {"kind": "adam", "learning_rate": 0.001},
    }
    for name, values in (("contract", contract), ("active", active), ("passive", passive)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def cost_of_run(
    folder: Path, *, secure: bool, active: dict[str, Any], audited: bool, depth: int
) -> Cost:
    """Run both parties as commands, and watch the active party's metrics and both processes."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch)
        values: dict[str, dict[str, Any]] = {
            "active": {"listen": address, **active},
            "passive": {"connect": address} | ({} if audited else {"adversary": None}),
        }
        for party, own in values.items():
            settings = yaml.safe_load((folder / f"{party}.yaml").read_text()) | own
            settings["security"] = security(folder, party) if secure else {"mode": "insecure"}
            (folder / f"{party}-now.yaml").write_text(yaml.safe_dump(settings))
        begun, ended_before_s = time.monotonic(), cpu_of_ended()
        parties = {party: start(party, folder, runs, depth) for party in values}
        try:
            watched = watch(parties, runs / "whole" / "active" / "metrics.jsonl")
            ending, spent_s = time.monotonic(), cpu_of(parties)
            most = wait_for_end(parties, 60)
        finally:
            for process in parties.values():
                process.kill()
        return watched(begun)._replace(
            ending_s=time.monotonic() - ending,
            ending_cpu_s=cpu_of_ended() - ended_before_s - spent_s,
            memory_mib=(most["passive"], most["active"]),
        )


def security(folder: Path, party: str) -> dict[str, str]:
    own = PartyFolder(folder / "certificates" / party)
    files = {"certificate": own.certificate, "private_key": own.private_key}
    return {name: str(path) for name, path in (files | {"authority": own.authority}).items()}


def start(party: str, folder: Path, runs: Path, depth: int) -> subprocess.Popen[bytes]:
    code = f"from splitveil.{party}_party.command import main; main()"
    command = [sys.executable, "-c", code, "run", str(folder / f"{party}-now.yaml")]
    command += ["--set", f"contract.pipeline_depth={depth}"]
    return subprocess.Popen(
        [*command, "--runs", str(runs), "-qq"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


class Watched(NamedTuple):
    """What was seen of a run's epochs."""

    first_step_at: float
    first_step_cpu_s: float
    moments: list[float]
    """Ends of epochs."""
    cpu: list[dict[str, float]]
    """CPU seconds by party and thread, at these moments."""

    def __call__(self, begun: float) -> Cost:
        steps = STEPS * (len(self.moments) - 1)
        before, after = self.cpu[0], self.cpu[-1]
        threads = {
            name: 1e3 * (total - before.get(name, 0.0)) / steps for name, total in after.items()
        }
        rate = steps / (self.moments[-1] - self.moments[0])
        first_step_s = self.first_step_at - begun
        cpu_ms = sum(threads.values())
        return Cost(rate, cpu_ms, first_step_s, 0.0, threads, self.first_step_cpu_s)


def watch(parties: Parties, metrics: Path) -> Watched:
    """Follow a run's metrics until its last epoch has ended."""
    seen = Watched(0.0, 0.0, [], [])
    for line in lines_of(metrics, parties):
        kind = json.loads(line).get("kind")
        if kind == "train" and not seen.first_step_at:
            seen = seen._replace(first_step_at=time.monotonic(), first_step_cpu_s=cpu_of(parties))
        if kind == "test":
            seen.moments.append(time.monotonic())
            seen.cpu.append(cpu_by_thread(parties))
        if len(seen.moments) == EPOCHS:
            break
    return seen


# ---- the table ----------------------------------------------------------------------------------


Run = Callable[[], Cost]


@contextmanager
def prepared() -> Iterator[dict[str, Run]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_settings(folder)
        make_certificates(folder / "certificates", NAMES)
        none = NO_AUDITS | {"defense": {"name": "none"}}
        marvell = {"defense": {"name": "marvell"}}

        def run(
            active: dict[str, Any], *, secure: bool = True, audited: bool = True, depth: int = 1
        ) -> Run:
            return partial(
                cost_of_run, folder, secure=secure, active=active, audited=audited, depth=depth
            )

        yield {
            **{name: partial(cost_of, name) for name in MARKS},
            "insecure": run(none, secure=False, audited=False),
            "mtls": run(none, audited=False),
            "mtls, depth 2": run(none, audited=False, depth=2),
            "shipped": run(marvell),
            "shipped, depth 2": run(marvell, depth=2),
            **{
                f"shipped without {part}": run(marvell | without, audited=part != "audits")
                for part, without in LEFT_OUT.items()
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of the runs")
    parser.add_argument("--threads", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_environment("grpcio")
    found: dict[str, list[Cost]] = {}
    with prepared() as runs:
        chosen = [name for name in runs if not given.only or name in given.only]
        for _ in range(given.rounds):
            for name in chosen:
                found.setdefault(name, []).append(runs[name]())
                print(f"{name}: {found[name][-1].steps_per_s:.1f} steps/s", flush=True)
    middle = {name: median_of(costs) for name, costs in found.items()}
    print_speed(middle)
    print_memory(middle)
    if given.threads:
        for name, costs in found.items():
            busiest = sorted(costs[-1].threads.items(), key=lambda item: -item[1])
            for thread, cpu_ms in busiest[:8]:
                print(f"{name}: {thread} {cpu_ms:.2f} ms/step")


def print_speed(middle: dict[str, Cost]) -> None:
    heads = ("steps/s", "of monolithic", "of gloo", "CPU ms/step", "of gloo's")
    print(f"\n| | {' | '.join(heads)} | first step | CPU | end | CPU |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    whole, bare = middle.get("monolithic"), middle.get("gloo")
    for name, cost in middle.items():
        cells = [
            f"{cost.steps_per_s:.0f}",
            f"{cost.steps_per_s / whole.steps_per_s:.2f}" if whole else "-",
            f"{cost.steps_per_s / bare.steps_per_s:.2f}" if bare else "-",
            f"{cost.cpu_ms:.1f}",
            f"{cost.cpu_ms / bare.cpu_ms:.2f}" if bare else "-",
            *(f"{getattr(cost, field):.1f} s" if cost.first_step_s else "-" for field in ENDS),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def print_memory(middle: dict[str, Cost]) -> None:
    print("\n| | MiB active | of monolithic | MiB passive | of monolithic |")
    print("|---|---|---|---|---|")
    whole = middle.get("monolithic")
    for name, cost in middle.items():
        cells: list[str] = []
        # The active party has no features; the one process of monolithic has, and comes first.
        for place, mib in enumerate(cost.memory_mib):
            own = mib - (0 if place else TABLE_MIB)
            ratio = f"{own / (whole.memory_mib[0] - TABLE_MIB):.2f}" if whole else "-"
            cells = [f"{mib:.0f}", ratio, *cells]
        cells = [*["-"] * (4 - len(cells)), *cells]
        print(f"| {name} | {' | '.join(cells)} |")


def median_of(costs: list[Cost]) -> Cost:
    fields = ("steps_per_s", "cpu_ms", *ENDS)
    middle = {field: statistics.median(getattr(cost, field) for cost in costs) for field in fields}
    memory = zip(*(cost.memory_mib for cost in costs), strict=True)
    return Cost(**middle, memory_mib=tuple(statistics.median(mib) for mib in memory))


if __name__ == "__main__":
    main()
