"""Histograms of a batch's gradients by class: what is counted, and what is not."""

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.monitor.distributions import (
    MIN_PER_CLASS,
    Histogram,
    gradient_distributions,
    spread_epochs,
)


def batch_of(
    num_positives: int = 40, num_negatives: int = 160, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Return gradients as a logistic loss gives them, g = (p - y) w, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.ones(num_positives), torch.zeros(num_negatives)])
    weight = torch.randn(8, generator=generator)
    predicted = 0.1 + 0.2 * torch.rand(len(labels), generator=generator)
    return (predicted - labels)[:, None] * weight, labels


def distributions(raw: Tensor, defended: Tensor, labels: Tensor) -> tuple[Histogram, Histogram]:
    found = gradient_distributions(raw, defended, labels)
    assert found is not None
    return found


def test_norms_are_counted_as_numpy_counts_them() -> None:
    raw, labels = batch_of()
    defended = raw * 3 + 0.01 * torch.randn(raw.shape, generator=torch.Generator().manual_seed(2))
    norms, _ = distributions(raw, defended, labels)
    assert norms.figure == "log10_norm"
    for side, gradients in (("before", raw), ("after", defended)):
        values = np.log10(np.linalg.norm(gradients.numpy().astype(np.float64), axis=1))
        for name, label in (("negative", 0), ("positive", 1)):
            expected, _ = np.histogram(values[labels.numpy() == label], norms.edges)
            assert norms.counts[f"{side}/{name}"] == tuple(expected)


def test_bins_are_at_the_same_places_in_every_batch() -> None:
    edges = set()
    for seed in range(3):
        raw, labels = batch_of(seed=seed)
        norms, cosines = distributions(raw, raw * 7, labels)
        assert all(edge * 20 == pytest.approx(round(edge * 20)) for edge in norms.edges)
        edges.add(cosines.edges)
    (common,) = edges
    assert (common[0], common[-1], len(common)) == (-1, 1, 41)


def test_without_a_defense_the_classes_point_opposite_ways() -> None:
    raw, labels = batch_of()
    _, cosines = distributions(raw, raw, labels)
    for side in ("before", "after"):
        assert cosines.counts[f"{side}/positive"][-1] == 40
        assert cosines.counts[f"{side}/negative"][0] == 160


def test_a_positive_is_not_compared_with_itself() -> None:
    """In many dimensions, pure noise has no direction; a mean that held its own would find one."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(400, 2000, generator=generator)
    labels = torch.cat([torch.ones(6), torch.zeros(394)])
    _, cosines = distributions(noise, noise, labels)
    inner = cosines.counts["before/positive"][18:22]  # -0.1 .. 0.1; with itself about 0.4
    assert sum(inner) == 6


@pytest.mark.parametrize("fewer", ["positives", "negatives"])
def test_a_class_of_few_examples_is_not_counted(fewer: str) -> None:
    for number, counted in ((MIN_PER_CLASS, True), (MIN_PER_CLASS - 1, False), (0, False)):
        sizes = (number, 50) if fewer == "positives" else (50, number)
        raw, labels = batch_of(*sizes)
        for found in distributions(raw, raw, labels):
            total = sum(sum(series) for series in found.counts.values())
            assert total == (2 * len(labels) if counted else 0)
    few = torch.zeros(2 * MIN_PER_CLASS - 1, 8)
    assert gradient_distributions(few + 1, few + 1, few[:, 0]) is None


def test_gradients_of_zero_are_counted_and_make_no_endless_axis() -> None:
    raw, labels = batch_of()
    defended = raw.clone()
    defended[:10] = 0
    norms, cosines = distributions(raw, defended, labels)
    for found in (norms, cosines):
        assert sum(found.counts["after/positive"]) == 40
    assert norms.edges[-1] - norms.edges[0] < 6.2
    assert cosines.counts["after/positive"][20] == 10  # neither like nor unlike
    nothing = torch.zeros_like(raw)
    assert gradient_distributions(nothing, nothing, labels) is None


def test_gradients_of_images_are_taken_whole() -> None:
    raw, labels = batch_of()
    assert distributions(raw.reshape(200, 2, 2, 2), raw, labels) == distributions(raw, raw, labels)


@pytest.mark.parametrize(
    ("num_epochs", "chosen"),
    [(1, {0}), (2, {0, 1}), (3, {0, 1, 2}), (15, {0, 1, 2, 4, 8, 14}), (17, {0, 1, 2, 4, 8, 16})],
)
def test_epochs_are_spread_over_the_run(num_epochs: int, chosen: set[int]) -> None:
    assert spread_epochs(num_epochs) == chosen
