"""The transcript records every message that crossed the wire, for accountability, and is verified.

``transcript.jsonl`` has one line per message in either direction: time, kind, step, number of bytes
and their BLAKE3. Where the active party answers other programs, it also has one per request: who
asked, for how many ids, and the status. It contains neither content nor labels nor predictions nor
settings: it is meant to be handed to the other party. Every line carries the SHA-256 of the
previous line, so that a line that is changed, dropped or moved later is detected. Cutting off the
end leaves an intact chain; therefore the last link is also written to the log and to
``summary.json``, and the other party's transcript shows the missing lines.
"""

import hashlib
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from blake3 import blake3
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)

from splitveil.common.errors import StorageError
from splitveil.common.record.run_folder import open_unbuffered_to_append, write_whole
from splitveil.common.run.contract import NAME_CHARACTERS
from splitveil.common.text.files import Closing, check_regular
from splitveil.common.text.wording import VERSION
from splitveil.protos import split_learning_pb2 as pb

LINE_BYTES = 64 * 1024  # more than a hundred times our longest line

# The kinds of all messages of the protocol.
KINDS = frozenset(
    f"{call.name} {side}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for call in service.methods
    for side in ("request", "reply")
)


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError("expected a message of the protocol")
    return kind


_Count = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""The range of the messages' fields: a peer's number is recorded as received."""
_Link = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
_Digest = Annotated[str, Field(pattern=r"\Ablake3:[0-9a-f]{64}\z")]
_Party = Annotated[str, Field(max_length=NAME_CHARACTERS)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    number: _Count
    link: _Link
    party: _Party | None = None


class OpeningLine(_Line):
    event: Literal["opened"]
    version: Annotated[str, Field(max_length=64)] | None = None  # of splitveil


class Crossed(_Line):
    direction: Literal["sent", "received"]
    kind: Annotated[str, AfterValidator(_known)]
    epoch: _Count | None
    step: _Count | None
    digest: _Digest


class AnsweredRequest(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    program: Annotated[str, Field(max_length=NAME_CHARACTERS)]
    """The program that asked."""
    num_ids: Annotated[int, Field(ge=0, lt=2**32)]
    found: Annotated[int, Field(ge=0, lt=2**32)]
    """Number of ids that got a prediction."""
    status: Annotated[int, Field(ge=100, lt=1000)]
    """As in HTTP."""
    milliseconds: float


class AnsweredLine(_Line, AnsweredRequest):
    event: Literal["answered"]


def _which(value: object) -> str:
    if not isinstance(value, dict) or "event" not in value:
        return "crossed"
    return "answered" if value["event"] == "answered" else "opening"


Entry = OpeningLine | Crossed | AnsweredLine

_ENTRY: TypeAdapter[Entry] = TypeAdapter(
    Annotated[
        Annotated[OpeningLine, Tag("opening")]
        | Annotated[Crossed, Tag("crossed")]
        | Annotated[AnsweredLine, Tag("answered")],
        Discriminator(_which),
    ]
)


def _parsed(line: bytes) -> Entry | str:
    """Return the entry that a line holds, or why it holds none."""
    if len(line) > LINE_BYTES:
        return f"the line is not an entry: expected at most {LINE_BYTES:,} bytes"
    try:
        return _ENTRY.validate_json(line)
    except ValidationError as error:
        location = error.errors(include_input=False, include_url=False)[0]["loc"]
        # Our own name of the field; the content of the line is never repeated.
        field = f": {location[1]} is missing or invalid" if len(location) > 1 else ""
        return f"the line is not an entry{field}"


logger = logging.getLogger(__name__)

FILE = "transcript.jsonl"

Direction = Literal["sent", "received"]

_FIRST_LINK = 64 * "0"
_QUEUED_BYTES = 8 * 2**20  # that may wait to be written before the next message waits too
_HURRIED_BYTES = _QUEUED_BYTES * 3 // 4  # beyond which the thread writes at once
_GATHERED_S = 0.02
"""Time to gather messages: a thread that works during a step takes the interpreter from it, and
each wake-up costs more than a line."""
_OTHER: Mapping[str, Direction] = {"sent": "received", "received": "sent"}


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Crossing(NamedTuple):
    direction: Direction
    kind: str  # the call and its side, for instance ``Train reply``
    data: bytes
    epoch: int | None = None
    step: int | None = None
    party: str | None = None  # the passive party at the other end, if there is more than one


class TranscriptEnd(NamedTuple):
    """The end of a transcript, which shows whether anything was cut off behind it."""

    entries: int
    last_link: str


class Transcript(Closing):
    """Writes one party's transcript in a thread of its own; training seldom waits for it.

    An existing file is continued, and its chain with it. Lines that a killed process had not
    written yet are missing; the next process adds a line that records its start.
    """

    def __init__(self, folder: Path, party: str) -> None:
        self._path = folder / FILE
        self._waiting: deque[tuple[float, Crossing | AnsweredRequest]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        self._error: OSError | None = None
        self._closed = False
        try:
            self._number, self._link = _continue(self._path)
            self._file = open_unbuffered_to_append(self._path)
        except OSError as error:
            raise self._storage_error(error) from error
        try:
            self._write({"event": "opened", "party": party, "version": VERSION}, time.time())
        except OSError as error:
            self._close_file()
            raise self._storage_error(error) from error
        self._thread = threading.Thread(target=self._work, name="transcript", daemon=True)
        self._thread.start()

    def note(self, crossing: Crossing) -> None:
        """Record a message; waits only if the disk is far behind. Raises StorageError."""
        if self._error is not None:
            raise self._storage_error(self._error)
        if self._closed:
            return
        now = time.time()
        with self._changed:
            while self._queued_bytes >= _QUEUED_BYTES:
                self._changed.wait()
            self._queued_bytes += len(crossing.data)
            self._put(now, crossing)
            if self._queued_bytes >= _HURRIED_BYTES:
                self._hurry.set()

    def note_answered(self, answered: AnsweredRequest) -> None:
        self.check()
        if not self._closed:
            with self._changed:
                self._put(time.time(), answered)

    def check(self) -> None:
        """Notice without an entry that an earlier one could not be written. Raises StorageError."""
        if self._error is not None:
            raise self._storage_error(self._error)

    def summary(self) -> TranscriptEnd:
        """Return number and last link of the lines, for ``summary.json``; call it when closed."""
        return TranscriptEnd(self._number, self._link)

    def close(self) -> None:
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._hurry.set()
        self._thread.join()
        self._close_file()
        if self._error is not None:
            raise self._storage_error(self._error)
        logger.debug("transcript: %d entries, the last link is %s", self._number, self._link)

    def _put(self, when: float, what: Crossing | AnsweredRequest) -> None:
        self._waiting.append((when, what))
        if len(self._waiting) == 1:
            self._changed.notify_all()

    def _work(self) -> None:
        while entries := self._gathered():
            for when, what in entries:
                if self._error is None:
                    try:
                        self._write(self._entry(what), when)
                    except OSError as error:
                        self._error = error
                if isinstance(what, Crossing):
                    with self._changed:
                        self._queued_bytes -= len(what.data)
                        self._changed.notify_all()

    def _gathered(self) -> list[tuple[float, Crossing | AnsweredRequest]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
        self._hurry.wait(_GATHERED_S)
        with self._changed:
            self._hurry.clear()
            if self._closed:
                self._hurry.set()
            entries = list(self._waiting)
            self._waiting.clear()
        return entries

    def _entry(self, what: Crossing | AnsweredRequest) -> dict[str, Any]:
        if isinstance(what, AnsweredRequest):
            return {"event": "answered"} | what.model_dump(exclude_none=True)
        entry: dict[str, Any] = {"direction": what.direction, "kind": what.kind}
        entry |= {"epoch": what.epoch, "step": what.step, "bytes": len(what.data)}
        # Four times as fast as SHA-256 even where the processor has instructions for that one.
        entry["digest"] = f"blake3:{blake3(what.data).hexdigest()}"
        if what.party is not None:
            entry["party"] = what.party
        return entry

    def _write(self, entry: dict[str, Any], when: float) -> None:
        time_in_words = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
        whole = {"number": self._number, "time": time_in_words} | entry | {"link": self._link}
        line = _to_json(whole).encode()
        write_whole(self._file, line + b"\n")
        self._number += 1
        self._link = hashlib.sha256(line).hexdigest()

    def _close_file(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # a network disk may report an error only now
            self._error = self._error or error

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path}: cannot be written: {error.strerror}")


class Broken(NamedTuple):
    line: int
    reason: str


Noted = tuple[Direction, str, int | None, int | None, str]
"""Direction, kind, epoch, step and digest of a message."""


class Verified(NamedTuple):
    entries: int
    last_link: str
    party: str | None  # the party that wrote it
    crossings: Mapping[str | None, Counter[Noted]]  # party at the other end, if one of several

    def with_party(self, name: str | None) -> Counter[Noted]:
        found: Counter[Noted] = Counter()
        for end in {None, name}:
            found.update(self.crossings.get(end, {}))
        return found


def verify(path: Path) -> Verified | Broken:
    link, number = _FIRST_LINK, 0
    party: str | None = None
    crossings: dict[str | None, Counter[Noted]] = {}
    check_regular(path)
    with path.open("rb") as file:
        while raw := file.readline(LINE_BYTES + 1):
            line, number = raw.removesuffix(b"\n"), number + 1
            entry = _parsed(line)
            if isinstance(entry, str):
                return Broken(number, entry)
            if entry.link != link:
                return Broken(number, "the link does not match the previous line")
            if entry.number != number - 1:
                return Broken(number, f"expected number {number - 1}, got {entry.number}")
            link = hashlib.sha256(line).hexdigest()
            if isinstance(entry, OpeningLine):
                party = entry.party
            elif isinstance(entry, Crossed):
                noted = (entry.direction, entry.kind, entry.epoch, entry.step, entry.digest)
                crossings.setdefault(entry.party, Counter())[noted] += 1
    return Verified(number, link, party, crossings)


class TranscriptComparison(NamedTuple):
    agreed: int  # messages that one sent and the other received, byte by byte
    lost: Mapping[str, int]
    """Kind -> number of messages sent that the other party did not record: the connection broke, or
    one of the two processes was killed."""
    unsent: Mapping[str, int]
    """Kind -> number of messages received that the other party did not record as sent: one of the
    two transcripts is wrong, or the sender was killed before it could write."""


def compare(one: Verified, other: Verified) -> TranscriptComparison:
    agreed = 0
    lost: Counter[str] = Counter()
    unsent: Counter[str] = Counter()
    ours = one.with_party(other.party), other.with_party(one.party)
    for mine, theirs in (ours, ours[::-1]):
        for (direction, *rest), count in mine.items():
            matched = min(count, theirs[_OTHER[direction], *rest])  # type: ignore[index]
            if direction == "sent":
                agreed += matched
                lost[str(rest[0])] += count - matched
            else:
                unsent[str(rest[0])] += count - matched
    return TranscriptComparison(agreed, +lost, +unsent)


def _continue(path: Path) -> tuple[int, str]:
    if not path.exists():
        return 0, _FIRST_LINK
    number, link, whole = 0, _FIRST_LINK, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            number, link, whole = number + 1, hashlib.sha256(line[:-1]).hexdigest(), file.tell()
    with path.open("r+b") as file:
        file.truncate(whole)
    return number, link
