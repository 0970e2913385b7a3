"""The examples of the published models, on real rows: checked, and run by two processes."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.simulation import free_address
from tests.system.conftest import SAME_SPLIT, run_locally

pytestmark = pytest.mark.skipif(
    "SPLITVEIL_DATA" not in os.environ, reason="SPLITVEIL_DATA names no folder with data sets"
)


@pytest.mark.parametrize("party", ["active", "passive"])
@pytest.mark.parametrize(("example", "rows"), [("criteo", 8000), ("avazu", 7999), ("isic", 1000)])
def test_settings_and_data_pass_the_check(example: str, rows: int, party: str) -> None:
    done = run_program(
        *(sys.executable, "-m", f"splitveil.{party}_party", "check"),
        f"deploy/examples/{example}/{party}.yaml",
        *("--set", "security={mode: insecure}", "--set", f"listen={free_address()}")[
            : 4 if party == "active" else 2
        ],
    )
    assert done.returncode == 0, done.stdout
    model = "top" if party == "active" else "bottom"
    assert f"ok: data: {rows} rows in" in done.stdout
    assert f"the {model} model fits them" in done.stdout


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
