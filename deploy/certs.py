"""The command ``splitveil certs``: certificates for both parties, signed by an authority.

``init`` makes everything at one place, for a trial. With ``request`` and ``sign``, each party makes
its own key, which never leaves its machine. Parties that have their own certification authority do
not need this command: the settings accept certificates from anywhere.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from pydantic import TypeAdapter, ValidationError

from splitveil.common.errors import SettingsError
from splitveil.common.party.arguments import Commands, Parser, add_json, print_json
from splitveil.common.party.credentials import SOON_DAYS, days_until, dns_names, subject_of
from splitveil.common.run.contract import ACTIVE, DnsName, Name
from splitveil.common.text.log_lines import configure_logging
from splitveil.common.text.visible_text import visible
from splitveil.common.text.wording import add_version
from splitveil.deploy.authority import (
    AUTHORITY_DAYS,
    PARTY_DAYS,
    REQUEST,
    PartyFolder,
    authority_folder,
    fingerprint_of,
    fingerprint_of_key,
    keep_certificates,
    kind_of_file,
    make_authority,
    make_certificates,
    make_request,
    read_certificate,
    read_request,
    renew_certificate,
    sign_request,
)

logger = logging.getLogger("splitveil.deploy.certs")


def run(options: argparse.Namespace) -> int:
    configure_logging("certs")
    options.action(options)
    return 0


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
    _warn_of_key(options.folder)
    _print_made(options, parties)


def _warn_of_key(folder: Path) -> None:
    logger.warning(
        "anyone who has %s can impersonate any party: keep it offline, and give each party only "
        "its own folder",
        authority_folder(folder).private_key,
    )


def _authority(options: argparse.Namespace) -> None:
    made = make_authority(options.folder)
    _warn_of_key(options.folder)
    written = str(authority_folder(options.folder).certificate)
    _print_lines(options, {"written": written, "authority": fingerprint_of(made.certificate)})


def _request(options: argparse.Namespace) -> None:
    own, name = PartyFolder(options.folder / options.party), _name_of(options)
    fingerprint, is_new_key = make_request(options.folder, options.party, name)
    found = {
        "private key": str(own.private_key),
        "request": str(own.folder / REQUEST),
        "identity": name,
        "public key": fingerprint,
    }
    _print_lines(
        options,
        found,
        f"{'a new' if is_new_key else 'the same'} private key (mode 0600), which stays here; "
        f"send the request to the authority, and read the public key's SHA-256 out over the phone",
    )


def _sign(options: argparse.Namespace) -> None:
    own = PartyFolder(options.output or options.folder / options.party)
    name, said = _name_of(options), options.fingerprint
    key, authority = sign_request(options.folder, options.request, own, name, options.days, said)
    found = {
        "identity": name,
        "public key": key,
        "authority": authority,
        "certificate": str(own.certificate),
    }
    heard = "" if said else "compare both SHA-256 over the phone, then "
    _print_lines(options, found, f"{heard}send {own.certificate} and {own.authority} back")


def _name_of(options: argparse.Namespace) -> str:
    _check_party(options.party)
    return _dns_name(options.party, options.name or f"{options.party}.splitveil")


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
    if options.json:
        files = {party: PartyFolder(options.folder / party).certificate for party in parties}
        print_json({party: described(read_certificate(path)) for party, path in files.items()})


def described(certificate: x509.Certificate) -> dict[str, Any]:
    return {
        "subject": subject_of(certificate),
        "identities": dns_names(certificate),
        "issuer": certificate.issuer.rfc4514_string(),
        "valid_from": certificate.not_valid_before_utc.isoformat(),
        "valid_to": certificate.not_valid_after_utc.isoformat(),
        "days_left": days_until(certificate.not_valid_after_utc),
        "sha256": certificate.fingerprint(hashes.SHA256()).hex(),
        "public_key": _key_of(certificate),
    }


def _show(options: argparse.Namespace) -> None:
    found = kind_of_file(options.file)
    if found == "a certificate signing request":
        request = read_request(options.file)
        subject = request.subject.rfc4514_string()
        _print_lines(options, {"subject": subject, "public key": _key_of(request)})
        return
    if found != "a certificate":
        expected = "expected a certificate or a certificate signing request in PEM form"
        raise SettingsError(f"{options.file}: {expected}, found {found}")
    certificate = read_certificate(options.file)
    lines = described(certificate)
    if not options.json:
        lines["identities"] = ", ".join(lines["identities"]) or "none"
        lines["sha256"] = fingerprint_of(certificate)
    _print_lines(options, lines)


def _key_of(found: x509.Certificate | x509.CertificateSigningRequest) -> str:
    key = found.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey):
        return fingerprint_of_key(key)
    return "of another kind than EC or RSA"


def _print_lines(options: argparse.Namespace, found: dict[str, Any], advice: str = "") -> None:
    if options.json:
        print_json({name.replace(" ", "_"): value for name, value in found.items()})
        return
    for name, value in (found | ({"next": advice} if advice else {})).items():
        sys.stdout.write(visible(f"{name.replace('_', ' '):<11} {value}") + "\n")


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(f"expected 1 to {AUTHORITY_DAYS}, got {days}")
    return days


def parser(program: str) -> argparse.ArgumentParser:
    certs = Parser(prog=program, example="init certificates")
    add_version(certs)
    commands: Commands = certs.add_subparsers(dest="command", required=True)

    def add(name: str, action: Callable[..., None], what: str, example: str) -> Parser:
        command: Parser = commands.add_parser(name, help=what, example=example)
        command.set_defaults(action=action)
        add_json(command)
        return command

    init = add("init", _init, "make an authority and one certificate per party", "certificates")
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
    authority = add("authority", _authority, "make only an authority", "certificates")
    authority.add_argument("folder", type=Path, metavar="DIR", help="parent of its folder")
    what, example = "make a key, and a request for its certificate", "certificates --party passive"
    request = add("request", _request, what, example)
    request.add_argument("folder", type=Path, metavar="DIR", help="parent of the party's folder")
    example = "certificates request.pem --party passive"
    sign = add("sign", _sign, "sign a party's request", example)
    sign.add_argument("folder", type=Path, metavar="DIR", help="parent of the authority's folder")
    sign.add_argument("request", type=Path, metavar="REQUEST", help="the file that was sent")
    sign.add_argument("--output", type=Path, metavar="DIR", help="default: DIR/NAME")
    sign.add_argument(
        "--fingerprint",
        metavar="SHA256",
        help="the public key's SHA-256 as the other side reads it out: sign no other key",
    )
    for command in (request, sign):
        command.add_argument("--party", required=True, metavar="NAME", help="as in the contract")
        command.add_argument(
            "--name", metavar="DNS_NAME", help="as in its identities (default: NAME.splitveil)"
        )
    what, example = "replace a party's certificate and key", "certificates --party active"
    renew = add("renew", _renew, what, example)
    renew.add_argument("folder", type=Path, metavar="DIR", help="as given to init")
    renew.add_argument("--party", required=True, metavar="NAME")
    for command in (init, sign, renew):
        command.add_argument(
            "--days", type=_days, default=PARTY_DAYS, help=f"validity (default: {PARTY_DAYS})"
        )
    show = add("show", _show, "print the content of a certificate or request", "request.pem")
    show.add_argument("file", type=Path, metavar="FILE")
    return certs
