"""No defense: the identity, for measuring the leak."""

import math
from typing import Literal

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.forecast import Forecast, exactly
from splitveil.active_party.defenses.rows import as_rows, check_labels
from splitveil.active_party.defenses.section import DefenseSection, Traits
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.charge import Charge


class NoDefense(DefenseSection):
    """Send the raw gradient: to measure the leak, not to train with."""

    name: Literal["none"] = "none"

    @property
    def traits(self) -> Traits:
        return Traits(takes_numbers=True)

    def _build(self, given: interface.BuildInputs, /) -> interface.Defense:
        return Undefended(given.context.num_classes)

    def one_shot_refusal(self, release: str | None) -> str | None:
        return None if release is None else super().one_shot_refusal(release)

    def forecast(self, context: interface.DefenseContext) -> Forecast:
        if context.is_one_shot:
            nothing = Charge(0.0, adversary=Adversary.ANYBODY, is_gaussian=True)
            said = "Nothing that depends on a label is sent."
            return Forecast({"fresh": exactly(nothing)}, "fresh", said)
        said = "Raw gradients reveal the label outright."
        return Forecast({"fresh": exactly(math.inf)}, "fresh", said)

    def budget_refusal(self, context: interface.DefenseContext, /) -> str | None:
        refusal = "the first answer without a defense would pass every budget; set a defense"
        return None if context.is_one_shot else refusal


class Undefended(interface.Defense):
    """Sends the raw gradient as it is."""

    def __init__(self, num_classes: int = 2) -> None:
        self._num_classes = num_classes

    def defend(self, batch: interface.Step) -> interface.Defended:
        check_labels(batch.labels, as_rows(batch.gradients), self._num_classes)
        return interface.Defended(
            interface.DefendedGradient(batch.gradients.detach()),
            interface.DefenseReport(noise_power=0.0),
        )
