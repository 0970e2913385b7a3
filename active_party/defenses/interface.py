"""What a defense is: raw gradients and labels in, defended gradients and a report out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from splitveil.active_party.defenses.class_statistics import RunningClasses
from splitveil.active_party.defenses.sum_kl import NoiseSolution
from splitveil.common.run import messages

DefendedGradient = messages.DefendedGradient
"""A gradient that may leave the active party. Only defenses create it."""


@dataclass(frozen=True, slots=True)
class LeakCharge:
    """What an answer adds to what the peer may come to know of each example in it."""

    sum_kl: float
    """Divergence of the classes along their gap, counted as if they had no spread of their own: the
    peer may predict the spread from its own activations. Infinite for a bare gradient."""

    noise_identity: str | None = None
    """None for fresh noise, whose charges add up. Answers with the same identity repeat the same
    noise of each example: of those the largest charge counts, not the sum."""

    epsilon: float | None = None
    """Label differential privacy that holds for all answers of this identity together."""

    def __post_init__(self) -> None:
        """Take a divergence that is no number for an infinite one: no budget would ever hold it."""
        if not self.sum_kl >= 0:
            object.__setattr__(self, "sum_kl", math.inf)


@dataclass(frozen=True, slots=True)
class DefenseReport:
    """What a defense did to one batch."""

    noise_power: float
    """Mean expected squared noise norm per example."""

    sum_kl_before: float | None = None
    """Divergence of the classes in the raw gradient; None where it was not estimated."""

    sum_kl_after: float | None = None
    """Divergence that the noise leaves; None where it was not estimated."""

    leak_auc_bound: float | None = None
    """No attack on this answer alone reaches a higher AUC, as far as the estimate holds."""

    solution: NoiseSolution | None = None
    """The noise of each class, where a solver chose it."""

    charge: LeakCharge = LeakCharge(math.inf)
    """What the leak ledger notes for each example of the batch."""


class Defense(Protocol):
    """Turns raw gradients into gradients that may be sent."""

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Defend the gradients of one batch.

        Args:
            gradients: raw loss gradient at the cut layer, (batch, *cut_shape), float32 or float64.
            labels: (batch,) or (batch, 1), any dtype, values 0 and 1, or places of several classes.
            example_keys: (batch, 2) int64 on the CPU, secret bits of each example's id; persistent
                noise is drawn from them.
            probabilities: (batch,), what the model predicts; for defenses that use it, which are
                for two classes.

        Returns:
            The defended gradient, of the same shape, dtype and device, and the report.

        Raises:
            ValueError: the shapes do not fit, a gradient is not finite, a label is not 0 or 1.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what later batches need to know of earlier ones; empty if nothing."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state_dict`` left off."""
        ...


class Stateless:
    """The part of a defense that remembers nothing of earlier batches."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Accept nothing.

        Raises:
            ValueError: the state is another defense's.
        """
        if state:
            raise ValueError(f"this defense keeps no state, got {sorted(state)}")


class ClassMemory:
    """The part of a defense that remembers what the classes of earlier batches were like."""

    def __init__(self) -> None:
        self.classes = RunningClasses()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running class statistics."""
        return self.classes.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the running class statistics.

        Raises:
            ValueError: the state is another defense's.
        """
        self.classes.load_state_dict(state)


def release(rows: Tensor, gradients: Tensor) -> DefendedGradient:
    """Give defended rows the shape of the raw gradient, and let them leave.

    Noise can only overflow the dtype where the raw gradient is close to its limit; such values
    become the largest that there is.
    """
    limit = torch.finfo(rows.dtype).max
    return DefendedGradient(
        torch.nan_to_num_(rows, nan=0.0, posinf=limit, neginf=-limit).reshape(gradients.shape)
    )
