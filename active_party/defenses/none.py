"""No defense: the identity, for measuring the leak."""

import math

from torch import Tensor

from splitveil.active_party.defenses.interface import (
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    Stateless,
)
from splitveil.active_party.defenses.rows import as_classes, as_rows


class Undefended(Stateless):
    """Sends the raw gradient as it is."""

    def __init__(self, num_classes: int = 2) -> None:
        self._num_classes = num_classes

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,  # noqa: ARG002
        probabilities: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Return the values unchanged."""
        as_classes(labels, as_rows(gradients), self._num_classes)
        return DefendedGradient(gradients.detach()), DefenseReport(
            noise_power=0.0, charge=LeakCharge(math.inf)
        )
