"""Parts of both parties' reports: templates, traffic by the transcript, circumstances."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from splitveil.common.errors import SettingsError
from splitveil.common.record.run_record import (
    AlignmentLine,
    EvaluationLine,
    Metrics,
    Summary,
    TrainingLine,
)
from splitveil.common.record.transcript import FILE, Direction
from splitveil.common.text.visible_text import visible_lines
from splitveil.common.text.wording import bytes_in_words, seconds_in_words


def render(package: str, template: str, **values: object) -> str:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = breakable
    return visible_lines(environment.get_template(template).render(values))


def breakable(text: object) -> Markup:
    """Escape text, and allow a line break after each underscore and each dot in a word.

    Names of attacks and settings have no other place for it, and are wider than a column.
    """
    escaped = str(escape(str(text)))
    return Markup(re.sub(r"_|(?<=[a-z])\.(?=[a-z])", r"\g<0><wbr>", escaped))  # noqa: S704


class ScaleRow(NamedTuple):
    """One figure, from 0 to 1, under its words; without ``high`` the row has words only."""

    words: str
    style: str  # CSS class of the colour
    low: float = 0.0
    high: float | None = None
    value: float | None = None  # the point of an interval; None for a bar from ``low`` to ``high``
    most: float | None = None  # the limit that was set, as a mark across the row
    said: str = ""  # a sentence for the cover page


def columns_row(
    disclosure: float, strongest: float | None, max_exposure: object, whose: str = ""
) -> ScaleRow:
    """Return the disclosure of columns and that of the most exposed, beside their owner's limit."""
    most = max_exposure if isinstance(max_exposure, int | float) else None
    limit = "" if most is None else f"; limit {100 * most:g}"
    of_whom = f" {shorten(whose, 16, placeholder='…)')}" if whose else ""
    words = f"Columns{of_whom}: {100 * disclosure:.0f} of 100{limit}"
    said = f"{100 * disclosure:.0f} of 100 wrong guesses turn right, on average over the columns"
    if strongest is not None:
        said += f", and {100 * strongest:.0f} of the most exposed column's"
    said += "." if most is None else f". Limit: {100 * most:g}."
    return ScaleRow(words, "estimate", 0.0, disclosure, most=most, said=said)


def picture(rows: Sequence[ScaleRow]) -> Markup:
    """Draw figures above one scale, from 0, known without a run, to 1, everything."""
    said = ". ".join(row.words for row in rows)
    return Markup(render(str(__package__), "scale.svg.jinja", rows=rows, said=said))  # noqa: S704


_DIRECTIONS: tuple[Direction, ...] = ("sent", "received")


class Volume(NamedTuple):
    messages: int = 0
    size_bytes: int = 0


class Traffic(NamedTuple):
    """Traffic between a party and its peers, over all starts of a run."""

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

    def count(self, kind: str) -> int:
        """Return the number of messages of a kind, such as ``Train reply``."""
        return sum(one.messages for (_, _, each), one in self.volumes.items() if each == kind)

    def _total(self, direction: Direction) -> Volume:
        found = [volume for (_, way, _), volume in self.volumes.items() if way == direction]
        return Volume(sum(one.messages for one in found), sum(one.size_bytes for one in found))


def read_traffic(folder: Path) -> Traffic | None:
    """Count the messages in a party's transcript; None if there is none."""
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


class TrafficRow(NamedTuple):
    party: str
    kind: str
    direction: str
    messages: str
    size: str


def circumstances(
    summary: Summary, metrics: Metrics, traffic: Traffic | None
) -> Iterator[tuple[str, str]]:
    """Yield when, where, with what and for how long a run was made, and the bytes each way."""
    found = summary.provenance
    if traffic is not None:
        yield "started", _time_in_words(traffic.first)
    if found is not None:
        yield "ended", _time_in_words(found.ended)
    yield "splitveil", summary.version or "not recorded"
    if found is not None:
        yield "Python, PyTorch", f"{found.python}, {found.torch}"
        yield "system", found.system
        if found.device:
            yield "device", found.device
    yield from phases(metrics)
    if traffic is None:
        yield "bytes", "not recorded: there is no transcript"
        return
    for label, total in (("sent", traffic.sent), ("received", traffic.received)):
        yield label, f"{bytes_in_words(total.size_bytes)} in {total.messages:,} messages"


def traffic_rows(traffic: Traffic | None, only_peer: str) -> list[TrafficRow]:
    if traffic is None:
        return []
    largest_first = sorted(traffic.volumes.items(), key=lambda item: -item[1].size_bytes)
    return [
        TrafficRow(
            party or only_peer, kind, way, f"{one.messages:,}", bytes_in_words(one.size_bytes)
        )
        for (party, way, kind), one in largest_first
    ]


def phases(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield the seconds of each phase, without the time when the party was not running."""
    aligned: float | None = None
    trained = ended = 0.0
    for time_s, line in metrics.timed:
        if time_s is None:
            continue
        ended = max(ended, time_s)
        if isinstance(line, AlignmentLine) and aligned is None:
            aligned = time_s
        if isinstance(line, TrainingLine | EvaluationLine):
            trained = max(trained, time_s)
    if aligned is None:
        return
    yield "waiting for the peer, and alignment", seconds_in_words(aligned)
    if trained >= aligned:
        yield "training and evaluation", seconds_in_words(trained - aligned)
        yield "measurements afterwards", seconds_in_words(ended - trained)


def _time_in_words(text: str) -> str:
    day, _, rest = text.partition("T")
    return f"{day} {rest[:8]} UTC"
