"""What needs no party works on systems that lack what a party needs, such as Windows and macOS."""

import subprocess
import sys
from pathlib import Path

_LACKING = """
import os, sys

for name in ("fcntl", "resource", "termios"):
    sys.modules[name] = None

def no_link(*_, **__):
    raise OSError("this system makes no links")

os.link = os.symlink = no_link
for name in ("sched_getaffinity", "O_NOFOLLOW", "O_CLOEXEC", "geteuid"):
    delattr(os, name)
"""
_WORK = """
import numpy as np
from splitveil import audit, plan, simulate
from splitveil.command.program import main

draw = np.random.default_rng(0)
labels = np.arange(200) % 2
columns = draw.normal(size=(200, 2)) + labels[:, None]
(run,) = simulate(
    active={"label": labels},
    passive={"a": columns[:, 0], "b": columns[:, 1]},
    defense="noisy_label",
    attacks=["norm"],
    settings={"contract.epochs": 1},
    threads=1,
    runs="runs",
)
assert run.has_ended and run.test_auc is not None
assert "<html" in run.report().read_text(encoding="utf-8")
assert "noisy_label" in str(plan("breast_cancer", defense="noisy_label"))
assert audit(columns, labels, attacks=["norm"]).rows == 200
settings = str(next(run.path.parent.glob("settings-*/active.yaml")))
try:
    main(["run", settings])
except SystemExit as error:
    assert error.code == 2, error.code
"""


def test_only_parties_need_locks_limits_cores_and_links(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LACKING + _WORK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len([line for line in said if "a party needs Linux" in line]) == 1, done.stderr
