"""The active party's half of the network: what it computes, without any rule of the protocol."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from active_party.defenses import AnswerKeys, DefendedGradient, Defense, DefenseReport
from common.checkpoint import State
from common.contract import LearningRateSchedule
from common.data.features import Features
from common.errors import SplitveilError
from common.random_state import random_state, set_random_state
from common.sample_order import Positions


@dataclass(frozen=True)
class StepResult:
    """What one training step gave, before the top model has learned from it."""

    raw: Tensor
    """Gradient of the loss at the cut layer, (batch, *cut_shape). Never leaves this party."""

    defended: DefendedGradient
    """What is sent in its place, same shape."""

    report: DefenseReport
    labels: Tensor
    """(batch,), float."""

    probabilities: Tensor
    """What the model predicted, (batch,)."""

    loss: Tensor
    """Mean over the batch, a scalar with its graph."""


class TopTrainer:
    """Top model, optimiser, labels and defense.

    Args:
        model: maps (activation, own features or None) to logits (batch,).
        optimizer: over the model's parameters.
        schedule: how the learning rate changes.
        total_steps: training steps of the whole run.
        defense: applied to every gradient before it is returned.
        features: this party's own features in the common order, or None.
        labels: 0 or 1 in the common order, (aligned,).
        device: where the model is.
        example_keys: secret bits of each id in the common order, (aligned, 2) int64, for persistent
            noise; None where the defense needs none.
        noisy_labels: what the gradients sent are computed from instead of the labels, (aligned,).
        top_learns_noisy: whether the top model learns from the noisy labels, too.
        answer_keys: where the defense's fresh noise has its keys from; None where it draws none.
        data_digest: tells other data from these, for whoever goes on with the run later.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LearningRateSchedule,
        total_steps: int,
        defense: Defense,
        features: Features | None,
        labels: Tensor,
        device: torch.device,
        example_keys: Tensor | None = None,
        noisy_labels: Tensor | None = None,
        top_learns_noisy: bool = True,
        answer_keys: AnswerKeys | None = None,
        data_digest: str = "",
    ) -> None:
        self.model = model.to(device)
        self.data_digest = data_digest
        self.defense = defense
        self._optimizer = optimizer
        self._schedule = LambdaLR(optimizer, lambda step: schedule.factor(step, total_steps))
        self._features = None if features is None else features.to(device)
        self._labels = labels.to(device, torch.float32)
        self._device = device
        self._example_keys = example_keys
        self._noisy = None if noisy_labels is None else noisy_labels.to(device, torch.float32)
        self._top_learns_noisy = top_learns_noisy
        self._answer_keys = answer_keys
        self._unlearned: StepResult | None = None

    @property
    def is_between_steps(self) -> bool:
        """Whether the last step was learned from, so that the state is whole."""
        return self._unlearned is None

    def gradient(
        self, positions: Positions, activation: Tensor, answer_key: bytes | None = None
    ) -> StepResult:
        """Compute the gradient at the cut layer and defend it, and no more than that.

        The top model's own gradients follow in ``learn``, so that the peer need not wait for them.

        Args:
            positions: of the rows, (batch,).
            activation: (batch, *cut_shape).
            answer_key: what the noise of this answer is drawn from, 32 secret bytes.
        """
        self.learn()
        if self._answer_keys is not None and answer_key is not None:
            self._answer_keys.begin(answer_key)
        self.model.train()
        rows = torch.from_numpy(positions.copy()).to(self._device)
        cut = activation.to(self._device, torch.float32).requires_grad_()
        logits = self.model(cut, self._own(rows))
        labels = self._labels[rows]
        sent_from = labels if self._noisy is None else self._noisy[rows]
        loss = binary_cross_entropy_with_logits(logits, sent_from)
        (raw,) = torch.autograd.grad(loss, cut, retain_graph=True)
        probabilities = torch.sigmoid(logits.detach())
        defended, report = self._defend(raw, labels, probabilities, positions)
        if self._noisy is not None and not self._top_learns_noisy:
            loss = binary_cross_entropy_with_logits(logits, labels)
        self._unlearned = StepResult(raw, defended, report, labels, probabilities, loss)
        return self._unlearned

    def _defend(
        self, raw: Tensor, labels: Tensor, probabilities: Tensor, positions: Positions
    ) -> tuple[DefendedGradient, DefenseReport]:
        keys = self._example_keys
        try:
            return self.defense.defend(
                raw,
                labels,
                example_keys=None if keys is None else keys[torch.from_numpy(positions.copy())],
                probabilities=probabilities,
            )
        except ValueError as error:
            raise SplitveilError(f"a gradient cannot be defended: {error}") from error

    def learn(self) -> None:
        """Let the top model learn from the last step, if it has not yet."""
        if self._unlearned is None:
            return
        loss, self._unlearned = self._unlearned.loss, None
        self._optimizer.zero_grad(set_to_none=True)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._schedule.step()

    def predict(self, positions: Positions, activation: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels of some rows, (batch,) each, on the CPU, without learning."""
        self.learn()
        self.model.eval()
        rows = torch.from_numpy(positions.copy()).to(self._device)
        with torch.no_grad():
            logits = self.model(activation.to(self._device, torch.float32), self._own(rows))
        return logits.cpu(), self._labels[rows].cpu()

    def state_dict(self) -> State:
        """Return all that a step changes.

        Raises:
            RuntimeError: in the middle of a step.
        """
        if not self.is_between_steps:
            raise RuntimeError("no state in the middle of a step")
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "defense": self.defense.state_dict(),
            "random": random_state(self._device),
        }

    def load_state_dict(self, state: State) -> None:
        """Go back, or on, to where ``state_dict`` was taken."""
        self._unlearned = None
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.defense.load_state_dict(state["defense"])
        set_random_state(self._device, state["random"])

    def labels_of(self, positions: Positions) -> Tensor:
        """Return the true labels of some rows, (rows,), on the CPU."""
        return self._labels[torch.from_numpy(positions.copy()).to(self._device)].cpu()

    def _own(self, rows: Tensor) -> Features | None:
        return None if self._features is None else self._features.rows(rows)
