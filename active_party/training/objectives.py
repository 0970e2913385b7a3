"""What the top model is trained for: which gradient goes back to the cut layer, and how it learns.

``CrossEntropy`` is split learning as it is usually meant. ``Adversarial`` replaces it by GAFM
(see ``splitveil.active_party.defenses.gafm``). Neither knows the protocol or adds noise to a
gradient.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses.gafm import (
    Oriented,
    charge_of,
    clip_weights,
    draw_shifts,
    gan_loss,
    generator_loss,
    mix,
    soften,
)
from splitveil.active_party.defenses.interface import DefenseReport
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.settings import GafmDefense
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.active_party.training.predictions import cross_entropy_of, probabilities_of
from splitveil.common.data.features import Features
from splitveil.common.run.progress import State

Schedule = Callable[[int], float]
"""Gives the multiplier of the learning rate at a step."""


class BatchLabels(NamedTuple):
    """What the active party knows of a batch's labels."""

    rows: Tensor
    """Places in the common order, (batch,)."""

    true: Tensor
    """(batch,), 0 or 1, or the place of one of several classes."""

    sent: Tensor
    """What the gradients that leave are computed from: the true labels or noisy ones, (batch,)."""


@dataclass(frozen=True)
class Lesson:
    """What one batch gave."""

    raw: Tensor
    """Gradient at the cut layer, before any defense, (batch, *cut_shape)."""

    probabilities: Tensor
    """What the model predicted, (batch,) for label 1, or (batch, classes)."""

    loss: Tensor
    """Cross entropy of the prediction, mean over the batch; with its graph if it is learned from.
    """

    label_move: float | None = None
    """Most by which an example's own label moves its own row; None where the gap of the classes'
    means stands for it."""


class Objective(Protocol):
    """A top model and how it learns."""

    model: nn.Module
    """Maps (activation, own features or None) to logits, (batch,) or with several classes
    (batch, classes); what predictions come from."""

    def answer(self, activation: Tensor, own: Features | None, labels: BatchLabels) -> Lesson:
        """Compute the gradient at the cut layer.

        Args:
            activation: (batch, *cut_shape), requires its gradient.
            own: the active party's features of the same rows.
            labels: of the same rows.
        """
        ...

    def learn(self, lesson: Lesson) -> None:
        """Do what is left of the step once the answer has been sent."""
        ...

    def judge(self, lesson: Lesson, report: DefenseReport) -> DefenseReport:
        """Correct what a defense reports, where its charge does not describe these gradients."""
        ...

    def state_dict(self) -> State:
        """Return all that a step changes."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go back, or on, to where ``state_dict`` was taken."""
        ...


class CrossEntropy:
    """The top model learns from the cross entropy whose gradient is sent.

    Args:
        model: the top model.
        optimizer: over its parameters.
        schedule: of the learning rate.
        learns_sent: whether it learns from the labels that the gradients are computed from, where
            those are noisy, or from the true ones.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        learns_sent: bool = True,
    ) -> None:
        self.model = model
        self._optimizer = optimizer
        self._schedule = LambdaLR(optimizer, schedule)
        self._learns_sent = learns_sent

    def answer(self, activation: Tensor, own: Features | None, labels: BatchLabels) -> Lesson:
        """Compute the gradient at the cut layer, and no more than that.

        The model's own follow in ``learn``, so that the peer need not wait for them.
        """
        logits = self.model(activation, own)
        loss = cross_entropy_of(logits, labels.sent)
        (raw,) = torch.autograd.grad(loss, activation, retain_graph=True)
        if not self._learns_sent:
            loss = cross_entropy_of(logits, labels.true)
        return Lesson(raw, probabilities_of(logits.detach()), loss)

    def learn(self, lesson: Lesson) -> None:
        """Take an optimiser step."""
        _descend(lesson.loss, self.model.parameters(), self._optimizer)
        self._schedule.step()

    def judge(self, lesson: Lesson, report: DefenseReport) -> DefenseReport:  # noqa: ARG002
        """Leave the report as it is: defenses are made for these gradients."""
        return report

    def state_dict(self) -> State:
        """Return all that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go back, or on, to where ``state_dict`` was taken."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])


class Adversarial:
    """The top model learns to make predictions that a critic cannot tell from labels.

    The critic learns first, then the top model, and only then is the answer computed, as in the
    paper: the peer waits for both. What is left out of the answer by ``terms`` changes nothing of
    how the two learn.

    Args:
        settings: of GAFM.
        generator: maps (activation, own features or None) to logits (batch,).
        optimizer: over its parameters.
        schedule: of both learning rates.
        critic: scores single numbers.
        noise: for the noise on labels, and for responses that are fresh.
        shifts: responses of the whole run, (aligned,); None where they are fresh.
    """

    def __init__(
        self,
        settings: GafmDefense,
        generator: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        critic: nn.Module,
        noise: NoiseSource,
        shifts: Tensor | None = None,
    ) -> None:
        self._oriented = Oriented(generator)
        self.model: nn.Module = self._oriented
        self._generator = generator
        self._settings = settings
        self._optimizer = optimizer
        self._critic = critic
        self._critic_optimizer = Adam(critic.parameters(), lr=settings.critic_learning_rate)
        self._schedules = [LambdaLR(each, schedule) for each in (optimizer, self._critic_optimizer)]
        self._noise = noise
        self._shifts = shifts

    def answer(self, activation: Tensor, own: Features | None, labels: BatchLabels) -> Lesson:
        """Let critic and generator learn, and compute the mixed gradient."""
        self._teach_critic(activation, own, labels.sent)
        self._teach_generator(activation, own)
        logits = self._generator(activation, own)
        predictions = torch.sigmoid(logits)
        soft = soften(labels.sent, self._own_shifts(labels))
        mixed = mix(self._settings, activation, predictions, self._critic, soft)
        self._oriented.watch(predictions.detach(), labels.sent)
        oriented = self._oriented.orient(logits.detach())
        return Lesson(
            mixed.raw,
            torch.sigmoid(oriented),
            binary_cross_entropy_with_logits(oriented, labels.true),
            mixed.label_move,
        )

    def learn(self, lesson: Lesson) -> None:  # noqa: ARG002
        """Let the learning rates change: critic and generator have learned before the answer."""
        for schedule in self._schedules:
            schedule.step()

    def judge(self, lesson: Lesson, report: DefenseReport) -> DefenseReport:
        """Charge what an example's own label moves, and not only the gap of the classes."""
        if lesson.label_move is None:
            raise ValueError("expected a lesson of this objective")
        cut_dim = lesson.raw[0].numel()
        charge = charge_of(self._settings, report, lesson.label_move, cut_dim)
        return replace(report, charge=charge, leak_auc_bound=leak_auc_bound(charge.sum_kl))

    def state_dict(self) -> State:
        """Return all that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "critic": self._critic.state_dict(),
            "critic_optimizer": self._critic_optimizer.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self._schedules],
        }

    def load_state_dict(self, state: State) -> None:
        """Go back, or on, to where ``state_dict`` was taken."""
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
        _descend(loss, self._critic.parameters(), self._critic_optimizer)
        clip_weights(self._critic, self._settings.weight_limit)

    def _teach_generator(self, activation: Tensor, own: Features | None) -> None:
        predictions = torch.sigmoid(self._generator(activation.detach(), own))
        loss = generator_loss(self._critic, predictions)
        _descend(loss, self._generator.parameters(), self._optimizer)

    def _own_shifts(self, labels: BatchLabels) -> Tensor:
        if self._shifts is None:
            return draw_shifts(self._noise, labels.sent, self._settings.response_width)
        return self._shifts[labels.rows]


def _descend(loss: Tensor, parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Take a step down the loss, leaving no gradient on anything else in its graph."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
