"""The lines of a transcript that another party may have written: bounded, parsed and checked."""

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

LINE_BYTES = 64 * 1024
"""Some thirty times the longest line of ours, which names a defense with all its settings."""

KINDS = frozenset(
    f"{call.name} {side}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for call in service.methods
    for side in ("request", "reply")
)
"""Every message that can cross."""


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError("expected a message of the protocol")
    return kind


_Count = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""As a message's fields hold it: a peer's own number is noted as it came."""
_Link = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
_Party = Annotated[str, Field(max_length=NAME_CHARACTERS)]


class _Line(BaseModel):
    """What every line has."""

    model_config = ConfigDict(strict=True, frozen=True)

    number: _Count
    link: _Link
    party: _Party | None = None


class Opening(_Line):
    """A process opened the transcript."""

    event: Literal["opened"]


class Crossed(_Line):
    """A message crossed."""

    direction: Literal["sent", "received"]
    kind: Annotated[str, AfterValidator(_known)]
    epoch: _Count | None
    step: _Count | None
    digest: _Link


class Unreadable(NamedTuple):
    """Why a line is none of the two."""

    reason: str


def _which(value: object) -> str:
    return "opening" if isinstance(value, dict) and "event" in value else "crossed"


_ENTRY: TypeAdapter[Opening | Crossed] = TypeAdapter(
    Annotated[
        Annotated[Opening, Tag("opening")] | Annotated[Crossed, Tag("crossed")],
        Discriminator(_which),
    ]
)


def read_lines(path: Path) -> Iterator[tuple[bytes, Opening | Crossed | Unreadable]]:
    """Yield every line without its line break, and what it says.

    Raises:
        OSError: the file cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        while raw := file.readline(LINE_BYTES + 1):
            line = raw.removesuffix(b"\n")
            yield line, _parsed(line)


def _parsed(line: bytes) -> Opening | Crossed | Unreadable:
    if len(line) > LINE_BYTES:
        return Unreadable(reason=f"the line is no entry: expected at most {LINE_BYTES:,} bytes")
    try:
        return _ENTRY.validate_json(line)
    except ValidationError as error:
        place = error.errors(include_input=False, include_url=False)[0]["loc"]
        # A name of ours; what the line holds is never repeated.
        field = f": {place[1]} is missing, or not what it should be" if len(place) > 1 else ""
        return Unreadable(reason=f"the line is no entry{field}")
