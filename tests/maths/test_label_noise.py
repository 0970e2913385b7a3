"""Noisy labels: their distribution, what they tell, and that nothing else tells more."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy import integrate, stats
from torch import Tensor

from splitveil.active_party.defenses import DefenseSettings, NoisyLabelDefense, RawBatch
from splitveil.active_party.defenses.exact_auc import laplace_auc
from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.label_mechanisms import (
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
    draw_noisy_labels,
    evidence,
    label_leak,
)
from splitveil.common.privacy.leakage import leak_auc
from tests.defended import build_defense

KEY = key_from_insecure_seed(1)
IDS = [f"person-{number}" for number in range(100_000)]
LABELS = (torch.arange(len(IDS)) % 4 == 0).float()

MECHANISMS: list[LabelMechanism] = [
    GaussianLabels(kind="gaussian", noise_ratio=2.0),
    LaplaceLabels(kind="laplace", epsilon=0.7),
    RandomizedResponse(kind="randomized_response", epsilon=0.7),
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


def test_randomized_response_flips_each_label_with_its_probability() -> None:
    """Within 5 standard errors; rejects the probability of an epsilon 10 % larger."""
    flipped = noise_of(MECHANISMS[2]) != 0
    for label in (0, 1):
        part = flipped[LABELS.numpy() == label]
        error = 0.5 / len(part) ** 0.5
        assert abs(part.mean() - 1 / (1 + math.exp(0.7))) < 5 * error
        assert abs(part.mean() - 1 / (1 + math.exp(0.77))) > 5 * error
    drawn = draw_noisy_labels(MECHANISMS[2], LABELS, KEY, IDS)
    assert set(drawn.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_divergences_are_those_of_the_distributions(epsilon: float) -> None:
    """Against numerical integration, and a sum over both answers."""

    def log_ratio(x: float) -> float:
        return epsilon * (abs(x) - abs(x - 1))

    def integrand(x: float) -> float:
        densities = stats.laplace.pdf([x - 1, x], scale=1 / epsilon)
        return float((densities[0] - densities[1]) * log_ratio(x))

    parts = ((-60 / epsilon, 0), (0, 1), (1, 60 / epsilon))
    expected = sum(integrate.quad(integrand, *part)[0] for part in parts)
    laplace = label_leak(LaplaceLabels(kind="laplace", epsilon=epsilon))
    assert laplace[0] == pytest.approx(expected, rel=1e-6)
    flip = 1 / (1 + math.exp(epsilon))
    response = label_leak(RandomizedResponse(kind="randomized_response", epsilon=epsilon))
    assert response[0] == pytest.approx(2 * (1 - 2 * flip) * math.log((1 - flip) / flip))
    gaussian = label_leak(GaussianLabels(kind="gaussian", noise_ratio=epsilon))
    assert gaussian[0] == pytest.approx(1 / epsilon**2)
    assert (laplace[1], response[1], gaussian[1]) == (epsilon, epsilon, None)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=kind_of)
def test_no_score_passes_the_guarantee_and_the_noisy_label_comes_close(
    mechanism: LabelMechanism,
) -> None:
    drawn = draw_noisy_labels(mechanism, LABELS, KEY, IDS)
    leak = leak_auc(drawn, LABELS)
    raw = torch.ones(2, 3)
    _, report = build_defense(NoisyLabelDefense(mechanism=mechanism), KEY).defend(
        RawBatch(raw, LABELS[:2])
    )
    exact = {
        "gaussian": float(stats.norm.cdf(1 / (2 * math.sqrt(2)))),
        "laplace": laplace_auc(0.7),
        "randomized_response": 1 / (1 + math.exp(-0.7)),
    }
    assert report.leak_auc_bound == pytest.approx(exact[mechanism.kind])
    ratios = evidence(mechanism, drawn)  # on the grid differences are exact, and ties remain ties
    assert leak_auc(ratios, LABELS) == pytest.approx(exact[mechanism.kind], abs=0.01)
    assert 0.6 < leak < exact[mechanism.kind] + 0.01


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
    """Equal in any order and company; other keys and ids draw others."""
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
    def charged(settings: NoisyLabelDefense, seed: int = 1) -> tuple[str | None, float | None]:
        defense = build_defense(settings, key_from_insecure_seed(seed))
        charge = defense.defend(RawBatch(torch.ones(4, 2), LABELS[:4]))[1].charge
        assert charge.sum_kl == pytest.approx(label_leak(mechanism)[0])
        return charge.noise_identity, charge.epsilon

    noisy = NoisyLabelDefense(mechanism=mechanism)
    identity, epsilon = charged(noisy)
    assert epsilon == label_leak(mechanism)[1]
    assert charged(noisy) == (identity, epsilon)
    assert charged(noisy, seed=2)[0] != identity
    assert key_from_insecure_seed(1).hex()[:8] not in str(identity)
    # A top model that learns from the labels has no label-DP, and must not claim any.
    assert charged(NoisyLabelDefense(mechanism=mechanism, top_labels="true")) == (identity, None)


def test_the_gradient_is_sent_as_it_is() -> None:
    raw: Tensor = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(1))
    sent, report = build_defense(NoisyLabelDefense(), KEY).defend(RawBatch(raw, LABELS[:8]))
    assert torch.equal(sent, raw)
    assert report.noise_power == 0
    with pytest.raises(ValueError, match="NaN"):
        build_defense(NoisyLabelDefense(), KEY).defend(RawBatch(raw * math.nan, LABELS[:8]))


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
