"""Reads and checks a party's certificate, key and authority, and reloads them when they change."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeGuard

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import Insecure, MutualTls, PartySettings
from splitveil.common.text.files import check_secret, read_bytes, why_unreadable

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 2**20  # largest size of a PEM file, enough for hundreds of certificates
SOON_DAYS = 30  # a certificate that expires within this many days causes a warning
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey
_Version = tuple[int, int, int]  # inode, time of the last change and size of a file


@dataclass(frozen=True)
class Credentials:
    certificate: bytes
    """The party's own certificate, followed by those between it and its authority."""

    private_key: bytes = field(repr=False)

    authority: bytes  # certificates of the authorities that may have signed the peer's certificate
    subject: str
    identities: tuple[str, ...]
    """The DNS names among the certificate's subject alternative names, in lower case."""

    ends: datetime


class CredentialFiles:
    def __init__(
        self, certificate: Path, private_key: Path, authority: Path, identity: str
    ) -> None:
        self._paths = (certificate, private_key, authority)
        self._identity = identity
        self._versions: tuple[_Version | None, ...] = ()
        self._current: Credentials | None = None
        self._lock = threading.Lock()  # gRPC asks from threads of its own

    def current(self) -> Credentials:
        """Return the current content of the files.

        If changed files cannot be used, the previous credentials stay in force, with one warning
        per change: halfway through a rotation, certificate and key do not match.
        """
        with self._lock:
            # Taken before reading, so that the next call notices a change during the reading.
            versions = tuple(_version(path) for path in self._paths)
            if self._current is None:
                self._current = _load(*self._paths, self._identity)
                self._warn_if_it_ends_soon(self._current)
            elif versions != self._versions:
                self._current = self._reloaded(self._current)
            self._versions = versions
            return self._current

    def _reloaded(self, before: Credentials) -> Credentials:
        try:
            loaded = _load(*self._paths, self._identity)
        except SettingsError as error:
            for problem in error.problems:
                logger.warning("%s; the previous certificate stays in use", problem)
            return before
        if loaded != before:
            logger.info("new certificate in use: %s", describe(loaded))
            self._warn_if_it_ends_soon(loaded)
        return loaded

    def _warn_if_it_ends_soon(self, loaded: Credentials) -> None:
        if days_until(loaded.ends) < SOON_DAYS:
            logger.warning(
                "security.certificate: %s expires on %s, in %d days: replace it; no restart is "
                "needed",
                self._paths[0],
                f"{loaded.ends:%Y-%m-%d}",
                days_until(loaded.ends),
            )


def credential_files(settings: PartySettings, party: str) -> CredentialFiles | None:
    match settings.security:
        case MutualTls() as tls:
            return CredentialFiles(
                settings.base_dir / tls.certificate,
                settings.base_dir / tls.private_key,
                settings.base_dir / tls.authority,
                settings.contract.identities[party],
            )
        case Insecure():
            return None


def describe(credentials: Credentials) -> str:
    names = ", ".join(credentials.identities)
    return f"{credentials.subject} ({names}), {days_until(credentials.ends)} days left"


def days_until(moment: datetime) -> int:
    return (moment - datetime.now(UTC)).days


def subject_of(certificate: x509.Certificate) -> str:
    return printable(certificate.subject.rfc4514_string())


def printable(text: str) -> str:
    """Escape a peer's text so that it cannot forge lines of the log."""
    return text.encode("unicode_escape").decode("ascii")[:200] or "(empty)"


def in_lower_case(dns_name: str) -> str:
    """Convert a certificate's name to lower case for comparison, if it consists of ASCII letters.

    Some Unicode letters beyond ASCII have an ASCII letter as their lower case.
    """
    return dns_name.lower() if dns_name.isascii() else dns_name


def dns_names(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names of a certificate's subject alternative name, in lower case."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError("a duplicate extension, or a name of an unknown kind") from error
    found = extension.value.get_values_for_type(x509.DNSName)
    return tuple(in_lower_case(name) for name in found)


def _version(path: Path) -> _Version | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _load(certificate: Path, private_key: Path, authority: Path, identity: str) -> Credentials:
    problems: list[str] = []
    paths = {"certificate": certificate, "private_key": private_key, "authority": authority}
    read: dict[str, bytes] = {}
    for setting, path in paths.items():
        try:
            if path is private_key:
                check_secret(path, "security.private_key")
            read[setting] = read_bytes(path, MAX_FILE_BYTES)
        except SettingsError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"security.{setting}: {path}: {why_unreadable(path, error)}")
    if problems:
        raise SettingsError(problems)
    chain = _certificates(read["certificate"], "certificate", certificate)
    authorities = _certificates(read["authority"], "authority", authority)
    leaf = chain[0]
    # Parsed here, because the library parses lazily.
    try:
        dns_names(leaf)
        leaf.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f"security.certificate: {certificate}: its key or its extensions cannot be read"
        ) from error
    problems += _problems_of_leaf(leaf, certificate, identity)
    problems += _problems_of_key(leaf, read["private_key"], private_key, certificate)
    if all(datetime.now(UTC) > one.not_valid_after_utc for one in authorities):
        problems.append(f"security.authority: {authority}: every certificate in it has expired")
    if problems:
        raise SettingsError(problems)
    return Credentials(
        read["certificate"],
        read["private_key"],
        read["authority"],
        subject_of(leaf),
        dns_names(leaf),
        leaf.not_valid_after_utc,
    )


def _certificates(pem: bytes, setting: str, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise SettingsError(
            f"security.{setting}: {path}: expected certificates in PEM form"
        ) from error


def _problems_of_leaf(leaf: x509.Certificate, path: Path, identity: str) -> Iterator[str]:
    now = datetime.now(UTC)
    if now > leaf.not_valid_after_utc:
        yield f"security.certificate: {path}: expired on {leaf.not_valid_after_utc:%Y-%m-%d %H:%M}"
    if now < leaf.not_valid_before_utc:
        yield (
            f"security.certificate: {path}: valid only from {leaf.not_valid_before_utc:%Y-%m-%d}, "
            "by this machine's clock"
        )
    names = dns_names(leaf)
    if identity not in names:
        yield (
            f"security.certificate: {path}: expected {identity!r} (contract.identities) among the "
            f"DNS names of its subject alternative name, got {', '.join(names) or 'none'}"
        )


def _problems_of_key(
    leaf: x509.Certificate, pem: bytes, path: Path, certificate: Path
) -> Iterator[str]:
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The library's own message may quote the content.
        yield f"security.private_key: {path}: expected a private key in PEM form, no password"
        return
    if not is_for_grpc(key.public_key()):
        yield f"security.private_key: {path}: expected an EC (P-256, P-384) or RSA key"
    if key.public_key() != leaf.public_key():
        yield f"security.private_key: {path}: does not belong to the certificate in {certificate}"


def is_for_grpc(key: object) -> TypeGuard[PublicKey]:
    # gRPC's TLS library offers no other signatures: Ed25519 and P-521 fail in the handshake.
    if isinstance(key, ec.EllipticCurvePublicKey):
        return isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)
    return isinstance(key, rsa.RSAPublicKey)
