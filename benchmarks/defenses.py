"""What does each defense cost, next to merely copying the gradient?

    python -m benchmarks.defenses [--repeats 50]

One thread on the CPU; the GPU too where there is one.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.environment import print_environment, spread
from splitveil.active_party import defenses
from splitveil.active_party.defenses import DefenseSettings, RawBatch
from splitveil.active_party.defenses.strength import LeakAuc

SHAPES = ((128, 1600), (1024, 128), (32768, 128))
SETTINGS: dict[str, DefenseSettings] = {
    "none": defenses.NoDefense(),
    "iso": defenses.IsoDefense(),
    "max_norm": defenses.MaxNormDefense(),
    "max_norm_positive": defenses.MaxNormPositiveDefense(),
    "marvell": defenses.MarvellDefense(),
    "marvell, leak_auc": defenses.MarvellDefense(strength=LeakAuc(leak_auc=0.6)),
}


def main() -> None:
    """Print one line per device, shape and defense."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print_environment()
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
        print(torch.cuda.get_device_name())
    for device in devices:
        for shape in SHAPES:
            gradients, labels = make_batch(shape, device)
            print_times(f"{device.type} {shape} clone", time_ms(gradients.clone, device, repeats))
            for name, settings in SETTINGS.items():
                times_ms = time_defense(settings, gradients, labels, repeats)
                print_times(f"{device.type} {shape} {name}", times_ms)


def make_batch(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Make gradients that point one way for each class, as those of a binary loss do."""
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(shape[0], generator=generator) < 0.2).float()
    gap = torch.randn(shape[1], generator=generator)
    confidence = torch.rand(shape[0], 1, generator=generator)
    spread = 0.1 * torch.randn(shape, generator=generator)
    gradients = (labels[:, None] - 0.2) * confidence * (gap + spread) / shape[0]
    return gradients.to(device), labels.to(device)


def time_defense(
    settings: DefenseSettings, gradients: Tensor, labels: Tensor, repeats: int
) -> list[float]:
    """Time a defense whole: checks, statistics, solver, noise, charge and report."""
    defense = settings.build(defenses.DefenseContext(tuple(gradients.shape[1:])))
    probabilities = torch.full_like(labels, 0.2)
    return time_ms(
        lambda: defense.defend(RawBatch(gradients, labels, probabilities=probabilities)),
        gradients.device,
        repeats,
    )


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


def print_times(name: str, times_ms: list[float]) -> None:
    """Print median and spread."""
    print(f"{name:36s} {spread(times_ms)} ms")


if __name__ == "__main__":
    main()
