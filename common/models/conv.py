"""Convolutional bottom and top models for images, cut between two convolutions.

The authors of Marvell use such a network for images of skin lesions of 84 x 84 pixels (Li et al.,
"Label Leakage and Protection in Two-party Split Learning", ICLR 2022): six blocks of 64 channels
with the cut after the fourth, 64 x 5 x 5, then 64 dense units and a logit. No layer combines
different rows of a batch.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.errors import SettingsError
from splitveil.common.models.dense import FeatureInput, hidden_layers, joined, without_single
from splitveil.common.models.settings import ConvModel


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
        self.input = FeatureInput(shapes, EMBEDDING_DIM) if shapes else None
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


EMBEDDING_DIM = 4
"""Length of the vector for a category that accompanies the images."""


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
