"""Fills the table of what training costs on a GPU; run it on a host that has one.

    OMP_NUM_THREADS=1 python -m benchmarks.gpu [--device cpu] [--batches 1024 32768] [--repeats 50]

Rows of the table:

- each defense of a single gradient, whole, at (1024, 128) and (32768, 128): milliseconds until the
  device has finished, and how often the host reads a value from a tensor (``float``, ``tolist`` and
  the like), for which it waits for the device: at most 1 ms is aimed at;
- for each defense of `IN_RUNS` the reads for each step of both halves of ``wide_deep`` in one
  process, without audits, and steps/s in two processes over localhost, as `benchmarks.step`
  measures them: with ``marvell`` at least 300 are aimed at with a batch of 1,024, 25 with 32,768.

``wide_deep`` has Criteo's shape: 13 numbers and 26 columns of categories, drawn at random, a cut of
128. A figure is the median (5 % to 95 %). On the CPU every read counts.
"""

import argparse
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.environment import print_environment, spread
from benchmarks.step import over_grpc, write_parties
from splitveil.active_party import defenses
from splitveil.active_party.defenses import DefenseContext, DefenseSettings, Step
from splitveil.common.models.device import device_in_words, use_device
from splitveil.common.run.course import Batch
from splitveil.experiments.preparation import write_columns
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, build_parties, run_in_process
from tests.support.simulation import PassiveRecording

SHAPES = ((1024, 128), (32768, 128))
SETTINGS: dict[str, DefenseSettings] = {
    "none": defenses.NoDefense(),
    "iso": defenses.IsoDefense(),
    "max_norm": defenses.MaxNormDefense(),
    "max_norm_positive": defenses.MaxNormPositiveDefense(),
    "marvell": defenses.MarvellDefense(),
}
CATEGORY_COUNTS = np.geomspace(4, 50_000, 26).astype(int)
EPOCHS = 10
READS = {"item", "tolist", "numpy", "cpu", "nonzero", "equal"}
READS |= {"__bool__", "__float__", "__int__", "__index__"}
IN_RUNS = ("marvell", "noisy_label", "gafm")


class Row(NamedTuple):
    what: str
    found: str


class CountingReads(TorchFunctionMode):
    """Counts how often the host reads values of tensors on a device, in its own thread."""

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
    for shape in SHAPES:
        yield from alone(device, shape, repeats)
    for batch, defense in itertools.product(batches, IN_RUNS):
        yield steps(device, batch, defense)
        yield speed(device, batch, defense)


def alone(device: torch.device, shape: tuple[int, int], repeats: int) -> Iterator[Row]:
    """Time each defense, and count its reads."""
    gradients, labels = make_batch(shape, device)
    probabilities = torch.full_like(labels, 0.2)
    for name, settings in SETTINGS.items():
        defense = settings.build(DefenseContext(shape[1:]))
        batch = Step(gradients, labels, probabilities=probabilities)

        def defend() -> None:
            defense.defend(batch)  # noqa: B023 - called before the next one is built

        yield Row(f"`{name}` at {shape}, ms", spread(time_ms(defend, device, repeats)))
        with CountingReads(device) as reads:
            defend()
        yield Row(f"`{name}` at {shape}, reads", in_words(reads.counts))


def make_batch(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Make gradients that point one way for each class, as those of a binary loss do."""
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(shape[0], generator=generator) < 0.2).float()
    gap = torch.randn(shape[1], generator=generator)
    confidence = torch.rand(shape[0], 1, generator=generator)
    gaps = gap + 0.1 * torch.randn(shape, generator=generator)
    gradients = (labels[:, None] - 0.2) * confidence * gaps / shape[0]
    return gradients.to(device), labels.to(device)


def time_ms(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Time some work until the device has finished it."""
    times_ms = []
    for repeat in range(repeats + 5):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 5:  # the first ones load code and warm caches
            times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms


def in_words(counts: Counter[str]) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{counts.total()} ({parts})" if parts else "0"


class EachStep(PassiveRecording):
    """Takes the reads so far at each step."""

    def __init__(self, reads: CountingReads) -> None:
        super().__init__()
        self.reads: list[int] = []
        self._counting = reads

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.reads.append(self._counting.counts.total())


def steps(device: torch.device, batch: int, defense: str) -> Row:
    """Train both halves in one process, so that all reads are in one thread."""
    with written(batch, 10, 2) as folder, CountingReads(device) as reads:
        seen = EachStep(reads)
        chosen = [f"defense={{name: {defense}}}"]
        run_in_process(build_parties(folder, chosen, device=device, passive_seen=seen))
    between = [after - before for before, after in zip(seen.reads, seen.reads[1:], strict=False)]
    # Between two epochs there are held-out rows as well, so the median is that of a step.
    return Row(f"`{defense}`, both halves at {batch}: reads for each step", spread(between, 0))


def speed(device: torch.device, batch: int, defense: str) -> Row:
    with written(batch, 30 if batch < 10_000 else 5, EPOCHS) as folder:
        rates = [1e3 / step_ms for step_ms in over_grpc(folder, defense, device)]
    return Row(f"`{defense}`, two processes at {batch}, steps/s", spread(rates, 1))


@contextmanager
def written(batch: int, steps: int, epochs: int) -> Iterator[Path]:
    """Write rows and both parties' settings for a while."""
    rows = batch * (steps + 1) * 10 // 9
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "id": np.array([f"{row:09d}" for row in range(rows)]),
        "label": (generator.random(rows) < 0.2).astype(np.int64),
        "I": generator.random((rows, 13), dtype=np.float32),
    }
    for number, count in enumerate(CATEGORY_COUNTS, start=1):
        # The square of a uniform number: some categories are frequent, most are rare.
        arrays[f"C{number}"] = (count * generator.random(rows) ** 2).astype(np.int64)
    contract = CONTRACT | {
        "cut_shape": [128],
        "batch_size": batch,
        "evaluation_batch_size": batch,
        "epochs": epochs,
        "drop_last": True,
        "split": {"kind": "hash", "train": 0.9, "test": 0.1},
    }
    data = {
        "source": {"kind": "parquet", "path": "rows.parquet"},
        "id_column": "id",
        "features": {"numeric": "I*", "categorical": "C*"},
    }
    model = {"kind": "wide_deep", "hidden": [128] * 3}
    active = ACTIVE | {"data": data | {"label_column": "label"}, "top_model": model}
    bottom = model | {"embedding_dim": 4}
    passive = PASSIVE | {"data": data, "bottom_model": bottom, "adversary": None}
    with tempfile.TemporaryDirectory() as name:
        write_columns(Path(name) / "rows.parquet", **arrays)
        write_parties(Path(name), contract, active, passive)
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="*", default=[1024, 32768])
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    device = use_device(given.device)
    torch.set_num_threads(1)
    print_environment("grpcio")
    print(device_in_words(device))
    started = time.monotonic()
    print("\n| what | found |\n|---|---|")
    for row in rows_of(device, given.batches, given.repeats):
        print(f"| {row.what} | {row.found} |", flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
