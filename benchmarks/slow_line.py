"""How much of a slow line does a run use, at each pipeline depth?

    python -m benchmarks.slow_line --address 10.77.0.1:50061 --rtt 40 --rate 100 \
        --line 'COMMAND that runs {active} on one host and {passive} on the other'

Runs `splitveil active run` and `splitveil passive run` with mutual TLS, the defense ``none`` and no
audits: the split MLP 64-256-128 | 128-64-1 of `benchmarks.whole_run`, batch 1,024, one torch
thread per process. ``--line`` is a shell command with ``{active}`` and ``{passive}`` where the
parties' commands stand, quoted as one word each; it makes the line (network namespaces with ``tc
netem``, two containers, ssh). Without it both run here, over the loopback.

A figure is that of the training steps of whole epochs after the first. Beside it is what the line
allows: with one batch under way, the larger of the computation and a round trip and both tensors;
with several, the larger of the computation and one tensor. The computation is the time of a step
over the loopback, in the same run. ``bare gloo`` is the same two halves on the same line, as many
batches under way, with nothing but `torch.distributed`'s send and receive between them
(`benchmarks.bare_gloo`). The held-out rows' time is that between an epoch's last step and
the next one's first.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.bare_gloo import BATCH, CUT, free_port
from benchmarks.environment import print_environment
from benchmarks.whole_run import NAMES, NO_AUDITS, security, write_settings
from splitveil.deploy.authority import make_certificates

DEPTHS = (1, 2, 4)
BYTES = {"float32": 4, "bfloat16": 2}
TIMEOUT_S = 900
HEADINGS = (
    "tensors",
    "depth",
    "steps/s",
    "the line allows",
    "share",
    "bare gloo",
    "of bare gloo",
    "loopback",
    "between epochs",
)


class Line(NamedTuple):
    """Where two parties run."""

    command: str | None
    """With ``{active}`` and ``{passive}``; None for the loopback."""
    address: str

    def run(self, commands: dict[str, str]) -> None:
        """Run both parties' commands there."""
        if self.command is None:
            both = f"{commands['active']} & {commands['passive']}; wait $!"
        else:
            quoted = {party: shlex.quote(command) for party, command in commands.items()}
            both = self.command.format(**quoted)
        shell = ["/bin/sh", "-c", both]
        subprocess.run(shell, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


class Speed(NamedTuple):
    """Of the epochs after the first."""

    step_s: float
    between_s: float
    """From an epoch's last step to the next one's first: evaluation and checkpoint."""


def run(folder: Path, line: Line, epochs: int, depth: int, dtype: str) -> Speed:
    """Run both parties, and read the times of their steps."""
    with tempfile.TemporaryDirectory() as scratch:
        own: dict[str, dict[str, Any]] = {
            "active": {"listen": line.address, "defense": {"name": "none"}, **NO_AUDITS},
            "passive": {"connect": line.address, "adversary": None},
        }
        commands = {}
        for party, values in own.items():
            settings = yaml.safe_load((folder / f"{party}.yaml").read_text()) | values
            settings["security"] = security(folder, party)
            now = folder / f"{party}-now.yaml"
            now.write_text(yaml.safe_dump(settings))
            code = f"from splitveil.{party}_party.command import main; main()"
            contract = {"epochs": epochs, "pipeline_depth": depth, "cut_dtype": dtype}
            sets = [f"--set=contract.{name}={value}" for name, value in contract.items()]
            call = ["env", "OMP_NUM_THREADS=1", sys.executable, "-c", code, "run", str(now)]
            call += [*sets, "--runs", scratch, "-qq"]
            commands[party] = shlex.join(call)
        line.run(commands)
        return speed_of(Path(scratch) / "whole" / "active" / "metrics.jsonl")


def bare(line: Line, epochs: int, depth: int, dtype: str) -> float:
    """Return the seconds of a step of the same halves with nothing but gloo between them."""
    with tempfile.TemporaryDirectory() as scratch:
        printed = Path(scratch) / "step_s"
        call = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "benchmarks.bare_gloo"]
        call += [f"--address={line.address}", f"--ahead={depth - 1}", f"--dtype={dtype}"]
        call += [f"--epochs={epochs}", f"--write={printed}"]
        ranks = {"active": 1, "passive": 0}
        line.run({party: shlex.join([*call, f"--rank={rank}"]) for party, rank in ranks.items()})
        return float(printed.read_text())


def speed_of(metrics: Path) -> Speed:
    """Read the speed of a run's later epochs from its metrics."""
    times: dict[int, list[float]] = {}
    for text in metrics.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "train":
            times.setdefault(line["epoch"], []).append(line["time_s"])
    epochs = [times[epoch] for epoch in sorted(times)]
    steps = [(of[-1] - of[0]) / (len(of) - 1) for of in epochs[1:]]
    between = [after[0] - of[-1] for of, after in pairwise(epochs)]
    return Speed(statistics.median(steps), statistics.median(between))


def allowed_s(given: argparse.Namespace, depth: int, dtype: str, compute_s: float) -> float:
    """Return the time of a step that the line allows."""
    tensor_s = BATCH * CUT * BYTES[dtype] * 8 / (given.rate * 1e6)
    under_way_s = given.rtt / 1e3 + 2 * tensor_s
    allowed: float = max(compute_s, under_way_s / depth, tensor_s)
    return allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--line", help="shell command with {active} and {passive}")
    parser.add_argument("--address", help="HOST:PORT at which the active party listens")
    parser.add_argument("--rtt", type=float, default=40.0, help="of the line, in milliseconds")
    parser.add_argument("--rate", type=float, default=100.0, help="of the line, in Mbit/s")
    parser.add_argument("--epochs", type=int, default=3, help="at least 2")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--dtypes", nargs="+", choices=BYTES, default=list(BYTES))
    given = parser.parse_args()
    if (given.line is None) != (given.address is None):
        parser.error("--line and --address go together")
    print_environment("grpcio")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_settings(folder)
        make_certificates(folder / "certificates", NAMES)
        print(f"| {' | '.join(HEADINGS)} |")
        print("|---" * len(HEADINGS) + "|")
        for dtype in given.dtypes:
            for depth in given.depths:
                local = run(folder, here(), given.epochs, depth, dtype)
                line = here() if given.line is None else Line(given.line, given.address)
                found = run(folder, line, given.epochs, depth, dtype)
                gloo_s = bare(line, given.epochs, depth, dtype)
                allowed = allowed_s(given, depth, dtype, local.step_s)
                print(
                    f"| {dtype} | {depth} | {1 / found.step_s:.1f} | {1 / allowed:.1f} "
                    f"| {allowed / found.step_s:.2f} | {1 / gloo_s:.1f} "
                    f"| {gloo_s / found.step_s:.2f} | {1 / local.step_s:.1f} "
                    f"| {found.between_s:.2f} s |",
                    flush=True,
                )


def here() -> Line:
    return Line(None, f"127.0.0.1:{free_port()}")


if __name__ == "__main__":
    main()
