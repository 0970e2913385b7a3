"""The line of ``metrics.jsonl`` that counts gradients by class, for the label owner only."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramLine:
    """The gradients of one batch, counted by one of their figures.

    Raises:
        ValueError: the number of counts in a series differs from the number of bins.
    """

    epoch: int
    step: int
    figure: str
    edges: tuple[float, ...]
    """Rising, one more than there are bins."""
    counts: Mapping[str, tuple[int, ...]]
    """``<before|after>/<negative|positive>`` -> examples in each bin."""

    def __post_init__(self) -> None:
        for name, series in self.counts.items():
            if len(series) != len(self.edges) - 1:
                raise ValueError(
                    f"{name}: expected {len(self.edges) - 1} counts, got {len(series)}"
                )
