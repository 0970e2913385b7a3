"""How long does an online prediction take, at a steady rate of requests?

    OMP_NUM_THREADS=1 python -m benchmarks.serve [--rate 200] [--ids 16] [--seconds 20]

A passive party with 20 numbers per row and an active party with 10 of its own serve in processes of
their own, with mutual TLS between them; models and columns are those of the example breast_cancer.
A third process asks at a steady rate, whether or not earlier requests are answered, and counts each
request's time from the moment at which it was due. Beside it, in turns in the same run and by the
same rules: a gRPC server that returns the bytes it gets, with one call for each request. Only the
ratio of the two holds on a busy machine. Aim: p99 of at most 20 ms on two cores.
"""

import argparse
import http.client
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.environment import in_a_process, print_environment
from benchmarks.predict import save_models, serve, started, write_example
from splitveil.active_party.commands.serve import access_of, open_service, serving
from splitveil.active_party.http.status import OnlineStatus
from splitveil.active_party.predict.predictor import open_predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from tests.support.certificates import make, use
from tests.support.simulation import free_address

ROWS = 20_000
THREADS = 32
ROUNDS = 3
_ECHO = "/benchmark.Echo/Echo"

Ask = Callable[[list[str]], None]


@contextmanager
def answer(settings: ActiveSettings) -> Iterator[None]:
    with ExitStack() as resources:
        status = OnlineStatus(settings.contract)
        cpu = torch.device("cpu")
        predictor = resources.enter_context(open_predictor(settings, cpu, notes=status))
        service = open_service(settings, predictor, resources, status)
        resources.enter_context(serving(settings, service, access_of(settings)))
        yield


@contextmanager
def echo(address: str) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(THREADS))
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda data, _: data)
    service, method = _ECHO.strip("/").split("/")
    generic = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(address)
    server.start()
    yield
    server.stop(0).wait()


def echo_asker(address: str, resources: ExitStack) -> Ask:
    """Return what asks the gRPC server, and waits for the answer."""
    call: Any = resources.enter_context(grpc.insecure_channel(address)).unary_unary(_ECHO)
    return lambda ids: call(json.dumps(ids).encode(), timeout=60)


def http_asker(address: str) -> Ask:
    """Return what asks the HTTP server, over one connection for each thread."""
    kept = threading.local()

    def ask(ids: list[str]) -> None:
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(address, timeout=60)
            kept.connection.connect()
            kept.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = json.dumps({"ids": ids}).encode()
        kept.connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        found = json.loads(kept.connection.getresponse().read())
        if set(found["model"]) != {"joint"}:
            raise RuntimeError("a row was not predicted by the joint model")

    return ask


def latencies(ask: Ask, questions: list[list[str]], rate: float) -> NDArray[np.float64]:
    """Ask at a steady rate, and return the milliseconds from when each request was due."""
    found = np.empty(len(questions))

    def one(number: int, due: float) -> None:
        ask(questions[number])
        found[number] = 1000 * (time.perf_counter() - due)

    with ThreadPoolExecutor(THREADS) as pool:
        begin = time.perf_counter() + 0.05
        asked = []
        for number in range(len(questions)):
            due = begin + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            asked.append(pool.submit(one, number, due))
        for future in asked:
            future.result()
    return found


def load(arguments: argparse.Namespace, where: dict[str, str]) -> dict[str, NDArray[np.float64]]:
    """Ask every server in turns, several times, and return what each request took."""
    generator = np.random.default_rng(1)
    count = round(arguments.seconds * arguments.rate / ROUNDS)
    questions = [
        [f"patient-{row:08d}" for row in generator.integers(0, ROWS, arguments.ids)]
        for _ in range(count)
    ]
    with ExitStack() as resources:
        askers = {
            "gRPC echo": echo_asker(where["echo"], resources),
            "serve": http_asker(where["http"]),
        }
        taken: dict[str, list[NDArray[np.float64]]] = {name: [] for name in askers}
        for ask in askers.values():
            latencies(ask, questions[:200], arguments.rate)  # connections, caches
        for _ in range(ROUNDS):
            for name, ask in askers.items():
                taken[name].append(latencies(ask, questions, arguments.rate))
    return {name: np.concatenate(parts) for name, parts in taken.items()}


def show(taken: dict[str, NDArray[np.float64]]) -> None:
    bare = taken["gRPC echo"]
    print(f"{'':10} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8} {'p50 ratio':>10} {'p99 ratio':>10}")
    for name, values in taken.items():
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        ratios = [p50 / np.percentile(bare, 50), p99 / np.percentile(bare, 99)]
        print(f"{name:10} {p50:8.2f} {p90:8.2f} {p99:8.2f} {ratios[0]:10.1f} {ratios[1]:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--ids", type=int, default=16, help="ids in a request")
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests, for each server")
    arguments = parser.parse_args()
    print_environment()
    with tempfile.TemporaryDirectory() as name, ExitStack() as resources:
        folder = Path(name)
        write_example(folder, ROWS, cached=False)
        use(make(folder / "certificates"), folder)
        runs = f"runs_dir={folder / 'runs'}"
        where = {party: free_address() for party in ("passive", "http", "echo")}
        own = [f"inference.connect.passive={where['passive']}", f"serving.http={where['http']}"]
        own += [runs, "serving.timeout_s=60"]
        active = load_party_settings(ActiveSettings, folder / "active.yaml", own)
        passive = load_party_settings(PassiveSettings, folder / "passive.yaml", [runs])
        save_models(active, passive)
        resources.enter_context(started(serve, passive, where["passive"]))
        resources.enter_context(started(answer, active))
        resources.enter_context(started(echo, where["echo"]))
        show(in_a_process(load, arguments, where))


if __name__ == "__main__":
    main()
