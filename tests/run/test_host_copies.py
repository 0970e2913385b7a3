"""Copies between device and host: none on the CPU, and one wait for each answer on a GPU.

Without a GPU the order of the calls is tested with tensors that have a device and no content; what
only a GPU can show, that bits survive and memory stays, is skipped elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from splitveil.common.run import host_copies
from splitveil.common.run.host_copies import to_device, to_host

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Streams:
    """Writes down what is asked of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "main"
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream(self, "main"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        copy, move = Tensor.copy_, Tensor.to

        def copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            blocks = "" if non_blocking else ", blocking"
            self.note(f"{source.device.type} to {into.device.type}{blocks}")
            return copy(into, source)

        def moved(values: Tensor, *where: object, non_blocking: bool = False) -> Tensor:
            if isinstance(where[0], torch.device):
                self.note(
                    f"{values.device.type} to {where[0].type}{'' if non_blocking else ', blocking'}"
                )
            return move(values, *where)  # type: ignore[call-overload,no-any-return]

        def recorded(_values: Tensor, stream: "Stream") -> None:
            self.note(f"kept for {stream.name}")

        monkeypatch.setattr(Tensor, "copy_", copied)
        monkeypatch.setattr(Tensor, "to", moved)
        monkeypatch.setattr(Tensor, "record_stream", recorded)
        host_copies._side_stream.cache_clear()

    def note(self, call: str) -> None:
        self.calls.append(f"{self.current}: {call}")

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self.name = streams, name

    def wait_stream(self, other: "Stream") -> None:
        self._streams.note(f"{self.name} waits for {other.name}")


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def record(self, stream: Stream) -> None:
        self._streams.note(f"event on {stream.name}")

    def synchronize(self) -> None:
        self._streams.note("host waits for the event")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with FakeTensorMode():
        yield Streams(monkeypatch)
    host_copies._side_stream.cache_clear()


def test_on_the_cpu_nothing_is_copied() -> None:
    values = torch.randn(4, 3)
    assert to_host(values) is values
    assert to_device(values, CPU, torch.float32) is values


def test_the_dtype_of_the_wire_becomes_the_one_that_is_needed() -> None:
    received = torch.randn(4, 3).bfloat16()
    assert torch.equal(to_device(received, CPU, torch.float32), received.float())


def test_what_is_sent_is_waited_for_once_and_what_is_queued_after_it_is_not(
    streams: Streams,
) -> None:
    """The event is recorded behind the copy: `torch.cuda.synchronize` would wait for everything."""
    found = to_host(torch.empty(8, 3, device="cuda"))
    assert found.device == CPU
    assert streams.calls == [
        "main: cuda to cpu",
        "main: event on main",
        "main: host waits for the event",
    ]


def test_what_is_received_is_copied_beside_the_computation_and_never_waited_for(
    streams: Streams,
) -> None:
    """The bytes of the message are copied by the host first, so that they may go at once."""
    found = to_device(torch.empty(8, 3, dtype=torch.bfloat16), CUDA, torch.float32)
    assert (found.device, found.dtype) == (CUDA, torch.float32)
    assert streams.calls == [
        "side: cpu to cpu, blocking",
        "side: cpu to cuda",
        "main: main waits for side",
        "main: kept for main",
    ]


def test_what_is_on_the_device_stays_there(streams: Streams) -> None:
    values = torch.empty(8, 3, device="cuda")
    assert to_device(values, CUDA, torch.float32) is values
    assert not any("waits" in call for call in streams.calls)


@NEEDS_GPU
def test_on_a_gpu_the_bits_survive_while_it_computes_and_memory_stays() -> None:
    """Every round queues work before and after the copies; the blocks are those of the first."""
    device = torch.device("cuda", torch.cuda.current_device())
    busy = torch.randn(2048, 2048, device=device)
    generator = torch.Generator().manual_seed(0)
    held: list[int] = []
    for round_number in range(40):
        sent = torch.randn(1024, 128, generator=generator)
        product = busy @ busy
        there = to_device(sent.clone(), device, torch.float32)
        back = to_host(there * 2)
        product = product @ busy
        assert torch.equal(back, sent * 2)
        if round_number >= 10:
            held.append(torch.cuda.memory_allocated(device))
    assert len(set(held)) == 1
    assert product.shape == busy.shape
