"""Models and attacks of the papers that the built-in kinds do not cover, for ``kind: custom``."""

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.models.dense import MlpBottom, WideDeepBottom, WideDeepTop, WidePart
from splitveil.common.models.settings import MlpModel, WideDeepModel
from splitveil.common.privacy import scores

MARVELL = WideDeepModel(kind="wide_deep", hidden=(128, 128, 128), embedding_dim=4)
GREY_SIDE = 64
"""Height and width in pixels of GAFM's images of skin lesions."""


class WideDeepBelowCut(nn.Module):
    """GAFM's network for advertisements: a wide and a deep part, whose sum is the cut.

    The deep part has embeddings of 16 per category and two dense layers of 16 with ReLU.
    """

    def __init__(self, shapes: FeatureShapes) -> None:
        super().__init__()
        settings = MlpModel(kind="mlp", hidden=(16, 16), embedding_dim=16)
        self.deep = MlpBottom(settings, shapes, (1,))
        self.wide = WidePart(shapes)

    def forward(self, features: Features) -> Tensor:
        """Return the activation, (rows, 1)."""
        activation: Tensor = self.deep(features) + self.wide(features)[:, None]
        return activation


class DeepBesideLogit(WideDeepBottom):
    """Marvell's three deep layers below the cut, and a 0, which its top model adds to the logit.

    That number's gradient is the prediction less the label, and changes nothing else.
    """

    def __init__(self, shapes: FeatureShapes) -> None:
        super().__init__(MARVELL, shapes, MARVELL.hidden[-1:])

    def forward(self, features: Features) -> Tensor:
        return nn.functional.pad(super().forward(features), (0, 1))


class WideDeepBesideLogit(WideDeepTop):
    """Marvell's top model over `DeepBesideLogit`."""

    def __init__(self, shapes: FeatureShapes) -> None:
        super().__init__(MARVELL, MARVELL.hidden[-1:], shapes)

    def forward(self, activation: Tensor, features: Features) -> Tensor:
        return super().forward(activation[:, :-1], features) + activation[:, -1]


class GreyImageBottom(nn.Sequential):
    """GAFM's network for skin lesions: a LeNet for images of 64 x 64 x 1, with a cut of 40.

    It has convolutions of 3 x 3 to 6, 16 and 32 channels, each with ReLU and pooling, then dense
    layers of 120, 84 and 40, each with ReLU.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((1, 6, 16, 32)):
            layers += [nn.Conv2d(before, after, kernel_size=3), nn.ReLU(), nn.MaxPool2d(2)]
        layers.append(nn.Flatten())
        for before, after in itertools.pairwise((32 * 6 * 6, 120, 84, 40)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers)


def mean_hard(gradients: Tensor, classes: scores.KnownClasses) -> Tensor:
    """Assign each example to the class whose mean gradient is nearer, as GAFM's equation (8)."""
    return scores.mean(gradients, classes).sign()


def median_hard(gradients: Tensor, classes: scores.KnownClasses) -> Tensor:
    """Assign each example to the class whose median gradient is nearer, as GAFM's equation (9)."""
    return scores.median(gradients, classes).sign()


def knows_output(gradients: Tensor, activations: Tensor) -> Tensor:
    """Score GAFM's answers about a cut of one number, (rows, 1), with the activation known.

    All but the softened label is a smooth function of the activation: fits this function and two
    levels, one for each side of 1/2, in turns. It does not decide which level belongs to positives.
    """
    f, given = (part[:, 0].detach().double().numpy() for part in (activations, gradients))
    knots = np.quantile(f, np.linspace(0, 1, 8)[1:-1])
    smooth = [np.ones_like(f), f, 1 / (1 + np.exp(-f)), *(np.maximum(f - k, 0) for k in knots)]
    design = np.stack(smooth, axis=1)
    rest = given - design @ np.linalg.lstsq(design, given, rcond=None)[0]
    fits = []
    for start in (rest, np.median(f) - f):
        side = np.where(start < 0, 1.0, -1.0)
        for _ in range(50):
            with_side = np.column_stack([design, side])
            fitted = np.linalg.lstsq(with_side, given, rcond=None)[0]
            rest = given - design @ fitted[:-1]
            side = np.where(rest * fitted[-1] > 0, 1.0, -1.0)
        fits.append((float(((given - with_side @ fitted) ** 2).sum()), rest))
    return torch.from_numpy(-min(fits, key=lambda fit: fit[0])[1])
