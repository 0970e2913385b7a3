"""The inputs of custom models: the features of some rows, and their shapes.

from torch import nn

from splitveil import models, simulate

def bottom(shapes: models.FeatureShapes) -> nn.Module:
    return nn.Sequential(nn.Linear(shapes.numeric_dim, 8), nn.ReLU())

simulate("breast_cancer", settings={"contract.cut_shape": [8], "passive.bottom_model": bottom})
"""

from splitveil.common.data.features import Features, FeatureShapes, image_as_float

__all__ = ["FeatureShapes", "Features", "image_as_float"]
