"""Model completion and the other attacks on the activations of a trained bottom model."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from splitveil.common.data.features import Features
from splitveil.common.privacy.attacks import FINAL_ATTACKS
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.final_attacks import (
    Hints,
    LastActivations,
    complete_model,
    one_against_rest,
    pick_labelled,
)
from splitveil.common.privacy.leakage import auc, leak_auc
from splitveil.common.privacy.observation import Observation
from splitveil.passive_party import feature_values as module
from splitveil.passive_party.feature_values import feature_values
from tests.support.attacked_run import attacked_run, deal_labels
from tests.support.recorders import recorders
from tests.support.runs import build_parties, run_in_process, write_example

NAMES = tuple(FINAL_ATTACKS)


def trained_activations(
    num_classes: int = 2, num_rows: int = 3000, gap: float = 3.0, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Activations whose classes a bottom model has moved apart, in columns of any scale."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.arange(num_classes, 0, -1).float()
    labels = torch.multinomial(shares, num_rows, replacement=True, generator=generator)
    centres = torch.nn.functional.one_hot(labels, num_classes).float()
    values = torch.randn(num_rows, 20, generator=generator)
    values[:, :num_classes] += gap * centres
    turn = torch.linalg.qr(torch.randn(20, 20, generator=generator))[0]
    return values @ turn * torch.logspace(-2, 2, 20) + 5, labels


def picked(labels: Tensor, num_hints: int, seed: int = 0) -> Hints:
    hints = pick_labelled(labels.numpy(), num_hints, np.random.default_rng(seed))
    assert hints is not None
    return hints


def unknown(labels: Tensor, hints: Hints) -> Tensor:
    chosen = torch.ones(len(labels), dtype=torch.bool)
    chosen[torch.from_numpy(hints.rows)] = False
    return chosen


@pytest.mark.parametrize("num_classes", [2, 4])
def test_forty_labels_complete_a_model_whose_classes_are_apart(num_classes: int) -> None:
    activations, labels = trained_activations(num_classes)
    hints = picked(labels, 40)
    scores = one_against_rest(complete_model(activations, hints, num_classes, seed=0))
    others = unknown(labels, hints)
    for one in range(num_classes):
        assert auc(scores[others, one], (labels == one)[others]) > 0.95


def test_labels_dealt_out_are_not_found() -> None:
    """Five standard errors of an AUC of independent scores."""
    activations, labels = trained_activations()
    dealt = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))]
    hints = picked(dealt, 40)
    scores = one_against_rest(complete_model(activations, hints, 2, seed=0))[:, 1]
    others = unknown(dealt, hints)
    positives = int(dealt[others].sum())
    negatives = int(others.sum()) - positives
    error = np.sqrt((positives + negatives + 1) / (12 * positives * negatives))
    assert leak_auc(scores[others], dealt[others]) < 0.5 + 5 * error


def test_unlabelled_examples_help() -> None:
    """A gap between the classes that all rows show: the head turns across it."""
    gains = []
    for seed in range(8):
        activations, labels = trained_activations(gap=2.5, seed=seed)
        hints = picked(labels, 10, seed)
        others = unknown(labels, hints).numpy()
        scores = one_against_rest(complete_model(activations, hints, 2, seed))[:, 1].numpy()
        values = ((activations - activations.mean(0)) / activations.std(0)).numpy()
        known = LogisticRegression(C=0.1).fit(values[hints.rows], hints.labels)
        alone = known.decision_function(values)
        truth = labels.numpy()[others]
        gains.append(auc(scores[others], truth) - auc(alone[others], truth))
    assert np.median(gains) > 0.005


def test_the_scores_follow_from_seed_and_values_alone() -> None:
    activations, labels = trained_activations(num_rows=400)
    hints = picked(labels, 20)
    before = torch.get_rng_state()
    first = complete_model(activations, hints, 2, seed=3)
    assert torch.equal(first, complete_model(activations, hints, 2, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, complete_model(activations, hints, 2, seed=4))
    with torch.no_grad():
        assert torch.equal(first, complete_model(activations, hints, 2, seed=3))
    scaled = complete_model(activations.double() * 1e6 - 7, hints, 2, seed=3)
    assert torch.allclose(first, scaled, atol=1e-4)


def test_constant_and_extreme_activations_give_finite_scores() -> None:
    hints = Hints(np.array([0, 1, 2]), np.array([0, 1, 1]))
    for values in (torch.zeros(9, 3), torch.full((9, 3), 3e38), torch.eye(9) * 3e38):
        assert bool(complete_model(values, hints, 2, seed=0).isfinite().all())


def test_log_odds_against_the_rest() -> None:
    shares = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    found = one_against_rest(shares.log() + 4)
    assert torch.allclose(found, (shares / (1 - shares)).log())


def test_known_labels_are_equally_many_of_each_class() -> None:
    labels = np.array([0] * 500 + [1] * 30 + [2] * 4)
    hints = pick_labelled(labels, 40, np.random.default_rng(0))
    assert hints is not None
    assert np.bincount(labels[hints.rows]).tolist() == [14, 13, 4]
    assert np.array_equal(hints.labels, labels[hints.rows])
    assert len(set(hints.rows.tolist())) == 31
    generator = np.random.default_rng(0)
    assert pick_labelled(np.zeros(50, dtype=np.int64), 40, generator) is None
    assert pick_labelled(labels[490:], 44, generator) is None


def test_a_run_s_last_activations_are_attacked_at_the_cut() -> None:
    activations, labels = trained_activations(gap=5.0)
    audit = LeakAudit(NAMES, num_examples=len(labels))
    noise = torch.Generator().manual_seed(9)
    for epoch in range(3):
        order = torch.randperm(len(labels), generator=noise)
        for step, rows in enumerate(torch.split(order, 500)):
            seen = activations[rows] if epoch == 2 else torch.randn(len(rows), 20, generator=noise)
            gradients = {"cut": torch.randn(len(rows), 3), "first": torch.randn(len(rows), 3)}
            batch = Observation(epoch, step, gradients, labels[rows], positions=rows)
            audit.observe(dataclasses.replace(batch, activations=seen.float()))
    audit.run.close_epoch()
    found = audit.run.result()[0]
    assert set(found) == {"cut"}
    figures = found["cut"]
    assert set(figures) == set(NAMES)
    assert figures["completion_40"].auc > 0.98
    assert figures["final_nearest_hint"].auc > 0.8
    counts = {name: one.examples for name, one in figures.items()}
    assert counts == {
        "final_kmeans": len(labels),
        "final_nearest_hint": len(labels) - 2,
        **{f"completion_{number}": len(labels) - number for number in (10, 40, 400)},
    }


def test_a_batch_may_be_added_while_figures_are_made() -> None:
    """Features are those of the examples seen before: attacks on a slow machine go on meanwhile."""
    audit = LeakAudit(["completion_10"], num_examples=80)
    labels, values = torch.arange(80) % 2, torch.sin(torch.arange(240.0)).reshape(80, 3)

    def observe(step: int) -> None:
        rows = torch.arange(40) + 40 * step
        batch = Observation(0, step, {"cut": values[rows]}, labels[rows], positions=rows)
        audit.observe(dataclasses.replace(batch, activations=values[rows]))

    def features(positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        observe(1)
        return values[torch.from_numpy(positions)]

    observe(0)
    assert audit.run.result(features)[0]["cut"]["completion_10"].examples == 30


@pytest.mark.parametrize("name", NAMES)
def test_without_activations_nothing_is_found(name: str) -> None:
    audit = LeakAudit([name], num_examples=8)
    labels = torch.arange(8) % 2
    audit.observe(Observation(0, 0, {"cut": torch.randn(8, 2)}, labels, positions=torch.arange(8)))
    assert audit.run.result()[0] == {}


def test_the_latest_activation_of_each_example_counts() -> None:
    last = LastActivations(6)
    last.add(torch.tensor([4, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    last.add(torch.tensor([1, 0]), torch.tensor([[5.0, 1e30], [7.0, 8.0]]))
    positions, activations = last.seen()
    assert positions.tolist() == [0, 1, 4]
    assert activations.tolist() == [[7.0, 8.0], [5.0, 6e4], [1.0, 2.0]]


def test_of_a_long_run_evenly_spaced_examples_are_kept() -> None:
    """Half a million examples of 256 numbers: every fourth, and 64 MiB."""
    last = LastActivations(500_000)
    rows = torch.arange(100, 200)
    last.add(rows, rows[:, None].expand(-1, 256).float())
    positions, activations = last.seen()
    assert positions.tolist() == list(range(100, 200, 4))
    assert activations[:, 0].tolist() == positions.tolist()
    assert last.state_dict()["rows"].nbytes <= 2**26


def test_both_parties_of_a_run_record_what_completion_finds(tmp_path: Path) -> None:
    """Nearly as much as this party's features can: the other one's are as large a part."""
    write_example(tmp_path, rows=900)
    chosen = f"attacks: [norm, {', '.join(NAMES)}], max_cpu_share: null"
    labels = "labels: {source: {kind: csv, path: active.csv}, id_column: id, label_column: label}"
    long = ["contract.epochs=12", "optimizer.learning_rate=0.01"]
    parties = build_parties(
        tmp_path,
        [*long, "insecure_nonce_seed=1", f"leak_monitor={{{chosen}}}"],
        [*long, "insecure_nonce_seed=2", f"adversary={{{chosen}, {labels}}}"],
    )
    with recorders(parties, tmp_path) as both:
        run_in_process(parties)
    bottom = parties.run.trainer
    assert bottom is not None
    active, passive = (
        summary.form()["leak_run_level"]["cut"]
        for summary in (
            both.active.summary({}),
            both.passive.summary(getattr(bottom, "feature_values", None)),
        )
    )
    assert active["completion_40"]["low"] > 0.8
    over = passive["completion_40"]["over_features"]
    assert over["prior"] + over["value"] == pytest.approx(passive["completion_40"]["auc"], abs=1e-4)
    assert over["low"] > 0  # the bottom model has learned from the other party's columns, too
    assert active["completion_40"]["auc"] > active["final_nearest_hint"]["auc"]
    assert active.keys() == passive.keys()


def test_features_of_all_kinds_become_numbers() -> None:
    features = Features(
        numeric=torch.tensor([[1e9], [2.0]]),
        categorical=torch.tensor([[7, 3], [7, 9]]),
        image=torch.full((2, 1, 32, 32), 255, dtype=torch.uint8),
        tokens=torch.tensor([[3, 3, 0], [999, 5, 0]]),
    )
    values = feature_values(features)
    assert values is not None
    assert values.shape == (2, 1 + 1 + 2 + 257 + 256)
    assert bool(values.isfinite().all())
    assert values[:, 1:4].tolist() == [[1, 1, 0], [1, 0, 1]]
    assert values[0, 4 + 3] == 2


def test_features_are_computed_in_blocks_and_too_many_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(1)
    features = Features(
        numeric=torch.randn(50, 2, generator=generator),
        categorical=torch.randint(0, 5, (50, 3), generator=generator),
    )
    whole = feature_values(features)
    assert whole is not None
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 7)
    in_blocks = feature_values(features)
    assert in_blocks is not None
    assert torch.equal(in_blocks, whole)
    monkeypatch.setattr(module, "_MOST_VALUES", whole.numel() - 1)
    assert feature_values(features) is None


@pytest.mark.parametrize(
    ("defense", "hidden", "memorises"),
    [
        ("{name: none}", "[64, 64, 64]", True),
        ("{name: none}", "[]", False),
        ("{name: noisy_label, insecure_noise_seed: 7}", "[64, 64, 64]", False),
    ],
)
def test_a_deep_bottom_model_memorises_labels_that_no_defense_protects(
    tmp_path: Path, defense: str, hidden: str, memorises: bool
) -> None:
    """Features say nothing of labels that were dealt out; chance moves the AUC by .03."""
    write_example(tmp_path, rows=1000)
    both = ["contract.epochs=40", "optimizer.learning_rate=0.01"]
    run = attacked_run(
        tmp_path,
        [*both, f"defense={defense}", *deal_labels(tmp_path, tmp_path, seed=0)],
        [*both, f"bottom_model={{kind: mlp, hidden: {hidden}}}"],
        ["completion_40"],
    )
    found = run.run_level["cut"]["completion_40"]
    assert found.low > 0.7 if memorises else found.low < 0.6
