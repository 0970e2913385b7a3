"""Dense bottom and top models."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.models.settings import MlpModel


class FeatureInput(nn.Module):
    """Concatenates a row's features: numbers, embedded categories, flattened image.

    The categories of all columns share one table, so that one look-up serves all of them.
    """

    def __init__(self, shapes: FeatureShapes, embedding_dim: int) -> None:
        super().__init__()
        sizes = shapes.vocabulary_sizes
        self.embedding = nn.Embedding(sum(sizes), embedding_dim) if sizes else None
        starts = [sum(sizes[:column]) for column in range(len(sizes))]
        column_starts = torch.tensor(starts, dtype=torch.int64)
        self.register_buffer("column_starts", column_starts, persistent=False)
        image_dim = math.prod(shapes.image_shape) if shapes.image_shape else 0
        self.output_dim = shapes.numeric_dim + len(sizes) * embedding_dim + image_dim

    def forward(self, features: Features) -> Tensor:
        """Return the vectors, (rows, output_dim), float32."""
        parts = []
        if features.numeric is not None:
            parts.append(features.numeric)
        if features.categorical is not None and self.embedding is not None:
            slots = features.categorical + self.get_buffer("column_starts")
            parts.append(self.embedding(slots).flatten(1))
        if features.image is not None:
            parts.append(image_as_float(features.image).flatten(1))
        return joined(parts)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the columns of all parts side by side, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


class DenseBottom(nn.Module):
    """Maps features to the cut layer's activation; a subclass sets the dense ``layers``."""

    layers: nn.Module

    def __init__(self, embedding_dim: int, shapes: FeatureShapes, cut_shape: Sequence[int]) -> None:
        super().__init__()
        self.cut_shape = tuple(cut_shape)
        self.input = FeatureInput(shapes, embedding_dim)

    def forward(self, features: Features) -> Tensor:
        activation: Tensor = self.layers(self.input(features))
        return activation.reshape(-1, *self.cut_shape)


class MlpBottom(DenseBottom):
    """Maps features to the cut layer's activation by dense layers."""

    def __init__(self, settings: MlpModel, shapes: FeatureShapes, cut_shape: Sequence[int]) -> None:
        super().__init__(settings.embedding_dim, shapes, cut_shape)
        self.layers = _dense_layers(
            settings,
            self.input.output_dim,
            math.prod(cut_shape),
            nn.ReLU() if settings.output_activation == "relu" else None,
        )


class MlpTop(nn.Module):
    """Maps the activation, and the active party's own features if it has any, to logits."""

    def __init__(
        self,
        settings: MlpModel,
        cut_shape: Sequence[int],
        shapes: FeatureShapes | None,
        num_logits: int = 1,
    ) -> None:
        super().__init__()
        self.input = FeatureInput(shapes, settings.embedding_dim) if shapes else None
        own_dim = self.input.output_dim if self.input else 0
        self.layers = _dense_layers(settings, math.prod(cut_shape) + own_dim, num_logits, None)

    def forward(self, activation: Tensor, features: Features | None) -> Tensor:
        parts = [activation.flatten(1)]
        if self.input is not None and features is not None:
            parts.append(self.input(features))
        logits: Tensor = self.layers(joined(parts))
        return without_single(logits)


def without_single(logits: Tensor) -> Tensor:
    """Drop the logit dimension if each row has only one logit."""
    return logits.squeeze(1)


def dense_relu(input_dim: int, widths: Sequence[int]) -> nn.Sequential:
    """Return dense layers, ``hidden_0`` and so on, each with ReLU."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(widths):
        layers[f"hidden_{number}"] = nn.Sequential(nn.Linear(input_dim, width), nn.ReLU())
        input_dim = width
    return nn.Sequential(layers)


def _dense_layers(
    settings: MlpModel, input_dim: int, output_dim: int, output_activation: nn.Module | None
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(settings.hidden):
        activation = nn.ReLU() if settings.activation == "relu" else nn.LeakyReLU()
        layers[f"hidden_{number}"] = nn.Sequential(nn.Linear(input_dim, width), activation)
        if settings.dropout:
            layers[f"dropout_{number}"] = nn.Dropout(settings.dropout)
        input_dim = width
    output = nn.Linear(input_dim, output_dim)
    layers["output"] = nn.Sequential(output, output_activation) if output_activation else output
    return nn.Sequential(layers)
