"""Draws figures as rows above one horizontal scale, wide enough to be read on a telephone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

_WIDTH, _MARGIN, _ROW = 460.0, 16.0, 46.0


@dataclass(frozen=True)
class Scale:
    """The range of the scale, its ticks, and what its two ends mean."""

    low: float
    high: float
    ticks: Sequence[float]
    low_end: str
    high_end: str


@dataclass(frozen=True)
class Row:
    """One figure under its words; without ``high`` the row has words only."""

    words: str
    style: str  # CSS class of the colour
    low: float = math.nan
    high: float = math.nan
    value: float | None = None  # the point of an interval; None for a bar from ``low`` to ``high``
    is_limit: bool = False  # whether a line goes down from its end to the scale


def scale_picture(scale: Scale, rows: Sequence[Row], description: str) -> Markup:
    """Return the rows as SVG, whose CSS the page has."""
    return Markup(tostring(draw(scale, rows, description), encoding="unicode"))  # noqa: S704


def draw(scale: Scale, rows: Sequence[Row], description: str) -> Element:
    axis = 10 + len(rows) * _ROW
    height = axis + 46
    box = {"viewBox": f"0 0 {_WIDTH:g} {height:g}", "aria-label": description, "role": "img"}
    size = {"width": f"{_WIDTH:g}", "height": f"{height:g}"}
    root = Element("svg", {"class": "chart scale"} | box | size)
    _path(root, "axis", (_MARGIN, axis), (_WIDTH - _MARGIN, axis))
    for tick in scale.ticks:
        x = _x_of(scale, tick)
        _path(root, "axis", (x, axis), (x, axis + 5))
        _text(root, "middle", x, axis + 19, f"{tick:g}")
    _text(root, "", _MARGIN - 8, axis + 38, scale.low_end)
    _text(root, "end", _WIDTH - _MARGIN + 8, axis + 38, scale.high_end)
    for index, row in enumerate(rows):
        top = 10 + index * _ROW
        if not math.isnan(row.high):
            _draw_row(root, scale, row, top + 24, axis)
        _text(root, f"name {row.style}", _MARGIN, top + 10, row.words)
    return root


def _draw_row(root: Element, scale: Scale, row: Row, y: float, axis: float) -> None:
    start, end = _x_of(scale, row.low), _x_of(scale, row.high)
    if row.is_limit:
        _path(root, f"line floor {row.style}", (end, y), (end, axis))
    if row.value is None:
        _path(root, f"line bar-line {row.style}", (start, y), (end, y))
        return
    if end > start:
        line = f"line {row.style}"
        _path(root, line, (start, y - 5), (start, y + 5))
        _path(root, line, (start, y), (end, y))
        _path(root, line, (end, y - 5), (end, y + 5))
    centre = {"cx": f"{_x_of(scale, row.value):.1f}", "cy": f"{y:.1f}", "r": "6"}
    SubElement(root, "circle", {"class": f"dot {row.style}"} | centre)


def _x_of(scale: Scale, value: float) -> float:
    share = (min(max(value, scale.low), scale.high) - scale.low) / (scale.high - scale.low)
    return _MARGIN + share * (_WIDTH - 2 * _MARGIN)


def _path(root: Element, style: str, *points: tuple[float, float]) -> None:
    joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    SubElement(root, "path", {"class": style, "d": f"M{joined}"})


def _text(root: Element, style: str, x: float, y: float, words: str) -> None:
    SubElement(root, "text", {"class": style, "x": f"{x:.1f}", "y": f"{y:.1f}"}).text = words
