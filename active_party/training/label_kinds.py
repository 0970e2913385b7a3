"""The kinds of labels: classes, or numbers within bounds. What follows from the kind is here.

A kind says how an output of the top model is compared with a label, what it predicts, and how
predictions are measured. The ordinary objective learns from the loss of a kind.

Labels that are numbers are shares of their range, within 0 and 1 (`common.data.settings`);
figures about them are in the label's unit. An output of the top model is measured from the middle
of the range, so that a model whose output is 0 says as little as one of two classes whose logit is
0. Training uses it as it is; a prediction is cut off at the bounds, which only brings it closer to
the label.

Logits of shape (rows,) belong to two classes and to a sigmoid, for label 1 against 0. Logits of
shape (rows, classes) belong to more classes and to a softmax, and labels are class indices. The AUC
of more than two classes is the mean of the AUCs of each class's probability, the class against the
rest; a class without examples, or without any others, does not have an AUC and is left out.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    log_softmax,
    one_hot,
    softplus,
)
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses.interface import Step, TopModel, descend
from splitveil.common.data.settings import DataSettings, LabelRange
from splitveil.common.models.data_parallel import DataParallelModel, go_on
from splitveil.common.models.optimizers import trained_of
from splitveil.common.privacy.figures import PredictionFigures
from splitveil.common.privacy.leakage import areas
from splitveil.common.privacy.number_attacks import LabelNumbers
from splitveil.common.privacy.observation import LabelClasses
from splitveil.common.run.progress import State

_LARGEST_LOGIT = 30.0
_MIDDLE = 0.5
NUM_BINS = 15  # of the calibration error


class LossWeights(NamedTuple):
    """The weights of rows and classes in a loss; None if all are 1."""

    of_rows: Tensor | None = None
    """(rows,), positive, a mean of 1 over the training rows."""

    of_classes: Tensor | None = None
    """(classes,), positive; of label 0 and label 1 if there are two."""


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


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: LossWeights) -> Tensor:
    """Return the cross entropy with weights, summed and divided by the number of rows.

    A row's loss depends on no label or weight of another row: dividing by the sum of the batch's
    weights would let one row's label move all gradients of the batch.
    """
    if weights.of_rows is None and weights.of_classes is None:
        return cross_entropy_of(logits, labels)
    if logits.ndim == 1:
        low, high = (1.0, 1.0) if weights.of_classes is None else weights.of_classes
        losses = high * labels * softplus(-logits) + low * (1 - labels) * softplus(logits)
    else:
        shares = one_hot(labels.long(), logits.shape[1]) if labels.ndim == 1 else labels
        if weights.of_classes is not None:
            shares = shares * weights.of_classes
        losses = -(shares * log_softmax(logits, dim=1)).sum(dim=1)
    return (losses if weights.of_rows is None else weights.of_rows * losses).mean()


def cross_entropy_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over some rows, with its graph."""
    if logits.ndim == 1:
        return binary_cross_entropy_with_logits(logits, labels)
    return cross_entropy(logits, labels.long() if labels.ndim == 1 else labels)


def probabilities_of(logits: Tensor) -> Tensor:
    """Return the predicted probabilities, (rows,) for label 1 or (rows, classes)."""
    return torch.sigmoid(logits) if logits.ndim == 1 else torch.softmax(logits, dim=1)


def _mean_of_defined(aucs: Sequence[float]) -> float:
    defined = [area for area in aucs if not math.isnan(area)]
    return statistics.fmean(defined) if defined else math.nan


def measure_predictions(
    logits: Tensor, labels: Tensor, names: Sequence[str] = ()
) -> PredictionFigures:
    """Measure the predictions of a whole split; several classes have names.

    A peer waits for this, and may choose the rows: the operations depend on no label, and an AUC of
    rows of one class is NaN.
    """
    loss = float(cross_entropy_of(logits, labels))
    if logits.ndim == 1:
        error = adaptive_calibration_error(logits.sigmoid(), labels)
        precision = average_precision(logits, labels == 1)
        auc = _auc(logits, labels == 1)
        return PredictionFigures(loss, auc, error, precision)
    # In float64: a softmax in float32 makes ties of the most certain rows.
    probabilities = probabilities_of(logits.double())
    members = [labels == index for index in range(logits.shape[1])]
    aucs = [_auc(*one) for one in zip(probabilities.T, members, strict=True)]
    precisions = [average_precision(*one) for one in zip(probabilities.T, members, strict=True)]
    errors = [
        adaptive_calibration_error(scores, member.double())
        for scores, member in zip(probabilities.T, members, strict=True)
    ]
    hits = probabilities.argmax(dim=1) == labels
    return PredictionFigures(
        loss,
        _mean_of_defined(aucs),
        statistics.fmean(errors),
        _mean_of_defined(precisions),
        float(hits.double().mean()),
        dict(zip(names or map(str, range(len(aucs))), aucs, strict=True)),
    )


def auc_of_classes(logits: Tensor, labels: Tensor) -> float:
    """Return the AUC of `measure_predictions`, which takes a sixth of the time of all figures."""
    if logits.ndim == 1:
        return _auc(logits, labels == 1)
    columns = enumerate(probabilities_of(logits.double()).T)
    return _mean_of_defined([_auc(scores, labels == index) for index, scores in columns])


def _auc(scores: Tensor, positive: Tensor) -> float:
    return float(areas(scores.detach().double()[None], positive)[0])


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the precision-recall curve, as a sum of steps; NaN without a positive.

    AP = sum over thresholds of precision x gain in recall

    as scikit-learn's ``average_precision_score``. An order by chance has the share of positives.
    """
    ordered = -scores.double()
    _, group, counts = torch.unique(ordered, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(counts), dtype=torch.float64, device=scores.device)
    hits = hits.index_add(0, group, positive.double())
    found = hits.cumsum(0)
    return float((hits * found / counts.cumsum(0)).sum() / found[-1])


def adaptive_calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the adaptive calibration error, between 0 and 1.

    ACE = mean over bins of |share of positives in the bin - mean prediction in the bin|

    with bins of equally many examples, in the order of their predictions (Nixon et al., "Measuring
    Calibration in Deep Learning", 2019): the expected calibration error (ECE) with equal-mass bins
    (Roelofs et al., AISTATS 2022). With two classes, both classes give the same error, so that one
    is enough. Random labels at the predicted rates do not reach 0: a bin of n examples is off by
    about 0.8 sqrt(p (1 - p) / n) by chance.

    Shapes: ``probabilities`` (examples,), ``labels`` (examples,).
    """
    if probabilities.ndim != 1 or probabilities.shape != labels.shape or not len(labels):
        raise ValueError(
            f"expected one label for each of some probabilities, got {tuple(probabilities.shape)} "
            f"and {tuple(labels.shape)}"
        )
    ordered, order = probabilities.double().sort(stable=True)
    gaps = labels.to(ordered).index_select(0, order) - ordered
    bins = gaps.tensor_split(min(NUM_BINS, len(gaps)))
    return float(torch.stack([one.mean().abs() for one in bins]).mean())
