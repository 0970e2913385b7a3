"""Examples of several passive parties and of several classes, by the launcher and the demo."""

import json
from pathlib import Path

from splitveil.common.record.transcript import FILE, Verified, compare, verify
from tests.system.conftest import SAME_SPLIT, run_locally


def test_the_example_with_two_laboratories_runs(tmp_path: Path) -> None:
    options = ("--set", "contract.epochs=1", "passive_b.model_seed=5")
    run = run_locally(tmp_path, "breast_cancer_two_labs", *options)
    assert run.exit_code == 0, run.output
    for party in ("active", "means", "extremes"):
        assert run.summary("breast_cancer_two_labs", party)["aligned_rows"] == 569
    assert "cosine" in run.summary("breast_cancer_two_labs", "extremes")["leak"]["cut"]
    assert "norm" in run.summary("breast_cancer_two_labs", "means")["leak"]["first"]
    folder = tmp_path / "breast_cancer_two_labs"
    noted = {party: verify(folder / party / FILE) for party in ("active", "means", "extremes")}
    for party in ("means", "extremes"):
        one, other = noted["active"], noted[party]
        assert isinstance(one, Verified)
        assert isinstance(other, Verified)
        compared = compare(one, other)
        assert compared.agreed > 50
        assert not compared.unsent
    # It is handed to the other parties, and they are never told the defense.
    lines = map(json.loads, (folder / "active" / FILE).read_text().splitlines())
    line = {"number", "time", "link", "party"}
    message = frozenset(line | {"direction", "kind", "epoch", "step", "bytes", "digest"})
    assert {frozenset(one) for one in lines} == {frozenset(line | {"event", "version"}), message}


def test_the_example_without_a_file_learns_ten_digits(tmp_path: Path) -> None:
    options = ("--defense", "none", "--set", "contract.epochs=4", *SAME_SPLIT)
    run = run_locally(tmp_path, "digits", *options, command="demo")
    assert run.exit_code == 0, run.output
    summary = run.summary("digits", "active")
    assert summary["aligned_rows"] == 1797
    assert summary["test_auc"] > 0.95
    assert len(summary["test_auc_by_class"]) == 10
    leak = run.summary("digits", "passive")["leak_classes"]["cut"]["cosine"]
    assert leak["worst_pair_auc"] >= 0.95
    assert len(leak["classes"]) == 10
