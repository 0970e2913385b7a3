"""Decides how the labels of a column are read: as one of two classes, of several, or as numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from splitveil.active_party.defenses.projection.outlook import share_of_variance
from splitveil.common.data.settings import MAX_CLASSES
from splitveil.common.data.sources import suggest
from splitveil.common.errors import SettingsError
from splitveil.deploy.init.columns import Column

POSITIVE_WORDS = ("1", "yes", "true", "y", "t", "positive", "pos")

_MANTISSAS = (1, 2, 5, 10)


class Within(NamedTuple):
    """The bounds of labels that are numbers."""

    low: float
    high: float
    is_chosen: bool
    """Whether the user has chosen them; otherwise they are proposed after a look at the labels."""
    holds_all: bool
    """Whether no label of the table lies outside."""
    variance: float
    """Of the labels, each as its share of the range; at most 1/4."""

    @property
    def outside(self) -> str:
        """What a label outside counts as: of a proposal one is not refused."""
        return "refused" if self.is_chosen and self.holds_all else "clipped"


class Label(NamedTuple):
    """The label column, and how its cells are read."""

    column: str
    positive: str | None
    """The text that stands for 1; None for the numbers 0 and 1, and for several classes."""
    classes: tuple[str, ...] | int | None
    """The classes, if there are more than two."""
    shares: Mapping[str, float]
    """Share of the rows by class; empty if labels are numbers."""
    within: Within | None = None
    """The bounds of labels that are numbers; None for classes."""
    is_guessed: bool = False
    """Whether nothing but its two values speaks for the column: a feature may have two as well."""

    @property
    def doubt(self) -> str:
        """What speaks against the column, in words; nothing if its name speaks for it."""
        if not self.is_guessed:
            return ""
        return "a guess: no column is named like labels, and no other has two values"

    @property
    def rarest_share(self) -> float:
        """The share of the rarer class.

        Of numbers, it is the share with which labels of 0 and 1 would have their variance.
        """
        if self.within is not None:
            # Of labels that are almost all the same, it would be 0 after rounding.
            return max(share_of_variance(self.within.variance), 1e-9)
        return min(self.shares.values())

    @property
    def num_classes(self) -> int:
        """The number of classes; 1 if labels are numbers."""
        return 1 if self.within is not None else len(self.shares)


def is_of_numbers(column: Column) -> bool:
    """Say whether a column holds more different numbers than labels have classes."""
    is_number = column.kind in {"whole", "number"} and math.isfinite(column.low + column.high)
    return is_number and not column.missing and column.distinct > MAX_CLASSES


def label_of(
    column: Column, positive: str | None = None, bounds: tuple[float, float] | None = None
) -> Label:
    """Return how a column's labels are read.

    Args:
        column: with the labels.
        positive: the label that the user says stands for 1.
        bounds: those that the user has chosen for labels that are numbers.

    Raises:
        SettingsError: it has gaps, or holds one class or too many, or no numbers for the bounds.
    """
    where = f"--label-column {column.name}"
    if bounds is not None:
        if column.missing or column.kind not in {"whole", "number"}:
            raise SettingsError(
                f"--label-range: expected a number in every row of column {column.name!r}, found "
                f"{column.in_words()}"
            )
        return Label(column.name, None, None, {}, _within(column, *bounds, is_chosen=True))
    if positive is None and is_of_numbers(column):
        low, high = 0.0 - _rounded_up(-column.low), _rounded_up(column.high)
        return Label(column.name, None, None, {}, _within(column, low, high, is_chosen=False))
    if column.missing or not 2 <= column.distinct <= MAX_CLASSES:
        raise SettingsError(
            f"{where}: expected a label of 2 to {MAX_CLASSES} classes in every row, or a number, "
            f"found {column.in_words()}"
        )
    total = sum(column.counts)
    shares = {v: n / total for v, n in zip(column.values, column.counts, strict=True)}
    if column.distinct > 2 and positive is None:
        numbered = {str(number) for number in range(column.distinct)}
        classes = column.distinct if set(column.values) == numbered else tuple(sorted(shares))
        return Label(column.name, None, classes, shares)
    if positive is None and set(_as_numbers(column.values)) == {0.0, 1.0}:
        return Label(column.name, None, None, shares)
    positive = positive or _positive_of(column)
    if positive not in shares:
        raise SettingsError(
            f"--positive-label: column {column.name!r} has no such label"
            f"{suggest(positive, column.values)}"
        )
    others = 1 - shares[positive]
    return Label(column.name, positive, None, {positive: shares[positive], "other": others})


def _within(column: Column, low: float, high: float, *, is_chosen: bool) -> Within:
    holds_all = low <= column.low and column.high <= high
    variance = min(column.variance / (high - low) ** 2, 0.25)
    return Within(low, high, is_chosen, holds_all, variance)


def _rounded_up(number: float) -> float:
    """Return the least 1, 2 or 5 times a power of ten that is not below a number; 0 up to 0.

    No more than the order of magnitude of the largest label is then in the proposal.
    """
    if number <= 0:
        return 0.0
    exponent = math.floor(math.log10(number)) - 1
    candidates = (float(f"{one}e{exponent + tens}") for tens in range(3) for one in _MANTISSAS)
    return next(found for found in candidates if found >= number)


def _positive_of(column: Column) -> str:
    """Return which of two texts stands for 1: one that says so, or else the rarer one."""
    said = [value for value in column.values if value.lower() in POSITIVE_WORDS]
    if set(column.values) == {"1", "2"}:  # the numbers of two classes, neither of which is "yes"
        said = []
    return said[0] if len(said) == 1 else column.values[-1]


def _as_numbers(values: Sequence[str]) -> list[float]:
    return [
        float(value) if re.fullmatch(r"[01](\.0*)?", value) else float("nan") for value in values
    ]
