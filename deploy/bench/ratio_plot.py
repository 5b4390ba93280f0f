"""Draws the ratios of a suite as one SVG: a bar for each figure that has a limit, and the limit as a line on it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from .suite import Summary

_WIDTH, _LABEL, _ROW, _BAR, _EDGE = 960, 560, 20, 12, 10
_MET, _MISSED, _LIMIT, _TEXT = "#2a7f62", "#b5472f", "#222222", "#444444"


def ratio_svg(figures: Sequence[Summary]) -> str:
    """Returns an SVG of the figures with a limit and a ratio; the bars end at the largest ratio or limit."""
    drawn = [each for each in figures if each.limit is not None and each.ratio is not None]
    most = max([1.0, *(max(each.ratio or 0.0, each.limit or 0.0) for each in drawn)])
    height = _ROW * (len(drawn) + 1) + 2 * _EDGE
    size = {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    _text(root, _EDGE, _EDGE + _BAR, "bar: ratio to the reference of the same run; line: its limit")
    scale = (_WIDTH - _LABEL - 6 * _EDGE) / most
    for row, each in enumerate(drawn, start=1):
        assert each.limit is not None
        assert each.ratio is not None
        top = _EDGE + row * _ROW
        _text(root, _EDGE, top + _BAR - 2, each.metric if len(each.metric) < 88 else f"{each.metric[:87]}…")
        _box(root, _LABEL, top, each.ratio * scale, _MET if each.figure.passes else _MISSED)
        _box(root, _LABEL + each.limit * scale, top - 2, 2, _LIMIT, _BAR + 4)
        _text(root, _LABEL + max(each.ratio, each.limit) * scale + 6, top + _BAR - 2, f"{each.ratio:.2f}")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _box(root: ElementTree.Element, x: float, y: float, width: float, fill: str, height: float = _BAR) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    ElementTree.SubElement(root, "rect", {**place, "fill": fill})


def _text(root: ElementTree.Element, x: float, y: float, text: str) -> None:
    look = {"font-family": "sans-serif", "font-size": "11", "fill": _TEXT}
    ElementTree.SubElement(root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **look}).text = text
