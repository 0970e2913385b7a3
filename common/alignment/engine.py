"""Builds the alignment engine that the contract names."""

from pydantic import Field

from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.interface import AlignmentEngine
from splitveil.common.run.contract import AlignmentSettings
from splitveil.common.settings import Section


class AlignmentResources(Section):
    """The resources that a party spends on alignment; private."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Number of worker processes; with 0, the party's own process does the work on up to two
    cores."""


def build_engine(settings: AlignmentSettings, resources: AlignmentResources) -> AlignmentEngine:
    """Build the engine that the contract names, and start its workers."""
    return EcdhEngine(
        min_aligned=settings.min_aligned,
        max_set_size=settings.max_set_size,
        workers=resources.workers,
    )
