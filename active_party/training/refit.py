"""Fits a copy of the top model to the true labels once the last answer has left.

Nothing of it is ever sent, so it costs no privacy: the bottom model stays as the released labels
made it, and only this party's predictions gain. The activations are those of each row's last visit.
A tenth of the training rows is held out to decide how long to train; the copy without any further
step is a candidate too.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitveil.active_party.defenses.objective import descend
from splitveil.active_party.training.cut_memory import CutMemory
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind
from splitveil.active_party.training.predictions import LossWeights
from splitveil.common.data.features import Features
from splitveil.common.models.blocks import predict_in_blocks

MAX_EPOCHS = 20
PATIENCE_EPOCHS = 3
HELD_OUT_SHARE = 0.1

_PREDICTED_AT_ONCE = 16_384


class KnownRows(NamedTuple):
    memory: CutMemory

    features: Features | None

    labels: Tensor
    """True labels, (aligned,) float32."""

    weights: LossWeights = LossWeights()

    kind: LabelKind = CLASS_LABELS


class Fitting(NamedTuple):
    build_optimizer: Callable[[nn.Module], Optimizer]
    batch_size: int
    seed: int
    """Seed of the order of the rows and of the held-out tenth."""


def refit_top(model: nn.Module, known: KnownRows, training: Tensor, fitting: Fitting) -> nn.Module:
    """Return a copy of the top model that was trained on the true labels.

    Shapes: ``training`` (training rows,).
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    shuffled = training[torch.randperm(len(training), generator=generator)]
    num_held_out = max(1, round(HELD_OUT_SHARE * len(training)))
    held_out, fitted = shuffled[:num_held_out], shuffled[num_held_out:]
    candidate = copy.deepcopy(model)
    optimizer = fitting.build_optimizer(candidate)
    best, best_loss = copy.deepcopy(candidate), _loss(candidate, known, held_out)
    without_gain = 0
    with torch.random.fork_rng(devices=()):  # dropout must not disturb a run that goes on
        torch.default_generator.manual_seed(fitting.seed)
        for _ in range(MAX_EPOCHS):
            candidate.train()
            order = fitted[torch.randperm(len(fitted), generator=generator)]
            for rows in torch.split(order, fitting.batch_size):
                loss = _loss_of(_logits(candidate, known, rows), known, rows)
                descend(loss, candidate.parameters(), optimizer)
            loss_now = _loss(candidate, known, held_out)
            if loss_now < best_loss:
                best, best_loss, without_gain = copy.deepcopy(candidate), loss_now, 0
            else:
                without_gain += 1
            if without_gain == PATIENCE_EPOCHS:
                break
    return best


def predict_logits(model: nn.Module, known: KnownRows, rows: Tensor) -> Tensor:
    """Return the logits of some rows at their last activations, (rows,) or (rows, classes)."""
    parts = [
        predict_in_blocks(model, *_inputs(known, part))
        for part in torch.split(rows, _PREDICTED_AT_ONCE)
    ]
    return torch.cat(parts).cpu()


def _loss(model: nn.Module, known: KnownRows, rows: Tensor) -> float:
    logits = predict_logits(model, known, rows).to(known.labels.device)
    return float(_loss_of(logits, known, rows))


def _loss_of(logits: Tensor, known: KnownRows, rows: Tensor) -> Tensor:
    of_rows = known.weights.of_rows
    if of_rows is not None:
        of_rows = of_rows[rows.to(of_rows.device)]
    weights = known.weights._replace(of_rows=of_rows)
    return known.kind.loss(logits, _labels(known, rows), weights)


def _logits(model: nn.Module, known: KnownRows, rows: Tensor) -> Tensor:
    logits: Tensor = model(*_inputs(known, rows))
    return logits


def _inputs(known: KnownRows, rows: Tensor) -> tuple[Tensor, Features | None]:
    own = None if known.features is None else known.features.rows(rows.to(known.labels.device))
    return known.memory.at(rows), own


def _labels(known: KnownRows, rows: Tensor) -> Tensor:
    return known.labels[rows.to(known.labels.device)]
