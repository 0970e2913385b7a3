"""Noisy labels: their distribution, what they tell, and targets made of them and predictions."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy import stats
from torch import Tensor

from splitveil.active_party.defenses import (
    Defense,
    DefenseContext,
    DefenseSettings,
    NoisyLabelDefense,
    Secrets,
    Step,
)
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.noisy_label import (
    AlibiLabels,
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
    draw_noisy_labels,
    label_leak,
)
from splitveil.common.privacy.charge import Adversary
from tests.support.defenses import build_defense

KEY = key_from_insecure_seed(1)
IDS = [f"person-{number}" for number in range(100_000)]
LABELS = (torch.arange(len(IDS)) % 4 == 0).float()

MECHANISMS: list[LabelMechanism] = [
    GaussianLabels(kind="gaussian", noise_ratio=2.0),
    LaplaceLabels(kind="laplace", epsilon=0.7),
    RandomizedResponse(kind="randomized_response", epsilon=0.7),
]


SOME = IDS[:60_000]
EPSILON = 0.8
ALIBI = AlibiLabels(kind="alibi", epsilon=EPSILON)
POSTERIORS: list[LabelMechanism] = [
    ALIBI,
    GaussianLabels(kind="gaussian", noise_ratio=2.0, posterior="model"),
    LaplaceLabels(kind="laplace", epsilon=EPSILON, posterior="model"),
    RandomizedResponse(kind="randomized_response", epsilon=EPSILON, posterior="model"),
]


def kind_of(mechanism: LabelMechanism) -> str:
    return mechanism.kind


def noise_of(mechanism: LabelMechanism) -> npt.NDArray[np.float64]:
    drawn = draw_noisy_labels(mechanism, LABELS, KEY, IDS)
    return (drawn - LABELS).double().numpy()


@pytest.mark.parametrize(
    ("mechanism", "distribution"),
    [(MECHANISMS[0], stats.norm(scale=2.0)), (MECHANISMS[1], stats.laplace(scale=1 / 0.7))],
    ids=["gaussian", "laplace"],
)
def test_noise_has_the_stated_distribution(
    mechanism: LabelMechanism, distribution: "stats.rv_continuous"
) -> None:
    """For each label; rejects a scale 5 % off. The grid of 2^-10 is far below what KS resolves."""
    noise = noise_of(mechanism)
    for label in (0, 1):
        part = noise[LABELS.numpy() == label]
        assert stats.kstest(part, distribution.cdf).pvalue > 0.001
        assert stats.kstest(1.05 * part, distribution.cdf).pvalue < 0.001


@pytest.mark.parametrize("mechanism", MECHANISMS[:2], ids=kind_of)
def test_low_bits_tell_nothing(mechanism: LabelMechanism) -> None:
    """Noisy labels of both classes lie on one grid; a plain floating-point sum gives itself away.

    The plain sum 1 + x has lost the bits of x below its own last one; x alone has not.
    """
    drawn = draw_noisy_labels(mechanism, LABELS, KEY, IDS).double()
    assert torch.equal(drawn * 1024, (drawn * 1024).round())
    assert float((drawn * 512 == (drawn * 512).round()).double().mean()) < 0.52
    plain = 0.1 * torch.randn(4000, generator=torch.Generator().manual_seed(1))
    small = torch.stack((plain, (1 + plain) - 1))
    bare = (small * 2**26 == (small * 2**26).round()).double().mean(dim=1)
    assert bare[0] < 0.5 < bare[1]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=kind_of)
def test_a_noisy_label_belongs_to_its_example(mechanism: LabelMechanism) -> None:
    part, labels = IDS[:5000], LABELS[:5000]
    whole = draw_noisy_labels(mechanism, labels, KEY, part)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    again = draw_noisy_labels(mechanism, labels[order], KEY, [part[i] for i in order])
    assert torch.equal(again, whole[order])
    others = (
        draw_noisy_labels(mechanism, labels, key_from_insecure_seed(2), part),
        draw_noisy_labels(mechanism, labels, KEY, [f"other-{name}" for name in part]),
    )
    expected = 0.4 if mechanism.kind == "randomized_response" else 0.99  # 2 q (1 - q) differ
    for other in others:
        assert float((other != whole).double().mean()) > expected


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=kind_of)
def test_a_charge_repeats_and_names_strength_and_key(mechanism: LabelMechanism) -> None:
    def charged(settings: NoisyLabelDefense, seed: int = 1) -> tuple[bytes, float]:
        defense = build_defense(settings, key_from_insecure_seed(seed))
        answer = defense.defend(Step(torch.ones(4, 2), LABELS[:4]))
        charge = answer.charge
        assert charge.sum_kl == label_leak(mechanism).sum_kl
        return charge.noise_identity, charge.epsilon

    noisy = NoisyLabelDefense(mechanism=mechanism)
    identity, epsilon = charged(noisy)
    assert epsilon == label_leak(mechanism).epsilon
    assert math.isinf(epsilon) is (mechanism.kind == "gaussian")
    assert charged(noisy) == (identity, epsilon)
    assert charged(noisy, seed=2)[0] != identity
    assert key_from_insecure_seed(1).hex()[:8] not in str(identity)
    # A top model that learns from the labels has no label-DP, and must not claim any.
    assert charged(NoisyLabelDefense(mechanism=mechanism, top_labels="true")) == (
        identity,
        math.inf,
    )


def test_the_gradient_is_sent_as_it_is() -> None:
    raw: Tensor = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(1))
    answer = build_defense(NoisyLabelDefense(), KEY).defend(Step(raw, LABELS[:8]))
    sent = answer.gradient
    assert torch.equal(sent, raw)
    assert answer.noise_power == 0
    with pytest.raises(ValueError, match="NaN"):
        build_defense(NoisyLabelDefense(), KEY).defend(Step(raw * math.nan, LABELS[:8]))


def test_settings_are_chosen_by_kind_and_true_is_a_word() -> None:
    adapter: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)
    for top_labels in (True, "true"):  # YAML's true is the former
        settings = adapter.validate_python(
            {"name": "noisy_label", "top_labels": top_labels, "mechanism": {"kind": "gaussian"}}
        )
        assert settings == NoisyLabelDefense(top_labels="true")
        assert adapter.validate_json(adapter.dump_json(settings)) == settings
    for wrong in (
        {"mechanism": {"kind": "gaussian", "epsilon": 1.0}},
        {"mechanism": {"kind": "laplace"}},
        {"mechanism": {"kind": "laplace", "epsilon": 0.0}},
        {"mechanism": {"epsilon": 1.0}},
        {"top_labels": False},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python({"name": "noisy_label"} | wrong)


# ---- targets from noisy labels and predictions


def labels_of(num_classes: int, count: int = len(SOME)) -> Tensor:
    return torch.arange(count).remainder(num_classes).float()


@pytest.mark.parametrize(
    ("mechanism", "distribution", "num_classes"),
    [
        (ALIBI, stats.laplace(scale=2 / EPSILON), 2),
        (ALIBI, stats.laplace(scale=2 / EPSILON), 4),
        (POSTERIORS[1], stats.norm(scale=2 * math.sqrt(2)), 4),
    ],
    ids=["alibi, 2 classes", "alibi, 4 classes", "gaussian, 4 classes"],
)
def test_every_entry_of_a_one_hot_label_gets_noise_of_its_own(
    mechanism: LabelMechanism, distribution: "stats.rv_continuous", num_classes: int
) -> None:
    """Of the stated distribution, for each class; rejects a scale 10 % off, and shared noise."""
    labels = labels_of(num_classes)
    noisy = draw_noisy_labels(mechanism, labels, KEY, SOME, num_classes)
    assert noisy.shape == (len(SOME), num_classes)
    one_hot = torch.nn.functional.one_hot(labels.long(), num_classes)
    noise = (noisy - one_hot).double().numpy()
    for true, entry in itertools.product(range(num_classes), repeat=2):
        part = noise[labels.numpy() == true, entry]
        assert stats.kstest(part, distribution.cdf).pvalue > 0.0005
        assert stats.kstest(1.1 * part, distribution.cdf).pvalue < 0.0005
    shared = np.corrcoef(noise.T) - np.eye(num_classes)
    assert np.abs(shared).max() < 5 / math.sqrt(len(SOME))


def log_likelihood(mechanism: LabelMechanism, noisy: npt.NDArray[np.float64], label: int) -> float:
    """Log likelihood of one row's noisy label given each label, of several classes or two."""
    one_hot = np.eye(len(noisy))[label] if noisy.ndim else np.array(float(label))
    match mechanism:
        case AlibiLabels():
            return float(stats.laplace.logpdf(noisy - one_hot, scale=2 / EPSILON).sum())
        case LaplaceLabels():
            return float(stats.laplace.logpdf(noisy - label, scale=1 / EPSILON))
        case GaussianLabels():
            scale = 2.0 * (math.sqrt(2) if noisy.ndim else 1.0)
            return float(stats.norm.logpdf(noisy - one_hot, scale=scale).sum())
        case RandomizedResponse():
            return EPSILON if float(noisy) == label else 0.0


@pytest.mark.parametrize(
    ("mechanism", "num_classes"),
    [(one, 2) for one in POSTERIORS]
    + [(one, 3) for one in POSTERIORS if not isinstance(one, LaplaceLabels)],
)
def test_targets_are_the_posterior_of_bayes(mechanism: LabelMechanism, num_classes: int) -> None:
    labels = labels_of(num_classes, 60)
    defense = build(mechanism, labels, num_classes)
    shape = (60,) if num_classes == 2 else (60, num_classes)
    logits = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rows = torch.arange(60).flip(0)
    others = (labels + 1) % num_classes  # they are not read, nor are activations
    seen = Step(labels=others, rows=rows, logits=lambda: logits)
    targets = defense.targets(seen)
    drawn = draw_noisy_labels(mechanism, labels, KEY, SOME[:60], num_classes)
    noisy = drawn[rows].double().numpy()
    for row in range(60):
        likely = [log_likelihood(mechanism, noisy[row], label) for label in range(num_classes)]
        prior = logits[row].double().tolist() if num_classes > 2 else [0.0, float(logits[row])]
        joint = np.exp(np.array(likely) - max(likely) + prior)
        expected = joint / joint.sum()
        got = targets[row].double().numpy()
        assert got == pytest.approx(expected[1] if num_classes == 2 else expected, abs=1e-6)


def build(mechanism: LabelMechanism, labels: Tensor, num_classes: int = 2) -> Defense:
    settings = NoisyLabelDefense(mechanism=mechanism)
    context = DefenseContext((4,), num_classes)
    return settings.build(context, Secrets(KEY, ids=SOME[: len(labels)], labels=labels))


def test_a_defense_that_needs_no_prediction_does_not_ask_for_one() -> None:
    def fails() -> Tensor:
        raise AssertionError("asked")

    plain = GaussianLabels(kind="gaussian")
    rows = torch.arange(3)
    batch = Step(labels=torch.zeros(3), rows=rows, logits=fails)
    assert build(plain, labels_of(2, 9)).targets(batch).shape == (3,)
    with pytest.raises(AssertionError, match="asked"):
        build(ALIBI, labels_of(2, 9)).targets(batch)
    with pytest.raises(ValueError, match="no model"):
        build(ALIBI, labels_of(2, 9)).targets(Step(labels=torch.zeros(3), rows=rows))


@pytest.mark.parametrize("mechanism", POSTERIORS[1:], ids=kind_of)
def test_what_is_made_of_a_noisy_label_changes_neither_draw_nor_identity(
    mechanism: LabelMechanism,
) -> None:
    """Two runs, with and without the posterior, are charged for one draw."""
    plain = mechanism.model_copy(update={"posterior": "none"})
    context = DefenseContext((4,))
    strengths, identities = set(), set()
    for one in (mechanism, plain):
        settings = NoisyLabelDefense(mechanism=one)
        strengths.add(settings.noise_key_strength(context))
        charge = build(one, labels_of(2, 4)).defend(Step(torch.ones(4, 2), labels_of(2, 4)))
        identities.add(charge.charge.noise_identity)
        assert charge.charge.adversary is Adversary.ANYBODY
    assert len(strengths) == len(identities) == 1


@pytest.mark.parametrize(
    "mechanism", [{"kind": "alibi", "epsilon": 1}, {"kind": "gaussian", "posterior": "model"}]
)
def test_predictions_must_not_know_the_labels(mechanism: dict[str, object]) -> None:
    """Neither with true top labels, nor behind another loss, for which targets must be 0 or 1."""
    adapter: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)
    settings = {"name": "noisy_label", "mechanism": mechanism}
    charge = adapter.validate_python(settings).charge_model(DefenseContext((1,))).charge
    assert charge.adversary is Adversary.ANYBODY
    with pytest.raises(ValidationError, match="must not know the labels"):
        adapter.validate_python(settings | {"top_labels": True})
    with pytest.raises(ValidationError, match="critic compares"):
        adapter.validate_python({"name": "gafm", "composed_with": settings})
