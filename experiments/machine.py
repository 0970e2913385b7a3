"""Describes the machine that a measurement was made on."""

import os
import platform
from pathlib import Path


def machine() -> str:
    """Return the processor and the number of cores that this process may use."""
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
