"""The active party's half of the network: what it computes, without any rule of the protocol."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitveil.active_party.defenses import AnswerKeys, DefendedGradient, Defense, DefenseReport
from splitveil.active_party.training.objectives import BatchLabels, Lesson, Objective
from splitveil.common.data.features import Features
from splitveil.common.errors import SplitveilError
from splitveil.common.models.random_state import random_state, set_random_state
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions


@dataclass(frozen=True)
class StepResult:
    """What one training step gave, before the top model has learned from it."""

    raw: Tensor
    """Gradient at the cut layer, (batch, *cut_shape). Never leaves this party."""

    defended: DefendedGradient
    """What is sent in its place, same shape."""

    report: DefenseReport
    labels: Tensor
    """(batch,), float."""

    probabilities: Tensor
    """What the model predicted, (batch,) for label 1, or (batch, classes)."""

    loss: Tensor
    """Cross entropy of the prediction, mean over the batch."""


class TopTrainer:
    """Objective, labels and defense.

    Args:
        objective: the top model, and what it is trained for.
        defense: applied to every gradient before it is returned.
        features: this party's own features in the common order, or None.
        labels: 0 or 1, or places of several classes, in the common order, (aligned,).
        device: where the model is.
        example_keys: secret bits of each id in the common order, (aligned, 2) int64, for persistent
            noise; None where the defense needs none.
        noisy_labels: what the gradients sent are computed from instead of the labels, (aligned,).
        answer_keys: where the defense's fresh noise has its keys from; None where it draws none.
        data_digest: tells other data from these, for whoever goes on with the run later.
        num_classes: how many classes the labels are of.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        defense: Defense,
        features: Features | None,
        labels: Tensor,
        device: torch.device,
        example_keys: Tensor | None = None,
        noisy_labels: Tensor | None = None,
        answer_keys: AnswerKeys | None = None,
        data_digest: str = "",
        num_classes: int = 2,
    ) -> None:
        self.data_digest = data_digest
        self.num_classes = num_classes
        self.defense = defense
        self._objective = objective
        self._features = None if features is None else features.to(device)
        self._labels = labels.to(device, torch.float32)
        self._device = device
        self._example_keys = example_keys
        self._noisy = None if noisy_labels is None else noisy_labels.to(device, torch.float32)
        self._answer_keys = answer_keys
        self._unlearned: Lesson | None = None

    @property
    def model(self) -> nn.Module:
        """The top model."""
        return self._objective.model

    @property
    def is_between_steps(self) -> bool:
        """Whether the last step was learned from, so that the state is whole."""
        return self._unlearned is None

    def gradient(
        self, positions: Positions, activation: Tensor, answer_key: bytes | None = None
    ) -> StepResult:
        """Compute the gradient at the cut layer and defend it.

        What need not come before the answer follows in ``learn``, so that the peer need not wait.

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
        labels = self._labels[rows]
        sent = labels if self._noisy is None else self._noisy[rows]
        lesson = self._objective.answer(cut, self._own(rows), BatchLabels(rows, labels, sent))
        defended, report = self._defend(lesson, labels, positions)
        self._unlearned = lesson
        return StepResult(
            lesson.raw, defended, report, labels, lesson.probabilities, lesson.loss.detach()
        )

    def _defend(
        self, lesson: Lesson, labels: Tensor, positions: Positions
    ) -> tuple[DefendedGradient, DefenseReport]:
        keys = self._example_keys
        try:
            defended, report = self.defense.defend(
                lesson.raw,
                labels,
                example_keys=None if keys is None else keys[torch.from_numpy(positions.copy())],
                probabilities=lesson.probabilities,
            )
        except ValueError as error:
            raise SplitveilError(f"a gradient cannot be defended: {error}") from error
        return defended, self._objective.judge(lesson, report)

    def learn(self) -> None:
        """Let the top model learn from the last step, if it has not yet."""
        if self._unlearned is None:
            return
        self._objective.learn(self._unlearned)
        self._unlearned = None  # only now: a model that has learned half of it is no state

    def predict(self, positions: Positions, activation: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels of some rows, on the CPU, without learning.

        Labels are (batch,), and logits, too, or with several classes (batch, classes).
        """
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
            "objective": self._objective.state_dict(),
            "defense": self.defense.state_dict(),
            "random": random_state(self._device),
        }

    def load_state_dict(self, state: State) -> None:
        """Go back, or on, to where ``state_dict`` was taken."""
        self._unlearned = None
        self._objective.load_state_dict(state["objective"])
        self.defense.load_state_dict(state["defense"])
        set_random_state(self._device, state["random"])

    def labels_of(self, positions: Positions) -> Tensor:
        """Return the true labels of some rows, (rows,), on the CPU."""
        return self._labels[torch.from_numpy(positions.copy()).to(self._device)].cpu()

    def _own(self, rows: Tensor) -> Features | None:
        return None if self._features is None else self._features.rows(rows)
