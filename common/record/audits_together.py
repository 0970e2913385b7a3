"""Runs two audits on the same observations: one thread, one share of the CPU, each score once."""

import logging
from dataclasses import replace

from splitveil.common.privacy.audit import BatchLeak
from splitveil.common.privacy.audit_worker import Auditing
from splitveil.common.privacy.gradient_rows import GradientRows
from splitveil.common.privacy.observation import Observation

logger = logging.getLogger(__name__)


class AuditsTogether:
    """Shows every observation to two audits, which audit the same steps.

    Quantities that both derive from a layer's gradients, such as the direction in which they
    stretch most, are computed once. An error in the second audit costs it the batch and is logged,
    the first time with its trace; an error in the first one costs both the batch and is raised.

    Args:
        first: the audit whose result is returned.
        second: the audit that only accumulates scores.
    """

    def __init__(self, first: Auditing, second: Auditing) -> None:
        self._first = first
        self._second = second
        self._has_failed = False

    def wants(self, step: int) -> bool:
        """Return whether a step of an epoch is to be audited at all."""
        return self._first.wants(step)

    def observe(self, observation: Observation) -> BatchLeak | None:
        """Attack one batch."""
        rows = {layer: GradientRows(found) for layer, found in observation.gradients.items()}
        observation = replace(observation, prepared=rows)
        measured = self._first.observe(observation)
        try:
            self._second.observe(observation)
        except Exception:
            self._second.leave_out()
            if not self._has_failed:
                logger.exception("the attacks for the audit failed on a batch")
            self._has_failed = True
        return measured

    def leave_out(self) -> None:
        """Count a batch that should have been audited and was not."""
        self._first.leave_out()
        self._second.leave_out()
