"""Commands as a reader types them in a folder, and the two tables of the guide's pages."""

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from splitveil.command import program as splitveil
from splitveil.experiments import __main__ as experiments
from tests.support.waiting import HANGS_AFTER_S

MAINS: Mapping[str, Callable[[Sequence[str]], int | None]] = {
    "splitveil": splitveil.main,
    "python": lambda words: experiments.main(words[2:]),  # after -m and the module
}


def exit_code_of(main: Callable[[list[str]], object], *words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    assert isinstance(end.value.code, int)
    return end.value.code


class Done(NamedTuple):
    exit_code: int
    output: str


def called(folder: Path, text: str) -> Done:
    """Run a command in this process, because starting another takes seconds."""
    program, *arguments = shlex.split(text)
    printed = io.StringIO()
    with chdir(folder), redirect_stdout(printed), redirect_stderr(printed):
        try:
            exit_code = MAINS[program](arguments)
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else 0
    return Done(exit_code or 0, printed.getvalue())


def begun(folder: Path, text: str, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *shlex.split(text), *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> Done:
    output, _ = process.communicate(timeout=HANGS_AFTER_S)
    return Done(process.returncode, output)


def write_tables(folder: Path, rows: int = 1400, common: int = 1200) -> None:
    """Write the guide's two tables: its columns, its missing cells, ids in different orders."""
    draw = np.random.default_rng(1)
    clients = ["client_id;churned;tenure_months;monthly_fee;plan"]
    usage = ["customer,calls_day,calls_night,region,device"]
    for i in draw.permutation(rows):
        leaves = ("no", "yes")[draw.integers(2)]
        tenure = "NA" if i % 50 == 0 else str(draw.integers(1, 90))
        clients.append(f"c{i:05d};{leaves};{tenure};{draw.random() * 50:.2f};{'SML'[i % 3]}")
    for i in draw.permutation(rows) + rows - common:
        calls = f"{draw.integers(90)},{draw.integers(9)}"
        usage.append(f" c{i:05d},{calls},{'NESW'[i % 4]},{('a', 'b', 'NA')[i % 3]}")
    (folder / "clients.csv").write_text("\n".join(clients) + "\n", encoding="utf-8")
    (folder / "usage.csv").write_text("\n".join(usage) + "\n", encoding="utf-8")
