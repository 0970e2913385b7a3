"""Audits of a run: the leak AUC of every attack on every batch, inline or off the critical path.

`LeakAudit` measures and remembers; `AuditWorker` runs one in a thread of its own, so that training
never waits for it. Both parties use them: the passive party on what it received, the active party
on what it sent.
"""

import math
import os
import queue
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Self, TypedDict

import numpy as np
import torch
from torch import Tensor

from common.privacy.attacks import ATTACKS, AttackName, Knowledge, SideInformation
from common.privacy.leakage import OneClass, leak_auc

_NICENESS = 10
"""How far the worker stands back: about a tenth of the weight of a thread that trains."""

LeakByAttack = dict[str, dict[str, float]]
"""Layer name -> attack name -> leak AUC."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the audit sees of one step. Its tensors must not be changed afterwards."""

    epoch: int
    step: int
    gradients: Mapping[str, Tensor]
    """Layer name -> gradients, (batch, ...)."""
    labels: Tensor
    references: Mapping[str, Tensor] = field(default_factory=dict)
    """Layer name -> clean gradient of one positive; without one, ``cosine`` is not measured."""
    reference_row: int | None = None
    """Row of that positive; its cosine tells nothing and is left out."""


class BatchLeak(NamedTuple):
    """The leak AUCs of one batch."""

    epoch: int
    step: int
    leak: LeakByAttack
    random: float

    def numbers(self) -> dict[str, float]:
        """Return the leak AUCs under flat names, for the metrics."""
        numbers = {
            f"{layer}/{attack}_leak_auc": value
            for layer, values in self.leak.items()
            for attack, value in values.items()
        }
        return numbers | {"random_leak_auc": self.random}


class AttackSummary(TypedDict):
    """One attack on one layer over a run."""

    q95: float
    """The 95 % quantile over batches."""
    mean: float
    last_epoch: float
    """Mean over the batches of the last observed epoch."""
    random_q95: float
    """The 95 % quantile of random scores on the same batches: the floor."""


class AuditCounts(NamedTuple):
    """How many batches went which way."""

    observed: int
    skipped_one_class: int
    left_out: int


def pick_reference_row(labels: Tensor, seed: bytes, epoch: int, step: int) -> int | None:
    """Pick one positive of a batch, the same on both sides of the wire.

    Returns:
        Its row, or None if the batch has no positive.
    """
    positives = torch.nonzero(labels.detach().reshape(-1) == 1).reshape(-1)
    if not len(positives):
        return None
    return int(positives[_draw(b"reference row", seed, epoch, step) % len(positives)])


class LeakAudit:
    """The leak AUC of every attack on every layer and batch of a run.

    Remembers one number per batch, layer and attack. Safe to read while another thread observes.
    """

    def __init__(
        self,
        attacks: Sequence[AttackName] = ("norm", "cosine", "spectral"),
        every_steps: int = 1,
    ) -> None:
        self._attacks = tuple(attacks)
        self._every_steps = every_steps
        self._lock = threading.Lock()
        self._epochs = array("q")
        self._random = array("d")
        # NaN where an attack was not measured on a batch, so that all series keep step.
        self._series: dict[tuple[str, str], array[float]] = {}
        self._skipped_one_class = 0
        self._left_out = 0
        self._latest: BatchLeak | None = None

    def wants(self, step: int) -> bool:
        """Tell whether a step of an epoch is to be audited at all."""
        return step % self._every_steps == 0

    def observe(self, observation: Observation) -> BatchLeak | None:
        """Attack one batch and remember the leak AUCs.

        Returns:
            None if the batch has one class only, or its step is not to be audited.
        """
        if not self.wants(observation.step):
            return None
        labels = observation.labels.detach().reshape(-1)
        try:
            random = leak_auc(_random_scores(observation), labels)
        except OneClass:
            with self._lock:
                self._skipped_one_class += 1
            return None
        leak = {
            layer: self._attack_layer(layer, observation, labels) for layer in observation.gradients
        }
        measured = BatchLeak(observation.epoch, observation.step, leak, random)
        with self._lock:
            self._remember(measured)
        return measured

    def leave_out(self) -> None:
        """Count a batch that was to be audited and was not."""
        with self._lock:
            self._left_out += 1

    def summary(self) -> dict[str, dict[str, AttackSummary]]:
        """Summarise the run so far; an attack that was never measured is absent."""
        with self._lock:
            epochs, random = np.array(self._epochs), np.array(self._random)
            series = {key: np.array(values) for key, values in self._series.items()}
        result: dict[str, dict[str, AttackSummary]] = {}
        for (layer, attack), values in series.items():
            measured = ~np.isnan(values)
            last = measured & (epochs == epochs[measured].max())
            result.setdefault(layer, {})[attack] = AttackSummary(
                q95=float(np.quantile(values[measured], 0.95)),
                mean=float(values[measured].mean()),
                last_epoch=float(values[last].mean()),
                random_q95=float(np.quantile(random[measured], 0.95)),
            )
        return result

    def epoch_means(self, epoch: int) -> LeakByAttack:
        """Return the mean leak AUCs over the batches of one epoch, absent where there is none."""
        with self._lock:
            chosen = np.array(self._epochs) == epoch
            series = {key: np.array(values)[chosen] for key, values in self._series.items()}
        result: LeakByAttack = {}
        for (layer, attack), values in series.items():
            if not np.isnan(values).all():
                result.setdefault(layer, {})[attack] = float(np.nanmean(values))
        return result

    def latest(self) -> BatchLeak | None:
        """Return the leak AUCs of the batch audited last."""
        return self._latest

    def counts(self) -> AuditCounts:
        """Return how many batches were measured, had one class, and were left out."""
        with self._lock:
            return AuditCounts(len(self._epochs), self._skipped_one_class, self._left_out)

    def _attack_layer(
        self, layer: str, observation: Observation, labels: Tensor
    ) -> dict[str, float]:
        gradients = observation.gradients[layer].detach()
        knowledge = Knowledge(positive_gradient=observation.references.get(layer))
        leak: dict[str, float] = {}
        for name in self._attacks:
            attack = ATTACKS[name]
            uses_reference = SideInformation.POSITIVE_GRADIENT in attack.needs
            if uses_reference and knowledge.positive_gradient is None:
                continue
            kept = _without(observation.reference_row if uses_reference else None, labels)
            scores = attack.score(gradients, knowledge)
            try:
                leak[name] = leak_auc(scores[kept.to(scores.device)], labels[kept])
            except OneClass:  # the reference was the batch's only positive
                continue
        return leak

    def _remember(self, measured: BatchLeak) -> None:
        num_before = len(self._epochs)
        self._epochs.append(measured.epoch)
        self._random.append(measured.random)
        found = {
            (layer, attack): value
            for layer, values in measured.leak.items()
            for attack, value in values.items()
        }
        for key in found:
            if key not in self._series:
                self._series[key] = array("d", [math.nan]) * num_before
        for key, values in self._series.items():
            values.append(found.get(key, math.nan))
        self._latest = measured


class AuditWorker:
    """Runs a `LeakAudit` in a thread of its own, behind a bounded queue.

    `submit` never blocks: what does not fit in the queue is left out and counted. An error while
    auditing costs its batch, never the training, and is raised by `close`. So as not to slow the
    training, the thread computes on one core, gives way where cores are short (there it falls
    behind, instead of the training), and uses a stream of its own for gradients on a GPU.
    """

    def __init__(
        self,
        audit: LeakAudit,
        queue_batches: int = 8,
        on_result: Callable[[BatchLeak], None] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            audit: where the results go; counts, summary and latest values are read from it.
            queue_batches: how many batches may wait.
            on_result: called in the worker's thread with each measured batch.
        """
        self.audit = audit
        self._on_result = on_result
        self._queue: queue.Queue[_Submitted | None] = queue.Queue(queue_batches)
        self._closed = False
        self._error: Exception | None = None
        ready = threading.Event()
        num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, args=(ready,), name="audit", daemon=True)
        self._thread.start()
        ready.wait()
        # The worker's own limit of one thread also became the default of threads started later.
        torch.set_num_threads(num_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, observation: Observation) -> bool:
        """Hand over one batch without waiting.

        Returns:
            Whether it was taken; False if its step is not to be audited or the queue is full.
        """
        if not self.audit.wants(observation.step):
            return False
        if not self._closed:
            with suppress(queue.Full):
                self._queue.put_nowait(_Submitted(observation, _computed(observation)))
                return True
        self.audit.leave_out()
        return False

    def close(self, timeout_s: float = 30.0) -> None:
        """Audit what is queued, then end the thread. Closing twice does nothing more.

        What cannot be audited within ``timeout_s`` is left out and counted.

        Raises:
            Exception: the first error met while auditing.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._leave_out_queued()
        if self._error is not None:
            raise self._error

    def _work(self, ready: threading.Event) -> None:
        _give_way()
        ready.set()
        streams: dict[torch.device, torch.cuda.Stream] = {}
        while (submitted := self._queue.get()) is not None:
            try:
                with _own_stream(submitted, streams):
                    self._audit(submitted.observation)
            except Exception as error:
                # Whatever it is: training goes on, and `close` raises it.
                self.audit.leave_out()
                self._error = self._error or error

    def _audit(self, observation: Observation) -> None:
        measured = self.audit.observe(observation)
        if measured is not None and self._on_result is not None:
            self._on_result(measured)

    def _leave_out_queued(self) -> None:
        with suppress(queue.Empty):
            while True:
                if self._queue.get_nowait() is not None:
                    self.audit.leave_out()
        self._queue.put_nowait(None)


class _Submitted(NamedTuple):
    observation: Observation
    computed: torch.cuda.Event | None
    """Passed once the gradients are there; None on the CPU, where they always are."""


def _give_way() -> None:
    """Leave the cores to other threads, as far as this thread can."""
    # Asking first makes torch set this thread up; otherwise it would undo the limit later.
    torch.get_num_threads()
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + _NICENESS)


def _gpu(observation: Observation) -> torch.device | None:
    devices = (gradients.device for gradients in observation.gradients.values())
    return next((device for device in devices if device.type == "cuda"), None)


def _computed(observation: Observation) -> torch.cuda.Event | None:
    device = _gpu(observation)
    return None if device is None else torch.cuda.current_stream(device).record_event()


@contextmanager
def _own_stream(
    submitted: _Submitted, streams: dict[torch.device, torch.cuda.Stream]
) -> Iterator[None]:
    """Keep the audit's kernels out of the stream in which the training's wait for each other."""
    device = _gpu(submitted.observation)
    if device is None or submitted.computed is None:
        yield
        return
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = streams[device]
    stream.wait_event(submitted.computed)
    with torch.cuda.stream(stream):
        yield


def _without(row: int | None, labels: Tensor) -> Tensor:
    kept = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    if row is not None:
        kept[row] = False
    return kept


def _random_scores(observation: Observation) -> Tensor:
    """Draw scores that know nothing, from the batch's place alone: an audit can be repeated."""
    seed = _draw(b"random scores", b"", observation.epoch, observation.step)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(observation.labels.numel(), generator=generator, dtype=torch.float64)


def _draw(purpose: bytes, seed: bytes, epoch: int, step: int) -> int:
    message = b"splitveil audit " + purpose + struct.pack("<qq", epoch, step) + seed
    return int.from_bytes(blake2b(message, digest_size=8).digest(), "little", signed=True)
