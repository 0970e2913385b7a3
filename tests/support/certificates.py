"""Certificates for tests: good ones, and each kind of bad one."""

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from splitveil.command import program
from splitveil.common.party.credentials import CredentialFiles, Credentials
from splitveil.deploy import authority as issuing
from splitveil.deploy.authority import PartyFolder, keep_certificates, make_certificates
from tests.support.commands import exit_code_of

NAMES = {"active": "active.splitveil", "passive": "passive.splitveil"}


def files(folder: Path, party: str, identity: str | None = None) -> CredentialFiles:
    own = PartyFolder(folder / party)
    name = identity or f"{party}.splitveil"
    return CredentialFiles(own.certificate, own.private_key, own.authority, name)


def certs(words: Sequence[str]) -> int:
    """Run ``splitveil certs`` and return its exit code."""
    return exit_code_of(program.main, "certs", *words)


def use(folder: Path, example: Path) -> None:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(issuing, "CLOCK_SKEW", timedelta(days=9))
        keep_certificates(folder, {party: name}, days=-1)


class Unchecked(CredentialFiles):
    """Files that are presented unchecked, as by a peer that does not check its own files."""

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
    """Make an authority, the two parties' certificates, and more certificates for given names."""
    make_certificates(folder, NAMES | others)
    return folder


SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


def add_unusual(
    folder: Path,
    party: str,
    names: Sequence[x509.GeneralName],
    *,
    common_name: str = "somebody",
    purposes: Sequence[x509.ObjectIdentifier] = (SERVER, CLIENT),
    days: int = 10,
    extensions: Sequence[x509.ExtensionType] = (),
    replaced: tuple[bytes, bytes] = (b"", b""),
) -> None:
    """Add a party with a certificate that ``splitveil certs`` would not issue.

    The authority of ``folder``, made by ``make``, signs it. Without names or purposes, their
    extension is left out. ``replaced`` are bytes of the signed part, and bytes of the same length
    that are signed in their place.
    """
    authority, own = PartyFolder(folder / "authority"), PartyFolder(folder / party)
    signer = serialization.load_pem_private_key(authority.private_key.read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    (issuer,) = x509.load_pem_x509_certificates(authority.certificate.read_bytes())
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=20))
        .not_valid_after(now + timedelta(days=days))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    der = certificate.public_bytes(serialization.Encoding.DER)
    if replaced[0]:
        der = _signed_anew(der, certificate.tbs_certificate_bytes, replaced, signer)
    own.folder.mkdir(parents=True)
    own.certificate.write_text(ssl.DER_cert_to_PEM_cert(der))
    own.authority.write_bytes(authority.certificate.read_bytes())
    own.private_key.touch(0o600)
    own.private_key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def _signed_anew(
    der: bytes, signed: bytes, replaced: tuple[bytes, bytes], signer: ec.EllipticCurvePrivateKey
) -> bytes:
    """Replace bytes of the signed part with bytes that the library would refuse, and sign it."""
    other = signed.replace(*replaced)
    signature = signer.sign(other, ec.ECDSA(hashes.SHA256()))
    algorithm = bytes.fromhex("300a06082a8648ce3d040302")  # ecdsa-with-SHA256
    assert len(other) == len(signed)
    assert algorithm in der
    whole = other + algorithm + b"\x03" + bytes([len(signature) + 1, 0]) + signature
    return b"\x30\x82" + len(whole).to_bytes(2, "big") + whole


def spoil_signature(folder: Path, party: str) -> None:
    """Change the last bit of the authority's signature on a party's certificate."""
    path = PartyFolder(folder / party).certificate
    der = bytearray(ssl.PEM_cert_to_DER_cert(path.read_text()))
    der[-1] ^= 1
    path.write_text(ssl.DER_cert_to_PEM_cert(bytes(der)))
