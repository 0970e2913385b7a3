"""Parses and checks the lines of a transcript, which another party may have written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

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

from splitveil.common.run.contract import NAME_CHARACTERS
from splitveil.common.text.files import check_regular
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


class Unreadable(NamedTuple):
    reason: str


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


def read_lines(path: Path) -> Iterator[tuple[bytes, Entry | Unreadable]]:
    """Yield every line without its line break, and its parsed content, or raise OSError."""
    check_regular(path)
    with path.open("rb") as file:
        while raw := file.readline(LINE_BYTES + 1):
            line = raw.removesuffix(b"\n")
            yield line, _parsed(line)


def _parsed(line: bytes) -> Entry | Unreadable:
    if len(line) > LINE_BYTES:
        return Unreadable(f"the line is not an entry: expected at most {LINE_BYTES:,} bytes")
    try:
        return _ENTRY.validate_json(line)
    except ValidationError as error:
        location = error.errors(include_input=False, include_url=False)[0]["loc"]
        # Our own name of the field; the content of the line is never repeated.
        field = f": {location[1]} is missing or invalid" if len(location) > 1 else ""
        return Unreadable(f"the line is not an entry{field}")
