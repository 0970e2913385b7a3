"""One-sided alignment with the real commands over mutual TLS, killed at either side."""

import json
from pathlib import Path

import numpy as np
from pyarrow import parquet

from tests.support import runs
from tests.support.certificates import make, use
from tests.support.processes import Party
from tests.support.simulation import free_address


def write(folder: Path) -> None:
    runs.write_example(folder)
    alignment = {"kind": "one_sided", "min_aligned": 20, "max_set_size": 400}
    contract = {**runs.CONTRACT, "exchange": "one_shot", "alignment": alignment}
    passive = {**runs.PASSIVE, "bottom_model": {"kind": "pca"}, "adversary": None}
    runs.write_yaml(folder, contract=contract, active=runs.ACTIVE, passive=passive)
    use(make(folder / "certificates"), folder)
    lines = (folder / "active.csv").read_text().splitlines()
    (folder / "ids.txt").write_text("\n".join(line.split(",")[0] for line in lines[1:]) + "\n")


def test_killed_parties_train_and_predict_and_the_passive_party_names_no_row(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    address = free_address()
    slow = f"answers.listen={address}", "answers.ids_per_second=150"  # time to be killed in
    where = f"inference.connect.passive={address}"
    with Party("passive", tmp_path) as fitting:
        assert fitting.wait() == 0, fitting.output
    page = (fitting.folder / "report.html").read_text()
    assert "380 records, each sealed" in page
    assert "Columns can be guessed" in page
    with (
        Party("passive", tmp_path, *slow, command="serve") as passive,
        Party("active", tmp_path, where) as active,
    ):
        for killed in (passive, active):
            active.wait_until_says("taking the sealed table")
            killed.kill()
            killed.start()
        assert active.wait() == 0, active.output
        options = ("--ids", str(tmp_path / "ids.txt"), "--output", str(tmp_path / "out.parquet"))
        with Party("active", tmp_path, where, command="predict", options=options) as predicting:
            assert predicting.wait() == 0, predicting.output
    found = parquet.read_table(tmp_path / "out.parquet").column("probability").to_numpy()
    assert np.isfinite(found).sum() == 360
    summary = json.loads((active.folder / "summary.json").read_text())
    assert summary["aligned_rows"] == 360
    assert {"adversary": "anybody", "leak_auc": 0.5, "mu": 0.0} in summary["bounds"]
    lines = (passive.folder / "serve" / "transcript.jsonl").read_text().splitlines()
    kinds = {line.get("kind") for line in map(json.loads, lines)} - {None}
    assert {kind.split()[0] for kind in kinds} == {"Describe", "EmbedTable"}
