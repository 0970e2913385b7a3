"""Models are built from settings alone, and the gradients at their layers can be watched."""

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models import optimizers
from splitveil.common.models.dense import interpolated
from splitveil.common.models.device import restoring_devices, use_device
from splitveil.common.models.factory import Trial, build_bottom_model, build_top_model, load_class
from splitveil.common.models.optimizers import build_optimizer, freeze
from splitveil.common.models.settings import SPARSE_FROM_ROWS, ModelSettings, OptimizerSettings
from splitveil.common.record.model_files import EarlierModel, save_model
from splitveil.common.settings import Section, validate
from splitveil.passive_party.bottom_trainer import LayerTap, first_layer, named_layer
from tests.support.programs import run_program

SHAPES = FeatureShapes(numeric_dim=3, vocabulary_sizes=(4, 5), image_shape=(1, 2, 2))


class OwnBottom(nn.Module):
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


class Plain(nn.Sequential):
    def __init__(self, *, fault: str = "") -> None:
        super().__init__(nn.Linear(3, 5, device="meta" if fault == "meta" else None))
        self.fault = fault
        if fault == "lazy":
            self.spare = nn.LazyLinear(1)

    def train(self, mode: bool = True) -> "Plain":
        super().train(mode or self.fault == "trains")
        return None if self.fault else self  # type: ignore[return-value]

    def forward(self, numbers: Tensor) -> Tensor:
        if self.fault == "eval" and not self.training:
            raise RuntimeError("training only")
        if self.fault == "no rows":
            numbers = numbers - numbers.max()
        found: Tensor = self[0](numbers)
        return found.to("meta") if self.fault == "moves" else found


class BuiltIn(nn.Module):
    forward = max


class Wrapped(nn.Linear):
    def forward(self, *given: Tensor) -> Tensor:
        return super().forward(*given)


INSTANCE = nn.Linear(3, 5)


class Bears(nn.Linear):
    """A layer that also has a buffer."""

    def __init__(self, shapes: FeatureShapes, kind: str = "") -> None:
        super().__init__(shapes.numeric_dim or 5, 5 if shapes.numeric_dim else 1)
        found = {
            "a view": lambda: self.weight.detach()[:1],
            "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
            "expanded": lambda: torch.ones(1).expand(3),
            "sparse": lambda: torch.eye(3).to_sparse(),
            "complex128": lambda: torch.ones(3, dtype=torch.complex128),
            "mask": lambda: torch.full((3, 3), -torch.inf).triu(1),
            "table": lambda: torch.arange(5.0),
            "eye": lambda: torch.eye(5),
        }.get(kind, lambda: None)()
        self.register_buffer("held", found, persistent=kind != "table")
        if kind == "tied":
            self.again = nn.Linear(3, 5)
            self.again.weight = self.weight
        if kind == "extra state":
            self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                lambda _, state, prefix, __: state.update({f"{prefix}note": {}}) and None
            )
        if kind == "a lock":
            self.lock = threading.Lock()
        learned = torch.tensor([[0.5, -1.0, 2.0, 0.25, -3.0]])
        with torch.no_grad():
            if kind == "weight":
                self.weight.copy_(learned)
            if kind == "some of a weight":
                self.weight[:, 2:].copy_(learned[:, 2:])
            if kind == "zeros":
                self.weight.zero_()
        if kind == "buffer":
            self.register_buffer("prior", learned)
        if kind == "no buffer":
            self.prior = learned


def the_same(_shapes: FeatureShapes) -> nn.Module:
    return INSTANCE


LAZY = nn.LazyLinear(5)


def no_module(shapes: FeatureShapes) -> int:
    return shapes.numeric_dim


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, activation: Tensor, image: Tensor | None, other: Tensor | None) -> Tensor:
        assert (image is None) == (other is None)
        if image is not None and other is not None:
            assert image.dtype == torch.float32
            activation = activation + image.flatten(1).sum(1, keepdim=True) + other[:, :1]
        return activation * self.scale


NUMBERS = FeatureShapes(numeric_dim=3)
CRITEO = FeatureShapes(numeric_dim=13, vocabulary_sizes=(9,) * 26)
BINNED = FeatureShapes(2, (4, 5), bins=(2, 1))
LESIONS = FeatureShapes(image_shape=(3, 84, 84))
SMALL_IMAGES = FeatureShapes(image_shape=(3, 12, 13))


class Holder(Section):
    model: ModelSettings = Field(default=...)


class OptimizerHolder(Section):
    optimizer: OptimizerSettings


def model(**values: Any) -> ModelSettings:
    return validate(Holder, {"model": {"kind": "mlp", **values}}, "settings").model


AN_INSTANCE = nn.Linear(5, 1)


def custom(name: str, **arguments: Any) -> ModelSettings:
    module = f"{__name__}:{name}" if ":" not in name else name
    return model(kind="custom", module=module, arguments=arguments)


def batch(num_rows: int = 8, shapes: FeatureShapes = SHAPES) -> Features:
    generator = torch.Generator().manual_seed(4)
    numeric = torch.randn(num_rows, shapes.numeric_dim, generator=generator)
    zeros = shapes.zeros(num_rows)
    codes = [torch.randint(n, (num_rows,), generator=generator) for n in shapes.vocabulary_sizes]
    image = None
    if zeros.image is not None:
        image = torch.randint(0, 256, zeros.image.shape, generator=generator).to(torch.uint8)
    return Features(numeric, torch.stack(codes, dim=1) if codes else None, image)


def test_mlp_maps_every_kind_of_feature_to_the_cut_shape() -> None:
    bottom = build_bottom_model(model(hidden=[7, 6]), SHAPES, (2, 3), seed=0)
    top = build_top_model(model(hidden=[5]), (2, 3), SHAPES, seed=0)
    activation = bottom(batch())
    assert activation.shape == (8, 2, 3)
    assert top(activation, batch()).shape == (8,)
    weight = named_layer(bottom, "layers.hidden_0").get_parameter("0.weight")
    assert weight.shape == (7, 3 + 2 * 4 + 4)


def test_tabular_embeds_the_numbers_that_have_bins() -> None:
    """The oracle interpolates between the vectors of the edges."""
    shapes = FeatureShapes(numeric_dim=4, bins=(3, 0, 1))
    bottom = build_bottom_model(model(kind="tabular", embedding_dim=2), shapes, (5,), seed=0)
    assert named_layer(bottom, "layers.hidden_0").get_parameter("0.weight").shape == (64, 7)
    numbers, generator = named_layer(bottom, "input"), torch.Generator().manual_seed(3)

    def embedded(first: Tensor) -> Tensor:
        zeros = torch.zeros_like(first)
        vectors = numbers(Features(torch.stack([first, zeros, zeros, first], dim=1)))
        assert torch.equal(vectors[:, 6], first)  # a number without bins
        assert (vectors[:, 2:6] == vectors[0, 2:6]).all()
        found: Tensor = vectors[:, :2].detach()
        return found

    edges = torch.arange(4.0)
    middle = (embedded(edges[:1]) + embedded(edges[3:])) / 2
    torch.testing.assert_close(embedded(torch.tensor([1.5])), middle)  # of a line, before training
    with torch.no_grad():
        for weight in numbers.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    x = torch.tensor([-1.0, 0.0, 0.3, 1.0, 1.9, 2.5, 3.0, 4.0])
    at_edges = embedded(edges).numpy()
    expected = [np.interp(x.numpy(), edges.numpy(), at_edges[:, column]) for column in range(2)]
    assert np.allclose(embedded(x).T.numpy(), expected, atol=1e-5)
    elsewhere = interpolated(torch.from_numpy(at_edges)[None], x[:, None])  # not on the CPU
    assert np.allclose(elsewhere.T.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "largest"), [("tabular", 0.5), ("mlp", 3.0)])
def test_categories_of_tabular_models_begin_as_small_as_numbers(kind: str, largest: float) -> None:
    shapes = FeatureShapes(vocabulary_sizes=(200, 100))
    bottom = build_bottom_model(model(kind=kind, embedding_dim=4), shapes, (5,), seed=0)
    weights = named_layer(bottom, "input").get_parameter("embedding.weight")
    assert 0.98 * largest < float(weights.detach().abs().max().clamp(max=3.0)) <= largest


@pytest.mark.parametrize("part", ["numeric", "categorical", "image"])
def test_every_kind_of_feature_reaches_the_output(part: str) -> None:
    bottom = build_bottom_model(model(), SHAPES, (4,), seed=0)
    parts = {name: getattr(batch(), name) for name in ("numeric", "categorical", "image")}
    changed = Features(**{**parts, part: (parts[part] + 1) % 3})
    assert not torch.equal(bottom(batch()), bottom(changed))


def wide_deep(**values: Any) -> ModelSettings:
    return model(kind="wide_deep", **values)


def conv(**values: Any) -> ModelSettings:
    return model(kind="conv", **values)


def shapes_of(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters()]


def test_wide_deep_has_the_published_layers() -> None:
    """Six layers of 128, the cut after the third; embeddings of 4, and of 1 in the wide part."""
    bottom = build_bottom_model(wide_deep(), CRITEO, (128,), seed=0)
    top = build_top_model(wide_deep(), (128,), CRITEO, seed=0)
    layer = [(128, 128), (128,)]
    assert shapes_of(bottom) == [(26 * 9, 4), (128, 13 + 26 * 4), (128,), *layer, *layer]
    assert shapes_of(top) == [*layer, *layer, *layer, (1, 128), (1,), (13,), (26 * 9, 1)]


@pytest.mark.parametrize("num_classes", [2, 3])
def test_wide_deep_adds_the_logits_of_its_two_parts(num_classes: int) -> None:
    bottom = build_bottom_model(wide_deep(), CRITEO, (128,), seed=0)
    top = build_top_model(wide_deep(), (128,), CRITEO, seed=0, num_classes=num_classes)
    features = batch(5, CRITEO)
    assert features.numeric is not None
    assert features.categorical is not None
    activation = bottom(features)
    deep = top(activation, features)
    numeric = top.get_parameter("wide.numeric")
    table = top.get_parameter("wide.input.embedding.weight")
    with torch.no_grad():
        assert not numeric.any()
        assert not table.any()
        numeric.copy_(torch.randn(numeric.shape))
        table.copy_(torch.randn(26 * 9, 1 if num_classes == 2 else num_classes))
    wide = features.numeric @ numeric.reshape(13, -1)
    for column in range(26):
        wide = wide + table[features.categorical[:, column] + 9 * column]
    torch.testing.assert_close(top(activation, features), deep + wide.reshape(deep.shape))
    vectors = bottom.get_parameter("input.embedding.weight")
    slots = features.categorical + 9 * torch.arange(26)
    hidden = torch.cat([features.numeric, vectors[slots].reshape(5, -1)], dim=1)
    for half, activations in ((bottom, 3), (top, 3)):
        for number in range(activations):
            name = f"layers.hidden_{number}.0"
            weight, bias = half.get_parameter(f"{name}.weight"), half.get_parameter(f"{name}.bias")
            hidden = (hidden @ weight.T + bias).clamp(min=0)
        if half is bottom:
            torch.testing.assert_close(activation, hidden)
    by_hand = hidden @ top.get_parameter("deep.weight").T + top.get_parameter("deep.bias")
    torch.testing.assert_close(deep, by_hand.reshape(deep.shape))


def test_conv_has_the_published_layers() -> None:
    """Six convolutions, the cut of 64 x 5 x 5 after the fourth, then 64 units and a logit."""
    bottom = build_bottom_model(conv(channels=[64] * 4), LESIONS, (64, 5, 5), seed=0)
    top = build_top_model(conv(channels=[64] * 2, hidden=[64]), (64, 5, 5), None, seed=0)
    block = [(64, 64, 3, 3), (64,)]
    assert shapes_of(bottom) == [(64, 3, 3, 3), (64,), *block * 3]
    assert shapes_of(top) == [*block * 2, (64, 64), (64,), (1, 64), (1,)]
    image = torch.randint(0, 256, (2, 3, 84, 84), dtype=torch.uint8)
    activation = bottom(Features(image=image))
    expected = image.float() / 255
    for number in range(4):
        weight = bottom.get_parameter(f"blocks.block_{number}.0.weight")
        bias = bottom.get_parameter(f"blocks.block_{number}.0.bias")
        expected = nn.functional.conv2d(expected, weight, bias, padding=1).clamp(min=0)
        expected = nn.functional.max_pool2d(expected, 2)
    torch.testing.assert_close(activation, expected)
    assert activation.shape == (2, 64, 5, 5)
    assert top(activation, None).shape == (2,)


def test_conv_may_end_in_dense_layers_below_the_cut_and_meet_own_features_above() -> None:
    """As in GAFM's model: 6, 16 and 32 channels on 64 x 64, then 120, 84 and 40 units."""
    images = FeatureShapes(image_shape=(1, 64, 64))
    settings = conv(channels=[6, 16, 32], hidden=[120, 84, 40])
    bottom = build_bottom_model(settings, images, (40,), seed=0)
    top = build_top_model(conv(channels=[], hidden=[8]), (40,), CRITEO, seed=0)
    activation = bottom(batch(3, images))
    assert activation.shape == (3, 40)
    own = batch(3, CRITEO)
    logits = top(activation, own)
    assert own.numeric is not None
    assert not torch.equal(logits, top(activation, Features(own.numeric + 1, own.categorical)))


MODELS = pytest.mark.parametrize(
    ("below", "above", "shapes", "cut_shape"),
    [
        (wide_deep(hidden=[12, 6]), wide_deep(hidden=[8]), CRITEO, (6,)),
        (conv(channels=[4, 6]), conv(channels=[4], hidden=[5]), SMALL_IMAGES, (6, 3, 3)),
        (model(hidden=[9]), model(hidden=[7]), SHAPES, (6,)),
        (model(kind="tabular"), model(kind="tabular"), BINNED, (6,)),
    ],
    ids=["wide_deep", "conv", "mlp", "tabular"],
)


@MODELS
def test_on_a_gpu_models_learn_by_algorithms_that_repeat_what_they_learn_on_the_cpu(
    gpu: torch.device,
    below: ModelSettings,
    above: ModelSettings,
    shapes: FeatureShapes,
    cut_shape: tuple[int, ...],
) -> None:
    own = None if shapes.image_shape else shapes
    learned = []
    with restoring_devices():
        for device in (torch.device("cpu"), use_device(str(gpu))):
            both = nn.ModuleList(
                [
                    build_bottom_model(below, shapes, cut_shape, seed=0),
                    build_top_model(above, cut_shape, own, seed=0),
                ]
            ).to(device)
            features = batch(6, shapes).to(device)
            both[1](both[0](features), features if own else None).sum().backward()
            learned.append([one.grad.cpu() for one in both.parameters() if one.grad is not None])
    assert len(learned[0]) > 4
    torch.testing.assert_close(*learned)


@MODELS
def test_no_row_of_a_batch_has_an_influence_on_another(
    below: ModelSettings, above: ModelSettings, shapes: FeatureShapes, cut_shape: tuple[int, ...]
) -> None:
    """Noise that belongs to an example, and scores per example, are only of that example then."""
    reads_own = shapes.image_shape is None
    bottom = build_bottom_model(below, shapes, cut_shape, seed=0)
    top = build_top_model(above, cut_shape, shapes if reads_own else None, seed=0)
    features = batch(6, shapes)

    def gradient_and_activation(picked: Features) -> tuple[Tensor, Tensor]:
        activation = bottom(picked).detach().requires_grad_()
        logits = top(activation, picked if reads_own else None)
        (gradient,) = torch.autograd.grad(torch.sigmoid(logits).sum(), activation)
        return gradient, activation.detach()

    together = gradient_and_activation(features)
    alone = gradient_and_activation(features.rows(torch.tensor([4])))
    others = features.rows(torch.tensor([0, 1, 2, 3, 0, 1]))
    assert not torch.allclose(together[1][4], gradient_and_activation(others)[1][4])
    for whole, one in zip(together, alone, strict=True):
        torch.testing.assert_close(whole[4], one[0])


@pytest.mark.parametrize(
    ("settings", "shapes", "cut_shape", "part"),
    [
        (wide_deep(), CRITEO, (64,), "the last width, 128, is the cut layer's"),
        (wide_deep(), LESIONS, (128,), "not images"),
        (conv(channels=[8]), CRITEO, (8,), "features.image and nothing else"),
        (conv(channels=[8]), SHAPES, (8,), "features.image and nothing else"),
        (conv(channels=[]), LESIONS, (8,), "at least one convolution"),
        (conv(channels=[8] * 7), LESIONS, (8, 1, 1), "7 halvings reduce 84 x 84 to nothing"),
        (conv(channels=[8] * 4), LESIONS, (8, 6, 6), "an activation of [8, 5, 5]"),
        (conv(channels=[8], hidden=[5]), LESIONS, (8, 42, 42), "an activation of [5]"),
        (model(), FeatureShapes(), (5,), "no input"),
        (custom("OwnBottom"), SHAPES, (5,), "an output of shape (2, 5) for 2 rows, got (2, 6)"),
        (custom("OwnBottom", width=-1), SHAPES, (5,), "be built: ValueError: width must not be"),
        (custom("OwnBottom", wide=1), SHAPES, (5,), "unexpected keyword argument 'wide'"),
        (custom("OwnTop"), SHAPES, (5,), "OwnTop fails on a batch of 2 rows in eval mode: TypeErr"),
        (custom("ReturnsPair"), SHAPES, (5,), "expected a floating-point tensor, got tuple"),
        (custom("NoSuchClass"), SHAPES, (5,), "has no class NoSuchClass"),
        (custom("no_such_package.models:Net"), SHAPES, (5,), "No module named 'no_such_package'"),
        (custom("pathlib:Path"), SHAPES, (5,), "not a torch.nn.Module"),
        (custom("math:pi"), SHAPES, (5,), "math:pi is not a torch.nn.Module"),
        (custom("no_module"), SHAPES, (5,), "returns int, which is not a torch.nn.Module"),
        (custom("Plain"), SHAPES, (5,), "forward has no parameter for the image features"),
        (custom("Plain"), NUMBERS, (4,), "an output of shape (2, 4) for 2 rows, got (2, 5)"),
        (custom("Plain", fault="eval"), NUMBERS, (5,), "of 2 rows in eval mode: RuntimeError: tra"),
        (custom("Plain", fault="trains"), NUMBERS, (5,), "Plain.eval() leaves it in training mode"),
        (
            custom("Wrapped", in_features=3, out_features=5),
            NUMBERS,
            (5,),
            "forward does not say its parameters: name them, in a module",
        ),
        (custom("Plain", fault="lazy"), NUMBERS, (5,), "spare.weight is still lazy after a batch"),
        (custom("Plain", fault="meta"), NUMBERS, (5,), "has weights on meta: build it on the CPU"),
        (custom("Plain", fault="moves"), NUMBERS, (5,), "expected an output on cpu"),
        (custom("BuiltIn"), NUMBERS, (5,), "BuiltIn.forward does not say its parameters"),
        (custom("INSTANCE", width=5), NUMBERS, (5,), "unexpected keyword argument 'width'"),
    ],
)
def test_bottom_model_that_does_not_fit_is_explained(
    settings: ModelSettings, shapes: FeatureShapes, cut_shape: tuple[int, ...], part: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        build_bottom_model(settings, shapes, cut_shape, seed=0)
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "shapes", "cut_shape", "part"),
    [
        (wide_deep(), None, (128,), "wide part of wide_deep reads the active party's own features"),
        (wide_deep(), LESIONS, (128,), "not images"),
        (conv(channels=[8]), None, (128,), "[channels, height, width], got [128]"),
        (conv(channels=[8] * 3), None, (64, 5, 5), "3 halvings reduce 5 x 5 to nothing"),
        (model(output_activation="relu"), None, (5,), "top_model.output_activation: expected id"),
        (model(kind="tabular", output_activation="relu"), None, (5,), "expected identity"),
        (model(), FeatureShapes(), (5,), "selects no column"),
        (custom("AN_INSTANCE"), None, (5,), "whose weights may have learned from true labels"),
    ],
)
def test_top_model_that_does_not_fit_is_explained(
    settings: ModelSettings, shapes: FeatureShapes | None, cut_shape: tuple[int, ...], part: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        build_top_model(settings, cut_shape, shapes, seed=0)
    assert part in str(raised.value)


@pytest.mark.parametrize("name", ["relu", "sigmoid"])
def test_output_activation_is_that_of_the_cut_layer(name: str) -> None:
    plain = build_bottom_model(model(), SHAPES, (50,), seed=0)(batch())
    cut = build_bottom_model(model(output_activation=name), SHAPES, (50,), seed=0)(batch())
    assert (plain < 0).any()
    assert torch.equal(cut, getattr(plain, name)())


def test_dropout_acts_in_training_only() -> None:
    bottom = build_bottom_model(model(dropout=0.5), SHAPES, (4,), seed=0)
    assert not torch.equal(bottom(batch()), bottom(batch()))
    bottom.eval()
    assert torch.equal(bottom(batch()), bottom(batch()))


@pytest.mark.parametrize("settings", [model(), custom("OwnBottom"), custom("OwnBottom", lazy=True)])
@pytest.mark.parametrize("trial", [None, Trial((8, 4), torch.device("cpu"))])
def test_seed_decides_the_weights_and_nothing_else_is_drawn(
    settings: ModelSettings, trial: Trial | None
) -> None:
    cut_shape = (6,)

    def weights(seed: int) -> Tensor:
        built = build_bottom_model(settings, SHAPES, cut_shape, seed=seed, trial=trial)
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


def test_tensors_go_to_parameters_by_name_and_the_rest_to_the_next_one() -> None:
    shapes = FeatureShapes(numeric_dim=3, image_shape=(1, 2, 2))
    top, rows = build_top_model(custom("ByName"), (1,), shapes, seed=0), batch(8, shapes)
    activation = torch.randn(8, 1)
    assert rows.numeric is not None
    assert rows.image is not None
    expected = activation[:, 0] + rows.image.sum((1, 2, 3)) / 255 + rows.numeric[:, 0]
    torch.testing.assert_close(top(activation, rows), expected)
    alone = build_top_model(custom("ByName"), (1,), None, seed=0)
    assert torch.equal(alone(activation, None), activation[:, 0])
    plain = build_bottom_model(custom("INSTANCE"), NUMBERS, (5,), seed=0)
    assert torch.equal(plain(rows), plain(rows.numeric))
    own = plain.get_parameter("weight")
    assert torch.equal(own, INSTANCE.weight)
    assert own is not INSTANCE.weight
    lazy = build_bottom_model(custom("LAZY"), NUMBERS, (5,), seed=0)
    assert torch.equal(lazy(rows), lazy(rows.numeric))


def test_trying_a_model_leaves_its_running_statistics_alone() -> None:
    trial = Trial((8, 4), torch.device("cpu"))
    bottom = build_bottom_model(custom("OwnBottom"), SHAPES, (6,), seed=0, trial=trial)
    assert bottom.get_buffer("norm.num_batches_tracked").item() == 0
    assert all(weight.grad is None for weight in bottom.parameters())


def test_a_model_that_cannot_compute_no_rows_is_refused_where_ranks_may_have_none() -> None:
    own, cpu = custom("Plain", fault="no rows"), torch.device("cpu")
    build_bottom_model(own, NUMBERS, (5,), seed=0, trial=Trial((8, 4), cpu))
    said = "batch of 0 rows in training: .*; with several processes, one may own no row of a batch"
    with pytest.raises(SettingsError, match=said):
        build_bottom_model(own, NUMBERS, (5,), seed=0, trial=Trial((8, 4, 0), cpu))


@pytest.mark.parametrize("kind", ["tied", "a view", "conjugated", "table"])
def test_what_shares_memory_comes_back_as_it_was_saved(kind: str, tmp_path: Path) -> None:
    own = custom("Bears", kind=kind)
    trial = Trial((8,), torch.device("cpu"))
    saved = build_bottom_model(own, NUMBERS, (5,), seed=0, trial=trial)
    path = save_model(tmp_path, saved, None)
    loaded = build_bottom_model(own, NUMBERS, (5,), seed=1)
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    EarlierModel.open(path).put_into(loaded)
    found = loaded.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in saved.state_dict().items())
    assert not torch.equal(found["weight"], before["weight"])
    if kind == "tied":
        assert loaded.get_parameter("again.weight") is loaded.get_parameter("weight")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("expanded", "cannot be saved and loaded again: its state_dict: RuntimeError: .*held"),
        ("sparse", "cannot be saved and loaded again: held: "),
        ("complex128", "cannot be saved and loaded again: held: KeyError"),
        ("extra state", "cannot be saved and loaded again: note: "),
        ("mask", "held holds NaN or infinity, .* persistent=False$"),
    ],
)
def test_a_model_that_could_not_be_used_once_trained_is_refused_before(
    kind: str, said: str
) -> None:
    trial = Trial((8,), torch.device("cpu"))
    with pytest.raises(SettingsError, match=f"^bottom_model: Bears:? {said}") as raised:
        build_bottom_model(custom("Bears", kind=kind), NUMBERS, (5,), seed=0, trial=trial)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("kind", ["weight", "some of a weight", "buffer", "no buffer", "a lock"])
def test_a_top_model_may_bring_no_weights_along(kind: str) -> None:
    """They may have learned from true labels. What cannot be copied cannot be refitted."""
    trial = Trial((8,), torch.device("cpu"))
    name = "prior" if "buffer" in kind else "weight"
    said = "cannot pickle" if kind == "a lock" else f"brings values of {name} along"
    with pytest.raises(SettingsError, match=f"^top_model: Bears .*?{said}"):
        build_top_model(custom("Bears", kind=kind), (5,), None, seed=0, trial=trial)


@pytest.mark.parametrize("kind", ["", "zeros", "eye", "table", "a view"])
def test_a_top_model_may_begin_with_constants(kind: str) -> None:
    trial = Trial((8,), torch.device("cpu"))
    build_top_model(custom("Bears", kind=kind), (5,), None, seed=0, trial=trial)


def test_code_that_hands_out_one_module_for_all_runs_is_refused() -> None:
    trial = Trial((8,), torch.device("cpu"))
    with pytest.raises(SettingsError, match="the same weight whenever it is built"):
        build_bottom_model(custom("the_same"), NUMBERS, (5,), seed=0, trial=trial)
    build_bottom_model(custom("INSTANCE"), NUMBERS, (5,), seed=0, trial=trial)  # is copied


def test_class_names_have_one_form() -> None:
    assert load_class("collections:OrderedDict").__name__ == "OrderedDict"
    for name in ("collections", "collections:", ":OrderedDict"):
        with pytest.raises(SettingsError, match=r"expected package\.module:Class"):
            load_class(name)
    with pytest.raises(SettingsError, match="module"):
        custom("my package:Net")


def test_first_layer_is_the_one_next_to_the_features_with_its_activation() -> None:
    deep = build_bottom_model(model(hidden=[7, 6], dropout=0.5), SHAPES, (5,), seed=0)
    assert first_layer(deep) is named_layer(deep, "layers.hidden_0") is named_layer(deep, "first")
    assert (first_layer(deep)(torch.randn(99, 15)) >= 0).all()
    single = build_bottom_model(model(hidden=[]), SHAPES, (5,), seed=0)
    assert first_layer(single) is named_layer(single, "layers.output")
    own = build_bottom_model(custom("OwnBottom"), SHAPES, (6,), seed=0)
    assert first_layer(own) is named_layer(own, "norm")
    images = build_bottom_model(conv(channels=[8, 9]), LESIONS, (9, 21, 21), seed=0)
    assert first_layer(images) is named_layer(images, "blocks.block_0.1")
    tap, picture = LayerTap(first_layer(images)), batch(2, LESIONS)
    activation = images(picture)
    activation.sum().backward()
    gradient = tap.take()
    assert gradient is not None
    assert gradient.shape == (2, 8, 84, 84)  # before the pooling, as in Marvell's paper
    assert picture.image is not None
    layers = [images.get_submodule(f"blocks.block_{number}.0") for number in (0, 1)]
    first = layers[0](picture.image.float() / 255).clamp(min=0).detach().requires_grad_()
    rest = nn.functional.max_pool2d(layers[1](nn.functional.max_pool2d(first, 2)).clamp(min=0), 2)
    (expected,) = torch.autograd.grad(rest.sum(), first)
    torch.testing.assert_close(gradient, expected)
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
    tap = LayerTap(layer)
    assert tap.take() is None
    bottom(batch()).backward(received)
    with torch.no_grad():
        bottom(batch())  # an evaluation in between forgets nothing
    found = tap.take()
    assert found is not None
    assert torch.equal(found, expected)
    assert tap.take() is None


def optimizer(**values: Any) -> OptimizerSettings:
    return validate(OptimizerHolder, {"optimizer": values}, "settings").optimizer


def holding(weight: nn.Parameter) -> nn.Module:
    return nn.ParameterList([weight])


def test_optimizers_take_the_steps_that_their_settings_say() -> None:
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {"momentum": 0.5, "weight_decay": 0.25}),
        "adam": (torch.optim.Adam, {"weight_decay": 0.25}),
        "adamw": (torch.optim.AdamW, {"weight_decay": 0.5}),
    }
    for kind, (of_torch, values) in cases.items():
        ours, theirs = (nn.Parameter(torch.tensor([2.0])) for _ in range(2))
        settings = optimizer(kind=kind, learning_rate=0.1, **values)
        rules = build_optimizer(settings, holding(ours)), of_torch([theirs], lr=0.1, **values)
        for gradient in (1.0, -7.0):
            for weight, rule in zip((ours, theirs), rules, strict=True):
                weight.grad = torch.tensor([gradient])
                rule.step()
        torch.testing.assert_close(ours, theirs)


def test_an_optimizer_does_not_import_the_compiler_of_torch() -> None:
    code = (
        "import sys, torch\n"
        "from splitveil.common.models.optimizers import build_optimizer\n"
        "from splitveil.common.models.settings import AdamOptimizer\n"
        "model = torch.nn.Linear(2, 1)\n"
        "rule = build_optimizer(AdamOptimizer(kind='adam'), model)\n"
        "rule.zero_grad()\n"
        "model(torch.ones(3, 2)).sum().backward()\n"
        "rule.step()\n"
        "rule.load_state_dict(rule.state_dict())\n"
        "print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    )
    done = run_program(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n")


def table_and_layer(rows: int = 50) -> nn.Sequential:
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(5)
        return nn.Sequential(nn.Embedding(rows, 3), nn.Linear(3, 1))


def train(built: nn.Module, rule: torch.optim.Optimizer, batches: list[list[int]]) -> None:
    for number, rows in enumerate(batches):
        rule.zero_grad()
        (built(torch.tensor(rows)) * (1 + number)).sum().backward()
        rule.step()


@pytest.mark.parametrize(
    ("rows", "values", "is_sparse"),
    [
        (SPARSE_FROM_ROWS, {"kind": "adam"}, True),
        (SPARSE_FROM_ROWS - 1, {"kind": "adam"}, False),
        (SPARSE_FROM_ROWS, {"kind": "adam", "weight_decay": 0.1}, False),
        (SPARSE_FROM_ROWS, {"kind": "sgd"}, True),
        (SPARSE_FROM_ROWS, {"kind": "sgd", "momentum": 0.5}, False),
        (SPARSE_FROM_ROWS, {"kind": "sgd", "weight_decay": 0.5}, False),
    ],
)
def test_large_tables_learn_from_sparse_gradients(
    rows: int, values: dict[str, Any], is_sparse: bool
) -> None:
    built = table_and_layer(rows)
    rule = build_optimizer(optimizer(**values), built)
    train(built, rule, [[1, 2, 2]])
    gradient = built.get_parameter("0.weight").grad
    assert gradient is not None
    assert gradient.is_sparse is is_sparse


def test_sparse_steps_equal_dense_ones_where_every_row_is_in_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [[2, 0, 1, 0], [1, 1, 2, 0], [0, 1, 2, 2]]
    for kind in ("adam", "sgd"):
        trained = []
        for rows in (1, 4):
            monkeypatch.setattr(optimizers, "SPARSE_FROM_ROWS", rows)
            built = table_and_layer(3)
            rule = build_optimizer(optimizer(kind=kind, learning_rate=0.05), built)
            train(built, rule, batches)
            trained.append(nn.utils.parameters_to_vector(built.parameters()).detach())
        torch.testing.assert_close(trained[0], trained[1])
        start = nn.utils.parameters_to_vector(table_and_layer(3).parameters()).detach()
        assert not torch.allclose(trained[0], start, atol=0.05)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("limit", "is_clipped"), [(0.5, True), (1e3, False)])
def test_the_gradients_of_all_weights_are_clipped_together(
    rows: int, limit: float, is_clipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse ones, too, with rows that a batch has twice."""
    monkeypatch.setattr(optimizers, "SPARSE_FROM_ROWS", rows)
    seen = []
    for values in ({}, {"clip_norm": limit}):
        built = table_and_layer(3)
        start = nn.utils.parameters_to_vector(built.parameters()).detach()
        rule = build_optimizer(optimizer(kind="sgd", learning_rate=1.0, **values), built)
        train(built, rule, [[1, 2, 2]])
        seen.append(nn.utils.parameters_to_vector(built.parameters()).detach() - start)
    free, clipped = seen
    if is_clipped:
        torch.testing.assert_close(clipped, free * (limit / free.norm()))
    else:
        assert torch.equal(clipped, free)


def test_dense_and_sparse_parts_of_adam_are_clipped_together() -> None:
    """Adam's first step only shows signs, and its second one the ratio of both gradients."""
    built = table_and_layer(SPARSE_FROM_ROWS)
    rule = build_optimizer(optimizer(kind="adam", clip_norm=0.5), built)
    train(built, rule, [[1, 2, 2]])
    gradients = [weight.grad.to_dense() for weight in built.parameters() if weight.grad is not None]
    assert float(torch.cat([one.flatten() for one in gradients]).norm()) == pytest.approx(0.5)


def test_a_schedule_changes_the_rate_of_dense_and_sparse_parameters_alike() -> None:
    built = table_and_layer(SPARSE_FROM_ROWS)
    rule = build_optimizer(optimizer(kind="adam", learning_rate=0.5), built)
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 0.0 if step == 1 else 1.0)
    train(built, rule, [[1]])
    schedule.step()
    before = nn.utils.parameters_to_vector(built.parameters()).detach().clone()
    train(built, rule, [[1]])
    assert torch.equal(nn.utils.parameters_to_vector(built.parameters()), before)
    schedule.step()
    train(built, rule, [[1]])
    changed = [(p.detach() != 0).any() for p in built.parameters()]
    assert all(changed)
    assert not torch.equal(nn.utils.parameters_to_vector(built.parameters()), before)


@pytest.mark.parametrize("rows", [1, 51])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_named_parts_train_at_rates_of_their_own(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as if its rate were the only one; a longer name counts more, and a frozen part stays."""
    monkeypatch.setattr(optimizers, "SPARSE_FROM_ROWS", rows)
    chosen = {"0": 0.5, "1": 0.1, "1.bias": 0.02}

    def trained(**values: Any) -> dict[str, torch.Tensor]:
        built = nn.Sequential(*table_and_layer(), nn.Linear(1, 1), nn.Linear(1, 1))
        for part, start in ((built[2], 2.0), (built[3], 3.0)):
            for weight in part.parameters():
                nn.init.constant_(weight, start)
        freeze(built, ["3"], "frozen")
        rule = build_optimizer(optimizer(kind=kind, **values), built)
        train(built, rule, [[1, 2, 2]])
        return dict(built.named_parameters())

    found = trained(rates=chosen, learning_rate=0.01)
    rates = {"0.weight": 0.5, "1.weight": 0.1, "1.bias": 0.02, "2.weight": 0.01, "2.bias": 0.01}
    for name, rate in rates.items():
        torch.testing.assert_close(found[name], trained(learning_rate=rate)[name])
    assert {float(found[name]) for name in ("3.weight", "3.bias")} == {3.0}
    # "1" names no part of a name such as "10.weight".
    with pytest.raises(SettingsError, match="has no parameter 'we'"):
        trained(rates={"we": 0.1})


def test_model_without_parameters_cannot_be_trained() -> None:
    with pytest.raises(SettingsError, match="no trainable parameters"):
        build_optimizer(optimizer(kind="sgd"), nn.ReLU())
    with pytest.raises(SettingsError, match="no layer with parameters"):
        first_layer(nn.ReLU())
