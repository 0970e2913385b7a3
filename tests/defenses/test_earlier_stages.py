"""Projected labels: a stage looks away from what earlier ones have told."""

from unittest.mock import Mock

import pytest
import torch

from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.active_party.defenses.noise import InsecureSeededNoise
from splitveil.active_party.defenses.projected import design as design_module
from splitveil.active_party.defenses.projected import features
from splitveil.active_party.defenses.projected.design import Design, design, stage_sigma
from splitveil.active_party.defenses.projected.posterior import Posterior
from splitveil.active_party.defenses.projected.release import Release, draw_release, exact_sums
from tests.defenses.test_projection import SPOILT, generator, rows_of, spoilt
from tests.support.projected import in_chunks

ROWS, RANK = 3000, 8


def after(sigma: float, num_rows: int = ROWS, stages: int = 1) -> tuple[list[Design], Posterior]:
    made, posterior = [], Posterior()
    for _ in range(stages):
        new = design(in_chunks(rows_of(num_rows)), num_rows, RANK, earlier=posterior.released)
        posterior.add(new, Release(torch.zeros(new.rank, dtype=torch.float64), sigma))
        made.append(new)
    return made, posterior


def share_within(new: Design, known: Design) -> float:
    """Return the share of a design's squared length that lies in the span of another."""
    basis = torch.linalg.qr(known.rows.double()).Q
    projected = basis.T @ new.rows.double()
    return float(projected.square().sum() / new.rows.double().square().sum())


def next_design(posterior: Posterior, num_rows: int = ROWS) -> Design:
    return design(in_chunks(rows_of(num_rows)), num_rows, RANK, earlier=posterior.released)


def test_sums_with_little_noise_are_not_asked_for_again() -> None:
    (first,), posterior = after(sigma=0.01)
    assert share_within(next_design(posterior), first) < 0.01
    assert share_within(next_design(Posterior()), first) > 0.99  # without memory: the same again


def test_sums_that_noise_hides_are_asked_for_again() -> None:
    (first,), posterior = after(sigma=1e4)
    assert share_within(next_design(posterior), first) > 0.99


def test_stages_that_tell_all_directions_know_labels_that_lie_in_them() -> None:
    """Residuals within the columns' span, told stage by stage, with hardly any noise."""
    rows = rows_of(ROWS)
    columns = features.columns_of([rows]).of(rows)
    prior = torch.full((ROWS,), 0.5)
    truth = (0.5 + 0.05 * columns @ torch.randn(columns.shape[1], generator=generator(5))).clamp(
        0, 1
    )

    def error(looks_away: bool) -> float:
        posterior = Posterior()
        for _ in range(5):
            told = posterior.released if looks_away else None
            made = design(in_chunks(rows), ROWS, RANK, earlier=told)
            sums = made.rows.double().T @ truth.double()
            posterior.add(made, Release(sums, 0.001))
        return float((posterior.targets(prior) - truth).square().mean())

    assert error(looks_away=True) < 0.5 * error(looks_away=False)


@pytest.mark.parametrize("kind", SPOILT)
def test_flipping_any_label_moves_the_sums_of_a_later_stage_by_at_most_1(kind: str) -> None:
    rows = spoilt(kind)
    num_rows = len(rows.activations)
    labels = torch.randint(2, (num_rows,), generator=generator(3)).double()
    posterior = Posterior()
    for _ in range(3):
        made = design(in_chunks(rows), num_rows, RANK, earlier=posterior.released)
        one = round(1 / made.unit) ** 2
        assert int(made.steps.long().square().sum(dim=1).max()) <= one
        sigma = stage_sigma(mu_of_leak_auc(0.6), 1 / 3)
        posterior.add(made, draw_release(made, labels, sigma, InsecureSeededNoise(1)))
    targets = posterior.targets(torch.full((num_rows,), 0.5))
    assert ((targets >= 0) & (targets <= 1)).all()


def test_a_design_does_not_depend_on_any_sum() -> None:
    made = next_design(after(sigma=3.0)[1])
    (first,), _ = after(sigma=3.0)
    other = Posterior()
    sums = exact_sums(first, torch.randint(2, (ROWS,), generator=generator(7)))
    other.add(first, Release(sums, 3.0))
    assert torch.equal(next_design(other).steps, made.steps)
    assert not torch.equal(next_design(after(sigma=30.0)[1]).steps, made.steps)


def test_a_sample_and_all_rows_are_read_once_and_targets_of_later_epochs_decompose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (_,), posterior = after(sigma=3.0)
    monkeypatch.setattr(design_module, "SAMPLE_ROWS", ROWS // 4)
    read = Mock(side_effect=in_chunks(rows_of(ROWS)))
    design(read, ROWS, RANK, earlier=posterior.released)
    assert [call.args for call in read.call_args_list] == [(4,), (1,)]
    first = posterior.targets(torch.full((ROWS,), 0.5))
    decompose = Mock(side_effect=torch.linalg.eigh)
    monkeypatch.setattr(torch.linalg, "eigh", decompose)
    assert torch.equal(posterior.targets(torch.full((ROWS,), 0.5)), first)
    assert not torch.equal(posterior.targets(torch.full((ROWS,), 0.4)), first)
    assert decompose.call_count == 0


def test_excluded_rows_stay_without_weight() -> None:
    rows = rows_of(ROWS)
    excluded = torch.arange(ROWS) % 3 == 0
    posterior = Posterior()
    for _ in range(2):
        made = design(in_chunks(rows), ROWS, RANK, excluded=excluded, earlier=posterior.released)
        assert not made.steps[excluded].any()
        assert made.steps[~excluded].any(dim=1).all()
        posterior.add(made, Release(torch.zeros(made.rank, dtype=torch.float64), 1.0))


def test_a_sample_of_the_rows_leads_to_nearly_the_same_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first,), posterior = after(sigma=0.5)
    whole = next_design(posterior)
    monkeypatch.setattr(design_module, "SAMPLE_ROWS", ROWS // 3)
    sampled = next_design(posterior)
    assert share_within(sampled, first) < 0.1
    assert share_within(sampled, whole) > 0.3  # 8 of 60 directions by chance: 0.13
