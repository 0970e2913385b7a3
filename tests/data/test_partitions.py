"""The example that divides both parties' tables into parts which meet each other."""

from collections.abc import Sequence
from hashlib import md5
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import yaml
from pyarrow import csv, parquet
from safetensors.torch import load_file

from splitveil.common.record import model_files
from splitveil.deploy.examples import partitions
from splitveil.deploy.examples.partitions import merge, run, split

PART_0, PART_2 = "contract.run_name=part-0", "contract.run_name=part-2"

Called = list[tuple[str, str, str, Path, Sequence[str]]]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Called:
    """Return what records the commands that the example would start, in a folder of three parts."""
    found: Called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(partitions, "splitveil", lambda *given: found.append(given))
    Path("parts").mkdir()
    for part in range(3):
        Path("parts", f"{part}.parquet").touch()
    write_settings()
    return found


def write_settings(**contract: object) -> None:
    addresses = {"active": {"listen": "0.0.0.0:5000"}, "passive": {"connect": "[::1]:5000"}}
    for party, address in addresses.items():
        Path(f"{party}.yaml").write_text(yaml.safe_dump({"contract": "both.yaml", **address}))
    Path("both.yaml").write_text(yaml.safe_dump({"exchange": "one_shot", **contract}))


def test_an_id_is_in_the_part_of_its_digest_whatever_file_it_comes_from(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    ids = [f"{number:03d}" for number in range(60)]
    tables = {"own.csv": ids[:40], "other.parquet": ids[20:][::-1]}
    for file, some in tables.items():
        rows = pa.table({"the id": some, "x": [int(one) for one in some]})
        write = csv.write_csv if file.endswith("csv") else parquet.write_table
        write(rows, tmp_path / file)
        split(str(tmp_path / file), "the id", str(tmp_path / f"{file} parts"), 3)
        for part in range(3):
            found = parquet.read_table(tmp_path / f"{file} parts" / f"{part}.parquet")
            wanted = [one for one in some if int(md5(one.encode()).hexdigest()[:8], 16) % 3 == part]  # noqa: S324
            assert found["the id"].to_pylist() == wanted
            assert [int(x) for x in found["x"].to_pylist()] == [int(one) for one in wanted]


def test_a_part_is_a_run_of_its_own_that_begins_with_the_model_of_part_0(called: Called) -> None:
    for party in ("active", "passive"):
        for part in (0, 2):
            run(f"{party}.yaml", "parts", part)
    first = Path("runs/0/part-0/passive/checkpoint").resolve()
    refit = "refit={epochs: 1}"
    assert called == [
        ("run", f"{party}.yaml", f"runs/{part}", Path("parts", f"{part}.parquet"), chosen)
        for party, part, chosen in (
            ("active", 0, ["listen=0.0.0.0:5000", PART_0, refit, "serving.fallback=true"]),
            ("active", 2, ["listen=0.0.0.0:5002", PART_2, refit, "serving.fallback=false"]),
            ("passive", 0, ["connect=[::1]:5000", PART_0]),
            ("passive", 2, ["connect=[::1]:5002", PART_2, f"initial_weights={first}"]),
        )
    ]


@pytest.mark.parametrize("contract", [{"exchange": "gradients"}, {"release": {"kind": "gaussian"}}])
def test_a_contract_whose_bounds_nobody_would_add_up_is_refused(
    contract: dict[str, object], called: Called
) -> None:
    write_settings(**contract)
    with pytest.raises(SystemExit, match="no ledger counts parts"):
        run("active.yaml", "parts", 1)
    assert not called


def test_parts_are_merged_once_all_have_ended(called: Called) -> None:
    said = [{"run": str(part)} for part in range(3)]
    tensors = [
        {"names": torch.full((2 + k, 16), k), "activations": torch.full((2 + k, 4), float(k))}
        for k in range(3)
    ]
    for k in range(3):
        if k == 2:
            with pytest.raises(SystemExit, match="merge: 2 of 3 parts have ended"):
                merge("active.yaml", "parts")
            assert not called
            assert not Path("runs/all").exists()
        folder = Path(f"runs/{k}/part-{k}/active")
        Path(folder, "checkpoint").mkdir(parents=True)
        model_files.save_tensors(folder, partitions.FILE, tensors[k], said[k])
    Path("runs/0/part-0/active/summary.json").write_text("{}")
    for _ in range(2):  # the result of the first time is no part of the second
        merge("active.yaml", "parts")
        ran = called.pop()
        assert ran == ("refit", "active.yaml", "runs/all", Path("parts/*.parquet"), [PART_0])
        checkpoint = Path("runs/all/part-0/active/checkpoint")
        assert model_files.metadata_of(checkpoint, partitions.FILE) == said[0]
        joined = load_file(checkpoint / partitions.FILE)
        assert joined.keys() == tensors[0].keys()
        for name, found in joined.items():
            assert torch.equal(found, torch.cat([one[name] for one in tensors]))
        assert Path(checkpoint.parent, "summary.json").exists()
