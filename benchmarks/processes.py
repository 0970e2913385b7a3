"""What running processes have taken: CPU time, also by thread, and their largest memory."""

import os
import resource
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.02

Parties = dict[str, "subprocess.Popen[bytes]"]


def cpu_of(parties: Parties) -> float:
    """Return the CPU seconds of running processes, with those of threads that have ended."""
    return sum(seconds_in(Path(f"/proc/{process.pid}/stat")) for process in parties.values())


def cpu_of_ended() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def cpu_by_thread(parties: Parties) -> dict[str, float]:
    """Return CPU seconds by party and name of the thread."""
    found: dict[str, float] = defaultdict(float)
    for party, process in parties.items():
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            named = f"{party} {(task / 'comm').read_text().strip()}"
            if task.name == str(process.pid):
                named = f"{party} main"
            found[named] += seconds_in(task / "stat")
    return found


def seconds_in(stat: Path) -> float:
    """Return the CPU seconds in a process's or thread's file under /proc."""
    rest = stat.read_text().rpartition(") ")[2]
    return sum(map(int, rest.split()[11:13])) / CLOCK_TICKS


def most_mib(process: int | str = "self") -> float:
    """Return the largest resident set that a process has had; 0 if it is gone.

    Not ru_maxrss: Linux carries the parent's peak over into a new program.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def wait_for_end(parties: Parties, within_s: float) -> dict[str, float]:
    """Wait until all processes have ended, and return the largest memory of each, in MiB.

    Raises:
        SystemExit: one of them failed, or takes longer.
    """
    most = dict.fromkeys(parties, 0.0)
    deadline = time.monotonic() + within_s
    while any(process.poll() is None for process in parties.values()):
        if time.monotonic() > deadline:
            raise SystemExit(f"the parties did not end within {within_s:g} s")
        for party, process in parties.items():
            most[party] = max(most[party], most_mib(process.pid))
        time.sleep(POLL_S)
    for party, process in parties.items():
        if process.returncode:
            raise SystemExit(f"the {party} party ended with exit code {process.returncode}")
    return most


def lines_of(path: Path, parties: Parties) -> Iterator[str]:
    """Yield each line of a file as it is written.

    Raises:
        SystemExit: a party failed before the file was there.
    """
    while not path.exists():
        if any(process.poll() for process in parties.values()):
            raise SystemExit("a party ended before the first step")
        time.sleep(POLL_S)
    with path.open() as file:
        rest = ""
        while True:
            rest += file.read()
            *whole, rest = rest.split("\n")
            yield from whole
            time.sleep(POLL_S)
