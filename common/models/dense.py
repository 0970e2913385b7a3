"""Dense, convolutional, and wide and deep bottom and top models.

    wide and deep    logit = deep(cut layer) + wide(own features), for each class if more than two

The authors of Marvell use a wide and deep network for Criteo and Avazu (Li et al., "Label Leakage
and Protection in Two-party Split Learning", ICLR 2022): six deep layers of 128 units with the cut
after the third. Layers have torch's default initial weights, the embeddings of the deep part are
uniform in +-0.05 as in Keras, and the wide part starts at 0, as a linear model may: a category that
no row has had yet contributes nothing.

For images of skin lesions of 84 x 84 pixels they use a convolutional network, cut between two
convolutions: six blocks of 64 channels with the cut after the fourth, 64 x 5 x 5, then 64 dense
units and a logit. No layer combines different rows of a batch.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.errors import SettingsError
from splitveil.common.models.components import Codes
from splitveil.common.models.settings import ConvModel, DenseModel, TabularModel, WideDeepModel

EMBEDDING_RANGE = 0.05
_DIM_BESIDE_IMAGES = 4  # of the vector for a category that accompanies images


class FeatureInput(nn.Module):
    """Concatenates a row's features: numbers, embedded categories, flattened image, sequences.

    The categories of all columns share one table, so that one look-up serves all of them. Numbers
    with bins are embedded if ``number_dim`` is not 0. A sequence is its tokens' mean vector.
    """

    def __init__(self, shapes: FeatureShapes, embedding_dim: int, number_dim: int = 0) -> None:
        super().__init__()
        self._binned = len(shapes.bins) if number_dim else 0
        self.numbers = NumberEmbedding(shapes.bins, number_dim) if self._binned else None
        numeric_dim = shapes.numeric_dim + self._binned * (number_dim - 1)
        sizes, self._max_lengths = shapes.vocabulary_sizes, list(shapes.max_lengths)
        self.embedding = nn.Embedding(sum(sizes), embedding_dim) if sizes else None
        self.register_buffer("column_starts", _starts(sizes), persistent=False)
        tokens = shapes.num_tokens
        self.tokens = nn.Embedding(sum(tokens), embedding_dim) if tokens else None
        self.register_buffer("token_starts", _starts(tokens), persistent=False)
        image_dim = math.prod(shapes.image_shape) if shapes.image_shape else 0
        self.output_dim = numeric_dim + (len(sizes) + len(tokens)) * embedding_dim + image_dim

    def forward(self, features: Features) -> Tensor:
        """Return the vectors, (rows, output_dim), float32."""
        parts = []
        if features.numeric is not None:
            numbers = features.numeric
            if self.numbers is not None:
                parts.append(self.numbers(numbers[:, : self._binned]))
            if self._binned < numbers.shape[1]:
                parts.append(numbers[:, self._binned :])
        if features.categorical is not None and self.embedding is not None:
            slots = features.categorical + self.get_buffer("column_starts")
            parts.append(self.embedding(slots).flatten(1))
        if features.image is not None:
            parts.append(image_as_float(features.image).flatten(1))
        if features.tokens is not None and features.lengths is not None:
            columns = torch.split(features.tokens, self._max_lengths, dim=1)
            starts, lengths = self.get_buffer("token_starts"), features.lengths
            for column, tokens in enumerate(columns):
                parts.append(self._mean(tokens + starts[column], lengths[:, column, None]))
        return joined(parts)

    def tables(self) -> list[nn.Embedding]:
        return [table for table in (self.embedding, self.tokens) if table is not None]

    def _mean(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        if self.tokens is None:
            raise TypeError("this model takes no sequences")
        is_there = torch.arange(tokens.shape[1], device=tokens.device) < lengths
        vectors: Tensor = self.tokens(tokens) * is_there[:, :, None]
        return vectors.sum(1) / lengths.clamp(min=1)


def _starts(sizes: Sequence[int]) -> Tensor:
    """Return where each column's rows begin in a table that all columns share."""
    return torch.tensor([sum(sizes[:column]) for column in range(len(sizes))], dtype=torch.int64)


class NumberEmbedding(nn.Module):
    """Maps numbers to vectors by functions that are linear between the edges of bins.

    A number is its place among the edges of its column, from 0 for the first to the number of bins.
    The functions are those of ``rtdl_num_embeddings.PiecewiseLinearEmbeddings`` (version B), with
    places in the part of numbers: a line to begin with, and for each bin a step more or less. That
    library computes with all bins of every number, in three times the time.
    """

    def __init__(self, bins: Sequence[int], dim: int) -> None:
        super().__init__()
        self._most = max(1, *bins)
        ends = torch.tensor(bins).clamp(min=1)[:, None, None]
        line = (torch.arange(self._most + 1)[:, None] / ends).clamp(max=1) - 0.5
        self.register_buffer("line", line * math.sqrt(12), persistent=False)  # of variance 1
        bound = dim**-0.5
        self.slope = nn.Parameter(torch.empty(len(bins), 1, dim).uniform_(-bound, bound))
        self.offset = nn.Parameter(torch.empty(len(bins), 1, dim).uniform_(-bound, bound))
        self.steps = nn.Parameter(torch.zeros(len(bins), self._most, dim))

    def forward(self, places: Tensor) -> Tensor:
        """Map (rows, columns) to (rows, columns * dim)."""
        line = self.slope * self.get_buffer("line") + self.offset
        if places.device.type != "cpu":
            # On CUDA neither a sum of floats so far nor images of pixels can repeat their bits.
            so_far = torch.ones(self._most + 1, self._most, device=places.device).tril(-1)
            return interpolated(line + so_far @ self.steps, places)
        at_edges = line + nn.functional.pad(self.steps.cumsum(1), (0, 0, 1, 0))
        # The same in half the time, as in images of one row of pixels, which lies between -1 and 1.
        grid = nn.functional.pad((places.T * (2 / self._most) - 1)[:, None, :, None], (0, 1))
        vectors = nn.functional.grid_sample(
            at_edges.mT[:, :, None], grid, padding_mode="border", align_corners=True
        )
        return vectors.flatten(0, 2).T


def interpolated(at_edges: Tensor, places: Tensor) -> Tensor:
    """Interpolate between vectors of edges, (columns, edges, dim), on any device."""
    last = at_edges.shape[1] - 1
    places = places.clamp(0, last)
    left = places.long().clamp(max=last - 1)
    columns = torch.arange(len(at_edges), device=places.device)
    beside = at_edges[columns, left], at_edges[columns, left + 1]
    return torch.lerp(*beside, (places - left)[:, :, None]).flatten(1)


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
            {"relu": nn.ReLU(), "sigmoid": nn.Sigmoid()}.get(settings.output_activation),
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
        for table in self.input.tables():
            nn.init.uniform_(table.weight, -EMBEDDING_RANGE, EMBEDDING_RANGE)
        self.layers = hidden_layers(self.input.output_dim, settings.hidden)


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
        self.layers = hidden_layers(math.prod(cut_shape), settings.hidden)
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
        for table in self.input.tables():
            nn.init.zeros_(table.weight)
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
        if self._num_logits == 1:
            return weights.sum(dim=1)
        logits = self._num_logits
        return weights.reshape(len(weights), weights.shape[1] // logits, logits).sum(dim=1)


def without_single(logits: Tensor) -> Tensor:
    """Drop the logit dimension if each row has only one logit."""
    return logits.squeeze(1)


def hidden_layers(
    input_dim: int,
    widths: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return dense layers, ``hidden_0`` and so on, each with an activation function."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(widths):
        layers[f"hidden_{number}"] = nn.Sequential(nn.Linear(input_dim, width), activation())
        if dropout:
            layers[f"dropout_{number}"] = nn.Dropout(dropout)
        input_dim = width
    return nn.Sequential(layers)


def _input_of(settings: DenseModel | WideDeepModel, shapes: FeatureShapes) -> FeatureInput:
    if not isinstance(settings, TabularModel):
        return FeatureInput(shapes, settings.embedding_dim)
    embedded = FeatureInput(shapes, settings.embedding_dim, number_dim=settings.embedding_dim)
    for table in embedded.tables():  # torch's N(0, 1) would drown the numbers at first
        bound = settings.embedding_dim**-0.5
        nn.init.uniform_(table.weight, -bound, bound)
    return embedded


def _dense_layers(
    settings: DenseModel, input_dim: int, output_dim: int, output_activation: nn.Module | None
) -> nn.Sequential:
    activation = nn.ReLU if settings.activation == "relu" else nn.LeakyReLU
    layers = hidden_layers(input_dim, settings.hidden, activation, settings.dropout)
    output = nn.Linear(([input_dim, *settings.hidden])[-1], output_dim)
    last = nn.Sequential(output, output_activation) if output_activation else output
    layers.add_module("output", last)
    return layers


def _check_no_image(shapes: FeatureShapes, role: str) -> None:
    if shapes.image_shape is not None:
        raise SettingsError(f"{role}: wide_deep takes numbers and categories, but not images")


class ConvBottom(nn.Module):
    """Maps an image to the cut layer's activation."""

    def __init__(
        self, settings: ConvModel, shapes: FeatureShapes, cut_shape: Sequence[int]
    ) -> None:
        super().__init__()
        others = shapes.numeric_dim or shapes.vocabulary_sizes or shapes.max_lengths
        if shapes.image_shape is None or others:
            raise SettingsError("bottom_model: conv takes data.features.image and nothing else")
        if not settings.channels:
            raise SettingsError("bottom_model.channels: expected at least one convolution")
        image_channels, *size = shapes.image_shape
        activation_shape = _shape_after(settings.channels, size, "bottom_model")
        self.blocks = _blocks(image_channels, settings.channels)
        self.layers = hidden_layers(math.prod(activation_shape), settings.hidden)
        if settings.hidden:
            activation_shape = (settings.hidden[-1],)
        if tuple(cut_shape) != activation_shape:
            raise SettingsError(
                f"bottom_model: from images of {size[0]} x {size[1]}, these layers produce an "
                f"activation of {list(activation_shape)}; contract.cut_shape is {list(cut_shape)}"
            )
        self._is_flat = bool(settings.hidden)

    def forward(self, features: Features) -> Tensor:
        if features.image is None:
            raise SettingsError("bottom_model: conv needs images")
        image = image_as_float(features.image)
        if image.device.type == "cpu":
            # On a CPU, convolutions and pooling are faster with a pixel's channels side by side.
            image = image.contiguous(memory_format=torch.channels_last)
        activation: Tensor = self.blocks(image)
        if self._is_flat:
            activation = self.layers(activation.flatten(1))
        return activation


class ConvTop(nn.Module):
    """Maps the activation, and the active party's own features if it has any, to logits."""

    def __init__(
        self,
        settings: ConvModel,
        cut_shape: Sequence[int],
        shapes: FeatureShapes | None,
        num_logits: int = 1,
    ) -> None:
        super().__init__()
        shape = tuple(cut_shape)
        if settings.channels:
            if len(shape) != 3:
                raise SettingsError(
                    f"top_model.channels: convolutions need a contract.cut_shape of [channels, "
                    f"height, width], got {list(shape)}"
                )
            shape = _shape_after(settings.channels, shape[1:], "top_model")
        self.blocks = _blocks(cut_shape[0], settings.channels)
        self.input = FeatureInput(shapes, _DIM_BESIDE_IMAGES) if shapes else None
        own_dim = self.input.output_dim if self.input else 0
        self.layers = hidden_layers(math.prod(shape) + own_dim, settings.hidden)
        last_dim = settings.hidden[-1] if settings.hidden else math.prod(shape) + own_dim
        self.output = nn.Linear(last_dim, num_logits)

    def forward(self, activation: Tensor, features: Features | None) -> Tensor:
        parts = [self.blocks(activation).flatten(1)]
        if self.input is not None and features is not None:
            parts.append(self.input(features))
        logits: Tensor = self.output(self.layers(joined(parts)))
        return without_single(logits)


class ComponentsNetwork(nn.Module):
    """The function of features that ``ComponentsBottom`` is, and whose weights it takes."""

    def __init__(self, shapes: FeatureShapes, cut_shape: Sequence[int]) -> None:
        super().__init__()
        self._codes, self._cut_shape = Codes(shapes), tuple(cut_shape)
        width = math.prod(cut_shape)
        self.weight = nn.Parameter(torch.zeros(self._codes.num_codes, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("limit", torch.full((width,), math.inf))
        starts = torch.tensor(self._codes.starts.tolist(), dtype=torch.int64)
        self.register_buffer("starts", starts, persistent=False)

    def forward(self, features: Features) -> Tensor:
        values: Tensor = self._codes.values(features, self.weight, self.get_buffer("starts"))
        limit = self.get_buffer("limit")
        return (values + self.bias).clamp(-limit, limit).reshape(-1, *self._cut_shape)


def _blocks(in_channels: int, channels: Sequence[int]) -> nn.Sequential:
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(channels):
        convolution = nn.Conv2d(in_channels, width, kernel_size=3, padding="same")
        blocks[f"block_{number}"] = nn.Sequential(
            convolution, nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        in_channels = width
    return nn.Sequential(blocks)


def _shape_after(channels: Sequence[int], size: Sequence[int], role: str) -> tuple[int, ...]:
    """Return (channels, height, width) after the convolutions."""
    halved = tuple(side >> len(channels) for side in size)
    if 0 in halved:
        raise SettingsError(
            f"{role}.channels: {len(channels)} halvings reduce {size[0]} x {size[1]} to nothing"
        )
    return (channels[-1], *halved)
