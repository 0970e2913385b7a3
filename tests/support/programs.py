"""Programs as a user starts them: in a process of their own, to their end."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.waiting import HANGS_AFTER_S

ROOT = Path(__file__).parents[2]


def run_program(
    *command: str,
    cwd: Path | None = ROOT,
    env: Mapping[str, str] | None = None,
    stderr: int | None = subprocess.STDOUT,
) -> subprocess.CompletedProcess[str]:
    """Run a command; what it says of errors stands in its output unless ``stderr`` differs."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=HANGS_AFTER_S,
        check=False,
    )
