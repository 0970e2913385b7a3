"""The sources of fresh noise: the distribution, its tails, and that it cannot be repeated."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from splitveil.active_party.defenses import MarvellDefense, Step
from splitveil.active_party.defenses.noise import NoiseSource, box_muller, secure_normal
from tests.support.defenses import build_defense

Numbers = npt.NDArray[np.float64]
KEY = bytes(range(32))
DTYPES = [torch.float32, torch.float64]


def drawn(dtype: torch.dtype, count: int = 250_000) -> Numbers:
    return secure_normal(count, dtype, KEY).double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_normal_and_nearly_normal_ones_are_told_apart(dtype: torch.dtype) -> None:
    """Accepts ours; rejects a scale 1 % off, a mean of 0.01, and Student's t.

    A right generator fails for one or two keys in 1,000, and this key is fixed.
    """

    def fitting(numbers: Numbers) -> bool:
        count = len(numbers)
        mean, spread = numbers.mean() * count**0.5, (numbers.var() - 1) * (count / 2) ** 0.5
        p_value = stats.kstest(numbers, "norm").pvalue
        return bool(p_value > 0.001 and max(abs(mean), abs(spread)) < 3.5)

    numbers = drawn(dtype)
    others = np.random.default_rng(5).standard_t(20, size=len(numbers))
    assert fitting(numbers)
    for wrong in (0.99 * numbers, 1.01 * numbers, numbers + 0.01, numbers - 0.01, others):
        assert not fitting(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_have_their_share(dtype: torch.dtype) -> None:
    """Beyond 3 and 4 on each side, within 5 standard errors; rejects a sum of 12 uniforms."""

    def fitting(numbers: Numbers) -> bool:
        return all(
            abs((side * numbers > limit).sum() - expected) < 5 * expected**0.5
            for limit in (3.0, 4.0)
            for expected in [stats.norm.sf(limit) * len(numbers)]
            for side in (1, -1)
        )

    assert fitting(drawn(dtype, 4_000_000))
    uniform = np.random.default_rng(5)
    summed = np.full(4_000_000, -6.0)
    for _ in range(12):
        summed += uniform.random(len(summed))
    assert not fitting(summed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_and_halves_are_independent(dtype: torch.dtype) -> None:
    """Neither the numbers of a pair nor those of two pairs are correlated, nor their squares."""
    numbers = drawn(dtype, 65_536)  # one chunk: pairs are half of it apart
    half = len(numbers) // 2
    for first, second in ((numbers[:half], numbers[half:]), (numbers[:-1], numbers[1:])):
        for power in (1, 2):
            correlation = np.corrcoef(first**power, second**power)[0, 1]
            assert abs(correlation) < 5 / len(first) ** 0.5
    assert (
        np.corrcoef(numbers[:half] ** 2, (numbers[:half] + 0.1 * numbers[half:]) ** 2)[0, 1] > 0.5
    )


@pytest.mark.parametrize(
    ("words", "dtype", "largest"),
    [(torch.int32, torch.float32, 6.66), (torch.int64, torch.float64, 9.42)],
)
def test_the_largest_number_is_the_stated_one(
    words: torch.dtype, dtype: torch.dtype, largest: float
) -> None:
    """The smallest radius word, with its sign bit and without, and the largest: finite, stated."""
    limits = torch.iinfo(words)
    radius = torch.tensor([0, limits.min, limits.max, -1], dtype=words)
    numbers = torch.empty(8, dtype=dtype)
    box_muller(radius, torch.zeros(4, dtype=words), out=numbers)
    assert numbers[:2].tolist() == pytest.approx([largest] * 2, abs=0.005)
    assert numbers[2:4].tolist() == pytest.approx([0, 0], abs=1e-3)
    assert torch.isfinite(numbers).all()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 65_535, 65_536, 65_537, 200_001])
def test_any_number_of_numbers_can_be_drawn(count: int) -> None:
    numbers = secure_normal(count, torch.float32, KEY)
    assert numbers.shape == (count,)
    assert len(set(numbers.tolist())) >= count - 0.01 * count


def test_a_key_gives_one_sequence_and_another_key_another() -> None:
    first = secure_normal(1000, torch.float32, KEY)
    assert torch.equal(first, secure_normal(1000, torch.float32, KEY))
    for position in range(32):
        other = bytearray(KEY)
        other[position] ^= 1
        assert (secure_normal(1000, torch.float32, bytes(other)) != first).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_draw_ever_repeats(dtype: torch.dtype) -> None:
    like = torch.empty(3, 5, dtype=dtype)
    noise = NoiseSource()
    draws = [noise.standard_normal((20, 50), like) for _ in range(2)]
    draws.append(NoiseSource().standard_normal((20, 50), like))
    for draw in draws:
        assert draw.dtype == dtype
        assert draw.shape == (20, 50)
    assert (draws[0] != draws[1]).float().mean() > 0.99
    assert (draws[0] != draws[2]).float().mean() > 0.99


def test_defenses_take_no_number_from_torchs_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed of torch's CPU generator has 32 bits that count: a peer could try them one by one."""
    gradients = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    state = torch.random.get_rng_state()
    monkeypatch.delattr(torch, "randn")
    build_defense(MarvellDefense()).defend(Step(gradients, torch.arange(64) % 2))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_on_a_gpu_noise_comes_to_the_gpu(gpu: torch.device) -> None:
    numbers = NoiseSource().standard_normal((200_000,), torch.empty(0, device=gpu))
    assert numbers.is_cuda
    assert stats.kstest(numbers.cpu().numpy(), "norm").pvalue > 1e-6
