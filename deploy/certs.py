"""The command ``splitveil-certs``: makes a trial authority and a certificate for each party.

    splitveil-certs init DIR [--party NAME ...] [--name-of NAME=DNS_NAME ...] [--days N] [--keep]
    splitveil-certs renew DIR --party NAME [--days N]
    splitveil-certs show FILE

``DIR/<party>/`` holds everything that one party needs and nothing that belongs to another, so that
the whole folder can be handed over. Parties that have their own certification authority do not need
this command: the settings accept certificates from anywhere.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import TypeAdapter, ValidationError

from splitveil.common.errors import SettingsError, SplitveilError, StorageError
from splitveil.common.party.credentials import MAX_FILE_BYTES, SOON_DAYS, dns_names, subject_of
from splitveil.common.party.json_output import add_json, print_json
from splitveil.common.run.contract import ACTIVE, DnsName, Name
from splitveil.common.storage.run_folder import write_bytes_atomically
from splitveil.common.text.files import read_bytes
from splitveil.common.text.log_lines import configure_logging
from splitveil.common.text.shell_completion import add_completion
from splitveil.common.text.version import add_version
from splitveil.common.text.visible_text import visible, visible_lines

logger = logging.getLogger("splitveil.deploy.certs")

AUTHORITY_DAYS = 3650
PARTY_DAYS = 90
CLOCK_SKEW = timedelta(hours=1)
"""Time by which the other machine's clock may be behind."""


class PartyFolder(NamedTuple):
    """The files of one party."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The party's certificate."""
        return self.folder / "certificate.pem"

    @property
    def private_key(self) -> Path:
        """The party's key."""
        return self.folder / "private_key.pem"

    @property
    def authority(self) -> Path:
        """The authority's certificate."""
        return self.folder / "authority.pem"


class Authority(NamedTuple):
    """The certificate and key that sign the parties' certificates."""

    certificate: x509.Certificate
    private_key: ec.EllipticCurvePrivateKey


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    return run(parser().parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Do what parsed arguments say, and return the exit code."""
    configure_logging("certs")
    try:
        options.action(options)
    except SplitveilError as error:
        sys.stderr.write(f"splitveil-certs: {visible_lines(str(error))}\n")
        return error.exit_code
    return 0


def make_certificates(folder: Path, names: dict[str, str], days: int = PARTY_DAYS) -> None:
    """Make an authority and one certificate per party.

    Args:
        folder: folder in which a subfolder ``authority`` and one for each party are made.
        names: DNS name of each party's certificate, by the party's name.
        days: validity of the parties' certificates in days.

    Raises:
        SettingsError: one of the files exists.
        StorageError: a file cannot be written.
    """
    existing = [path for path in _all_files(folder, names) if path.exists()]
    if existing:
        raise SettingsError(
            f"{existing[0]} exists and will not be overwritten: use another folder, renew for a "
            f"new certificate, or --keep to keep existing certificates"
        )
    authority = _new_authority()
    own = _authority_folder(folder)
    _write_private(own.private_key, _pem_of_key(authority.private_key))
    _write_public(own.certificate, _pem_of(authority.certificate))
    for party, name in names.items():
        _issue(authority, PartyFolder(folder / party), name, days)


def keep_certificates(folder: Path, names: dict[str, str], days: int = PARTY_DAYS) -> None:
    """Make missing certificates; renew those that expire soon or carry another name.

    Raises:
        SettingsError: the authority's files exist and cannot be used.
        StorageError: a file cannot be written.
    """
    if not _authority_folder(folder).certificate.exists():
        make_certificates(folder, names, days)
        return
    for party, name in names.items():
        own = PartyFolder(folder / party)
        if not own.certificate.exists() or not _suffices(_read_certificate(own.certificate), name):
            _issue(_read_authority(folder), own, name, days)


def renew_certificate(folder: Path, party: str, days: int = PARTY_DAYS) -> None:
    """Replace a party's certificate and key by new ones with the same name.

    Between the two replacements, key and certificate do not match. A running party that reads them
    at that moment keeps the old ones and reads the files again at the next connection.

    Raises:
        SettingsError: the party has no certificate, or there is no authority.
        StorageError: a file cannot be written.
    """
    own = PartyFolder(folder / party)
    names = dns_names(_read_certificate(own.certificate))
    if not names:
        raise SettingsError(f"{own.certificate}: has no DNS name for which it could be renewed")
    _issue(_read_authority(folder), own, names[0], days)


def _issue(authority: Authority, own: PartyFolder, name: str, days: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _party_certificate(authority, key, name, days)
    _write_private(own.private_key, _pem_of_key(key))
    _write_public(own.certificate, _pem_of(certificate))
    _write_public(own.authority, _pem_of(authority.certificate))
    logger.info("%s: certificate for %s, %d days", own.folder, name, days)


def _new_authority() -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "splitveil trial authority")])
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(key, name, name, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _party_certificate(
    authority: Authority, key: ec.EllipticCurvePrivateKey, name: str, days: int
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
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


def _builder(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
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


def _authority_folder(folder: Path) -> PartyFolder:
    return PartyFolder(folder / "authority")


def _all_files(folder: Path, names: dict[str, str]) -> list[Path]:
    folders = [_authority_folder(folder), *(PartyFolder(folder / party) for party in names)]
    return [path for own in folders for path in (own.certificate, own.private_key)]


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificate(read_bytes(path, MAX_FILE_BYTES))
        dns_names(found)  # checks them, because the library parses lazily
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path}: expected a certificate in PEM form") from error
    return found


def _read_authority(folder: Path) -> Authority:
    own = _authority_folder(folder)
    certificate = _read_certificate(own.certificate)
    try:
        key_pem = read_bytes(own.private_key, MAX_FILE_BYTES)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except OSError as error:
        raise SettingsError(
            f"{own.private_key}: {error.strerror}: no certificate can be signed"
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{own.private_key}: expected the authority's key in PEM form")
    return Authority(certificate, key)


def _suffices(certificate: x509.Certificate, name: str) -> bool:
    return _days_left(certificate) >= SOON_DAYS and name in dns_names(certificate)


def _days_left(certificate: x509.Certificate) -> int:
    return (certificate.not_valid_after_utc - datetime.now(UTC)).days


def _pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write_private(path: Path, data: bytes) -> None:
    _write(path, data, 0o600)


def _write_public(path: Path, data: bytes) -> None:
    _write(path, data, 0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    write_bytes_atomically(path, data, mode)


def _init(options: argparse.Namespace) -> None:
    parties = options.party or [ACTIVE, "passive"]
    for party in parties:
        _check_party(party)
    names = {party: _dns_name(party, f"{party}.splitveil") for party in parties}
    for text in options.name_of:
        party, separator, name = text.partition("=")
        if not separator or party not in names:
            raise SettingsError(
                f"--name-of {text}: expected PARTY=DNS_NAME, with PARTY from {', '.join(names)}"
            )
        names[party] = _dns_name(party, name)
    (keep_certificates if options.keep else make_certificates)(options.folder, names, options.days)
    logger.warning(
        "anyone who has %s can impersonate any party: keep it offline, and give each party only "
        "its own folder",
        _authority_folder(options.folder).private_key,
    )
    _print_made(options, parties)


def _check_party(party: str) -> None:
    try:
        TypeAdapter(Name).validate_python(party)
    except ValidationError as error:
        raise SettingsError(f"--party {party}: a contract does not allow this name") from error
    if party == "authority":
        raise SettingsError("--party authority: that folder belongs to the authority")


def _dns_name(party: str, name: str) -> str:
    try:
        return TypeAdapter(DnsName).validate_python(name)
    except ValidationError as error:
        raise SettingsError(f"party {party}: {name!r} is not a DNS name") from error


def _renew(options: argparse.Namespace) -> None:
    renew_certificate(options.folder, options.party, options.days)
    _print_made(options, [options.party])


def _print_made(options: argparse.Namespace, parties: Sequence[str]) -> None:
    """Print what the parties' certificates say, where JSON is asked for."""
    if options.json:
        files = {party: PartyFolder(options.folder / party).certificate for party in parties}
        print_json({party: described(_read_certificate(path)) for party, path in files.items()})


def described(certificate: x509.Certificate) -> dict[str, Any]:
    """Return the content of a certificate as plain values."""
    return {
        "subject": subject_of(certificate),
        "identities": dns_names(certificate),
        "issuer": certificate.issuer.rfc4514_string(),
        "valid_from": certificate.not_valid_before_utc.isoformat(),
        "valid_to": certificate.not_valid_after_utc.isoformat(),
        "days_left": _days_left(certificate),
        "sha256": certificate.fingerprint(hashes.SHA256()).hex(),
    }


def _show(options: argparse.Namespace) -> None:
    certificate = _read_certificate(options.file)
    if options.json:
        print_json(described(certificate))
        return
    lines = (
        f"subject     {subject_of(certificate)}",
        f"identities  {', '.join(dns_names(certificate)) or 'none'}",
        f"issuer      {certificate.issuer.rfc4514_string()!a}",
        f"valid from  {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC",
        f"valid to    {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC",
        f"days left   {_days_left(certificate)}",
        f"SHA-256     {certificate.fingerprint(hashes.SHA256()).hex()}",
    )
    sys.stdout.write("\n".join(map(visible, lines)) + "\n")


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(f"expected 1 to {AUTHORITY_DAYS}, got {days}")
    return days


def parser(program: str = "splitveil-certs") -> argparse.ArgumentParser:
    """Return the command's parser.

    Args:
        program: the words with which it is called.
    """
    certs = argparse.ArgumentParser(
        prog=program, description="Make trial certificates, or show any certificate."
    )
    add_version(certs)
    add_completion(certs)
    commands = certs.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="make an authority and one certificate per party")
    init.add_argument("folder", type=Path, metavar="DIR", help="parent of the parties' folders")
    init.add_argument(
        "--party", action="append", metavar="NAME", help="default: active and passive"
    )
    init.add_argument(
        "--name-of",
        action="append",
        default=[],
        metavar="NAME=DNS_NAME",
        help="identity of a party, as in the contract's identities (default: NAME.splitveil)",
    )
    init.add_argument(
        "--keep",
        action="store_true",
        help=f"keep existing certificates; renew those that expire within {SOON_DAYS} days",
    )
    init.set_defaults(action=_init)
    renew = commands.add_parser("renew", help="replace a party's certificate and key")
    renew.add_argument("folder", type=Path, metavar="DIR", help="as given to init")
    renew.add_argument("--party", required=True, metavar="NAME")
    renew.set_defaults(action=_renew)
    for command in (init, renew):
        command.add_argument(
            "--days", type=_days, default=PARTY_DAYS, help=f"validity (default: {PARTY_DAYS})"
        )
    show = commands.add_parser("show", help="print the content of a certificate")
    show.add_argument("file", type=Path, metavar="FILE")
    show.set_defaults(action=_show)
    for command in (init, renew, show):
        add_json(command)
    return certs


if __name__ == "__main__":
    raise SystemExit(main())
