"""Compares rows that are asked for with those of a run, by the population stability index.

It is about a thousand rows together, and nothing is computed of fewer.
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Gauge

_logger = logging.getLogger(__name__)

Columns = Mapping[str, NDArray[Any]]

WINDOW_ROWS = 1000
DRIFTED = 0.25  # a usual limit for the index (Siddiqi 2006)
_LEAST_REFERENCE_ROWS = 200  # fewer differ from any others by chance
_REFERENCE = "reference_bins"  # metadata of a model


def reference_bins(columns: Columns) -> dict[str, str]:
    """Return a model's metadata with bins of its rows' values: deciles, or up to ten values."""
    bins = {}
    for name, values in columns.items():
        if len(values) >= _LEAST_REFERENCE_ROWS:
            edges = np.unique(values)
            if len(edges) > 10:
                edges = np.unique(np.quantile(values, np.arange(1, 10) / 10))
            edges = np.append(edges, np.nextafter(edges[-1], math.inf))  # larger ones are others
            bins[name] = edges.tolist(), _shares(values, edges).tolist()
    return {_REFERENCE: json.dumps(bins)} if bins else {}


def _shares(values: NDArray[Any], edges: NDArray[Any]) -> NDArray[np.float64]:
    places = np.searchsorted(edges, values, side="right")
    return np.bincount(places, minlength=len(edges) + 1) / len(values)


def stability_index(now: NDArray[np.float64], then: NDArray[np.float64]) -> float:
    """Return the population stability index (PSI) of shares of rows in the same bins.

    PSI = sum over bins of (now - then) ln(now / then), with no share below 1e-4
    """
    now, then = np.maximum(now, 1e-4), np.maximum(then, 1e-4)
    return float(((now - then) * np.log(now / then)).sum())


class Drift:
    """Compares rows that are asked for with those of a model's metadata, a thousand at a time.

    The gauge gets the index of the column that differs most, whose name is its label.
    """

    def __init__(
        self,
        metadata: Mapping[str, str],
        columns_of: Callable[[NDArray[Any]], Columns],
        gauge: Gauge,
        what: str,
    ) -> None:
        """Take what the rows are called in the log."""
        bins = json.loads(metadata.get(_REFERENCE, "{}"))
        self._bins = {name: tuple(map(np.array, both)) for name, both in bins.items()}
        self._columns_of, self._gauge, self._what = columns_of, gauge, what
        self._noted: list[NDArray[Any]] = []
        self._lock = threading.Lock()

    def note(self, rows: NDArray[Any]) -> None:
        """Take in some rows, each as often as it is asked for."""
        if not self._bins or not len(rows):
            return
        with self._lock:
            self._noted.append(rows)
            if sum(map(len, self._noted)) < WINDOW_ROWS:
                return
            together, self._noted = np.concatenate(self._noted), []
            columns, found = self._columns_of(together), dict[str, float]()
            for name, (edges, then) in self._bins.items():
                found[name] = stability_index(_shares(columns[name], edges), then)
            index, name = max((index, name) for name, index in found.items())
            self._gauge.clear()
            self._gauge.labels(name).set(index)
        if index > DRIFTED:
            most = f", most in {name}" if len(found) > 1 else ""
            _logger.warning(
                "drift: the last %s %s differ from those of the run%s (PSI %.2f, above %g): see "
                "whether the model still fits",
                *(f"{len(together):,}", self._what, most, index, DRIFTED),
            )
