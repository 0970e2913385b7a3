"""A party that trains keeps the memory that it frees, so that no step asks the system for it again;
one that only aligns returns it."""

import os
import subprocess
import sys

import pyarrow as pa
import pytest

from splitveil.common.party.freed_memory import (
    keep_freed_memory,
    return_freed_memory,
    share_heaps,
)

BLOCKS = """
import resource, sys
import numpy as np
from splitveil.common.party.freed_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(12 * 2**20, dtype=np.uint8) for _ in range(2)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, *later = (faults_of_a_step() for _ in range(11))
print(first, sum(later))
"""

glibc_only = pytest.mark.skipif(
    sys.platform != "linux" or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
    reason="needs glibc",
)


def faults(choice: str) -> tuple[int, int]:
    """Return the pages of the first step, and those of the ten steps after it."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS, choice],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    first, later = map(int, done.stdout.split())
    return first, later


@glibc_only
def test_later_steps_ask_for_no_memory_again() -> None:
    """Ten steps together ask for less than the first one; by default each asks for as much."""
    first, later = faults("kept")
    assert later < first / 2
    first, later = faults("returned")
    assert later > 5 * first


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_choice_of_the_environment_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
    assert not return_freed_memory({name: "1"})
    assert not share_heaps({name: "1"})
    assert not share_heaps({"MALLOC_ARENA_MAX": "1"})


TABLES = """
import resource
import pyarrow as pa
from pathlib import Path
from splitveil.common.party.freed_memory import return_freed_memory

def held():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x)
    return int(line.split()[1]) / 1024

return_freed_memory({})
pa.repeat(1, 10)  # the first one imports and starts much
before = held()
table = pa.repeat(1, 10_000_000)
print(held() - before)
del table
print(held() - before)
"""


@glibc_only
@pytest.mark.skipif(
    "jemalloc" not in pa.supported_memory_backends(), reason="needs an allocator that returns all"
)
def test_a_party_that_only_aligns_returns_the_memory_of_tables() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TABLES], capture_output=True, text=True, check=True
    )
    held, left = map(float, done.stdout.split())
    assert held > 70  # MiB of the numbers
    assert left < 20


HOLES = """
import numpy as np
from pathlib import Path
from splitveil.common.party.freed_memory import kept_once_built

def held():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x)
    return int(line.split()[1]) / 1024

def build(rows):
    # Blocks below the least size that is mapped, so that they lie in the heap among others.
    blocks = [np.ones(100_000, dtype=np.uint8) for _ in range(2000)]
    return blocks[::50]

before = held()
built = kept_once_built(build)(None)
print(len(built), held() - before)
"""


@glibc_only
def test_what_was_freed_before_a_training_is_returned() -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, env=environment
    )
    built, held = done.stdout.split()
    assert int(built) == 40
    assert float(held) < 40  # of 190 MiB, 4 of them in use


THREADS = """
import sys, threading
import numpy as np
from pathlib import Path
from splitveil.common.party.freed_memory import share_heaps

if sys.argv[1] == "shared":
    assert share_heaps({})

def heaps():
    # A heap of a thread begins at a multiple of 64 MiB, and reserves as much.
    starts = [int(x.split("-")[0], 16) for x in Path("/proc/self/maps").read_text().splitlines()]
    return sum(start % 2**26 == 0 for start in starts)

gate = threading.Barrier(6)

def use():
    gate.wait()
    blocks = [np.ones(50_000, dtype=np.uint8) for _ in range(50)]
    gate.wait()

before = heaps()
threads = [threading.Thread(target=use) for _ in range(5)]
for thread in threads:
    thread.start()
gate.wait()
gate.wait()
print(heaps() - before)
"""


@glibc_only
def test_threads_share_heaps() -> None:
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    found = [
        int(
            subprocess.run(
                [sys.executable, "-c", THREADS, choice],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stdout
        )
        for choice in ("shared", "own")
    ]
    assert found[0] <= 1
    assert found[1] > found[0]
