"""Chooses the layers whose gradients are attacked, and captures them during training."""

from collections.abc import Iterator

from torch import Tensor, nn

from splitveil.common.data.sources import suggest
from splitveil.common.errors import SettingsError
from splitveil.common.models.conv import ConvBottom, ConvTop
from splitveil.common.models.dense import MlpBottom, MlpTop, WideDeepBottom, WideDeepTop


def first_layer(model: nn.Module) -> nn.Module:
    """Return the layer whose output's gradient is attacked besides the cut layer's.

    In an mlp and in wide_deep that is the first dense layer with its activation, as in Marvell's
    paper; with no hidden layer it is the cut layer itself. In conv it is the first convolution with
    activation and pooling: the gradient before the pooling has the same norms, in four times the
    values. In a user-defined model it is the first submodule, in the order of definition, that has
    parameters of its own; settings can name another.
    """
    if isinstance(model, MlpBottom | MlpTop | WideDeepBottom | WideDeepTop):
        return next(iter(model.layers.children()))
    if isinstance(model, ConvBottom | ConvTop) and len(model.blocks):
        return next(iter(model.blocks.children()))
    for layer in model.modules():
        if next(layer.parameters(recurse=False), None) is not None:
            return layer
    raise SettingsError("the model has no layer with parameters")


def named_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer that settings name: ``first``, or a path such as ``layers.hidden_1``."""
    if name == "first":
        return first_layer(model)
    layers = dict(_named_layers(model))
    if name not in layers:
        raise SettingsError(
            f"the model has no layer {name!r}{suggest(name, layers)} (it has: {', '.join(layers)})"
        )
    return layers[name]


def _named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, layer) for name, layer in model.named_modules() if name)


class LayerTap:
    """Holds the latest gradient with respect to a layer's output, of the output's shape.

    It costs one reference per step and does not copy: the gradient must not be changed in place.
    Each backward pass replaces the stored gradient; a new forward pass in training discards it.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._gradient: Tensor | None = None
        layer.register_forward_hook(self._watch)

    def take(self) -> Tensor | None:
        """Return the gradient and forget it; None before the backward pass."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def _watch(self, _layer: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            self._gradient = None
            output.register_hook(self._keep)  # type: ignore[no-untyped-call]

    def _keep(self, gradient: Tensor) -> None:
        self._gradient = gradient
