"""Serves nothing but probes, so that both parties can check their connection before a run."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import grpc
from grpc_health.v1 import health_pb2

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import PeerUnreachable
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import form_of_own_ids
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.run.messages import IdForm
from splitveil.common.wire import probes
from splitveil.common.wire.endpoint import build_server
from splitveil.common.wire.limits import SERVICE

logger = logging.getLogger(__name__)

QUIET_S = 3.0
"""Seconds without a probe after which the other party has measured enough."""
_POLL_S = 0.1
_ONE_WAY_S = 1.0
"""Time allowed for a message, whose delay cannot be measured one way."""


class ProbeServer:
    def __init__(
        self,
        contract: Contract,
        address: str,
        credentials: CredentialFiles | None,
        id_form: IdForm | None,
    ) -> None:
        self._contract = contract
        self._own = probes.Introduction(ACTIVE, contract.canonical_json(), time.time(), id_form)
        self._introduced: dict[str, tuple[probes.Introduction, float, bytes]] = {}
        """By party: what it said, the seconds that its clock is ahead, less its message's travel
        time, and its certificate in PEM form, empty without TLS."""

        self._responder = probes.ProbeResponder(contract, id_form, self._note)
        refused = partial(logger.warning, "refused a probe: %s")
        self._server, health = build_server(contract, SERVICE, address, credentials, refused)
        health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._responder.add_to(self._server)

    def wait(self, wait_s: float, interruption: Interruption) -> None:
        """Serve until all passive parties have introduced themselves and fallen silent."""
        self._server.start()
        deadline = time.monotonic() + wait_s
        try:
            while missing := set(self._contract.passive_parties) - self._introduced.keys():
                interruption.check()
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(missing))
                    raise PeerUnreachable(
                        f"no probe came from {names} within {wait_s:g} s: splitveil check FILE "
                        f"--connect sends it, over there"
                    )
                time.sleep(_POLL_S)
            while time.monotonic() - self._responder.probed_at < QUIET_S:
                interruption.check()
                time.sleep(_POLL_S)
        finally:
            self._server.stop(QUIET_S).wait()

    def checks(self) -> Iterator[probes.Check]:
        for name, (peer, ahead_s, certificate) in self._introduced.items():
            owner = f"party {name}"
            if certificate:
                yield partial(probes.certificate_in_words, certificate, owner)
            yield partial(probes.clock_in_words, ahead_s, _ONE_WAY_S)
            yield from probes.checks_of(self._contract, self._own, peer, owner)

    def _note(self, peer: probes.Introduction, context: grpc.ServicerContext) -> None:
        if peer.party not in self._contract.passive_parties:
            return  # without TLS anybody on this machine may call
        # grpcio's stubs declare bytes where lists of bytes arrive.
        shown = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
        certificate = b"".join(shown.get("x509_pem_cert", [])[:1])
        self._introduced[peer.party] = (peer, peer.clock_s - time.time(), certificate)


def probe_checks(settings: ActiveSettings, wait_s: float) -> Iterator[probes.Check]:
    contract = settings.contract
    form = form_of_own_ids(settings)
    server = ProbeServer(contract, settings.listen, credential_files(settings, ACTIVE), form)
    logger.info("waiting up to %g s for splitveil check passive.yaml --connect", wait_s)
    interruption = Interruption()
    interruption.install()
    server.wait(wait_s, interruption)
    yield from server.checks()
