"""Boosted trees beside a top model: the mean of both outputs often predicts better than either.

scikit-learn grows the trees, on the activation and the own numbers and slots of categories. What is
kept of them are tensors, so that they are saved, served and exported like any other model.
"""

import logging
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitveil.active_party.training.label_kinds import (
    ClassLabels,
    LabelKind,
    LossWeights,
    residuals_of,
)
from splitveil.common.data.features import Features

logger = logging.getLogger(__name__)

_DEPTH = 8
_LEAST_ROWS = 20  # of each class


class WithTrees(nn.Module):
    """The mean of a top model's outputs and those of trees.

    Nodes of all trees lie behind one another. A leaf is its own left and right child.
    """

    def __init__(self, model: nn.Module, num_nodes: int, num_trees: int, num_outputs: int) -> None:
        super().__init__()
        self.model = model
        indices, numbers = torch.zeros(num_nodes, dtype=torch.int64), torch.zeros(num_nodes)
        self.column, self.left, self.right = (nn.Buffer(indices.clone()) for _ in range(3))
        self.threshold, self.value = nn.Buffer(numbers.double()), nn.Buffer(numbers)
        self.roots = nn.Buffer(torch.zeros(num_trees, dtype=torch.int64))
        self.baseline = nn.Buffer(torch.zeros(num_outputs))

    @property
    def sizes(self) -> str:
        """The arguments after the model, for the metadata of a file."""
        return f"{len(self.value)} {len(self.roots)} {len(self.baseline)}"

    def forward(self, activation: Tensor, own: Features | None) -> Tensor:
        outputs: Tensor = self.model(activation, own)
        columns, at = columns_of(activation, own), self.roots.expand(activation.shape[0], -1)
        for _ in range(_DEPTH):
            is_left = columns.gather(1, self.column[at]) <= self.threshold[at]
            at = torch.where(is_left, self.left[at], self.right[at])
        by_output = self.value[at].reshape(activation.shape[0], -1, self.baseline.shape[0])
        found: Tensor = by_output.sum(1) + self.baseline
        return (outputs + found.view_as(outputs)) / 2


def columns_of(activation: Tensor, own: Features | None) -> Tensor:
    """Return the trees' input, (rows, columns) float32."""
    parts = [activation, *([] if own is None else [own.numeric, own.categorical])]
    return torch.cat([part.flatten(1).float() for part in parts if part is not None], dim=1)


def with_trees(
    model: nn.Module,
    columns: Tensor,
    labels: Tensor,
    kind: LabelKind,
    weights: LossWeights,
    seed: int,
) -> WithTrees | None:
    """Grow trees on some rows, and put them beside a model; None if a class has too few rows.

    Shapes: ``columns`` (rows, columns), ``labels`` and the rows' weights (rows,).
    """
    from sklearn import ensemble  # noqa: PLC0415 - it takes a second

    counts = [len(labels)]
    if isinstance(kind, ClassLabels):
        counts = torch.bincount(labels.long(), minlength=kind.num_classes).tolist()
    if min(counts) < _LEAST_ROWS:
        return None
    counted = weights.of_rows
    if weights.of_classes is not None:
        of_class = weights.of_classes[labels.long()]
        counted = of_class if counted is None else counted * of_class
    given: dict[str, Any] = {
        "max_depth": _DEPTH,
        "early_stopping": True,
        "random_state": seed,
    }
    if isinstance(kind, ClassLabels):
        grown, targets = ensemble.HistGradientBoostingClassifier(**given), labels
    else:
        grown = ensemble.HistGradientBoostingRegressor(**given)
        targets = -residuals_of(torch.zeros(len(labels)), labels)
    # Weights of 1 would take seconds: quantiles of weighted rows are found one by one.
    grown.fit(columns.numpy(), targets.numpy(), None if counted is None else counted.numpy())
    try:  # no public name gives the nodes
        predictors, baseline = attrgetter("_predictors", "_baseline_prediction")(grown)
        trees = [tree.nodes for iteration in predictors for tree in iteration]
    except AttributeError:
        logger.warning("no boosting: this version of scikit-learn keeps its trees elsewhere")
        return None
    sizes = np.array([len(nodes) for nodes in trees])
    nodes, roots = np.concatenate(trees), np.cumsum(sizes) - sizes
    found = WithTrees(model, len(nodes), len(trees), baseline.size)
    itself, leaves = np.arange(len(nodes)), nodes["is_leaf"] == 1
    for name in ("left", "right"):
        child = np.where(leaves, itself, nodes[name] + np.repeat(roots, sizes))
        getattr(found, name).copy_(torch.from_numpy(child))
    for buffer, values in {
        found.column: nodes["feature_idx"],
        found.threshold: nodes["num_threshold"],
        found.value: nodes["value"],
        found.roots: roots,
        found.baseline: baseline.ravel(),
    }.items():
        buffer.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return found
