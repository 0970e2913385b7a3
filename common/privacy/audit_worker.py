"""Runs an audit in a separate thread, so that training never waits for it."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch
from torch import Tensor

from splitveil.common.privacy.audit import AuditedBatch, LeakAudit
from splitveil.common.privacy.observation import Observation
from splitveil.common.text.files import Closing

_NICENESS = 10  # niceness of the worker: about a tenth of the weight of a thread that trains

_BURST_S = 1.0  # CPU time that the worker may take beyond its share: short runs are measured whole


_Submitted: TypeAlias = tuple[
    Callable[[], Observation], torch.device | None, "torch.cuda.Event | None"
]
"""An observation; on a GPU, the device of its gradients, and an event that follows them."""


class CpuBudget:
    """The CPU time that the audit may still use. Thread-safe.

    It counts whether or not a core is idle: the audit's computations also cost the training cache
    space and the interpreter's lock. The clock of an `AuditWorker` is the CPU time of its process.
    """

    def __init__(self, max_share: float | None, now_s: float) -> None:
        self._max_share = max_share
        self._left_s = _BURST_S
        self._since_s = now_s
        self._lock = threading.Lock()

    def allows(self, now_s: float) -> bool:
        if self._max_share is None:
            return True
        with self._lock:
            earned_s = self._max_share * (now_s - self._since_s)
            self._since_s = now_s
            self._left_s = min(self._left_s + earned_s, _BURST_S)
            return self._left_s > 0

    def pay(self, cpu_s: float) -> None:
        with self._lock:
            self._left_s -= cpu_s


class AuditWorker(Closing):
    """Runs a `LeakAudit`, or another audit, in a separate thread behind a bounded queue.

    `submit` never blocks: a batch is left out and counted if the queue is full or the thread's
    share of the CPU time is used up. An error while auditing costs its batch, never the training,
    and is raised by `close`. To avoid slowing the training, the thread computes on one core, yields
    where cores are scarce (so that it falls behind, and not the training), and uses a separate
    stream for gradients on a GPU.
    """

    def __init__(
        self,
        audit: LeakAudit,
        queue_batches: int = 8,
        on_result: Callable[[AuditedBatch], None] | None = None,
        max_cpu_share: float | None = None,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread, which calls ``on_result`` with each measured batch.

        It calls ``after_each`` after every batch, also one without a result. ``max_cpu_share`` is
        the largest share of the process's CPU time; None for no limit.
        """
        self.audit = audit
        self._on_result = on_result
        self._after_each = after_each
        self._budget = CpuBudget(max_cpu_share, time.process_time())
        self._queue: queue.Queue[_Submitted | threading.Event | None] = queue.Queue(queue_batches)
        self._closed = False
        self._error: Exception | None = None
        ready = threading.Event()
        num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, args=(ready,), name="audit", daemon=True)
        self._thread.start()
        ready.wait()
        # The worker's own limit of one thread also became the default of threads started later.
        torch.set_num_threads(num_threads)

    def submit(self, observation: Observation) -> bool:
        """Submit one batch without waiting; return whether it was taken.

        It is not if the queue is full, or the thread's share of the CPU time is used up.
        """
        return self.submit_later(observation.gradients, lambda: observation)

    def submit_later(
        self, gradients: Mapping[str, Tensor], observation: Callable[[], Observation]
    ) -> bool:
        """Submit one batch as `submit` does, and let the worker's thread build the observation."""
        if not self._closed and self._budget.allows(time.process_time()):
            with suppress(queue.Full):
                devices = (layer.device for layer in gradients.values())
                device = next((device for device in devices if device.type == "cuda"), None)
                computed = None
                if device is not None:
                    computed = torch.cuda.current_stream(device).record_event()
                self._queue.put_nowait((observation, device, computed))
                return True
        self.audit.leave_out()
        return False

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far is audited; return whether it is."""
        deadline = time.monotonic() + timeout_s
        reached = threading.Event()
        if self._closed:
            return not self._thread.is_alive()
        with suppress(queue.Full):
            self._queue.put(reached, timeout=timeout_s)
            return reached.wait(max(0.0, deadline - time.monotonic()))
        return False

    def close(self, timeout_s: float = 30.0) -> None:
        """Audit the queued batches, end the thread, and raise the first error met; once.

        Batches that cannot be audited within ``timeout_s`` are left out and counted.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with suppress(queue.Empty):
                while True:
                    if isinstance(self._queue.get_nowait(), tuple):
                        self.audit.leave_out()
            self._queue.put_nowait(None)
        if self._error is not None:
            raise self._error

    def _work(self, ready: threading.Event) -> None:
        try:
            _give_way()
        except Exception as error:  # as below
            self._error = error
        finally:
            ready.set()
        streams: dict[torch.device, torch.cuda.Stream] = {}
        while (submitted := self._queue.get()) is not None:
            if isinstance(submitted, threading.Event):
                submitted.set()
                continue
            begun_s = time.thread_time()
            try:
                observation, device, computed = submitted
                with _own_stream(device, computed, streams):
                    measured = self.audit.observe(observation())
                    if measured is not None and self._on_result is not None:
                        self._on_result(measured)
                    if self._after_each is not None:
                        self._after_each()
            except Exception as error:
                # Training continues after any error; `close` raises it.
                self.audit.leave_out()
                self._error = self._error or error
            self._budget.pay(time.thread_time() - begun_s)


def _give_way() -> None:
    """Give other threads precedence on the cores, as far as this thread can."""
    # Reading it first makes torch initialise this thread; otherwise it would undo the limit later.
    torch.get_num_threads()
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        with suppress(OSError):  # a sandbox may deny it, as the shipped systemd units do
            os.setpriority(os.PRIO_PROCESS, thread, niceness + _NICENESS)


@contextmanager
def _own_stream(
    device: torch.device | None,
    computed: torch.cuda.Event | None,
    streams: dict[torch.device, torch.cuda.Stream],
) -> Iterator[None]:
    """Run the audit's kernels in another stream than the training's, which wait for each other."""
    if device is None or computed is None:
        yield
        return
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = streams[device]
    stream.wait_event(computed)
    with torch.cuda.stream(stream):
        yield
