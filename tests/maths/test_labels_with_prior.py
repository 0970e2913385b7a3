"""RRWithPrior: its probabilities, its epsilon, and that each label is drawn once."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from splitveil.active_party.defenses import (
    AnswerKeys,
    DefenseContext,
    Examples,
    NoiseSecrets,
    NoisyLabelDefense,
    RawBatch,
)
from splitveil.active_party.defenses.exact_auc import auc_of_epsilon
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.interface import LabelledRows
from splitveil.active_party.defenses.label_mechanisms import ResponseWithPrior, label_leak
from splitveil.active_party.defenses.label_prior import LabelsWithPrior, draw_with_prior
from splitveil.common.privacy.covers import Covers
from splitveil.common.privacy.leakage import leak_auc

EVEN = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
"""Every value of the uniform number that decides, evenly spaced."""


def answers_of(prior: Tensor, epsilon: float) -> Tensor:
    """Return the exact share of each answer given each label, (labels, answers)."""
    num_classes = len(prior)
    shares = []
    for label in range(num_classes):
        labels = torch.full((len(EVEN),), label)
        answers, _ = draw_with_prior(labels, prior.expand(len(EVEN), -1), epsilon, EVEN)
        shares.append(torch.bincount(answers, minlength=num_classes) / len(EVEN))
    return torch.stack(shares)


def priors(num_classes: int, count: int = 12) -> Tensor:
    """Return priors from nearly certain to uniform, with ties and zeros among them."""
    drawn = np.random.default_rng(num_classes).dirichlet(np.full(num_classes, 0.4), size=count - 3)
    uniform, certain = np.full(num_classes, 1 / num_classes), np.eye(num_classes)[1]
    tied = np.where(np.arange(num_classes) < 2, 0.5, 0.0)
    return torch.from_numpy(np.stack((uniform, certain, tied, *drawn)))


@pytest.mark.parametrize("num_classes", [2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_no_answer_is_more_than_exp_epsilon_times_as_likely_under_another_label(
    num_classes: int, epsilon: float
) -> None:
    """Over all answers and pairs of labels; where k > 1, some pair of them meets the bound.

    And the answer is the label as often as with the best k, tried one by one.
    """
    for prior in priors(num_classes):
        shares = answers_of(prior, epsilon)
        assert torch.allclose(shares.sum(dim=1), torch.ones(num_classes))
        given = shares[:, shares.amax(dim=0) > 0]
        odds = (given.amax(dim=0) / given.amin(dim=0).clamp(min=1e-9)).max()
        rounding = 2e-4 / float(given.min())
        assert math.log(float(odds)) <= epsilon + rounding
        if given.shape[1] > 1:
            assert math.log(float(odds)) >= epsilon - rounding
        highest = prior.sort(descending=True).values
        best = max(
            math.exp(epsilon) / (math.exp(epsilon) + k - 1) * float(highest[:k].sum())
            for k in range(1, num_classes + 1)
        )
        assert float((prior * shares.diagonal()).sum()) == pytest.approx(best, abs=5e-4)


def test_the_answers_have_the_paper_s_probabilities() -> None:
    """RRTop-k, written out for a prior whose best k is 3 of 4."""
    epsilon = 0.5
    shares = answers_of(torch.tensor([0.05, 0.3, 0.35, 0.3], dtype=torch.float64), epsilon)
    kept, other = (x / (math.exp(epsilon) + 2) for x in (math.exp(epsilon), 1.0))
    third = 1 / 3
    expected = torch.tensor(
        [
            [0, third, third, third],
            [0, kept, other, other],
            [0, other, kept, other],
            [0, other, other, kept],
        ]
    )
    assert torch.allclose(shares, expected, atol=3e-4)


ROWS = 30_000


def counted_keys(seed: int = 1) -> AnswerKeys:
    keys = AnswerKeys()
    keys.begin(key_from_insecure_seed(seed))
    return keys


def build(
    labels: Tensor, num_classes: int = 2, seed: int = 1, **settings: object
) -> LabelsWithPrior:
    mechanism = ResponseWithPrior.model_validate(
        {"kind": "with_prior", "epsilon": 1.0, "parts": 1} | settings
    )
    defense = NoisyLabelDefense(mechanism=mechanism).build(
        DefenseContext((4,), num_classes),
        NoiseSecrets(None, counted_keys(seed)),
        Examples([], labels, torch.device("cpu")),
    )
    assert isinstance(defense, LabelsWithPrior)
    return defense


def asked(
    defense: LabelsWithPrior, labels: Tensor, logits: Tensor, rows: Tensor | None = None
) -> Tensor:
    rows = torch.arange(len(labels)) if rows is None else rows
    return defense.targets(
        LabelledRows(rows, labels[rows], torch.zeros(len(rows), 4), lambda: logits)
    )


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_whole_table_is_drawn_with_the_stated_epsilon(num_classes: int) -> None:
    """A chi-square test accepts epsilon 1 and rejects 1.2."""
    labels = torch.arange(ROWS).remainder(num_classes).float()
    shape = (ROWS,) if num_classes == 2 else (ROWS, num_classes)
    drawn = asked(build(labels, num_classes), labels, torch.zeros(shape))
    answers = drawn if num_classes == 2 else drawn.argmax(dim=1)
    table = np.zeros((num_classes, num_classes))
    np.add.at(table, (labels.long().numpy(), answers.long().numpy()), 1)

    def p_value(epsilon: float) -> float:
        odds = np.where(np.eye(num_classes) > 0, math.exp(epsilon), 1.0)
        expected = odds / odds.sum(axis=1, keepdims=True) * table.sum(axis=1, keepdims=True)
        statistic = float(((table - expected) ** 2 / expected).sum())
        return float(stats.chi2.sf(statistic, num_classes * (num_classes - 1)))

    assert p_value(1.0) > 0.001
    assert p_value(1.2) < 0.001


def test_a_label_is_drawn_once_whatever_the_model_predicts_later() -> None:
    labels = torch.arange(500).remainder(2).float()
    defense = build(labels)
    first = asked(defense, labels, torch.zeros(500))
    assert set(first.tolist()) == {0.0, 1.0}
    for logit in (5.0, -5.0):
        assert torch.equal(asked(defense, labels, torch.full((500,), logit)), first)
    assert not torch.equal(asked(build(labels, seed=2), labels, torch.zeros(500)), first)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_part_waits_for_its_stage_and_until_then_its_target_is_the_prediction(
    num_classes: int,
) -> None:
    labels = torch.arange(60).remainder(num_classes).float()
    defense = build(
        labels, num_classes, parts=3, epochs_per_part=2, epsilon=0.01, if_certain="class"
    )
    generator = torch.Generator().manual_seed(1)
    part = torch.arange(60).remainder(3)
    for epoch in range(7):
        shape = (60,) if num_classes == 2 else (60, num_classes)
        logits = torch.randn(shape, generator=generator)
        predicted = torch.sigmoid(logits) if num_classes == 2 else torch.softmax(logits, dim=1)
        targets = asked(defense, labels, logits)
        is_hard = (targets == 0) | (targets == 1)
        is_drawn = is_hard if num_classes == 2 else is_hard.all(dim=1)
        assert torch.equal(is_drawn, part <= epoch // 2)
        assert torch.allclose(targets[~is_drawn], predicted[~is_drawn])


def test_where_the_model_is_certain_the_label_has_no_part_in_the_answer() -> None:
    """The answer is the class expected; or, as the settings say, the prediction at every step."""
    labels = torch.arange(100).remainder(2).float()
    logits = torch.where(torch.arange(100) < 50, 3.0, 0.0)
    hard = asked(build(labels, if_certain="class"), labels, logits)
    assert torch.equal(hard[:50], torch.ones(50))
    assert set(hard[50:].tolist()) == {0.0, 1.0}
    defense = build(labels)
    assert torch.equal(asked(defense, labels, logits)[50:], hard[50:])
    later = asked(defense, labels, -logits)
    assert torch.allclose(later[:50], torch.sigmoid(-logits[:50]))
    assert torch.equal(later[50:], hard[50:])


def test_a_restored_defense_goes_on_bit_for_bit_and_draws_nothing_again() -> None:
    """With keys of its own and other predictions: what is drawn stays, and the rest is drawn."""
    labels = torch.arange(200).remainder(2).float()
    undisturbed = build(labels, parts=2, epochs_per_part=1)
    asked(undisturbed, labels, torch.zeros(200))
    state = {name: value.clone() for name, value in undisturbed.state_dict().items()}
    resumed = build(labels, parts=2, epochs_per_part=1)
    resumed.load_state_dict(state)
    keys = counted_keys(5)
    undisturbed._draw_keys, resumed._draw_keys = keys, counted_keys(5)
    for logit in (0.1, 0.4):
        logits = torch.full((200,), logit)
        assert torch.equal(asked(resumed, labels, logits), asked(undisturbed, labels, logits))
    first = state["answers"][::2]
    assert torch.equal(resumed.state_dict()["answers"][::2], first)
    raw = RawBatch(torch.ones(200, 3), labels)
    assert resumed.defend(raw).report.charge == undisturbed.defend(raw).report.charge


def test_a_state_of_other_rows_is_refused() -> None:
    labels = torch.zeros(9)
    state = build(labels).state_dict()
    for wrong, said in (
        ({}, "expected the labels"),
        (build(torch.zeros(8)).state_dict(), "each of 9 rows"),
        (state | {"answers": torch.full((9,), 2)}, "below 2"),
        (state | {"visits": torch.zeros(9)}, "visits"),
    ):
        with pytest.raises(ValueError, match=said):
            build(labels).load_state_dict(wrong)


def test_another_run_is_charged_on_top_and_the_charge_covers_every_draw() -> None:
    labels = torch.arange(10).remainder(2).float()
    charges = []
    for seed in (1, 1, 2):
        defense = build(labels, seed=seed)
        asked(defense, labels, torch.zeros(10))
        charges.append(defense.defend(RawBatch(torch.ones(10, 3), labels)).report.charge)
    assert charges[0] == charges[1]
    assert charges[0].noise_identity != charges[2].noise_identity
    assert charges[0].covers is Covers.ANYBODY
    assert charges[0].epsilon == 1.0
    mechanism = ResponseWithPrior(kind="with_prior", epsilon=1.0)
    for num_classes in (2, 5):
        for prior in priors(num_classes):
            shares = answers_of(prior, 1.0).clamp(min=1e-12)
            logs = shares.log()
            pairs = shares[:, None] - shares[None, :], logs[:, None] - logs[None, :]
            worst = float((pairs[0] * pairs[1]).sum(dim=2).max())
            assert worst <= label_leak(mechanism, num_classes).sum_kl + 1e-3


def test_labels_dealt_out_are_not_told_better_than_epsilon_allows() -> None:
    """The targets themselves are the best score where no feature knows the label."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(2, (ROWS,), generator=generator).float()
    logits = torch.randn(ROWS, generator=generator)
    found = leak_auc(asked(build(labels, epsilon=0.5, if_certain="class"), labels, logits), labels)
    # Rows of which the model is certain tell nothing, and the prior says nothing about labels.
    assert 0.52 < found < auc_of_epsilon(0.5) + 0.005


def test_a_prediction_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        asked(build(torch.zeros(3)), torch.zeros(3), torch.full((3,), math.nan))
