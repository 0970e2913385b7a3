"""The mechanisms of ``noisy_label``, and what each reveals about the label.

All are drawn once per example, from the noise key:

    gaussian             y + k x, x ~ N(0, 1)            sumKL = 1/k^2, AUC <= Phi(1/(k sqrt 2))
    laplace              y + x/e, x ~ Laplace(1)         sumKL = 2 (e + exp(-e) - 1), e-label-DP
    randomized_response  flipped with prob. 1/(1+exp e)  sumKL = 2 e tanh(e/2), e-label-DP
    alibi                one-hot y + 2 x/e, x ~ Laplace  sumKL = 4 (e/2 + exp(-e/2) - 1), e-label-DP

A label moves two entries of its one-hot form by 1 each, so that the L1 sensitivity of ``alibi`` is
2 and each entry gets noise of scale 2/e: twice ``laplace`` at e/2. This holds for any number of
classes. With K of them, randomized response returns the true class with probability
exp e/(K-1+exp e), and otherwise one of the other classes, all equally likely. Between any two
classes sumKL = 2 e (exp e - 1)/(K-1+exp e), e-label-DP. Gaussian noise for K classes is that of the
one-hot label, k sqrt 2 on each entry, so that sumKL stays 1/k^2.

Labels may also be numbers, as shares of their range within 0 and 1: ``gaussian`` and ``laplace``
then bound any two values of a label, which differ by 1 at most, as they bound 0 and 1.

All labels of a person with g rows together move g values of independent noise by D each, D = 1 or
sqrt 2 for one-hot labels, and so their vector by sqrt(g) D: Gaussian noise of k sqrt(g) D on each
is mu = 1/k for the person. Laplace noise would need the scale g/e, since e adds up
over rows: it is refused in one-shot runs, and these alone bound persons.

Labels and noise are rounded to multiples of 2^-10. Since y is such a multiple itself, the rounded
sum is the sum rounded: the guarantee is not weakened, and the low bits of a floating-point sum,
which differ between y = 0 and y = 1, reveal nothing. Laplace noise ends at 44 times its scale;
anything beyond has probability 2^-63.

The best AUC of any score, and the Gaussian mechanism that reveals no less: `dp_bounds`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from splitveil.active_party.defenses import dp_bounds
from splitveil.active_party.defenses.example_keys import (
    LABEL_NOISE,
    NoiseKey,
    example_keys,
    scalars,
)
from splitveil.active_party.defenses.noise import open_uniform
from splitveil.common.privacy.charge import Charge
from splitveil.common.settings import Section

_GRID = 2.0**10

Posterior = Literal["none", "model"]


class GaussianLabels(Section):
    """y plus Gaussian noise."""

    kind: Literal["gaussian"]

    noise_ratio: float = Field(default=2.0, ge=0.01, le=100)
    """Standard deviation k of the noise; no attack exceeds AUC Phi(1/(k sqrt 2))."""

    posterior: Posterior = "none"
    """``model``: train on the posterior given noisy label and prediction; see ``alibi``."""


class PrivateLabels(Section):
    """Labels with differential privacy."""

    epsilon: float = Field(ge=0.01, le=20)
    """Label differential privacy of the whole run."""


class LaplaceLabels(PrivateLabels):
    """y plus Laplace noise of scale 1/epsilon."""

    kind: Literal["laplace"]

    posterior: Posterior = "none"
    """``model``: train on the posterior given noisy label and prediction; see ``alibi``."""


class RandomizedResponse(PrivateLabels):
    """y, or its opposite with probability 1/(1 + exp(epsilon)).

    With K classes, the true one with probability exp(epsilon)/(K - 1 + exp(epsilon)), and otherwise
    one of the others, all equally likely.
    """

    kind: Literal["randomized_response"]

    posterior: Posterior = "none"
    """``model``: train on the posterior given noisy label and prediction; see ``alibi``."""


class AlibiLabels(PrivateLabels):
    """ALIBI: Laplace noise of scale 2/epsilon on each entry of the one-hot label, and a posterior.

    At each step the target is the distribution of the label given its noisy form, with the model's
    present prediction as the prior (Malek et al., "Antipodes of Label Differential Privacy: PATE
    and ALIBI", NeurIPS 2021). For the same with Gaussian noise set ``kind: gaussian,
    posterior: model``.
    """

    kind: Literal["alibi"]

    @property
    def posterior(self) -> Posterior:
        return "model"


LabelMechanism = Annotated[
    GaussianLabels | LaplaceLabels | RandomizedResponse | AlibiLabels, Field(discriminator="kind")
]
"""A mechanism that makes a noisy label from a label."""


def label_leak(mechanism: LabelMechanism, num_classes: int = 2) -> Charge:
    """Return what one draw reveals between two classes, with the best AUC of any score."""
    if isinstance(mechanism, GaussianLabels):
        mu = 1 / mechanism.noise_ratio
        return Charge(
            mechanism.noise_ratio**-2,
            is_gaussian=True,
            leak_auc=dp_bounds.leak_auc_of_mu(mu),
            dominating_mu=mu,
        )
    epsilon = mechanism.epsilon
    match mechanism:
        case LaplaceLabels():
            sum_kl = 2 * (epsilon + math.expm1(-epsilon))
            auc, mu = dp_bounds.laplace_auc(epsilon), dp_bounds.gaussian_of_laplace(epsilon)
        case AlibiLabels():
            sum_kl = 4 * (epsilon / 2 + math.expm1(-epsilon / 2))
            auc, mu = dp_bounds.laplace_auc(epsilon, 2), dp_bounds.gaussian_of_laplace(epsilon, 2)
        case RandomizedResponse():
            if num_classes == 2:
                sum_kl = 2 * epsilon * math.tanh(epsilon / 2)
            else:
                odds = num_classes - 1 + math.exp(epsilon)
                sum_kl = 2 * epsilon * math.expm1(epsilon) / odds
            auc, mu = (
                dp_bounds.response_auc(epsilon, num_classes),
                dp_bounds.gaussian_of_response(epsilon, num_classes),
            )
    return Charge(sum_kl, epsilon=epsilon, leak_auc=auc, dominating_mu=mu)


def at_leak_auc(mechanism: LabelMechanism, leak_auc: float, num_classes: int = 2) -> LabelMechanism:
    """Return the mechanism at which no score exceeds a leak AUC, above 0.5 and below 1."""
    if isinstance(mechanism, GaussianLabels):
        ratio = 1 / dp_bounds.mu_of_leak_auc(leak_auc)
        return mechanism.model_copy(update={"noise_ratio": ratio})
    bound = dp_bounds.laplace_auc
    if isinstance(mechanism, AlibiLabels):
        bound = partial(dp_bounds.laplace_auc, num_numbers=2)
    elif isinstance(mechanism, RandomizedResponse):
        bound = partial(dp_bounds.response_auc, num_classes=num_classes)
    return mechanism.model_copy(update={"epsilon": dp_bounds.strength_for_auc(bound, leak_auc)})


def strength_name(mechanism: LabelMechanism) -> str:
    """Name the draw, without later processing: the posterior reveals no more."""
    drawn = (f"{name}={value!r}" for name, value in mechanism if name != "posterior")
    return f"{type(mechanism).__name__}({', '.join(drawn)})"


def draw_noisy_labels(
    mechanism: LabelMechanism,
    labels: Tensor,
    key: NoiseKey,
    ids: Sequence[str],
    num_classes: int = 2,
) -> Tensor:
    """Draw each example's noisy label; repeated calls return the same labels.

    Labels are 0 or 1, class indices, or shares of a range. Returns (aligned,) float32; for
    ``alibi``, and with Gaussian noise for more than two classes, (aligned, classes). Raises
    ValueError if the mechanism is for two classes, and there are more.
    """
    match mechanism:
        case GaussianLabels() if num_classes <= 2:
            noise = mechanism.noise_ratio * scalars(example_keys(key, ids, LABEL_NOISE))
            return _on_grid(labels, noise)
        case LaplaceLabels() if num_classes <= 2:
            noise = _laplace(example_keys(key, ids, LABEL_NOISE), mechanism.epsilon)
            return _on_grid(labels, noise)
        case RandomizedResponse():
            keys, num_others = example_keys(key, ids, LABEL_NOISE), num_classes - 1
            chance = num_others / (num_others + math.exp(mechanism.epsilon))
            flipped = open_uniform(keys[:, 0], torch.float64) <= chance
            others = 1 - labels if num_classes == 2 else _others(labels, keys[:, 1], num_classes)
            return torch.where(flipped, others, labels).float()
        case AlibiLabels() | GaussianLabels():
            columns = []
            for index in range(num_classes):
                keys = example_keys(key, ids, b"label noise %d" % index)
                if isinstance(mechanism, AlibiLabels):
                    noise = _laplace(keys, mechanism.epsilon / 2)
                else:
                    noise = math.sqrt(2) * mechanism.noise_ratio * scalars(keys)
                columns.append(_on_grid(labels == index, noise))
            return torch.stack(columns, dim=1)
        case _:
            raise ValueError(f"{mechanism.kind} noise is for two classes, got {num_classes}")


def evidence(mechanism: LabelMechanism, noisy: Tensor, num_classes: int = 2) -> Tensor:
    """Return what noisy labels add to the logits of their labels: their log likelihoods.

    Logits plus this are those of the posterior of the label under the prior that the logits
    predict. (rows,), that of label 1 minus that of label 0; with several classes (rows, classes),
    but for a number of the row's own.
    """
    match mechanism:
        case GaussianLabels():
            if num_classes == 2:
                return (noisy - 0.5) / mechanism.noise_ratio**2
            return noisy / (2 * mechanism.noise_ratio**2)
        case LaplaceLabels():
            return mechanism.epsilon * (noisy.abs() - (noisy - 1).abs())
        case RandomizedResponse():
            if num_classes == 2:
                return mechanism.epsilon * (2 * noisy - 1)
            classes = torch.arange(num_classes, device=noisy.device)
            return mechanism.epsilon * (noisy[:, None] == classes).to(noisy)
        case AlibiLabels():
            likelihood = mechanism.epsilon / 2 * (noisy.abs() - (noisy - 1).abs())
            return likelihood if num_classes > 2 else likelihood[:, 1] - likelihood[:, 0]


def _on_grid(labels: Tensor, noise: Tensor) -> Tensor:
    steps = (labels.double() * _GRID).round_() + (noise * _GRID).round_()
    return (steps / _GRID).float()


def _laplace(keys: Tensor, epsilon: float) -> Tensor:
    """Turn secret bits into Laplace noise of scale 1/epsilon, (rows,) float64."""
    sizes = -open_uniform(keys[:, 0], torch.float64).log_()
    return sizes.copysign_(keys[:, 1]).div_(epsilon)


def _others(labels: Tensor, bits: Tensor, num_classes: int) -> Tensor:
    # A draw of exactly 1 would otherwise lead back to the label.
    steps = 1 + (open_uniform(bits, torch.float64) * (num_classes - 1)).floor()
    return (labels + steps.clamp(max=num_classes - 1)) % num_classes
