"""The losses of GAFM, the generative adversarial federated model, and the gradient that it sends.

Han and Guan, "GAN-based vertical federated learning for label protection in binary classification"
(arXiv 2302.02245). The top model G, with a sigmoid behind its logit, maps the activation f to a
prediction Y^; a critic D on single numbers separates labels Y from predictions.

    L_GAN = E[D(Y + e)] - E[D(Y^)], e ~ N(0, s^2)       D maximises it, G and f minimise it
    L_CE  = cross entropy between sigmoid(sum of f over the cut) and the softened label Y~
    Y~    = 1/2 + u where Y = 1, 1/2 - u where Y = 0, u uniform between 0 and D_max
    sent  = w grad_f L_GAN / |grad_f L_GAN|  +  grad_f L_CE / |grad_f L_CE|

D's weights are clipped to [-c, c], and the norms are taken over the whole batch.

The paper calls Y~ a randomised response. It is not one in the sense of differential privacy: the
side of 1/2 on which it lies *is* the label, which a peer reads off the residual of a smooth
function of f. So an answer is charged without bound unless a defense behind the sum covers the move
caused by the example's own label, at most

    2 D_max / |sigmoid(sum of f) - Y~|    (norm over the batch)

along the direction in which all coordinates of the cut are equal. The classes' means would be the
wrong measure here: the two terms make them cancel while each label's own share stays. As for every
fresh charge, what G and D have learned about the labels is not counted.

The two losses do not determine which end of Y^ is the positive one, and some runs end with the
wrong one. Therefore the label owner tracks the end at which its positives are, and predicts 1 - Y^
if it is the lower one (`Oriented`). Nothing that is sent depends on it.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from splitveil.active_party.defenses.class_statistics import KEPT_SHARE
from splitveil.active_party.defenses.example_keys import NoiseKey, example_keys
from splitveil.active_party.defenses.noise import NoiseSource, fill_state, open_uniform
from splitveil.common.data.features import Features

_LABEL_RESPONSE = b"label response"


class MixedTerms(NamedTuple):
    """The terms that are mixed."""

    sent: Literal["both", "gan_only", "ce_only"] = "both"
    gan_weight: float = 1.0  # of the adversarial term (w)
    response_width: float = 0.05  # largest distance of a softened label from 1/2 (D_max)


class MixedGradient(NamedTuple):
    """The gradient that GAFM would send, and the share of an example's own label in it."""

    raw: Tensor  # like the activation
    label_move: float
    """The most by which one example's label moves its own row, all else equal; infinite if it is
    unknown how labels enter."""


class Oriented(nn.Module):
    """A generator, and the orientation of its output: the end at which the positives are."""

    agreement: Tensor  # running mean of positives' predictions less negatives'

    def __init__(self, generator: nn.Module) -> None:
        super().__init__()
        self.generator = generator
        device = next(generator.parameters()).device
        self.register_buffer("agreement", torch.zeros((), device=device))

    def forward(self, activation: Tensor, features: Features | None) -> Tensor:
        """Return logits of the positive class, (batch,)."""
        return self.orient(self.generator(activation, features))

    def orient(self, logits: Tensor) -> Tensor:
        """Negate the generator's logits if the positives are at the lower end."""
        return torch.where(self.agreement < 0, -logits, logits)

    def watch(self, predictions: Tensor, labels: Tensor) -> None:
        """Note a batch: the generator's own predictions and the labels, (batch,) each."""
        positive = labels == 1
        if bool(positive.any()) and not bool(positive.all()):
            apart = predictions[positive].mean() - predictions[~positive].mean()
            self.agreement.lerp_(apart.detach().to(self.agreement.dtype), 1 - KEPT_SHARE)


def build_critic(width: int, weight_limit: float, entropy: bytes) -> nn.Sequential:
    """Return a critic of single numbers: two dense layers, clipped, from 2,496 secret bytes."""
    with torch.random.fork_rng(devices=()):  # layers fill themselves from torch's own generator
        layers = nn.Linear(1, width), nn.LeakyReLU(), nn.Linear(width, 1), nn.LeakyReLU()
        critic = nn.Sequential(*layers)
    generator = torch.Generator()
    fill_state(generator, entropy)
    with torch.no_grad():
        for layer, fan_in in ((critic[0], 1), (critic[2], width)):
            for parameter in layer.parameters():
                parameter.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)
    clip_weights(critic, weight_limit)
    return critic


def clip_weights(critic: nn.Module, weight_limit: float) -> None:
    """Clip every weight to [-weight_limit, weight_limit]."""
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.clamp_(-weight_limit, weight_limit)


def gan_loss(critic: nn.Module, noisy_labels: Tensor, predictions: Tensor) -> Tensor:
    """Return E[D(Y + e)] - E[D(Y^)], a scalar; both arguments are (batch,)."""
    real: Tensor = critic(noisy_labels[:, None])
    return real.mean() - _score(critic, predictions)


def generator_loss(critic: nn.Module, predictions: Tensor) -> Tensor:
    """Return the part of the GAN loss that depends on the predictions, a scalar."""
    return -_score(critic, predictions)


def soften(labels: Tensor, shifts: Tensor) -> Tensor:
    """Return 1/2 + shift for each positive and 1/2 - shift for each negative, (batch,)."""
    return torch.where(labels == 1, 0.5 + shifts, 0.5 - shifts)


def draw_shifts(noise: NoiseSource, labels: Tensor, width: float) -> Tensor:
    """Draw fresh distances of each label from 1/2, uniform between 0 and ``width``, (batch,)."""
    numbers = noise.standard_normal(tuple(labels.shape), labels)
    uniform: Tensor = torch.special.ndtr(numbers)
    return uniform * width


def persistent_shifts(key: NoiseKey, ids: Sequence[str], width: float) -> Tensor:
    """Return the distance of each label from 1/2 for the whole run, (aligned,) float32."""
    words = example_keys(key, ids, _LABEL_RESPONSE)[:, 0]
    return (width * open_uniform(words, torch.float64)).float()


def mix(
    terms: MixedTerms, activation: Tensor, predictions: Tensor, critic: nn.Module, soft: Tensor
) -> MixedGradient:
    """Compute the gradient that GAFM sends; predictions come with the graph to the activation."""
    sums = activation.flatten(start_dim=1).sum(dim=1)
    raw = torch.zeros_like(activation)
    label_move = math.inf
    if terms.sent != "ce_only":
        raw = raw + terms.gan_weight * _unit_gradient(
            generator_loss(critic, predictions), activation
        )
    if terms.sent != "gan_only":
        raw = raw + _unit_gradient(binary_cross_entropy_with_logits(sums, soft), activation)
        residual = float(torch.linalg.vector_norm(torch.sigmoid(sums.detach().double()) - soft))
        if residual > 0:
            label_move = 2 * terms.response_width / residual
    return MixedGradient(raw.detach(), label_move)


def _score(critic: nn.Module, predictions: Tensor) -> Tensor:
    scores: Tensor = critic(predictions[:, None])
    return scores.mean()


def _unit_gradient(loss: Tensor, activation: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, activation, retain_graph=True)
    # In float64: where sigmoids saturate, the squares of the remaining gradients underflow float32.
    norm = torch.linalg.vector_norm(gradient.double())
    return gradient if float(norm) == 0 else (gradient / norm).to(gradient.dtype)
