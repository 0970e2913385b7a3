"""What a party's half of the network looks like, and how it learns."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StringConstraints

from splitveil.common.settings import Section


class MlpModel(Section):
    """Dense layers over numbers, embedded categories and flattened images."""

    kind: Literal["mlp"]

    hidden: tuple[PositiveInt, ...] = Field(default=(64,), max_length=64)
    """Widths of the hidden layers, from the input on; none for a single dense layer."""

    activation: Literal["relu", "leaky_relu"] = "relu"
    """What follows each hidden layer."""

    output_activation: Literal["identity", "relu"] = "identity"
    """What follows the last layer of a bottom model; a top model's output is a logit as it is."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of each hidden layer's values that training leaves out."""

    embedding_dim: int = Field(default=4, ge=1, le=4096)
    """Length of the vector that stands for a category."""


class WideDeepModel(Section):
    """Wide and deep, as for advertisements: many categories, a few numbers.

    The deep part is cut: embedded categories and numbers through the bottom model's layers up to
    the cut layer, and through the top model's to a logit. The wide part, one weight per category
    and number, is the active party's and reads its own features; the two logits add up.
    """

    kind: Literal["wide_deep"]

    hidden: tuple[PositiveInt, ...] = Field(default=(128, 128, 128), min_length=1, max_length=64)
    """Widths of this half's layers, each with ReLU. The last one of the bottom model is the cut
    layer: as wide as the contract's ``cut_shape``."""

    embedding_dim: int = Field(default=4, ge=1, le=4096)
    """Length of the vector that stands for a category in the deep part; the wide part has 1."""


class ConvModel(Section):
    """Convolutions over images: 3 x 3, as large as their input, ReLU, largest of each 2 x 2.

    For images of 84 x 84 as published, ``channels: [64, 64, 64, 64]`` at the bottom, which makes
    the cut shape [64, 5, 5], and ``channels: [64, 64]`` with ``hidden: [64]`` at the top.
    """

    kind: Literal["conv"]

    channels: tuple[PositiveInt, ...] = Field(max_length=16)
    """Channels of each convolution of this half; each halves height and width, rounded down."""

    hidden: tuple[PositiveInt, ...] = Field(default=(), max_length=64)
    """Widths of the dense layers, each with ReLU, that follow the flattened convolutions. A bottom
    model without any has the last convolution's output for its activation, with any the last one's.
    """


class CustomModel(Section):
    """A ``torch.nn.Module`` of the user's own.

    A bottom model is called as ``model(features)`` and returns (rows, *cut shape); a top model as
    ``model(activation, features)``, where ``features`` is None if the active party has none, and
    returns one logit per row, (rows,), or with several classes one for each, (rows, classes).
    ``features`` is a ``splitveil.common.data.features.Features``.
    """

    kind: Literal["custom"]

    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The class, as ``package.module:Class``."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that the class is built with."""


ModelSettings = Annotated[
    MlpModel | WideDeepModel | ConvModel | CustomModel, Field(discriminator="kind")
]


class AdamOptimizer(Section):
    """Adam."""

    kind: Literal["adam"]

    learning_rate: float = Field(default=1e-3, gt=0)
    """Step size."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of the weights that is added to their gradient."""

    betas: tuple[
        Annotated[float, Field(ge=0, lt=1)],
        Annotated[float, Field(ge=0, lt=1)],
    ] = (0.9, 0.999)
    """How much of the running averages of gradient and squared gradient each step keeps."""

    sparse_from_rows: int | None = Field(default=100_000, ge=1)
    """From how many rows on an embedding table changes only in the rows that a batch looks up.

    A step then costs no more for a larger table, and the running averages of the other rows stand
    still instead of moving them on. ``null`` for no table. With ``weight_decay``, which moves every
    row in every step, no table does.
    """


class SgdOptimizer(Section):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]

    learning_rate: float = Field(default=0.01, gt=0)
    """Step size."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """How much of the previous step each step keeps."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of the weights that is added to their gradient."""

    sparse_from_rows: int | None = Field(default=100_000, ge=1)
    """From how many rows on an embedding table's step touches only the rows that a batch looks up:
    the same result in less time. ``null`` for no table. With ``momentum`` or ``weight_decay``,
    which move every row in every step, no table does."""


OptimizerSettings = Annotated[AdamOptimizer | SgdOptimizer, Field(discriminator="kind")]
