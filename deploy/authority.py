"""Issues certificates: a trial authority's own, and the parties' certificates that it signs.

``DIR/<party>/`` holds everything that one party needs and nothing that belongs to another.

A party may also send a request, so that its key stays where it was made. A request carries the
party's public key and the DNS name that the party wants; its signature shows that the party holds
the key. A request can be replaced on its way, so both sides compare the SHA-256 of the public key
by another channel. The certificate shows the same figure.
"""

import hashlib
import logging
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import (
    MAX_FILE_BYTES,
    SOON_DAYS,
    PublicKey,
    days_until,
    dns_names,
    in_lower_case,
    is_for_grpc,
)
from splitveil.common.record.run_folder import storage_errors, write_bytes_atomically
from splitveil.common.text.files import OWNER_ONLY, read_or_refuse

logger = logging.getLogger("splitveil.deploy.certs")

FOR_ALL = 0o644  # mode of a file that everybody may read
AUTHORITY_DAYS = 3650
PARTY_DAYS = 90
CLOCK_SKEW = timedelta(hours=1)
"""Allowed lag of the other machine's clock."""


class PartyFolder(NamedTuple):
    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def private_key(self) -> Path:
        return self.folder / "private_key.pem"

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"


class Authority(NamedTuple):
    """The certificate and key that sign the parties' certificates."""

    certificate: x509.Certificate
    private_key: ec.EllipticCurvePrivateKey


def make_certificates(folder: Path, names: dict[str, str], days: int = PARTY_DAYS) -> None:
    """Make an authority and a certificate per party; ``names`` has their DNS names by party."""
    folders = [authority_folder(folder), *(PartyFolder(folder / party) for party in names)]
    files = [path for own in folders for path in (own.certificate, own.private_key)]
    existing = [path for path in files if path.exists()]
    if existing:
        raise SettingsError(
            f"{existing[0]} exists and will not be overwritten: use another folder, renew for a "
            f"new certificate, or --keep to keep existing certificates"
        )
    authority = make_authority(folder)
    for party, name in names.items():
        _issue(authority, PartyFolder(folder / party), name, days)


def keep_certificates(folder: Path, names: dict[str, str], days: int = PARTY_DAYS) -> None:
    """Make missing certificates; renew those that expire soon or carry another name."""
    if not authority_folder(folder).certificate.exists():
        make_certificates(folder, names, days)
        return
    for party, name in names.items():
        own = PartyFolder(folder / party)
        found = read_certificate(own.certificate) if own.certificate.exists() else None
        ends_soon = found is None or days_until(found.not_valid_after_utc) < SOON_DAYS
        if found is None or ends_soon or name not in dns_names(found):
            _issue(read_authority(folder), own, name, days)


def renew_certificate(folder: Path, party: str, days: int = PARTY_DAYS) -> None:
    """Replace a party's certificate and key by new ones with the same name.

    Between the two replacements, key and certificate do not match. A running party that reads them
    at that moment keeps the old ones and reads the files again at the next connection.
    """
    own = PartyFolder(folder / party)
    names = dns_names(read_certificate(own.certificate))
    if not own.private_key.exists():
        raise SettingsError(
            f"{own.private_key}: is not here, so {party} keeps its key to itself: have it send a "
            f"request, and sign that"
        )
    if not names:
        raise SettingsError(f"{own.certificate}: has no DNS name for which it could be renewed")
    _issue(read_authority(folder), own, names[0], days)


def _issue(authority: Authority, own: PartyFolder, name: str, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = party_certificate(authority, key.public_key(), name, days)
    write(own.private_key, pem_of_key(key), OWNER_ONLY)
    write(own.certificate, pem_of(certificate), FOR_ALL)
    write(own.authority, pem_of(authority.certificate), FOR_ALL)
    logger.info("%s: certificate for %s, %d days", own.folder, name, days)


def new_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = common_name("splitveil trial authority")
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(key.public_key(), name, name, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def make_authority(folder: Path) -> Authority:
    own = authority_folder(folder)
    if own.private_key.exists() or own.certificate.exists():
        raise SettingsError(f"{own.folder} holds an authority, which will not be overwritten")
    authority = new_authority()
    write(own.private_key, pem_of_key(authority.private_key), OWNER_ONLY)
    write(own.certificate, pem_of(authority.certificate), FOR_ALL)
    return authority


def party_certificate(
    authority: Authority, key: PublicKey, name: str, days: int
) -> x509.Certificate:
    subject = common_name(name)
    issuer = authority.certificate.subject
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(
        authority.private_key.public_key()
    )
    # Both purposes: the active party serves in training, and the passive one in joint inference.
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _builder(key, subject, issuer, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority.private_key, hashes.SHA256())
    )


def common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(
    key: PublicKey, subject: x509.Name, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def authority_folder(folder: Path) -> PartyFolder:
    return PartyFolder(folder / "authority")


def read_certificate(path: Path) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificate(read_or_refuse(path, MAX_FILE_BYTES))
        dns_names(found)  # checks them, because the library parses lazily
    except ValueError as error:
        raise SettingsError(f"{path}: expected a certificate in PEM form") from error
    return found


def read_authority(folder: Path) -> Authority:
    own = authority_folder(folder)
    certificate = read_certificate(own.certificate)
    key = read_private_key(own.private_key, ": no certificate can be signed")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{own.private_key}: expected the authority's key in PEM form")
    return Authority(certificate, key)


def read_private_key(path: Path, consequence: str = "") -> object:
    """Return the private key in a file, of any kind; None if there is none that can be read."""
    data = read_or_refuse(path, MAX_FILE_BYTES, consequence)
    with suppress(ValueError, TypeError, UnsupportedAlgorithm):
        return serialization.load_pem_private_key(data, password=None)
    return None


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write(path: Path, data: bytes, mode: int) -> None:
    with storage_errors(path, "cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, data, mode=mode)


REQUEST = "request.pem"
LEAST_RSA_BITS = 2048

_KINDS = {
    "CERTIFICATE REQUEST": "a certificate signing request",
    "NEW CERTIFICATE REQUEST": "a certificate signing request",
    "CERTIFICATE": "a certificate",
    "PUBLIC KEY": "a public key",
}


def make_request(folder: Path, party: str, name: str) -> tuple[str, bool]:
    """Write a request, with a key if there is none; returns its SHA-256, and whether it is new."""
    own = PartyFolder(folder / party)
    is_new = not own.private_key.exists()
    if is_new:
        write(own.private_key, pem_of_key(ec.generate_private_key(ec.SECP256R1())), OWNER_ONLY)
    key = _read_private_key(own.private_key)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(common_name(name))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    write(own.folder / REQUEST, request.public_bytes(serialization.Encoding.PEM), FOR_ALL)
    return fingerprint_of_key(key.public_key()), is_new


def sign_request(
    folder: Path, path: Path, own: PartyFolder, name: str, days: int, said: str | None = None
) -> tuple[str, str]:
    """Sign a party's request, and write its certificate beside that of the authority.

    Only the public key and the one expected name are taken from the request. ``said`` is the public
    key's SHA-256 as read out by the other side, if it is compared here.

    Returns the SHA-256 of the public key and of the authority's certificate.
    """
    authority = read_authority(folder)
    request = read_request(path)
    names = _names_in(request)
    if names != (name,):
        raise SettingsError(
            f"{path}: expected a request for the one DNS name {name!r}, got "
            f"{', '.join(names) or 'none'}; --party or --name says whom it is for"
        )
    key = _usable_key(request, path)
    fingerprint = fingerprint_of_key(key)
    if said is not None and _digits(said) != _digits(fingerprint):
        raise SettingsError(
            f"{path}: the public key's SHA-256 is not the one that was read out: this is not the "
            f"request that the other side has sent"
        )
    # A folder with another private key than the request's is not changed.
    if own.private_key.exists():
        if _read_private_key(own.private_key).public_key() != key:
            raise SettingsError(
                f"{own.private_key}: belongs to another key than the request; name another folder "
                f"with --output"
            )
    elif own.certificate.exists():
        read_certificate(own.certificate)  # only a certificate is ever replaced
    certificate = party_certificate(authority, key, name, days)
    write(own.certificate, pem_of(certificate), FOR_ALL)
    write(own.authority, pem_of(authority.certificate), FOR_ALL)
    return fingerprint, fingerprint_of(authority.certificate)


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """Read a request, and check that its sender holds the key."""
    found, expected = kind_of_file(path), "a certificate signing request"
    if found != expected:
        raise SettingsError(f"{path}: expected {expected}, found {found}")
    try:
        request = x509.load_pem_x509_csr(read_or_refuse(path, MAX_FILE_BYTES))
        is_valid = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"{path}: the certificate signing request is damaged") from error
    if not is_valid:
        raise SettingsError(f"{path}: the request's signature is not by the key that it carries")
    return request


def kind_of_file(path: Path) -> str:
    """Describe the content of a PEM file."""
    data = read_or_refuse(path, MAX_FILE_BYTES)
    found = re.search(rb"-----BEGIN ([A-Z ]{1,40})-----", data)
    label = found[1].decode() if found else ""
    if label.endswith("PRIVATE KEY"):
        return "a private key, which must not leave its owner's machine"
    return _KINDS.get(label, "no PEM file that splitveil knows")


def fingerprint_of_key(key: PublicKey) -> str:
    """Return the SHA-256 of a public key, in groups of four digits that can be read out."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return _grouped(hashlib.sha256(der).hexdigest())


def fingerprint_of(certificate: x509.Certificate) -> str:
    return _grouped(certificate.fingerprint(hashes.SHA256()).hex())


def _grouped(digits: str) -> str:
    return " ".join(re.findall("....", digits))


def _digits(fingerprint: str) -> str:
    return re.sub(r"[\s:]", "", fingerprint).lower()


def _names_in(request: x509.CertificateSigningRequest) -> tuple[str, ...]:
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    if len(list(names)) != len(names.get_values_for_type(x509.DNSName)):
        return ("a name that is not a DNS name",)
    return tuple(in_lower_case(name) for name in names.get_values_for_type(x509.DNSName))


def _usable_key(request: x509.CertificateSigningRequest, path: Path) -> PublicKey:
    try:
        key = request.public_key()
    except (ValueError, UnsupportedAlgorithm):
        key = None
    is_weak = isinstance(key, rsa.RSAPublicKey) and key.key_size < LEAST_RSA_BITS
    if is_for_grpc(key) and not is_weak:
        return key
    raise SettingsError(
        f"{path}: expected the request of an EC key (P-256, P-384), or of an RSA key of at least "
        f"{LEAST_RSA_BITS} bits"
    )


def _read_private_key(path: Path) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    found = read_private_key(path)
    if not isinstance(found, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise SettingsError(f"{path}: expected an EC or RSA private key in PEM form, no password")
    return found
