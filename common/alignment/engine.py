"""Builds the alignment engine that the contract names."""

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from splitveil.common.alignment.ecdh import EcdhEngine
from splitveil.common.alignment.interface import AlignmentEngine
from splitveil.common.alignment.rr22 import Rr22Engine, check_interpreter
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.run.contract import AlignmentSettings, Rr22Alignment
from splitveil.common.settings import Section


class AlignmentResources(Section):
    """The resources that a party spends on alignment; private."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Number of worker processes; with 0, the party's own process does the work on up to two
    cores."""

    rr22_python: Path | None = None
    """Interpreter that the engine ``rr22`` runs in."""

    @classmethod
    def of(cls, settings: PartySettings) -> "AlignmentResources":
        """Take the resources from a party's settings."""
        python = settings.alignment_rr22_python
        return cls(
            workers=settings.alignment_workers,
            rr22_python=None if python is None else settings.base_dir / python,
        )


def build_engine(settings: AlignmentSettings, resources: AlignmentResources) -> AlignmentEngine:
    """Build the engine that the contract names, and start its workers.

    Raises:
        SettingsError: the engine cannot be had here.
    """
    if isinstance(settings, Rr22Alignment):
        check_interpreter(resources.rr22_python)
        return Rr22Engine(
            python=resources.rr22_python or Path(),
            min_aligned=settings.min_aligned,
            max_set_size=settings.max_set_size,
        )
    return EcdhEngine(
        min_aligned=settings.min_aligned,
        max_set_size=settings.max_set_size,
        workers=resources.workers,
    )


def engine_of(settings: PartySettings) -> AlignmentEngine:
    """Build the engine of a party; see ``build_engine``."""
    return build_engine(settings.contract.alignment, AlignmentResources.of(settings))


def engine_checks(settings: PartySettings) -> list[Callable[[], str]]:
    """Return what ``check`` has to try before an engine is used.

    Each raises SettingsError if the engine cannot be had here.
    """
    if isinstance(settings.contract.alignment, Rr22Alignment):
        python = AlignmentResources.of(settings).rr22_python
        return [lambda: f"alignment: rr22, spu {check_interpreter(python)}"]
    return []
