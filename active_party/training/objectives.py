"""The ordinary objective: split learning with a cross entropy, or a squared error."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses.objective import BatchLabels, StepOutcome, TopModel, descend
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind
from splitveil.active_party.training.predictions import LossWeights
from splitveil.common.data.features import Features
from splitveil.common.models.training_state import trained_of
from splitveil.common.run.progress import State

TopCompute = Callable[[Tensor, Features | None], Tensor]
"""Computes the outputs for a batch, with their graph: the model itself, or several processes."""


class OrdinaryObjective:
    """Trains the top model on the loss whose gradient is sent."""

    def __init__(
        self,
        top: TopModel,
        *,
        learns_targets: bool = True,
        class_weights: Tensor | None = None,
        kind: LabelKind = CLASS_LABELS,
        compute: TopCompute | None = None,
    ) -> None:
        self.model: nn.Module = top.model
        self._compute = compute or top.model
        self._optimizer = top.optimizer
        self._trained = trained_of(top.model)
        self._schedule = LambdaLR(top.optimizer, top.schedule)
        self._learns_targets = learns_targets
        self._class_weights = class_weights
        self._kind = kind

    def compute(self, activation: Tensor, own: Features | None, labels: BatchLabels) -> StepOutcome:
        """Compute the gradient at the cut layer, and nothing else.

        The model's own gradients follow in ``learn``, so that the peer need not wait for them.
        """
        outputs = self._compute(activation, own)
        weights, kind = LossWeights(labels.weights, self._class_weights), self._kind
        loss = kind.loss(outputs, labels.targets, weights)
        (raw,) = torch.autograd.grad(loss, activation, retain_graph=True)
        if not self._learns_targets:
            loss = kind.loss(outputs, labels.true, weights)
        return StepOutcome(raw, kind.predicted(outputs.detach()), loss, logits=outputs)

    def learn(self, outcome: StepOutcome, /) -> None:
        descend(outcome.loss, self._trained, self._optimizer)
        self._schedule.step()

    def state_dict(self) -> State:
        """Return everything that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
