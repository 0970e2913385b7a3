"""Counts what crossed the wire by a party's own transcript: messages and bytes, by kind."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from splitveil.common.errors import SettingsError
from splitveil.common.record.transcript import FILE, Direction

_DIRECTIONS: tuple[Direction, ...] = ("sent", "received")


class Volume(NamedTuple):
    messages: int = 0
    size_bytes: int = 0

    def __add__(self, other: object) -> "Volume":
        if not isinstance(other, Volume):
            return NotImplemented
        return Volume(self.messages + other.messages, self.size_bytes + other.size_bytes)


class Traffic(NamedTuple):
    """What crossed the wire between a party and its peers, over all starts of a run."""

    first: str  # time of the first line, UTC, ISO 8601
    last: str
    volumes: Mapping[tuple[str | None, Direction, str], Volume]
    """(Passive party at the other end, None if there is only one; direction; kind of message)."""

    @property
    def sent(self) -> Volume:
        return self._total("sent")

    @property
    def received(self) -> Volume:
        return self._total("received")

    def _total(self, direction: Direction) -> Volume:
        found = (volume for (_, way, _), volume in self.volumes.items() if way == direction)
        return sum(found, Volume())


def read_traffic(folder: Path) -> Traffic | None:
    """Count the messages in the transcript of a party's folder; None if there is none.

    A line that is cut off or of another form is left out: the run may still be writing it.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    counts: dict[tuple[str | None, Direction, str], list[int]] = defaultdict(lambda: [0, 0])
    times: list[str] = []
    try:
        with path.open("rb") as file:
            for raw in file:
                _count(raw, counts, times)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if not times:
        return None
    volumes = {key: Volume(messages, size) for key, (messages, size) in counts.items()}
    return Traffic(times[0], times[-1], volumes)


def _count(
    raw: bytes, counts: dict[tuple[str | None, Direction, str], list[int]], times: list[str]
) -> None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if not isinstance(line, dict) or not isinstance(line.get("time"), str):
        return
    # Only the first time and the newest are needed.
    times[1:] = [line["time"]]
    kind, size, party = line.get("kind"), line.get("bytes"), line.get("party")
    for direction in _DIRECTIONS:
        if line.get("direction") == direction and isinstance(kind, str) and isinstance(size, int):
            key = (party if isinstance(party, str) else None, direction, kind)
            counts[key][0] += 1
            counts[key][1] += size
