"""The kinds of labels: classes, or numbers within bounds. What follows from the kind is here.

A kind says how an output of the top model is compared with a label, what it predicts, and how
predictions are measured. The ordinary objective learns from the loss of a kind.

Labels that are numbers are shares of their range, within 0 and 1 (`common.data.settings`);
figures about them are in the label's unit. An output of the top model is measured from the middle
of the range, so that a model whose output is 0 says as little as one of two classes whose logit is
0. Training uses it as it is; a prediction is cut off at the bounds, which only brings it closer to
the label.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses.interface import Step, TopModel, descend
from splitveil.active_party.training.predictions import (
    LossWeights,
    auc_of_classes,
    measure_predictions,
    probabilities_of,
    weighted_cross_entropy,
)
from splitveil.common.data.settings import DataSettings, LabelRange
from splitveil.common.models.data_parallel import DataParallelModel, go_on
from splitveil.common.models.training_state import trained_of
from splitveil.common.privacy.figures import PredictionFigures
from splitveil.common.privacy.number_attacks import LabelNumbers
from splitveil.common.privacy.observation import LabelClasses
from splitveil.common.run.progress import State

_LARGEST_LOGIT = 30.0
_MIDDLE = 0.5


@dataclass(frozen=True)
class ClassLabels:
    """Labels that are classes: a cross entropy, probabilities, and AUCs."""

    num_classes: int = 2
    names: tuple[str, ...] = ()  # of more than two classes
    slope_of_residual = 1.0
    stored_type = torch.int8

    @property
    def shape_of_row(self) -> tuple[int, ...]:
        return () if self.num_classes == 2 else (self.num_classes,)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of predictions in a table."""
        return tuple(f"probability_{name}" for name in self.names) or ("probability",)

    def in_units(self, predictions: NDArray[np.float32]) -> NDArray[np.float32]:
        return predictions

    def describe(self, labels: Tensor) -> str:
        """Return the shares of the classes in words."""
        if not self.names:
            return f"2 classes, {float(labels.double().mean()):.2%} positive"
        counts = torch.bincount(labels.long(), minlength=len(self.names)).tolist()
        counted = zip(self.names, counts, strict=True)
        shares = (f"{name!r} {n / len(labels):.1%}" for name, n in counted)
        return f"{len(self.names)} classes: {', '.join(shares)}"

    @property
    def meaning_of_bounds(self) -> str:
        """The labels that bounds on a leak AUC are about, in a sentence; empty for two classes."""
        several = "All figures are of the pair of classes left furthest apart."
        return several if self.num_classes > 2 else ""

    def loss(self, outputs: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
        return weighted_cross_entropy(outputs, labels, weights)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Return the probability of label 1, (rows,), or of each class, (rows, classes)."""
        return probabilities_of(outputs)

    def measure(self, outputs: Tensor, labels: Tensor) -> PredictionFigures:
        return measure_predictions(outputs, labels, self.names)

    @property
    def audited(self) -> LabelClasses:
        return LabelClasses(self.names)

    def logits_of(self, predictions: Tensor) -> Tensor:
        wide = predictions.double()
        logits = wide.logit() if self.num_classes == 2 else wide.log()
        return logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).float()

    def agreement(self, logits: Tensor, labels: Tensor) -> float:
        return auc_of_classes(logits[:, 0] if self.num_classes == 2 else logits, labels)


CLASS_LABELS = ClassLabels()


@dataclass(frozen=True)
class NumberLabels:
    """Labels that are numbers: a squared error, and errors in the label's unit."""

    within: LabelRange

    mean_share: float = math.nan
    """Mean of the training labels as a share of the range: the constant prediction beside which
    every figure stands. NaN where nothing is measured."""

    columns = ("value",)
    shape_of_row = ()
    slope_of_residual = 2.0
    stored_type = torch.float32
    audited = LabelNumbers()
    meaning_of_bounds = (
        "Labels are numbers: every leak AUC is that of distinguishing the two ends of their range. "
        "Values closer to each other are distinguished less well."
    )

    def in_units(self, predictions: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.within.values(predictions)

    def describe(self, labels: Tensor) -> str:
        """Return the bounds and the spread of the labels in words."""
        spread = self.within.width * float(labels.double().std(correction=0))
        return f"numbers from {self.within.in_words} with a standard deviation of {spread:.4g}"

    def loss(self, outputs: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
        """Return the mean squared error, in units of the squared range."""
        squares = residuals_of(outputs, labels).square()
        return (squares if weights.of_rows is None else weights.of_rows * squares).mean()

    def predicted(self, outputs: Tensor) -> Tensor:
        return shares_of(outputs)

    def measure(self, outputs: Tensor, labels: Tensor) -> PredictionFigures:
        labels, width = labels.double(), self.within.width
        errors = shares_of(outputs.double()) - labels
        of_constant = self.mean_share - labels
        spread = float((labels - labels.mean()).square().sum())
        unexplained = float(errors.square().sum())
        return PredictionFigures(
            loss=float(errors.square().mean()),
            rmse=width * _root_mean_square(errors),
            mae=width * float(errors.abs().mean()),
            r2=1 - unexplained / spread if spread > 0 else math.nan,
            constant_rmse=width * _root_mean_square(of_constant),
            constant_mae=width * float(of_constant.abs().mean()),
        )

    def logits_of(self, predictions: Tensor) -> Tensor:
        return predictions

    def agreement(self, logits: Tensor, labels: Tensor) -> float:
        labels = labels.double()
        spread = float((labels - labels.mean()).square().sum())
        missed = float((labels - logits[:, 0].double()).square().sum())
        return 1 - missed / spread if spread > 0 else math.nan


LabelKind: TypeAlias = ClassLabels | NumberLabels


def kind_of(settings: DataSettings, training: Tensor | None = None) -> LabelKind:
    """Return the kind of labels; ``training`` are those of the training rows, to measure with."""
    if settings.label_range is None:
        return ClassLabels(settings.num_classes, settings.class_names)
    mean = math.nan if training is None else float(training.double().mean())
    return NumberLabels(settings.label_range, mean)


def _root_mean_square(values: Tensor) -> float:
    return float(torch.sqrt(values.double().square().mean()))


def residuals_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return output less label, which may be a noisy one, as a share of the range, (rows,)."""
    return outputs + (_MIDDLE - labels)


def shares_of(outputs: Tensor) -> Tensor:
    """Return the predictions as shares of the range, (rows,), within 0 and 1."""
    return (outputs + _MIDDLE).clamp(0.0, 1.0)


class OrdinaryObjective:
    """Trains the top model on the loss whose gradient is sent."""

    def __init__(
        self,
        top: TopModel,
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
        descend(step.loss, self._trained, self._optimizer)
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
