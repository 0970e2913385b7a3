"""Messages of a real run, and mutants of them as a broken or hostile peer might send."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import grpc

from splitveil.active_party.grpc_server.server import method_handlers
from splitveil.active_party.grpc_server.service import ActiveService
from splitveil.common.record.transcript import Crossing, Transcript
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Activation
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.limits import PARTY_KEY, SMALL_BYTES, Refused, reader
from splitveil.common.wire.status import ErrorInterceptor
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.loopback import peer_of, serving
from tests.support.runs import Parties

METHODS = ("Handshake", "Align", "Train", "Evaluate", "Leave")
UNARY = frozenset({"Handshake", "Leave"})
_VARINT, _LENGTH_DELIMITED = 0, 2
_EXTREMES = (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


class Tape:
    """Keeps every message that crosses the wire, where a transcript keeps its digest."""

    def __init__(self) -> None:
        self.messages: dict[str, list[bytes]] = {}
        self.is_full = False
        self._lock = threading.Lock()

    def note(self, crossing: Crossing) -> None:
        with self._lock:
            if self.is_full:
                return
            self.messages.setdefault(crossing.kind, []).append(crossing.data)

    def requests(self) -> dict[str, list[bytes]]:
        """Return the passive party's messages so far, by method; goodbyes are for another run."""
        with self._lock:
            sent = {m: list(self.messages.get(f"{m} request", ())) for m in METHODS}
        run_id = pb.TensorFrame.FromString(sent["Train"][0]).run_id
        # A right goodbye ends a run, and rightly so.
        leave = pb.LeaveRequest(run_id=run_id[:-1] + "?", reason=pb.LEAVE_REASON_FINISHED)
        sent["Leave"] = [leave.SerializeToString()]
        return sent

    def as_transcript(self) -> Transcript:
        return cast("Transcript", self)


class Mutant(NamedTuple):
    """A message to send, and its history."""

    method: str
    data: bytes
    how: str


class Mutator:
    """Draws mutants of recorded messages; the same seed gives the same mutants.

    Tensors must have been answered: an unanswered one with other numbers under its valid header
    would be an activation that a peer may send. Nor are valid goodbyes to the run ``run_id`` drawn,
    which a peer may send.
    """

    def __init__(
        self, messages: Mapping[str, Sequence[bytes]], seed: int, run_id: str = ""
    ) -> None:
        self._run_id = run_id
        self._messages = {method: list(kept) for method, kept in messages.items() if kept}
        self._methods = sorted(self._messages)
        self._random = random.Random(seed)
        self._ways: dict[str, Callable[[bytes], bytes]] = {
            "bits": self._flip_bits,
            "cut": self._cut,
            "twice": self._double_a_part,
            "inserted": self._insert,
            "spliced": self._splice,
            "swapped": self._swap_fields,
            "extreme": self._extreme_number,
            "length": self._lie_about_length,
            "unchanged": bytes,
            "junk": lambda _: self._random.randbytes(self._random.randrange(200)),
        }

    def draw(self) -> Mutant:
        """Return the next mutant: half are changed repeatedly, one in ten has a wrong method."""
        mutant = self._draw()
        while mutant.method == "Leave" and self._is_goodbye(mutant.data):
            mutant = self._draw()
        return mutant

    def _is_goodbye(self, data: bytes) -> bool:
        message = reader(pb.LeaveRequest, SMALL_BYTES)(data)
        return not isinstance(message, Refused) and (
            message.run_id == self._run_id and message.reason != pb.LEAVE_REASON_UNSPECIFIED
        )

    def _draw(self) -> Mutant:
        method = self._random.choice(self._methods)
        data = self._random.choice(self._messages[method])
        if self._random.random() < 0.1:
            return Mutant(self._random.choice(self._methods), data, "wrong method")
        ways = self._random.choices(list(self._ways), k=self._random.choice((1, 1, 2, 3)))
        for way in ways:
            data = self._ways[way](data)
        return Mutant(method, data, "+".join(ways))

    def mutate(self, data: bytes) -> bytes:
        """Return one message, changed in one way; by chance it may remain the same."""
        return self._random.choice(list(self._ways.values()))(data)

    def _flip_bits(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8)) if data else 0):
            # Half of the flips where the small fields are: payloads are most of the bytes.
            end = len(data) if self._random.random() < 0.5 else min(len(data), 80)
            changed[self._random.randrange(end)] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data) + 1)]

    def _part(self, data: bytes) -> slice:
        first, last = sorted(self._random.randrange(len(data) + 1) for _ in range(2))
        return slice(first, last)

    def _double_a_part(self, data: bytes) -> bytes:
        part = self._part(data)
        return data[: part.stop] + data[part] + data[part.stop :]

    def _insert(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data) + 1)
        return data[:at] + self._random.randbytes(self._random.randrange(1, 40)) + data[at:]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._messages[self._random.choice(self._methods)])
        return data[: self._part(data).start] + other[self._part(other).start :]

    def _swap_fields(self, data: bytes) -> bytes:
        """Exchange the values of two fields of one wire type, or the order of two fields."""
        fields = list(_fields(data))
        if len(fields) < 2:
            return data
        one, other = self._random.sample(range(len(fields)), 2)
        (tag, value), (other_tag, other_value) = fields[one], fields[other]
        if tag & 7 == other_tag & 7 and self._random.random() < 0.7:
            fields[one], fields[other] = (tag, other_value), (other_tag, value)
        else:
            fields[one], fields[other] = fields[other], fields[one]
        return b"".join(_varint(tag) + value for tag, value in fields)

    def _extreme_number(self, data: bytes) -> bytes:
        fields = list(_fields(data))
        numbers = [at for at, (tag, _) in enumerate(fields) if tag & 7 == _VARINT]
        number = _varint(self._random.choice(_EXTREMES))
        if not numbers:  # one that was not there: any field of the message
            return data + _varint(self._random.randrange(1, 16) << 3) + number
        at = self._random.choice(numbers)
        fields[at] = (fields[at][0], number)
        return b"".join(_varint(tag) + value for tag, value in fields)

    def _lie_about_length(self, data: bytes) -> bytes:
        fields = list(_fields(data))
        lengths = [at for at, (tag, _) in enumerate(fields) if tag & 7 == _LENGTH_DELIMITED]
        if not lengths:
            return data
        at = self._random.choice(lengths)
        tag, value = fields[at]
        announced, start = _read_varint(value, 0)
        lie = self._random.choice((announced + 1, max(announced - 1, 0), *_EXTREMES))
        fields[at] = (tag, _varint(lie) + value[start:])
        return b"".join(_varint(tag) + value for tag, value in fields)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and value of each field, up to the first byte that cannot be parsed."""
    at = 0
    while at < len(data):
        try:
            tag, start = _read_varint(data, at)
            if tag & 7 == _VARINT:
                _, end = _read_varint(data, start)
            elif tag & 7 == _LENGTH_DELIMITED:
                length, payload = _read_varint(data, start)
                end = payload + length
            else:
                return
        except IndexError:
            return
        if end > len(data):
            return
        yield tag, data[start:end]
        at = end


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


# ---- ways to send them ----


class _Aborted(Exception):
    """Stands for the exception with which gRPC's own context aborts."""


class _Context:
    """The context of a call in this process, which keeps its status."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def end(self) -> None:
        for callback in self._callbacks:
            callback()

    def is_active(self) -> bool:
        return True

    def cancel(self) -> None:
        self.code = grpc.StatusCode.CANCELLED

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self.code = code
        raise _Aborted(details)


class DirectSender:
    """Calls the handlers of a service in this process, as the server does, but without a wire."""

    def __init__(self, service: ActiveService, contract: Contract) -> None:
        interceptor = ErrorInterceptor(service.on_error)
        details = cast("grpc.HandlerCallDetails", None)
        self._handlers: dict[str, Any] = {
            method: interceptor.intercept_service(_always(handler), details)
            for method, handler in method_handlers(service).items()
        }

    def send(self, method: str, messages: Sequence[bytes]) -> grpc.StatusCode:
        """Make one call with these messages and return its status."""
        handler, context = self._handlers[method], _Context()
        read = handler.request_deserializer or bytes
        requests = (read(data) for data in messages)
        try:
            if handler.unary_unary is not None:
                handler.unary_unary(next(requests), context)
            else:
                for _ in handler.stream_stream(requests, context):
                    pass
        except _Aborted:
            pass
        finally:
            context.end()
        return context.code


def _always(handler: Any) -> Callable[[Any], Any]:
    return lambda _: handler


class WireSender:
    def __init__(self, port: int, party: str | None = None) -> None:
        self._metadata = () if party is None else ((PARTY_KEY, party),)
        # Of its own: channels with the same address and options would share one.
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
        )

    def send(self, method: str, messages: Sequence[bytes]) -> grpc.StatusCode:
        try:
            if method in UNARY:
                unary: Any = self._channel.unary_unary(method_path(method))
                unary(messages[0], timeout=300, metadata=self._metadata)
            else:
                call: Any = self._channel.stream_stream(method_path(method))
                for _ in call(iter(messages), timeout=300, metadata=self._metadata):
                    pass
        except grpc.RpcError as error:
            return cast("grpc.Call", error).code()
        return grpc.StatusCode.OK

    def close(self) -> None:
        self._channel.close()


def send_mutants(
    sender: DirectSender | WireSender, mutator: Mutator, count: int
) -> Counter[tuple[str, str]]:
    """Send mutants, up to four in a row on a stream, and count statuses by method."""
    statuses: Counter[tuple[str, str]] = Counter()
    row: list[bytes] = []
    for number in range(count):
        mutant = mutator.draw()
        if mutant.method in UNARY:
            messages = [mutant.data]
        elif number % 3 == 0 and len(row) < 4:
            row.append(mutant.data)
            continue
        else:
            messages, row = [*row, mutant.data], []
        statuses[mutant.method, sender.send(mutant.method, messages).name] += 1
    return statuses


# ---- a run in the midst of which they come ----


class AtStep(GrpcPeer):
    """Does something before the activation of a step leaves, and before any evaluation."""

    actions: Mapping[int, Callable[[], None]]
    count = 0

    def send_activation(self, activation: Activation) -> None:
        self.count += 1
        self.actions.get(self.count, lambda: None)()
        super().send_activation(activation)


def run_disturbed(
    parties: Parties, port: int, tape: Tape, actions: Mapping[int, Callable[[ActiveService], None]]
) -> ActiveService:
    with (
        serving(parties, port, transcript=tape.as_transcript()) as service,
        peer_of(parties, port, kind=AtStep) as peer,
    ):
        peer.actions = {step: partial(act, service) for step, act in actions.items()}
        parties.run.run(peer)
    return service
