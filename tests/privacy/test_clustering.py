"""Attacks that cluster: what they find, its sign, and what an independent k-means finds."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from splitveil.common.privacy.attacks import ATTACKS, Knowledge, SideInformation
from splitveil.common.privacy.gradient_rows import settled_centres, two_clusters
from splitveil.common.privacy.leakage import auc, leak_auc
from splitveil.common.privacy.scores import (
    activation_kmeans,
    activation_nearest_hint,
    kmeans,
    kmeans_hint,
    nearest_hint,
    spectral,
)


def softmax_gradients(
    shares: list[float], num_rows: int = 1500, noise: float = 0.05, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Gradients (p - y) W of a softmax that predicts the shares, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.tensor(shares)
    labels = torch.multinomial(predicted, num_rows, replacement=True, generator=generator)
    confidence = 0.2 + torch.rand(num_rows, 1, generator=generator)
    weights = torch.randn(len(shares), 12, generator=generator)
    clean = confidence * (predicted - torch.eye(len(shares))[labels]) @ weights
    return clean + noise * torch.randn(num_rows, 12, generator=generator), labels


def one_of_each(rows: Tensor, labels: Tensor) -> list[Tensor]:
    return [rows[labels == one][:1] for one in range(int(labels.max()) + 1)]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.4, 0.8])
def test_two_clusters_of_directions_are_the_labels_and_the_smaller_one_scores_higher(
    share: float,
) -> None:
    gradients, labels = softmax_gradients([1 - share, share], noise=0.005)
    assert auc(kmeans(gradients), labels if share < 0.5 else 1 - labels) > 0.99


def test_the_clusters_are_those_of_scikit_learn() -> None:
    """On noise, where k-means has no obvious answer: from the same beginning, the same end."""
    rows = torch.randn(500, 6, generator=torch.Generator().manual_seed(2)).double()
    rows[:, 0] += 2 * (torch.arange(500) % 3 == 0)
    above = rows[:, 0] > rows[:, 0].mean()
    begin = torch.stack([rows[~above].mean(dim=0), rows[above].mean(dim=0)])
    theirs = KMeans(2, init=begin.numpy(), n_init=1, max_iter=20, tol=0).fit(rows.numpy())
    found = two_clusters(rows, rows[:, 0])
    assert np.allclose(settled_centres(rows, begin), theirs.cluster_centers_, atol=1e-9)
    smaller = np.bincount(theirs.labels_).argmin()
    assert np.array_equal(found.projections.numpy() > 0, theirs.labels_ == smaller)
    near = theirs.transform(rows.numpy()) ** 2
    expected = near[:, 1 - smaller] - near[:, smaller]
    assert np.allclose(found.projections, expected, atol=1e-9)
    along = theirs.cluster_centers_[smaller] - theirs.cluster_centers_[1 - smaller]
    assert np.allclose(found.direction, along / np.linalg.norm(along))


def test_a_centre_that_loses_its_rows_stays() -> None:
    rows = torch.tensor([[0.0], [1.0]]).double()
    centres = settled_centres(rows, torch.tensor([[0.4], [50.0]]).double())
    assert torch.equal(centres, torch.tensor([[0.5], [50.0]]).double())


def test_one_example_of_each_class_names_the_clusters_of_several_classes() -> None:
    """Where one direction for all classes cannot separate them."""
    gradients, labels = softmax_gradients([0.1, 0.2, 0.3, 0.4])
    hints = one_of_each(gradients, labels)
    for attack in (kmeans_hint, nearest_hint):
        for one, own in enumerate(hints):
            others = torch.cat([*hints[:one], *hints[one + 1 :]])
            assert auc(attack(gradients, own, others), labels == one) > 0.97, attack
    assert min(leak_auc(spectral(gradients), labels == one) for one in range(4)) < 0.9


def test_the_nearest_hint_is_a_difference_of_cosines_or_of_activations_distances() -> None:
    gradients = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0], [0.0, 0.0]])
    own, others = torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    assert torch.allclose(nearest_hint(gradients, own, others), expected)
    activations = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    expected = torch.tensor([5**0.5 - 3, 3 - 41**0.5]).double()
    assert torch.allclose(activation_nearest_hint(activations, own, others), expected)


def test_activations_are_clustered_around_their_mean() -> None:
    """Two groups far from the origin, which their directions do not separate."""
    generator = torch.Generator().manual_seed(3)
    labels = (torch.rand(900, generator=generator) < 0.2).long()
    activations = 100 + torch.randn(900, 5, generator=generator) + 4 * labels[:, None]
    assert auc(activation_kmeans(activations), labels) > 0.99
    assert leak_auc(kmeans(activations), labels) < 0.9


def test_attacks_with_one_example_of_each_class_ask_for_them() -> None:
    gradients = torch.eye(3)
    for attack in (ATTACKS["kmeans_hint"], ATTACKS["nearest_hint"]):
        assert attack.missing(Knowledge(hints=gradients)) is SideInformation.OTHER_HINTS
        with pytest.raises(ValueError, match="one example of each other class"):
            attack.score(gradients, Knowledge(hints=gradients))
        known = Knowledge(hints=gradients[:1], other_hints=gradients[1:])
        assert attack.missing(known) is None
        assert int(attack.score(gradients, known).argmax()) == 0
