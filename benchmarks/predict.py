"""How many rows per second and core does a joint prediction take, and where does the time go?

    OMP_NUM_THREADS=1 python -m benchmarks.predict [--rows 500000] [--cached] [--tls]

A passive party with 20 numbers per row serves in a process of its own, the active party with 10
numbers of its own predicts every id over gRPC and writes a Parquet file: models and columns are
those of the example breast_cancer, rows are drawn at random. Figures per core are in CPU time of
each process: they hold on a busy machine, too. Aim: at least 100,000 rows per second and core, for
each party. Files are read, and ids indexed, before the clock starts.
"""

import argparse
import multiprocessing
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from pyarrow import parquet

from benchmarks.environment import print_environment
from splitveil.active_party.predict.batch import BatchPrediction, Parts, PredictionPlan
from splitveil.active_party.predict.predictor import open_predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.models.factory import build_bottom_model, build_top_model
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.common.record.model_files import identity_metadata, save_model
from splitveil.common.run.messages import ModelIdentity
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.predict.service import InferenceServer, InferenceService, Throttle
from splitveil.passive_party.settings import PassiveSettings
from tests.support.certificates import make, use
from tests.support.simulation import free_address

CPU = torch.device("cpu")
IDENTITY = ModelIdentity("benchmark", 1)

Server = Callable[..., AbstractContextManager[None]]


def write_example(folder: Path, rows: int, *, cached: bool) -> None:
    """Write the tables of both parties, in different orders, and their settings."""
    generator = np.random.default_rng(0)
    ids = pa.array([f"patient-{row:08d}" for row in range(rows)])
    for name, columns in (("active", 10), ("passive", 20)):
        order = pa.array(generator.permutation(rows))
        table = {"id": ids.take(order)}
        for j in range(columns):
            table[f"x{j}"] = pa.array(generator.normal(size=rows))
        if name == "active":
            table["label"] = pa.array(generator.integers(0, 2, size=rows))
        parquet.write_table(pa.table(table), folder / f"{name}.parquet")
    contract = {"run_name": "predict", "cut_shape": [16], "batch_size": 32, "epochs": 1}
    both = {
        "contract": "contract.yaml",
        "security": {"mode": "insecure"},
        "optimizer": {"kind": "adam"},
        "device": "cpu",
        "torch_threads": 1,
    }
    for name, own in (
        ("active", {"top_model": {"kind": "mlp", "hidden": [16]}, "defense": {"name": "none"}}),
        ("passive", {"bottom_model": {"kind": "mlp", "hidden": [32]}}),
    ):
        source = {"kind": "parquet", "path": f"{name}.parquet"}
        if cached:
            source["cache_dir"] = "cache"
        data = {"source": source, "id_column": "id", "features": {"numeric": "x*"}}
        if name == "active":
            data["label_column"] = "label"
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**both, **own, "data": data}))
    (folder / "contract.yaml").write_text(yaml.safe_dump(contract))


def save_models(active: ActiveSettings, passive: PassiveSettings) -> None:
    """Save models with their initial weights, as a run would leave them."""
    contract = active.contract
    own: list[tuple[PartySettings, str]] = [(active, "active"), (passive, "passive")]
    for settings, name in own:
        data = PartyData.load(settings.data, settings.base_dir, contract.split)
        encoder = data.fit(np.arange(len(data.ids)))
        if encoder is None:
            raise RuntimeError("the example has features")
        if isinstance(settings, ActiveSettings):
            model = build_top_model(settings.top_model, contract.aggregate_shape, encoder, seed=0)
        else:
            model = build_bottom_model(passive.bottom_model, encoder, contract.cut_shape, seed=0)
        folder = settings.run_folder(name)
        folder.mkdir(parents=True)
        save_model(folder, model, encoder, identity_metadata(IDENTITY, contract))


@contextmanager
def serve(settings: PassiveSettings, address: str) -> Iterator[None]:
    model = ServedModel.load(settings, CPU)
    service = InferenceService(model, settings.party, settings.contract, Throttle(None))
    credentials = credential_files(settings, settings.party)
    with InferenceServer(service, settings.contract, address, credentials):
        yield


@contextmanager
def started(server: Server, *given: Any) -> Iterator[list[float]]:
    """Run a server in a process of its own; afterwards the list has the CPU seconds it took."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_hold, args=(server, given, there)
    )
    process.start()
    here.recv()
    cpu_s: list[float] = []
    try:
        yield cpu_s
    finally:
        here.send("stop")
        cpu_s.append(here.recv())
        process.join()


def _hold(server: Server, given: Any, line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with server(*given):
        before = cpu_seconds()
        line.send("ready")
        line.recv()
        line.send(cpu_seconds() - before)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def predict(settings: ActiveSettings, ids: list[str], output: Path) -> tuple[float, float]:
    """Predict all ids, and return CPU seconds and seconds."""
    with open_predictor(settings, CPU) as predictor:
        cpu, wall = cpu_seconds(), time.perf_counter()
        parts = Parts(output, PredictionPlan("benchmark", ""), ids)
        batch = BatchPrediction(predictor, settings.contract, settings.reconnect, Interruption())
        result = batch.run(parts, lambda _: None)
        if result.found != len(ids):
            raise RuntimeError(f"found {result.found} of {len(ids)} ids")
        return cpu_seconds() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cached", action="store_true", help="with memory-mapped columns")
    parser.add_argument("--tls", action="store_true", help="with mutual TLS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_environment("grpcio", "protobuf", "pyarrow")
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_example(folder, arguments.rows, cached=arguments.cached)
        if arguments.tls:
            use(make(folder / "certificates"), folder)
        address = free_address()
        both = [f"runs_dir={folder / 'runs'}"]
        passive = load_party_settings(PassiveSettings, folder / "passive.yaml", both)
        own = [*both, f"inference.connect.passive={address}"]
        active = load_party_settings(ActiveSettings, folder / "active.yaml", own)
        save_models(active, passive)
        shuffled = np.random.default_rng(1).permutation(arguments.rows)
        ids = [f"patient-{row:08d}" for row in shuffled]
        print(f"{arguments.rows:,} ids; rows per second of CPU time, in thousands")
        for number in range(arguments.rounds):
            with started(serve, passive, address) as theirs:
                used, wall = predict(active, ids, folder / "predictions.parquet")
            figures = [arguments.rows / seconds / 1000 for seconds in (used, theirs[0], wall)]
            print(
                f"round {number + 1}: active party {figures[0]:.0f}, passive party "
                f"{figures[1]:.0f}; {figures[2]:.0f} per second of time"
            )


if __name__ == "__main__":
    main()
