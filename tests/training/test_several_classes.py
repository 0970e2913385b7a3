"""More than two classes, from file to ledger: labels, refusals, training, resume, plan."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.features import FeatureShapes
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table import read_table
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.models.factory import build_top_model
from splitveil.common.models.settings import ConvModel, MlpModel, ModelSettings, WideDeepModel
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.settings import validate
from splitveil.common.text.wording import at_most
from tests.support.plans import printed_plan
from tests.support.runs import build_parties, run_in_process, run_together, write_several
from tests.support.tables import CLASSES, write_classes

FLIPS = "{name: noisy_label, mechanism: {kind: randomized_response, epsilon: 2}}"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_classes(folder)
    return folder


# ---- labels ----


def labels_of(folder: Path, column: str, classes: object, *cells: str) -> list[float]:
    path = folder / "labels.csv"
    path.write_text("".join(f"{cell}\n" for cell in [column, *cells]))
    values = {"source": {"kind": "csv", "path": str(path)}, "label_column": column}
    settings = validate(DataSettings, {**values, "classes": classes}, "data")
    labels = read_table(settings, folder).labels
    assert labels is not None
    assert labels.dtype == np.float32
    return [float(label) for label in labels]


def test_labels_are_places_of_the_classes_named(tmp_path: Path) -> None:
    cells = ("van", "bus", "opel", " saab ", "bus")
    assert labels_of(tmp_path, "label", list(CLASSES), *cells) == [3, 0, 1, 2, 0]
    assert labels_of(tmp_path, "label", ["van", "opel", "saab", "bus"], *cells) == [0, 3, 1, 2, 3]


def test_labels_are_whole_numbers_by_count_or_as_they_are_listed(tmp_path: Path) -> None:
    cells = ("2", "0", "1", "2")
    assert labels_of(tmp_path, "y", 3, *cells) == [2, 0, 1, 2]
    assert labels_of(tmp_path, "y", [2, 1, 0], *cells) == [0, 2, 1, 0]
    assert labels_of(tmp_path, "y", [1, 2, 7], "7", "1", "2") == [2, 0, 1]


@pytest.mark.parametrize(
    ("classes", "cells", "part"),
    [
        (
            ["bus", "opel", "van"],
            ("bus", "tram", "van", "opel", "bike", "tram"),
            "data.classes in rows 2, 5, 6 (3 in all); found 2 distinct values there",
        ),
        (3, ("0", "1", "2", "3"), "expected a whole number from 0 to 2 in row 4"),
        (3, ("0", "1", "2", "1.5"), "expected a whole number from 0 to 2 in row 4"),
        (["bus", "opel", "van"], ("bus", " ", "van", "opel"), "in row 2"),
        (["bus", "opel", "van"], ("bus", "bus", "opel"), "no row has class 'van'"),
        (4, ("0", "1", "3"), "no row has class '2'"),
    ],
)
def test_labels_that_do_not_fit_are_counted_and_not_told(
    tmp_path: Path, classes: object, cells: tuple[str, ...], part: str
) -> None:
    with pytest.raises(DataError) as raised:
        labels_of(tmp_path, "y", classes, *cells)
    assert part in str(raised.value)
    assert "tram" not in str(raised.value)
    assert "1.5" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"classes": 2}, "at least 3"),
        ({"classes": ["a", "b"]}, "at least 3"),
        ({"classes": ["a", "b", "a"]}, "only once"),
        ({"classes": 101}, "at most 100"),
        ({"classes": [0.5, 1, 2]}, "expected a text"),
        ({"classes": 3, "positive_label": "x"}, "positive_label is for two classes"),
        ({"classes": 3, "label_column": None, "features": {"numeric": "x"}}, "label_column"),
    ],
)
def test_impossible_classes_are_refused(values: dict[str, Any], part: str) -> None:
    plain = {"source": {"kind": "csv", "path": "x.csv"}, "label_column": "y", **values}
    with pytest.raises(SettingsError) as raised:
        validate(DataSettings, plain, "data")
    assert part in str(raised.value)


def test_columns_on_disk_hold_the_same_labels(example: Path, tmp_path: Path) -> None:
    overrides = ["insecure_nonce_seed=1"]
    cached = [*overrides, f"data.source.cache_dir={tmp_path}"]
    found = []
    for chosen in (overrides, cached, cached):
        settings = load_party_settings(ActiveSettings, example / "active.yaml", chosen)
        data = PartyData.load(settings.data, example)
        found.append(data.labels_of(sorted(data.ids)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(list(tmp_path.glob("active.csv-*"))) == 1
    wrong = [*cached, "data.classes=[bus, opel, saab, tram]"]
    settings = load_party_settings(ActiveSettings, example / "active.yaml", wrong)
    with pytest.raises(DataError, match="found 1 distinct value there"):
        PartyData.load(settings.data, example)


# ---- models ----


@pytest.mark.parametrize(
    ("settings", "cut_shape"),
    [
        (MlpModel(kind="mlp"), (6,)),
        (WideDeepModel(kind="wide_deep", hidden=(5,)), (6,)),
        (ConvModel(kind="conv", channels=(3,)), (2, 4, 4)),
    ],
)
def test_every_top_model_has_a_logit_for_each_class(
    settings: ModelSettings, cut_shape: tuple[int, ...]
) -> None:
    shapes = FeatureShapes(numeric_dim=2, vocabulary_sizes=(3, 4), image_shape=None)

    def model(num_classes: int) -> nn.Module:
        return build_top_model(settings, cut_shape, shapes, seed=1, num_classes=num_classes)

    activation = torch.randn(5, *cut_shape, generator=torch.Generator().manual_seed(1))
    assert model(4)(activation, shapes.zeros(5)).shape == (5, 4)
    assert model(2)(activation, shapes.zeros(5)).shape == (5,)
    for name, weights in model(4).named_parameters():
        assert weights.requires_grad, name


# ---- settings ----


@pytest.mark.parametrize(
    ("defense", "part"),
    [
        ("{name: gafm}", "gafm is defined for two classes alone"),
        ("{name: max_norm_positive}", "max_norm_positive is defined for two classes alone"),
        ("{name: marvell, noise: persistent}", "persistent noise of marvell"),
        ("{name: iso, noise: persistent}", "persistent noise of iso"),
        ("{name: noisy_label}", "noisy_label by gaussian noise"),
        (
            "{name: noisy_label, mechanism: {kind: laplace, epsilon: 1}}",
            "mechanism: {kind: randomized_response, epsilon: ...}",
        ),
    ],
)
def test_a_defense_of_two_classes_is_refused_when_the_settings_are_read(
    example: Path, defense: str, part: str
) -> None:
    overrides = [f"defense={defense}"]
    with pytest.raises(SettingsError) as raised:
        load_party_settings(ActiveSettings, example / "active.yaml", overrides)
    assert part in str(raised.value)
    assert "data.classes: 4" in str(raised.value)
    two = [*overrides, "data={source: {kind: csv, path: x}, id_column: id, label_column: y}"]
    load_party_settings(ActiveSettings, example / "active.yaml", two)


# ---- runs ----


def test_a_run_learns_and_its_figures_are_of_the_classes(example: Path) -> None:
    parties = build_parties(example, ["contract.epochs=15"], ["contract.epochs=15"])
    run_in_process(parties)
    tests = [one.figures for one in parties.active.evaluations if one.split == "test"]
    first, last = tests[0].form(), tests[-1].form()
    assert last["auc"] > 0.95
    assert last["loss"] < 0.7 * first["loss"]
    assert last["accuracy"] > 0.8
    assert last["auc"] == pytest.approx(np.mean([*last["auc_by_class"].values()]), abs=1e-12)
    trainer, rows = parties.session.lifecycle.trainer, parties.active.rows
    assert trainer is not None
    assert rows is not None
    assert sorted(set(trainer.labels_of(rows.splits["train"]).tolist())) == [0, 1, 2, 3]


# ---- plan ----


def test_the_plan_names_the_classes_and_the_range_of_charges(example: Path) -> None:
    printed = printed_plan(
        example, "defense={name: marvell, strength: {power_ratio: 4}}", target=0.65
    )
    assert "4 classes: 'bus' " in printed
    assert "positive" not in printed
    factor = 3 * (1 + math.sqrt(3)) / 2
    assert f"at most {at_most(factor / 4)}" in printed
    assert "pair of classes left furthest apart" in printed
    assert "persistent" not in printed
    assert "whatever the class means" in printed
    exact = printed_plan(example, "defense={name: marvell, strength: {sum_kl: 0.25}}")
    assert "at most 0.25 " in exact
    running = "defense={name: marvell, statistics: running, strength: {sum_kl: 0.25}}"
    assert "at most" not in printed_plan(example, running)
    assert "Met by every batch" in exact
    noisy = printed_plan(example, f"defense={FLIPS}")
    kept = math.exp(2) / (3 + math.exp(2))
    assert at_most(4 * (kept - (1 - kept) / 3)) in noisy


# ---- several passive parties ----


def with_classes(folder: Path) -> Path:
    """Write an example of three passive parties, its labels made three classes of."""
    write_several(folder, 3)
    lines = (folder / "active.csv").read_text().splitlines()
    text = [lines[0]]
    for line in lines[1:]:
        name, label, *own = line.split(",")
        text.append(",".join([name, label if float(own[0]) < 0.5 else "2", *own]))
    (folder / "active.csv").write_text("\n".join(text) + "\n")
    return folder


@pytest.mark.parametrize("aggregation", ["mean", "concat"])
def test_one_gradient_is_defended_for_all_passive_parties(tmp_path: Path, aggregation: str) -> None:
    """Their parts together are the gradient that was charged once: marvell on the whole cut."""
    marvell = "defense={name: marvell, strength: {sum_kl: 0.2}, insecure_noise_seed: 7}"
    both = [f"contract.aggregation={aggregation}"]
    several = build_parties(with_classes(tmp_path), [*both, "data.classes=3", marvell], both)
    run_together(several)
    assert several.errors == {}
    parts = [torch.stack(party.seen.received[:2]) for party in several.peers.values()]
    sent = torch.stack(several.active.sent[:2])
    together = torch.cat(parts, dim=2) if aggregation == "concat" else 3 * parts[0]
    assert torch.allclose(together, sent, rtol=1e-6, atol=0)
    assert several.active.evaluations[-1].figures.auc_by_class
    _, bounds = several.active.ledger[-1]
    # Two epochs; the steps before every class was seen are charged nothing.
    assert bounds.sum_kl.max == pytest.approx(0.4, rel=1e-6)
