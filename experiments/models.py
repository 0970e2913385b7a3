"""Models of the papers that the built-in kinds do not cover, for ``kind: custom``."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, image_as_float

GREY_SIDE = 64
"""Height and width in pixels of GAFM's images of skin lesions."""


class SummedTop(nn.Module):
    """A top model whose logit is the activation, summed over the cut, plus a bias.

    GAFM's networks end at the cut: the active party only has the sigmoid and the loss. The bias
    duplicates that of the bottom model's last layer, because a top model needs a parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, activation: Tensor, _features: Features | None) -> Tensor:
        return activation.flatten(1).sum(dim=1) + self.bias


class GreyImageBottom(nn.Module):
    """GAFM's network for skin lesions: a LeNet for images of 64 x 64 x 1.

    It has convolutions of 5 x 5 with ReLU and pooling, then dense layers, as published:
    ``channels`` [6, 16, 32] and ``hidden`` [120, 84, 40]. The last dense layer has as many outputs
    as the cut.
    """

    def __init__(
        self,
        channels: Sequence[int] = (6, 16, 32),
        hidden: Sequence[int] = (120, 84, 40),
        cut_dim: int = 1,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        side, width = GREY_SIDE, 1
        for number in channels:
            layers += [nn.Conv2d(width, number, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)]
            side, width = (side - 4) // 2, number
        layers.append(nn.Flatten())
        width *= side * side
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, cut_dim))

    def forward(self, features: Features) -> Tensor:
        if features.image is None:
            raise ValueError("expected images")
        activation: Tensor = self.layers(image_as_float(features.image))
        return activation
