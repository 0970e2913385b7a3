"""Models that learn from true labels once the last answer of a run has left.

Nothing of them is ever sent, and no answer comes after them, so they cost no privacy: the bottom
model stays as the released labels made it, and only this party's own predictions gain.

- The refitted top model is a copy that was fitted at the activations of each row's last visit.
- The model of this party's own features says what it can predict without any other party, and
  answers for it while a passive party is away.

Rows and classes count in their loss what they count in the joint model's. A tenth of the training
rows is held out to decide how long to train.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from splitveil.active_party.defenses.objective import descend
from splitveil.active_party.training.cut_memory import CutMemory
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind
from splitveil.active_party.training.predictions import LossWeights
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.models.settings import MlpModel, TabularModel

HELD_OUT_SHARE = 0.1
HIDDEN_ALONE = (64, 32)
_PREDICTED_AT_ONCE = 16_384


class KnownRows(NamedTuple):
    """This party's data about all aligned rows, on one device."""

    labels: Tensor  # true labels, (aligned,) float32
    features: Features | None
    memory: CutMemory | None = None  # their last activations; None for a model of own features
    weights: LossWeights = LossWeights()
    kind: LabelKind = CLASS_LABELS

    def inputs(self, rows: Tensor) -> tuple[Any, ...]:
        own = None if self.features is None else self.features.rows(rows.to(self.labels.device))
        return (own,) if self.memory is None else (self.memory.at(rows), own)

    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Return a model's logits of some rows, (rows,) or (rows, classes), in evaluation mode."""
        parts = torch.split(rows, _PREDICTED_AT_ONCE)
        return torch.cat([predict_in_blocks(model, *self.inputs(part)) for part in parts])

    def loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of some rows, weighted as the training was."""
        of_rows, labels = self.weights.of_rows, self.labels[rows.to(self.labels.device)]
        if of_rows is not None:
            of_rows = of_rows[rows.to(of_rows.device)]
        return self.kind.loss(logits, labels, self.weights._replace(of_rows=of_rows))


class Fitting(NamedTuple):
    build_optimizer: Callable[[nn.Module], Optimizer]
    batch_size: int
    seed: int
    """Seed of the order of the rows and of the held-out tenth."""


def refit_top(model: nn.Module, known: KnownRows, training: Tensor, fitting: Fitting) -> nn.Module:
    """Return a copy of the top model fitted to the true labels, or as it is if that is no worse."""
    return _fitted(model, known, training, fitting, 20, 3, may_stay=True)


def train_alone(
    model: nn.Module, known: KnownRows, training: Tensor, fitting: Fitting
) -> nn.Module:
    """Return a trained copy of a model of own features."""
    return _fitted(model, known, training, fitting, 50, 5, may_stay=False)


def _fitted(
    model: nn.Module,
    known: KnownRows,
    training: Tensor,
    fitting: Fitting,
    max_epochs: int,
    patience_epochs: int,
    *,
    may_stay: bool,
) -> nn.Module:
    """Return the best state of a copy by its loss on held-out rows, for at least 2 rows."""
    generator = torch.Generator().manual_seed(fitting.seed)
    shuffled = training[torch.randperm(len(training), generator=generator)]
    num_held_out = max(1, round(HELD_OUT_SHARE * len(training)))
    held_out, fitted = shuffled[:num_held_out], shuffled[num_held_out:]
    candidate = copy.deepcopy(model)
    optimizer = fitting.build_optimizer(candidate)

    def loss_now() -> float:
        return float(known.loss(known.logits(candidate, held_out), held_out))

    best, best_loss = copy.deepcopy(candidate), loss_now() if may_stay else math.inf
    without_gain = 0
    with torch.random.fork_rng(devices=()):  # dropout must not disturb a run that goes on
        torch.default_generator.manual_seed(fitting.seed)
        for _ in range(max_epochs):
            candidate.train()
            order = fitted[torch.randperm(len(fitted), generator=generator)]
            for rows in torch.split(order, fitting.batch_size):
                loss = known.loss(candidate(*known.inputs(rows)), rows)
                descend(loss, candidate.parameters(), optimizer)
            reached = loss_now()
            if reached < best_loss:
                best, best_loss, without_gain = copy.deepcopy(candidate), reached, 0
            else:
                without_gain += 1
            if without_gain == patience_epochs:
                break
    return best


class LogitsAlone(nn.Module):
    """Dense layers from features to logits, (rows,) for two classes or numbers, or per class."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: Features) -> Tensor:
        logits: Tensor = self.layers(features)
        return logits.squeeze(1) if logits.shape[1] == 1 else logits


def build_alone(encoder: FeatureEncoder, num_classes: int, seed: int) -> nn.Module:
    """Return the untrained model of own features, on the CPU: ``tabular`` if there are bins."""
    width = 1 if num_classes <= 2 else num_classes
    settings = (
        TabularModel(kind="tabular", hidden=HIDDEN_ALONE)
        if encoder.bins
        else MlpModel(kind="mlp", hidden=HIDDEN_ALONE)
    )
    return LogitsAlone(build_bottom_model(settings, encoder, (width,), seed=seed))


def predictions_alone(
    model: nn.Module, features: Features, kind: LabelKind = CLASS_LABELS
) -> NDArray[np.float32]:
    """Return probabilities, (rows,) or (rows, classes), or numbers in the label's unit, (rows,)."""
    found = predict_in_blocks(model, features, link=kind.predicted)
    return kind.in_units(np.asarray(found.numpy(), np.float32))
