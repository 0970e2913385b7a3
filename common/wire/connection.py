"""The connection to another party: one gRPC channel, renewed when the certificates change."""

import grpc

from splitveil.common.errors import PeerRenewed, SplitveilError
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.wire.endpoint import open_channel
from splitveil.common.wire.http_proxy import HttpProxy
from splitveil.common.wire.noted_calls import Notes, NotingClient
from splitveil.common.wire.status import error_from


class PeerConnection:
    """A channel to another party, opened when it is needed.

    Args:
        contract: gives the limits of messages, and the party's identity.
        credentials: this party's; without them the channel uses plain text, on loopback only.
    """

    def __init__(
        self,
        address: str,
        contract: Contract,
        credentials: CredentialFiles | None = None,
        transcript: Notes | None = None,
        proxy: HttpProxy | None = None,
        party: str = ACTIVE,
    ) -> None:
        self.where = address if proxy is None else f"{address} through the proxy {proxy}"
        """The party's address, in words."""
        self.contract = contract
        self.proxy = proxy
        self.party = party
        self._address = address
        self._files = credentials
        self._shown = None if credentials is None else credentials.current()
        self._transcript = transcript
        # With credentials, the channel can only be opened while the peer answers.
        self._channel = self._open() if credentials is None else None
        self._is_outdated = False

    @property
    def is_outdated(self) -> bool:
        """Whether the next call replaces an existing channel, with all of its streams."""
        return self._is_outdated and self._channel is not None

    def channel(self) -> grpc.Channel:
        """Return the channel, replaced if it was opened with certificates no longer in use.

        Raises PeerError: no server answers, or one that this party does not trust.
        """
        if self.is_outdated:
            self.close()
        self._is_outdated = False
        if self._channel is None:
            self._channel = self._open()
        return self._channel

    def renew(self) -> bool:
        """Use the certificates as they are now, and return whether they have changed.

        An open channel keeps the certificates with which it was opened.
        """
        now = None if self._files is None else self._files.current()
        if now is self._shown:
            return False
        self._shown = now
        self._is_outdated = True
        return True

    def error_of(self, error: Exception) -> SplitveilError:
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        details = error.details() if isinstance(error, grpc.Call) else None
        meaning = error_from(code, details)
        if isinstance(meaning, PeerRenewed):
            self._is_outdated = True
        return meaning

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _noted_party(self) -> str | None:
        """Return the name by which a transcript tells several passive parties apart."""
        is_one_of_many = self.party != ACTIVE and len(self.contract.passive_parties) > 1
        return self.party if is_one_of_many else None

    def _open(self) -> grpc.Channel:
        channel = open_channel(self._address, self.contract, self._shown, self.proxy, self.party)
        if self._transcript is None:
            return channel
        return grpc.intercept_channel(channel, NotingClient(self._transcript, self._noted_party()))
