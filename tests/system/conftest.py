"""Runs of the real processes that several tests examine."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.support.inference import Trained, train, write_wide_deep
from tests.support.programs import ROOT, run_program
from tests.support.runs import write_several

SAME_SPLIT = (
    *("active.insecure_nonce_seed=1", "passive.insecure_nonce_seed=2"),
    *("active.torch_threads=1", "passive.torch_threads=1"),
)
"""Settings under which every run splits and orders the rows alike, so that no bound flickers, and
sums in one order, however many cores there are."""


needs_data = pytest.mark.skipif(
    "SPLITVEIL_DATA" not in os.environ, reason="SPLITVEIL_DATA names no folder with data sets"
)


class LocalRun(NamedTuple):
    exit_code: int
    output: str
    runs_dir: Path

    def summary(self, run_name: str, party: str) -> Mapping[str, Any]:
        text = (self.runs_dir / run_name / party / "summary.json").read_text(encoding="utf-8")
        summary: Mapping[str, Any] = json.loads(text)
        return summary


def run_locally(
    runs_dir: Path, example: str, *options: str, command: Literal["local", "demo"] = "local"
) -> LocalRun:
    """Run an example as a user would, two processes and all."""
    words = ["demo", example] if command == "demo" else ["local", f"deploy/examples/{example}"]
    program = (sys.executable, "-m", "splitveil", *words, "-v", "--runs", str(runs_dir))
    done = run_program(*program, *options)
    return LocalRun(done.returncode, done.stdout, runs_dir)


EXAMPLES = ROOT / "deploy" / "examples"
SHORT = ("contract.epochs=2", "insecure_nonce_seed=4")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return what trains a small example of these tests, or a shipped one with few epochs, once."""

    @cache
    def of(name: str) -> Trained:
        folder = tmp_path_factory.mktemp(name)
        if name.startswith("three_parties "):
            write_several(folder)
            return train(folder, folder / "runs", f"contract.aggregation={name.split()[1]}")
        if name == "tabular":
            write_wide_deep(folder, kind="tabular")
            return train(folder, folder / "runs")
        return train(EXAMPLES / name, folder / "runs", *SHORT)

    return of


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Return breast_cancer without defense and with marvell, six epochs each."""
    return run_locally(
        tmp_path_factory.mktemp("runs"),
        "breast_cancer",
        *("--set", "contract.epochs=6", *SAME_SPLIT),
        *("--defense", "none", "marvell:strength.power_ratio=4"),
    )
