"""A user's own ``torch.nn.Module``: how it is built, and what its ``forward`` is called with.

A run calls every bottom model as ``model(features)`` and every top model as
``model(activation, features)``. Where ``forward`` has no parameter that is named ``features`` or
annotated as `Features`, a hook hands over tensors instead: each part of the features to the
parameter of its name, and the only part without such a parameter to the next one. The module, its
layers and its ``state_dict`` stay the user's own.
"""

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from splitveil.common.data.features import Features, FeatureShapes, image_as_float
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import CustomModel
from splitveil.common.models.training_state import freeze
from splitveil.common.text.imports import HANDED_OVER, first_line, import_named

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
        return before, {name: _part(after[0], part) for name, part in self.parts}


def _part(features: Features | None, name: str | None) -> Tensor | None:
    if features is None or name is None:
        return None
    found: Tensor | None = getattr(features, name)
    return image_as_float(found) if name == "image" and found is not None else found


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
