"""Requests for certificates: a party's key stays where it was made, and only a request travels.

A request carries the party's public key and the DNS name that the party wants; its signature shows
that the party holds the key. A request can be replaced on its way, so both sides compare the
SHA-256 of the public key by another channel. The certificate shows the same figure.
"""

import hashlib
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import MAX_FILE_BYTES, PublicKey, in_lower_case, is_for_grpc
from splitveil.common.text.files import OWNER_ONLY, read_or_refuse
from splitveil.deploy.authority import (
    FOR_ALL,
    PartyFolder,
    common_name,
    party_certificate,
    pem_of,
    pem_of_key,
    read_authority,
    read_certificate,
    read_private_key,
    write,
)

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
    key's SHA-256 as the other side has read it out, if it is compared here.

    Returns the SHA-256 of the public key, and that of the authority's certificate.
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
    _refuse_another_key(own, key)
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
    """Return what a PEM file holds, in words."""
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


def _refuse_another_key(own: PartyFolder, key: PublicKey) -> None:
    """Leave a folder alone that holds a private key of its own, and another one than this."""
    if own.private_key.exists():
        if _read_private_key(own.private_key).public_key() != key:
            raise SettingsError(
                f"{own.private_key}: belongs to another key than the request; name another folder "
                f"with --output"
            )
    elif own.certificate.exists():
        read_certificate(own.certificate)  # only a certificate is ever replaced


def _read_private_key(path: Path) -> ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey:
    found = read_private_key(path)
    if not isinstance(found, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise SettingsError(f"{path}: expected an EC or RSA private key in PEM form, no password")
    return found
