"""Runs of the real processes that several tests examine."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.programs import run_program

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


def run_locally(runs_dir: Path, example: str, *options: str) -> LocalRun:
    """Run an example as a user would, two processes and all."""
    command = [sys.executable, "-m", "splitveil", "local", "-v", f"deploy/examples/{example}"]
    done = run_program(*command, "--runs", str(runs_dir), *options)
    return LocalRun(done.returncode, done.stdout, runs_dir)


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Return breast_cancer without defense and with marvell, six epochs each."""
    return run_locally(
        tmp_path_factory.mktemp("runs"),
        "breast_cancer",
        *("--set", "contract.epochs=6", *SAME_SPLIT),
        *("--defense", "none", "marvell:strength.power_ratio=4"),
    )
