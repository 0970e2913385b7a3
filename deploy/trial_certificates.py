"""Makes trial certificates, beside the results, for an example whose certificates do not exist."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import apply_overrides, read_yaml
from splitveil.deploy.authority import PartyFolder, keep_certificates
from splitveil.deploy.overrides import contract_values

logger = logging.getLogger(__name__)

FOLDER = ".trial-certificates"
"""Name of the certificates' folder in the folder of all runs; no run's name starts with a dot."""


def trial_overrides(
    example_dir: Path, runs_dir: Path, overrides: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Make certificates if a party's settings ask for mTLS and name files that do not exist.

    ``overrides`` are those of each party's file. Returns further ones, with which each party finds
    its certificates; they stay in ``runs_dir`` for the next call.
    """
    settings = {
        kind: apply_overrides(
            read_yaml(example_dir / f"{kind}.yaml"),
            [text for text in given if not text.startswith("contract.")],
        )
        for kind, given in overrides.items()
    }
    missing = {kind: own for kind, own in settings.items() if _has_no_certificate(own, example_dir)}
    if not missing:
        return {kind: [] for kind in settings}
    names = {}
    for kind, own in settings.items():
        party = ACTIVE if kind == ACTIVE else str(own.get("party", "passive"))
        given = contract_values(example_dir, own, overrides[kind]).get("identities")
        identities = given if isinstance(given, dict) else {}
        names[kind] = str(identities.get(party, f"{party}.splitveil")).lower()
    folder = (runs_dir / FOLDER).resolve()
    try:
        keep_certificates(folder, names)
    except StorageError as error:
        raise SettingsError(f"--runs: {error}") from error
    logger.info("certificates for this trial are in %s", folder)
    # For all parties: the others would not trust a party that keeps its own certificate.
    return {
        kind: [
            f"security.certificate={own.certificate}",
            f"security.private_key={own.private_key}",
            f"security.authority={own.authority}",
        ]
        for kind, own in ((kind, PartyFolder(folder / kind)) for kind in settings)
    }


def _has_no_certificate(settings: dict[str, Any], example_dir: Path) -> bool:
    security = settings.get("security")
    if not isinstance(security, dict) or security.get("mode", "mtls") != "mtls":
        return False
    return not (example_dir / str(security.get("certificate"))).exists()
