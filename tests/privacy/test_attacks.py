"""Every attack on gradients whose leak is known in advance, and on hostile ones."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.common.privacy.attacks import ATTACKS, Knowledge, SideInformation
from splitveil.common.privacy.gradient_rows import prepared
from splitveil.common.privacy.leakage import auc, leak_auc
from splitveil.common.privacy.scores import (
    KnownClasses,
    cosine,
    cosine_majority,
    hint_distance,
    hint_inner_product,
    lda,
    mean,
    median,
    regress_out,
    spectral,
)


class Example(NamedTuple):
    gradients: Tensor
    labels: Tensor
    knowledge: Knowledge

    def scores(self) -> dict[str, Tensor]:
        return {
            name: attack.score(self.gradients, self.knowledge)
            for name, attack in ATTACKS.items()
            if name != "informed"  # which test_informed.py tests
        }

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Example":
        assert self.knowledge.classes is not None
        known: dict[str, Any] = {
            name: change(value)
            for name, value in self.knowledge._asdict().items()
            if isinstance(value, Tensor)
        }
        classes = KnownClasses(*map(change, self.knowledge.classes))
        knowledge = self.knowledge._replace(classes=classes, **known)
        return Example(change(self.gradients), self.labels, knowledge)


def _logistic_example(
    pos_fraction: float = 0.1, num_rows: int = 2000, noise_ratio: float = 0.0, seed: int = 1
) -> Example:
    """Gradients (p - y) w of a logistic loss, the knowledge from as many rows of the same law."""
    cut_dim = 32
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(2 * num_rows, generator=generator) < pos_fraction).float()
    bias = float(torch.logit(torch.tensor(pos_fraction)))
    activations = torch.randn(2 * num_rows, 16, generator=generator)
    activations[:, 1] = 3 * activations[:, 1] + 4 * labels
    logits = bias + 0.5 * activations[:, 0]
    weight = torch.randn(cut_dim, generator=generator)
    gradients = (torch.sigmoid(logits) - labels)[:, None] * weight
    noise = torch.randn(2 * num_rows, cut_dim, generator=generator)
    largest = gradients.norm(dim=1).max()
    return _example(
        gradients + noise_ratio * largest / cut_dim**0.5 * noise,
        labels,
        activations,
        reference=gradients[num_rows:][labels[num_rows:] == 1][0],
    )


def _example(
    gradients: Tensor, labels: Tensor, activations: Tensor, reference: Tensor | None = None
) -> Example:
    half = len(labels) // 2
    known, known_labels = gradients[half:], labels[half:]
    positives = known[known_labels == 1]
    knowledge = Knowledge(
        positives[0] if reference is None else reference,
        positives[:5],
        KnownClasses(known[known_labels == 0], positives),
        activations[:half],
        other_hints=known[known_labels == 0][:1],
    )
    return Example(gradients[:half], labels[:half], knowledge)


def test_undefended_logistic_gradients_leak_every_label() -> None:
    example = _logistic_example()
    # The last two never see a gradient.
    less = {"regress_out": 0.95, "activation_spectral": 0.75, "activation_kmeans": 0.75}
    scores_of = example.scores()
    del scores_of["residual_energy"]  # gradients along one line have no energy elsewhere
    for name, scores in scores_of.items():
        assert auc(scores, example.labels) > less.get(name, 0.999), name


def test_gradients_without_labels_in_them_leak_nothing() -> None:
    """Five standard errors of an AUC of independent scores."""
    labels = (torch.arange(8000) % 5 == 0).float()
    gradients = torch.randn(8000, 16, generator=torch.Generator().manual_seed(2))
    activations = torch.randn(8000, 6, generator=torch.Generator().manual_seed(3))
    example = _example(gradients, labels, activations)
    error = np.sqrt((4000 + 1) / (12 * 800 * 3200))
    for name, scores in example.scores().items():
        assert leak_auc(scores, example.labels) < 0.5 + 5 * error, name


@pytest.mark.parametrize("shape", [(40, 6), (10, 30)])
def test_lda_s_direction_solves_its_equation_in_either_shape(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(13)
    negatives, positives = generator.normal(size=shape), generator.normal(size=shape) + 0.5
    rows = generator.normal(size=(20, shape[1]))
    within = np.concatenate([negatives - negatives.mean(0), positives - positives.mean(0)])
    count, row_dim = within.shape
    variances = np.trace(within.T @ within / count) / row_dim
    weight = row_dim / (count + row_dim)
    shrunk = (1 - weight) * within.T @ within / count + weight * variances * np.eye(row_dim)
    expected = rows @ np.linalg.solve(shrunk, positives.mean(0) - negatives.mean(0))
    classes = KnownClasses(torch.from_numpy(negatives), torch.from_numpy(positives))
    scores = lda(torch.from_numpy(rows), classes).numpy()
    assert np.corrcoef(scores, expected)[0, 1] == pytest.approx(1, abs=1e-12)
    assert np.allclose(scores / scores.std(), expected / expected.std(), rtol=1e-9)


def test_hints_and_centres_equal_their_definitions() -> None:
    generator = np.random.default_rng(14)
    rows, known = generator.normal(size=(30, 2, 3)), generator.normal(size=(5, 2, 3))
    flat, hints = rows.reshape(30, 6), known.reshape(5, 6)
    gradients, known_rows = torch.from_numpy(rows), torch.from_numpy(known)
    products = (flat @ hints.T).max(axis=1)
    assert np.allclose(hint_inner_product(gradients, known_rows), products, rtol=1e-12)
    distances = np.linalg.norm(flat[:, None] - hints[None], axis=2).min(axis=1)
    assert np.allclose(hint_distance(gradients, known_rows), -distances, rtol=1e-12)
    for attack, centre in ((mean, np.mean), (median, np.median)):
        zero, one = centre(hints[:3], axis=0), centre(hints[1:], axis=0)
        expected = np.linalg.norm(flat - zero, axis=1) - np.linalg.norm(flat - one, axis=1)
        found = attack(gradients, KnownClasses(known_rows[:3], known_rows[1:]))
        assert np.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("num_hints", [1, 3, 5])
def test_more_hints_are_used_where_there_are_more(num_hints: int) -> None:
    gradients = torch.eye(6)
    for name in (f"hint_inner_product_{num_hints}", f"hint_distance_{num_hints}"):
        attack = ATTACKS[name]
        scores = attack.score(gradients, Knowledge(hints=gradients[:5]))
        assert [i for i in range(6) if scores[i] == scores.max()] == list(range(num_hints))
        assert attack.num_hints == num_hints
        with pytest.raises(ValueError, match="hints"):
            attack.score(gradients, Knowledge(hints=gradients[: num_hints - 1]))


def test_cosine_majority_is_minus_the_share_of_the_batch_on_one_s_side() -> None:
    gradients = torch.tensor([[1.0, 0.1], [2.0, 0.0], [1.0, -0.1], [-1.0, 0.0], [0.0, 0.0]])
    scores = cosine_majority(gradients)
    assert torch.allclose(scores, torch.tensor([-0.6, -0.6, -0.6, -0.2, -0.5]).double())
    generator = torch.Generator().manual_seed(15)
    many = torch.randn(5000, 3, generator=generator)  # more than may vote
    shares = (many.double() @ many.double().T > 0).double().mean(dim=1)
    assert (cosine_majority(many) + shares).abs().max() < 0.05


def test_regress_out_finds_the_label_that_features_cover() -> None:
    """Features move the gradients far more than labels do, in a direction of their own."""
    generator = torch.Generator().manual_seed(16)
    labels = (torch.rand(2000, generator=generator) < 0.2).double()
    activations = torch.randn(2000, 5, generator=generator).double()
    from_features = activations @ torch.randn(5, 8, generator=generator).double()
    weight = torch.randn(8, generator=generator).double()
    noise = torch.randn(2000, 8, generator=generator).double()
    gradients = 5 * from_features + labels[:, None] * weight + 0.1 * noise
    assert leak_auc(spectral(gradients), labels) < 0.6
    assert auc(regress_out(gradients, activations), labels) > 0.99
    assert bool((regress_out(gradients[:6], activations[:6]) == 0).all())
    explained = regress_out(from_features, torch.cat([activations, activations[:, :1]], dim=1))
    assert bool((explained == 0).all())


@pytest.mark.parametrize("shape", [(300, 20), (20, 300), (300, 80), (80, 300), (64, 64)])
@pytest.mark.parametrize("gap", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_the_top_direction_is_the_singular_vector_however_little_it_stands_out(
    shape: tuple[int, int], gap: float
) -> None:
    """The second singular value is (1 - gap) of the first: found by steps, or through the Gram."""
    generator = np.random.default_rng(18)
    rank = min(shape)
    left, _ = np.linalg.qr(generator.normal(size=(shape[0], rank)))
    right, _ = np.linalg.qr(generator.normal(size=(shape[1], rank)))
    values = np.array([1.0, *np.linspace(1 - gap, 0, rank - 1)])
    rows = left * values @ right.T
    projections, direction = prepared(torch.from_numpy(rows)).top
    length = np.linalg.norm(rows @ direction.numpy())
    assert length == pytest.approx(1, abs=1e-12)
    assert np.allclose(rows @ direction.numpy(), projections.numpy(), rtol=0, atol=1e-12)
    if gap:
        assert abs(right[:, 0] @ direction.numpy()) == pytest.approx(1, abs=1e-9)
        sign = np.sign(right[:, 0] @ direction.numpy())
        assert np.allclose(sign * projections.numpy(), left[:, 0], rtol=0, atol=1e-8)


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
    known = torch.randn(7, *shape[1:], generator=generator, dtype=dtype)
    for gradients, scale in itertools.product(batches, (0.0, 1.0, 1e30)):
        classes = KnownClasses(scale * known[:1], scale * known[1:3])
        knowledge = Knowledge(
            scale * known[0], scale * known[:5], classes, gradients, other_hints=scale * known[5:]
        )
        for name, scores in Example(gradients, torch.ones(1), knowledge).scores().items():
            assert scores.shape == (shape[0],), name
            assert bool(scores.isfinite().all()), (name, gradients)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_the_gradients_scale_changes_no_leak(scale: float) -> None:
    example = _logistic_example(noise_ratio=2.0)
    labels = example.labels
    before = example.changed(Tensor.double).scores()
    after = example.changed(lambda values: values.double() * scale).scores()
    for name in before:
        expected = auc(before[name], labels)
        assert 0.51 < expected < 0.999, name
        assert auc(after[name], labels) == pytest.approx(expected, abs=1e-4), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_scores_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    """The values are such as every dtype has, so that only the arithmetic can differ."""
    generator = torch.Generator().manual_seed(18)
    labels = (torch.arange(60) % 3 == 0).float()
    gradients = torch.randint(-8, 9, (60, 5), generator=generator) / 8.0
    activations = torch.randint(-8, 9, (60, 3), generator=generator) / 8.0
    plain = _example(gradients, labels, activations)
    typed = _example(gradients.to(dtype), labels, activations.to(dtype))
    for name, scores in plain.scores().items():
        assert torch.allclose(typed.scores()[name], scores, rtol=1e-9, atol=1e-9), name


def test_scores_on_a_gpu_are_those_on_the_cpu(gpu: torch.device) -> None:
    example = _logistic_example(noise_ratio=1.0)
    on_gpu = example.changed(lambda values: values.to(gpu)).scores()
    for name, scores in example.scores().items():
        assert torch.allclose(on_gpu[name].cpu(), scores, rtol=1e-8, atol=1e-8), name


def test_small_rows_beside_large_ones_keep_their_direction() -> None:
    gradients = torch.tensor([[1e-30, 0.0], [0.0, 1e30], [1e-30, 1e-30], [0.0, 0.0]])
    scores = cosine(gradients, torch.tensor([1e-25, 0.0]))
    assert torch.allclose(scores, torch.tensor([1.0, 0.0, 0.5**0.5, 0.0], dtype=torch.float64))


def test_attacks_leave_the_gradients_alone_and_outside_the_graph() -> None:
    example = _logistic_example(num_rows=50, pos_fraction=0.3)
    example.gradients.requires_grad_()
    before = example.gradients.detach().clone()
    for scores in example.scores().values():
        assert not scores.requires_grad
    assert torch.equal(example.gradients.detach(), before)


def test_an_attack_scores_only_with_what_it_needs() -> None:
    for name, attack in ATTACKS.items():
        if attack.needs - {SideInformation.POSITIVES_ARE_FEWER}:
            with pytest.raises(ValueError, match="needs"):
                attack.score(torch.ones(2, 2), Knowledge())
        else:
            assert len(attack.score(torch.ones(2, 2), Knowledge())) == 2, name


def test_oracles_and_free_attacks_follow_from_what_they_need() -> None:
    """Attacks with hints are neither."""
    oracles = {name for name, attack in ATTACKS.items() if attack.is_oracle}
    assert oracles == {"cosine", "informed", "mean", "median", "lda"}
    hinted = {name for name in ATTACKS if "hint" in name}
    free = {name for name, attack in ATTACKS.items() if attack.is_free}
    assert free == set(ATTACKS) - oracles - hinted
