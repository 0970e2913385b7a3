"""Every defense is, as promised, unbiased, finite, unpredictable, of stated power, protective."""

import itertools
import math

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from splitveil.active_party import defenses
from splitveil.active_party.defenses import Defended, Defense, DefenseSettings, Step
from splitveil.active_party.defenses.class_statistics import measure_classes
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.rows import all_finite
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.privacy.scores import norm
from tests.support.defenses import build_defense

ADAPTER: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)
NOISY = ["iso", "max_norm", "max_norm_positive", "marvell"]
SEVERAL = ["iso, 4 classes", "max_norm, 4 classes", "marvell, 4 classes"]
ALL = ["none", *NOISY, *SEVERAL, *(f"{name}, persistent" for name in NOISY), "marvell, running"]


def settings_of(name: str, seed: int | None = None, power_ratio: float = 4.0) -> DefenseSettings:
    name, _, more = name.partition(", ")
    values: dict[str, object] = {"name": name, "insecure_noise_seed": seed}
    if more == "persistent":
        values["noise"] = "persistent"
    if name == "marvell":
        values["strength"] = {"power_ratio": power_ratio}
        values["statistics"] = "running" if more == "running" else "batch"
    return ADAPTER.validate_python({"name": "none"} if name == "none" else values)


def built(name: str, seed: int | None = None) -> Defense:
    key = key_from_insecure_seed(1)
    return build_defense(settings_of(name, seed), key, num_classes=4 if name in SEVERAL else 2)


def batch_of(name: str, rows: int = 512, cut_dim: int = 16) -> tuple[Tensor, Tensor]:
    if name not in SEVERAL:
        return binary_batch(rows, cut_dim)
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(rows) % 4
    weights = torch.randn(4, cut_dim, generator=generator)
    spread = 0.2 * torch.randn(rows, cut_dim, generator=generator)
    return (0.25 - torch.nn.functional.one_hot(labels, 4)) @ weights + spread, labels


def binary_batch(
    batch: int = 512, cut_dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Make gradients as a binary cross entropy does: (p - y) times a direction, and some spread."""
    generator = torch.Generator().manual_seed(5)
    labels = (torch.rand(batch, generator=generator) < 0.2).long()
    direction = torch.randn(cut_dim, generator=generator, dtype=dtype)
    probability = 0.1 + 0.2 * torch.rand(batch, generator=generator, dtype=dtype)
    spread = 0.2 * torch.randn(batch, cut_dim, generator=generator, dtype=dtype)
    return (probability - labels)[:, None] * (direction + spread), labels


def predicted(labels: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return 0.1 + 0.8 * torch.rand(len(labels), generator=generator)


def asked(gradients: Tensor, labels: Tensor, probabilities: Tensor | None = None) -> Step:
    keys = torch.arange(2 * len(gradients)).view(-1, 2) * 2**40 + 2**59
    probabilities = predicted(labels) if probabilities is None else probabilities
    return Step(gradients, labels, keys, probabilities, slopes=gradients)


def answered(name: str, gradients: Tensor, labels: Tensor, seed: int | None = None) -> Defended:
    return built(name, seed).defend(asked(gradients, labels))


def repeated(name: str, gradients: Tensor, labels: Tensor, times: int) -> Tensor:
    """Defend the same batch many times: (times, batch, cut_dim).

    What a row's noise depends on (class means and covariances, the largest norm, the least
    probability of a positive) is the same in a batch that holds every row ``times / 8`` times.
    """
    return defended_often(built(name, seed=1), gradients, labels, predicted(labels), times)


def defended_often(
    defense: Defense, gradients: Tensor, labels: Tensor, probabilities: Tensor, times: int
) -> Tensor:
    copies = times // 8
    tiled = Step(
        gradients.repeat(copies, 1),
        labels.repeat(copies),
        probabilities=probabilities.repeat(copies),
    )
    answers: list[Tensor] = [defense.defend(tiled).gradient for _ in range(8)]
    return torch.cat(answers).double().view(times, *gradients.shape)


def bias_score(samples: Tensor, expected: Tensor) -> float:
    """Largest |mean - expected| of a coordinate, in standard errors of the mean."""
    error = samples.std(dim=0) / samples.shape[0] ** 0.5
    moved = error > 1e-6 * expected.abs().max()
    return float(((samples.mean(dim=0) - expected).abs() / error)[moved].max())


@pytest.mark.parametrize("name", [*NOISY, *SEVERAL])
def test_noise_is_unbiased(name: str) -> None:
    """Accepts the raw gradient as the mean, and rejects one that is shrunk by 30 %.

    128 coordinates, so that 5 standard errors are exceeded by chance once in 10,000 seeds.
    """
    gradients, labels = batch_of(name, rows=16, cut_dim=8)
    if name in NOISY:
        labels[:3] = 1
    samples = repeated(name, gradients, labels, times=8000)
    assert bias_score(samples, gradients.double()) < 5
    assert bias_score(samples, 0.7 * gradients.double()) > 5


@pytest.mark.parametrize("name", [*NOISY, *SEVERAL])
def test_power_spent_is_the_power_reported(name: str) -> None:
    gradients, labels = batch_of(name, rows=256)
    answer = answered(name, gradients, labels, seed=1)
    samples = repeated(name, gradients, labels, times=2000)
    measured = float((samples - gradients).square().sum(dim=2).mean())
    assert measured == pytest.approx(answer.noise_power, rel=0.02)
    assert measured != pytest.approx(1.05 * answer.noise_power, rel=0.02)


def test_powers_are_the_documented_ones() -> None:
    gradients, labels = binary_batch(dtype=torch.float64)
    positive = labels == 1
    norms = gradients.norm(dim=1)
    gap = gradients[positive].mean(dim=0) - gradients[~positive].mean(dim=0)
    powers = {
        "iso": norms.max() ** 2,
        "max_norm": (norms.max() ** 2 - norms**2).mean(),
        "marvell": 4 * gap @ gap,
    }
    for name, power in powers.items():
        assert answered(name, gradients, labels).noise_power == pytest.approx(float(power))


def test_none_changes_no_bit() -> None:
    gradients, labels = binary_batch()
    answer = build_defense(defenses.NoDefense()).defend(Step(gradients, labels))
    defended = answer.gradient
    assert torch.equal(defended, gradients)
    assert answer.noise_power == 0


# ---- max_norm


def varied_norms() -> tuple[Tensor, Tensor]:
    """Rows whose norms tell the label: positives 1, negatives 0.2 to 0.3."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(400) % 4 == 0
    directions = torch.nn.functional.normalize(torch.randn(400, 16, generator=generator), dim=1)
    sizes = torch.where(labels, 1.0, 0.2 + 0.1 * torch.rand(400, generator=generator))
    return sizes[:, None] * directions, labels


def whole_batch_norm_noise(gradients: Tensor, generator: torch.Generator) -> Tensor:
    """The variant that is published and wrong: isotropic, up to the norm of the whole batch."""
    sigma = (gradients.norm() ** 2 / gradients.norm(dim=1) ** 2 - 1).clamp(min=0).sqrt()
    noise: Tensor = sigma[:, None] * torch.randn(gradients.shape, generator=generator)
    return gradients + noise


def row_powers_differ(samples: Tensor, powers: Tensor) -> bool:
    """Say whether some row's mean squared norm is not the given one, at 5 standard errors."""
    squares = samples.square().sum(dim=2)
    error = squares.std(dim=0) / squares.shape[0] ** 0.5 + 1e-5 * powers
    return bool(((squares.mean(dim=0) - powers).abs() > 5 * error).any())


def test_max_norm_brings_every_row_to_the_largest_norm() -> None:
    """Accepts ours, rejects the whole-batch variant, which the norm attack reads perfectly."""
    gradients, labels = varied_norms()
    target = gradients.norm(dim=1).max().double() ** 2
    ours = repeated("max_norm", gradients, labels, times=5000)
    generator = torch.Generator().manual_seed(9)
    wrong = torch.stack([whole_batch_norm_noise(gradients, generator) for _ in range(500)])
    assert not row_powers_differ(ours, target.expand(400))
    assert row_powers_differ(wrong.double(), target.expand(400))
    assert leak_auc(norm(wrong[0]), labels) > 0.99
    assert leak_auc(norm(ours[0]), labels) < 0.9


def test_max_norm_keeps_to_each_rows_line() -> None:
    gradients, labels = binary_batch()
    defended = build_defense(defenses.MaxNormDefense()).defend(Step(gradients, labels)).gradient
    aligned = torch.cosine_similarity(defended, gradients).abs()
    assert torch.allclose(aligned, torch.ones(len(labels)), atol=1e-5)


@pytest.mark.parametrize("tiny", [0.0, 1e-44])
def test_max_norm_hides_rows_without_a_direction(tiny: float) -> None:
    gradients, labels = binary_batch()
    gradients[::2] = tiny
    defended = build_defense(defenses.MaxNormDefense()).defend(Step(gradients, labels)).gradient
    hidden = defended[::2]
    assert torch.allclose(hidden.norm(dim=1), gradients.norm(dim=1).max(), rtol=1e-5)
    assert float(torch.cosine_similarity(hidden[:-1], hidden[1:]).abs().max()) < 0.99


# ---- max_norm_positive


def sigmoid_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (p - y) w with |w| = 2, so that the norms are those the defense counts on."""
    generator = torch.Generator().manual_seed(4)
    probabilities = 0.05 + 0.9 * torch.rand(60, generator=generator)
    labels = (torch.rand(60, generator=generator) < 0.3).long()
    weights = torch.nn.functional.normalize(torch.randn(60, 8, generator=generator), dim=1)
    return (probabilities - labels)[:, None] * 2 * weights, labels, probabilities


def powers_by_hand(labels: Tensor, probabilities: Tensor, smallest: float) -> Tensor:
    """Work out |g|^2 (1 + s^2), row by row, as the technical report has it."""
    powers = []
    for label, p in zip(labels.tolist(), probabilities.tolist(), strict=True):
        own = 1 - p if label else p
        variance = max(((1 - smallest) / own) ** 2 - 1, 0.0)
        powers.append((2 * own) ** 2 * (1 + variance))
    return torch.tensor(powers, dtype=torch.float64)


@pytest.mark.parametrize("positives", [True, False], ids=["positives", "none"])
def test_max_norm_positive_brings_rows_to_the_least_expected_positive(positives: bool) -> None:
    """Accepts the report's formula, with the least p of all where no row is positive."""
    gradients, labels, probabilities = sigmoid_batch()
    if not positives:
        gradients, probabilities = gradients[labels == 0], probabilities[labels == 0]
        labels = labels[labels == 0]
    smallest = float(probabilities[labels == 1].min() if positives else probabilities.min())
    defense = build_defense(defenses.MaxNormPositiveDefense(insecure_noise_seed=1))
    samples = defended_often(defense, gradients, labels, probabilities, times=5000)
    powers = powers_by_hand(labels, probabilities, smallest)
    assert not row_powers_differ(samples, powers)
    assert row_powers_differ(samples, 1.2 * powers)
    assert bias_score(samples, gradients.double()) < 5
    assert bias_score(samples, 0.7 * gradients.double()) > 5


@pytest.mark.parametrize(
    ("probabilities", "complaint"),
    [
        (None, "expected 60 probabilities"),
        (torch.full((3,), 0.5), "expected 60 probabilities"),
        (torch.full((60,), math.nan), "between 0 and 1"),
        (torch.full((60,), 1.5), "between 0 and 1"),
    ],
)
def test_max_norm_positive_needs_probabilities(
    probabilities: Tensor | None, complaint: str
) -> None:
    gradients, labels, _ = sigmoid_batch()
    step = Step(gradients, labels)
    if probabilities is not None:
        step.probabilities = probabilities
    with pytest.raises(ValueError, match=complaint):
        build_defense(defenses.MaxNormPositiveDefense()).defend(step)


# ---- marvell


def covariance_along_and_across(noise: Tensor, gap: Tensor) -> tuple[float, float]:
    """Variance along the gap and per direction across it, of (samples, cut_dim) noise."""
    along = (noise @ gap) / gap.norm()
    total = noise.square().sum(dim=1).mean()
    power_along = along.square().mean()
    return float(power_along), float((total - power_along) / (noise.shape[1] - 1))


def test_marvell_noise_has_the_covariance_of_the_solution() -> None:
    """Accepts the solution, and rejects the two classes exchanged."""
    gradients, labels = binary_batch(batch=128, cut_dim=8)
    defense = build_defense(settings_of("marvell", seed=1))
    solution = defense.defend(Step(gradients, labels)).solution
    assert solution is not None
    noise = repeated("marvell", gradients, labels, times=4000) - gradients
    positive = labels == 1
    gap = (gradients[positive].mean(dim=0) - gradients[~positive].mean(dim=0)).double()
    neg = covariance_along_and_across(noise[:, ~positive].flatten(0, 1), gap)
    pos = covariance_along_and_across(noise[:, positive].flatten(0, 1), gap)
    measured = (*neg, *pos)
    assert measured == pytest.approx(solution[:4], rel=0.02, abs=1e-6)
    assert measured != pytest.approx((*solution[2:4], *solution[:2]), rel=0.02, abs=1e-6)
    assert solution.neg_across > 0  # otherwise half of this test would be empty


@pytest.mark.parametrize("num_classes", [2, 5])
def test_statistics_of_classes_are_those_of_numpy(num_classes: int) -> None:
    gradients, labels = binary_batch(batch=3000, cut_dim=70)  # more than one chunk
    classes = (labels.long() + 2 * torch.arange(3000)) % num_classes
    found = measure_classes(gradients, classes, num_classes, with_spreads=True)
    for index in range(num_classes):
        rows = gradients[classes == index].double().numpy()
        assert found.counts[index] == len(rows)
        np.testing.assert_allclose(found.means[index], rows.mean(axis=0), rtol=1e-12, atol=1e-14)
        deviation = rows.var(axis=0).mean() ** 0.5
        assert float(found.deviations[index]) == pytest.approx(deviation, rel=1e-12)
    norms = np.linalg.norm(gradients.double().numpy(), axis=1)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-12)
    assert found.largest == pytest.approx(norms.max(), rel=1e-12)


@pytest.mark.parametrize("batch", [64, 3000])  # one chunk, and several
def test_a_class_of_one_row_has_no_spread_at_all(batch: int) -> None:
    """Rounding must not pass for a spread, on which the solver would rely."""
    gradients, _ = binary_batch(batch=batch, cut_dim=70)
    classes = (torch.arange(batch) == batch // 2).long()
    found = measure_classes(gradients, classes, 2, with_spreads=True)
    assert torch.equal(found.means[1], gradients[batch // 2].double())
    assert found.deviations[1] == 0 < found.deviations[0]


@pytest.mark.parametrize("size", [1e-44, 1e37])
def test_marvell_statistics_follow_the_size_of_float32_gradients(size: float) -> None:
    signs = torch.tensor([1.0, -1.0, 3.0, 5.0])[:, None].expand(-1, 4)
    rows = signs * torch.tensor(size)  # the smallest are subnormal
    unit = float(rows[0, 0])
    found = measure_classes(rows, torch.tensor([0, 0, 1, 1]), 2, with_spreads=True)
    assert found.deviations.tolist() == pytest.approx([unit, unit], rel=1e-6)
    assert found.means[1].tolist() == pytest.approx([4 * unit] * 4, rel=1e-6)


def test_gradients_whose_sum_overflows_are_finite() -> None:
    assert all_finite(torch.full((4, 4), torch.finfo(torch.float32).max))


@pytest.mark.parametrize("spoilt", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]])
def test_one_value_that_is_not_finite_is_found(spoilt: list[float]) -> None:
    rows = torch.ones(1024, 128)
    rows[3, : len(spoilt)] = torch.tensor(spoilt)
    assert not all_finite(rows)


# ---- batches with one class


def one_class_rows(batch: int = 4000) -> tuple[Tensor, Tensor]:
    gradients, labels = binary_batch(batch=batch)
    rows = gradients[labels == 0]
    return rows, torch.zeros(len(rows))


def test_one_class_before_any_statistics_gets_noise_without_signal() -> None:
    rows, labels = one_class_rows()
    answer = answered("marvell", rows, labels, seed=1)
    defended = answer.gradient
    largest = float(rows.norm(dim=1).max())
    assert answer.noise_power == pytest.approx(largest**2, rel=1e-6)
    assert float(defended.square().sum(dim=1).mean()) == pytest.approx(largest**2, rel=0.05)
    direction = rows.mean(dim=0) / rows.mean(dim=0).norm()
    error = largest / (len(rows) * rows.shape[1]) ** 0.5
    assert abs(float((defended @ direction).mean())) < 5 * error
    assert abs(float((rows @ direction).mean())) > 5 * error


def test_one_class_borrows_the_other_from_earlier_batches() -> None:
    gradients, both_labels = binary_batch(batch=4000)
    rows, labels = one_class_rows(batch=4000)  # the same rows, the positives left out
    defense = build_defense(settings_of("marvell", seed=1))
    defense.defend(Step(gradients, both_labels))
    answer = defense.defend(Step(rows, labels))
    defended = answer.gradient
    assert answer.solution is not None
    neg_along, neg_across, pos_along, pos_across, _ = answer.solution
    positives = gradients[both_labels == 1]
    # The power is 4 squared gaps, at the share of positives in both batches.
    share, others = len(positives) / (len(gradients) + len(rows)), gradients.shape[1] - 1
    power = share * (pos_along + others * pos_across)
    power += (1 - share) * (neg_along + others * neg_across)
    gap = positives.double().mean(dim=0) - rows.double().mean(dim=0)
    assert power == pytest.approx(4 * float(gap.square().sum()), rel=1e-6)
    noise = defended - rows
    assert float(noise.square().sum(dim=1).mean()) == pytest.approx(answer.noise_power, rel=0.1)
    assert answer.noise_power > 0


@pytest.mark.parametrize("name", [*NOISY, *SEVERAL, "marvell, running"])
def test_statistics_of_earlier_batches_survive_a_checkpoint(name: str) -> None:
    """The next batch lacks the first class; without the state it would be charged otherwise."""
    before, after, fresh = (built(name, seed=seed) for seed in (1, 2, 3))
    gradients, labels = batch_of(name)
    before.defend(asked(gradients, labels))
    after.load_state_dict(before.state_dict())
    some = asked(gradients[labels > 0], labels[labels > 0])
    answers = [defense.defend(some) for defense in (before, after, fresh)]
    assert answers[0][1:] == answers[1][1:]
    assert answers[0].charge != answers[2].charge
    with pytest.raises(ValueError, match="expected statistics of classes"):
        after.load_state_dict({"neg_deviation": torch.zeros(16)})
    with pytest.raises(ValueError, match="no state"):
        built("none").load_state_dict(before.state_dict())


# ---- what holds for all


AWKWARD = {
    "zeros": torch.zeros(8, 4),
    "one row": torch.ones(1, 4),
    "one column": torch.tensor([[1.0], [2.0], [-1.0], [0.5]]),
    "equal rows": torch.ones(8, 4),
    "zero rows among others": torch.eye(8)[:, :4],
    "many orders of magnitude": torch.logspace(-30, 30, 32).reshape(8, 4),
    "tiny": 1e-30 * torch.randn(8, 4, generator=torch.Generator().manual_seed(1)),
    "huge": 1e30 * torch.randn(8, 4, generator=torch.Generator().manual_seed(1)),
    "subnormal": torch.full((8, 4), 1e-45),
    "largest": torch.full((8, 4), 3.4e38) * torch.tensor([1.0, -1.0] * 2),
    "one positive at zero": torch.cat([torch.zeros(1, 4), torch.ones(7, 4)]),
    "gap of zero": torch.cat([torch.zeros(4, 4), torch.tensor([[1.0] * 4, [-1.0] * 4] * 2)]),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", AWKWARD)
def test_every_finite_gradient_gets_a_finite_answer(name: str, kind: str) -> None:
    """Whatever the dtype, the classes in the batch, and how sure the predictions are."""
    mixed = (torch.arange(len(AWKWARD[kind])) < 4).float()
    for dtype, labels in itertools.product(
        (torch.float32, torch.float64), (mixed, torch.ones_like(mixed), torch.zeros_like(mixed))
    ):
        gradients, defense = AWKWARD[kind].to(dtype), built(name)
        for probabilities in (predicted(labels), labels, 1 - labels):
            answer = defense.defend(asked(gradients, labels, probabilities))
            defended = answer.gradient
            assert torch.isfinite(defended).all()
            assert math.isfinite(answer.noise_power)
            assert answer.charge.sum_kl >= 0
            assert (defended.dtype, defended.shape) == (dtype, gradients.shape)


def test_a_batch_without_a_gap_is_not_sent_bare() -> None:
    """Positives +-g around zero, negatives zero: the norm gives them away, the gap says 0 power."""
    gradients = AWKWARD["gap of zero"]
    labels = torch.arange(8) >= 4
    answer = answered("marvell", gradients, labels)
    defended = answer.gradient
    assert answer.noise_power == pytest.approx(4.0)
    assert float(defended[:4].norm(dim=1).min()) > 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("exponent", [-99, 60])
def test_defense_scales_with_the_gradient_bit_for_bit(name: str, exponent: int) -> None:
    gradients, labels = batch_of(name)
    factor = 2.0**exponent
    answer = answered(name, gradients, labels, seed=1)
    plain = answer.gradient
    of_scaled = answered(name, factor * gradients, labels, seed=1)
    scaled = of_scaled.gradient
    assert torch.equal(scaled, factor * plain)
    assert of_scaled.charge.sum_kl == pytest.approx(answer.charge.sum_kl, rel=1e-5)


@pytest.mark.parametrize("name", [*NOISY, *SEVERAL])
def test_noise_is_new_for_every_build_and_an_insecure_seed_repeats_it_and_warns(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    gradients, labels = binary_batch()
    first, second = (answered(name, gradients, labels).gradient for _ in range(2))
    assert (first != second).any(dim=1).float().mean() > 0.99
    assert not caplog.text
    first, second = (answered(name, gradients, labels, seed=3).gradient for _ in range(2))
    assert torch.equal(first, second)
    assert "INSECURE" in caplog.text


@pytest.mark.parametrize("name", ["none", *NOISY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_and_cut_may_come_in_any_form_and_the_raw_gradient_is_left_as_it_was(
    name: str, dtype: torch.dtype
) -> None:
    gradients, labels = binary_batch(dtype=dtype)
    copy = gradients.clone()
    expected = answered(name, gradients, labels, seed=1).gradient
    assert torch.equal(gradients, copy)
    for label_dtype in (torch.bool, torch.uint8, torch.float32):
        for other in (labels.to(label_dtype), labels.to(label_dtype)[:, None]):
            assert torch.equal(answered(name, gradients, other, seed=1).gradient, expected)
    shaped = answered(name, gradients.reshape(-1, 2, 4, 2), labels, seed=1).gradient
    assert shaped.shape == (len(labels), 2, 4, 2)
    assert torch.equal(shaped.flatten(1), expected)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("gradients", "labels", "complaint"),
    [
        (torch.full((2, 3), math.nan), torch.tensor([0, 1]), "NaN"),
        (torch.full((2, 3), math.inf), torch.tensor([0, 1]), "infinity"),
        (torch.ones(2, 3), torch.tensor([0, 7]), "labels must be"),
        (torch.ones(2, 3), torch.tensor([0, -1]), "labels must be"),
        (torch.ones(2, 3), torch.tensor([0.0, 0.5]), "labels must be"),
        (torch.ones(2, 3), torch.tensor([0.0, math.nan]), "labels must be"),
        (torch.ones(2, 3), torch.tensor([0, 1, 1]), "labels"),
        (torch.ones(2), torch.tensor([0, 1]), "cut_shape"),
        (torch.ones(0, 3), torch.zeros(0), "cut_shape"),
        (torch.ones(2, 3).half(), torch.tensor([0, 1]), "float32"),
    ],
)
def test_what_cannot_be_defended_is_refused(
    name: str, gradients: Tensor, labels: Tensor, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        answered(name, gradients, labels)


@pytest.mark.parametrize("name", NOISY)
def test_noise_on_a_gpu_has_the_power_reported(name: str, gpu: torch.device) -> None:
    gradients, labels = (tensor.to(gpu) for tensor in binary_batch(batch=20_000))
    answer = answered(name, gradients, labels)
    defended = answer.gradient
    assert defended.is_cuda
    measured = float((defended - gradients).square().sum(dim=1).mean())
    # Six standard deviations for max_norm_positive, whose noise is large on few rows.
    assert measured == pytest.approx(answer.noise_power, rel=0.2)
