"""What does noise that belongs to an example cost, once per run and at every step?

    python -m benchmarks.persistent [--repeats 50]

One thread on the CPU. Keys of all ids are derived once per run; the scalars of a batch are drawn
from them at every step (target: 32,768 of them in 5 ms).
"""

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.environment import print_environment, spread
from splitveil.active_party.defenses import (
    DefenseContext,
    DefenseSettings,
    IsoDefense,
    MarvellDefense,
    MaxNormDefense,
    NoiseSecrets,
    RawBatch,
)
from splitveil.active_party.defenses.example_keys import (
    GRADIENT_NOISE,
    example_keys,
    key_from_insecure_seed,
    scalars,
)
from splitveil.active_party.defenses.label_mechanisms import GaussianLabels, draw_noisy_labels
from splitveil.active_party.defenses.noise import EntropyNoise, SecureNoise

NUM_IDS = 32_768
SHAPE = (1024, 128)


def main() -> None:
    """Print one line per question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print_environment("cryptography")
    print_keys(repeats)
    print_sources(repeats)
    print_defenses(repeats)


def print_keys(repeats: int) -> None:
    """Time keys, scalars and noisy labels of many ids."""
    key = key_from_insecure_seed(1)
    ids = [f"person-{number:08d}" for number in range(NUM_IDS)]
    keys = example_keys(key, ids, GRADIENT_NOISE)
    labels = torch.zeros(NUM_IDS)
    mechanism = GaussianLabels(kind="gaussian")
    few = max(3, repeats // 5)
    once_ms = times_ms(lambda: example_keys(key, ids, GRADIENT_NOISE), few)
    print(f"keys, once per run      {spread([ms * 1e3 / NUM_IDS for ms in once_ms])} us per id")
    labels_ms = times_ms(lambda: draw_noisy_labels(mechanism, labels, key, ids), few)
    print(f"noisy labels, once      {spread([ms * 1e3 / NUM_IDS for ms in labels_ms])} us per id")
    print(f"{NUM_IDS} scalars        {spread(times_ms(lambda: scalars(keys), repeats))} ms")


def print_sources(repeats: int) -> None:
    """Time fresh noise from a cipher and from torch's generator, in turns."""
    like = torch.empty(0)
    secure, fast = SecureNoise(), EntropyNoise()
    secure_ms: list[float] = []
    fast_ms: list[float] = []
    for _ in range(repeats):
        secure_ms += times_ms(lambda: secure.standard_normal(SHAPE, like), 1)
        fast_ms += times_ms(lambda: fast.standard_normal(SHAPE, like), 1)
    print(f"normals   cipher      {SHAPE} {spread(secure_ms)} ms")
    print(f"normals   torch's     {SHAPE} {spread(fast_ms)} ms")


def print_defenses(repeats: int) -> None:
    """Time each defense with fresh noise, from both sources, and with persistent noise."""
    generator = torch.Generator().manual_seed(1)
    labels = (torch.rand(SHAPE[0], generator=generator) < 0.2).float()
    probabilities = torch.rand(SHAPE[0], generator=generator)
    moves = torch.randn(SHAPE[1], generator=generator)
    slopes = (moves + 0.1 * torch.randn(SHAPE, generator=generator)) / SHAPE[0]
    gradients = (probabilities - labels)[:, None] * slopes
    key = key_from_insecure_seed(1)
    keys = example_keys(key, [f"{number}" for number in range(SHAPE[0])], GRADIENT_NOISE)

    def time_defense(settings: DefenseSettings) -> str:
        context = DefenseContext((gradients.shape[1],))
        defense = settings.build(context, NoiseSecrets(key))
        return spread(
            times_ms(
                lambda: defense.defend(
                    RawBatch(gradients, labels, keys, probabilities, slopes=slopes)
                ),
                repeats,
            )
        )

    for secure in (True, False):
        source = "cipher" if secure else "torch's"
        for settings in (
            IsoDefense(secure_noise=secure),
            MaxNormDefense(secure_noise=secure),
            MarvellDefense(secure_noise=secure),
        ):
            print(f"{settings.name:9} {source:11} {SHAPE} {time_defense(settings)} ms")
    for settings in (
        IsoDefense(noise="persistent"),
        MaxNormDefense(noise="persistent"),
        MarvellDefense(noise="persistent"),
    ):
        print(f"{settings.name:9} {settings.noise:11} {SHAPE} {time_defense(settings)} ms")


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Time some work, after one try that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


if __name__ == "__main__":
    main()
