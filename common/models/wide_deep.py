"""Wide and deep bottom and top models, cut between the deep layers.

    logit = deep(cut layer) + wide(own features), for each class if there are more than two

The authors of Marvell use such a network for Criteo and Avazu (Li et al., "Label Leakage and
Protection in Two-party Split Learning", ICLR 2022): six deep layers of 128 units with the cut after
the third. Layers have torch's default initial weights, the embeddings of the deep part are uniform
in +-0.05 as in Keras, and the wide part starts at 0, as a linear model may: a category that no row
has had yet contributes nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.mlp import DenseBottom, FeatureInput, dense_relu, without_single
from splitveil.common.models.settings import WideDeepModel

EMBEDDING_RANGE = 0.05


class WideDeepBottom(DenseBottom):
    """Maps features to the activation: the lower deep layers."""

    def __init__(
        self, settings: WideDeepModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        _check_no_image(shapes, "bottom_model")
        cut_dim = math.prod(cut_shape)
        if settings.hidden[-1] != cut_dim:
            raise SettingsError(
                f"bottom_model.hidden: the last width, {settings.hidden[-1]}, is the cut layer's, "
                f"and contract.cut_shape {list(cut_shape)} has {cut_dim} values"
            )
        super().__init__(settings.embedding_dim, shapes, cut_shape)
        if self.input.embedding is not None:
            nn.init.uniform_(self.input.embedding.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        self.layers = dense_relu(self.input.output_dim, settings.hidden)


class WideDeepTop(nn.Module):
    """Maps the activation and the active party's own features to logits."""

    def __init__(
        self,
        settings: WideDeepModel,
        cut_shape: Sequence[int],
        shapes: FeatureShapes | None,
        num_logits: int = 1,
    ) -> None:
        super().__init__()
        if shapes is None:
            raise SettingsError(
                "top_model: the wide part of wide_deep reads the active party's own features: set "
                "data.features, or kind: mlp for the deep part alone"
            )
        self.layers = dense_relu(math.prod(cut_shape), settings.hidden)
        self.deep = nn.Linear(settings.hidden[-1], num_logits)
        self.wide = WidePart(shapes, num_logits)

    def forward(self, activation: Tensor, features: Features) -> Tensor:
        deep = without_single(self.deep(self.layers(activation.flatten(1))))
        logits: Tensor = deep + self.wide(features)
        return logits


class WidePart(nn.Module):
    """A linear model with one weight per logit and category, and per logit and number.

    It has no bias, because the deep part has one.
    """

    def __init__(self, shapes: FeatureShapes, num_logits: int = 1) -> None:
        super().__init__()
        _check_no_image(shapes, "top_model")
        self._num_logits = num_logits
        self.input = FeatureInput(shapes, embedding_dim=num_logits)
        if self.input.embedding is not None:
            nn.init.zeros_(self.input.embedding.weight)
        size = (shapes.numeric_dim,) if num_logits == 1 else (shapes.numeric_dim, num_logits)
        self.numeric = nn.Parameter(torch.zeros(size)) if shapes.numeric_dim else None

    def forward(self, features: Features) -> Tensor:
        values: Tensor = self.input(features)
        if self.numeric is None:
            return self._summed(values)
        numeric_dim = len(self.numeric)
        logits: Tensor = values[:, :numeric_dim] @ self.numeric
        return logits + self._summed(values[:, numeric_dim:])

    def _summed(self, weights: Tensor) -> Tensor:
        """Sum the weights of each row's categories."""
        if self._num_logits == 1:
            return weights.sum(dim=1)
        return weights.reshape(len(weights), -1, self._num_logits).sum(dim=1)


def _check_no_image(shapes: FeatureShapes, role: str) -> None:
    if shapes.image_shape is not None:
        raise SettingsError(f"{role}: wide_deep takes numbers and categories, but not images")
