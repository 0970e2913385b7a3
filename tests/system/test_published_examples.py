"""Examples of the published models, on real rows: checked, and run by two processes."""

import gzip
import os
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.commands import called
from tests.support.programs import ROOT
from tests.support.simulation import free_address
from tests.system.conftest import SAME_SPLIT, needs_data, run_locally

pytestmark = needs_data


@pytest.mark.parametrize("party", ["active", "passive"])
def test_settings_and_data_of_isic_pass_the_check(
    party: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of criteo and avazu train."""
    (tmp_path / "isic" / "images").mkdir(parents=True)
    path = Path(os.environ["SPLITVEIL_DATA"]) / "melanoma" / "melanoma84_u8_1000.npz"
    with np.load(path, allow_pickle=False) as given:
        rows = [
            f"{one.decode()},{label}"
            for one, label in zip(given["isic_id"], given["y"], strict=True)
        ]
        for row, pixels in zip(rows, given["x"], strict=True):
            name = row.partition(",")[0]
            Image.fromarray(pixels).save(tmp_path / "isic" / "images" / f"{name}.jpg")
    (tmp_path / "isic" / "labels.csv").write_text("\n".join(["isic_id,y", *rows, ""]))
    monkeypatch.setenv("SPLITVEIL_DATA", str(tmp_path))
    where = f"--set listen={free_address()}" if party == "active" else ""
    settings = f"deploy/examples/isic/{party}.yaml --set 'security={{mode: insecure}}' {where}"
    done = called(ROOT, f"splitveil {party} check {settings}")
    assert done.exit_code == 0, done.output
    model = "top" if party == "active" else "bottom"
    assert "ok: data: 1,000 rows in" in done.output
    assert f"the {model} model fits them" in done.output


def shuffled_copy(path: Path, folder: Path) -> Path:
    header, *rows = gzip.decompress(path.read_bytes()).decode().splitlines()
    random.Random(5).shuffle(rows)
    copy = folder / "shuffled.csv"
    copy.write_text("\n".join([header, *rows]) + "\n")
    return copy


@pytest.mark.parametrize(
    ("example", "epochs", "rows", "least_auc"),
    [
        ("default_credit", 10, 24_000, 0.755),  # aligned
        ("criteo", 4, 8_000, 0.65),  # raw, through embeddings
        ("avazu", 5, 7_999, 0.62),  # from columns on disk
    ],
)
def test_an_example_is_learnt(
    tmp_path: Path, example: str, epochs: int, rows: int, least_auc: float
) -> None:
    own = []
    if example == "default_credit":
        table = Path(os.environ["SPLITVEIL_DATA"], "default_credit", "host.csv.gz")
        own = [f"passive.data.source.path={shuffled_copy(table, tmp_path)}"]
    if example == "avazu":
        cache = f"data.source.cache_dir={tmp_path}/cache"
        own = [f"active.{cache}", f"passive.{cache}"]
    shared = ("--set", f"contract.epochs={epochs}", "active.defense={name: none}", *own)
    run = run_locally(tmp_path / "runs", example, *shared, *SAME_SPLIT)
    assert run.exit_code == 0, run.output
    summary = run.summary(example, "active")
    assert summary["aligned_rows"] == rows
    assert summary["test_auc"] > least_auc
    if example == "avazu":
        assert run.summary(example, "passive")["leak"]["cut"]["cosine"]["mean"] > 0.95
        assert "to columns on disk" in run.output
        assert len(list((tmp_path / "cache").glob("avazu*"))) == 2  # each reads other columns
    if example == "default_credit":
        assert summary["leak"]["cut"]["cosine"]["mean"] > 0.95
