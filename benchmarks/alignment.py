"""What does alignment cost per id, compared with the group operations that no one can save?

Two processes align over a gRPC stream on the loopback interface; half of the ids are common. Each
party reports the processor time per id, user and system, of its threads and workers together, and
its peak resident memory. The floor is what libsodium alone needs for one hash to the group and two
multiplications, measured by each party in turn right before and right after, since the clock of a
shared machine is not steady.

    python -m benchmarks.alignment --ids 10000 100000 --workers 0 1 2

With ``--memory-limit none 128MB`` each size is aligned with each limit, the exchange is kept in
files of a temporary folder, and the common ids are compared with the true ones. ``grows by`` is
the peak less what the process has in memory before the exchange, which includes its ids.

With ``--openmined PYTHON``, an interpreter of an environment that has openmined-psi, each size is
also aligned by that package (``other_psi.py``), right afterwards.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from itertools import product
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from pydantic import ByteSize, TypeAdapter

from splitveil.common.alignment import (
    Alignment,
    ExchangeFiles,
    StreamChannel,
    align,
    build_engine,
    ristretto,
)
from splitveil.common.data.stored_ids import StoredIds
from splitveil.common.run.contract import AlignmentSettings
from splitveil.common.wire.http_proxy import without_proxy
from splitveil.protos.split_learning_pb2 import AlignFrame

_METHOD = "/splitveil.v1.SplitLearning/Align"
_FLOOR_IDS = 4096
_ENDED_S = 30.0

Party = Literal["active", "passive"]
_OTHER: dict[Party, Party] = {"active": "passive", "passive": "active"}


class PartyCost(NamedTuple):
    """The cost of one party's part."""

    cpu_s: float
    wall_s: float
    floor_s: float  # per id, processor time
    party_mib: float
    worker_mib: float  # of the largest
    num_common: int
    sent_bytes: int  # of all frames, without what gRPC, TCP and TLS add
    before_mib: float  # of the party, with its ids


class CountingChannel(StreamChannel):
    """Counts the bytes of the frames that it sends."""

    sent_bytes = 0

    def send(self, frame: AlignFrame) -> None:
        self.sent_bytes += frame.ByteSize()
        super().send(frame)


class Task(NamedTuple):
    """One party's part, and its ways to the other and back."""

    num_ids: int
    workers: int
    memory_limit: int | None
    barrier: Barrier
    ports: "multiprocessing.Queue[int]"
    results: "multiprocessing.Queue[tuple[str, PartyCost]]"


def main() -> None:
    """Measure every size with every number of workers, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ids", type=int, nargs="+", default=[100_000], help="per party")
    parser.add_argument("--workers", type=int, nargs="+", default=[0], help="per party")
    parser.add_argument(
        "--memory-limit", nargs="+", default=["none"], metavar="SIZE", help="such as 128MB, or none"
    )
    parser.add_argument("--openmined", metavar="PYTHON", help="interpreter with openmined-psi")
    arguments = parser.parse_args()
    _print_machine()
    for num_ids in arguments.ids:
        for workers, limit in product(arguments.workers, arguments.memory_limit):
            limit_bytes = None if limit == "none" else TypeAdapter(ByteSize).validate_python(limit)
            _print(num_ids, workers, limit, _align_once(num_ids, workers, limit_bytes))
        if arguments.openmined:
            _print_openmined(num_ids, _openmined(arguments.openmined, num_ids))


def _align_once(num_ids: int, workers: int, limit: int | None) -> dict[str, PartyCost]:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[str, PartyCost]] = context.Queue()
    ports: multiprocessing.Queue[int] = context.Queue()
    barrier = context.Barrier(2)
    task = Task(num_ids, workers, limit, barrier, ports, results)
    parties = [context.Process(target=run, args=(task,)) for run in (_run_active, _run_passive)]
    for party in parties:
        party.start()
    costs = dict(results.get() for _ in parties)
    for party in parties:
        party.join()
    return costs


def _openmined(python: str, num_ids: int) -> dict[str, Any]:
    script = Path(__file__).with_name("other_psi.py")
    command = [python, str(script), str(num_ids)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def _run_active(task: Task) -> None:
    def exchange(run: Callable[[CountingChannel], Alignment]) -> Alignment:
        outcome: Queue[Alignment] = Queue()

        def handle(requests: Iterator[AlignFrame], _context: object) -> Iterator[AlignFrame]:
            channel = CountingChannel(lambda _outgoing: requests)
            # Not after the last frame: a client that has everything may close the line before.
            with ThreadPoolExecutor(1) as executor:
                executor.submit(lambda: outcome.put(run(channel)))
                yield from channel.outgoing

        server = grpc.server(ThreadPoolExecutor(2))
        service, _, method = _METHOD[1:].partition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            handle, AlignFrame.FromString, AlignFrame.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        server.add_generic_rpc_handlers((handlers,))
        task.ports.put(server.add_insecure_port("127.0.0.1:0"))
        server.start()
        result = outcome.get()
        server.stop(grace=5).wait()
        return result

    task.results.put(("active", _measure(task, "active", exchange)))


def _run_passive(task: Task) -> None:
    def exchange(run: Callable[[CountingChannel], Alignment]) -> Alignment:
        address = f"127.0.0.1:{task.ports.get()}"
        with grpc.insecure_channel(address, without_proxy()) as connection:
            method = connection.stream_stream(
                _METHOD, AlignFrame.SerializeToString, AlignFrame.FromString
            )
            calls: list[Any] = []

            def connect(outgoing: Iterator[AlignFrame]) -> Any:
                calls.append(method(outgoing))
                return calls[0]

            result = run(CountingChannel(connect))
            # As a party does: the last frame is still on its way to the server.
            ended = threading.Event()
            if calls[0].add_callback(ended.set):
                ended.wait(_ENDED_S)
            return result

    task.results.put(("passive", _measure(task, "passive", exchange)))


def _measure(
    task: Task,
    party: Party,
    exchange: Callable[[Callable[[CountingChannel], Alignment]], Alignment],
) -> PartyCost:
    """Align the ids of a party, and return what it took."""
    with TemporaryDirectory() as folder:
        files = ExchangeFiles(Path(folder) / "kept", task.memory_limit)
        return _measure_with(files, task, party, exchange)


def _measure_with(
    files: ExchangeFiles,
    task: Task,
    party: Party,
    exchange: Callable[[Callable[[CountingChannel], Alignment]], Alignment],
) -> PartyCost:
    numbers, others = (_numbers(task, one) for one in (party, _OTHER[party]))
    ids = _ids(numbers)
    barrier = task.barrier
    barrier.wait()
    floors = [_floor_s() for _ in range(3)]
    barrier.wait()
    engine = build_engine(AlignmentSettings(), task.workers)
    sent_bytes = 0

    def run(channel: CountingChannel) -> Alignment:
        nonlocal sent_bytes
        found = align(engine, ids, channel, nonce=os.urandom(32), run_id="benchmark", files=files)
        sent_bytes = channel.sent_bytes
        return found

    # Workers count once they have been waited for; their start-up counts too.
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    with suppress(OSError):  # begins a new peak, where that is allowed
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before_mib = _mib("self", "VmRSS")
    started_cpu, started = _own_cpu_s(), time.perf_counter()

    alignment = exchange(run)
    wall_s = time.perf_counter() - started
    cpu_s = _own_cpu_s() - started_cpu
    party_mib = _mib("self", "VmHWM")
    worker_mib = max((_mib(child, "VmHWM") for child in _children()), default=0.0)
    _check(alignment, numbers, others)
    barrier.wait()
    floors += [_floor_s() for _ in range(3)]
    engine.close()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s += ended.ru_utime + ended.ru_stime - waited.ru_utime - waited.ru_stime
    return PartyCost(
        cpu_s,
        wall_s,
        statistics.median(floors),
        party_mib,
        worker_mib,
        len(alignment.rows),
        sent_bytes,
        before_mib,
    )


def _floor_s() -> float:
    """Time one hash to the group and two multiplications, without anything around them."""
    library = ctypes.CDLL(ristretto.load().name)
    from_hash = library.crypto_core_ristretto255_from_hash
    multiply = library.crypto_scalarmult_ristretto255
    from_hash.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    multiply.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    digest, scalar = os.urandom(64), ristretto.load().random_scalar()
    buffers = [ctypes.create_string_buffer(data, len(data)) for data in (digest, scalar)]
    points = [ctypes.create_string_buffer(32) for _ in range(3)]
    source, factor = map(ctypes.addressof, buffers)
    hashed, once, twice = map(ctypes.addressof, points)
    started = time.thread_time()
    for _ in range(_FLOOR_IDS):
        from_hash(hashed, source)
        multiply(once, factor, hashed)
        multiply(twice, factor, once)
    return (time.thread_time() - started) / _FLOOR_IDS


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _numbers(task: Task, party: Party) -> npt.NDArray[np.int64]:
    """Number the ids of a party, of which the other has half."""
    first = task.num_ids // 2 if party == "passive" else 0
    return first + np.arange(task.num_ids)


def _ids(numbers: npt.NDArray[np.int64]) -> StoredIds:
    """Make ids, as a party reads them: one text, and the end of each."""
    text = bytearray()
    for number in numbers.tolist():
        text += f"customer-{number:09d}".encode()
    ends = np.arange(1, len(numbers) + 1) * (len(text) // len(numbers))  # all of one length
    return StoredIds(np.frombuffer(text, np.uint8), ends)


def _check(alignment: Alignment, own: npt.NDArray[np.int64], peer: npt.NDArray[np.int64]) -> None:
    """Compare the common rows with the true ones."""
    if not np.array_equal(np.sort(own[alignment.rows]), np.intersect1d(own, peer)):
        raise SystemExit("the common ids are not the true ones")


def _mib(process: str, name: str) -> float:
    # Not ru_maxrss: Linux carries the parent's peak over into a new program.
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def _children() -> list[str]:
    """Return the processes that this one has started.

    Not from the files ``children`` of its threads: some kernels have none.
    """
    own, found = f"PPid:\t{os.getpid()}\n", []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            if own in status.read_text(encoding="utf-8", errors="replace"):
                found.append(status.parent.name)
    return found


def _print_machine() -> None:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    print(f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, "
          f"grpcio {metadata.version('grpcio')}, {ristretto.load().name}")  # fmt: skip


def _print(num_ids: int, workers: int, limit: str, costs: dict[str, PartyCost]) -> None:
    print(f"{num_ids} x {num_ids} ids, {workers} workers per party, memory limit: {limit}")
    for party, cost in sorted(costs.items()):
        rate, floor = num_ids / cost.cpu_s, 1 / cost.floor_s
        print(
            f"{party:8}{rate:8,.0f} ids/s/core = {rate / floor:.0%} of the floor {floor:,.0f}; "
            f"{num_ids / cost.wall_s:8,.0f} ids/s wall; "
            f"sends {cost.sent_bytes / num_ids:.2f} bytes/id; peak {cost.party_mib:.0f} MiB, "
            f"grows by {(cost.party_mib - cost.before_mib) * 2**20 / 1e6:.0f} MB"
            + (f" + {workers} x {cost.worker_mib:.0f} MiB" if workers else "")
            + f"; {cost.num_common} common"
        )


def _print_openmined(num_ids: int, outcome: dict[str, Any]) -> None:
    print(f"{num_ids} x {num_ids} ids, openmined-psi {outcome['version']}, one process for both")
    for party, cpu_s in outcome["cpu_s"].items():
        print(
            f"{party:8}{num_ids / cpu_s:8,.0f} ids/s/core; "
            f"sends {outcome['sent_bytes'][party] / num_ids:.2f} bytes/id; "
            f"peak of both {outcome['peak_mib']:.0f} MiB; {outcome['num_common']} common"
        )


if __name__ == "__main__":
    main()
