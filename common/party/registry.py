"""The registry of one party's metrics, and the metrics whose values are read when they are asked.

Nothing here is global: a process may hold several parties, each with a registry of its own.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from splitveil.common.run.phases import Phases

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
"""Upper bounds of the histogram of seconds per step: from a small model on one machine to a peer
that was away."""

ANSWER_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""The same for seconds per answer of a program that serves."""

SIZE_BUCKETS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
"""The same for numbers of ids or requests."""

_PREFIX = "splitveil"


class Registry(CollectorRegistry):
    """A registry that leaves out the time at which each series was made, which nobody asked for."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class Metrics:
    """Makes the metrics of one registry; every name begins with ``splitveil_``."""

    def __init__(self) -> None:
        self.registry = Registry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, meaning, labels, namespace=_PREFIX, registry=self.registry)

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, meaning, labels, namespace=_PREFIX, registry=self.registry)

    def unknown_gauge(self, name: str, meaning: str) -> Gauge:
        """Make a gauge that is NaN until it is known: 0 would be read as a figure."""
        made = self.gauge(name, meaning)
        made.set(math.nan)
        return made

    def histogram(
        self, name: str, meaning: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(
            name, meaning, labels, namespace=_PREFIX, registry=self.registry, buckets=buckets
        )


class PhaseCollector(Collector):
    """Reads the seconds of each phase when metrics are asked for."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "splitveil_phase_seconds",
            "Seconds that this process has spent in each phase; they add up to its age.",
            labels=["phase"],
        )
        for phase, seconds in self._phases.seconds().items():
            family.add_metric([phase.value], seconds)
        return [family]
