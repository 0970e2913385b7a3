"""Draws charts as SVG inside a page, whose CSS defines the colours, also for dark mode and paper.

Text stays text. Elements are built as a tree, so that names in a chart can never become markup.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from splitveil.active_party.report.run_files import Numbers

_LINE_HEIGHT = 14.0
_NAME_WIDTH = 8.2  # of a bold character, larger on paper, so that no name is cut off
_TICK_WIDTH = 7.0
_MOST_TICKS = 5


class Axis(NamedTuple):
    """One direction of a chart: its unit, range and ticks."""

    label: str
    low: float
    high: float
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Line:
    """Points joined in order; a NaN interrupts the line."""

    x: Numbers
    y: Numbers
    style: str  # CSS classes, among them the colour
    label: str = ""  # the text to the right of the last point
    markers: bool = False
    written: Callable[[float], str] = "{:.4g}".format  # at a marker: a bound is rounded up


@dataclass(frozen=True)
class Band:
    """The area between two lines."""

    x: Numbers
    low: Numbers
    high: Numbers
    style: str


@dataclass(frozen=True)
class Rule:
    """A horizontal line across the whole chart."""

    y: float
    style: str
    label: str = ""


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    style: str
    label: str = ""


Mark = Line | Band | Rule | Dot


class Chart:
    """A chart, with a description in words; ``marks`` are drawn in order, the last on top."""

    def __init__(
        self,
        description: str,
        x: Axis,
        y: Axis,
        marks: Sequence[Mark],
        width: float = 540.0,
        height: float = 300.0,
    ) -> None:
        self._x, self._y, self._marks = x, y, marks
        at_the_edge = [len(mark.label) for mark in marks if isinstance(mark, Line | Rule)]
        label_width = max(at_the_edge, default=0) * _NAME_WIDTH
        tick_width = max(len(text) for _, text in _ticks(y)) * _TICK_WIDTH
        self._left, self._top = tick_width + 32.0, 12.0
        self._right = width - (label_width + 14 if label_width else 14)
        self._bottom = height - 42.0
        size = {"width": f"{width:g}", "height": f"{height:g}"}
        box = {"aria-label": description, "viewBox": f"0 0 {width:g} {height:g}"}
        self._root = Element("svg", {"class": "chart", "role": "img"} | box | size)
        self._labels: list[tuple[str, str, float, float]] = []
        """Text, style and place beside the chart."""
        self._dots: list[Dot] = []

    def svg(self) -> Markup:
        self._draw_axes()
        for mark in self._marks:
            match mark:
                case Band():
                    self._draw_band(mark)
                case Line():
                    self._draw_line(mark)
                case Rule():
                    self._draw_rule(mark)
                case Dot():
                    self._circle(f"dot {mark.style}", mark.x, mark.y, 5.5)
                    self._dots.append(mark)
        self._draw_labels()
        self._draw_names_of_dots()
        return Markup(tostring(self._root, encoding="unicode", short_empty_elements=False))  # noqa: S704

    def _x_of(self, value: float) -> float:
        return _coordinate(value, self._x, self._left, self._right)

    def _y_of(self, value: float) -> float:
        return _coordinate(value, self._y, self._bottom, self._top)

    def _draw_axes(self) -> None:
        for value, text in _ticks(self._y):
            at = self._y_of(value)
            self._segment("grid", (self._left, at), (self._right, at))
            self._text("tick end", self._left - 8, at + 4, text)
        for value, text in _ticks(self._x):
            at = self._x_of(value)
            self._segment("axis", (at, self._bottom), (at, self._bottom + 4))
            self._text("tick middle", at, self._bottom + 17, text)
        self._segment("axis", (self._left, self._bottom), (self._right, self._bottom))
        middle = (self._left + self._right) / 2
        self._text("label middle", middle, self._bottom + 35, self._x.label)
        turned = self._text("label middle", 0, 0, self._y.label)
        centre = (self._top + self._bottom) / 2
        turned.set("transform", f"translate(13 {centre:g}) rotate(-90)")

    def _draw_band(self, band: Band) -> None:
        pairs = list(zip(band.x.tolist(), band.low.tolist(), band.high.tolist(), strict=True))
        pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
        upper = [(x, high) for x, _, high in pairs]
        lower = [(x, low) for x, low, _ in reversed(pairs)]
        if len(pairs) > 1:
            path = self._path([*upper, *lower]) + "Z"
            SubElement(self._root, "path", {"class": f"band {band.style}", "d": path})

    def _draw_line(self, line: Line) -> None:
        pieces = _pieces(list(zip(line.x.tolist(), line.y.tolist(), strict=True)))
        path = "".join(self._path(piece) for piece in pieces)
        if path:
            SubElement(self._root, "path", {"class": f"line {line.style}", "d": path})
        isolated = [piece[0] for piece in pieces if len(piece) == 1]
        for x, y in (point for piece in pieces for point in piece) if line.markers else isolated:
            self._circle(f"dot {line.style}", x, y, 2.6, line.written)
        if pieces and line.label:
            x, y = pieces[-1][-1]
            self._labels.append((line.label, line.style, self._x_of(x), self._y_of(y)))

    def _draw_rule(self, rule: Rule) -> None:
        at = self._y_of(rule.y)
        self._segment(f"line {rule.style}", (self._left, at), (self._right, at))
        if rule.label:
            self._labels.append((rule.label, rule.style, self._right, at))

    def _draw_names_of_dots(self) -> None:
        dots = sorted(self._dots, key=lambda dot: -dot.y)
        heights = _spread_out([self._y_of(dot.y) for dot in dots], self._top, self._bottom)
        for dot, height in zip(dots, heights, strict=True):
            x = self._x_of(dot.x)
            if x < (self._left + self._right) / 2:
                self._text(f"name {dot.style}", x + 11, height + 4, dot.label)
            else:
                self._text(f"name end {dot.style}", x - 11, height + 4, dot.label)

    def _draw_labels(self) -> None:
        labels = sorted(self._labels, key=itemgetter(3))
        heights = _spread_out([y for *_, y in labels], self._top, self._bottom)
        for (text, style, x, y), height in zip(labels, heights, strict=True):
            start = min(x + 3, self._right)
            if math.hypot(self._right + 6 - start, height - y) > 7:
                self._segment("leader", (start, y), (self._right + 6, height))
            self._text(f"name {style}", self._right + 10, height + 4, text)

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        points_on_page = (f"{self._x_of(x):.1f} {self._y_of(y):.1f}" for x, y in points)
        return "M" + "L".join(points_on_page)

    def _segment(self, style: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        path = "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*start, *end)
        SubElement(self._root, "path", {"class": style, "d": path})

    def _circle(
        self,
        style: str,
        x: float,
        y: float,
        radius: float,
        written: Callable[[float], str] = "{:.4g}".format,
    ) -> None:
        position = {"cx": f"{self._x_of(x):.1f}", "cy": f"{self._y_of(y):.1f}"}
        circle = SubElement(self._root, "circle", {"class": style, "r": f"{radius:g}"} | position)
        # A browser shows it as a tooltip.
        SubElement(circle, "title").text = f"{x:.4g}: {written(y)}"

    def _text(self, style: str, x: float, y: float, text: str) -> Element:
        position = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
        element = SubElement(self._root, "text", {"class": style} | position)
        element.text = text
        return element


def round_axis(
    label: str, values: Numbers, *, from_zero: bool = False, least_span: float = 0.0
) -> Axis:
    """Return an axis that covers values, with round numbers at its ends.

    Values that are not finite are ignored. The axis reaches at least ``least_span`` down from the
    largest value, so that meaningless differences do not look large.
    """
    finite = [value for value in values.tolist() if math.isfinite(value)] or [0.0, 1.0]
    high = max(finite)
    low = 0.0 if from_zero else min(*finite, high - least_span)
    if high <= low:
        high = low + 1.0
    unit = _round_unit(high - low, _MOST_TICKS)
    return Axis(label, math.floor(low / unit + 1e-9) * unit, math.ceil(high / unit - 1e-9) * unit)


def _ticks(axis: Axis) -> list[tuple[float, str]]:
    if axis.ticks:
        whole = all(float(value).is_integer() for value in axis.ticks)
        return [(value, f"{value:.0f}" if whole else f"{value:.1f}") for value in axis.ticks]
    unit = _round_unit(axis.high - axis.low, _MOST_TICKS)
    decimals = max(0, -math.floor(math.log10(unit)))
    first, last = math.ceil(axis.low / unit - 1e-9), math.floor(axis.high / unit + 1e-9)
    return [(index * unit, f"{index * unit:,.{decimals}f}") for index in range(first, last + 1)]


def _round_unit(span: float, count: int) -> float:
    power: float = 10.0 ** math.floor(math.log10(span / count))
    return next((m * power for m in (1, 2, 5) if span / (m * power) <= count), 10 * power)


def _coordinate(value: float, axis: Axis, start: float, end: float) -> float:
    share = (min(max(value, axis.low), axis.high) - axis.low) / (axis.high - axis.low)
    return start + share * (end - start)


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            pieces[-1].append((x, y))
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _spread_out(heights: Sequence[float], top: float, bottom: float) -> list[float]:
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + _LINE_HEIGHT if placed else top))
    limit = bottom
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - _LINE_HEIGHT
    return placed
