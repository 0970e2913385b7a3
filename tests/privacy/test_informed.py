"""The attack that knows predictions and slopes, against the best that any attack can reach."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm as normal
from torch import Tensor

from splitveil.active_party.defenses.interface import Step
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.attacks import ATTACKS, Knowledge
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.informed import KnownPredictions, informed
from splitveil.common.privacy.leakage import auc
from splitveil.common.privacy.observation import Observation
from splitveil.common.run.course import Batch
from tests.support.runs import build_parties, run_in_process, write_example
from tests.support.simulation import ActiveRecording

ROWS, DIMENSIONS = 6000, 12


class Answers:
    """Gradients (p - y) J of labels that predictions say nothing about, and of known slopes."""

    def __init__(self, seed: int = 1, num_rows: int = ROWS, positives: float = 0.2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self.labels = (torch.rand(num_rows, generator=generator) < positives).double()
        probabilities = torch.sigmoid(torch.randn(num_rows, generator=generator).double() - 1)
        slopes = torch.randn(num_rows, DIMENSIONS, generator=generator).double() + 1
        self.known = KnownPredictions(probabilities, slopes)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).double()

    def answered(self, targets: Tensor) -> Tensor:
        return (self.known.probabilities - targets)[:, None] * self.known.slopes


def test_noise_on_each_label_leaves_what_its_ratio_says() -> None:
    """y + k x has AUC Phi(1 / (k sqrt 2)), and no score of it a larger one: five errors of .008."""
    data = Answers()
    for ratio in (0.5, 2.0):
        noisy = data.answered(data.labels + ratio * data.normal(ROWS))
        expected = normal.cdf(1 / (ratio * math.sqrt(2)))
        assert auc(informed(noisy, data.known), data.labels) == pytest.approx(expected, abs=0.04)


def test_noise_of_one_size_leaves_what_each_row_s_slope_says() -> None:
    """The ratio of row i is normal with variance m^2 and means +-m^2/2, m its length over s."""
    data = Answers()
    noise = 4.0
    found = informed(data.answered(data.labels) + noise * data.normal(ROWS, DIMENSIONS), data.known)
    power = data.known.slopes.square().sum(dim=1).numpy() / noise**2
    draws = np.random.default_rng(0).normal(size=(2, ROWS))
    best = np.concatenate([draws[0] * power**0.5 - power / 2, draws[1] * power**0.5 + power / 2])
    expected = auc(best, np.repeat([0, 1], ROWS))
    assert auc(found, data.labels) == pytest.approx(expected, abs=0.04)
    along = (data.known.slopes * found.new_ones(DIMENSIONS)).sum(dim=1)  # knows a direction alone
    assert auc(found, data.labels) > auc(-along, data.labels) + 0.1


def test_directions_that_noise_leaves_bare_are_found_among_strong_noise() -> None:
    """Noise along one line at any strength: fresh marvell, to a peer that looks across the gap."""
    data = Answers(num_rows=500)
    line = torch.zeros(DIMENSIONS).double()
    line[0] = 1.0
    noise = 1e4 * data.normal(500)[:, None] * line
    assert auc(informed(data.answered(data.labels) + noise, data.known), data.labels) > 0.999


def test_targets_in_place_of_labels_are_read_exactly() -> None:
    data = Answers(num_rows=400)
    targets = torch.rand(400, generator=data.generator).double()
    found = informed(data.answered(targets).float(), data.known)
    assert torch.equal(found.argsort(), targets.argsort())


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30])
def test_the_unit_does_not_matter(scale: float) -> None:
    data = Answers(num_rows=300)
    noisy = data.answered(data.labels + data.normal(300))
    known = data.known._replace(slopes=scale * data.known.slopes)
    assert torch.allclose(informed(scale * noisy, known), informed(noisy, data.known), atol=1e-6)


def test_a_row_that_its_label_does_not_move_scores_nothing() -> None:
    data = Answers(num_rows=64)
    slopes = data.known.slopes.clone()
    slopes[:32] = 0
    known = data.known._replace(slopes=slopes)
    noisy = (known.probabilities - data.labels)[:, None] * slopes + data.normal(64, DIMENSIONS)
    scores = informed(noisy, known)
    assert bool((scores[:32] == 0).all())
    assert bool((scores[32:] != 0).all())
    assert bool(
        (informed(torch.zeros(64, 2), KnownPredictions(known[0], torch.zeros(64, 2))) == 0).all()
    )


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-30, 1e30, 1e300])
def test_any_finite_values_give_finite_scores(scale: float) -> None:
    data = Answers(num_rows=20)
    rows = scale * data.answered(data.labels + data.normal(20))
    constant = torch.ones(20, DIMENSIONS).double()
    for probabilities in (torch.zeros(20), torch.ones(20), data.labels):
        for slopes in (scale * data.known.slopes, 0 * constant, scale * constant, constant):
            for gradients in (rows, 0 * rows, scale * constant):
                scores = informed(gradients, KnownPredictions(probabilities, slopes))
                assert scores.shape == (20,)
                assert bool(scores.isfinite().all())


def multi_class(noise: float, num_rows: int = 3000) -> tuple[Tensor, KnownPredictions, Tensor]:
    generator = torch.Generator().manual_seed(5)
    probabilities = torch.softmax(torch.randn(num_rows, 3, generator=generator).double(), dim=1)
    labels = torch.randint(3, (num_rows,), generator=generator)
    slopes = torch.randn(num_rows, 3, DIMENSIONS, generator=generator).double()
    residuals = probabilities - torch.nn.functional.one_hot(labels, 3)
    gradients = torch.einsum("nc,ncd->nd", residuals, slopes)
    return (
        gradients + noise * torch.randn(num_rows, DIMENSIONS, generator=generator).double(),
        KnownPredictions(probabilities, slopes),
        labels,
    )


def best_of_multi_class(
    gradients: Tensor, known: KnownPredictions, target: int, noise: float
) -> np.ndarray:
    shares, slopes = known.probabilities.numpy(), known.slopes.numpy()
    at = np.einsum("nc,ncd->nd", shares, slopes)[:, None] - slopes
    likelihoods = -((gradients.numpy()[:, None] - at) ** 2).sum(axis=2) / (2 * noise**2)
    others = [other for other in range(3) if other != target]
    weights = shares[:, others] / shares[:, others].sum(axis=1, keepdims=True)
    of_others = np.asarray(logsumexp(likelihoods[:, others], b=weights, axis=1))
    return np.asarray(likelihoods[:, target] - of_others)


def test_of_more_classes_each_is_scored_against_the_others() -> None:
    """The oracle knows the noise, which the attack has to estimate."""
    bare, known, labels = multi_class(noise=0.01)
    noisy, _, _ = multi_class(noise=5.0)
    for target in range(3):
        assert auc(informed(bare, known, target), (labels == target).double()) > 0.999
        found = auc(informed(noisy, known, target), (labels == target).double())
        best = auc(best_of_multi_class(noisy, known, target, 5.0), (labels == target).double())
        assert best > 0.65
        assert found == pytest.approx(best, abs=0.01)


def test_other_shapes_are_refused() -> None:
    data = Answers(num_rows=8)
    rows = data.answered(data.labels)
    for known in (
        KnownPredictions(data.known.probabilities[:7], data.known.slopes),
        KnownPredictions(data.known.probabilities, data.known.slopes[:, :3]),
        KnownPredictions(data.known.probabilities[:, None].repeat(1, 3), data.known.slopes),
    ):
        with pytest.raises(ValueError, match="expected predictions and slopes of 8 rows"):
            informed(rows, known)
    with pytest.raises(ValueError, match="informed needs"):
        ATTACKS["informed"].score(rows, Knowledge())


def test_over_a_run_the_ratios_of_fresh_noise_add_up() -> None:
    """E epochs of noise k are worth one of noise k / sqrt E; a repeated answer adds nothing."""
    data = Answers(num_rows=2000)
    persistent_noise = data.normal(2000)
    for persistent in (False, True):
        audit = LeakAudit(["informed", "accumulated_informed"], num_examples=2000)
        for epoch in range(8):
            noise = persistent_noise if persistent else data.normal(2000)
            sent = data.answered(data.labels + 4 * noise)
            order = torch.randperm(2000, generator=data.generator)
            for step, rows in enumerate(torch.split(order, 250)):
                known = KnownPredictions(*(part[rows] for part in data.known))
                layers = {"cut": sent[rows], "first": sent[rows]}
                seen = Observation(epoch, step, layers, data.labels[rows], positions=rows)
                audit.observe(dataclasses.replace(seen, predictions=known))
        audit.run.close_epoch()
        assert set(audit.summary()) == {"cut"}  # slopes are known there alone
        found = audit.run.result()[0]["cut"]["accumulated_informed"].auc
        worth = 1 if persistent else 8
        assert found == pytest.approx(normal.cdf(worth**0.5 / (4 * math.sqrt(2))), abs=0.05)


def test_slopes_are_the_gradient_for_each_residual_and_change_no_bit(tmp_path: Path) -> None:
    """Slopes that nobody asked for are not computed."""
    write_example(tmp_path)
    results: list[Step] = []

    class Recording(ActiveRecording):
        def on_step(self, batch: Batch, result: Step) -> None:
            results.append(result)

    weights = []
    for attacks in ("[norm]", "[norm, accumulated_informed]"):
        parties = build_parties(
            tmp_path, [f"leak_monitor.attacks={attacks}"], active_seen=Recording()
        )
        run_in_process(parties)
        weights.append(parties.weights())
    assert [result.slopes is None for result in results] == [True] * 8 + [False] * 8
    for result in results[8:]:
        assert result.slopes is not None
        expected = (result.probabilities - result.labels)[:, None] * result.slopes
        assert torch.allclose(result.gradients, expected, rtol=1e-4, atol=1e-9)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("attack", ["informed", "accumulated_informed"])
def test_a_party_without_the_predictions_reads_who_has_them(tmp_path: Path, attack: str) -> None:
    write_example(tmp_path)
    with pytest.raises(SettingsError, match="the active party's leak monitor measures them"):
        build_parties(tmp_path, passive=[f"adversary.attacks=[{attack}]"])
