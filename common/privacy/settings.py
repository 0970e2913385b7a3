"""The settings of an audit: which attacks run, and how often."""

from typing import Self

from pydantic import Field, model_validator

from splitveil.common.privacy.attacks import AttackName
from splitveil.common.settings import Section

DEFAULT_ATTACKS: tuple[AttackName, ...] = (
    "norm",
    "cosine",
    "spectral",
    "accumulated_spectral",
    "accumulated_cosine",
)


class AuditSettings(Section):
    """Attacks that a party runs against the gradients it sends or receives."""

    attacks: tuple[AttackName, ...] = Field(default=DEFAULT_ATTACKS, min_length=1)
    """Which attacks score every audited batch, or gather over the run's epochs."""

    queue_batches: int = Field(default=8, ge=1, le=1024)
    """Batches that may wait for the audit; when it falls further behind, batches are left out."""

    max_cpu_share: float | None = Field(default=0.03, gt=0, le=1)
    """Largest part of the party's CPU time that the audit may take; ``null`` for no limit.

    Beyond it batches are left out and counted, so that training is hardly slowed down. What gathers
    over a run then gathers from some batches only, and understates what a peer who keeps all of
    them can learn. A short run is measured whole: one second of CPU time comes on top.
    """

    every_steps: int = Field(default=1, ge=1)
    """Audit the steps of an epoch whose number is a multiple of this."""

    @model_validator(mode="after")
    def _can_run_each_attack_once(self) -> Self:
        if len(set(self.attacks)) < len(self.attacks):
            raise ValueError("each attack may be named once")
        return self
