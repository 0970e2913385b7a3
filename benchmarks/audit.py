"""How long does the leak audit take: per batch inline, and for the step that hands a batch over?

    OMP_NUM_THREADS=1 python -m benchmarks.audit

Aim: at most 10 ms for norm, cosine and spectral on two layers of (1024, 128), on one core.
"""

import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.privacy.attacks import cosine, norm, spectral
from common.privacy.audit import AuditWorker, LeakAudit, Observation
from common.privacy.leakage import leak_auc

_SHAPES = ((1024, 128), (128, 1600), (32768, 128))


def main() -> None:
    torch.set_num_threads(1)
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    print(f"{platform.processor() or platform.machine()}, {versions}, numpy {np.__version__}")
    for shape in _SHAPES:
        num_runs = 20 if shape[0] > 10_000 else 200
        print(f"{shape}: median (5 % .. 95 %) of {num_runs} runs, ms")
        for name, part in _parts(*_batch(shape)).items():
            _report(name, _times_ms(part, num_runs))
    _report("submit to a worker, (1024, 128) twice", _submit_times_ms())


def _parts(gradients: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    audit = LeakAudit()
    observation = _observation(gradients, labels, 0)
    scores = norm(gradients)
    return {
        "norm": lambda: norm(gradients),
        "cosine": lambda: cosine(gradients, gradients[0]),
        "spectral": lambda: spectral(gradients),
        "leak AUC": lambda: leak_auc(scores, labels),
        "observe, two layers": lambda: audit.observe(observation),
    }


def _batch(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(shape[0], generator=generator) < 0.2).float()
    weight = torch.randn(shape[1], generator=generator)
    noise = torch.randn(shape, generator=generator)
    return (0.2 - labels)[:, None] * weight + noise, labels


def _observation(gradients: Tensor, labels: Tensor, step: int) -> Observation:
    row = int(labels.argmax())
    layers = {"cut": gradients, "first": gradients}
    references = {layer: rows[row] for layer, rows in layers.items()}
    return Observation(0, step, layers, labels, references, row)


def _submit_times_ms() -> list[float]:
    gradients, labels = _batch((1024, 128))
    with AuditWorker(LeakAudit()) as worker:

        def submit() -> None:
            worker.submit(_observation(gradients, labels, 0))

        return _times_ms(submit, 200, pause_s=0.01)


def _times_ms(run: Callable[[], object], num_runs: int, pause_s: float = 0.0) -> list[float]:
    for _ in range(5):
        run()
    times = []
    for _ in range(num_runs):
        time.sleep(pause_s)
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def _report(name: str, times_ms: list[float]) -> None:
    cuts = statistics.quantiles(times_ms, n=20)
    print(f"  {name:38} {statistics.median(times_ms):8.3f} ({cuts[0]:.3f} .. {cuts[-1]:.3f})")


if __name__ == "__main__":
    main()
