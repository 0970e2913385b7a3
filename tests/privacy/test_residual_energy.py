"""The attack that looks outside a batch's strongest directions, against noise of known law."""

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.leakage import auc, leak_auc
from splitveil.common.privacy.observation import LabelClasses, Observation
from splitveil.common.privacy.scores import rare_cluster_up, residual_energy

FLOOR = 0.05
"""Deviation of clean gradients in each weak direction, where a gap between classes has 1."""


def noisy(
    deviations: tuple[float, ...],
    shares: tuple[float, ...],
    shape: tuple[int, int] = (1000, 32),
    along: float = 3.0,
    seed: int = 1,
) -> tuple[Tensor, Tensor]:
    """Gradients with noise along the gap for all, and across it by class; and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(
        torch.tensor(shares), shape[0], replacement=True, generator=generator
    )
    gap = torch.zeros(shape[1])
    gap[0] = 1.0
    everywhere = FLOOR * torch.randn(shape, generator=generator)
    on_gap = (labels.double() + along * torch.randn(shape[0], generator=generator))[:, None] * gap
    across = torch.tensor(deviations)[labels][:, None] * torch.randn(shape, generator=generator)
    across[:, 0] = 0.0
    return everywhere + on_gap + across, labels


@pytest.mark.parametrize("along", [1.0, 1000.0])
@pytest.mark.parametrize("noisy_class", [0, 1])
def test_noise_across_the_gap_in_one_class_separates_the_classes_at_every_strength(
    noisy_class: int, along: float
) -> None:
    deviations = (0.2, 0.0) if noisy_class == 0 else (0.0, 0.2)
    gradients, labels = noisy(deviations, (0.8, 0.2), along=along)
    assert auc(residual_energy(gradients), labels) > 0.999  # not only the leak: positives are fewer


def test_the_same_noise_for_both_classes_reveals_nothing() -> None:
    gradients, labels = noisy((0.2, 0.2), (0.8, 0.2))
    assert leak_auc(residual_energy(gradients), labels) < 0.57  # 2.9 standard errors


@pytest.mark.parametrize("shape", [(1500, 300), (100, 300), (40, 16), (200, 64)])
def test_batches_of_every_shape_are_read(shape: tuple[int, int]) -> None:
    gradients, labels = noisy((0.4, 0.0), (0.8, 0.2), shape)
    assert auc(residual_energy(gradients), labels) > 0.97


@pytest.mark.parametrize("shape", [(50, 8), (12, 40)])
def test_scores_are_the_weighted_energies_of_the_svd(shape: tuple[int, int]) -> None:
    gradients, _ = noisy((0.2, 0.0), (0.7, 0.3), shape)
    rows = gradients.double().numpy()
    left, strengths, _ = np.linalg.svd(rows, full_matrices=False)
    weak = round(len(strengths) / 4)
    powers = strengths[weak:] ** 2
    parts = (left[:, weak:] * strengths[weak:]) ** 2
    expected = np.log((parts / (powers + powers.mean() * shape[1] / shape[0])).sum(axis=1))
    found = residual_energy(gradients).numpy()
    sign = np.sign(np.corrcoef(found, expected)[0, 1])
    shift = (sign * found - expected).mean()
    assert np.allclose(sign * found, expected + shift, rtol=0, atol=1e-8)


def test_the_smaller_cluster_is_put_above_zero() -> None:
    low, high = torch.linspace(-0.1, 0.1, 70).double(), torch.linspace(4.9, 5.1, 30).double()
    for scores in (torch.cat([low, high]), -torch.cat([low, high])):
        assert rare_cluster_up(scores).gt(0).tolist() == [False] * 70 + [True] * 30
    assert rare_cluster_up(torch.full((5,), 7.0)).tolist() == [0.0] * 5
    assert rare_cluster_up(torch.empty(0)).tolist() == []


EXAMPLES, BATCH = 1200, 200


def observations(shares: tuple[float, ...] = (0.5, 0.5), num_epochs: int = 6) -> list[Observation]:
    """Weak noise of one class across the gap, in a fresh order; classes may be equally frequent."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.multinomial(
        torch.tensor(shares), EXAMPLES, replacement=True, generator=generator
    )
    found = []
    for epoch in range(num_epochs):
        order = torch.randperm(EXAMPLES, generator=generator)
        for step, rows in enumerate(torch.split(order, BATCH)):
            deviation = torch.tensor([0.1, *[0.16] * (len(shares) - 1)])[labels[rows]]
            gradients = deviation[:, None] * torch.randn(BATCH, 16, generator=generator)
            gradients[:, 0] += 5 * torch.randn(BATCH, generator=generator)
            layers = {"cut": gradients, "first": gradients @ torch.eye(16).roll(3, 0)}
            found.append(Observation(epoch, step, layers, labels[rows], positions=rows))
    return found


def test_over_a_run_scores_add_up_although_neither_class_is_rare() -> None:
    audit = LeakAudit(["residual_energy", "accumulated_residual_energy"], num_examples=EXAMPLES)
    for observation in observations():
        audit.observe(observation)
    audit.run.close_epoch()
    for layer in ("cut", "first"):
        one_batch = audit.summary()[layer]["residual_energy"].mean
        found = audit.run.result()[0][layer]["accumulated_residual_energy"]
        assert found.examples == EXAMPLES
        assert found.low > one_batch + 0.05
        assert found.auc > 0.97


def test_a_multi_class_run_has_one_sum_for_all() -> None:
    audit = LeakAudit(
        ["accumulated_residual_energy"], num_examples=EXAMPLES, labels=LabelClasses(("a", "b", "c"))
    )
    for observation in observations((0.4, 0.3, 0.3)):
        audit.observe(observation)
    figures = audit.run.result()
    assert figures[0]["cut"]["accumulated_residual_energy"].auc > 0.97
    pair = figures[1]["cut"]["accumulated_residual_energy"].worst_pair
    assert "a" in pair  # the one class whose noise differs
