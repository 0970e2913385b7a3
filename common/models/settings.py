"""What a party's half of the network looks like, and how it learns."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StringConstraints

from common.settings import Section


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


class CustomModel(Section):
    """A ``torch.nn.Module`` of the user's own.

    A bottom model is called as ``model(features)`` and returns (rows, *cut shape); a top model as
    ``model(activation, features)``, where ``features`` is None if the active party has none, and
    returns one logit per row, (rows,). ``features`` is a ``common.data.features.Features``.
    """

    kind: Literal["custom"]

    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The class, as ``package.module:Class``."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that the class is built with."""


ModelSettings = Annotated[MlpModel | CustomModel, Field(discriminator="kind")]


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


class SgdOptimizer(Section):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]

    learning_rate: float = Field(default=0.01, gt=0)
    """Step size."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """How much of the previous step each step keeps."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of the weights that is added to their gradient."""


OptimizerSettings = Annotated[AdamOptimizer | SgdOptimizer, Field(discriminator="kind")]
