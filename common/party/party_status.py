"""What every party says about itself while a program of it runs, whatever the program does."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import Counter

from splitveil.common.errors import ContractMismatch, PeerError, ProtocolError
from splitveil.common.party.presence import Presence
from splitveil.common.party.registry import Metrics
from splitveil.common.record.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.common.text.log_lines import add_to_log_lines
from splitveil.common.text.version import VERSION


def _kinds_of(error: type[PeerError]) -> Iterator[str]:
    yield error.__name__
    for kind in error.__subclasses__():
        yield from _kinds_of(kind)


class Readiness(NamedTuple):
    ready: bool
    reason: str  # why not, or what it is doing


class PartyStatus:
    """The state of one party's program, for its operators.

    Its methods take microseconds and never raise; any thread may call them.
    """

    def __init__(
        self,
        party: str,
        contract: Contract,
        stages: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.party = party
        self.run_name = contract.run_name
        self.run_id = ""
        self.metrics = Metrics()
        self.peers = Presence(self.metrics, clock)
        self._stage_of: Callable[[], str] = lambda: stages[0]
        self._readiness = Readiness(ready=False, reason=stages[0])
        self._add_own_metrics(stages)
        self._add_message_metrics()

    def _add_own_metrics(self, stages: Sequence[str]) -> None:
        gauge = self.metrics.gauge
        self._info = gauge(
            "run_info",
            "Always 1; its labels name party, run and version.",
            ["party", "run", "run_id", "version"],
        )
        self._info.labels(self.party, self.run_name, "", VERSION).set(1)
        shown = gauge("stage", "1 for the stage that the program is in, 0 for others.", ["stage"])
        for one in stages:
            shown.labels(one).set_function(partial(self._is_in, one))
        ready = gauge("ready", "1 while /readyz answers with 200.")
        ready.set_function(lambda: self.readiness.ready)

    def _add_message_metrics(self) -> None:
        counter = self.metrics.counter
        self._messages = counter(
            "messages", "Messages that crossed the wire.", ["direction", "call"]
        )
        self._bytes = counter(
            "message_bytes",
            "Bytes of these messages, without the framing of TLS and HTTP/2.",
            ["direction", "call"],
        )
        self._crossed: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self._refused = counter(
            "refused_messages", "Messages of the peer that this party refused.", ["reason"]
        )
        self._failed = counter(
            "failed_calls", "Calls to the peer that got no usable answer.", ["reason"]
        )
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for reason in (ContractMismatch.__name__, *_kinds_of(ProtocolError)):
            self._refused.labels(reason)
        for reason in _kinds_of(PeerError):
            self._failed.labels(reason)

    # ---- health ----

    @property
    def stage(self) -> str:
        return self._stage_of()

    @property
    def readiness(self) -> Readiness:
        return self._readiness

    def facts(self) -> dict[str, str]:
        return {
            "party": self.party,
            "run": self.run_name,
            "run_id": self.run_id,
            "stage": self.stage,
        }

    def set_ready(self, reason: str, *, ready: bool = True) -> None:
        self._readiness = Readiness(ready, reason)

    def enter_stage(self, stage: str) -> None:
        self.follow_stage(lambda: stage)

    def follow_stage(self, stage_of: Callable[[], str]) -> None:
        self._stage_of = stage_of

    def _is_in(self, stage: str) -> bool:
        return self.stage == stage

    def name_run(self, run_id: str) -> None:
        if run_id == self.run_id:
            return
        self._info.remove(self.party, self.run_name, self.run_id, VERSION)
        self.run_id = run_id
        add_to_log_lines(run_id=run_id)
        self._info.labels(self.party, self.run_name, run_id, VERSION).set(1)

    # ---- messages ----

    def note(self, crossing: Crossing) -> None:
        crossed = self._crossed.get((crossing.direction, crossing.kind))
        if crossed is None:  # to look up a series by its labels takes longer than to count
            call = crossing.kind.partition(" ")[0]
            counters = (self._messages, self._bytes)
            crossed = tuple(one.labels(crossing.direction, call) for one in counters)
            self._crossed[crossing.direction, crossing.kind] = crossed
        crossed[0].inc()
        crossed[1].inc(len(crossing.data))

    def note_refused(self, error: Exception) -> None:
        self._refused.labels(type(error).__name__).inc()

    def note_failed_call(self, error: Exception) -> None:
        self._failed.labels(type(error).__name__).inc()
