"""Mutual TLS for gRPC, and the check that a genuine certificate belongs to an expected party."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import grpc
from cryptography import x509

from splitveil import common
from splitveil.common.errors import SettingsError
from splitveil.common.party.credentials import CredentialFiles, Credentials, dns_names, printable
from splitveil.common.run.contract import Contract
from splitveil.common.wire.limits import PARTY_KEY
from splitveil.common.wire.status import UNTRUSTED, Handler, HandlerInterceptor
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

_Shown = Mapping[str, Sequence[bytes]]

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_MAX_REMEMBERED = 1000


def channel_credentials(credentials: Credentials, pinned: bytes) -> grpc.ChannelCredentials:
    """Return the credentials that a client shows, and the only certificate that it trusts."""
    _require_tls_1_3()
    return grpc.ssl_channel_credentials(pinned, credentials.private_key, credentials.certificate)


def server_credentials(files: CredentialFiles) -> grpc.ServerCredentials:
    _require_tls_1_3()
    served = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        now = files.current()
        if now is served:
            return None
        served = now
        return _configuration(now)

    # None means unchanged, which grpcio's stubs do not allow for.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), fetch, require_client_authentication=True
    )


def _require_tls_1_3() -> None:
    if common.GRPC_CAME_FIRST:
        raise SettingsError(
            "gRPC was imported before splitveil, and may agree to TLS 1.2: import splitveil first, "
            f"or start the process with {common.SUITES}={common.NEVER_AGREED} in its environment"
        )


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.private_key, credentials.certificate)], credentials.authority
    )


class PartyInterceptor(HandlerInterceptor):
    """Admits only certain parties of the contract, of all whom the authority has certified.

    It has to be a server's first interceptor: a refused caller gets a fixed sentence, reaches no
    handler, and leaves one line in the log for each connection.

    Args:
        admitted: the parties' names in the contract; by default every passive party.
    """

    def __init__(self, contract: Contract, admitted: Sequence[str] | None = None) -> None:
        names = contract.passive_parties if admitted is None else admitted
        self._kind = "any passive" if admitted is None else f"the {' or '.join(admitted)}"
        self._parties = {contract.identities[name]: name for name in names}
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def wrap(self, handler: Handler, _details: grpc.HandlerCallDetails, /) -> Handler:
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        return handler._replace(**{kind: self._guarded(getattr(handler, kind))})

    def _guarded(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            # grpcio's stubs declare bytes where lists of bytes arrive.
            shown = cast("_Shown", context.auth_context())
            party = self._party_of(shown)
            claimed = {value for key, value in context.invocation_metadata() if key == PARTY_KEY}
            message = "call"
            if isinstance(request, pb.HandshakeRequest):
                claimed.add(request.party)
                message = "handshake"
            if party is None or claimed - {party}:
                self._log_refusal(shown, context.peer(), party, message)
                context.abort(UNTRUSTED.code, UNTRUSTED.details)
            return behaviour(request, context)

        return guarded

    def _party_of(self, shown: _Shown) -> str | None:
        # Not from "peer_dns", in which gRPC cuts a name at its first NUL.
        pem = b"".join(shown.get("x509_pem_cert", [])[:1])
        try:
            names = dns_names(x509.load_pem_x509_certificate(pem))
        except ValueError:
            return None
        parties = {self._parties[name] for name in names if name in self._parties}
        return parties.pop() if len(parties) == 1 else None

    def _log_refusal(self, shown: _Shown, peer: str, party: str | None, message: str) -> None:
        with self._lock:
            if peer in self._logged:
                return
            if len(self._logged) >= _MAX_REMEMBERED:
                self._logged.clear()
            self._logged.add(peer)
        subject = b", ".join(shown.get("x509_subject", [])).decode(errors="replace")
        reason = (
            f"it does not carry the name of {self._kind} party of the contract"
            if party is None
            else f"it is {party}'s, and the {message} names another party"
        )
        logger.warning("refused %s with certificate %s: %s", peer, printable(subject), reason)
