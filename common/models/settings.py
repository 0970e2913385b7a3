"""Settings of a party's half of the network and of its optimizer."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, StringConstraints

from splitveil.common.settings import Mark, Section


class DenseModel(Section):
    """Settings of both ``mlp`` and ``tabular``."""

    kind: str

    hidden: tuple[PositiveInt, ...] = Field(default=(64,), max_length=64)
    """Widths of the hidden layers, from input to output; empty for a single dense layer."""

    activation: Literal["relu", "leaky_relu"] = "relu"
    """Activation function after each hidden layer."""

    output_activation: Literal["identity", "relu", "sigmoid"] = "identity"
    """Activation function after the last layer of a bottom model; a top model must leave this at
    ``identity``, because its output is a logit."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each hidden layer's values that are dropped in training."""

    embedding_dim: int = Field(default=4, ge=1, le=4096)
    """Length of the vector that stands for a category."""


class MlpModel(DenseModel):
    """Dense layers over numbers, embedded categories and flattened images.

    A sequence is the mean of its tokens' vectors, and an empty one is zeros.
    """

    kind: Literal["mlp"]


class TabularModel(DenseModel):
    """Dense layers like ``mlp``, for tables: each number becomes a vector as long as a category's.

    A number's vector is linear between up to 129 quantiles of the different numbers in the
    training rows (Gorishniy et al., "On Embeddings for Numerical Features in Tabular Deep
    Learning", NeurIPS 2022), and a number beyond the first or last quantile counts as this.
    Indicators of gaps, and the numbers that stand for lists, are not embedded.
    """

    kind: Literal["tabular"]
    num_bins: ClassVar = 128


class PcaModel(Section):
    """Principal components of a bottom model's columns, fitted to the table without any label.

    They are fitted to 50,000 rows, drawn at random, or to all where these have fewer independent
    directions. Each number is cumulative over up to 16 bins between quantiles, each category
    one-hot; ``cut_shape`` says how many components there are. In a run with gradients it trains,
    and begins as these.
    """

    kind: Literal["pca"]
    num_bins: ClassVar = 16


class ScoreModel(PcaModel):
    """A score that predicts the label, and principal components in the rest of ``cut_shape``.

    The score is a linear regression on the noisy labels or sums that begin a one-shot run
    (``contract.release``): one number for two classes and for numbers, otherwise one for each class
    but one.
    """

    kind: Literal["score"]  # type: ignore[assignment]

    columns: int | None = Field(default=None, ge=1)
    """Number of columns whose components stand beside the score: the columns that are worth most by
    the release. By default, components cover all columns."""

    max_column_share: float | None = Field(default=None, gt=0, le=1)
    """The most that one column alone may explain of a score's variance: a label owner that lies
    about its labels makes a score a guess of a column. A run above it ends before a row is sent.
    By default there is no limit."""


class WideDeepModel(Section):
    """A wide and deep model, as used for advertisements: many categories, a few numbers.

    The deep part is cut: embedded categories and numbers pass through the bottom model's layers to
    the cut layer, and through the top model's layers to a logit. The wide part, one weight per
    category and number, belongs to the active party and reads its own features. The two logits are
    added.
    """

    kind: Literal["wide_deep"]

    hidden: tuple[PositiveInt, ...] = Field(default=(128, 128, 128), min_length=1, max_length=64)
    """Widths of this half's layers, each with ReLU. The bottom model's last layer is the cut layer
    and must be as wide as the contract's ``cut_shape``."""

    embedding_dim: int = Field(default=4, ge=1, le=4096)
    """Length of the vector that stands for a category."""


class ConvModel(Section):
    """Convolutions over images: 3 x 3 with same padding, ReLU, and 2 x 2 max pooling.

    The published network for images of 84 x 84 has ``channels: [64, 64, 64, 64]`` at the bottom,
    which gives the cut shape [64, 5, 5], and ``channels: [64, 64]`` with ``hidden: [64]`` at the
    top.
    """

    kind: Literal["conv"]

    channels: tuple[PositiveInt, ...] = Field(max_length=16)
    """Channels of each convolution of this half; each halves height and width, rounded down."""

    hidden: tuple[PositiveInt, ...] = Field(default=(), max_length=64)
    """Widths of the dense layers, each with ReLU, that follow the flattened convolutions. The
    activation of a bottom model is the output of the last dense layer, or of the last convolution
    if there are no dense layers."""


class CustomModel(Section):
    """A user-defined ``torch.nn.Module``, from a class or from a function that returns a module.

    A bottom model returns (rows, *cut shape). A top model gets the activation first, and returns
    one logit per row, (rows,) or (rows, 1), or with more than two classes (rows, classes).

    ``forward`` takes the features as tensors. A parameter ``numeric`` gets scaled numbers,
    (rows, numbers) float32; ``categorical`` slots of categories, (rows, columns) int64; ``image``
    images, (rows, channels, height, width) float32, bytes scaled to [0, 1]; ``tokens`` sequences,
    (rows, places) int64, each column with ``max_length`` places and zeros behind its tokens;
    ``lengths`` the numbers of tokens, (rows, columns) int64; None where there are no such features.
    A single kind of features that has no parameter of its name goes to the next
    parameter, so that ``nn.Linear`` gets the numbers. A parameter ``features``, or one annotated as
    ``splitveil.models.Features``, gets all of them in one object, at a top model without features
    None.
    """

    kind: Literal["custom"]

    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The class or function, as ``package.module:name``. A function, and a class with a parameter
    ``shapes``, gets a ``splitveil.models.FeatureShapes``: numbers in ``numeric_dim``, slots of each
    column of categories in ``vocabulary_sizes``, ``image_shape``, and of each column of sequences
    ``num_tokens`` and ``max_lengths``. It draws new weights at every call; a top model may bring
    none along, because they may have learned from true labels."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""

    weights: Annotated[
        dict[str, str],
        BeforeValidator(
            lambda given: {"": given} if isinstance(given, str) else given,
            json_schema_input_type=str | dict[str, str],
        ),
        Mark.PATH,
    ] = Field(default_factory=dict)
    """A safetensors file with the initial weights of a bottom model, or a file for each of some of
    its modules, such as ``{encoder: bert/model.safetensors}``. A file has all tensors of its
    module, and no others. Relative to this settings file; ``~`` and ``${NAME}`` are replaced."""

    frozen: tuple[str, ...] = ()
    """Parameters that do not train, or modules such as ``encoder.embeddings`` with all of theirs.
    """


ModelSettings = Annotated[
    MlpModel | TabularModel | WideDeepModel | ConvModel | CustomModel, Field(discriminator="kind")
]

BottomModelSettings = Annotated[
    MlpModel | TabularModel | PcaModel | ScoreModel | WideDeepModel | ConvModel | CustomModel,
    Field(discriminator="kind"),
]


def bins_of(settings: BottomModelSettings) -> int:
    """Return how many bins a model needs at most for a column of numbers; 0 for none."""
    return settings.num_bins if isinstance(settings, TabularModel | PcaModel) else 0


SPARSE_FROM_ROWS = 100_000
"""Rows of an embedding table that make a step update only the rows that a batch looks up, so that
its time does not depend on the table's size."""


class StepSettings(Section):
    """Settings of all optimizers."""

    kind: str

    weight_decay: float = Field(default=0.0, ge=0)
    """The multiple of the weights added to their gradient; with ``adamw``, the share that a step of
    size 1 takes off them. Without it, and without ``momentum``, a step updates only those rows of
    an embedding table of 100,000 rows or more that the batch looks up; ``adam`` and ``adamw`` then
    leave the running averages of the other rows as they are."""

    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of the gradient of all weights of this party's half together, before weight
    decay: a longer one is scaled down to it. ``null`` for no limit."""

    rates: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other step sizes for some parameters, or modules with all of theirs, such as ``{encoder:
    1.0e-5}``. The longest name counts where several fit."""


class AdamSettings(StepSettings):
    """Settings of both ``adam`` and ``adamw``."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Step size."""


class AdamOptimizer(AdamSettings):
    """Adam."""

    kind: Literal["adam"]


class AdamWOptimizer(AdamSettings):
    """AdamW: Adam whose weight decay is not part of the gradient."""

    kind: Literal["adamw"]


class SgdOptimizer(StepSettings):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]

    learning_rate: float = Field(default=0.01, gt=0)
    """Step size."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the previous step that each step keeps."""


OptimizerSettings = Annotated[
    AdamOptimizer | AdamWOptimizer | SgdOptimizer, Field(discriminator="kind")
]
