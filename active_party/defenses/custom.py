"""User-defined defenses: a class written by the user, loaded by name.

The class is a `Defense`, built as ``Class(context, noise, **arguments)``. Before a run starts it is
tried out on a few batches, and during the run each of its answers is checked. An answer is charged
the amount that its report states, for the peers that the charge names, and without bound if the
report does not state a charge.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, StringConstraints
from torch import Tensor

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.section import ChargeModel, NoisyDefense
from splitveil.common.errors import SettingsError
from splitveil.common.models.factory import load_class
from splitveil.common.privacy.charge import Adversary, Charge
from splitveil.common.text.imports import first_line

_PROBE_ROWS = 8


class CustomDefense(NoisyDefense):
    """A user-defined defense: a subclass of ``splitveil.active_party.defenses.Defense``.

    It is built as ``Class(context, noise, **arguments)`` with a ``DefenseContext`` and a
    ``NoiseSource``, its only source of randomness: the same question then gets the same noise, also
    after a restart. With ``noise: persistent`` each batch comes with ``example_keys``.
    """

    name: Literal["custom"] = "custom"

    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The class, as ``package.module:Class``."""

    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""

    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        return self._load(context, self._noise_source(secrets))

    def require_usable(self, context: interface.DefenseContext, /) -> None:
        """Try out the class on batches of all classes, of one class, and of zeros."""
        defense = self._load(context, NoiseSource())
        for batch in _probe_batches(context, with_keys=self.traits.needs_example_keys):
            try:
                defense.defend(batch)
                defense.load_state_dict(defense.state_dict())
            except Exception as error:  # whatever the user's own class raises
                raise SettingsError(
                    f"defense: {self.module} fails on a batch of {len(batch.labels)} rows: "
                    f"{first_line(error)}"
                ) from error

    def noise_key_strength(self, _context: interface.DefenseContext, /) -> str | None:
        if self.noise == "fresh":
            return None
        return f"custom {self.module} {sorted(self.arguments.items())!r}"

    def charge_model(self, _context: interface.DefenseContext, /) -> ChargeModel:
        said = (
            f"{self.module} states its charges itself: nothing can be said before the run. "
            "Where it states none, the charge is infinite."
        )
        charge = Charge(math.inf, adversary=Adversary.ANYBODY)
        covers = f"{self.module} states its charges and whom they describe itself."
        return ChargeModel(0.0, charge, "unknown", said, covers, self.noise)

    def _replaces_labels(self, context: interface.DefenseContext) -> bool:
        return self._load(context, NoiseSource()).replaces_labels

    def _load(self, context: interface.DefenseContext, noise: NoiseSource) -> "CheckedDefense":
        cls = load_class(self.module)
        if not issubclass(cls, interface.Defense):
            raise SettingsError(
                f"defense.module: {self.module} is not a splitveil.active_party.defenses.Defense"
            )
        construct: Callable[..., interface.Defense] = cls
        try:
            return CheckedDefense(construct(context, noise, **self.arguments))
        except Exception as error:  # whatever the user's own class raises
            raise SettingsError(
                f"defense.arguments: {self.module} cannot be built: {first_line(error)}"
            ) from error


class CheckedDefense(interface.RememberingDefense):
    """Checks the answers of a defense of the user's own."""

    def __init__(self, own: interface.Defense) -> None:
        super().__init__(own)
        self._own = own
        self.replaces_labels = (
            getattr(own.targets, "__func__", None) is not interface.Defense.targets
        )

    def defend(self, batch: interface.Step) -> interface.Defended:
        answer: object = self._own.defend(batch)
        if not isinstance(answer, interface.Defended) or not isinstance(answer.charge, Charge):
            raise ValueError(f"expected Defended(gradient, charge), got {type(answer).__name__}")
        gradient: object = answer.gradient
        if _form_of(gradient) != _form_of(batch.gradients):
            raise ValueError(
                f"expected a gradient like the raw one, {_form_of(batch.gradients)}, got "
                f"{_form_of(gradient)}"
            )
        if not bool(torch.isfinite(answer.gradient).all()):
            raise ValueError("the defended gradient holds NaN or infinity")
        return answer

    def targets(self, batch: interface.Step, /) -> Tensor:
        targets: object = self._own.targets(batch)
        if not isinstance(targets, Tensor) or targets.shape != batch.labels.shape:
            raise ValueError(f"expected one target per row, got {_form_of(targets)}")
        if not bool(torch.isfinite(targets).all()):
            raise ValueError("the targets hold NaN or infinity")
        return targets.to(batch.labels)


def _form_of(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"


def _probe_batches(context: interface.DefenseContext, *, with_keys: bool) -> list[interface.Step]:
    generator = torch.Generator().manual_seed(1)
    rows, classes = _PROBE_ROWS, context.num_classes
    gradients = torch.randn((rows, *context.cut_shape), generator=generator) / rows
    keys = torch.randint(2**62, (rows, 2), generator=generator) if with_keys else None
    shape = (rows,) if classes == 2 else (rows, classes)
    predicted = torch.rand(shape, generator=generator)
    probabilities = predicted if classes == 2 else torch.softmax(predicted, dim=1)
    labels = torch.arange(rows).remainder(classes).float()
    one_class = torch.zeros(rows)
    return [
        interface.Step(gradients, labels, keys, probabilities),
        interface.Step(gradients, one_class, keys, probabilities),
        interface.Step(torch.zeros_like(gradients), labels, keys, probabilities),
        interface.Step(
            gradients[:1], labels[:1], None if keys is None else keys[:1], probabilities[:1]
        ),
    ]
