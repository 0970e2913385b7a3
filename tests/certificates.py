"""Certificates for tests: good ones, and each kind of bad one."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from common.credentials import CredentialFiles, Credentials
from deploy import certs
from deploy.certs import PartyFolder, keep_certificates, make_certificates

NAMES = {"active": "active.splitveil", "passive": "passive.splitveil"}


def files(folder: Path, party: str, identity: str | None = None) -> CredentialFiles:
    """Return a party's files as its settings would name them."""
    own = PartyFolder(folder / party)
    name = identity or f"{party}.splitveil"
    return CredentialFiles(own.certificate, own.private_key, own.authority, name)


def use(folder: Path, example: Path) -> None:
    """Switch an example's settings to the certificates in a folder."""
    for party in NAMES:
        own = PartyFolder(folder / party)
        path = example / f"{party}.yaml"
        security = {
            "certificate": str(own.certificate),
            "private_key": str(own.private_key),
            "authority": str(own.authority),
        }
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"security": security}))


def add_expired(folder: Path, party: str, name: str) -> None:
    """Add a party whose certificate has ended yesterday."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "CLOCK_SKEW", timedelta(days=9))
        keep_certificates(folder, {party: name}, days=-1)


class Unchecked(CredentialFiles):
    """Files that are shown as they are: what a peer does that checks nothing of its own."""

    def __init__(self, folder: Path, party: str) -> None:
        own = PartyFolder(folder / party)
        super().__init__(own.certificate, own.private_key, own.authority, "")
        self._own = own
        self._shown: Credentials | None = None

    def current(self) -> Credentials:
        if self._shown is None:
            self._shown = Credentials(
                self._own.certificate.read_bytes(),
                self._own.private_key.read_bytes(),
                self._own.authority.read_bytes(),
                subject="",
                identities=(),
                ends=datetime.now(UTC),
            )
        return self._shown


def make(folder: Path, **others: str) -> Path:
    """Make an authority, the two parties' certificates, and more where names are given."""
    make_certificates(folder, NAMES | others)
    return folder
