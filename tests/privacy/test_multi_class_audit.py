"""Audits with more than two classes: against scikit-learn, from checkpoints, and in files."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from splitveil.active_party.report import write_comparison, write_report
from splitveil.common.privacy.attacks import ATTACKS, BUILT_IN_NAMES, FINAL_ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.observation import LabelClasses, Observation
from splitveil.common.record.run_record import write_summary
from tests.support.equality import same, stored
from tests.support.recorders import recorders
from tests.support.runs import build_parties, run_in_process
from tests.support.tables import CLASSES, write_classes

SEED = bytes(32)
NAMES = ("a", "b", "c")
ALL = BUILT_IN_NAMES
NUM_EXAMPLES = 120


def observation(audit: LeakAudit, epoch: int, step: int, rows: int = 60) -> Observation:
    """One batch of noisy gradients of a softmax at two layers; every example once per epoch."""
    generator = torch.Generator().manual_seed(1000 * epoch + step)
    positions = torch.arange(step * rows, (step + 1) * rows)
    labels = (positions % 7).clamp(max=3).sub(1).clamp(min=0)  # 2/7, 1/7, 4/7
    residuals = torch.full((rows, 3), 1 / 3) - torch.eye(3)[labels]
    layers = {}
    slopes = torch.empty(0)
    for layer, layer_dim in {"cut": 8, "first": 12}.items():
        weights = torch.randn(3, layer_dim, generator=torch.Generator().manual_seed(layer_dim))
        noise = torch.randn(rows, layer_dim, generator=generator)
        layers[layer] = residuals @ weights + 0.6 * noise
        if layer == "cut":
            slopes = weights.expand(rows, 3, layer_dim)
    activations = torch.randn(rows, 4, generator=generator)
    seen = Observation(
        epoch,
        step,
        layers,
        labels.float(),
        references_are_clean=False,
        positions=positions,
        activations=activations,
        predictions=KnownPredictions(torch.full((rows, 3), 1 / 3), slopes),
    )
    return dataclasses.replace(seen, clues=audit.clues(seen, SEED, layers))


def batches(audit: LeakAudit, epochs: int = 3) -> Iterator[Observation]:
    for epoch, step in itertools.product(range(epochs), range(NUM_EXAMPLES // 60)):
        yield observation(audit, epoch, step)


def new_audit(attacks: Sequence[str] = ALL) -> LeakAudit:
    return LeakAudit(attacks, num_examples=NUM_EXAMPLES, labels=LabelClasses(NAMES))


def leak(labels: np.ndarray, scores: np.ndarray, one: int, other: int | None) -> float:
    """scikit-learn's leak AUC of one class against another one, or against the rest."""
    chosen = np.ones(len(labels), bool) if other is None else np.isin(labels, (one, other))
    area = roc_auc_score(labels[chosen] == one, scores[chosen])
    return float(max(area, 1 - area))


def test_a_batch_gets_scikit_learn_s_worst_pairs_and_classes() -> None:
    """norm and spectral by one score, cosine by one for each class, its reference left out."""
    audit = new_audit(("norm", "cosine", "spectral"))
    seen = observation(audit, 0, 0)
    measured = audit.observe(seen)
    assert measured is not None
    labels = seen.labels.numpy()
    for layer, gradients in seen.gradients.items():
        rows = gradients.double().numpy()
        lengths = np.sqrt((rows**2).sum(axis=1))
        top = np.linalg.svd(rows)[2][0]
        found = audit.classes()[layer]
        for name, scores in (("norm", lengths), ("spectral", rows @ top)):
            pairs = {p: leak(labels, scores, *p) for p in permutations(range(3), 2)}
            assert measured.leak[layer][name] == pytest.approx(max(pairs.values()), abs=1e-12)
            assert found[name].worst_pair_auc == pytest.approx(max(pairs.values()), abs=1e-12)
            for place, of_class in enumerate(NAMES):
                expected = leak(labels, scores, place, None)
                assert found[name].classes[of_class] == pytest.approx(expected, abs=1e-12)
        by_pair = {}
        for place, of_class in enumerate(NAMES):
            row = seen.clues[place].reference_row
            assert row is not None
            assert labels[row] == place
            chosen = np.arange(len(labels)) != row
            cosines = (rows @ rows[row] / lengths / lengths[row])[chosen]
            for other in set(range(3)) - {place}:
                by_pair[place, other] = leak(labels[chosen], cosines, place, other)
            expected = leak(labels[chosen], cosines, place, None)
            assert found["cosine"].classes[of_class] == pytest.approx(expected, abs=1e-9)
        worst = max(by_pair, key=lambda pair: by_pair[pair])
        assert measured.leak[layer]["cosine"] == pytest.approx(by_pair[worst], abs=1e-9)
        assert found["cosine"].worst_pair == tuple(NAMES[place] for place in worst)


def test_every_attack_is_measured_for_every_class_and_pair() -> None:
    audit = new_audit()
    for seen in batches(audit):
        audit.observe(seen)
    audit.run.close_epoch()
    worst, by_class = audit.run.result()
    for layer in ("cut", "first"):
        of_cut = {"activation_spectral", "activation_kmeans", "informed"}
        at_cut = set() if layer == "cut" else of_cut
        expected = set(ATTACKS) - at_cut
        assert set(audit.summary()[layer]) == set(audit.classes()[layer]) == expected
        for attack, found in audit.classes()[layer].items():
            assert set(found.classes) == set(NAMES), attack
            areas = [area for area in found.classes.values() if area is not None]
            assert len(areas) == len(NAMES)
            assert all(0.5 <= area <= 1 for area in areas)
            assert found.worst_pair_auc is not None
            assert found.worst_pair_auc >= max(areas) - 1e-12
            assert audit.summary()[layer][attack].mean >= found.worst_pair_auc - 1e-12
        of_run = set(RUN_ATTACKS) - {
            "hint_combiner_200",
            "completion_400",
        }  # all examples
        of_run -= {f"accumulated_{name}" for name in at_cut}
        of_run -= set() if layer == "cut" else set(FINAL_ATTACKS)
        assert set(worst[layer]) == set(by_class[layer]) == of_run
    assert worst["cut"]["accumulated_cosine"].auc > 0.95
    assert audit.summary()["cut"]["lda"].mean > audit.summary()["cut"]["norm"].mean


def test_each_class_is_taken_for_the_positives_as_for_two_classes() -> None:
    """The figures for class c alone, of a batch and over the run, equal those of two classes."""
    oracles: tuple[str, ...] = ("mean", "median", "lda", "hint_inner_product_3")
    audit = new_audit((*oracles, "accumulated_cosine"))
    everything = list(batches(audit))
    for seen in everything:
        audit.observe(seen)
    of_run = audit.run.result()[1]
    for place, name in enumerate(NAMES):
        binary = LeakAudit((*oracles, "accumulated_cosine"), num_examples=NUM_EXAMPLES)
        for seen in everything:
            labels, clues = (seen.labels == place).float(), {1: seen.clues[place]}
            binary.observe(dataclasses.replace(seen, labels=labels, clues=clues, predictions=None))
        for layer in ("cut", "first"):
            for attack in oracles:
                ours = audit.classes()[layer][attack].classes[name]
                assert ours == pytest.approx(binary.summary()[layer][attack].mean, abs=1e-12)
            ours = of_run[layer]["accumulated_cosine"].classes[name]
            expected = binary.run.result()[0][layer]["accumulated_cosine"].auc
            assert ours == pytest.approx(expected, abs=1e-9)


def test_random_scores_are_measured_in_the_same_way() -> None:
    """Their worst pair lies where that of noise does, and above any single pair's."""
    audit = new_audit(("norm",))
    noise = []
    for step in range(40):
        seen = observation(audit, 0, 0)
        gradients = torch.randn(60, 8, generator=torch.Generator().manual_seed(step))
        clueless = dataclasses.replace(seen, step=step, gradients={"cut": gradients})
        measured = audit.observe(clueless)
        assert measured is not None
        noise.append((measured.leak["cut"]["norm"], measured.random))
    of_norm, of_random = np.mean(noise, axis=0)
    assert of_norm == pytest.approx(of_random, abs=0.03)
    assert of_random > 0.6
    assert audit.classes()["cut"]["norm"].worst_pair_random < of_random


def test_a_batch_without_a_class_is_measured_for_the_others() -> None:
    audit = new_audit(("norm", "cosine", "lda", "accumulated_cosine"))
    seen = observation(audit, 0, 0)
    chosen = seen.labels != 1
    assert seen.positions is not None
    chosen_rows = {layer: rows[chosen] for layer, rows in seen.gradients.items()}
    seen = Observation(0, 0, chosen_rows, seen.labels[chosen], positions=seen.positions[chosen])
    seen = dataclasses.replace(seen, clues=audit.clues(seen, SEED, chosen_rows))
    measured = audit.observe(seen)
    assert measured is not None
    classes = audit.classes()["cut"]["cosine"].classes
    assert classes["b"] is None
    assert (classes["a"] or 0.0) > 0.5
    alone = Observation(0, 1, {"cut": torch.randn(5, 8)}, torch.full((5,), 2.0))
    alone = dataclasses.replace(alone, clues=audit.clues(alone, SEED, alone.gradients))
    assert audit.observe(alone) is None
    assert audit.counts().skipped_one_class == 1


def test_a_stored_audit_resumes_to_the_same_figures() -> None:
    whole, first = new_audit(), new_audit()
    everything = list(batches(whole))
    for seen in everything:
        whole.observe(seen)
    for seen in everything[:3]:
        first.observe(seen)
    second = new_audit()
    second.load_state_dict(stored(first.state_dict()))
    assert same(second.state_dict(), first.state_dict())
    for seen in everything[3:]:
        second.observe(seen)
    for audit in (whole, second):
        audit.run.close_epoch()
    assert same(second.state_dict(), whole.state_dict())
    assert second.run.result() == whole.run.result()
    assert second.classes() == whole.classes()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (
            LeakAudit(ALL, num_examples=NUM_EXAMPLES, labels=LabelClasses((*NAMES, "d"))),
            "4 classes",
        ),
        (LeakAudit(("norm",), num_examples=NUM_EXAMPLES, labels=LabelClasses(NAMES)), "norm"),
        (LeakAudit(ALL, num_examples=7, labels=LabelClasses(NAMES)), "7 examples"),
    ],
)
def test_another_audit_s_state_is_refused(other: LeakAudit, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        other.load_state_dict(new_audit().state_dict())
    with pytest.raises(ValueError, match="classes"):
        new_audit().load_state_dict(LeakAudit(ALL, num_examples=NUM_EXAMPLES).state_dict())


def record(folder: Path, runs: Path, *active: str) -> list[dict[str, Any]]:
    """Run both parties with their recorders, and return the summaries that they write."""
    runs.mkdir()
    parties = build_parties(folder, ["contract.epochs=3", *active], ["contract.epochs=3"])
    with recorders(parties, runs) as both:
        run_in_process(parties)
    settings = parties.active_settings.model_dump(mode="json")
    (runs / "active" / "settings.yaml").write_text(json.dumps(settings))
    summaries = both.active.summary({}), both.passive.summary()
    for party, summary in zip(both.folders, summaries, strict=True):
        write_summary(party, summary)
    return [json.loads((party / "summary.json").read_text()) for party in both.folders]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_classes(folder)
    return folder


@pytest.fixture(scope="module")
def recorded(example: Path) -> list[dict[str, Any]]:
    return record(example, example / "runs", "leak_monitor.reference=sent")


def test_figures_are_by_name_and_of_the_worst_pair(
    example: Path, recorded: list[dict[str, Any]]
) -> None:
    summary, _ = recorded
    mean = np.mean(list(summary["test_auc_by_class"].values()))
    assert summary["test_auc"] == pytest.approx(mean, abs=1e-12)
    written = (example / "runs" / "active" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in written]
    line = [line for line in lines if line["kind"] == "test"][-1]
    assert line["accuracy"] == summary["test_accuracy"]
    for name in CLASSES:
        assert line[f"auc/{name}"] == summary["test_auc_by_class"][name]
    for found in recorded:
        for attacks in found["leak_classes"].values():
            for figures in attacks.values():
                assert set(figures["classes"]) == set(CLASSES)
                assert set(figures["worst_pair"]) < set(CLASSES)
    assert summary["leak"]["cut"]["cosine"]["mean"] > 0.95


def test_both_parties_find_the_same_on_the_same_bytes_and_the_peer_no_loss(
    example: Path, recorded: list[dict[str, Any]]
) -> None:
    active, passive = recorded
    for section in ("leak", "leak_classes", "leak_run_level", "leak_run_level_classes"):
        assert active[section]["cut"] == passive[section]["cut"]
    assert active["leak_batches"] == passive["leak_batches"]
    assert passive["leak"]["first"] != passive["leak"]["cut"]
    for name in ("metrics.jsonl", "summary.json"):
        text = (example / "runs" / "passive" / name).read_text()
        assert not any(word in text for word in ("loss", "accuracy", "test_auc"))


def test_the_report_says_what_its_figures_are_of(
    example: Path, recorded: list[dict[str, Any]], tmp_path: Path
) -> None:
    summary, _ = recorded
    page = write_report(example / "runs", tmp_path / "report.html").read_text()
    assert "This run has 4 classes" in page
    assert "positives from negatives" not in page
    assert "Attack: the two classes separated best." in page
    figures = summary["leak_classes"]["cut"]["cosine"]
    assert " and ".join(figures["worst_pair"]) in page
    assert f"{figures['worst_pair_auc']:.3f}" in page
    for name in CLASSES:
        assert f"<td>{name}</td>" in page
        assert f"{summary['test_auc_by_class'][name]:.3f}" in page
    assert f"{summary['test_accuracy']:.4f}" in page
    other = tmp_path / "other"
    record(example, other, "defense={name: marvell, insecure_noise_seed: 3}")
    compared = write_comparison([example / "runs", other], tmp_path / "all.html").read_text()
    assert "test accuracy" in compared
    assert "of the two classes that are easiest to distinguish" in compared
