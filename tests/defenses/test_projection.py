"""Projected labels: the sensitivity of sums, their noise, and targets made of them."""

import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from scipy import stats
from torch import Tensor

from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.active_party.defenses.interface import RowChunk
from splitveil.active_party.defenses.noise import InsecureSeededNoise, SecureNoise
from splitveil.active_party.defenses.projected.design import (
    BoundedWeights,
    Design,
    design,
    stage_shares,
    stage_sigma,
)
from splitveil.active_party.defenses.projected.features import columns_of
from splitveil.active_party.defenses.projected.posterior import Posterior
from splitveil.active_party.defenses.projected.release import (
    Release,
    draw_release,
    exact_sums,
    release_grid,
)
from tests.support.projected import in_chunks

ROWS = 600
MU = mu_of_leak_auc(0.6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(num_rows: int, seed: int = 1, num_classes: int = 2) -> RowChunk:
    normal = torch.randn(num_rows, 40, generator=generator(seed))
    slopes = torch.rand(num_rows, 8, generator=generator(seed + 1)) - 0.3
    logits = normal[:, 0] - 1
    if num_classes > 2:
        slopes = torch.rand(num_rows, num_classes, 8, generator=generator(seed + 1)) - 0.3
        logits = normal[:, :num_classes]
    return RowChunk(normal[:, :8].relu(), normal[:, 8:12], normal[:, 20:30].tanh(), logits, slopes)


def design_of(
    rows: RowChunk,
    rank: int = 16,
    *,
    subjects: Tensor | None = None,
    excluded: Tensor | None = None,
) -> Design:
    chunks, num_rows = in_chunks(rows), len(rows.activations)
    return design(chunks, num_rows, rank, subjects=subjects, excluded=excluded)


def spoilt(kind: str) -> RowChunk:
    rows = rows_of(ROWS)
    activations, slopes, logits = rows.activations.clone(), rows.slopes.clone(), rows.logits.clone()
    match kind:
        case "constant":
            return RowChunk(torch.ones(ROWS, 8), None, None, torch.zeros(ROWS), torch.ones(ROWS, 8))
        case "zero":
            zeros = torch.zeros(ROWS, 8)
            return RowChunk(zeros, None, None, torch.zeros(ROWS), zeros)
        case "collinear":
            activations = activations[:, :1] * torch.arange(1, 9)
        case "huge":
            activations *= 1e30
            slopes *= 1e38
        case "one huge row":
            activations[7] = 3e38
        case "not finite":
            activations[3], slopes[5], logits[9] = math.nan, math.inf, -math.inf
        case "one-hot":
            activations = torch.eye(ROWS)[:, :8]
        case "denormal":
            activations *= 1e-42
        case "groups":
            activations = activations[torch.arange(ROWS) % 4]
    return RowChunk(activations, rows.own, rows.hidden, logits, slopes)


SPOILT = ["constant", "zero", "collinear", "huge", "one huge row", "not finite", "one-hot"]
SPOILT += ["denormal", "groups"]


@pytest.mark.parametrize("kind", ["", *SPOILT])
def test_flipping_any_label_moves_the_sums_by_at_most_1(kind: str) -> None:
    """Every label is flipped; sums are compared as integers, so that nothing is rounded."""
    made = design_of(spoilt(kind) if kind else rows_of(ROWS))
    labels = torch.randint(2, (ROWS,), generator=generator(3))
    before = exact_sums(made, labels)
    one = round(1 / made.unit) ** 2
    moves = []
    for row in range(ROWS):
        flipped = labels.clone()
        flipped[row] = 1 - flipped[row]
        steps = [round(move / made.unit) for move in (exact_sums(made, flipped) - before).tolist()]
        moves.append(sum(step * step for step in steps))
    assert max(moves) <= one
    assert made.rows.isfinite().all()
    if not kind:  # almost nothing of what is allowed is given away
        assert sorted(moves)[ROWS // 2] > 0.999 * one


def test_a_row_that_is_too_long_by_its_last_bit_is_shrunk() -> None:
    """Rounding 0.6, 0.8 and the like to the nearest step would exceed 1 for some of them."""
    angles = torch.linspace(0.001, 1.57, 4096)
    weights = torch.stack([angles.cos(), angles.sin()], dim=1) * (1 + 2e-7)
    bounded = BoundedWeights(4096, 2, None)
    bounded.add(0, weights)
    steps, unit = bounded.finish()
    squared = steps.long().square().sum(dim=1)
    assert int(squared.max()) <= round(1 / unit) ** 2
    nearest = (weights.double() / unit).round().long().square().sum(dim=1)
    assert int(nearest.max()) > round(1 / unit) ** 2
    assert (steps.double() * unit - weights).abs().max() <= 1.05 * unit


def test_a_sum_has_the_same_bits_in_any_order_and_split() -> None:
    made = design_of(rows_of(ROWS))
    labels = torch.randint(2, (ROWS,), generator=generator(3)).float()
    sums = exact_sums(made, labels)
    shuffled = torch.randperm(ROWS, generator=generator(4))
    assert torch.equal(
        sums, exact_sums(made._replace(steps=made.steps[shuffled]), labels[shuffled])
    )
    halves = [made._replace(steps=made.steps[part::2]) for part in (0, 1)]
    parts = [exact_sums(half, labels[part::2]) for part, half in enumerate(halves)]
    assert torch.equal(sums, parts[0] + parts[1])
    integers = (made.steps.long() * labels.long()[:, None]).sum(dim=0)
    assert torch.equal(sums, integers.double() * made.unit)


@pytest.mark.parametrize("num_rows", [2, 5, 70])
def test_all_labels_of_a_subject_together_move_the_sums_by_at_most_1(num_rows: int) -> None:
    subjects = torch.arange(ROWS) // num_rows
    made = design_of(rows_of(ROWS), subjects=subjects)
    alone = design_of(rows_of(ROWS))
    largest = 0.0
    for subject in range(3):
        weights = made.rows[subjects == subject].double()
        if num_rows <= 5:
            changes = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=num_rows)))
            largest = max(largest, float((changes.double() @ weights).norm(dim=1).max()))
        else:  # greedy signs: a lower bound on what is possible
            moved = torch.zeros(weights.shape[1], dtype=torch.float64)
            for row in weights:
                moved += row if float(moved @ row) >= 0 else -row
            largest = max(largest, float(moved.norm()))
    assert largest <= 1
    alone_largest = float(alone.rows[subjects == 0].double().sum(dim=0).norm())
    assert alone_largest > 1.2  # without subjects, some would exceed the bound
    assert largest > 0.25  # and with them, the bound is not far from what is possible


def test_rows_of_different_subjects_are_not_shrunk() -> None:
    everybody = torch.arange(ROWS)
    own = design_of(rows_of(ROWS), subjects=everybody)
    assert torch.equal(own.steps, design_of(rows_of(ROWS)).steps)


def test_excluded_rows_weigh_nothing_and_leave_the_others_at_full_weight() -> None:
    excluded = torch.arange(ROWS) % 3 == 0
    made = design_of(rows_of(ROWS), excluded=excluded)
    assert int(made.steps[excluded].abs().max()) == 0
    assert float(made.rows[~excluded].norm(dim=1).median()) > 0.999
    nobody = design_of(rows_of(ROWS), excluded=torch.ones(ROWS, dtype=torch.bool))
    assert int(nobody.steps.abs().sum()) == 0


def test_the_stages_of_a_run_spend_its_bound_and_no_more() -> None:
    """Charges D^2/sigma^2 add up to mu^2; with several classes D is sqrt 2."""
    for num_classes, squared_move in ((2, 1.0), (5, 2.0)):
        for stages in (1, 2, 8, 300):
            shares = stage_shares(stages)
            sigmas = [stage_sigma(MU, share, num_classes) for share in shares]
            spent = sum(squared_move / sigma**2 for sigma in sigmas)
            assert spent == pytest.approx(MU**2, rel=1e-12)
            assert sigmas == sorted(sigmas)
    for mu, share in ((0.0, 0.5), (1.0, 0.0), (1.0, 1.1), (math.nan, 0.5)):
        with pytest.raises(ValueError, match="share"):
            stage_sigma(mu, share)
    with pytest.raises(ValueError, match="stage"):
        stage_shares(0)


def test_a_label_of_several_classes_moves_the_sums_by_at_most_sqrt_2() -> None:
    made = design_of(rows_of(ROWS, num_classes=4))
    labels = torch.randint(4, (ROWS,), generator=generator(3))
    before = exact_sums(made, torch.eye(4)[labels])
    moves = []
    for row in range(0, ROWS, 7):
        other = labels.clone()
        other[row] = (other[row] + 1) % 4
        moves.append(float((exact_sums(made, torch.eye(4)[other]) - before).norm()))
    assert max(moves) <= math.sqrt(2)
    assert max(moves) > 0.999 * math.sqrt(2)


@pytest.mark.parametrize("kind", ["slopes", "products with activations", "products with own"])
def test_the_columns_hold_what_a_step_of_the_bottom_model_asks_for(kind: str) -> None:
    """Within 1 % of its variance, which clipping at 4 standard deviations takes; else 20 %."""
    rows = rows_of(ROWS)
    assert rows.own is not None
    along = (rows.slopes @ rows.slopes.mean(dim=0))[:, None]
    wanted = {
        "slopes": rows.slopes,
        "products with activations": along * rows.activations,
        "products with own": along * rows.own,
    }[kind].double()
    columns = columns_of([rows]).of(rows).double()
    centred = wanted - wanted.mean(dim=0)

    def missing(columns: Tensor) -> float:
        basis, _ = torch.linalg.qr(columns)
        left = centred - basis @ (basis.T @ centred)
        return float(left.square().sum() / centred.square().sum())

    assert missing(columns) < 0.01
    raw = torch.cat([torch.ones(ROWS, 1), rows.activations, rows.own], dim=1).double()
    assert missing(raw) > 0.2


def test_fewer_rows_than_rank_and_dependent_columns_give_fewer_columns() -> None:
    few = design_of(rows_of(5), rank=64)
    assert few.rank <= 5
    constant = design_of(spoilt("constant"))
    assert constant.rank == 1
    assert torch.allclose(constant.rows.abs(), torch.ones(ROWS, 1), atol=1e-3)


def test_one_huge_row_does_not_hide_what_the_others_differ_in() -> None:
    """The column's scale is that of most rows: the other rows' weights hardly change."""
    plain, one_huge = design_of(rows_of(ROWS), 64), design_of(spoilt("one huge row"), 64)
    others = torch.arange(ROWS) != 7
    basis, _ = torch.linalg.qr(one_huge.rows[others].double())
    inside = basis.T @ plain.rows[others].double()
    assert float(inside.square().sum() / plain.rows[others].double().square().sum()) > 0.99


def test_the_rows_must_be_as_many_as_announced() -> None:
    with pytest.raises(ValueError, match="600 rows"):
        design(in_chunks(rows_of(599)), ROWS, 4)
    read_again = Mock(side_effect=[in_chunks(rows_of(rows))(1) for rows in (ROWS, 599)])
    with pytest.raises(ValueError, match="600 rows, got 599"):
        design(read_again, ROWS, 4)
    with pytest.raises(ValueError, match="rank"):
        design(in_chunks(rows_of(ROWS)), ROWS, 0)
    with pytest.raises(ValueError, match="subjects"):
        design_of(rows_of(ROWS), subjects=torch.zeros(3, dtype=torch.long))


def noise_of(made: Design, sigma: float, draws: int) -> Tensor:
    labels = torch.randint(2, (ROWS,), generator=generator(3))
    normals = InsecureSeededNoise(5)
    sums = exact_sums(made, labels)
    return torch.stack(
        [draw_release(made, labels, sigma, normals).sums - sums for _ in range(draws)]
    )


def is_normal(noise: Tensor, sigma: float) -> bool:
    return bool(stats.kstest(noise.flatten().numpy(), stats.norm(scale=sigma).cdf).pvalue > 0.001)


def test_the_noise_is_that_of_the_mechanism() -> None:
    """Normal, of the stated standard deviation; one 20 % off, either way, is noticed."""
    made, sigma = design_of(rows_of(ROWS)), stage_sigma(MU, 0.1)
    noise = noise_of(made, sigma, 400)
    assert is_normal(noise, sigma)
    assert not is_normal(noise, 0.8 * sigma)
    assert not is_normal(noise, 1.2 * sigma)
    assert abs(float(noise.square().mean()) / sigma**2 - 1) < 0.05
    correlations = torch.corrcoef(noise.T) - torch.eye(made.rank)
    assert float(correlations.abs().max()) < 5 / math.sqrt(400)


def test_released_sums_lie_on_a_grid_that_depends_on_sigma_alone() -> None:
    made = design_of(rows_of(ROWS))
    for sigma in (1e-3, 0.7, 15.0, 4e4):
        grid = release_grid(sigma)
        assert sigma / 32 <= grid <= sigma / 16
        for label in (0.0, 1.0):
            released = draw_release(made, torch.full((ROWS,), label), sigma, SecureNoise()).sums
            assert torch.equal((released / grid).round() * grid, released)


def released(made: Design, labels: Tensor, sigma: float, seed: int) -> Release:
    return draw_release(made, labels, sigma, InsecureSeededNoise(seed))


def test_targets_are_those_of_the_normal_posterior() -> None:
    """Against the conditional mean of the joint normal distribution of labels and sums."""
    num_rows, sigma = 40, 0.8
    made = [design_of(rows_of(num_rows, seed), rank=6) for seed in (1, 2)]
    labels = torch.randint(2, (num_rows,), generator=generator(3))
    prior = torch.rand(num_rows, generator=generator(4)) * 0.8 + 0.1
    posterior = Posterior()
    releases = [released(one, labels, sigma, seed) for seed, one in enumerate(made)]
    for one, release in zip(made, releases, strict=True):
        posterior.add(one, release)
    weights = torch.cat([one.rows for one in made], dim=1).double()
    sums = torch.cat([release.sums for release in releases])
    noise = sigma**2 * torch.eye(len(sums), dtype=torch.float64)

    def evidence(q: float) -> float:
        covariance = q * weights.T @ weights + noise
        surprise = sums - weights.T @ prior.double()
        normal = stats.multivariate_normal(cov=covariance.numpy(), allow_singular=False)
        return float(normal.logpdf(surprise.numpy()))

    q = max((0.25 * 2.0**power for power in range(-8, 9)), key=evidence)
    gain = q * weights @ torch.linalg.inv(q * weights.T @ weights + noise)
    expected = prior.double() + gain @ (sums - weights.T @ prior.double())
    assert float((posterior.targets(prior) - expected.clamp(0, 1)).abs().max()) < 1e-5
    assert float((expected - prior).abs().max()) > 0.01  # the releases do say something


def test_targets_of_several_classes_lie_on_the_simplex() -> None:
    rows = rows_of(ROWS, num_classes=4)
    labels = rows.logits.argmax(dim=1)
    made = design_of(rows, rank=24)
    posterior = Posterior()
    one_hot = torch.eye(4)[labels]
    posterior.add(made, released(made, one_hot, stage_sigma(5.0, 1.0, 4), 1))
    targets = posterior.targets(torch.full((ROWS, 4), 0.25))
    assert targets.shape == (ROWS, 4)
    assert float(targets.min()) >= 0
    assert torch.allclose(targets.sum(dim=1), torch.ones(ROWS), atol=1e-5)
    assert float((targets.argmax(dim=1) == labels).float().mean()) > 0.6


def test_only_the_newest_stages_that_fit_are_remembered() -> None:
    labels = torch.randint(2, (ROWS,), generator=generator(3))
    prior = torch.rand(ROWS, generator=generator(4))
    made = [design_of(rows_of(ROWS, seed)) for seed in range(5)]
    bounded, newest = Posterior(memory_bytes=2 * 2 * ROWS * 16), Posterior()
    for stage, one in enumerate(made):
        bounded.add(one, released(one, labels, 3.0, stage))
        if stage >= 3:
            newest.add(one, released(one, labels, 3.0, stage))
    assert bounded.num_stages == 2
    assert torch.allclose(bounded.targets(prior), newest.targets(prior), atol=1e-6)
    tiny = Posterior(memory_bytes=1)
    tiny.add(made[0], released(made[0], labels, 3.0, 0))
    assert tiny.num_stages == 1


def test_labels_that_are_not_0_or_1_are_refused() -> None:
    made = design_of(rows_of(ROWS))
    for labels in (torch.full((ROWS,), 2), torch.zeros(ROWS - 1), torch.full((ROWS,), math.nan)):
        with pytest.raises(ValueError, match="labels"):
            draw_release(made, labels, 1.0, SecureNoise())
    with pytest.raises(ValueError, match="one-hot"):
        draw_release(made, torch.ones(ROWS, 3), 1.0, SecureNoise())
    for sigma in (0.0, math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="sigma"):
            draw_release(made, torch.zeros(ROWS), sigma, SecureNoise())


def test_a_posterior_refuses_what_does_not_fit() -> None:
    made = design_of(rows_of(ROWS))
    posterior = Posterior()
    with pytest.raises(ValueError, match="columns"):
        posterior.add(made, Release(torch.zeros(3, dtype=torch.float64), 1.0))
    posterior.add(made, Release(torch.zeros(made.rank, dtype=torch.float64), 1.0))
    with pytest.raises(ValueError, match="prior"):
        posterior.targets(torch.zeros(ROWS, 3))
    with pytest.raises(ValueError, match="finite"):
        posterior.targets(torch.full((ROWS,), math.nan))
    with pytest.raises(ValueError, match="state"):
        posterior.load_state_dict({"gram": torch.zeros(0, 0), "other": torch.zeros(1)})
