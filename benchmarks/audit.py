"""How long does the leak audit take: per batch, per handed-over step, per epoch and per run?

    OMP_NUM_THREADS=1 python -m benchmarks.audit

CPU time, which other processes disturb less than time on the clock. Aim: at most 6 ms for the
default attacks on two layers of (1024, 128).
"""

import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy.attacks import ATTACKS, Knowledge, SideInformation
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.audit_worker import AuditWorker
from splitveil.common.privacy.final_attacks import (
    FINAL_ATTACKS,
    LabelledActivations,
    final_scores,
)
from splitveil.common.privacy.label_classes import TWO_CLASSES
from splitveil.common.privacy.leakage import leak_auc, leak_auc_interval, leak_auc_many
from splitveil.common.privacy.observation import Clues, Observation
from splitveil.common.privacy.scores import KnownClasses, cosine, norm, spectral
from splitveil.common.privacy.settings import DEFAULT_ATTACKS

_EXAMPLES = 100_000
_NOT_HERE = {SideInformation.PREDICTIONS}
"""What a batch of plain random gradients has not."""
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
    print(f"the other attacks, {_SHAPES[0]}: median (5 % .. 95 %) of 20 runs, ms")
    for name, part in _other_attacks(*_batch(_SHAPES[0])).items():
        _report(name, _times_ms(part, 20))
    print(f"{_EXAMPLES} examples: median (5 % .. 95 %) of 5 runs, ms")
    for name, part in _run_parts().items():
        _report(name, _times_ms(part, 5))
    _report("submit to a worker, (1024, 128) twice", _submit_times_ms())


def _parts(gradients: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    audit = LeakAudit(("norm", "cosine", "spectral"))
    default = LeakAudit(DEFAULT_ATTACKS, num_examples=_EXAMPLES)
    observation = _observation(gradients, labels, 0)
    scores = norm(gradients)
    seven = torch.stack([scores] * 7)
    return {
        "norm": lambda: norm(gradients),
        "cosine": lambda: cosine(gradients, gradients[0]),
        "spectral": lambda: spectral(gradients),
        "leak AUC": lambda: leak_auc(scores, labels),
        "leak AUC of seven scores": lambda: leak_auc_many(seven, labels),
        "observe two layers, no accumulation": lambda: audit.observe(observation),
        "observe two layers, default attacks": lambda: default.observe(observation),
    }


def _other_attacks(gradients: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    positives = gradients[labels == 1]
    negatives = gradients[labels == 0]
    classes = KnownClasses(negatives, positives)
    knowledge = Knowledge(
        positives[0], positives[:5], classes, gradients + 1, other_hints=negatives[:1]
    )
    return {
        name: partial(attack.score, gradients, knowledge)
        for name, attack in ATTACKS.items()
        if name not in DEFAULT_ATTACKS and attack.needs.isdisjoint(_NOT_HERE)
    }


def _run_parts() -> dict[str, Callable[[], object]]:
    generator = np.random.default_rng(0)
    labels = generator.random(_EXAMPLES) < 0.2
    scores = generator.normal(size=_EXAMPLES) + labels
    activations = torch.from_numpy(generator.normal(size=(_EXAMPLES, 32)) + labels[:, None])
    known = LabelledActivations(np.arange(_EXAMPLES), activations.half(), labels.astype(np.int64))
    return {
        "leak AUC": lambda: leak_auc(scores, labels),
        "leak AUC with interval": lambda: leak_auc_interval(scores, labels, generator),
        **{
            f"{name}, cut of 32": partial(final_scores, name, known, TWO_CLASSES, 0)
            for name in FINAL_ATTACKS
        },
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
    clues = {1: Clues(references, row)}
    return Observation(0, step, layers, labels, clues, torch.arange(len(labels)))


def _submit_times_ms() -> list[float]:
    gradients, labels = _batch((1024, 128))
    with AuditWorker(LeakAudit(DEFAULT_ATTACKS, num_examples=_EXAMPLES)) as worker:

        def submit() -> None:
            worker.submit(_observation(gradients, labels, 0))

        return _times_ms(submit, 200, pause_s=0.01)


def _times_ms(run: Callable[[], object], num_runs: int, pause_s: float = 0.0) -> list[float]:
    for _ in range(min(5, num_runs)):
        run()
    times = []
    for _ in range(num_runs):
        time.sleep(pause_s)
        start = time.thread_time()
        run()
        times.append(1e3 * (time.thread_time() - start))
    return times


def _report(name: str, times_ms: list[float]) -> None:
    cuts = statistics.quantiles(times_ms, n=20)
    print(f"  {name:38} {statistics.median(times_ms):8.3f} ({cuts[0]:.3f} .. {cuts[-1]:.3f})")


if __name__ == "__main__":
    main()
