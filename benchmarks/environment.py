"""The machine of a benchmark, and the spread of its figures."""

import multiprocessing
import platform
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
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
