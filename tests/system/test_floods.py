"""Peers that send without end, never read, stall, or open a thousand streams."""

import os
import queue
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil.common.run.contract import Contract
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.limits import STREAMS_PER_CONNECTION
from splitveil.protos import split_learning_pb2 as pb
from tests.support.certificates import make, use
from tests.support.inference import free_port
from tests.support.mutations import AtStep, Tape
from tests.support.processes import Pair, Party
from tests.support.runs import build_parties, run_in_process, write_example
from tests.support.simulation import free_address
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
MOST_GROWTH_MIB = 96
"""Windows, buffers and threads at work held up to 68 MiB of a flood of megabyte tensors; memory
that a flood fills is past this in a second."""
FLOOD_S = 2.0

# A megabyte a tensor, in two chunks: what fills windows and buffers soonest.
OVERRIDES = [
    "contract.cut_shape=[4096]",
    "contract.epochs=3",
]

UNCHUNKED_BYTES, CHUNK_BYTES = 1000, 524_288

SERVE = f"""
import sys
from pathlib import Path
from splitveil.common.run.contract import Contract
from tests.support.loopback import serving
from tests.support.runs import build_parties
Contract.unchunked_bytes, Contract.chunk_bytes = {UNCHUNKED_BYTES}, {CHUNK_BYTES}
contract = [override for override in sys.argv[3:] if override.startswith("contract.")]
parties = build_parties(Path(sys.argv[1]), sys.argv[3:], contract)
parties.active.sent = type("Forgotten", (list,), {{"append": lambda *_: None}})()
with serving(parties, int(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@dataclass
class Served:
    process: "subprocess.Popen[str]"
    port: int
    log: Path

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def mib(self, name: str) -> float:
        """Return VmRSS, memory in use now, or VmHWM, its peak since it was forgotten."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) / 1024


@contextmanager
def served(folder: Path, *overrides: str) -> Iterator[Served]:
    port, log = free_port(), folder / "served.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder), str(port), *overrides],
            cwd=ROOT,
            # As on two cores: the allocator keeps more memory for itself the more there are.
            env={**os.environ, "MALLOC_ARENA_MAX": "16"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Served(process, port, log)
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()


@dataclass
class Flood:
    """One hostile peer: its connections, and the last words of the honest one that it knows."""

    port: int
    tape: Tape = field(default_factory=Tape)
    open: ExitStack = field(default_factory=ExitStack)
    """Whatever stays open until the honest peer is through."""

    def channel(self, *options: tuple[str, Any], **more: Any) -> grpc.Channel:
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", [*own, *options], **more)
        return self.open.enter_context(channel)

    def stream(self, channel: grpc.Channel, method: str, messages: Iterator[bytes]) -> Any:
        stub: Any = channel.stream_stream(method_path(method))
        return stub(messages)

    def unary(self, channel: grpc.Channel, method: str) -> Any:
        return channel.unary_unary(method_path(method))

    def last_step(self) -> list[bytes]:
        return self.tape.messages["Train request"][-2:]

    def handshake(self) -> pb.HandshakeRequest:
        return pb.HandshakeRequest.FromString(self.tape.messages["Handshake request"][0])


def refused(call: Callable[..., object], *arguments: object) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    code: grpc.StatusCode = caught.value.code()
    return code


def silence() -> Iterator[bytes]:
    return iter(queue.SimpleQueue[bytes]().get, b"")


def tensors_out_of_step(flood: Flood) -> None:
    """As fast as it can, on stream after stream, and on one after its end."""
    frames = []
    for frame in flood.last_step():
        fields = pb.TensorFrame.FromString(frame)
        fields.step += 7
        frames.append(fields.SerializeToString())
    until, channel = time.monotonic() + FLOOD_S, flood.channel()
    while time.monotonic() < until:
        call = flood.stream(channel, "Train", iter(frames * 20))
        assert refused(list, call) in {
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.CANCELLED,
        }


def repeats_never_read(flood: Flood) -> None:
    """Right ones, 200 MiB of them, each of which has an answer."""
    sent = []

    def repeat() -> Iterator[bytes]:
        for _ in range(200):
            sent.append(1)
            yield from flood_frames

    flood_frames = flood.last_step()
    for _ in range(4):
        flood.stream(flood.channel(), "Train", repeat())
    wait_until(lambda: bool(sent))
    time.sleep(FLOOD_S)
    assert len(sent) < 4 * 200  # the peer's memory is not where they wait


def a_thousand_streams(flood: Flood) -> None:
    """On as many connections as it takes, for the server to see them all at once."""
    for _ in range(1000 // STREAMS_PER_CONNECTION + 1):
        channel = flood.channel()
        for number in range(STREAMS_PER_CONNECTION):
            flood.stream(channel, ("Train", "Evaluate", "Align")[number % 3], silence())
    time.sleep(FLOOD_S)


def a_thousand_watches(flood: Flood) -> None:
    """Of the health service."""
    for _ in range(1000 // STREAMS_PER_CONNECTION + 1):
        stub = health_pb2_grpc.HealthStub(flood.channel())
        for _ in range(STREAMS_PER_CONNECTION):
            stub.Watch(health_pb2.HealthCheckRequest())
    time.sleep(FLOOD_S)


def a_thousand_handshakes(flood: Flood) -> None:
    """Half of them right, and too late; half with as much nesting and length as goes through."""
    right = flood.handshake()
    deep = '{"split":' * 900 + "{" + ",".join(f'"k{n}":0' for n in range(4500)) + "}" + "}" * 900
    wrong = pb.HandshakeRequest.FromString(right.SerializeToString())
    wrong.contract = deep[: 64 * 1024]
    requests = [right.SerializeToString(), wrong.SerializeToString()]
    channels = [flood.channel() for _ in range(10)]
    calls = [
        flood.unary(channels[n % 10], "Handshake").future(requests[n % 2], timeout=300)
        for n in range(1000)
    ]
    codes = {refused(call.result) for call in calls}
    assert codes <= {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # too many at a time
        grpc.StatusCode.UNAVAILABLE,  # gRPC's own way to say it
    }
    assert grpc.StatusCode.FAILED_PRECONDITION in codes


def half_a_message(flood: Flood) -> None:
    """Half a tensor on a stream, and half of everything else on connections of their own."""
    for method in ("Train", "Evaluate"):
        half = iter([flood.last_step()[0]])
        stalled = (frame for part in (half, silence()) for frame in part)
        flood.stream(flood.channel(), method, stalled)
    settings = struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
    for number in range(100):
        end = flood.open.enter_context(socket.create_connection(("127.0.0.1", flood.port)))
        words = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + b"\x00\xff\xff\x01\x04\x00"
        end.sendall(words[: 1 + number % len(words)])
    time.sleep(FLOOD_S)


def compressed_zeros(flood: Flood) -> None:
    """A quarter of a megabyte that would become 256."""
    channel = flood.channel(compression=grpc.Compression.Gzip)
    zeros = bytes(256 * 1024 * 1024)
    codes = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    codes |= {grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT}
    call = flood.stream(channel, "Train", iter([zeros]))
    assert refused(list, call) in codes
    assert refused(flood.unary(channel, "Handshake"), zeros, 300) in codes


def small_things_by_the_megabyte(flood: Flood) -> None:
    """Lists of numbers and nested contracts: what takes more memory read than written."""
    frame = pb.TensorFrame(shape=[300] * 250_000).SerializeToString()
    names = "{" + ",".join(f'"k{n}":0' for n in range(50_000)) + "}"
    contract = ('{"' + "x" * 500 + '":') * 900 + names + "}" * 900
    places = flood.handshake()
    places.resume_places.extend(range(200_000))
    nested = flood.handshake()
    nested.contract = contract[: 1000 * 1000]
    channel, until = flood.channel(), time.monotonic() + FLOOD_S
    while time.monotonic() < until:
        call = flood.stream(channel, "Train", iter([frame]))
        assert refused(list, call) is not grpc.StatusCode.INTERNAL
        for request in (places, nested):
            data = request.SerializeToString()
            code = refused(flood.unary(channel, "Handshake"), data, 300)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


FLOODS: list[Callable[[Flood], None]] = [
    tensors_out_of_step,
    repeats_never_read,
    a_thousand_streams,
    a_thousand_watches,
    a_thousand_handshakes,
    half_a_message,
    compressed_zeros,
    small_things_by_the_megabyte,
]


def test_memory_stays_bounded_under_floods_and_the_honest_peer_gets_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flood begins before a step of the honest peer, and what it opened stays open."""
    monkeypatch.setattr(Contract, "unchunked_bytes", UNCHUNKED_BYTES)
    monkeypatch.setattr(Contract, "chunk_bytes", CHUNK_BYTES)
    write_example(tmp_path)
    parties, undisturbed = (build_parties(tmp_path, OVERRIDES, OVERRIDES) for _ in range(2))
    run_in_process(undisturbed)
    tape, growth = Tape(), dict[str, float]()
    contract, reconnect = parties.run.contract, parties.passive_settings.reconnect
    with served(tmp_path, *OVERRIDES) as active:
        flood = Flood(active.port, tape)
        peer = AtStep(
            PeerConnection(f"127.0.0.1:{active.port}", contract, transcript=tape.as_transcript()),
            reconnect,
        )

        def meet(hostile: Callable[[Flood], None]) -> None:
            base = active.mib("VmRSS")
            active.forget_peak()
            hostile(flood)
            growth[hostile.__name__] = active.mib("VmHWM") - base

        # The first steps fill what is filled once: caches, pools, threads.
        peer.actions = {4 + number: partial(meet, hostile) for number, hostile in enumerate(FLOODS)}
        with flood.open, peer:
            parties.run.run(peer)
        log = active.log.read_text()
    print({name: round(mib, 1) for name, mib in growth.items()}, f"{len(log)} bytes of log")
    assert growth.keys() == {hostile.__name__ for hostile in FLOODS}
    assert max(growth.values()) < MOST_GROWTH_MIB, growth
    assert "fault in a handler" not in log
    assert len(log) < 200_000
    pairs = zip(parties.passive.received, undisturbed.passive.received, strict=True)
    assert all(torch.equal(found, expected) for found, expected in pairs)


def test_silent_strangers_take_no_descriptor_that_a_run_needs(tmp_path: Path) -> None:
    write_example(tmp_path)
    use(make(tmp_path / "certificates"), tmp_path)
    folder, address, limit = tmp_path, free_address(), 256
    host, port = address.split(":")
    with ExitStack() as stack:

        def connect_strangers() -> None:
            for _ in range(limit + 200):
                stack.enter_context(socket.create_connection((host, int(port))))

        epochs = "contract.epochs=40"
        active = Party("active", folder, f"listen={address}", epochs, descriptors=limit)
        stack.enter_context(active).wait_until_says("waiting for the passive party")
        connect_strangers()
        passive = stack.enter_context(Party("passive", folder, f"connect={address}", epochs))
        pair = Pair(active, passive)
        pair.wait_until_training()
        connect_strangers()
        assert active.exit_code is None, pair.outputs
        assert pair.wait() == (0, 0), pair.outputs
