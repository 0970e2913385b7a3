"""The machine of a benchmark, what processes hold on it, and the spread of figures."""

import multiprocessing
import platform
import socket
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from splitveil.experiments.execution import machine


def print_environment(*packages: str) -> None:
    """Print machine, cores, thread settings and versions."""
    print(f"machine: {machine()} available")
    print(f"python {platform.python_version()}, torch threads {torch.get_num_threads()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", *packages)))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return median and the range from the 5 % to the 95 % quantile."""
    ordered = sorted(values)
    low, high = ordered[int(0.05 * len(ordered))], ordered[int(0.95 * (len(ordered) - 1))]
    return f"{statistics.median(ordered):.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def in_a_process(action: Callable[..., Any], *given: Any) -> Any:
    """Return what a function returns in a new process, whose memory begins from nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(action, *given).result()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def status_mib(process: int | str, field: str) -> float:
    """Return a field of a process's status, such as its resident set; 0 if it is gone.

    Not ru_maxrss: Linux carries the parent's peak over into a new program.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)
