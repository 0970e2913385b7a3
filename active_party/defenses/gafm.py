"""GAFM: training the cut layer against a critic and softened labels instead of the labels.

Han and Guan, "GAN-based vertical federated learning for label protection in binary classification"
(arXiv 2302.02245). The top model G, with a sigmoid behind its logit, maps the activation f to a
prediction Y^; a critic D on single numbers separates labels Y from predictions.

    L_GAN = E[D(Y + e)] - E[D(Y^)], e ~ N(0, s^2)       D maximises it, G and f minimise it
    L_CE  = cross entropy between sigmoid(sum of f over the cut) and the softened label Y~
    Y~    = 1/2 + u where Y = 1, 1/2 - u where Y = 0, u uniform between 0 and D_max
    sent  = w grad_f L_GAN / |grad_f L_GAN|  +  grad_f L_CE / |grad_f L_CE|

D's weights are clipped to [-c, c], and the norms are taken over the whole batch.

The paper calls Y~ a randomised response. In the sense of differential privacy it is not: Y~ lies
above 1/2 exactly if the label is 1, and a peer reads this off the residual of a smooth function of
f. So an answer is charged without bound unless a defense behind the sum covers the move caused by
the example's own label, at most

    2 D_max / |sigmoid(sum of f) - Y~|    (norm over the batch)

along the direction with all coordinates of the cut equal. The classes' means would be the wrong
measure here: the two terms make them cancel while each label's own share stays. As for every fresh
charge, what G and D have learned about the labels is not counted.

The two losses do not determine which end of Y^ is the positive one, and some runs end with the
wrong one. Therefore the label owner tracks the end at which its positives are, and predicts 1 - Y^
if it is the lower one (`Oriented`). Nothing that is sent depends on it.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses import interface, section
from splitveil.active_party.defenses.class_statistics import KEPT_SHARE
from splitveil.active_party.defenses.example_keys import (
    NoiseKey,
    example_keys,
    key_from_insecure_seed,
)
from splitveil.active_party.defenses.iso import IsoDefense, Isotropic
from splitveil.active_party.defenses.marvell import Marvell, MarvellDefense
from splitveil.active_party.defenses.max_norm import MaxNormDefense
from splitveil.active_party.defenses.noise import AnswerKeys, NoiseSource, fresh_key, open_uniform
from splitveil.active_party.defenses.noisy_label import NoisyLabel, NoisyLabelDefense
from splitveil.active_party.defenses.none import NoDefense
from splitveil.active_party.defenses.section import ChargeModel
from splitveil.active_party.defenses.sum_kl import sum_kl_along_gap
from splitveil.common.data.features import Features
from splitveil.common.models.optimizers import Adam
from splitveil.common.privacy.charge import UNBOUNDED, Charge
from splitveil.common.run.progress import State

_LABEL_RESPONSE = b"label response"

_CRITIC_WIDTH = 16
_WEIGHT_LIMIT = 0.1


class MixedGradient(NamedTuple):
    """The gradient that GAFM would send, and the share of an example's own label in it."""

    raw: Tensor  # like the activation
    label_move: float
    """The largest move of a row by its own label, all else equal; infinite if it is unknown how
    labels enter."""


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


def build_critic(noise: NoiseSource) -> nn.Sequential:
    """Return a critic of single numbers: two dense layers, clipped."""
    sizes = (1, _CRITIC_WIDTH), (_CRITIC_WIDTH, 1)
    hidden, output = (nn.Linear(*size, device="meta").to_empty(device="cpu") for size in sizes)
    critic = nn.Sequential(hidden, nn.LeakyReLU(), output, nn.LeakyReLU())
    with torch.no_grad():
        for layer in (hidden, output):
            for parameter in layer.parameters():
                limit = layer.in_features**-0.5
                parameter.copy_(uniform(noise, parameter, 2 * limit) - limit)
    clip_weights(critic)
    return critic


def clip_weights(critic: nn.Module) -> None:
    """Clip every weight to [-0.1, 0.1], as the paper does."""
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.clamp_(-_WEIGHT_LIMIT, _WEIGHT_LIMIT)


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


def uniform(noise: NoiseSource, like: Tensor, width: float) -> Tensor:
    """Draw numbers that are uniform between 0 and ``width``, of the shape of ``like``."""
    numbers = noise.standard_normal(tuple(like.shape), like)
    shares: Tensor = torch.special.ndtr(numbers)
    return shares * width


def persistent_shifts(key: NoiseKey, ids: Sequence[str], width: float) -> Tensor:
    """Return the distance of each label from 1/2 for the whole run, (aligned,) float32."""
    words = example_keys(key, ids, _LABEL_RESPONSE)[:, 0]
    return (width * open_uniform(words, torch.float64)).float()


def mix(
    settings: "GafmDefense",
    activation: Tensor,
    predictions: Tensor,
    critic: nn.Module,
    soft: Tensor,
) -> MixedGradient:
    """Compute the gradient that GAFM sends; predictions come with the graph to the activation."""
    sums = activation.flatten(start_dim=1).sum(dim=1)
    raw = torch.zeros_like(activation)
    label_move = math.inf
    if settings.terms != "ce_only":
        adversarial = _unit_gradient(generator_loss(critic, predictions), activation)
        raw = raw + settings.gan_weight * adversarial
    if settings.terms != "gan_only":
        raw = raw + _unit_gradient(binary_cross_entropy_with_logits(sums, soft), activation)
        residual = float(torch.linalg.vector_norm(torch.sigmoid(sums.detach().double()) - soft))
        if residual > 0:
            label_move = 2 * settings.response_width / residual
    return MixedGradient(raw.detach(), label_move)


def _score(critic: nn.Module, predictions: Tensor) -> Tensor:
    scores: Tensor = critic(predictions[:, None])
    return scores.mean()


def _unit_gradient(loss: Tensor, activation: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, activation, retain_graph=True)
    # In float64: where sigmoids saturate, the squares of the remaining gradients underflow float32.
    norm = torch.linalg.vector_norm(gradient.double())
    return gradient if float(norm) == 0 else (gradient / norm).to(gradient.dtype)


class GafmDefense(section.SeededDefense):
    """Train the cut layer against a critic and softened labels instead of the labels.

    The top model becomes the generator; the paper's has one hidden layer with leaky ReLU. By itself
    this does not defend the gradients' values: the leak ledger gives it no credit, see
    ``composed_with``. As in the paper on Spambase, with Marvell behind it:

        top_model: {kind: mlp, hidden: [16], activation: leaky_relu}
        defense:
          name: gafm
          response_width: 0.05
          composed_with: {name: marvell, strength: {power_ratio: 4}}
    """

    name: Literal["gafm"] = "gafm"

    gan_weight: float = Field(default=1.0, gt=0, le=1000)
    """Weight of the adversarial term relative to the cross entropy, after both are scaled to norm
    1."""

    response_width: float = Field(default=0.05, ge=0, le=0.5)
    """Largest distance of a softened label from 1/2."""

    response: Literal["fresh", "persistent"] = "fresh"
    """How often a label is softened: again for every answer, or once for the whole run.

    Fresh softened labels average out over epochs. Persistent ones come from the key at
    ``noise_key_path``. Neither hides whether a softened label is above 1/2, and that is the label.
    """

    terms: Literal["both", "gan_only", "ce_only"] = "both"
    """The terms that are sent: both, or one of them for comparison.

    The adversarial term alone does not say which rows are positive; the cut layer may learn
    something from it that has little to do with the labels.
    """

    label_noise: float = Field(default=0.01, ge=0, le=1)
    """Standard deviation of the noise on the labels that the critic sees."""

    critic_learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Step size of the critic's Adam; the contract's schedule applies to it, too."""

    composed_with: Annotated[
        NoDefense | IsoDefense | MaxNormDefense | MarvellDefense | NoisyLabelDefense,
        Field(discriminator="name"),
    ] = NoDefense()
    """The defense that is applied to the mixed gradient before it leaves.

    ``noisy_label`` keeps its guarantee: critic and softened labels then only see noisy labels. The
    others add fresh noise; the leak ledger gives credit to ``iso``, and to ``marvell`` if the cut
    has one value per example.
    """

    @model_validator(mode="after")
    def _fits_what_it_is_composed_with(self) -> Self:
        if self.composed_with.noise_seed is not None:
            raise ValueError("composed_with: set insecure_noise_seed of gafm itself instead")
        behind = self.composed_with
        if isinstance(behind, NoisyLabelDefense):
            if (
                behind.subject_column is not None
                or behind.mechanism.kind != "randomized_response"
                or behind.mechanism.posterior != "none"
                or behind.top_labels != "noisy"
            ):
                raise ValueError(
                    "composed_with: the critic compares predictions with labels of 0 and 1; "
                    "expected a noisy_label of mechanism randomized_response, with posterior none "
                    "and top_labels noisy, without subject_column"
                )
        elif isinstance(behind, section.NoisyDefense) and behind.noise == "persistent":
            raise ValueError(
                "composed_with: persistent noise is measured by what a label moves in a cross "
                "entropy's gradient, which this is not; expected noise: fresh, or noisy_label"
            )
        return self

    @property
    def traits(self) -> section.Traits:
        # Weights are made for the cross entropy.
        return section.Traits(takes_weights=False, has_own_objective=True)

    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        if self.insecure_noise_seed is not None:
            section.warn_about_seed()
        return MixedGradientDefense(self.composed_with.build(context, secrets))

    def objective(
        self, top: interface.TopModel, secrets: interface.Secrets, /
    ) -> interface.Objective | None:
        seed, shifts = self.insecure_noise_seed, None
        if self.response == "persistent" and secrets.noise_key is not None:
            shifts = persistent_shifts(secrets.noise_key, secrets.ids, self.response_width)
            shifts = shifts.to(secrets.device)
        key = fresh_key() if seed is None else key_from_insecure_seed(seed)
        critic = build_critic(NoiseSource(AnswerKeys(key)))
        return Adversarial(
            self,
            top,
            critic=critic.to(secrets.device),
            noise=NoiseSource(secrets.draw_keys or fresh_key),
            shifts=shifts,
        )

    def predicting(self, model: nn.Module, /) -> nn.Module:
        return Oriented(model)

    def noise_key_strength(self, context: interface.DefenseContext, /) -> str | None:
        # Of noisy labels it is the same as for noisy_label by itself: a label's flip is drawn once
        # for all uses of the flipped label.
        behind = self.composed_with.noise_key_strength(context)
        if behind is not None or self.response == "fresh":
            return behind
        return f"gafm {self.response_width!r}"

    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        behind = self.composed_with.charge_model(context)
        if behind.noise == "persistent":
            return behind
        # The ledger may give credit to the defense behind, never to gafm: if it is known how labels
        # enter, and its noise covers the move by one. Such a charge does not count that the critic
        # and the scale of the noise depend on labels, too.
        covers = isinstance(self.composed_with, IsoDefense) or (
            isinstance(self.composed_with, MarvellDefense) and context.cut_dim == 1
        )
        if covers and self.terms != "gan_only":
            return ChargeModel.of_gradients(f"gafm with {self.composed_with.name}")
        return ChargeModel.exact(
            UNBOUNDED,
            "gafm hides labels from norms and class means. A peer that knows its own activations "
            "can read them: the ledger gives no credit.",
            refusal="the ledger gives gafm no credit by itself, and the first answer would pass "
            "every budget; expected both terms and composed_with iso, noisy_label, or marvell at a "
            "cut of one number",
        )

    def _refusal(self, context: interface.DefenseContext, /) -> str | None:
        return section.refusal_of_several_classes(self.name, context)


class MixedGradientDefense(interface.RememberingDefense):
    """Lets a defense behind add noise, and charges for a peer that knows all but one label."""

    def __init__(self, behind: interface.Defense) -> None:
        super().__init__(behind)
        self.behind = behind

    def defend(self, batch: interface.Step) -> interface.Defended:
        """Let the defense behind answer, and charge for the label's move, not the class means'.

        The label moves its own row by a norm of at most ``label_move``, infinite if unknown.
        """
        if batch.label_move is None:
            raise ValueError("expected a gradient of gafm's objective, with its label_move")
        answer = self.behind.defend(batch)
        own, solution, cut_dim = math.inf, answer.solution, batch.gradients[0].numel()
        match self.behind:
            case NoisyLabel():  # every gradient is a function of features and noisy labels
                return answer
            case Isotropic():  # its noise is the same in all directions
                deviation = math.sqrt(answer.noise_power / cut_dim)
                own = sum_kl_along_gap(deviation, deviation, batch.label_move)
            case Marvell():
                if solution is None:
                    own = 0.0  # noise without any signal
                elif cut_dim == 1:  # else the noise lies along the gap, and the move does not
                    neg, pos = math.sqrt(solution.neg_along), math.sqrt(solution.pos_along)
                    own = sum_kl_along_gap(neg, pos, batch.label_move)
        return answer._replace(charge=Charge(max(own, answer.charge.sum_kl)))

    def targets(self, batch: interface.Step, /) -> Tensor:
        return self.behind.targets(batch)


class Adversarial:
    """The top model learns to make predictions that a critic cannot separate from labels.

    The critic learns first, then the top model, then the gradient is computed: the peer waits for
    both. A term that is not sent (``terms``) still takes part in how the two learn. ``shifts`` are
    responses for the whole run, (aligned,), or None if they are fresh.
    """

    def __init__(
        self,
        settings: GafmDefense,
        generator: interface.TopModel,
        *,
        critic: nn.Module,
        noise: NoiseSource,
        shifts: Tensor | None = None,
    ) -> None:
        self._oriented = Oriented(generator.model)
        self.model: nn.Module = self._oriented
        self._generator = generator.model
        self._settings = settings
        self._optimizer = generator.optimizer
        self._critic = critic
        self._critic_optimizer = Adam(critic.parameters(), lr=settings.critic_learning_rate)
        self._schedules = [
            LambdaLR(each, generator.schedule) for each in (self._optimizer, self._critic_optimizer)
        ]
        self._noise = noise
        self._shifts = shifts

    def compute(self, step: interface.Step, /) -> None:
        activation, own, targets = step.activation, step.own, step.targets
        self._teach_critic(activation, own, targets)
        self._teach_generator(activation, own)
        logits = self._generator(activation, own)
        predictions = torch.sigmoid(logits)
        width = self._settings.response_width
        if self._shifts is None:
            shifts = uniform(self._noise, targets, width)
        else:
            shifts = self._shifts[step.rows]
        soft = soften(targets, shifts)
        mixed = mix(self._settings, activation, predictions, self._critic, soft)
        step.gradients, step.label_move = mixed
        self._oriented.watch(predictions.detach(), targets)
        oriented = self._oriented.orient(logits.detach())
        step.probabilities = torch.sigmoid(oriented)
        step.loss = binary_cross_entropy_with_logits(oriented, step.labels)

    def learn(self, _step: interface.Step, /) -> None:
        """Update the learning rates: critic and generator have learned before the answer."""
        for schedule in self._schedules:
            schedule.step()

    def state_dict(self) -> State:
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "critic": self._critic.state_dict(),
            "critic_optimizer": self._critic_optimizer.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self._schedules],
        }

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._critic.load_state_dict(state["critic"])
        self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)

    def _teach_critic(self, activation: Tensor, own: Features | None, labels: Tensor) -> None:
        with torch.no_grad():
            predictions = torch.sigmoid(self._generator(activation, own))
        noise = self._noise.standard_normal(tuple(labels.shape), labels)
        noisy = labels + self._settings.label_noise * noise
        loss = -gan_loss(self._critic, noisy, predictions)
        interface.descend(loss, self._critic.parameters(), self._critic_optimizer)
        clip_weights(self._critic)

    def _teach_generator(self, activation: Tensor, own: Features | None) -> None:
        predictions = torch.sigmoid(self._generator(activation.detach(), own))
        loss = generator_loss(self._critic, predictions)
        interface.descend(loss, self._generator.parameters(), self._optimizer)
