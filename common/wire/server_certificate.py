"""Fetches, verifies and pins a server's certificate before anything is sent to it.

gRPC's client accepts a wildcard as a name, and the subject's common name where there is no subject
alternative name; and it does not report which certificate it was shown. So the passive party looks
first. It begins a TLS handshake of its own, which verifies the certificate up to the authority, and
compares its DNS names in the way in which the active party compares those of its callers: one of
them has to be the contract's identity, letter for letter except for the case of ASCII letters. That
certificate is then the only one that gRPC is told to trust. A server that answers on gRPC's
connection has to show this very certificate and to hold its key, so all that was verified holds for
that server.

The first handshake ends before this party would show anything about itself, and only the
certificate is kept from it. As in gRPC, a certificate without an extended key usage may serve
either end, one with an extended key usage must allow that of a server, and an authority need not be
self-signed.
"""

import socket
import ssl
import time

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from splitveil.common.errors import PeerError, PeerUnreachable, PeerUntrusted
from splitveil.common.party.credentials import dns_names, printable

LOOK_TIMEOUT_S = 10.0

_CHUNK_BYTES = 65536
_RECORDS_OF_TLS = frozenset(range(20, 24))
"""First byte of every TLS record: change of cipher, alert, handshake, data."""

# OpenSSL's numbers for the faults of a certificate; its words change from version to version.
_UNKNOWN_SIGNER = frozenset({2, 18, 19, 20, 21})
_MEANINGS = {
    7: "a signature in the peer's chain of certificates does not verify: it is damaged, or its "
    "signer only shares the name of an authority in security.authority",
    9: "the peer's certificate is not valid yet, or this machine's clock is wrong",
    10: "the peer's certificate has expired, or this machine's clock is wrong",
    26: "the peer's certificate is not for servers (extended key usage)",
} | dict.fromkeys(
    _UNKNOWN_SIGNER, "the peer's certificate is not signed by any authority in security.authority"
)


def judged_certificate(connection: socket.socket, authority: bytes, identity: str) -> bytes:
    """Return the certificate of the server that answers, in PEM, once it has been verified.

    Args:
        authority: PEM certificates of the authorities whose signatures are trusted.

    Raises PeerUntrusted or PeerUnreachable.
    """
    shown = _shown_certificate(connection, _context(authority), identity)
    names = _dns_names(shown)
    if identity not in names:
        found = ", ".join(printable(name) for name in names) or "none"
        raise PeerUntrusted(
            f"the peer's certificate does not carry the called party's name: "
            f"expected {identity!r} (contract.identities) among the DNS names of its subject "
            f"alternative name, found {found}"
        )
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _context(authority: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it accepts wildcards; names are compared above
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    for certificate in x509.load_pem_x509_certificates(authority):
        context.load_verify_locations(cadata=certificate.public_bytes(Encoding.DER))
    return context


def _shown_certificate(connection: socket.socket, context: ssl.SSLContext, identity: str) -> bytes:
    """Run a handshake until the peer's certificate is verified, and its key is proved to be held.

    This party's last flight is not sent, so the peer learns nothing about this party.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    # As bytes: text would have to be a valid host name, while an identity is never looked up.
    tls = context.wrap_bio(incoming, outgoing, server_hostname=identity.encode())
    deadline = time.monotonic() + LOOK_TIMEOUT_S
    is_first = True
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            received = _exchange(connection, outgoing.read(), deadline)
        except ssl.SSLError as error:
            raise _meaning_of(error) from error
        if is_first and received[0] not in _RECORDS_OF_TLS:
            raise PeerUntrusted("the peer answers without TLS")
        is_first = False
        incoming.write(received)
    shown = tls.getpeercert(binary_form=True)
    if shown is None:
        raise PeerUntrusted("the peer shows no certificate")
    return shown


def _exchange(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    """Send the given bytes, and return the next bytes received."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:  # bytes kept coming, but never enough
        raise PeerUnreachable("no connection to the peer (it does not answer in time)")
    try:
        connection.settimeout(left_s)
        connection.sendall(data)
        received = connection.recv(_CHUNK_BYTES)
    except OSError as error:
        reason = error.strerror or "it does not answer in time"
        raise PeerUnreachable(f"no connection to the peer ({reason})") from error
    if not received:
        raise PeerUnreachable("no connection to the peer (it hangs up)")
    return received


def _meaning_of(error: ssl.SSLError) -> PeerError:
    if isinstance(error, ssl.SSLCertVerificationError):
        otherwise = f"the peer's certificate cannot be trusted ({error.verify_message})"
        return PeerUntrusted(_MEANINGS.get(error.verify_code, otherwise))
    reason = error.reason or "unknown reason"
    if "BAD_SIGNATURE" in reason:
        return PeerUntrusted("the peer does not hold the key of the certificate that it shows")
    if "PROTOCOL" in reason or "HANDSHAKE_FAILURE" in reason:
        return PeerUntrusted("the peer does not speak TLS 1.3")
    return PeerUnreachable(f"no connection to the peer (TLS fails: {reason})")


def _dns_names(certificate: bytes) -> tuple[str, ...]:
    try:
        return dns_names(x509.load_der_x509_certificate(certificate))
    except ValueError as error:
        raise PeerUntrusted("the names in the peer's certificate cannot be read") from error
