"""Wide and deep, cut between the deep layers.

    logit = deep(cut layer) + wide(own features), one for each of several classes

As Marvell's authors use it for Criteo and Avazu (Li et al., "Label Leakage and Protection in
Two-party Split Learning", ICLR 2022): six deep layers of 128 with the cut after the third. Layers
start as torch starts them, the embeddings of the deep part uniform in +-0.05 as Keras does, and the
wide part at 0, where a linear model may start: categories that no row has yet say nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.mlp import FeatureInput, dense_relu, without_single
from splitveil.common.models.settings import WideDeepModel

EMBEDDING_RANGE = 0.05


class WideDeepBottom(nn.Module):
    """From features to the cut layer, the lower deep layers."""

    def __init__(
        self, settings: WideDeepModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        super().__init__()
        _check_no_image(shapes, "bottom_model")
        cut_dim = math.prod(cut_shape)
        if settings.hidden[-1] != cut_dim:
            raise SettingsError(
                f"bottom_model.hidden: the last width, {settings.hidden[-1]}, is the cut layer's, "
                f"and contract.cut_shape {list(cut_shape)} has {cut_dim} values"
            )
        self.cut_shape = tuple(cut_shape)
        self.input = FeatureInput(shapes, settings.embedding_dim)
        if self.input.embedding is not None:
            nn.init.uniform_(self.input.embedding.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        self.layers = dense_relu(self.input.output_dim, settings.hidden)

    def forward(self, features: Features) -> Tensor:
        """Return the activation, (rows, *cut shape)."""
        activation: Tensor = self.layers(self.input(features))
        return activation.reshape(-1, *self.cut_shape)


class WideDeepTop(nn.Module):
    """From the cut layer and the active party's own features to logits."""

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
        """Return one logit per row, (rows,), or several, (rows, logits)."""
        deep = without_single(self.deep(self.layers(activation.flatten(1))))
        logits: Tensor = deep + self.wide(features)
        return logits


class WidePart(nn.Module):
    """A linear model: for each logit one weight per category, one per number.

    The bias is the deep part's.
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
        """Return one logit per row, (rows,), or several, (rows, logits)."""
        values: Tensor = self.input(features)
        if self.numeric is None:
            return self._summed(values)
        numeric_dim = len(self.numeric)
        logits: Tensor = values[:, :numeric_dim] @ self.numeric
        return logits + self._summed(values[:, numeric_dim:])

    def _summed(self, weights: Tensor) -> Tensor:
        """Add up the weights of a row's categories."""
        if self._num_logits == 1:
            return weights.sum(dim=1)
        return weights.reshape(len(weights), -1, self._num_logits).sum(dim=1)


def _check_no_image(shapes: FeatureShapes, role: str) -> None:
    if shapes.image_shape is not None:
        raise SettingsError(f"{role}: wide_deep takes numbers and categories, no images")
