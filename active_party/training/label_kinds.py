"""The kinds of labels: classes, or numbers within bounds. What follows from the kind is here.

A kind says how an output of the top model is compared with a label, what it predicts, and how
predictions are measured. Labels that are numbers are shares of their range here; figures about them
are in the label's unit. The ordinary objective learns from the loss of a kind.
"""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses import objective
from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.training.predictions import (
    LossWeights,
    PredictionFigures,
    auc_of_classes,
    measure_predictions,
    probabilities_of,
    weighted_cross_entropy,
)
from splitveil.common.data.label_range import LabelRange
from splitveil.common.data.settings import DataSettings
from splitveil.common.models.data_parallel import DataParallelModel, go_on
from splitveil.common.models.training_state import trained_of
from splitveil.common.privacy.figures import NumberFigures
from splitveil.common.privacy.number_attacks import LabelNumbers
from splitveil.common.privacy.observation import LabelClasses
from splitveil.common.run.progress import State

_LARGEST_LOGIT = 30.0


class ClassLabels(NamedTuple):
    """Labels that are classes: a cross entropy, probabilities, and AUCs."""

    num_classes: int = 2
    names: tuple[str, ...] = ()  # of more than two classes

    @property
    def shape_of_row(self) -> tuple[int, ...]:
        return () if self.num_classes == 2 else (self.num_classes,)

    def in_units(self, predictions: NDArray[np.float32]) -> NDArray[np.float32]:
        return predictions

    @property
    def slope_of_residual(self) -> float:
        return 1.0

    def loss(self, outputs: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
        return weighted_cross_entropy(outputs, labels, weights)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the probability of label 1, (rows,), or of each class, (rows, classes)."""
        return probabilities_of(outputs)

    def measure(self, outputs: Tensor, labels: Tensor) -> PredictionFigures:
        return measure_predictions(outputs, labels)

    @property
    def audited(self) -> LabelClasses:
        return LabelClasses(self.names)

    @property
    def stored_type(self) -> torch.dtype:
        return torch.int8

    def logits_of(self, predictions: Tensor) -> Tensor:
        wide = predictions.double()
        logits = wide.logit() if self.num_classes == 2 else wide.log()
        return logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).float()

    def agreement(self, logits: Tensor, labels: Tensor) -> float:
        return auc_of_classes(logits[:, 0] if self.num_classes == 2 else logits, labels)


CLASS_LABELS = ClassLabels()


class NumberLabels(NamedTuple):
    """Labels that are numbers: a squared error, and errors in the label's unit."""

    within: LabelRange

    mean_share: float = math.nan
    """Mean of the training labels as a share of the range: the constant prediction beside which
    every figure stands. NaN where nothing is measured."""

    @property
    def shape_of_row(self) -> tuple[int, ...]:
        return ()

    def in_units(self, predictions: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.within.values(predictions)

    @property
    def slope_of_residual(self) -> float:
        return 2.0

    def loss(self, outputs: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
        """Return the mean squared error, in units of the squared range."""
        squares = objective.residuals_of(outputs, labels).square()
        return (squares if weights.of_rows is None else weights.of_rows * squares).mean()

    def predicted(self, outputs: Tensor) -> Tensor:
        return objective.shares_of(outputs)

    def measure(self, outputs: Tensor, labels: Tensor) -> PredictionFigures:
        labels, width = labels.double(), self.within.width
        errors = objective.shares_of(outputs.double()) - labels
        of_constant = self.mean_share - labels
        spread = float((labels - labels.mean()).square().sum())
        unexplained = float(errors.square().sum())
        number = NumberFigures(
            rmse=width * _root_mean_square(errors),
            mae=width * float(errors.abs().mean()),
            r2=1 - unexplained / spread if spread > 0 else math.nan,
            constant_rmse=width * _root_mean_square(of_constant),
            constant_mae=width * float(of_constant.abs().mean()),
        )
        loss = float(errors.square().mean())
        return PredictionFigures(loss, math.nan, math.nan, None, number)

    @property
    def audited(self) -> LabelNumbers:
        return LabelNumbers()

    @property
    def stored_type(self) -> torch.dtype:
        return torch.float32

    def logits_of(self, predictions: Tensor) -> Tensor:
        return predictions

    def agreement(self, logits: Tensor, labels: Tensor) -> float:
        labels = labels.double()
        spread = float((labels - labels.mean()).square().sum())
        missed = float((labels - logits[:, 0].double()).square().sum())
        return 1 - missed / spread if spread > 0 else math.nan


LabelKind: TypeAlias = ClassLabels | NumberLabels


def kind_of(settings: DataSettings, mean_share: float = math.nan) -> LabelKind:
    if settings.label_range is None:
        return ClassLabels(settings.num_classes, settings.class_names)
    return NumberLabels(settings.label_range, mean_share)


def _root_mean_square(values: Tensor) -> float:
    return float(torch.sqrt(values.double().square().mean()))


class OrdinaryObjective:
    """Trains the top model on the loss whose gradient is sent."""

    def __init__(
        self,
        top: objective.TopModel,
        *,
        learns_targets: bool = True,
        class_weights: Tensor | None = None,
        kind: LabelKind = CLASS_LABELS,
    ) -> None:
        self.model: nn.Module = top.model
        self._optimizer = top.optimizer
        self._trained = trained_of(top.model)
        self.schedule = LambdaLR(top.optimizer, top.schedule)
        self.parallel: DataParallelModel | None = None
        """If several processes of this party compute the model."""
        self._learns_targets = learns_targets
        self._class_weights = class_weights
        self._kind = kind

    def compute(self, step: Step, /) -> None:
        """Compute the gradient at the cut layer, and nothing else.

        The model's own gradients follow in ``learn``, so that the peer need not wait for them.
        """
        if self.parallel is None:
            outputs = self.model(step.activation, step.own)
        else:
            outputs = self.parallel(step.rows, step.activation)
        weights, kind = LossWeights(step.weights, self._class_weights), self._kind
        loss = kind.loss(outputs, step.targets, weights)
        (step.gradients,) = torch.autograd.grad(loss, step.activation, retain_graph=True)
        if not self._learns_targets:
            loss = kind.loss(outputs, step.labels, weights)
        step.probabilities, step.loss = kind.predicted(outputs.detach()), loss
        step.outputs = outputs

    def learn(self, step: Step, /) -> None:
        objective.descend(step.loss, self._trained, self._optimizer)
        self.schedule.step()

    def state_dict(self) -> State:
        """Return everything that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "ranks": [] if self.parallel is None else self.parallel.random_states(),
        }

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        go_on(self.parallel, state["ranks"])
