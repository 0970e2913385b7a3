"""``simulate`` in several processes, and what a simulation exports to two real ones."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv
from safetensors.torch import load_file

from splitveil import Run, SettingsError, SplitveilError, predict, simulate
from tests.support.equality import assert_same_weights
from tests.support.processes import started
from tests.support.programs import run_program
from tests.support.records import call_of, columns_of, weights_of
from tests.support.runs import write_example
from tests.support.texts import ENCODER, write_folder

ONE_CORE = {"active.torch_threads": 1, "passive.torch_threads": 1}
SHORT = {**ONE_CORE, "contract.epochs": 1, "active.refit": None}


def killed(shapes: object) -> torch.nn.Module:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Broken(BaseException):
    """An error that nothing expects."""


def broken(shapes: object) -> torch.nn.Module:
    raise Broken("of no section")


def test_runs_side_by_side_have_the_bits_of_runs_one_after_the_other(tmp_path: Path) -> None:
    write_example(tmp_path)
    given: dict[str, Any] = {"defense": ["none", "iso:noise_ratio=2"], "attacks": ["norm"]}
    swept = simulate(tmp_path, settings=SHORT, **given)
    ended = list[Run]()
    ends = SimpleNamespace(on_end=ended.append)  # one callback needs no list
    again = simulate(tmp_path, settings=SHORT, **given, jobs=2, callbacks=ends)
    assert sorted(run.name for run in ended) == sorted(run.name for run in swept)
    assert [run.name for run in again] == [run.name for run in swept]
    assert again.rows("steps") == swept.rows("steps")
    assert again.rows("attacks") == swept.rows("attacks")
    for own, why in (
        (killed, f"signal {signal.SIGKILL:d}, perhaps for want"),
        (broken, r".*Broken: of no section"),
    ):
        chosen_here = SHORT | {"passive.bottom_model": own}
        with pytest.raises(SplitveilError, match=rf"small-seed-0: (ended by )?{why}[^\n]*$"):
            simulate(tmp_path, attacks=[], settings=chosen_here, jobs=2)


@pytest.mark.parametrize("defense", ["marvell", "noisy_label"])
def test_an_exported_run_has_its_bits_at_real_parties(defense: str, tmp_path: Path) -> None:
    """The launcher runs both parties' processes with the files, without the simulation's folder."""
    x = np.random.default_rng(1).normal(size=(300, 3))
    ids = [f"c{i:03d}" for i in range(300)]
    labels = (x[:, 0] + x[:, 2] > 0.5).astype(np.int64)
    columns = {"id": ids, "label": labels, "own": x[:, 2]}, {"id": ids, "x": x[:, 0]}
    given: dict[str, Any] = {"key": "id", "settings": {**ONE_CORE, "contract.epochs": 2}}
    given["attacks"] = ["norm", "spectral", "accumulated_spectral"]
    (run,) = simulate(active=columns[0], passive=columns[1], defense=defense, seeds=[3], **given)
    tables = {"active": tmp_path / "labels.csv", "passive": tmp_path / "features.csv"}
    for table, of_party in zip(tables.values(), columns, strict=True):
        csv.write_csv(pa.table(of_party), table)
    folder = run.export_settings(tmp_path / "ours")
    text = (folder / "passive.yaml").read_text()
    assert "label" not in text
    assert str(run.base_dir) not in text + (folder / "active.yaml").read_text()
    with pytest.raises(SettingsError, match="exists"):
        run.export_settings(folder)
    with pytest.raises(SettingsError, match=r"active: .*\.parquet: .*: name the table in tables="):
        Run(run.path).export_settings(tmp_path / "reopened")
    Run(run.path).export_settings(tmp_path / "reopened", tables=tables)
    run.export_settings(tmp_path / "theirs", seeds=False)
    assert "insecure_no" not in "".join(
        one.read_text() for one in (tmp_path / "theirs").glob("*.yaml")
    )
    words = (sys.executable, "-m", "splitveil", "local", str(folder), "--runs", str(tmp_path))
    done = run_program(*words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    there = Run(tmp_path / run.name)
    for party in ("active", "passive"):
        weights = Path(party, "checkpoint", "model.safetensors")
        assert_same_weights(*(load_file(one.path / weights) for one in (run, there)))
    assert run.rows("epochs") == there.rows("epochs")
    # The passive party's settings are exported without labels, and it measures nothing there.
    assert [one for one in run.rows("attacks") if one["party"] == "active"] == there.rows("attacks")
    assert run.bounds == there.bounds
    assert run.test_auc == there.summary["test_auc"] == there.test_auc


def test_a_pretrained_encoder_trains_slower_and_its_embeddings_not_at_all(tmp_path: Path) -> None:
    """The same bits in two processes; what comes out of the run gives the same outputs."""
    write_folder(tmp_path)
    (run,) = simulate(
        tmp_path, settings={**ONE_CORE, "contract.pipeline_depth": 2}, attacks=["norm"]
    )
    before, after = load_file(tmp_path / ENCODER), weights_of(run.path, "passive")
    moved = {name: (after[f"encoder.{name}"] - one).abs().max() for name, one in before.items()}
    assert moved.pop("embeddings.weight") == 0
    steps = 2 * -(-240 * 6 // 640)
    assert all(0 < float(one) < 1e-4 * 3 * steps for one in moved.values())

    for party in ("active", "passive"):
        shutil.copy(run.path / party / "settings.yaml", tmp_path / f"{party}.yaml")
    with started(tmp_path, f"contract.run_name={run.name}") as pair:
        assert pair.wait() == (0, 0), pair.outputs
    there = Run(tmp_path / "runs" / run.name)
    assert_same_weights(after, weights_of(there.path, "passive"))

    report = (there.path / "passive" / "report.html").read_text()
    assert "of sequences or texts, or with too few records of most values: note, visits" in report

    predicted = columns_of(predict(run, model="trained"))
    ids = predicted["id"][:5]
    rows, own = run.features("passive", ids), run.features("active", ids)
    with torch.no_grad():
        activation = run.model("passive")(rows)
        found = run.model("active")(activation, own).sigmoid()
    torch.testing.assert_close(found, torch.tensor(predicted["probability"][:5]))
    table = csv.read_csv(tmp_path / "passive.csv")
    written = dict(zip(table["id"].to_pylist(), table["x1"].to_pylist(), strict=True))
    numbers = torch.tensor([[written[name]] for name in ids], dtype=torch.float64)
    for kind in ("torch.export", "onnx"):
        _, path = run.export(tmp_path / "out", kind)
        found = call_of(path)(numeric=numbers, tokens=rows.tokens, lengths=rows.lengths)
        torch.testing.assert_close(found, activation, rtol=1e-4, atol=1e-5)
    # Whoever encodes rows for the exported half needs no other file.
    (tmp_path / "tokenizer.json").unlink()
    state = json.loads((tmp_path / "out" / "passive.encoder.json").read_text())
    assert "[CLS]" in state["sequences"][0]["tokenizer"]
