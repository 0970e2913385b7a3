"""Dense bottom and top models, and wide and deep ones, cut between the deep layers.

    wide and deep    logit = deep(cut layer) + wide(own features), for each class if more than two

The authors of Marvell use a wide and deep network for Criteo and Avazu (Li et al., "Label Leakage
and Protection in Two-party Split Learning", ICLR 2022): six deep layers of 128 units with the cut
after the third. Layers have torch's default initial weights, the embeddings of the deep part are
uniform in +-0.05 as in Keras, and the wide part starts at 0, as a linear model may: a category that
no row has had yet contributes nothing.
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Sequence

import torch
from rtdl_num_embeddings import PiecewiseLinearEmbeddings
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import DenseModel, TabularModel, WideDeepModel

EMBEDDING_RANGE = 0.05


class FeatureInput(nn.Module):
    """Concatenates a row's features: numbers, embedded categories, flattened image.

    The categories of all columns share one table, so that one look-up serves all of them. Numbers
    with bins are embedded if ``number_dim`` is not 0.
    """

    def __init__(self, shapes: FeatureShapes, embedding_dim: int, number_dim: int = 0) -> None:
        super().__init__()
        self.numbers = NumberEmbedding(shapes, number_dim) if number_dim and shapes.bins else None
        numeric_dim = self.numbers.output_dim if self.numbers else shapes.numeric_dim
        sizes = shapes.vocabulary_sizes
        self.embedding = nn.Embedding(sum(sizes), embedding_dim) if sizes else None
        starts = [sum(sizes[:column]) for column in range(len(sizes))]
        column_starts = torch.tensor(starts, dtype=torch.int64)
        self.register_buffer("column_starts", column_starts, persistent=False)
        image_dim = math.prod(shapes.image_shape) if shapes.image_shape else 0
        self.output_dim = numeric_dim + len(sizes) * embedding_dim + image_dim

    def forward(self, features: Features) -> Tensor:
        """Return the vectors, (rows, output_dim), float32."""
        parts = []
        if features.numeric is not None:
            numbers = features.numeric
            parts.append(numbers if self.numbers is None else self.numbers(numbers))
        if features.categorical is not None and self.embedding is not None:
            slots = features.categorical + self.get_buffer("column_starts")
            parts.append(self.embedding(slots).flatten(1))
        if features.image is not None:
            parts.append(image_as_float(features.image).flatten(1))
        return joined(parts)


class NumberEmbedding(nn.Module):
    """Embeds the numbers with bins, clipped to these; the others stay as they are, and come last.

    Numbers that were equal in all training rows have a single edge, and always count as that.
    """

    def __init__(self, shapes: FeatureShapes, dim: int) -> None:
        super().__init__()
        bins, plain = shapes.bins, shapes.numeric_dim - len(shapes.bins)
        low = [*(edges[0] for edges in bins), *[-math.inf] * plain]
        high = [*(edges[-1] for edges in bins), *[math.inf] * plain]
        self.register_buffer("bounds", torch.tensor([low, high]), persistent=False)
        is_binned = torch.tensor([*(len(edges) > 1 for edges in bins), *[False] * plain])
        self.register_buffer("binned", is_binned.nonzero()[:, 0], persistent=False)
        self.register_buffer("plain", (~is_binned).nonzero()[:, 0], persistent=False)
        edges = [torch.tensor(edges) for edges in bins if len(edges) > 1]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .* feature has just two bin edges")
            # Other arguments would be for other versions of the paper; B is for dense layers.
            self.embed = (
                PiecewiseLinearEmbeddings(edges, dim, activation=False, version="B")
                if edges
                else None
            )
        self.output_dim = len(edges) * dim + len(self.get_buffer("plain"))

    def forward(self, numbers: Tensor) -> Tensor:
        """Map (rows, numbers) to (rows, output_dim)."""
        clipped = numbers.clamp(*self.get_buffer("bounds"))
        plain = clipped.index_select(1, self.get_buffer("plain"))
        if self.embed is None:
            return plain
        vectors = self.embed(clipped.index_select(1, self.get_buffer("binned"))).flatten(1)
        return joined([vectors, plain] if plain.shape[1] else [vectors])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the columns of all parts side by side, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


class DenseBottom(nn.Module):
    """Maps features to the cut layer's activation; a subclass sets the dense ``layers``."""

    layers: nn.Module

    def __init__(
        self, settings: DenseModel | WideDeepModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        super().__init__()
        self.cut_shape = tuple(cut_shape)
        self.input = _input_of(settings, shapes)

    def forward(self, features: Features) -> Tensor:
        activation: Tensor = self.layers(self.input(features))
        return activation.reshape(-1, *self.cut_shape)


class MlpBottom(DenseBottom):
    """Maps features to the cut layer's activation by dense layers."""

    def __init__(
        self, settings: DenseModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        super().__init__(settings, shapes, cut_shape)
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
        settings: DenseModel,
        cut_shape: Sequence[int],
        shapes: FeatureShapes | None,
        num_logits: int = 1,
    ) -> None:
        super().__init__()
        self.input = _input_of(settings, shapes) if shapes else None
        own_dim = self.input.output_dim if self.input else 0
        self.layers = _dense_layers(settings, math.prod(cut_shape) + own_dim, num_logits, None)

    def forward(self, activation: Tensor, features: Features | None) -> Tensor:
        parts = [activation.flatten(1)]
        if self.input is not None and features is not None:
            parts.append(self.input(features))
        logits: Tensor = self.layers(joined(parts))
        return without_single(logits)


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
        super().__init__(settings, shapes, cut_shape)
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


def _input_of(settings: DenseModel | WideDeepModel, shapes: FeatureShapes) -> FeatureInput:
    number_dim = settings.number_dim if isinstance(settings, TabularModel) else 0
    return FeatureInput(shapes, settings.embedding_dim, number_dim)


def _dense_layers(
    settings: DenseModel, input_dim: int, output_dim: int, output_activation: nn.Module | None
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


def _check_no_image(shapes: FeatureShapes, role: str) -> None:
    if shapes.image_shape is not None:
        raise SettingsError(f"{role}: wide_deep takes numbers and categories, but not images")
