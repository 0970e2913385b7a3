"""Models that learn from true labels once the last answer of a run has left.

Nothing of them is ever sent, and no answer comes after them, so they cost no privacy: the bottom
model stays as the released labels made it, and only this party's own predictions gain.

- The refitted top model is a new one, fitted at the activations of each row's last visit. On the
  held-out rows it has to be better than the trained one, or that one stays.
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
from torch.optim.lr_scheduler import LambdaLR

from splitveil.active_party.defenses.interface import descend
from splitveil.active_party.training.boosting import columns_of, with_trees
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, LossWeights
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.models.settings import MlpModel, TabularModel
from splitveil.common.privacy.figures import PredictionFigures
from splitveil.common.record.progress import ProgressBar
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions

HELD_OUT_SHARE = 0.1
HIDDEN_ALONE = (64, 32)
_PREDICTED_AT_ONCE = 16_384
_PATIENCE_EPOCHS = 5
_MOST_COLUMNS_OF_TREES = 1024  # images would take hours
_MOST_NUMBERS_OF_TREES = 2**26  # of all rows, each 8 bytes while trees are grown
_MOST_ROWS_OF_TREES = 2**18  # more take as much longer, and are hardly better
_HELD_OUT_SEED = 0  # of every fit, so that a later one is not compared on rows of an earlier one


class CutMemory:
    """The last activation of each aligned row; NaN for a row that was not visited yet."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._values: Tensor | None = None

    @property
    def is_filled(self) -> bool:
        return self._values is not None

    def note(self, rows: Tensor, activation: Tensor) -> None:
        """Remember the activations of a batch.

        Shapes: ``rows`` (batch,), ``activation`` (batch, *cut_shape).
        """
        if self._values is None:
            shape = (self._num_rows, *activation.shape[1:])
            self._values = torch.full(shape, torch.nan, device=self._device)
        self._values[rows.to(self._device)] = activation.detach().to(self._values)

    def at(self, rows: Tensor) -> Tensor:
        """Return the last activations of some rows, (rows, *cut_shape) float32."""
        if self._values is None:
            raise RuntimeError("no activation was noted yet")
        return self._values[rows.to(self._device)]

    def is_noted(self, rows: Tensor) -> Tensor:
        """Return which rows were visited, (rows,) bool on the CPU; no peer may send NaN."""
        first: Tensor = self.at(rows).flatten(1)[:, 0]
        return ~first.isnan().cpu()

    def state_dict(self) -> State:
        return {} if self._values is None else {"values": self._values}

    def load_state_dict(self, state: State) -> None:
        values = state.get("values")
        if values is not None and len(values) != self._num_rows:
            raise ValueError(f"expected activations of {self._num_rows} rows, got {len(values)}")
        self._values = None if values is None else values.to(self._device, copy=True)


class KnownRows(NamedTuple):
    """This party's data about all aligned rows, on one device."""

    labels: Tensor  # true labels, (aligned,) float32
    features: Features | None
    memory: CutMemory | None = None  # their last activations; None for a model of own features
    weights: LossWeights = LossWeights()
    kind: LabelKind = CLASS_LABELS

    def remembering(self, activations: Tensor) -> "KnownRows":
        """Return the same rows with their activations, (aligned, *cut_shape); NaN where unknown."""
        memory = CutMemory(len(activations), self.labels.device)
        memory.load_state_dict({"values": activations})
        return self._replace(memory=memory)

    def inputs(self, rows: Tensor) -> tuple[Any, ...]:
        own = None if self.features is None else self.features.rows(rows.to(self.labels.device))
        return (own,) if self.memory is None else (self.memory.at(rows), own)

    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Return a model's logits of some rows, (rows,) or (rows, classes), in evaluation mode."""
        parts = torch.split(rows, _PREDICTED_AT_ONCE)
        return torch.cat([predict_in_blocks(model, *self.inputs(part)) for part in parts])

    def measure(self, model: nn.Module, positions: Positions) -> PredictionFigures | None:
        """Measure a model's predictions of some rows; None without rows."""
        if not len(positions):
            return None
        rows = torch.from_numpy(positions.copy())
        labels = self.labels[rows.to(self.labels.device)].cpu()
        return self.kind.measure(self.logits(model, rows).cpu(), labels)

    def with_trees(self, model: nn.Module, rows: Tensor, seed: int) -> nn.Module | None:
        """Grow trees on some rows, in any order; return the mean with a model, if rows suffice."""
        width = columns_of(*self.inputs(rows[:1])).shape[1]
        if width > _MOST_COLUMNS_OF_TREES:
            return None
        rows = rows[: min(_MOST_ROWS_OF_TREES, _MOST_NUMBERS_OF_TREES // max(width, 1))]
        parts = torch.split(rows, _PREDICTED_AT_ONCE)
        columns = torch.cat([columns_of(*self.inputs(part)).cpu() for part in parts])
        of_rows, of_classes = (None if one is None else one.cpu() for one in self.weights)
        weights = LossWeights(None if of_rows is None else of_rows[rows], of_classes)
        labels = self.labels.cpu()[rows]
        found = with_trees(model, columns, labels, self.kind, weights, seed)
        return None if found is None else found.to(self.labels.device)

    def loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of some rows, weighted as the training was."""
        of_rows, labels = self.weights.of_rows, self.labels[rows.to(self.labels.device)]
        if of_rows is not None:
            of_rows = of_rows[rows.to(of_rows.device)]
        return self.kind.loss(logits, labels, self.weights._replace(of_rows=of_rows))


class Fitting(NamedTuple):
    """How a model is trained on rows that are all at hand."""

    build_optimizer: Callable[[nn.Module], Optimizer]
    batch_size: int
    seed: int
    """Seed of the order of the rows, and of the model's draws."""
    epochs: int  # at most; fewer if the loss on the held-out rows no longer falls
    schedule: Callable[[int, int], float] = lambda _step, _total_steps: 1.0
    """Maps a step and the steps of all epochs to the multiplier of the learning rate."""
    boosting: bool = False
    """True to try the mean with boosted trees."""


def fit(
    model: nn.Module,
    known: KnownRows,
    training: Tensor,
    fitting: Fitting,
    trained: nn.Module | None = None,
) -> nn.Module:
    """Fit a new model to the true labels of the training rows, at least 2.

    Returns a copy of the model as it was after its best epoch, by the loss on held-out rows, or its
    mean with boosted trees, if that is better; or the trained model, if there is one whose loss is
    no larger. What is given is changed in its mode only.
    """
    if known.memory is not None:
        training = training[known.memory.is_noted(training)]
    generator = torch.Generator().manual_seed(_HELD_OUT_SEED)
    shuffled = training[torch.randperm(len(training), generator=generator)]
    generator.manual_seed(fitting.seed)
    num_held_out = max(1, round(HELD_OUT_SHARE * len(training)))
    held_out, fitted = shuffled[:num_held_out], shuffled[num_held_out:]

    def loss_of(one: nn.Module) -> float:
        return float(known.loss(known.logits(one, held_out), held_out))

    candidate = copy.deepcopy(model)
    optimizer = fitting.build_optimizer(candidate)
    total_steps = fitting.epochs * math.ceil(len(fitted) / fitting.batch_size)
    schedule = LambdaLR(optimizer, lambda step: fitting.schedule(step, total_steps))
    best, best_loss, without_gain = model, math.inf, 0
    bar = ProgressBar("fitting an own model", "epochs", fitting.epochs)
    with torch.random.fork_rng(devices=()), bar:  # dropout must not disturb a run that goes on
        torch.default_generator.manual_seed(fitting.seed)
        for _ in range(fitting.epochs):
            candidate.train()
            order = fitted[torch.randperm(len(fitted), generator=generator)]
            for rows in torch.split(order, fitting.batch_size):
                loss = known.loss(candidate(*known.inputs(rows)), rows)
                descend(loss, candidate.parameters(), optimizer)
                schedule.step()
            reached = loss_of(candidate)
            without_gain += 1
            if reached < best_loss:
                best, best_loss, without_gain = copy.deepcopy(candidate), reached, 0
            bar.advance()
            if without_gain == _PATIENCE_EPOCHS:
                break
    mean = known.with_trees(best, fitted, fitting.seed) if fitting.boosting else None
    if mean is not None and (reached := loss_of(mean)) < best_loss:
        best, best_loss = mean, reached
    return best if trained is None or best_loss < loss_of(trained) else trained


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
