"""Line charts as SVG: a few polylines, axes and a legend, with nothing but the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 40, 48


class Line(NamedTuple):
    """A line of a chart: its name, colour, dash pattern ("" for none), width, and points with ascending x."""

    name: str
    colour: str
    dash: str
    width: float
    points: Sequence[tuple[float, float]]


def chart(title: str, x_title: str, y_title: str, lines: Sequence[Line], *, log_y: bool = False) -> str:
    """Return a chart: x logarithmic with a tick at each x of the first line, y from 0 to a round number above all.

    ``log_y``: y is logarithmic, too, between round numbers around all, which are above 0.
    """
    xs = [x for x, _ in lines[0].points]
    low, high = math.log(min(xs)), math.log(max(xs))
    ys = [y for line in lines for _, y in line.points]
    grid = _decades(min(ys), max(ys)) if log_y else _even(max(ys))
    bottom, top = (math.log(grid[0]), math.log(grid[-1])) if log_y else (0.0, grid[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - low) / (high - low) if high > low else 0.5
        up = ((math.log(y) if log_y else y) - bottom) / (top - bottom)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"  <title>{escape(title)}</title>",
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'  <text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for y in grid:
        _, at = place(xs[0], y)
        text = f"{y:g}" if log_y else f"{y:.2f}"
        out.append(f'  <path d="M{LEFT} {at:.1f} H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        out.append(f'  <text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for x in xs:
        across, at = place(x, grid[0])
        out.append(f'  <path d="M{across:.1f} {at:.1f} v5" stroke="#666666"/>')
        text = f"{x:,.0f}" if x >= 1 else f"{x:g}"
        out.append(f'  <text x="{across:.1f}" y="{at + 18:.1f}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'  <text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>')
    turned = f'transform="translate(14 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle"'
    out.append(f"  <text {turned}>{escape(y_title)}</text>")
    for number, line in enumerate(lines):
        style = f'stroke="{line.colour}" stroke-width="{line.width}"' + (
            f' stroke-dasharray="{line.dash}"' if line.dash else ""
        )
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        out.append(f'  <polyline points="{points}" fill="none" {style}/>')
        at = TOP + 8 + 18 * number
        out.append(f'  <path d="M{WIDTH - RIGHT + 12} {at} h24" {style}/>')
        out.append(f'  <text x="{WIDTH - RIGHT + 42}" y="{at + 4}">{escape(line.name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def stacked(charts: Sequence[str]) -> str:
    """Return one image of several charts, one below the other."""
    height = HEIGHT * len(charts)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">']
    for number, each in enumerate(charts):
        out.append(each.replace("<svg ", f'<svg y="{HEIGHT * number}" width="{WIDTH}" height="{HEIGHT}" ', 1).rstrip())
    return "\n".join([*out, "</svg>", ""])


def _even(top: float) -> list[float]:
    """Return the grid lines from 0 to a round number that is ``top`` or above."""
    step = _step(top)
    return [number * step for number in range(math.ceil(top / step - 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Return grid lines 1, 2, 5, 10, 20 and so on, from one at or below ``low`` to one at or above ``high``."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    lines = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(number for number, line in enumerate(lines) if line <= low * (1 + 1e-9))
    last = min(number for number, line in enumerate(lines) if line >= high * (1 - 1e-9))
    return lines[first : max(last, first + 1) + 1]


def _step(top: float) -> float:
    """Return a round distance between grid lines, for about five of them."""
    rough = max(top, 1e-6) / 5
    power = 10 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
