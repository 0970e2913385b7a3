"""GAFM: its losses, the gradient that it sends, the leak in it, and its charge."""

import hashlib
import math
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy import stats
from torch import Tensor, nn

from splitveil.active_party.defenses import (
    AnswerKeys,
    DefenseSettings,
    GafmDefense,
    IsoDefense,
    MarvellDefense,
    NoDefense,
    Step,
)
from splitveil.active_party.defenses import gafm as losses
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.gafm import Adversarial
from splitveil.active_party.defenses.interface import Defended, TopModel
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.common.models.dense import MlpTop
from splitveil.common.models.settings import MlpModel
from splitveil.common.privacy.charge import Charge
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.privacy.scores import norm
from splitveil.experiments.models import knows_output
from tests.ledger.test_charges import divergence
from tests.support.defenses import build_defense


def seeded(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def generator_of(cut_dim: int) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return MlpTop(MlpModel(kind="mlp", hidden=(8,), activation="leaky_relu"), (cut_dim,), None)


def answer_noise(seed: int = 1) -> NoiseSource:
    return NoiseSource(AnswerKeys(hashlib.sha256(b"%d" % seed).digest()))


class Case:
    """A batch in float64, and the two networks that look at it."""

    def __init__(self, batch: int = 12, cut_dim: int = 3) -> None:
        self.labels = (torch.arange(batch) % 3 == 0).double()
        # What features say of the label is in the activation.
        self.activation = seeded(batch, cut_dim) + 0.5 * self.labels[:, None]
        self.generator = generator_of(cut_dim).double()
        with patch.object(losses, "_WEIGHT_LIMIT", 0.5):  # so that little is lost in rounding
            self.critic = losses.build_critic(answer_noise(3)).double()
        self.shifts = 0.05 * (1 + torch.arange(batch) % 4).double() / 4

    def predictions(self, activation: Tensor) -> Tensor:
        return torch.sigmoid(self.generator(activation, None))

    def mix(self, settings: GafmDefense, labels: Tensor | None = None) -> losses.MixedGradient:
        soft = losses.soften(self.labels if labels is None else labels, self.shifts)
        activation = self.activation.clone().requires_grad_()
        predicted = self.predictions(activation)
        return losses.mix(settings, activation, predicted, self.critic, soft)


def slopes(function: Callable[[Tensor], float], at: Tensor) -> Tensor:
    found = torch.zeros_like(at)
    for place in range(at.numel()):
        step = torch.zeros_like(at).reshape(-1)
        step[place] = 1e-6
        step = step.reshape(at.shape)
        found.reshape(-1)[place] = (function(at + step) - function(at - step)) / 2e-6
    return found


# ---- losses, and what is sent


def test_the_adversarial_loss_is_the_difference_of_the_critics_means() -> None:
    case = Case()
    with torch.no_grad():
        case.critic.get_parameter("2.bias").sub_(0.3)  # negative scores: their slope is small, too
    weights = [parameter.detach().numpy() for parameter in case.critic.parameters()]

    def score(numbers: Tensor) -> float:
        hidden = numbers.numpy()[:, None] * weights[0].T + weights[1]
        hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
        scores = hidden @ weights[2].T + weights[3]
        return float(np.where(scores > 0, scores, 0.01 * scores).mean())

    noisy, predicted = case.labels + 0.01, case.predictions(case.activation).detach()
    with torch.no_grad():
        loss = float(losses.gan_loss(case.critic, noisy, predicted))
        of_generator = float(losses.generator_loss(case.critic, predicted))
    assert loss == pytest.approx(score(noisy) - score(predicted), rel=1e-12)
    assert of_generator == pytest.approx(-score(predicted), rel=1e-12)
    assert abs(loss) > 1e-3
    with torch.no_grad():
        assert float(case.critic(noisy[1:2, None])) < 0 < float(case.critic(noisy[:1, None]))


def test_what_is_sent_is_the_sum_of_both_slopes_at_norm_one_or_one_of_them() -> None:
    case = Case()
    soft = losses.soften(case.labels, case.shifts)

    def adversarial(activation: Tensor) -> float:
        with torch.no_grad():
            return -float(case.critic(case.predictions(activation)[:, None]).mean())

    def cross_entropy(activation: Tensor) -> float:
        p = torch.sigmoid(activation.sum(dim=1))
        return -float((soft * p.log() + (1 - soft) * (1 - p).log()).mean())

    first, second = slopes(adversarial, case.activation), slopes(cross_entropy, case.activation)
    gan, labels = 3.0 * first / first.norm(), second / second.norm()
    expected = {"gan_only": gan, "ce_only": labels, "both": gan + labels}
    for terms, sent in expected.items():
        found = case.mix(GafmDefense.model_validate({"gan_weight": 3.0, "terms": terms})).raw
        torch.testing.assert_close(found, sent, rtol=1e-5, atol=1e-8)
    per_row = 3.0 * first / first.norm(dim=1)[:, None] + second / second.norm(dim=1)[:, None]
    assert float((found - per_row / per_row.norm()).abs().max()) > 0.01


def test_the_adversarial_term_alone_does_not_see_which_label_is_whose() -> None:
    case = Case()
    swapped = case.labels.roll(1)
    alone = GafmDefense(terms="gan_only")
    assert torch.equal(case.mix(alone).raw, case.mix(alone, swapped).raw)
    assert not torch.equal(case.mix(GafmDefense()).raw, case.mix(GafmDefense(), swapped).raw)


def test_a_term_without_any_slope_is_left_out_and_no_nan_is_sent() -> None:
    case = Case()
    for parameter in case.critic.parameters():
        nn.init.zeros_(parameter)
    with_both = case.mix(GafmDefense()).raw
    assert torch.equal(with_both, case.mix(GafmDefense(terms="ce_only")).raw)
    assert torch.isfinite(with_both).all()


def test_a_critic_starts_within_its_limit_from_its_noise_alone() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (losses.build_critic(answer_noise(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    weights, same, others = (
        nn.utils.parameters_to_vector(critic.parameters()).detach()
        for critic in (first, again, other)
    )
    assert torch.equal(weights, same)
    assert not torch.equal(weights, others)
    assert float(weights.abs().max()) == pytest.approx(0.1)
    assert float(weights.std()) > 0.05


@pytest.mark.parametrize("direction", [1, -1])
def test_predictions_rise_with_the_label_whichever_way_the_generator_turns(direction: int) -> None:
    labels = (torch.arange(64) % 3 == 0).float()
    generator = generator_of(3)
    oriented = losses.Oriented(generator)
    before = oriented(seeded(64, 3).float(), None)
    assert torch.equal(before, generator(seeded(64, 3).float(), None))
    oriented.watch(torch.sigmoid(direction * (2 * labels - 1)), labels)
    oriented.watch(torch.rand(64), torch.zeros(64))  # of one class alone nothing can be seen
    assert torch.equal(oriented(seeded(64, 3).float(), None), direction * before)
    for _ in range(20):
        oriented.watch(torch.sigmoid(-direction * (2 * labels - 1)), labels)
    assert torch.equal(oriented(seeded(64, 3).float(), None), -direction * before)


# ---- softened labels


@pytest.mark.parametrize("response", ["fresh", "persistent"])
def test_softened_labels_are_uniform_on_their_side_of_a_half(response: str) -> None:
    """Kolmogorov-Smirnov; rejects a width 5 % off."""
    labels = (torch.arange(20_000) % 4 == 0).float()
    if response == "fresh":
        shifts = losses.uniform(answer_noise(), labels, 0.3)
    else:
        ids = [str(number) for number in range(len(labels))]
        shifts = losses.persistent_shifts(key_from_insecure_seed(1), ids, 0.3)
    soft = losses.soften(labels, shifts)
    for label, low in ((1, 0.5), (0, 0.2)):
        part = soft[labels == label].numpy()
        assert stats.kstest(part, stats.uniform(low, 0.3).cdf).pvalue > 0.001
        assert stats.kstest(part, stats.uniform(low, 0.315).cdf).pvalue < 0.001


def test_fresh_responses_follow_the_question_and_persistent_ones_the_example() -> None:
    labels = torch.ones(64)
    first, same, other = (losses.uniform(answer_noise(seed), labels, 0.5) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert float((first == other).float().mean()) < 0.1
    key, ids = key_from_insecure_seed(1), [str(number) for number in range(64)]
    shifts = losses.persistent_shifts(key, ids, 0.5)
    assert torch.equal(losses.persistent_shifts(key, ids[::-1], 0.5), shifts.flip(0))
    elsewhere = losses.persistent_shifts(key_from_insecure_seed(2), ids, 0.5)
    assert float((shifts == elsewhere).float().mean()) < 0.1


# ---- what it tells


def one_number_batch(width: float) -> tuple[Tensor, Tensor, losses.MixedGradient]:
    """Make an answer about a cut of one value that tells part of the label."""
    case = Case(batch=1000, cut_dim=1)
    case.labels = (torch.arange(1000) % 5 < 2).double()
    case.activation = 0.4 * seeded(1000, 1) + 0.3 * (case.labels[:, None] - 0.4)
    case.shifts = losses.uniform(answer_noise(), case.labels, width)
    return case.labels, case.activation, case.mix(GafmDefense(response_width=width))


def test_a_peer_who_knows_its_activations_reads_what_norms_and_means_do_not_show() -> None:
    labels, activation, mixed = one_number_batch(0.2)
    apart = mixed.raw[labels == 1].mean() - mixed.raw[labels == 0].mean()
    by_means = leak_auc(mixed.raw[:, 0] * torch.sign(apart), labels)
    assert leak_auc(norm(mixed.raw), labels) < 0.8
    assert by_means < 0.9
    assert leak_auc(activation[:, 0], labels) < 0.75  # what features say anyway
    assert leak_auc(knows_output(mixed.raw, activation), labels) > 0.98


def test_a_labels_own_move_is_bounded_and_the_bound_is_reached() -> None:
    """All else equal, the norms among it: they change by a part in the batch's size."""
    case = Case(batch=600)
    case.shifts = torch.full((600,), 0.05, dtype=torch.float64)
    settings = GafmDefense(response_width=0.05)
    flipped = case.labels.clone()
    flipped[7] = 1 - flipped[7]
    mixed = case.mix(settings)
    moved = float((case.mix(settings, flipped).raw[7] - mixed.raw[7]).norm())
    assert moved == pytest.approx(mixed.label_move, rel=0.01)
    assert case.mix(GafmDefense(terms="gan_only")).label_move == math.inf


# ---- what is charged


def behind(settings: GafmDefense, mixed: Tensor, labels: Tensor) -> Defended:
    key = key_from_insecure_seed(1)
    defense = build_defense(settings.composed_with, key, lambda: b"k" * 32)
    return defense.defend(Step(mixed, labels))


def whole(settings: GafmDefense, mixed: Tensor, labels: Tensor, label_move: float) -> Defended:
    defense = build_defense(settings, key_from_insecure_seed(1), lambda: b"k" * 32)
    return defense.defend(Step(mixed, labels, label_move=label_move))


def charge_of(settings: GafmDefense, mixed: Tensor, labels: Tensor, label_move: float) -> Charge:
    return whole(settings, mixed, labels, label_move).charge


@pytest.mark.parametrize("terms", ["both", "ce_only"])
def test_noise_behind_it_is_charged_for_what_a_label_moves(terms: str) -> None:
    labels, _, mixed = one_number_batch(0.2)
    iso = GafmDefense(terms=terms, composed_with=IsoDefense(noise_ratio=1.0))
    answer = behind(iso, mixed.raw, labels)
    deviation = math.sqrt(answer.noise_power)
    charge = charge_of(iso, mixed.raw, labels, mixed.label_move)
    assert charge.sum_kl == pytest.approx(divergence(deviation, deviation, mixed.label_move))
    assert charge.sum_kl > answer.charge.sum_kl
    marvell = GafmDefense(terms=terms, composed_with=MarvellDefense())
    answer = behind(marvell, mixed.raw, labels)
    assert answer.solution is not None
    deviations = math.sqrt(answer.solution.neg_along), math.sqrt(answer.solution.pos_along)
    charge = charge_of(marvell, mixed.raw, labels, mixed.label_move)
    assert charge.sum_kl == pytest.approx(divergence(*deviations, mixed.label_move))
    # Never less than what the defense itself asks for the gap of the classes.
    assert charge_of(marvell, mixed.raw, labels, 0.0).sum_kl == answer.charge.sum_kl
    # On a wider cut its noise does not cover the direction in which a label moves a row.
    wider = Case(batch=200)
    raw = wider.mix(marvell).raw
    assert behind(marvell, raw, wider.labels).charge.sum_kl < 10
    assert charge_of(marvell, raw, wider.labels, 0.01).sum_kl == math.inf


def test_noise_without_signal_is_charged_nothing() -> None:
    _, _, mixed = one_number_batch(0.2)
    settings = GafmDefense(composed_with=MarvellDefense())
    assert charge_of(settings, mixed.raw, torch.zeros(1000), mixed.label_move).sum_kl == 0


# ---- the objective


def objective(settings: GafmDefense) -> Adversarial:
    model = generator_of(3)
    return Adversarial(
        settings,
        TopModel(model, torch.optim.Adam(model.parameters(), lr=1e-2), lambda step: 1 / (1 + step)),
        critic=losses.build_critic(answer_noise()),
        noise=answer_noise(),
        shifts=None,
    )


def test_critic_and_generator_learn_before_the_answer_and_pull_in_their_directions() -> None:
    """The critic's step raises the adversarial loss, the generator's lowers its own part."""
    found = objective(GafmDefense(critic_learning_rate=1e-3, label_noise=0.0))
    activation = seeded(64, 3, dtype=torch.float32).requires_grad_()
    labels = (torch.arange(64) % 3 == 0).float()
    before = found.state_dict()
    critic, model = losses.build_critic(answer_noise()), generator_of(3)
    critic.load_state_dict(before["critic"])
    model.load_state_dict(found._generator.state_dict())
    step = Step(labels=labels, rows=torch.arange(64), activation=activation)
    step.targets = labels
    found.compute(step)
    with torch.no_grad():
        old = torch.sigmoid(model(activation, None))
        new = torch.sigmoid(found._generator(activation, None))
        assert losses.gan_loss(found._critic, labels, old) > losses.gan_loss(critic, labels, old)
        assert losses.generator_loss(found._critic, new) < losses.generator_loss(found._critic, old)
    assert activation.grad is None


def test_a_gradient_that_does_not_say_what_a_label_moves_is_refused() -> None:
    labels, _, mixed = one_number_batch(0.2)
    with pytest.raises(ValueError, match="label_move"):
        build_defense(GafmDefense()).defend(Step(mixed.raw, labels))


# ---- settings


def test_settings_name_what_it_cannot_be_composed_with() -> None:
    adapter: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)
    assert adapter.validate_python({"name": "gafm"}) == GafmDefense(composed_with=NoDefense())
    chosen = GafmDefense(composed_with=MarvellDefense(), response="persistent", terms="ce_only")
    assert adapter.validate_json(adapter.dump_json(chosen)) == chosen
    flip = {"kind": "randomized_response", "epsilon": 1}
    for wrong, complaint in (
        ({"composed_with": {"name": "marvell", "noise": "persistent"}}, "expected noise: fresh"),
        ({"composed_with": {"name": "iso", "insecure_noise_seed": 1}}, "of gafm itself"),
        ({"composed_with": {"name": "noisy_label"}}, "randomized_response"),
        (
            {"composed_with": {"name": "noisy_label", "mechanism": flip | {"posterior": "model"}}},
            "posterior none",
        ),
        (
            {"composed_with": {"name": "noisy_label", "mechanism": flip, "top_labels": "true"}},
            "top_labels noisy",
        ),
        ({"composed_with": {"name": "max_norm_positive"}}, "max_norm_positive"),
        ({"composed_with": {"name": "gafm"}}, "gafm"),
        ({"response_width": 0.6}, "response_width"),
        ({"gan_weight": 0}, "gan_weight"),
        ({"term": "both"}, "term"),
    ):
        with pytest.raises(ValidationError, match=complaint):
            adapter.validate_python({"name": "gafm", **wrong})
