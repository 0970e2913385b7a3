"""The circumstances of a run as a report shows them: date, versions, host, phases and bytes."""

from collections.abc import Iterator
from typing import NamedTuple

from splitveil.common.record.lines import AlignmentLine, EvaluationLine, TrainingLine
from splitveil.common.record.run_record import Metrics
from splitveil.common.record.summary import Summary
from splitveil.common.record.traffic import Traffic
from splitveil.common.text.wording import bytes_in_words, seconds_in_words


class TrafficRow(NamedTuple):
    """The messages of one kind, between a party and one other."""

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
        yield "host", found.host or "not shown (report.show_host)"
    yield from phases(metrics)
    if traffic is None:
        yield "bytes", "not recorded: there is no transcript"
        return
    for label, total in (("sent", traffic.sent), ("received", traffic.received)):
        yield label, f"{bytes_in_words(total.size_bytes)} in {total.messages:,} messages"


def traffic_rows(traffic: Traffic | None, only_peer: str) -> list[TrafficRow]:
    """Return one row per peer, kind of message and direction, the largest first."""
    if traffic is None:
        return []
    largest_first = sorted(traffic.volumes.items(), key=lambda item: -item[1].size_bytes)
    return [
        TrafficRow(
            party or only_peer,
            kind,
            direction,
            f"{volume.messages:,}",
            bytes_in_words(volume.size_bytes),
        )
        for (party, direction, kind), volume in largest_first
    ]


def phases(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield the seconds of each phase, without the time in which the party was not running."""
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
