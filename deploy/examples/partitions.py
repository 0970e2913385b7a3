"""Runs a one-pass job part by part, each part of both tables as a task of its own for an engine.

Both parties run the same commands, each with its own table and settings (``own.yaml``):

    python partitions.py split own.csv id parts 16  # parts/0.parquet to parts/15.parquet
    python partitions.py run own.yaml parts 0       # its bottom model is that of all parts
    python partitions.py run own.yaml parts         # the others; --engine tcp://HOST:PORT
    python partitions.py merge own.yaml parts       # at the label owner: one top model for all

An id belongs to the part that the first four bytes of its MD5 digest say, so that part k of one
party holds whatever ids it has in common with part k of the other. Ids have to be written alike:
what the rules of the contract make equal may have digests in different parts. Part k is a run of
its own, k ports above those of the settings, with results in ``runs/k/part-k``; those of ``merge``
are in ``runs/all/part-0``.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path

import yaml

FILE = "activations.safetensors"


def split(table: str, id_column: str, parts: str, number: int) -> None:
    """Write each part of a CSV or Parquet file as a file of its own, in memory that is bounded."""
    import duckdb  # noqa: PLC0415 - splitveil[sql]

    Path(parts).mkdir(mode=0o700, exist_ok=True)
    is_parquet = table.endswith(".parquet")
    rows = duckdb.read_parquet(table) if is_parquet else duckdb.read_csv(table, all_varchar=True)
    name = '"' + id_column.replace('"', '""') + '"'
    digest = f"md5(coalesce({name}::VARCHAR, ''))"
    part = f"('0x' || substr({digest}, 1, 8))::UBIGINT % {number}"
    for k in range(number):
        rows.filter(f"{part} = {k}").write_parquet(str(Path(parts, f"{k}.parquet")))


def run(settings: str, parts: str, part: int) -> None:
    """Run one part of this party, wherever settings and parts are at the same path."""
    own = yaml.safe_load(Path(settings).read_text())
    contract = yaml.safe_load((Path(settings).parent / own["contract"]).read_text())
    if contract.get("exchange") != "one_shot" or contract.get("release"):
        sys.exit("contract: expected exchange: one_shot without a release: no ledger counts parts")
    address = "listen" if "listen" in own else "connect"
    host, _, port = own[address].rpartition(":")
    chosen = [f"{address}={host}:{int(port) + part}", f"contract.run_name=part-{part}"]
    if address == "listen":  # merge fits the model, and it must not be compared on rows it has seen
        chosen += ["refit={epochs: 1}", f"serving.fallback={str(part == 0).lower()}"]
    elif part:
        first = Path("runs/0/part-0/passive/checkpoint").resolve()
        chosen.append(f"initial_weights={first}")
    # A folder of its own: no run that is still going on may be about the same labels.
    splitveil("run", settings, f"runs/{part}", Path(parts, f"{part}.parquet"), chosen)


def splitveil(command: str, settings: str, runs: str, rows: Path, chosen: Sequence[str]) -> None:
    chosen = [*chosen, f"data.source={{kind: parquet, path: '{rows.resolve()}'}}"]
    called = [sys.executable, "-m", "splitveil", command, settings, "--quiet", "--runs", runs]
    subprocess.run([*called, *(f"--set={one}" for one in chosen)], check=True)


def run_all(settings: str, parts: str, engine: Executor) -> None:
    rest = range(1, len([*Path(parts).glob("*.parquet")]))
    list(engine.map(partial(run, settings, parts), rest))


def merge(settings: str, parts: str) -> None:
    """Fit the top model of part 0 again, to the activations of all parts."""
    import torch  # noqa: PLC0415 - splits and runs of a feature owner need none
    from safetensors.torch import load_file  # noqa: PLC0415

    from splitveil.common.record import model_files  # noqa: PLC0415

    found = sorted(Path("runs").glob(f"[0-9]*/part-*/active/checkpoint/{FILE}"))
    if len(found) != (number := len([*Path(parts).glob("*.parquet")])):
        sys.exit(f"merge: {len(found)} of {number} parts have ended")
    tensors = [load_file(path) for path in found]
    folder = shutil.copytree("runs/0/part-0/active", "runs/all/part-0/active", dirs_exist_ok=True)
    joined = {name: torch.cat([one[name] for one in tensors]) for name in tensors[0]}
    said = model_files.metadata_of(Path(folder, "checkpoint"), FILE)
    model_files.save_tensors(Path(folder), FILE, joined, said)
    splitveil("refit", settings, "runs/all", Path(parts, "*.parquet"), ["contract.run_name=part-0"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["split", "run", "merge"])
    parser.add_argument("given", nargs="+")
    parser.add_argument("--engine", metavar="ADDRESS", help="of a Dask scheduler; default: threads")
    parser.add_argument("--at-once", type=int, default=2, help="parts, without an engine")
    parsed = parser.parse_args()
    match parsed.what, parsed.given:
        case "split", (table, id_column, parts, number):
            split(table, id_column, parts, int(number))
        case "run", (settings, parts, part):
            run(settings, parts, int(part))
        case "run", (settings, parts):
            if parsed.engine is None:
                run_all(settings, parts, ThreadPoolExecutor(parsed.at_once))
            else:
                client = import_module("distributed").Client(parsed.engine)
                run_all(settings, parts, client.get_executor())
        case "merge", (settings, parts):
            merge(settings, parts)
        case _:
            parser.error("expected the arguments that the text at the top of this file names")


if __name__ == "__main__":
    main()
