"""Builds bottom and top models from settings, and tries each before it is used.

The initial weights depend only on the given seed; the state of torch's own generator is restored.

A run calls every bottom model as ``model(features)`` and every top model as
``model(activation, features)``. Where a user's own ``torch.nn.Module`` has a ``forward`` without a
parameter that is named ``features`` or annotated as `Features`, a hook hands over tensors instead:
each part of the features to the parameter of its name, and the only part without such a parameter
to the next one. The module, its layers and its ``state_dict`` stay the user's own.
"""

import copy
import inspect
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from textwrap import shorten
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from splitveil.common.data.features import FeatureEncoder, Features, FeatureShapes, image_as_float
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.models.dense import (
    ComponentsNetwork,
    ConvBottom,
    ConvTop,
    MlpBottom,
    MlpTop,
    WideDeepBottom,
    WideDeepTop,
)
from splitveil.common.models.optimizers import freeze
from splitveil.common.models.settings import (
    BottomModelSettings,
    ConvModel,
    CustomModel,
    DenseModel,
    MlpModel,
    ModelSettings,
    PcaModel,
    TabularModel,
    WideDeepModel,
)
from splitveil.common.run.state_bytes import is_finite, plain_tensors
from splitveil.common.text.imports import (
    HANDED_OVER,
    fault_in_words,
    first_line,
    import_named,
    may_pass,
)

PROBE_ROWS = 2
DROP_LAST = "contract.drop_last: true"


_ArgumentsP = ParamSpec("_ArgumentsP")
_BuiltT = TypeVar("_BuiltT")
_drawing = threading.RLock()


def one_at_a_time(build: Callable[_ArgumentsP, _BuiltT]) -> Callable[_ArgumentsP, _BuiltT]:
    """Let no parties of one process build at once: torch has one generator for all of them."""

    @wraps(build)
    def locked(*arguments: _ArgumentsP.args, **named: _ArgumentsP.kwargs) -> _BuiltT:
        with _drawing:
            return build(*arguments, **named)

    return locked


class Trial(NamedTuple):
    """Batches of zeros that a second copy of a user-defined model is tried on in training."""

    sizes: Sequence[int]
    """Their numbers of rows; the second is that of an epoch's last batch, 0 of a rank without."""

    device: torch.device


def build_bottom_model(
    settings: BottomModelSettings,
    encoder: FeatureEncoder | FeatureShapes,
    cut_shape: Sequence[int],
    *,
    seed: int,
    trial: Trial | None = None,
) -> nn.Module:
    """Return a model that maps features to the activation, on the CPU, in training mode.

    A user-defined class is tried in training if there is a ``trial``.

    Raises SettingsError if there are no features, the model does not take these, its last layer is
    not the cut layer's, or a user-defined class cannot be built or called, or returns another
    shape; SplitveilError where the trial fails for a reason that may pass, such as lack of memory.
    """
    shapes = _shapes(encoder)
    if not _has_features(shapes):
        raise SettingsError("bottom_model: no input, because data.features selects no column")

    def build() -> nn.Module:
        match settings:
            case MlpModel() | TabularModel():
                return MlpBottom(settings, shapes, cut_shape)
            case PcaModel():
                return ComponentsNetwork(shapes, cut_shape)
            case WideDeepModel():
                return WideDeepBottom(settings, shapes, cut_shape)
            case ConvModel():
                return ConvBottom(settings, shapes, cut_shape)
            case CustomModel():
                return build_custom(settings, shapes, "bottom_model")

    def probe(model: nn.Module, rows: int, device: torch.device) -> object:
        return model(shapes.zeros(rows).to(device))

    trial = _own_trial(settings, trial)
    return _build_and_probe(build, probe, tuple(cut_shape), seed, "bottom_model", trial)


def build_top_model(
    settings: ModelSettings,
    cut_shape: Sequence[int],
    encoder: FeatureEncoder | FeatureShapes | None,
    *,
    seed: int,
    num_classes: int = 2,
    trial: Trial | None = None,
) -> nn.Module:
    """Return a model that maps the activation (and own features) to logits, on the CPU.

    It is in training mode. For two classes, and for labels that are numbers (``ONE_NUMBER``), it
    returns one output per row, for more classes one logit per row and class.

    Raises SettingsError if an output activation is set, the model does not take these features or
    this cut shape, or a user-defined class cannot be built or called, or returns another shape.
    """
    num_logits = 1 if num_classes <= 2 else num_classes
    row_shape = () if num_logits == 1 else (num_classes,)
    shapes = None if encoder is None else _shapes(encoder)
    if shapes is not None and not _has_features(shapes):
        raise SettingsError("top_model: data.features selects no column; leave it out")
    if isinstance(settings, DenseModel) and settings.output_activation != "identity":
        raise SettingsError(
            f"top_model.output_activation: expected identity (the output is a logit, or a number "
            f"that may be any), got {settings.output_activation}"
        )

    def build() -> nn.Module:
        match settings:
            case MlpModel() | TabularModel():
                return MlpTop(settings, cut_shape, shapes, num_logits)
            case WideDeepModel():
                return WideDeepTop(settings, cut_shape, shapes, num_logits)
            case ConvModel():
                return ConvTop(settings, cut_shape, shapes, num_logits)
            case CustomModel():
                own = build_custom(settings, shapes or FeatureShapes(), "top_model")
                if num_logits == 1:
                    own.register_forward_hook(_one_logit)
                return own

    def probe(model: nn.Module, rows: int, device: torch.device) -> object:
        features = None if shapes is None else shapes.zeros(rows).to(device)
        return model(torch.zeros(rows, *cut_shape, device=device, requires_grad=True), features)

    trial = _own_trial(settings, trial)
    return _build_and_probe(build, probe, row_shape, seed, "top_model", trial)


def _own_trial(settings: BottomModelSettings, trial: Trial | None) -> Trial | None:
    if not isinstance(settings, CustomModel):
        return None
    import_named(settings.module, "class")  # before the seed: an import may draw numbers
    return trial


def lone_row_in_words(build: Callable[..., nn.Module], device: torch.device) -> str:
    """Say what a last batch of one row needs; empty if ``build`` accepts a trial on one row."""
    try:
        build(trial=Trial((1,), device))
    except SettingsError as error:
        return f", but a last batch of one row needs {DROP_LAST}, which leaves it out ({error})"
    return ""


def load_class(name: str) -> type[Any]:
    """Load the class named by ``package.module:Class``.

    Raises:
        SettingsError: it cannot be imported, or is not a class.
    """
    cls = import_named(name, "class")
    if not isinstance(cls, type):
        module_name, _, class_name = name.partition(":")
        raise SettingsError(f"{name}: {module_name} has no class {class_name}")
    return cls


def _shapes(encoder: FeatureEncoder | FeatureShapes) -> FeatureShapes:
    return encoder.shapes if isinstance(encoder, FeatureEncoder) else encoder


def _has_features(shapes: FeatureShapes) -> bool:
    return bool(shapes.zeros(1).parts())


def _build_and_probe(
    build: Callable[[], nn.Module],
    probe: Callable[[nn.Module, int, torch.device], object],
    row_shape: tuple[int, ...],
    seed: int,
    role: str,
    trial: Trial | None,
) -> nn.Module:
    sizes, device = trial or Trial((), torch.device("cpu"))

    def compute(model: nn.Module, rows: int, device: torch.device, hint: str = "") -> None:
        mode = "training" if model.training else "eval mode"
        try:
            with torch.set_grad_enabled(model.training):
                output = _checked(probe(model, rows, device), (rows, *row_shape), role, device)
                if model.training:
                    torch.autograd.backward(output.sum())
        except SettingsError as error:
            raise SettingsError(f"{error}, in {mode}{hint}") from error
        except Exception as error:  # a user's class may raise anything
            kind = SplitveilError if model.training and may_pass(error) else SettingsError
            is_only_random = "does not have a deterministic implementation" in str(error)
            hint = f"; deterministic: false allows it{hint}" if is_only_random else hint
            raise kind(
                f"{role}: {type(model).__name__} fails on a batch of {_in_words(rows)} in {mode}: "
                f"{fault_in_words(error)}{hint}"
            ) from error
        for name, weight in model.named_parameters():
            if is_lazy(weight):
                raise SettingsError(f"{role}: {name} is still lazy after a batch: give its size")

    # torch.manual_seed would also seed the GPUs, whose state fork_rng does not restore here.
    with torch.random.fork_rng([device] if device.type == "cuda" else ()):
        torch.default_generator.manual_seed(seed)
        model = _within_memory(build, role)
        model.eval()
        if model.training:
            raise SettingsError(f"{role}: {type(model).__name__}.eval() leaves it in training mode")
        compute(model, PROBE_ROWS, torch.device("cpu"))  # changes no batch statistics
        if sizes:
            _check_drawn(model, again := _within_memory(build, role), role)
            tried = again.to(device)
            no_rows = "; with several processes, one may own no row of a batch"
            hints = {sizes[0]: "", 0: no_rows}
            for rows in sizes:
                tried.train()
                last = f"; {DROP_LAST} leaves this last batch out"
                compute(tried, rows, device, hints.get(rows, last))
            _check_saving(tried, role)
    model.train()  # which may return nothing
    return model


def _check_drawn(model: nn.Module, again: nn.Module, role: str) -> None:
    """Raise SettingsError for code that hands out the same weights whenever it is called.

    Runs would train each other's. Above the cut, weights that no seed has drawn may have learned
    from true labels. No sign of it are constants: values that are all one, or -1, 0 and 1, such as
    an identity. A tenth that is nearly the same is no accident, even of a type with few bits.
    """
    kind, others = f"{role}: {type(model).__name__}", dict(again.named_parameters())
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight is others.get(name):
            raise SettingsError(
                f"{kind} has the same {name} whenever it is built, so that runs would train each "
                f"other's: build a new one, or copy it with copy.deepcopy"
            )
    first, second = (_tensors_of(one) if role == "top_model" else {} for one in (model, again))
    for name, value in first.items():
        other = second.get(name)
        if other is None or value.shape != other.shape:
            continue
        same = value[torch.isclose(value.float(), other.float(), rtol=0.01)].double()
        is_large = 10 * same.numel() >= value.numel()
        of_few = (same.abs() * (1 - same.abs()) == 0).all()
        if is_large and not of_few and same.min() < same.max():
            raise SettingsError(
                f"{kind} brings values of {name} along, which are the same under two seeds: they "
                f"may have learned from true labels, which predictions would reveal. Let torch "
                f"draw them; a table that no label enters may be a buffer with persistent=False"
            )


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what may have learned: weights, persistent buffers, and tensors that are neither."""
    plain = {
        f"{place}.{name}".lstrip("."): value
        for place, part in model.named_modules()
        for name, value in vars(part).items()
    }
    return {
        name: value
        for name, value in (plain | model.state_dict()).items()
        if isinstance(value, Tensor) and not is_lazy(value)
        if value.is_floating_point() and value.layout is torch.strided
    }


def _check_saving(model: nn.Module, role: str) -> None:
    """Raise SettingsError if a trained model could not be saved, copied, or loaded again."""
    kind, name, saved = f"{role}: {type(model).__name__}", "its state_dict", dict[str, Tensor]()
    try:
        for name, value in model.state_dict().items():
            saved |= load(save(plain_tensors({name: value})))
        name = "its state_dict"
        # Above the cut, refitting trains a copy.
        (copy.deepcopy(model) if role == "top_model" else model).load_state_dict(saved)
    except Exception as error:  # whatever torch, safetensors and a user's hooks raise
        reason = shorten(f"{type(error).__name__}: {error}", 300)
        raise SettingsError(f"{kind} cannot be saved and loaded again: {name}: {reason}") from error
    for name, value in saved.items():
        if not is_finite(value):
            raise SettingsError(
                f"{kind}: {name} holds NaN or infinity, with which no saved model is used; if it "
                f"is a mask, register the buffer with persistent=False"
            )


def _in_words(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _one_logit(_model: nn.Module, _given: object, output: object) -> object:
    if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == 1:
        return output.squeeze(1)
    return output


def _checked(output: object, expected: tuple[int, ...], role: str, device: torch.device) -> Tensor:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        got = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise SettingsError(f"{role}: expected a floating-point tensor, got {got}")
    if output.device.type != device.type:
        raise SettingsError(
            f"{role}: expected an output on {device.type} for an input there, got one on "
            f"{output.device}"
        )
    if tuple(output.shape) != expected:
        raise SettingsError(
            f"{role}: expected an output of shape {expected} for {_in_words(expected[0])}, "
            f"got {tuple(output.shape)}"
        )
    return output


def _within_memory(build: Callable[[], nn.Module], role: str) -> nn.Module:
    try:
        return build()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        # What torch raises for sizes beyond the memory, or beyond 64 bits.
        raise SettingsError(f"{role}: cannot be built: {first_line(error)}") from error


_GIVEN = f"{HANDED_OVER}:"
_PARTS = ("numeric", "categorical", "image", "tokens", "lengths")


def build_custom(settings: CustomModel, shapes: FeatureShapes, role: str) -> nn.Module:
    """Return the model that a class, a factory or a copy of an instance gives.

    Raises:
        SettingsError: it cannot be built, is no module, is not on the CPU, or its ``forward`` has
            no parameter for some of the features.
    """
    found, name = import_named(settings.module, "class"), settings.module.removeprefix(_GIVEN)
    build: Callable[..., Any]
    if role == "top_model" and (settings.weights or isinstance(found, nn.Module)):
        given = (
            "weights: these"
            if settings.weights
            else f"module: {name} is an instance, whose weights"
        )
        raise SettingsError(
            f"{role}.{given} may have learned from true labels, which predictions would reveal: "
            f"give a class or a function without weights"
        )
    if isinstance(found, nn.Module):
        build = partial(copy.deepcopy, found)
    elif isinstance(found, type) and issubclass(found, nn.Module):
        takes_shapes = "shapes" in inspect.signature(found).parameters
        build = partial(found, shapes=shapes) if takes_shapes else found
    elif isinstance(found, type) or not callable(found):
        raise SettingsError(f"{role}.module: {name} is not a torch.nn.Module")
    else:
        build = partial(found, shapes)
    try:
        model: object = build(**settings.arguments)
    except Exception as error:  # a user's code may raise anything
        raise SettingsError(
            f"{role}.arguments: {name} cannot be built: {first_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise SettingsError(
            f"{role}.module: {name} returns {type(model).__name__}, which is not a torch.nn.Module"
        )
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "cpu":
            raise SettingsError(
                f"{role}: {type(model).__name__} has weights on {tensor.device}: build it on the "
                f"CPU with values; the setting device moves it"
            )
    freeze(model, settings.frozen, f"{role}.frozen")
    _hand_over_tensors(model, shapes, role, leading=int(role == "top_model"))
    return model


@dataclass(frozen=True)
class _Call:
    """The hook that turns a call with `Features` into one with tensors; deep copies share it."""

    leading: int
    """Number of arguments before the features."""

    parts: tuple[tuple[str, str | None], ...]
    """Parameters, each with the part of the features that it gets; None for none."""

    def __call__(
        self, _model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        before, after = given[: self.leading], given[self.leading :]
        if named or len(after) != 1 or not isinstance(after[0], Features | None):
            return None  # called with tensors
        tensors = {} if after[0] is None else vars(after[0])
        if tensors.get("image") is not None:
            tensors = {**tensors, "image": image_as_float(tensors["image"])}
        return before, {name: tensors.get(part or "") for name, part in self.parts}


def _hand_over_tensors(model: nn.Module, shapes: FeatureShapes, role: str, *, leading: int) -> None:
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except ValueError:
        parameters = []
    if all(one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD} for one in parameters):
        raise SettingsError(
            f"{role}: {type(model).__name__}.forward does not say its parameters: name them, in a "
            f"module that is written in Python, neither compiled nor wrapped"
        )
    for one in parameters:
        said = inspect.formatannotation(one.annotation)
        if one.name == "features" or re.search(r"\bFeatures\b", said):
            return
    parts: list[tuple[str, str | None]] = [(p.name, p.name) for p in parameters if p.name in _PARTS]
    there = vars(shapes.zeros(1))
    # Whoever takes tokens may do without their lengths.
    rest = [p for p in _PARTS[:-1] if there[p] is not None and (p, p) not in parts]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [one for one in parameters if one.name not in _PARTS and one.kind is kind][leading:]
    if len(rest) > min(len(places), 1):
        raise SettingsError(
            f"{role}: {type(model).__name__}.forward has no parameter for the {rest[-1]} features: "
            f"name one {rest[-1]}, or one features for all of them, or leave them out of "
            f"data.features"
        )
    if rest or (places and places[0].default is inspect.Parameter.empty):
        parts.append((places[0].name, rest[0] if rest else None))
    # First: the hook that tells a lazy layer its size expects tensors.
    call = _Call(leading, tuple(parts))
    model.register_forward_pre_hook(call, prepend=True, with_kwargs=True)
