"""Attacks that gather over a run: what epochs add under fresh noise, and not under persistent."""

import dataclasses
import itertools
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal

from splitveil.common.privacy.accumulation import (
    AccumulatedScores,
    ContinuousSign,
    ScoreHistory,
    combine_with_hints,
)
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.gradient_rows import prepared, standardised
from splitveil.common.privacy.leakage import auc, leak_auc, leak_auc_interval
from splitveil.common.privacy.observation import (
    Clues,
    LabelClasses,
    Observation,
    pick_reference_row,
)
from splitveil.common.privacy.scores import spectral

_SEED = bytes(32)
_EXAMPLES, _BATCH = 2000, 250
_GATHERING: tuple[str, ...] = (
    "accumulated_spectral",
    "accumulated_cosine",
    "accumulated_kmeans",
    "hint_combiner_50",
    "hint_combiner_200",
)


Reference = Literal["sent", "sent, its sign as it comes", "clean"]


def _run_audit(
    deviation: float,
    num_epochs: int,
    attacks: tuple[str, ...] = _GATHERING,
    *,
    reference: Reference = "clean",
) -> LeakAudit:
    """Audit logistic gradients (p - y) w whose direction w turns slowly, in a fresh order.

    Noise is along the direction that reveals the label, as in Marvell.
    """
    generator = torch.Generator().manual_seed(21)
    labels = (torch.rand(_EXAMPLES, generator=generator) < 0.2).double()
    predictions = torch.sigmoid(-1.4 + 0.5 * torch.randn(_EXAMPLES, generator=generator).double())
    weight, drift = torch.randn(2, 16, generator=generator).double()
    audit = LeakAudit(attacks, num_examples=_EXAMPLES)
    for epoch in range(num_epochs):
        direction = weight + 0.1 * epoch * drift
        direction = direction / direction.norm()
        order = torch.randperm(_EXAMPLES, generator=generator)
        for step, rows in enumerate(torch.split(order, _BATCH)):
            fresh_noise = torch.randn(len(rows), generator=generator).double()
            along = deviation * fresh_noise
            clean = (predictions - labels)[rows, None] * direction
            row = pick_reference_row(labels[rows], _SEED, epoch, step)
            gradients = clean + along[:, None] * direction
            source = clean if reference == "clean" else gradients
            references = {} if row is None else {"cut": source[row]}
            clues = {1: Clues(references, row)}
            seen = Observation(epoch, step, {"cut": gradients}, labels[rows], clues, rows)
            clean_ones = reference != "sent"
            audit.observe(dataclasses.replace(seen, references_are_clean=clean_ones))
    audit.run.close_epoch()
    return audit


@pytest.fixture(scope="module")
def fresh() -> LeakAudit:
    return _run_audit(3.0, 16)


def test_without_a_defense_one_epoch_reveals_every_label_to_every_attack() -> None:
    found = _run_audit(0.0, 1).run.result()[0]["cut"]
    assert set(found) == set(_GATHERING)
    for attack, figures in found.items():
        assert figures.auc > 0.99, attack
        assert figures.low > 0.99, attack


def test_under_fresh_noise_the_leak_grows_with_the_epochs(fresh: LeakAudit) -> None:
    """The sum of e independent scores is worth as much as one with noise smaller by root e.

    Of gradients all along one line, cosines and directions keep the sign alone, which is worth 2/pi
    as many.
    """
    summary = fresh.run.result()[0]["cut"]
    worths = {"accumulated_cosine": 2 / np.pi, "accumulated_kmeans": 2 / np.pi}
    for attack, worth in {**worths, "accumulated_spectral": 1.0}.items():
        series = [fresh.run.after_epoch(epoch)["cut"][attack] for epoch in range(16)]
        for num_epochs in (1, 4, 16):
            expected = normal.cdf((worth * num_epochs / 2) ** 0.5 / 3)
            assert abs(series[num_epochs - 1] - expected) < 0.025
        assert summary[attack].auc == series[15]
        assert (summary[attack].examples or 0) > 0.98 * _EXAMPLES
    for attack, num_hints in (("hint_combiner_50", 50), ("hint_combiner_200", 200)):
        assert summary[attack].examples == _EXAMPLES - num_hints
    assert summary["hint_combiner_200"].auc > normal.cdf(8**0.5 / 3 / np.sqrt(2))


def test_a_noisy_reference_is_turned_so_that_the_sums_do_not_cancel() -> None:
    """Noise of three times the signal turns two references in five around."""
    turned, not_turned, clean = (
        _run_audit(3.0, 16, ("accumulated_cosine",), reference=reference).run.result()[0]["cut"][
            "accumulated_cosine"
        ]
        for reference in get_args(Reference)
    )
    assert turned.low > not_turned.high
    assert abs(turned.auc - clean.auc) < 0.03


def test_a_continuous_sign_does_not_cancel_what_a_sign_per_batch_does() -> None:
    """With balanced classes the skewness is noise, and turns every second batch around."""
    generator = torch.Generator().manual_seed(22)
    labels = (torch.arange(400) % 2).double()
    weight = torch.randn(8, generator=generator).double()
    sums = {"continuous": torch.zeros(400).double(), "per batch": torch.zeros(400).double()}
    sign = ContinuousSign()
    for _ in range(30):
        noise = torch.randn(400, generator=generator).double()
        gradients = (0.5 - labels + 2 * noise)[:, None] * weight
        sums["continuous"] += sign.turn(prepared(gradients).top)
        sums["per batch"] += spectral(gradients)
    assert leak_auc(sums["continuous"], labels) > 0.95  # Phi(sqrt(30) / 2 / sqrt 2) = 0.974
    assert leak_auc(sums["per batch"], labels) < 0.8


def test_the_combiner_learns_that_a_sign_turned_where_a_sum_cancels() -> None:
    generator = np.random.default_rng(23)
    labels = (np.arange(1000) % 4 == 0).astype(np.int64)
    signs = np.array([1, -1, 1, -1])
    scores = signs * labels[:, None] + 0.5 * generator.normal(size=(1000, 4))
    history = ScoreHistory(1000)
    everyone = torch.arange(1000)
    for epoch, column in enumerate(scores.T):
        history.add(epoch, everyone, (torch.from_numpy(column), torch.zeros(1000)))
    features = history.features(everyone.numpy())
    assert leak_auc(scores.sum(axis=1), labels) < 0.6
    for num_hints, bound in ((50, 0.95), (200, 0.97)):
        found = combine_with_hints(features, labels, num_hints, np.random.default_rng(1))
        assert found is not None
        combined, others = found
        assert (~others).sum() == num_hints
        assert auc(combined[others], labels[others]) > bound


def test_the_combiner_reads_no_label_but_the_hints() -> None:
    generator = np.random.default_rng(24)
    features = generator.normal(size=(300, 8))
    labels = (np.arange(300) % 3 == 0).astype(np.int64)
    found = combine_with_hints(features, labels, 50, np.random.default_rng(1))
    assert found is not None
    turned = np.where(found[1], 1 - labels, labels)
    again = combine_with_hints(features, turned, 50, np.random.default_rng(1))
    assert again is not None
    assert np.array_equal(found[0], again[0])
    assert leak_auc(found[0][found[1]], labels[found[1]]) < 0.65
    zeros = np.zeros(300, dtype=np.int64)
    assert combine_with_hints(features, zeros, 50, np.random.default_rng(1)) is None
    assert combine_with_hints(features[:50], labels[:50], 50, np.random.default_rng(1)) is None


def test_a_history_folds_its_stretches_and_loses_no_score() -> None:
    history = ScoreHistory(3)
    position = torch.tensor([1])
    for epoch in range(9):
        score = torch.tensor([float(epoch)])
        history.add(epoch, position, (score, -score))
    # Stretches of four epochs by then: 0..3, 4..7, 8.
    features = history.features(np.array([1, 2]))
    assert features.tolist() == [[6, 22, 8, 0, -6, -22, -8, 0], [0] * 8]


def num_bytes(state: Any) -> int:
    if isinstance(state, dict | list):
        return sum(map(num_bytes, state.values() if isinstance(state, dict) else state))
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def test_nothing_keeps_more_than_sixteen_bytes_per_example() -> None:
    for sums in (AccumulatedScores(1000), ScoreHistory(1000)):
        assert num_bytes(sums.state_dict()) <= 16 * 1000
    state = _run_audit(3.0, 2).run.state_dict()
    assert num_bytes(state) <= (16 * len(_GATHERING) + 2) * _EXAMPLES


def test_several_classes_are_added_up_along_one_direction() -> None:
    """Each batch's own top direction is another one, and sums along them reach .87."""
    generator = torch.Generator().manual_seed(28)
    labels = torch.arange(800) % 8
    audit = LeakAudit(["accumulated_spectral"], 800, LabelClasses(tuple("abcdefgh")))
    for epoch in range(12):
        for step, rows in enumerate(torch.randperm(800, generator=generator).reshape(8, 100)):
            noise = 0.5 * torch.randn(100, 32, generator=generator)
            gradients = {"cut": noise + torch.eye(8, 32)[labels[rows]]}
            audit.observe(Observation(epoch, step, gradients, labels[rows], positions=rows))
    assert audit.run.result()[0]["cut"]["accumulated_spectral"].low > 0.95


def test_a_batch_of_one_class_is_gathered_all_the_same() -> None:
    audit = LeakAudit(["accumulated_spectral"], num_examples=8)
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(25))
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 0, 1])
    for step in range(2):
        part = torch.arange(4 * step, 4 * step + 4)
        audit.observe(Observation(0, step, {"cut": rows[part]}, labels[part], positions=part))
    assert audit.run.result()[0]["cut"]["accumulated_spectral"].examples == 8


def test_any_finite_gradients_give_finite_sums() -> None:
    shapes = ((1, 1), (1, 4), (4, 1), (3, 5))
    for (num_rows, row_dim), scale in itertools.product(shapes, (0.0, 1e-30, 1.0, 1e30, 1e300)):
        gradients = torch.linspace(-1, 1, num_rows * row_dim).double().reshape(num_rows, row_dim)
        scores = standardised(ContinuousSign().turn(prepared(scale * gradients).top))
        assert scores.shape == (num_rows,)
        assert bool(scores.isfinite().all())
    assert bool((standardised(torch.full((5,), 7.0)) == 0).all())
    scores = standardised(3 + 7 * torch.randn(999, generator=torch.Generator().manual_seed(26)))
    assert float(scores.mean()) == pytest.approx(0, abs=1e-12)
    assert float(scores.square().mean()) == pytest.approx(1, abs=1e-12)


def test_the_interval_covers_the_true_auc_nineteen_times_in_twenty() -> None:
    """Binomial bounds of 100 intervals; an AUC three deviations off is not covered."""
    generator = np.random.default_rng(27)
    labels = np.repeat([0, 1], [240, 60])
    true = normal.cdf(1 / np.sqrt(2))
    covered = missed = 0
    for _ in range(100):
        scores = generator.normal(size=300) + labels
        area, low, high = leak_auc_interval(scores, labels, generator)
        assert low < area < high
        covered += low <= true <= high
        missed += not low <= true - 0.11 <= high
    assert 88 <= covered <= 99
    assert missed > 75


def test_the_interval_of_an_inverted_or_tied_score_is_that_of_the_leak() -> None:
    generator = np.random.default_rng(28)
    labels = np.repeat([0, 1], 100)
    scores = (generator.normal(size=200) + labels).round(1)
    plain = leak_auc_interval(scores, labels, np.random.default_rng(1))
    inverted = leak_auc_interval(-scores, labels, np.random.default_rng(1))
    assert inverted.auc == pytest.approx(plain.auc, abs=1e-12)
    assert inverted == pytest.approx(plain, abs=0.03)
    assert leak_auc_interval(np.zeros(200), labels, generator) == (0.5, 0.5, 0.5)
