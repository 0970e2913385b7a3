"""The connection to another party: its channel and streams, and repeated attempts to get an answer.

The channel is renewed when the certificates change. A stream has a deadline for every answer.
"""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from splitveil.common import errors
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.text.log_lines import log_fields
from splitveil.common.wire.endpoint import open_channel
from splitveil.common.wire.http_proxy import HttpProxy
from splitveil.common.wire.recorded_calls import Notes, NotingClient
from splitveil.common.wire.status import error_from


class PeerConnection:
    """A channel to another party, opened when needed; without credentials in plain text."""

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
        """Return the channel, replaced if its certificates are out of use. Raises PeerError."""
        if self.is_outdated:
            self.close()
        self._is_outdated = False
        if self._channel is None:
            self._channel = self._open()
        return self._channel

    def renew(self) -> bool:
        """Use the certificates as they are now, and return whether they have changed."""
        now = None if self._files is None else self._files.current()
        if now is self._shown:
            return False
        self._shown = now
        self._is_outdated = True
        return True

    def error_of(self, error: Exception) -> errors.SplitveilError:
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        details = error.details() if isinstance(error, grpc.Call) else None
        meaning = error_from(code, details)
        if isinstance(meaning, errors.PeerRenewed):
            self._is_outdated = True
        return meaning

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> grpc.Channel:
        channel = open_channel(self._address, self.contract, self._shown, self.proxy, self.party)
        if self._transcript is None:
            return channel
        is_one_of_many = self.party != ACTIVE and len(self.contract.passive_parties) > 1
        noting = NotingClient(self._transcript, self.party if is_one_of_many else None)
        return grpc.intercept_channel(channel, noting)


FAREWELL_S = 2.0  # time that the other side of a stream may take to close it as well
Interruption = Callable[[], int | None]


class MessageStream:
    """One bidirectional stream, with a deadline for every answer instead of one for the stream."""

    def __init__(
        self,
        method: Any,
        deadline_s: float,
        interruption: Interruption,
        error_of: Callable[[Exception], errors.SplitveilError],
    ) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = method(iter(self._outgoing.get, None))
        self._deadline_s = deadline_s
        self._interruption = interruption
        self._error_of = error_of
        self._waiting_since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="stream-deadline", daemon=True).start()

    def send_all(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._outgoing.put(message)

    def receive(self) -> Any:
        self._waiting_since = time.monotonic()
        try:
            return next(self._call)
        except StopIteration as error:
            raise errors.PeerUnreachable("the peer closed the stream") from error
        except grpc.RpcError as error:
            raise self._error_of(error) from error
        finally:
            self._waiting_since = None

    def finish(self) -> None:
        """Close this side, and give the other side a moment to close its own."""
        self._outgoing.put(None)
        ended = threading.Event()
        if self._call.add_callback(ended.set):
            ended.wait(FAREWELL_S)
        self.drop()

    def drop(self) -> None:
        """Abandon the stream; messages not yet received are lost."""
        self._closed.set()
        self._outgoing.put(None)
        self._call.cancel()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            since = self._waiting_since
            if since is None:
                continue
            patience = 5.0 if self._interruption() is not None else self._deadline_s
            if time.monotonic() - since > patience:
                self._call.cancel()


logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.2
"""Wait before the first new attempt to reach the peer; each further one is twice as long."""

LONGEST_WAIT_S = 1.0

MAX_DAMAGED = 3
"""Times in a row that a question is asked again because it, or its answer, arrived damaged."""

ResultT = TypeVar("ResultT")
NoteAttempt = Callable[[errors.PeerError | None], None]
"""Called after each attempt to ask the peer, with its error if it failed."""


class Retrying:
    def __init__(
        self,
        settings: ReconnectSettings,
        interruption: Interruption,
        where: str,
        renew: Callable[[], bool],
        note: NoteAttempt = lambda _: None,
    ) -> None:
        self._settings = settings
        self._interruption = interruption
        self._where = where
        self._renew = renew
        self._note = note
        self._was_answered = False

    def until_answered(self, ask: Callable[[], ResultT]) -> ResultT:
        """Ask until an answer comes, ``reconnect.max_s`` have passed, or a signal says stop.

        A question that arrived damaged, or whose answer did, is asked a few more times: the same
        bytes get the same answer.

        Raises PeerUnreachable, PeerUntrusted, ProtocolError or Interrupted.
        """
        wait_s = FIRST_WAIT_S
        lost_at: float | None = None
        damaged = 0
        while True:
            try:
                answer = self._noted(ask)
            except (errors.PeerUntrusted, errors.ProtocolError) as error:
                # The trusted certificates may have been replaced since the channel was made.
                if isinstance(error, errors.PeerUntrusted) and self._renew():
                    continue
                damaged += 1
                hopeless = isinstance(error, errors.PeerUntrusted) and not self._was_answered
                if hopeless or damaged > MAX_DAMAGED:
                    raise
                logger.warning("%s; asking again", error)
                left_s = wait_s
            except errors.PeerUnreachable as error:
                if lost_at is None:
                    lost_at = time.monotonic()
                    logger.warning(
                        "%s at %s; trying for up to %g s",
                        error,
                        self._where,
                        self._settings.max_s,
                        extra=log_fields(reason=type(error).__name__),
                    )
                left_s = lost_at + self._settings.max_s - time.monotonic()
                if left_s <= 0:
                    raise errors.PeerUnreachable(
                        f"{self._where} has not answered for {self._settings.max_s:g} s "
                        f"(reconnect.max_s)"
                    ) from error
            else:
                self._was_answered = True
                return answer
            self._renew()
            self.sleep(min(wait_s * random.uniform(0.5, 1.0), left_s))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _noted(self, ask: Callable[[], ResultT]) -> ResultT:
        try:
            answer = ask()
        except errors.PeerError as error:
            self._note(error)
            raise
        self._note(None)
        return answer

    def sleep(self, wait_s: float) -> None:
        """Wait, in steps short enough to notice a signal, or raise Interrupted."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            signal_number = self._interruption()
            if signal_number is not None:
                raise errors.Interrupted(signal_number)
            time.sleep(min(left, 0.1))
