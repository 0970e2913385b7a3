"""Fills the table of what training costs on a GPU; run it on a host that has one.

    OMP_NUM_THREADS=1 python -m benchmarks.gpu [--device cpu] [--batches 1024 32768] [--repeats 50]

Four groups of rows, each with what is aimed at where something is:

- each defense alone at (32768, 128): milliseconds until the device has finished, and how often the
  host reads a value from a tensor (``float``, ``bool``, ``tolist`` and the like). Each such read
  lets the host wait for the device;
- both ways of a tensor of (32768, 128): by the copies that training uses, and by plain ones;
- a step of both halves of ``wide_deep`` with ``marvell`` in one process, without audits: reads for
  each step, and by how many bytes the memory of the device differs between an early and a late one;
- a run of ``wide_deep`` in two processes over localhost, as `benchmarks.published_models` measures
  it: steps/s at each batch size.

A figure is the median (5 % to 95 %). On the CPU every read counts, also of tensors that would be on
the CPU anyway, so that the reads are the most that there can be; rows that say nothing without a
GPU say so.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.defenses import SETTINGS, make_batch, time_ms
from benchmarks.environment import print_environment, spread
from benchmarks.published_models import Shape, measure, write_settings
from splitveil.active_party.defenses import DefenseContext, RawBatch
from splitveil.common.run.course import Batch
from splitveil.common.run.host_copies import to_device, to_host
from tests.runs import PassiveRecording, build_parties, run_in_process

SHAPE = (32768, 128)
MOST_MS, LEAST_STEPS_PER_S = 1.0, {1024: 300.0, 32768: 25.0}
READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "equal",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
)
NEEDS_GPU = "needs a GPU"
EARLY = 0.25
"""Share of the steps after which the memory of the device is taken as settled."""


class Row(NamedTuple):
    """One row of the table."""

    what: str
    found: str
    aim: str = ""

    def __str__(self) -> str:
        return f"| {self.what} | {self.found} | {self.aim} |"


class CountingReads(TorchFunctionMode):
    """Counts how often the host reads values of tensors on a device, in the thread that enters it.

    Args:
        device: the device; where it is the CPU, reads of all tensors count.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        reads = name in READS and args and isinstance(args[0], Tensor)
        if reads and args[0].device.type == self._device.type:
            self.counts[name.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def rows_of(device: torch.device, batches: Sequence[int], repeats: int) -> Iterator[Row]:
    """Measure everything, row by row."""
    yield from defenses(device, repeats)
    yield from copies(device, repeats)
    for batch in batches:
        yield from steps(device, batch)
    for batch in batches:
        yield speed(device, batch)


def judged(value: float, *, least: float = 0.0, most: float = float("inf"), on: str) -> str:
    """Return what was aimed at, and on a GPU whether it was met."""
    aim = f"at least {least:g}" if least else f"at most {most:g}"
    if on != "cuda":
        return f"{aim}: {NEEDS_GPU}"
    return f"{aim}: {'met' if least <= value <= most else 'not met'}"


def defenses(device: torch.device, repeats: int) -> Iterator[Row]:
    """Time each defense, and count its reads."""
    gradients, labels = make_batch(SHAPE, device)
    probabilities = torch.full_like(labels, 0.2)
    for name, settings in SETTINGS.items():
        defense = settings.build(DefenseContext(SHAPE[1:]))
        batch = RawBatch(gradients, labels, probabilities=probabilities)

        def defend() -> None:
            defense.defend(batch)  # noqa: B023 - called before the next one is built

        times_ms = time_ms(defend, device, repeats)
        middle = sorted(times_ms)[len(times_ms) // 2]
        aim = judged(middle, most=MOST_MS, on=device.type)
        yield Row(f"`{name}` at {SHAPE}, ms", spread(times_ms), aim)
        with CountingReads(device) as reads:
            defend()
        yield Row(f"`{name}` at {SHAPE}, reads", in_words(reads.counts))


def in_words(counts: Counter[str]) -> str:
    """Return a total and its parts."""
    parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{counts.total()} ({parts})" if parts else "0"


def copies(device: torch.device, repeats: int) -> Iterator[Row]:
    """Time both ways between host and device."""
    here, there = torch.randn(SHAPE), torch.randn(SHAPE, device=device)
    ways: dict[str, Callable[[], object]] = {
        "to the host, pinned": lambda: to_host(there),
        "to the host, plain": there.cpu,
        "to the device, pinned": lambda: to_device(here, device, torch.float32),
        "to the device, plain": lambda: here.to(device),
    }
    for name, copy in ways.items():
        is_gpu = device.type == "cuda"
        found = spread(time_ms(copy, device, repeats)) if is_gpu else NEEDS_GPU
        yield Row(f"{SHAPE} {name}, ms", found)


class EachStep(PassiveRecording):
    """Takes the reads so far and the memory of the device at each step."""

    def __init__(self, reads: CountingReads, device: torch.device) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.bytes: list[int] = []
        self._counting, self._device = reads, device

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.reads.append(self._counting.counts.total())
        if self._device.type == "cuda":
            self.bytes.append(torch.cuda.memory_allocated(self._device))


def steps(device: torch.device, batch: int) -> Iterator[Row]:
    """Train both halves in one process, so that all reads are in one thread."""
    shape = Shape("wide_deep", batch, 10, 3)
    with written(shape) as folder, CountingReads(device) as reads:
        seen = EachStep(reads, device)
        run_in_process(build_parties(folder, device=device, passive_seen=seen))
    between = [after - before for before, after in zip(seen.reads, seen.reads[1:], strict=False)]
    # Between two epochs there are held-out rows as well, so the median is that of a step.
    name = f"`wide_deep` at {batch}, both halves"
    yield Row(f"{name}: reads for each step", spread(between, 0))
    grown = NEEDS_GPU
    if seen.bytes:
        late = seen.bytes[int(EARLY * len(seen.bytes)) :]
        grown = f"{late[-1] - late[0]:,} in {len(late) - 1} steps"
    yield Row(f"{name}: growth of the device's memory, bytes", grown, "0")


def speed(device: torch.device, batch: int) -> Row:
    """Train in two processes over localhost."""
    with written(Shape("wide_deep", batch, 30 if batch < 10_000 else 5, 3)) as folder:
        epochs = measure(folder, device)
    rates = [1e3 / step_ms for step_ms in epochs.step_ms]
    least = LEAST_STEPS_PER_S.get(batch)
    middle = sorted(rates)[len(rates) // 2]
    aim = "" if least is None else judged(middle, least=least, on=device.type)
    return Row(f"`wide_deep` at {batch}, two processes, steps/s", spread(rates, 1), aim)


@contextmanager
def written(shape: Shape) -> Iterator[Path]:
    """Write rows and settings of a shape for a while."""
    with tempfile.TemporaryDirectory() as name:
        write_settings(Path(name), shape)
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="*", default=[1024, 32768])
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: use --device cpu for what needs none")
    torch.set_num_threads(1)
    print_environment("grpcio")
    if device.type == "cuda":
        print(torch.cuda.get_device_name(device))
    started = time.monotonic()
    print("\n| what | found | aim |\n|---|---|---|")
    for row in rows_of(device, given.batches, given.repeats):
        print(row, flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
