"""Modules go into ``simulate``, and trained ones come out of a run, also in other formats."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitveil import Run, models, predict, simulate
from splitveil.active_party.commands.program import parser
from splitveil.active_party.commands.program import run as command
from splitveil.active_party.training.boosting import WithTrees
from splitveil.common.data.features import FeatureEncoder, ImageInfo
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.models.factory import build_bottom_model
from splitveil.library.trained import SUFFIXES, Format, Half
from tests.api.test_simulate import SHORT, Columns, columns
from tests.models.test_models import conv, custom
from tests.support.records import call_of, columns_of, weights_of
from tests.support.runs import write_example

__all__ = ["columns"]


class Embedding(nn.Module):
    def __init__(self, shapes: models.FeatureShapes, width: int = 16) -> None:
        super().__init__()
        (slots,) = shapes.vocabulary_sizes
        self.table = nn.Embedding(slots, 3)
        self.dense = nn.Linear(shapes.numeric_dim + 3, width)

    def forward(self, numbers: Tensor, categorical: Tensor) -> Tensor:
        rows = torch.cat([numbers, self.table(categorical[:, 0])], dim=1)
        activation: Tensor = self.dense(rows)
        return activation


class Whole(Embedding):
    def forward(self, features: models.Features) -> Tensor:  # type: ignore[override]
        assert features.numeric is not None
        assert features.categorical is not None
        return super().forward(features.numeric, features.categorical)


def one_logit(shapes: models.FeatureShapes) -> nn.Module:
    return nn.Bilinear(16, shapes.numeric_dim, 1)


SAME: dict[str, Callable[[], Any]] = {
    "a class that gets tensors": lambda: Embedding,
    "a class that gets features": lambda: Whole,
    "a function": lambda: partial(Embedding, width=16),
    "a section": lambda: {"kind": "custom", "module": Embedding, "arguments": {"width": 16}},
    "text": lambda: {"kind": "custom", "module": f"{__name__}:Embedding"},
}


@pytest.fixture(scope="module")
def expected(columns: Columns) -> dict[str, Tensor]:
    return trained(columns, SAME["text"]())


def trained(columns: Columns, bottom: Any, seed: int = 3) -> dict[str, Tensor]:
    active, passive = columns
    chosen = {**SHORT, "passive.bottom_model": bottom, "active.top_model": one_logit}
    (run,) = simulate(
        active=active, passive=passive, key="id", attacks=[], seeds=[seed], settings=chosen
    )
    assert None not in columns_of(predict(run))["probability"]
    return weights_of(run.path, "passive")


@pytest.mark.parametrize("given", SAME)
def test_a_model_is_a_class_a_function_or_text_with_the_same_bits(
    given: str, columns: Columns, expected: dict[str, Tensor]
) -> None:
    found = trained(columns, SAME[given]())
    assert found.keys() == {"table.weight", "dense.weight", "dense.bias"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_run_trains_a_copy_of_an_instance(columns: Columns) -> None:
    own = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.0))
    before = own.get_parameter("0.weight").detach().clone()
    active, passive = columns
    numbers = {name: passive[name] for name in ("id", "x0", "x1")}
    still = {
        **SHORT,
        "passive.optimizer.learning_rate": np.float64(1e-30),
        "passive.bottom_model": own,
    }
    runs = simulate(active=active, passive=numbers, key="id", attacks=[], seeds=2, settings=still)
    assert torch.equal(own.get_parameter("0.weight"), before)
    for run in runs:
        assert torch.equal(weights_of(run.path, "passive")["0.weight"], before)
    first, second = (weights_of(run.path, "active") for run in runs)
    assert not torch.equal(first["layers.output.weight"], second["layers.output.weight"])


def test_another_process_says_that_an_object_was_given_to_simulate() -> None:
    with pytest.raises(SettingsError, match=r"given to simulate .* name it package\.module:Net"):
        build_bottom_model(
            custom("splitveil.library.handed_over:Net"), models.FeatureShapes(2), (4,), seed=0
        )


def several_logits(shapes: models.FeatureShapes, classes: int) -> nn.Module:
    return nn.Bilinear(16, shapes.numeric_dim, classes)


IN_TWO_LAYERS = {"kind": "mlp", "hidden": [8], "output_activation": "relu"}
HALVES: dict[str, tuple[Any, Any]] = {
    "own": (Embedding, one_logit),
    "mlp": (IN_TWO_LAYERS, {"kind": "mlp", "hidden": [8]}),
    "tabular": ({"kind": "tabular"}, {"kind": "tabular"}),
    "wide_deep": ({"kind": "wide_deep", "hidden": [16]}, {"kind": "wide_deep"}),
    "several classes": (IN_TWO_LAYERS, partial(several_logits, classes=3)),
}


@pytest.fixture(scope="module")
def mixed(columns: Columns) -> Columns:
    active, passive = columns
    gaps = np.where(np.arange(300) % 3 == 0, np.nan, np.round(3 * passive["x1"]))
    tags = np.array(["", "a", "a|b", "b|c"])[np.arange(300) % 4]
    return active, {**passive, "x1": gaps, "tags": tags}


MIXED = {
    **SHORT,
    "passive.data.features.categorical": ["colour"],
    "passive.data.features.lists": ["tags"],
    "passive.data.features.signed_log1p": True,
}


def numbers_of(passive: dict[str, Any]) -> NDArray[np.float64]:
    """Return the columns' numbers as they are, and for each list 1 at a, b and c that it has."""
    tags = [np.char.count(passive["tags"], tag) for tag in "abc"]
    return np.column_stack([passive["x0"], passive["x1"], *tags, np.zeros(300)])


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, mixed: Columns) -> Run:
    active, passive = mixed
    bottom, top = HALVES[request.param]
    if request.param == "several classes":
        active = {**active, "label": np.arange(300) % 3}
    chosen = {**MIXED, "passive.bottom_model": bottom, "active.top_model": top}
    return simulate(active=active, passive=passive, key="id", attacks=[], settings=chosen)[0]


EXPORTED = [
    *((half, "torch.export") for half in HALVES),
    *((half, "onnx") for half in ("own", "tabular", "several classes")),
    # Their export is tested above; ONNX takes three CPU seconds each.
    *(pytest.param(half, "onnx", marks=pytest.mark.slow) for half in ("mlp", "wide_deep")),
]


@pytest.mark.parametrize(("run", "kind"), EXPORTED, indirect=["run"])
def test_exported_halves_give_of_numbers_as_they_are_what_trained_ones_and_predictions_do(
    run: Run, mixed: Columns, kind: Format, tmp_path: Path
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    predicted = columns_of(predict(run, model="trained"))
    ids, places = predicted["id"][7:2:-1], np.arange(7, 2, -1)
    bottom, top = run.model("passive"), run.model("active")
    assert not bottom.training
    assert not top.training
    rows, own = run.features("passive", ids), run.features("active", ids)
    with torch.no_grad():
        activation = bottom(rows)
        logits = top(activation, own)
    names = [name for name in predicted if name.startswith("probability")]
    assert names in (["probability"], ["probability_0", "probability_1", "probability_2"])
    columns = [predicted[name] for name in names]
    found = logits.softmax(1) if logits.ndim == 2 else logits.sigmoid()[:, None]
    torch.testing.assert_close(found, torch.tensor(np.array(columns, np.float32).T[places]))

    exported = {path.stem: path for path in run.export(tmp_path, kind)}
    assert exported.keys() == {"active", "passive"}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    active, passive = mixed
    numbers = [torch.from_numpy(one[places]) for one in (numbers_of(passive), active["own"])]
    categories = {"categorical": rows.categorical}
    found = call_of(exported["passive"])(numeric=numbers[0], **categories)
    torch.testing.assert_close(found, activation, rtol=1e-4, atol=1e-5)
    found = call_of(exported["active"])(activation=activation, numeric=numbers[1][:, None])
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    state = json.loads((tmp_path / "passive.encoder.json").read_text())
    assert FeatureEncoder.from_state(state).shapes.numeric_dim == (
        0 if rows.numeric is None else rows.numeric.shape[1]
    )


@pytest.mark.parametrize("kind", ["torch.export", "onnx"])
def test_images_go_into_an_exported_half_as_bytes(
    kind: Format,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    image = ImageInfo(shape=(1, 8, 8), dtype="uint8")
    encoder = FeatureEncoder(signed_log1p=False, numeric=(), categorical=(), image=image)
    bottom = build_bottom_model(conv(channels=[3]), encoder, (3, 4, 4), seed=0).eval()
    settings: Any = None
    Half(settings, bottom, encoder).export(tmp_path / f"half{SUFFIXES[kind]}", kind)
    assert "torchvision" not in capfd.readouterr().err + caplog.text
    rows = models.Features(image=torch.arange(192, dtype=torch.uint8).reshape(3, 1, 8, 8))
    found = call_of(tmp_path / f"half{SUFFIXES[kind]}")(image=rows.image)
    torch.testing.assert_close(found, bottom(rows).detach(), rtol=1e-4, atol=1e-5)


def test_a_module_beside_the_settings_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_example(tmp_path)
    text = (
        "from torch import nn\n\ndef bottom(shapes):\n    return nn.Linear(shapes.numeric_dim, 4)\n"
    )
    (tmp_path / "beside_settings.py").write_text(text)
    own = {"kind": "custom", "module": "beside_settings:bottom"}
    (run,) = simulate(tmp_path, settings={**SHORT, "passive.bottom_model": own})
    for call in (predict, lambda run: run.model("passive")):
        monkeypatch.delitem(sys.modules, "beside_settings")  # as in another process
        path = list(sys.path)
        call(run)
        assert sys.path == path


class Branching(nn.Linear):
    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers if numbers.sum() > 0 else -numbers)


def test_what_cannot_come_out_of_a_run_is_said(
    columns: Columns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, passive = columns
    numbers = {name: passive[name] for name in ("id", "x0", "x1")}
    chosen = {**SHORT, "passive.bottom_model": Branching(2, 16)}
    (run,) = simulate(active=active, passive=numbers, key="id", attacks=[], settings=chosen)
    new = {"id": ["new"], "x0": [0.5], "x1": [-1.0]}
    rows = run.features("passive", table=new).numeric
    assert rows is not None
    assert rows.shape == (1, 2)
    wrong: dict[str, Callable[[], object]] = {
        "expected active or passive, got 'other'": lambda: run.model("other"),
        "expected torch.export or onnx, got 'pickle'": lambda: run.export(tmp_path, "pickle"),  # type: ignore[arg-type]
        "passive: torch.export cannot express the model": lambda: run.export(tmp_path),
        "1 of 2 ids have no row": lambda: run.features("passive", ["c001", "nobody"]),
        "trained without features here": lambda: simulated_without().features("active"),
        "table.parquet: there is no column 'x1'": lambda: run.features(
            "passive", table={"id": ["new"], "x0": [0.5]}
        ),
    }

    def simulated_without() -> Run:
        labels = {name: active[name] for name in ("id", "label")}
        return simulate(active=labels, passive=numbers, key="id", attacks=[], settings=SHORT)[0]

    for message, call in wrong.items():
        with pytest.raises((SplitveilError, ValueError), match=message):
            call()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(SettingsError, match=r"splitveil\[onnx\]"):
        run.export(tmp_path, "onnx")
    shutil.rmtree(run.path / "passive")
    assert [path.name for path in run.export(tmp_path / "own")] == ["active.pt2"]
    with pytest.raises(SettingsError, match="expected a party's folder of a run"):
        run.model("passive")


def test_a_top_model_is_fitted_again_to_what_a_run_has_left_without_any_peer(
    columns: Columns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels may have been corrected since: nothing of the new model is sent."""
    active, passive = columns
    settings = {**SHORT, "active.refit": {"epochs": 1}, "active.optimizer.learning_rate": 1e-4}
    (run,) = simulate(
        active=active, passive=passive, key="id", attacks=[], runs=tmp_path, settings=settings
    )
    checkpoint = run.path / "active" / "checkpoint"
    left = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert (checkpoint / "activations.safetensors").stat().st_mode & 0o777 == 0o600
    found = run.refit(
        {
            "optimizer.learning_rate": 0.05,
            "refit.epochs": 40,
            "top_model": {"kind": "mlp", "hidden": [5]},
        }
    )
    assert found.is_better
    assert found.before is not None
    assert found.after is not None
    assert found.before.loss != found.after.loss == run.summary["test_loss_refit"]
    assert run.summary["test_auc_refit"] == found.after.auc
    now = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert {name for name in now if now[name] != left.get(name)} == {"refitted.safetensors"}
    (width,) = (
        one.out_features
        for one in run.model("active", "refitted").modules()
        if isinstance(one, nn.Linear) and one.out_features > 1
    )
    assert width == 5
    assert None not in columns_of(predict(run))["probability"]  # by the model it says, as before
    file = shutil.copy(run.path / "active" / "settings.yaml", run.base_dir / "again.yaml")
    assert command(parser().parse_args(["refit", str(file), "--runs", str(tmp_path)])) == 0
    assert "it stays" in capsys.readouterr().out
    assert (checkpoint / "refitted.safetensors").read_bytes() == now["refitted.safetensors"]


def test_trees_beside_the_refitted_top_predict_and_come_out(tmp_path: Path) -> None:
    """The label is whether two numbers have the same sign, which one epoch of a network misses."""
    numbers = np.random.default_rng(1).normal(size=(900, 2))
    ids = [f"person-{row}" for row in range(900)]
    label = (numbers[:, 0] * numbers[:, 1] > 0).astype(int)
    passive = {"id": ids, "x": numbers[:, 0], "y": numbers[:, 1]}
    settings = {**SHORT, "active.refit": {"epochs": 1, "boosting": True}}
    (run,) = simulate(
        active={"id": ids, "label": label, "z": numbers[:, 0]},
        passive=passive,
        key="id",
        attacks=[],
        runs=tmp_path,
        settings=settings,
    )
    top = run.model("active", "refitted")
    assert isinstance(top, WithTrees)
    assert run.summary["test_auc_refit"] > run.summary["test_auc"] + 0.1
    activation = run.model("passive")(run.features("passive", ids[:5])).detach()
    logits = top(activation, run.features("active", ids[:5])).detach()
    found = columns_of(predict(run, ids[:5]))["probability"]
    torch.testing.assert_close(torch.tensor(found), logits.sigmoid(), rtol=1e-4, atol=1e-5)
    exported = run.export(tmp_path / "out", model="refitted")[0]
    own = torch.from_numpy(numbers[:5, :1].copy())
    again = call_of(exported)(activation=activation, numeric=own)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)


def test_no_top_model_is_fitted_to_what_is_not_there(columns: Columns, tmp_path: Path) -> None:
    active, passive = columns
    given: dict[str, Any] = {"key": "id", "attacks": [], "runs": tmp_path}
    (run,) = simulate(active=active, passive=passive, settings=SHORT, **given)
    checkpoint = run.path / "active" / "checkpoint"
    (checkpoint / "activations.safetensors").write_bytes(b"of another kind")
    with pytest.raises(SettingsError, match="cannot be read"):
        run.refit()
    (checkpoint / "activations.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"there is no activations\.safetensors"):
        run.refit()
    with pytest.raises(SettingsError, match="trained under another contract"):
        run.refit({"contract.batch_size": 7})
