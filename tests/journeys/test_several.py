"""An example of several passive parties, by the launcher."""

import json
from pathlib import Path

from splitveil.common.record.transcript import FILE, Verified, compare, verify
from tests.system.conftest import run_locally


def test_the_example_with_two_laboratories_runs(tmp_path: Path) -> None:
    few = "attacks=[norm, cosine]"
    own = (f"active.leak_monitor.{few}", "active.refit=null")
    theirs = [f"passive_{party}.adversary.{few}" for party in "ab"]
    shared = ("--set", "contract.epochs=1", "passive_b.model_seed=5")
    options = (*shared, *own, *theirs)
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
