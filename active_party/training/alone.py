"""A model of the active party's own features alone, trained once the last answer has left.

It says what this party can predict without any other, and answers for it while a passive party is
away. It learns from true labels: nothing of it is ever sent, and no answer comes after it, so it
costs no privacy, like the refitted top model. Rows and classes count in its loss what they count in
the joint model's, so that the two answer alike. A tenth of the training rows is held out to decide
how long to train.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from splitveil.active_party.defenses.objective import descend
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind
from splitveil.active_party.training.predictions import LossWeights
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.models.settings import MlpModel

HIDDEN = (64, 32)
MAX_EPOCHS = 50
PATIENCE_EPOCHS = 5
HELD_OUT_SHARE = 0.1

_AT_ONCE = 16_384
_CPU = torch.device("cpu")


class OwnRows(NamedTuple):
    """What this party knows of all aligned rows by itself."""

    features: Features
    labels: Tensor
    """(aligned,), float32."""

    weights: LossWeights = LossWeights()

    kind: LabelKind = CLASS_LABELS

    def at(self, positions: Tensor) -> tuple[Features, Tensor]:
        there = positions.to(self.labels.device)
        return self.features.rows(there).to(_CPU), self.labels[there].cpu()

    def loss_of(self, logits: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Return the loss of some rows, which counts rows and classes as the training did."""
        of_rows, of_classes = self.weights
        if of_rows is not None:
            of_rows = of_rows[positions.to(of_rows.device)].cpu()
        own = LossWeights(of_rows, None if of_classes is None else of_classes.cpu())
        return self.kind.loss(logits, labels, own)


class LogitsAlone(nn.Module):
    """Dense layers from features to outputs.

    They are (rows,) for two classes or numbers, or (rows, classes).
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: Features) -> Tensor:
        logits: Tensor = self.layers(features)
        return logits.squeeze(1) if logits.shape[1] == 1 else logits


def build_alone(encoder: FeatureEncoder, num_classes: int, seed: int) -> nn.Module:
    """Return the untrained model, on the CPU."""
    width = 1 if num_classes <= 2 else num_classes
    settings = MlpModel(kind="mlp", hidden=HIDDEN)
    return LogitsAlone(build_bottom_model(settings, encoder, (width,), seed=seed))


def train_alone(
    model: nn.Module,
    rows: OwnRows,
    training: Tensor,
    build_optimizer: Callable[[nn.Module], Optimizer],
    batch_size: int,
    seed: int,
) -> nn.Module:
    """Return the model trained on true labels: its best state by the loss on held-out rows.

    Shapes: ``training`` (training rows,).
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = training[torch.randperm(len(training), generator=generator)]
    num_held_out = max(1, round(HELD_OUT_SHARE * len(training)))
    held_out, fitted = shuffled[:num_held_out], shuffled[num_held_out:]
    optimizer = build_optimizer(model)
    best, best_loss, without_gain = copy.deepcopy(model), float("inf"), 0
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        for _ in range(MAX_EPOCHS):
            model.train()
            order = fitted[torch.randperm(len(fitted), generator=generator)]
            for batch in torch.split(order, batch_size):
                features, labels = rows.at(batch)
                loss = rows.loss_of(model(features), labels, batch)
                descend(loss, model.parameters(), optimizer)
            loss_now = float(rows.loss_of(*predicted_alone(model, rows, held_out), held_out))
            if loss_now < best_loss:
                best, best_loss, without_gain = copy.deepcopy(model), loss_now, 0
            else:
                without_gain += 1
            if without_gain == PATIENCE_EPOCHS:
                break
    return best


def predicted_alone(model: nn.Module, rows: OwnRows, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of some rows, (rows,) or (rows, classes), and their labels, (rows,)."""
    logits, labels = [], []
    for part in torch.split(positions, _AT_ONCE):
        features, own_labels = rows.at(part)
        logits.append(predict_in_blocks(model, features))
        labels.append(own_labels)
    return torch.cat(logits), torch.cat(labels)


def predictions_alone(
    model: nn.Module, features: Features, kind: LabelKind = CLASS_LABELS
) -> NDArray[np.float32]:
    """Return probabilities, (rows,) or (rows, classes), or numbers in the label's unit, (rows,)."""
    found = predict_in_blocks(model, features, link=kind.predicted)
    return kind.in_units(np.asarray(found.numpy(), np.float32))
