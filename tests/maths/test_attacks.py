"""Every attack on gradients whose leak is known in advance, and on hostile ones."""

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal
from torch import Tensor

from common.privacy.attacks import (
    ATTACKS,
    AttackName,
    Knowledge,
    SideInformation,
    cosine,
    norm,
    spectral,
)
from common.privacy.leakage import auc, leak_auc


def _logistic_gradients(
    pos_fraction: float = 0.1, num_rows: int = 2000, noise_ratio: float = 0.0, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Gradients (p - y) w of a logistic loss at a calibrated model's predictions."""
    cut_dim = 32
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num_rows, generator=generator) < pos_fraction).float()
    bias = float(torch.logit(torch.tensor(pos_fraction)))
    logits = bias + 0.5 * torch.randn(num_rows, generator=generator)
    weight = torch.randn(cut_dim, generator=generator)
    gradients = (torch.sigmoid(logits) - labels)[:, None] * weight
    noise = torch.randn(num_rows, cut_dim, generator=generator)
    largest = gradients.norm(dim=1).max()
    return gradients + noise_ratio * largest / cut_dim**0.5 * noise, labels


def _all_scores(gradients: Tensor, reference: Tensor) -> dict[AttackName, Tensor]:
    knowledge = Knowledge(positive_gradient=reference)
    return {name: attack.score(gradients, knowledge) for name, attack in ATTACKS.items()}


def test_undefended_logistic_gradients_leak_every_label() -> None:
    gradients, labels = _logistic_gradients()
    positive = gradients[labels == 1][0]
    for name, scores in _all_scores(gradients, positive).items():
        assert auc(scores, labels) > 0.999, name


def test_gradients_without_labels_in_them_leak_nothing() -> None:
    """Five standard errors of an AUC of independent scores."""
    labels = (torch.arange(4000) % 5 == 0).float()
    gradients = torch.randn(4000, 16, generator=torch.Generator().manual_seed(2))
    error = np.sqrt((4000 + 1) / (12 * 800 * 3200))
    reference = torch.randn(16, generator=torch.Generator().manual_seed(3))
    for name, scores in _all_scores(gradients, reference).items():
        assert leak_auc(scores, labels) < 0.5 + 5 * error, name


def test_norm_leaks_what_the_norms_were_built_to_leak() -> None:
    """The norm is a normal number, shifted for positives, in a random direction."""
    generator = torch.Generator().manual_seed(4)
    labels = (torch.arange(20_000) % 4 == 0).float()
    lengths = 10 + torch.randn(20_000, generator=generator) + labels
    directions = torch.randn(20_000, 8, generator=generator)
    gradients = directions / directions.norm(dim=1, keepdim=True) * lengths[:, None]
    measured = auc(norm(gradients), labels)
    assert abs(measured - normal.cdf(1 / np.sqrt(2))) < 0.015
    assert abs(auc(spectral(gradients), labels) - 0.5) < 0.02


def test_cosine_leaks_what_the_directions_were_built_to_leak() -> None:
    """The angle to the reference is normal, its mean smaller for positives; norms say nothing."""
    generator = torch.Generator().manual_seed(5)
    labels = (torch.arange(20_000) % 4 == 0).float()
    angles = 1.5 + 0.1 * torch.randn(20_000, generator=generator) - 0.1 * labels
    lengths = torch.rand(20_000, generator=generator) + 0.01
    gradients = torch.stack([angles.cos(), angles.sin()], dim=1) * lengths[:, None]
    measured = auc(cosine(gradients, torch.tensor([3.0, 0.0])), labels)
    assert abs(measured - normal.cdf(1 / np.sqrt(2))) < 0.015
    assert abs(auc(norm(gradients), labels) - 0.5) < 0.02


@pytest.mark.parametrize("pos_fraction", [0.02, 0.2, 0.4])
def test_spectral_turns_the_minority_up(pos_fraction: float) -> None:
    for seed in range(10):
        gradients, labels = _logistic_gradients(pos_fraction, noise_ratio=0.5, seed=seed)
        assert auc(spectral(gradients), labels) > 0.95
        assert auc(spectral(-gradients), labels) > 0.95
    gradients, labels = _logistic_gradients(1 - pos_fraction, noise_ratio=0.5)
    assert auc(spectral(gradients), labels) < 0.05  # the assumption is wrong, the leak is not
    assert leak_auc(spectral(gradients), labels) > 0.95


def test_spectral_sees_more_uncentred_where_noise_covers_an_untrained_models_gradients() -> None:
    """At p = 1/2 the gradients' mean carries most of the direction that centring looks for."""
    generator = torch.Generator().manual_seed(6)
    leaks: dict[str, list[float]] = {"uncentred": [], "centred": []}
    for _ in range(10):
        labels = (torch.rand(1024, generator=generator) < 0.05).float()
        active = torch.rand(1024, 64, generator=generator) < 0.5
        weights = active * torch.randn(64, generator=generator)
        signal = (0.5 - labels)[:, None] * weights
        noise = torch.randn(1024, 64, generator=generator)
        gradients = signal + 4 * signal.norm(dim=1).max() / 8 * noise
        leaks["uncentred"].append(leak_auc(spectral(gradients), labels))
        leaks["centred"].append(leak_auc(spectral(gradients - gradients.mean(dim=0)), labels))
    assert np.mean(leaks["uncentred"]) > np.mean(leaks["centred"]) + 0.05


@pytest.mark.parametrize("shape", [(300, 20), (20, 300), (50, 50), (40, 3, 4, 5)])
def test_spectral_is_the_projection_of_the_svd(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7)
    gradients = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)
    rows = gradients.flatten(1).double().numpy()
    _, _, directions = np.linalg.svd(rows, full_matrices=False)
    expected = rows @ directions[0]
    if ((expected - expected.mean()) ** 3).mean() < 0:
        expected = -expected
    assert np.allclose(spectral(gradients).numpy(), expected, rtol=0, atol=1e-9 * abs(rows).max())


def test_norm_and_cosine_equal_their_definitions() -> None:
    generator = torch.Generator().manual_seed(8)
    gradients = torch.randn(50, 3, 4, generator=generator)
    reference = torch.randn(3, 4, generator=generator)
    rows, ref = gradients.flatten(1).double().numpy(), reference.flatten().double().numpy()
    lengths = np.sqrt((rows**2).sum(axis=1))
    assert np.allclose(norm(gradients).numpy(), lengths, rtol=1e-14)
    expected = rows @ ref / lengths / np.sqrt((ref**2).sum())
    assert np.allclose(cosine(gradients, reference).numpy(), expected, rtol=0, atol=1e-14)


_SCALES = (0.0, 1e-30, 1e-15, 1.0, 1e15, 1e30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (6, 4), (4, 6), (7, 2, 3)])
def test_scores_are_finite_for_any_finite_gradients(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(9)
    base = torch.randn(shape, generator=generator, dtype=dtype)
    constant = torch.ones(shape, dtype=dtype)
    mixed = base * torch.tensor(_SCALES[1:], dtype=dtype).repeat(2)[: shape[0]].reshape(
        -1, *[1] * (len(shape) - 1)
    )
    extremes = [constant * torch.finfo(dtype).max, base.sign() * torch.finfo(dtype).tiny, mixed]
    batches = [scale * rows for scale in _SCALES for rows in (base, constant)] + extremes
    for gradients, reference in itertools.product(batches, (base[0], 0 * base[0], 1e30 * base[0])):
        for name, scores in _all_scores(gradients, reference).items():
            assert scores.shape == (shape[0],), name
            assert bool(scores.isfinite().all()), (name, gradients)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_the_gradients_scale_changes_no_leak(scale: float) -> None:
    gradients, labels = _logistic_gradients(noise_ratio=4.0)
    positive = gradients[labels == 1][0]
    before = _all_scores(gradients.double(), positive.double())
    after = _all_scores(gradients.double() * scale, positive.double() * scale)
    for name in ATTACKS:
        expected = auc(before[name], labels)
        assert 0.55 < expected < 0.999, name
        assert auc(after[name], labels) == pytest.approx(expected, abs=1e-4)


def test_small_rows_beside_large_ones_keep_their_direction() -> None:
    gradients = torch.tensor([[1e-30, 0.0], [0.0, 1e30], [1e-30, 1e-30], [0.0, 0.0]])
    scores = cosine(gradients, torch.tensor([1e-25, 0.0]))
    assert torch.allclose(scores, torch.tensor([1.0, 0.0, 0.5**0.5, 0.0], dtype=torch.float64))


def test_attacks_leave_the_gradients_alone_and_outside_the_graph() -> None:
    gradients, _ = _logistic_gradients(num_rows=50)
    gradients.requires_grad_()
    before = gradients.detach().clone()
    for scores in _all_scores(gradients, gradients[0]).values():
        assert not scores.requires_grad
    assert torch.equal(gradients.detach(), before)


def test_the_registry_knows_every_attack_and_what_it_needs() -> None:
    assert set(ATTACKS) == set(get_args(AttackName))
    needs = {name: set(attack.needs) for name, attack in ATTACKS.items()}
    assert needs["norm"] == set()
    assert needs["cosine"] == {SideInformation.POSITIVE_GRADIENT}
    assert needs["spectral"] == {SideInformation.POSITIVES_ARE_FEWER}
    with pytest.raises(ValueError, match="clean gradient of a positive"):
        ATTACKS["cosine"].score(torch.ones(2, 2), Knowledge())
