"""How long does an online prediction take, at a steady rate of requests?

    OMP_NUM_THREADS=1 python -m benchmarks.serve [--rate 200] [--ids 16] [--seconds 20] [--plain]

A passive party with 20 numbers per row and an active party with 10 of its own serve in processes of
their own, with mutual TLS between them; models and columns are those of the example breast_cancer.
A third process asks at a steady rate, whether or not earlier requests are answered, and counts each
request's time from the moment at which it was due. Beside it, in turns in the same run and by the
same rules: a gRPC server that returns the bytes it gets, with one call for each request. Only the
ratio of the two holds on a busy machine. Aim: p99 of at most 20 ms on two cores.
"""

import argparse
import json
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import h11
import numpy as np
import socket
import torch
from numpy.typing import NDArray

from benchmarks.environment import print_environment
from benchmarks.predict import save_models, serve, write_example
from splitveil.active_party.inference.predictor import open_predictor
from splitveil.active_party.online.command import open_desk, open_doors, serving
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from splitveil.protos import prediction_pb2 as pb
from splitveil.simulation import free_address
from tests.certificates import make, use

ROWS = 20_000
AIM_MS = 20.0
THREADS = 32
ROUNDS = 3
_ECHO = "/benchmark.Echo/Echo"
_PREDICT = "/splitveil.v1.Predictions/Predict"

Ask = Callable[[list[str]], None]


def answer(settings: ActiveSettings, ready: Connection) -> None:
    """Answer programs until the other process says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with ExitStack() as resources:
        predictor = resources.enter_context(open_predictor(settings, torch.device("cpu")))
        desk = open_desk(settings, predictor, resources)
        resources.enter_context(serving(settings, desk, open_doors(settings)))
        ready.send("ready")
        ready.recv()


def echo(address: str, ready: Connection) -> None:
    """Return bytes until the other process says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = grpc.server(ThreadPoolExecutor(THREADS))
    handler = grpc.unary_unary_rpc_method_handler(lambda data, _: data)
    service, method = _ECHO.strip("/").split("/")
    generic = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(address)
    server.start()
    ready.send("ready")
    ready.recv()
    server.stop(0).wait()


def grpc_asker(address: str, path: str, resources: ExitStack) -> Ask:
    """Return what asks a gRPC server, and waits for the answer."""
    channel = resources.enter_context(grpc.insecure_channel(address))
    call = channel.unary_unary(path)

    def ask(ids: list[str]) -> None:
        data = call(pb.PredictRequest(ids=ids).SerializeToString(), timeout=60)
        if path == _PREDICT:
            reply = pb.PredictReply.FromString(data)
            if any(one.model != pb.MODEL_JOINT for one in reply.predictions):
                raise RuntimeError("a row was not predicted by the joint model")

    return ask


def http_asker(address: str, local: "dict[int, HttpConnection]", key: Callable[[], int]) -> Ask:
    """Return what asks the HTTP server over a connection for each thread."""

    def ask(ids: list[str]) -> None:
        connection = local.get(key())
        if connection is None:
            connection = local[key()] = HttpConnection(address)
        found = json.loads(connection.post("/predict", json.dumps({"ids": ids}).encode()))
        if set(found["model"]) != {"joint"}:
            raise RuntimeError("a row was not predicted by the joint model")

    return ask
