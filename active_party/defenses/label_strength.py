"""The strength at which a mechanism of ``noisy_label`` bounds the leak AUC of a whole run.

The bounds are those of `exact_auc`: the best score meets them. What is drawn once per example
costs the same whatever the number of epochs.
"""

from collections.abc import Callable
from functools import partial

from splitveil.active_party.defenses.exact_auc import (
    gaussian_auc,
    gaussian_of_laplace,
    gaussian_of_response,
    laplace_auc,
    response_auc,
    strength_for_auc,
)
from splitveil.active_party.defenses.label_mechanisms import (
    AlibiLabels,
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    RandomizedResponse,
)


def leak_auc_of(mechanism: LabelMechanism, num_classes: int = 2) -> float:
    """Return the best AUC between two classes against one draw.

    Args:
        mechanism: kind and strength of the noise.
        num_classes: number of classes.
    """
    match mechanism:
        case GaussianLabels():
            return gaussian_auc(1 / mechanism.noise_ratio)
        case LaplaceLabels():
            return laplace_auc(mechanism.epsilon)
        case AlibiLabels():
            return laplace_auc(mechanism.epsilon, 2)
        case RandomizedResponse():
            return response_auc(mechanism.epsilon, num_classes)


def dominating_mu_of(mechanism: LabelMechanism, num_classes: int = 2) -> float:
    """Return the mu of a Gaussian mechanism that tells no less than one draw, between two classes.

    Args:
        mechanism: kind and strength of the noise.
        num_classes: number of classes.
    """
    match mechanism:
        case GaussianLabels():
            return 1 / mechanism.noise_ratio
        case LaplaceLabels():
            return gaussian_of_laplace(mechanism.epsilon)
        case AlibiLabels():
            return gaussian_of_laplace(mechanism.epsilon, 2)
        case RandomizedResponse():
            return gaussian_of_response(mechanism.epsilon, num_classes)


def at_leak_auc(mechanism: LabelMechanism, leak_auc: float, num_classes: int = 2) -> LabelMechanism:
    """Return the mechanism at the strength that bounds the leak AUC of a run.

    Args:
        mechanism: its other settings are kept.
        leak_auc: AUC that no score of any peer may exceed, above 0.5 and below 1.
        num_classes: number of classes; the bound is that between any two of them.
    """
    bound: Callable[[float], float]
    match mechanism:
        case GaussianLabels():
            ratio = 1 / strength_for_auc(gaussian_auc, leak_auc)
            return mechanism.model_copy(update={"noise_ratio": ratio})
        case LaplaceLabels():
            bound = laplace_auc
        case AlibiLabels():
            bound = partial(laplace_auc, num_numbers=2)
        case RandomizedResponse():
            bound = partial(response_auc, num_classes=num_classes)
    return mechanism.model_copy(update={"epsilon": strength_for_auc(bound, leak_auc)})
