"""Models are built from settings alone, and the gradients at their layers can be watched."""

from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from common.data.features import Features, FeatureShapes
from common.errors import SettingsError
from common.models.factory import build_bottom_model, build_top_model, load_class
from common.models.layers import LayerTap, first_layer, named_layer
from common.models.optimizers import build_optimizer
from common.models.settings import ModelSettings, OptimizerSettings
from common.settings import Section, validate

SHAPES = FeatureShapes(numeric_dim=3, vocabulary_sizes=(4, 5), image_shape=(1, 2, 2))


class OwnBottom(nn.Module):
    """A bottom model that no settings of the project could describe."""

    def __init__(self, width: int = 6, *, lazy: bool = False) -> None:
        super().__init__()
        if width < 0:
            raise ValueError("width must not be negative\nsecond line")
        self.norm = nn.BatchNorm1d(3)
        self.dense = nn.LazyLinear(width) if lazy else nn.Linear(3, width)

    def forward(self, features: Features) -> Tensor:
        assert features.numeric is not None
        activation: Tensor = self.dense(self.norm(features.numeric))
        return activation


class OwnTop(nn.Module):
    """A top model that adds its own features' logit."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.LazyLinear(1)
        self.own = nn.Linear(3, 1)

    def forward(self, activation: Tensor, features: Features | None) -> Tensor:
        logits: Tensor = self.cut(activation.flatten(1)).squeeze(1)
        if features is not None and features.numeric is not None:
            logits = logits + self.own(features.numeric).squeeze(1)
        return logits


class ReturnsPair(nn.Module):
    def forward(self, features: Features) -> tuple[int, int]:
        return 1, 2


class Holder(Section):
    model: ModelSettings = Field(default=...)


class OptimizerHolder(Section):
    optimizer: OptimizerSettings


def model(**values: Any) -> ModelSettings:
    return validate(Holder, {"model": {"kind": "mlp", **values}}, "settings").model


def custom(name: str, **arguments: Any) -> ModelSettings:
    module = f"{__name__}:{name}" if ":" not in name else name
    return model(kind="custom", module=module, arguments=arguments)


def batch(num_rows: int = 8, shapes: FeatureShapes = SHAPES) -> Features:
    generator = torch.Generator().manual_seed(4)
    zeros = shapes.zeros(num_rows)
    return Features(
        torch.randn(num_rows, shapes.numeric_dim, generator=generator),
        None
        if zeros.categorical is None
        else torch.stack(
            [
                torch.randint(size, (num_rows,), generator=generator)
                for size in shapes.vocabulary_sizes
            ],
            dim=1,
        ),
        None if zeros.image is None else zeros.image + 100,
    )


def test_mlp_maps_every_kind_of_feature_to_the_cut_shape() -> None:
    bottom = build_bottom_model(model(hidden=[7, 6]), SHAPES, (2, 3), seed=0)
    top = build_top_model(model(hidden=[5]), (2, 3), SHAPES, seed=0)
    activation = bottom(batch())
    assert activation.shape == (8, 2, 3)
    assert top(activation, batch()).shape == (8,)
    weight = named_layer(bottom, "layers.hidden_0").get_parameter("0.weight")
    assert weight.shape == (7, 3 + 2 * 4 + 4)


@pytest.mark.parametrize("part", ["numeric", "categorical", "image"])
def test_every_kind_of_feature_reaches_the_output(part: str) -> None:
    bottom = build_bottom_model(model(), SHAPES, (4,), seed=0)
    parts = {name: getattr(batch(), name) for name in ("numeric", "categorical", "image")}
    changed = Features(**{**parts, part: (parts[part] + 1) % 3})
    assert not torch.equal(bottom(batch()), bottom(changed))


def test_embedding_of_a_column_is_its_own() -> None:
    """The same slot in two columns must not mean the same vector."""
    shapes = FeatureShapes(vocabulary_sizes=(3, 3))
    bottom = build_bottom_model(model(hidden=[], embedding_dim=2), shapes, (1,), seed=0)
    vectors = bottom.get_parameter("input.embedding.weight")
    assert vectors.shape == (6, 2)
    layer = bottom.get_parameter("layers.output.weight")
    bias = bottom.get_parameter("layers.output.bias")
    output = bottom(Features(categorical=torch.tensor([[1, 2]])))
    by_hand = torch.cat([vectors[1], vectors[3 + 2]]) @ layer[0] + bias[0]
    torch.testing.assert_close(output[0, 0], by_hand)


def test_output_activation_is_that_of_the_cut_layer() -> None:
    plain = build_bottom_model(model(), SHAPES, (50,), seed=0)(batch())
    cut = build_bottom_model(model(output_activation="relu"), SHAPES, (50,), seed=0)(batch())
    assert (plain < 0).any()
    assert torch.equal(cut, plain.relu())


def test_dropout_acts_in_training_only() -> None:
    bottom = build_bottom_model(model(dropout=0.5), SHAPES, (4,), seed=0)
    assert not torch.equal(bottom(batch()), bottom(batch()))
    bottom.eval()
    assert torch.equal(bottom(batch()), bottom(batch()))


@pytest.mark.parametrize("settings", [model(), custom("OwnBottom"), custom("OwnBottom", lazy=True)])
def test_seed_decides_the_weights_and_nothing_else_is_drawn(settings: ModelSettings) -> None:
    cut_shape = (6,)

    def weights(seed: int) -> Tensor:
        built = build_bottom_model(settings, SHAPES, cut_shape, seed=seed)
        return nn.utils.parameters_to_vector(built.parameters()).detach()

    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)
    first = weights(1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def test_own_classes_are_built_with_their_arguments() -> None:
    bottom = build_bottom_model(custom("OwnBottom", width=9), SHAPES, (9,), seed=0)
    assert bottom.training
    assert bottom(batch()).shape == (8, 9)
    with_own = build_top_model(custom("OwnTop"), (9,), SHAPES, seed=0)
    without = build_top_model(custom("OwnTop"), (9,), None, seed=0)
    activation = torch.randn(8, 9)
    assert with_own(activation, batch()).shape == without(activation, None).shape == (8,)


def test_trying_a_model_leaves_its_running_statistics_alone() -> None:
    bottom = build_bottom_model(custom("OwnBottom"), SHAPES, (6,), seed=0)
    assert bottom.get_buffer("norm.num_batches_tracked").item() == 0


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (custom("OwnBottom"), "expected an output of shape (2, 5) for 2 rows, got (2, 6)"),
        (custom("OwnBottom", width=-1), "cannot be built: ValueError: width must not be negative"),
        (custom("OwnBottom", wide=1), "unexpected keyword argument 'wide'"),
        (custom("OwnTop"), "OwnTop fails on a batch of 2 rows: TypeError"),
        (custom("ReturnsPair"), "expected a floating-point tensor, got tuple"),
        (custom("NoSuchClass"), "has no class NoSuchClass"),
        (custom("no_such_package.models:Net"), "No module named 'no_such_package'"),
        (custom("pathlib:Path"), "not a torch.nn.Module"),
        (custom("math:pi"), "has no class pi"),
    ],
)
def test_unusable_bottom_model_is_a_settings_error(settings: ModelSettings, part: str) -> None:
    with pytest.raises(SettingsError) as raised:
        build_bottom_model(settings, SHAPES, (5,), seed=0)
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unusable_top_model_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"top_model.output_activation: expected identity"):
        build_top_model(model(output_activation="relu"), (5,), None, seed=0)
    with pytest.raises(SettingsError, match="selects no column"):
        build_top_model(model(), (5,), FeatureShapes(), seed=0)
    with pytest.raises(SettingsError, match="there is no input"):
        build_bottom_model(model(), FeatureShapes(), (5,), seed=0)


def test_class_names_have_one_form() -> None:
    assert load_class("collections:OrderedDict").__name__ == "OrderedDict"
    for name in ("collections", "collections:", ":OrderedDict"):
        with pytest.raises(SettingsError, match=r"expected package\.module:Class"):
            load_class(name)
    with pytest.raises(SettingsError, match="module"):
        custom("my package:Net")


def test_first_layer_is_the_first_dense_layer_with_its_activation() -> None:
    deep = build_bottom_model(model(hidden=[7, 6], dropout=0.5), SHAPES, (5,), seed=0)
    assert first_layer(deep) is named_layer(deep, "layers.hidden_0") is named_layer(deep, "first")
    assert (first_layer(deep)(torch.randn(99, 15)) >= 0).all()
    single = build_bottom_model(model(hidden=[]), SHAPES, (5,), seed=0)
    assert first_layer(single) is named_layer(single, "layers.output")
    own = build_bottom_model(custom("OwnBottom"), SHAPES, (6,), seed=0)
    assert first_layer(own) is named_layer(own, "norm")
    with pytest.raises(SettingsError, match=r"no layer 'layers.hiden_0'; did you mean .*hidden_0"):
        named_layer(deep, "layers.hiden_0")


@pytest.mark.parametrize("name", ["first", "layers.hidden_1", "layers.output"])
def test_tapped_gradient_equals_autograd(name: str) -> None:
    bottom = build_bottom_model(model(hidden=[7, 6]), SHAPES, (2, 3), seed=0)
    received = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(2))
    outputs: list[Tensor] = []
    layer = named_layer(bottom, name)
    handle = layer.register_forward_hook(lambda _m, _i, output: outputs.append(output))
    (expected,) = torch.autograd.grad(bottom(batch()), [outputs[0]], received)
    handle.remove()
    with LayerTap(layer) as tap:
        assert tap.gradient is None
        bottom(batch()).backward(received)
        assert tap.gradient is not None
        assert torch.equal(tap.gradient, expected)
        with torch.no_grad():
            bottom(batch())  # an evaluation in between forgets nothing
        assert tap.take() is not None
        assert tap.gradient is None


def test_tap_shows_each_step_its_own_gradient_and_changes_none() -> None:
    def trained(*, tapped: bool) -> tuple[Tensor, list[Tensor | None]]:
        bottom = build_bottom_model(model(hidden=[7]), SHAPES, (4,), seed=0)
        optimizer = torch.optim.SGD(bottom.parameters(), lr=0.1)
        tap = LayerTap(first_layer(bottom)) if tapped else None
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            bottom(batch()).backward(torch.full((8, 4), float(step)))
            seen.append(tap.gradient if tap else None)
            optimizer.step()
        if tap:
            tap.close()
            bottom(batch()).sum().backward()
            assert tap.gradient is None
        return nn.utils.parameters_to_vector(bottom.parameters()).detach(), seen

    plain, _ = trained(tapped=False)
    watched, seen = trained(tapped=True)
    assert torch.equal(plain, watched)
    zero, one, two = seen
    assert zero is not None
    assert one is not None
    assert two is not None
    assert not zero.any()
    assert one.any()
    assert not torch.equal(two, one)


def optimizer(**values: Any) -> OptimizerSettings:
    return validate(OptimizerHolder, {"optimizer": values}, "settings").optimizer


def test_optimizers_take_the_steps_that_their_settings_say() -> None:
    sgd_weight = nn.Parameter(torch.tensor([2.0]))
    sgd = build_optimizer(
        optimizer(kind="sgd", learning_rate=0.1, momentum=0.5, weight_decay=0.25), [sgd_weight]
    )
    for _ in range(2):
        sgd_weight.grad = torch.ones(1)
        sgd.step()
    # First step 1 + 0.25 * 2 = 1.5; second 0.5 * 1.5 + 1 + 0.25 * 1.85.
    torch.testing.assert_close(sgd_weight.data, torch.tensor([2 - 0.15 - 0.1 * 2.2125]))

    adam_weight = nn.Parameter(torch.tensor([2.0]))
    adam = build_optimizer(
        optimizer(kind="adam", learning_rate=0.1, betas=[0.5, 0.9]), [adam_weight]
    )
    adam_weight.grad = torch.tensor([-7.0])
    adam.step()
    torch.testing.assert_close(adam_weight.data, torch.tensor([2.1]))
    assert adam.param_groups[0]["betas"] == (0.5, 0.9)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"kind": "adam", "learning_rate": 0}, "greater than 0"),
        ({"kind": "adam", "learning_rate": float("inf")}, "finite"),
        ({"kind": "adam", "betas": [0.9, 1.0]}, "less than 1"),
        ({"kind": "adam", "momentum": 0.9}, "no such setting"),
        ({"kind": "sgd", "momentum": 1}, "less than 1"),
        ({"kind": "rmsprop"}, "rmsprop"),
    ],
)
def test_impossible_optimizers_are_refused(values: dict[str, Any], part: str) -> None:
    with pytest.raises(SettingsError) as raised:
        optimizer(**values)
    assert part in str(raised.value)


def test_model_without_parameters_cannot_be_trained() -> None:
    with pytest.raises(SettingsError, match="no parameters"):
        build_optimizer(optimizer(kind="sgd"), nn.ReLU().parameters())
    with pytest.raises(SettingsError, match="no layer with parameters"):
        first_layer(nn.ReLU())
