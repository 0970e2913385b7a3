"""Labels with noise of their own, drawn once per example, and training on those instead.

The gradient that is sent is that of the loss on the noisy labels, and nothing is added to it. With
``top_labels: noisy`` the top model learns from them, too: then all that the peer ever sees is a
function of features and noisy labels, and no adversary learns more of a label than the noisy one
tells, whatever the epochs, the optimiser, the model and the number of passive parties.

    gaussian             y + k x, x ~ N(0, 1)            sumKL = 1/k^2, AUC <= Phi(1/(k sqrt 2))
    laplace              y + x/e, x ~ Laplace(1)         sumKL = 2 (e + exp(-e) - 1), e-label-DP
    randomized_response  flipped with prob. 1/(1+exp e)  sumKL = 2 e tanh(e/2), e-label-DP

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

from active_party.defenses.example_keys import (
    LABEL_NOISE,
    NoiseKey,
    example_keys,
    key_name,
    scalars,
)
from active_party.defenses.noise import open_uniform
from active_party.defenses.report import (
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    Stateless,
)
from active_party.defenses.rows import as_positive, as_rows
from active_party.defenses.settings import (
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    NoisyLabelDefense,
    RandomizedResponse,
)
from active_party.defenses.sum_kl import leak_auc_bound

_GRID = 2.0**10


class NoisyLabel(Stateless):
    """Sends gradients of noisy labels as they are, and says what the noisy labels tell.

    It relies on being given such gradients: whoever builds it hands ``draw_noisy_labels`` to the
    trainer.
    """

    def __init__(self, settings: NoisyLabelDefense, key: NoiseKey) -> None:
        sum_kl, epsilon = label_leak(settings.mechanism)
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
        as_positive(labels, as_rows(gradients))
        return DefendedGradient(gradients.detach()), self._report


def draw_noisy_labels(
    mechanism: LabelMechanism, labels: Tensor, key: NoiseKey, ids: list[str]
) -> Tensor:
    """Draw each example's noisy label, the same whenever it is asked for.

    Args:
        mechanism: kind and strength of the noise.
        labels: (aligned,), 0 or 1.
        key: the noise key.
        ids: canonical ids in the same order.

    Returns:
        (aligned,) float32. 0 or 1 for randomized response; else any number.
    """
    keys = example_keys(key, ids, LABEL_NOISE)
    match mechanism:
        case GaussianLabels():
            noise = mechanism.noise_ratio * scalars(keys)
        case LaplaceLabels():
            sizes = -open_uniform(keys[:, 0], torch.float64).log_()
            noise = sizes.copysign_(keys[:, 1]).div_(mechanism.epsilon)
        case RandomizedResponse():
            flipped = open_uniform(keys[:, 0], torch.float64) <= _flip_probability(mechanism)
            return torch.where(flipped, 1 - labels, labels).float()
    return (labels + (noise * _GRID).round_() / _GRID).float()


def label_leak(mechanism: LabelMechanism) -> tuple[float, float | None]:
    """Return a noisy label's divergence between the classes, and its epsilon if it has one."""
    match mechanism:
        case GaussianLabels():
            return mechanism.noise_ratio**-2, None
        case LaplaceLabels():
            epsilon = mechanism.epsilon
            return 2 * (epsilon + math.expm1(-epsilon)), epsilon
        case RandomizedResponse():
            epsilon = mechanism.epsilon
            return 2 * epsilon * math.tanh(epsilon / 2), epsilon


def _flip_probability(mechanism: RandomizedResponse) -> float:
    return 1 / (1 + math.exp(mechanism.epsilon))
