"""Targets from noisy labels and predictions: ALIBI and the posterior of other mechanisms."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy import integrate, stats
from torch import Tensor

from splitveil.active_party.defenses import (
    Defense,
    DefenseContext,
    DefenseSettings,
    Examples,
    NoiseSecrets,
    NoisyLabelDefense,
    RawBatch,
)
from splitveil.active_party.defenses.exact_auc import gaussian_auc, laplace_auc, response_auc
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.interface import LabelledRows
from splitveil.active_party.defenses.label_mechanisms import (
    AlibiLabels,
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
    draw_noisy_labels,
    evidence,
    label_leak,
)
from splitveil.common.privacy.covers import Covers
from splitveil.common.privacy.leakage import leak_auc

KEY = key_from_insecure_seed(1)
IDS = [f"person-{number}" for number in range(60_000)]
EPSILON = 0.8
ALIBI = AlibiLabels(kind="alibi", epsilon=EPSILON)
POSTERIORS: list[LabelMechanism] = [
    ALIBI,
    GaussianLabels(kind="gaussian", noise_ratio=2.0, posterior="model"),
    LaplaceLabels(kind="laplace", epsilon=EPSILON, posterior="model"),
    RandomizedResponse(kind="randomized_response", epsilon=EPSILON, posterior="model"),
]


def labels_of(num_classes: int, count: int = len(IDS)) -> Tensor:
    return torch.arange(count).remainder(num_classes).float()


def name_of(mechanism: LabelMechanism) -> str:
    return mechanism.kind


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
    noisy = draw_noisy_labels(mechanism, labels, KEY, IDS, num_classes)
    assert noisy.shape == (len(IDS), num_classes)
    one_hot = torch.nn.functional.one_hot(labels.long(), num_classes)
    noise = (noisy - one_hot).double().numpy()
    for true, told in itertools.product(range(num_classes), repeat=2):
        part = noise[labels.numpy() == true, told]
        assert stats.kstest(part, distribution.cdf).pvalue > 0.0005
        assert stats.kstest(1.1 * part, distribution.cdf).pvalue < 0.0005
    shared = np.corrcoef(noise.T) - np.eye(num_classes)
    assert np.abs(shared).max() < 5 / math.sqrt(len(IDS))


def test_alibi_is_charged_the_divergence_of_both_entries_that_a_label_moves() -> None:
    """Against numerical integration of one entry; and its epsilon is that of both together."""
    size = EPSILON / 2

    def integrand(x: float) -> float:
        densities = stats.laplace.pdf([x - 1, x], scale=1 / size)
        return float((densities[0] - densities[1]) * math.log(densities[0] / densities[1]))

    parts = ((-40 / size, 0), (0, 1), (1, 40 / size))
    one_entry = sum(integrate.quad(integrand, *part)[0] for part in parts)
    for num_classes in (2, 7):
        sum_kl, epsilon, _, _ = label_leak(ALIBI, num_classes)
        assert sum_kl == pytest.approx(2 * one_entry)
        assert epsilon == EPSILON
    # The largest odds: both entries as far on the label's side as on the other.
    odds = stats.laplace.logpdf([5 - 1, -5], scale=1 / size).sum()
    odds -= stats.laplace.logpdf([5, -5 - 1], scale=1 / size).sum()
    assert odds == pytest.approx(EPSILON)


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
    """By likelihood times prior, from the densities."""
    labels = labels_of(num_classes, 60)
    defense = build(mechanism, labels, num_classes)
    shape = (60,) if num_classes == 2 else (60, num_classes)
    logits = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rows = torch.arange(60)
    targets = defense.targets(LabelledRows(rows, labels, torch.zeros(60, 4), lambda: logits))
    noisy = draw_noisy_labels(mechanism, labels, KEY, IDS[:60], num_classes).double().numpy()
    for row in range(60):
        likely = [log_likelihood(mechanism, noisy[row], label) for label in range(num_classes)]
        prior = logits[row].double().tolist() if num_classes > 2 else [0.0, float(logits[row])]
        joint = np.exp(np.array(likely) - max(likely) + prior)
        expected = joint / joint.sum()
        got = targets[row].double().numpy()
        assert got == pytest.approx(expected[1] if num_classes == 2 else expected, abs=1e-6)


def build(mechanism: LabelMechanism, labels: Tensor, num_classes: int = 2) -> Defense:
    settings = NoisyLabelDefense(mechanism=mechanism)
    examples = Examples(IDS[: len(labels)], labels, torch.device("cpu"))
    context = DefenseContext((4,), num_classes)
    return settings.build(context, NoiseSecrets(noise_key=KEY), examples)


@pytest.mark.parametrize("mechanism", POSTERIORS, ids=name_of)
def test_targets_follow_from_noisy_label_and_prediction_alone(mechanism: LabelMechanism) -> None:
    """Whatever labels and activations a batch says it has."""
    defense = build(mechanism, labels_of(2, 100))
    rows = torch.tensor([5, 99, 0, 44])
    logits = torch.tensor([0.3, -2.0, 5.0, 0.0])
    first = defense.targets(LabelledRows(rows, torch.zeros(4), torch.zeros(4, 4), lambda: logits))
    huge = torch.full((4, 4), 1e30)
    assert torch.equal(
        first, defense.targets(LabelledRows(rows, torch.ones(4), huge, lambda: logits))
    )
    other = defense.targets(LabelledRows(rows, torch.zeros(4), torch.zeros(4, 4), lambda: -logits))
    assert not torch.equal(first[:3], other[:3])


def test_a_defense_that_needs_no_prediction_does_not_ask_for_one() -> None:
    def fails() -> Tensor:
        raise AssertionError("asked")

    plain = GaussianLabels(kind="gaussian")
    batch = LabelledRows(torch.arange(3), torch.zeros(3), torch.zeros(3, 4), fails)
    assert build(plain, labels_of(2, 9)).targets(batch).shape == (3,)
    with pytest.raises(AssertionError, match="asked"):
        build(ALIBI, labels_of(2, 9)).targets(batch)
    with pytest.raises(ValueError, match="no model"):
        build(ALIBI, labels_of(2, 9)).targets(LabelledRows(*batch[:3]))


@pytest.mark.parametrize("mechanism", POSTERIORS, ids=name_of)
def test_the_best_score_of_the_targets_meets_the_exact_auc(mechanism: LabelMechanism) -> None:
    """Labels that no prediction knows: the evidence is the likelihood ratio, and the best score.

    Within 5 standard errors of .0024; rejects the AUC of a mechanism a tenth stronger.
    """
    labels = labels_of(2)
    scores = evidence(mechanism, draw_noisy_labels(mechanism, labels, KEY, IDS))
    found = leak_auc(scores, labels)

    def exact(strength: float) -> float:
        match mechanism:
            case AlibiLabels():
                return laplace_auc(strength * EPSILON, 2)
            case LaplaceLabels():
                return laplace_auc(strength * EPSILON)
            case GaussianLabels():
                return gaussian_auc(strength * 0.5)
            case RandomizedResponse():
                return response_auc(strength * EPSILON)

    assert abs(found - exact(1.0)) < 0.012
    assert abs(found - exact(1.1)) > 0.5 * abs(exact(1.1) - exact(1.0))


@pytest.mark.parametrize("mechanism", POSTERIORS[1:], ids=name_of)
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
        charge = build(one, labels_of(2, 4)).defend(RawBatch(torch.ones(4, 2), labels_of(2, 4)))
        identities.add(charge.report.charge.noise_identity)
        assert charge.report.charge.covers is Covers.ANYBODY
    assert len(strengths) == len(identities) == 1


@pytest.mark.parametrize(
    "mechanism", [{"kind": "alibi", "epsilon": 1}, {"kind": "gaussian", "posterior": "model"}]
)
def test_predictions_must_not_know_the_labels(mechanism: dict[str, object]) -> None:
    """Neither with true top labels, nor behind another loss, for which targets must be 0 or 1."""
    adapter: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)
    settings = {"name": "noisy_label", "mechanism": mechanism}
    assert adapter.validate_python(settings).traits.coverage.covers is Covers.ANYBODY
    with pytest.raises(ValidationError, match="must not know the labels"):
        adapter.validate_python(settings | {"top_labels": True})
    with pytest.raises(ValidationError, match="critic compares"):
        adapter.validate_python({"name": "gafm", "composed_with": settings})


def test_the_response_behind_a_critic_is_not_softened() -> None:
    response = {"kind": "randomized_response", "epsilon": 1, "posterior": "model"}
    adapter: TypeAdapter[DefenseSettings] = TypeAdapter(DefenseSettings)
    behind = {"name": "noisy_label", "mechanism": response}
    with pytest.raises(ValidationError, match="posterior none"):
        adapter.validate_python({"name": "gafm", "composed_with": behind})
