"""The shipped models in whole runs: checkpoints, sparse gradients, and data that stay on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.run.test_going_on import EVERY_2, run_on
from tests.support.compared import assert_same
from tests.support.peers import Lost, dying
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, Parties, build_parties, run_in_process

OPTIMIZERS = {
    "dense": {"kind": "adam", "learning_rate": 0.01, "sparse_from_rows": None},
    "sparse": {"kind": "adam", "learning_rate": 0.01, "sparse_from_rows": 1},
}
DEFENSE = "defense={name: marvell, noise: persistent, insecure_noise_seed: 7}"


def write_settings(folder: Path, cut_shape: list[int], **parties: dict[str, Any]) -> None:
    contract = {**CONTRACT, "cut_shape": cut_shape}
    for name, values in {"contract": contract, **parties}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def write_clicks(folder: Path, rows: int = 400) -> None:
    """Write advertisements of two parties: counts and categories on both sides."""
    generator = np.random.default_rng(6)
    site, place, device = (generator.integers(0, size, rows) for size in (40, 12, 9))
    count = generator.exponential(size=rows)
    score = (site % 3 == 0) + (device % 2) + count + generator.normal(size=rows)
    click = (score > np.quantile(score, 0.7)).astype(int)
    (folder / "active.csv").write_text(
        "id,click,device,count\n"
        + "".join(f"{i},{click[i]},d{device[i]},{count[i]}\n" for i in range(rows))
    )
    (folder / "passive.csv").write_text(
        "id,site,place,count\n"
        + "".join(f"{i},s{site[i]},p{place[i]},{count[i] ** 2}\n" for i in reversed(range(rows)))
    )

    def data(party: str, **columns: Any) -> dict[str, Any]:
        source = {"kind": "csv", "path": f"{party}.csv"}
        return {"source": source, "id_column": "id", "features": {"min_count": 3, **columns}}

    active = data("active", numeric="count", categorical="device") | {"label_column": "click"}
    passive = data("passive", numeric="count", categorical=["site", "place"])
    write_settings(
        folder,
        [6],
        active=ACTIVE | {"data": active, "top_model": {"kind": "wide_deep", "hidden": [8]}},
        passive=PASSIVE
        | {"data": passive, "bottom_model": {"kind": "wide_deep", "hidden": [8, 6]}}
        | {"adversary": None},
    )


def write_lesions(folder: Path, rows: int = 80) -> None:
    """Write images on one side, and labels alone on the other."""
    generator = np.random.default_rng(6)
    labels = (generator.random(rows) < 0.4).astype(int)
    (folder / "images").mkdir()
    for row, label in enumerate(labels):
        pixels = generator.integers(0, 120, (8, 9, 3)) + 100 * label
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{row}.png")
    names = "".join(f"{row}.png\n" for row in range(rows))
    (folder / "names.csv").write_text("image\n" + names)
    (folder / "labels.csv").write_text(
        "image,label\n" + "".join(f"{row}.png,{labels[row]}\n" for row in range(rows))
    )
    images = {"kind": "images", "path": "images", "table": "names.csv", "file_column": "image"}
    passive = {
        "source": {**images, "height": 8, "width": 9},
        "id_column": "image",
        "features": {"image": {}},
    }
    active = {
        "source": {"kind": "csv", "path": "labels.csv"},
        "id_column": "image",
        "label_column": "label",
    }
    top = {"kind": "conv", "channels": [3], "hidden": [4]}
    write_settings(
        folder,
        [5, 4, 4],
        active=ACTIVE | {"data": active, "top_model": top},
        passive=PASSIVE
        | {"data": passive, "bottom_model": {"kind": "conv", "channels": [5]}}
        | {"adversary": None},
    )


EXAMPLES = {"wide_deep": write_clicks, "conv": write_lesions}


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    EXAMPLES[request.param](folder)
    return folder


def parties(
    folder: Path, rule: str, *more: str, runs: Path | None = None, defense: str = DEFENSE
) -> Parties:
    both = [EVERY_2, f"optimizer={yaml.safe_dump(OPTIMIZERS[rule], default_flow_style=True)}"]
    return build_parties(folder, [*both, defense, *more], [*both, *more], runs=runs)


@pytest.mark.parametrize(("rule", "at", "after"), [("sparse", 3, True), ("dense", 7, False)])
def test_a_run_resumes_bit_for_bit(
    example: Path, tmp_path: Path, rule: str, at: int, after: bool
) -> None:
    batches = "contract.batch_size=16"
    whole = parties(example, rule, batches)
    run_in_process(whole)
    first = parties(example, rule, batches, runs=tmp_path)
    with pytest.raises(Lost):
        run_in_process(first, dying(at, after=after))
    second = parties(example, rule, batches, runs=tmp_path)
    run_on(second)
    assert second.active.resumed != []
    assert_same(second, whole)


def test_data_on_disk_lead_to_the_same_run_as_data_in_memory(example: Path, tmp_path: Path) -> None:
    in_memory = parties(example, "sparse")
    on_disk = parties(example, "sparse", f"data.source.cache_dir={tmp_path}")
    run_in_process(in_memory)
    run_in_process(on_disk)
    assert_same(on_disk, in_memory)
    assert on_disk.active.losses == in_memory.active.losses


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_wide_deep_learns_from_both_parties(tmp_path: Path, rule: str) -> None:
    write_clicks(tmp_path, 2000)
    trained = parties(tmp_path, rule, "contract.epochs=8", defense="defense={name: none}")
    run_in_process(trained)
    first, last = trained.active.evaluations[0], trained.active.evaluations[-1]
    assert last.auc > 0.8
    assert last.loss < first.loss
    weights = trained.weights()
    assert weights["top.wide.input.embedding.weight"].any()
    assert weights["top.wide.numeric"].any()
    embeddings = weights["passive.input.embedding.weight"]
    assert embeddings.shape[1] == 4
    assert float(embeddings.abs().max()) > 0.05  # beyond where they start
    assert torch.isfinite(embeddings).all()
