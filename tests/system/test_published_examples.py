"""Examples of the published models, on real rows: checked, and run by two processes."""

from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.simulation import free_address
from tests.support.typed import called
from tests.system.conftest import SAME_SPLIT, needs_data, run_locally

pytestmark = needs_data


@pytest.mark.parametrize("party", ["active", "passive"])
def test_settings_and_data_of_isic_pass_the_check(party: str) -> None:
    """Those of criteo and avazu train."""
    where = f"--set listen={free_address()}" if party == "active" else ""
    settings = f"deploy/examples/isic/{party}.yaml --set 'security={{mode: insecure}}' {where}"
    done = called(ROOT, f"splitveil {party} check {settings}")
    assert done.exit_code == 0, done.output
    model = "top" if party == "active" else "bottom"
    assert "ok: data: 1000 rows in" in done.output
    assert f"the {model} model fits them" in done.output


def test_avazu_is_learnt_from_columns_on_disk(tmp_path: Path) -> None:
    cache = [f"{party}.data.source.cache_dir={tmp_path}/cache" for party in ("active", "passive")]
    options = ("--set", "active.defense={name: none}", *cache, *SAME_SPLIT)
    run = run_locally(tmp_path / "runs", "avazu", *options)
    assert run.exit_code == 0, run.output
    summary = run.summary("avazu", "active")
    assert summary["aligned_rows"] == 7_999
    assert summary["test_auc"] > 0.62
    assert run.summary("avazu", "passive")["leak"]["cut"]["cosine"]["mean"] > 0.95
    assert "to columns on disk" in run.output
    assert len(list((tmp_path / "cache").glob("avazu*"))) == 2  # each party reads other columns
