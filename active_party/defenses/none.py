"""No defense: the identity, for measuring the leak."""

from typing import Literal

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.rows import as_rows, check_labels
from splitveil.active_party.defenses.section import ChargeModel, DefenseSection, Traits
from splitveil.common.privacy.charge import NO_CHARGE, UNBOUNDED


class NoDefense(DefenseSection):
    """Send the raw gradient: to measure the leak, not to train with."""

    name: Literal["none"] = "none"

    @property
    def traits(self) -> Traits:
        return Traits(takes_numbers=True)

    def _build(
        self, context: interface.DefenseContext, _secrets: interface.Secrets, /
    ) -> interface.Defense:
        return Undefended(context.num_classes)

    def one_shot_refusal(self, release: str | None) -> str | None:
        return None if release is None else super().one_shot_refusal(release)

    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        if context.is_one_shot:
            return ChargeModel.exact(NO_CHARGE, "Nothing that depends on a label is sent.")
        refusal = "the first answer without a defense would pass every budget; set a defense"
        return ChargeModel.exact(
            UNBOUNDED, "Raw gradients reveal the label outright.", refusal=refusal
        )


class Undefended(interface.Defense):
    """Sends the raw gradient as it is."""

    def __init__(self, num_classes: int = 2) -> None:
        self._num_classes = num_classes

    def defend(self, batch: interface.Step) -> interface.Defended:
        check_labels(batch.labels, as_rows(batch.gradients), self._num_classes)
        return interface.Defended(interface.DefendedGradient(batch.gradients.detach()))
