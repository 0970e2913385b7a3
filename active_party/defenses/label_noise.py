"""Labels with noise of their own, drawn once per example, and training on those instead.

The gradient that is sent is that of the loss on the noisy labels, and nothing is added to it. With
``top_labels: noisy`` the top model learns from them, too: then all that the peer ever sees is a
function of features and noisy labels, and no adversary learns more of a label than the noisy one
tells, whatever the epochs, the optimiser, the model and the number of passive parties.

    gaussian             y + k x, x ~ N(0, 1)            sumKL = 1/k^2, AUC <= Phi(1/(k sqrt 2))
    laplace              y + x/e, x ~ Laplace(1)         sumKL = 2 (e + exp(-e) - 1), e-label-DP
    randomized_response  flipped with prob. 1/(1+exp e)  sumKL = 2 e tanh(e/2), e-label-DP

Of K classes randomized response gives the true one with probability exp e/(K-1+exp e), and else one
of the others, all alike. Between any two classes sumKL = 2 e (exp e - 1)/(K-1+exp e), e-label-DP;
for K = 2 this is the line above. The other two mechanisms are for two classes alone.

With ``top_labels: true`` the top model learns from the labels themselves, and what it has learned
shows in p and J of later gradients (p - noisy y) J. This has no proof. It is charged for the noisy
label alone, as every defense is, without label-DP; the leak monitor watches the rest.

Noise is rounded to multiples of 2^-10. y is one itself, so that the rounded sum is the sum rounded:
nothing is lost of the guarantee, and the low bits of a floating-point sum, which differ between
y = 0 and y = 1, tell nothing. Laplace noise ends at 44/e; what is beyond has probability 2^-63.
"""

import math

import torch
from torch import Tensor

from splitveil.active_party.defenses.example_keys import (
    LABEL_NOISE,
    NoiseKey,
    example_keys,
    key_name,
    scalars,
)
from splitveil.active_party.defenses.interface import (
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    Stateless,
)
from splitveil.active_party.defenses.noise import open_uniform
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.settings import (
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    NoisyLabelDefense,
    RandomizedResponse,
)
from splitveil.active_party.defenses.sum_kl import leak_auc_bound

_GRID = 2.0**10


class NoisyLabel(Stateless):
    """Sends gradients of noisy labels as they are, and says what the noisy labels tell.

    It relies on being given such gradients: whoever builds it hands ``draw_noisy_labels`` to the
    trainer.
    """

    def __init__(self, settings: NoisyLabelDefense, key: NoiseKey, num_classes: int = 2) -> None:
        self._num_classes = num_classes
        sum_kl, epsilon = label_leak(settings.mechanism, num_classes)
        self._report = DefenseReport(
            noise_power=0.0,  # it is in the labels: nothing is added to the gradient
            sum_kl_after=sum_kl,
            leak_auc_bound=leak_auc_bound(sum_kl),
            charge=LeakCharge(
                sum_kl,
                noise_identity=f"noisy_label {settings.mechanism!r} {key_name(key)}",
                epsilon=epsilon if settings.top_labels == "noisy" else None,
            ),
        )

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,  # noqa: ARG002
        probabilities: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Return the values unchanged. The labels' values are checked and not used."""
        as_classes(labels, as_rows(gradients), self._num_classes)
        return DefendedGradient(gradients.detach()), self._report


def draw_noisy_labels(
    mechanism: LabelMechanism,
    labels: Tensor,
    key: NoiseKey,
    ids: list[str],
    num_classes: int = 2,
) -> Tensor:
    """Draw each example's noisy label, the same whenever it is asked for.

    Args:
        mechanism: kind and strength of the noise.
        labels: (aligned,), 0 or 1, or places of several classes.
        key: the noise key.
        ids: canonical ids in the same order.
        num_classes: how many classes there are.

    Returns:
        (aligned,) float32. 0 or 1 for randomized response, or the place of a class; else any
        number.

    Raises:
        ValueError: the mechanism is for two classes, and there are more.
    """
    if num_classes > 2 and not isinstance(mechanism, RandomizedResponse):
        raise ValueError(f"expected randomized response for {num_classes} classes")
    keys = example_keys(key, ids, LABEL_NOISE)
    match mechanism:
        case GaussianLabels():
            noise = mechanism.noise_ratio * scalars(keys)
        case LaplaceLabels():
            sizes = -open_uniform(keys[:, 0], torch.float64).log_()
            noise = sizes.copysign_(keys[:, 1]).div_(mechanism.epsilon)
        case RandomizedResponse():
            chance = _flip_probability(mechanism, num_classes)
            flipped = open_uniform(keys[:, 0], torch.float64) <= chance
            others = 1 - labels if num_classes == 2 else _others(labels, keys[:, 1], num_classes)
            return torch.where(flipped, others, labels).float()
    return (labels + (noise * _GRID).round_() / _GRID).float()


def label_leak(mechanism: LabelMechanism, num_classes: int = 2) -> tuple[float, float | None]:
    """Return a noisy label's divergence between two classes, and its epsilon if it has one."""
    match mechanism:
        case GaussianLabels():
            return mechanism.noise_ratio**-2, None
        case LaplaceLabels():
            epsilon = mechanism.epsilon
            return 2 * (epsilon + math.expm1(-epsilon)), epsilon
        case RandomizedResponse():
            epsilon = mechanism.epsilon
            if num_classes == 2:
                return 2 * epsilon * math.tanh(epsilon / 2), epsilon
            return 2 * epsilon * math.expm1(epsilon) / (
                num_classes - 1 + math.exp(epsilon)
            ), epsilon


def _flip_probability(mechanism: RandomizedResponse, num_classes: int) -> float:
    others = num_classes - 1
    return others / (others + math.exp(mechanism.epsilon))


def _others(labels: Tensor, bits: Tensor, num_classes: int) -> Tensor:
    """Pick one of the other classes for each label, all alike."""
    # A draw of exactly 1 would otherwise lead back to the label.
    steps = 1 + (open_uniform(bits, torch.float64) * (num_classes - 1)).floor()
    return (labels + steps.clamp(max=num_classes - 1)) % num_classes
