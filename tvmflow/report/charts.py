"""Charts as SVG text that a page holds in itself: light and dark, with the figures in words for a screen reader."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#1565c0", "#c62828", "#8d6e63", "#2e7d32", "#8e4ec6", "#c75000")
"""Colours that have a contrast of 3 to a light and to a dark page, and of 4.5 to white text on them (WCAG 2, AA)."""
STYLE = (
    "svg.chart{width:100%;height:auto;min-width:30rem;max-width:48rem;font:12px system-ui,sans-serif;color:#222}"
    "svg.chart text{fill:currentColor}svg.chart .axis{stroke:currentColor;stroke-opacity:.6;fill:none}"
    "svg.chart .grid{stroke:currentColor;stroke-opacity:.15}"
    "svg.narrow{min-width:0;max-width:30rem}svg.small{min-width:0}svg.chart .tick{opacity:.7}svg.chart .on{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg.chart{color:#ddd}}"
)
"""The style sheet of the charts, for the head of a page."""

# The width of a chart with many names, which scrolls on a phone, and of one that fits there.
_WIDTH, _NARROW = 640, 400
_LEFT, _RIGHT, _ROW = 130, 20, 30
# The height of a row of a graph, of a bar of an icicle, and of a bar with its name.
_LINE, _STEP, _BAR = 18, 24, 38
# The smallest error that a bar shows, and the rows that the text of a chart names.
_LEAST_ERROR, _DESCRIBED = 1e-9, 10


def shares(title: str, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """Return a chart of stacked bars, one for each row: `rows` maps a row's name to its shares by kind.

    The shares of a row add up to one. `colours` has the colour of each kind, in the order in which they are stacked;
    the legend names them.
    """
    scale = _NARROW - _LEFT - _RIGHT
    parts, texts = [], []
    for index, (name, row) in enumerate(rows.items()):
        top, left = 30 + index * _ROW, float(_LEFT)
        parts.append(_text(_LEFT - 8, top + 15, name, "end"))
        for kind, colour in colours.items():
            width = row.get(kind, 0.0) * scale
            if width:
                parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" fill="{colour}"/>')
            left += width
        texts.append(f"{name}: " + ", ".join(f"{kind} {row.get(kind, 0.0):.0%}" for kind in colours))
    bottom, left = 30 + len(rows) * _ROW, float(_LEFT)
    for kind, colour in colours.items():
        parts.append(f'<rect x="{left:.0f}" y="{bottom + 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(left + 18, bottom + 16, kind))
        left += 30 + 8 * len(kind)
    return _picture(title, "; ".join(texts), bottom + 28, parts, _NARROW)


def intervals(title: str, rows: Mapping[str, tuple[float, float, float]], line: float) -> str:
    """Return a chart with a line for each row: its interval as a bar and its value as a dot.

    `rows` maps a row's name to the low end, the value and the high end. A dashed vertical line marks the value `line`.
    """
    ends = [value for row in rows.values() for value in row] + [line]
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return _LEFT + (_NARROW - _LEFT - _RIGHT) * (value - low) / (high - low)

    parts, texts = [], []
    for index, (name, (least, value, most)) in enumerate(rows.items()):
        middle = 40 + index * _ROW
        parts.append(_text(_LEFT - 8, middle + 4, name, "end"))
        parts.append(
            f'<path d="M{place(least):.1f} {middle}H{place(most):.1f}" stroke="{COLOURS[0]}" stroke-width="6" '
            f'stroke-opacity=".45"/><circle cx="{place(value):.1f}" cy="{middle}" r="5" fill="{COLOURS[0]}"/>'
        )
        parts.append(_figure(place(value), middle - 9, value, f"{value:.3f}", "middle"))
        texts.append(f"{name} {value:.3f}, between {least:.3f} and {most:.3f}")
    bottom = 40 + len(rows) * _ROW
    parts.append(f'<path class="axis" d="M{place(line):.1f} 24V{bottom - 8}" stroke-dasharray="4 3"/>')
    parts.append(_tick(place(line), bottom + 6, f"{line:g}", "middle"))
    return _picture(title, "; ".join(texts), bottom + 14, parts, _NARROW)


def points(
    title: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]], *, is_count: bool = False
) -> str:
    """Return a chart of points (x, y) by the name of their series; `across` and `up` name the axes, with their units.

    A line joins the points of a series. Both axes begin at zero. With `is_count`, x are whole numbers, and the x axis
    covers only the range of the points.
    """
    height, left, top, bottom, right = 280, 60, 30, 240, _NARROW - 20
    xs = [x for values in series.values() for x, _ in values] or [1.0]
    low_x, high_x = (min(xs) - 0.5, max(xs) + 0.5) if is_count else (0.0, max(xs) * 1.08 or 1.0)
    high_y = max((y for values in series.values() for _, y in values), default=1.0) * 1.08 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * (x - low_x) / (high_x - low_x), bottom - (bottom - top) * y / high_y

    parts = [_text(left, top - 12, up), _text(right, bottom + 36, across, "end")]
    for value in _ticks(0.0, high_y):
        _, y = place(low_x, value)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>{_tick(left - 6, y + 4, f"{value:g}", "end")}')
    for value in _ticks(low_x, high_x, 1.0 if is_count else 0.0):
        x, _ = place(value, 0)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>{_tick(x, bottom + 18, f"{value:g}", "middle")}')
    parts.append(f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>')
    texts, names = [], []
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [place(*value) for value in values]
        if len(values) > 1:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        if places:
            names.append((*places[-1], name))
        texts.append(f"{name}: " + ", ".join(f"({x:.4g}, {y:.4g})" for x, y in values))
    # A name stands beside its last point, or below the names that are there.
    places_of_names: list[tuple[float, float]] = []
    for x, y, name in names:
        line = y - 8
        while any(abs(line - other_y) < 13 and abs(x - other_x) < 200 for other_x, other_y in places_of_names):
            line += 13
        places_of_names.append((x, line))
        is_right = x > _NARROW * 0.5
        parts.append(_text(x - 8 if is_right else x + 8, line, name, "end" if is_right else "start"))
    return _picture(title, f"{across} across, {up} up. " + "; ".join(texts), height, parts, _NARROW)


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """At most six round numbers from `low` to `high`, which are at least `least` apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = max(least, next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 5))
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def bars(title: str, rows: Mapping[str, float]) -> str:
    """Return a chart of horizontal bars from zero, each below its name."""
    scale = (_NARROW - 70) / (max(rows.values(), default=1.0) or 1.0)
    parts = []
    for index, (name, value) in enumerate(rows.items()):
        top, width = index * _BAR, value * scale
        parts.append(f"<g><title>{escape(name)}</title>{_text(0, top + 13, _cut(name, 56, 0.4))}")
        parts.append(f'<rect x="0" y="{top + 18}" width="{width:.1f}" height="12" fill="{COLOURS[0]}"/></g>')
        parts.append(_figure(width + 6, top + 28, value, f"{value:.3g}"))
    texts = ", ".join(f"{name} {value:.3g}" for name, value in rows.items())
    return _picture(title, texts, 4 + len(rows) * _BAR, parts, _NARROW)


class GraphRow(NamedTuple):
    """A node of a graph: its name and description, the indices of the rows whose results it reads, its time and error.

    `ms` is the time in milliseconds. `error` is relative; None where it is unknown.
    """

    name: str
    description: str
    reads: tuple[int, ...]
    ms: float
    error: float | None


def graph(title: str, rows: Sequence[GraphRow]) -> str:
    """Return a graph whose nodes stand below each other in their order, with a bar of the time and one of the error.

    Lines join a node to those that read its result: straight where they are neighbours, else around the nodes between.
    The bars of errors have a logarithmic scale.
    """
    ends = {source: index for index, row in enumerate(rows) for source in row.reads if index - source > 1}
    lanes: list[int] = []
    lane_of: dict[int, int] = {}
    for source, end in sorted(ends.items()):
        lane = next((lane for lane, free in enumerate(lanes) if free <= source), len(lanes))
        lanes[lane : lane + 1] = [end]
        lane_of[source] = lane
    step = min(8.0, 90 / (len(lanes) or 1))
    spine = 16 + step * len(lanes)
    longest = max((row.ms for row in rows), default=1.0) or 1.0
    left = spine + 14
    parts = [_tick(left, 14, "layer"), _tick(300, 14, "ms"), _tick(500, 14, "error")]
    for index, row in enumerate(rows):
        y = 32.0 + index * _LINE
        for source in row.reads:
            above = 32.0 + source * _LINE
            if index - source == 1:
                parts.append(f'<path class="axis" d="M{spine:.0f} {above:.0f}V{y:.0f}"/>')
            else:
                x = spine - step * (lane_of[source] + 1)
                curve = f"M{spine:.1f} {above:.0f}C{x:.1f} {above:.0f} {x:.1f} {above:.0f} {x:.1f} {above + _LINE:.0f}"
                curve += f"V{y - _LINE:.0f}C{x:.1f} {y:.0f} {x:.1f} {y:.0f} {spine:.1f} {y:.0f}"
                parts.append(f'<path class="axis" d="{curve}"/>')
        parts.append(f"<g><title>{escape(row.description)}</title>")
        parts.append(f'<circle cx="{spine:.0f}" cy="{y:.0f}" r="4" fill="{COLOURS[0]}"/>')
        parts.append(_text(left, y + 4, _cut(row.name, int((290 - left) / 6.9), 0.0)))
        width = 110 * row.ms / longest
        parts.append(f'<rect x="300" y="{y - 6:.0f}" width="{width:.1f}" height="12" fill="{COLOURS[0]}"/>')
        parts.append(_figure(304 + width, y + 4, row.ms, f"{row.ms:.3g}"))
        if row.error is not None:
            width = 50 * max(0.0, min(1.0, 1 + math.log10(row.error or _LEAST_ERROR) / -math.log10(_LEAST_ERROR)))
            parts.append(f'<rect x="500" y="{y - 6:.0f}" width="{width:.1f}" height="12" fill="{COLOURS[1]}"/>')
            parts.append(_figure(504 + width, y + 4, row.error, f"{row.error:.1e}"))
        parts.append("</g>")
    texts = "; ".join(f"{row.name}: {row.ms:.3g} ms" for row in sorted(rows, key=lambda row: -row.ms)[:_DESCRIBED])
    return _picture(title, f"{len(rows)} layers; the slowest: {texts}", 40 + len(rows) * _LINE, parts)


def icicle(title: str, rows: Sequence[tuple[Sequence[str], float]], unit: str) -> str:
    """Return an icicle chart of nested parts, in which the width of a part is its share of the total.

    A row has the names of the parts that it belongs to, the outermost first, and its value. A part is as wide as its
    rows together, and stands below the part around it. Parts that are wide enough show their name; a pointer shows the
    name and the share of each, followed by `unit`, such as "of the time".
    """
    total = sum(value for _, value in rows) or 1.0
    parts: list[str] = []
    texts: list[str] = []

    def draw(rows: Sequence[tuple[Sequence[str], float]], depth: int, left: float, outer: str, colour: int) -> None:
        groups: dict[str, list[tuple[Sequence[str], float]]] = {}
        for path, value in rows:
            if len(path) > depth:
                groups.setdefault(path[depth], []).append((path, value))
        for index, (name, group) in enumerate(groups.items()):
            share = sum(value for _, value in group) / total
            width, top = share * _WIDTH, 4 + depth * _STEP
            colour_index = index % len(COLOURS) if depth == 0 else colour
            parts.append(f"<g><title>{escape(name)}: {share:.1%} {escape(unit)}</title>")
            size = f'width="{max(width - 1, 0.1):.2f}" height="22"'
            parts.append(f'<rect x="{left:.2f}" y="{top}" {size} fill="{COLOURS[colour_index]}"/>')
            short = _shorten(name.removeprefix(f"{outer}."), int(width / 7))
            if width > 24:
                parts.append(f'<text class="on" x="{left + 4:.1f}" y="{top + 15}">{escape(short)}</text>')
            parts.append("</g>")
            if depth == 0:
                texts.append(f"{name} {share:.1%}")
            draw(group, depth + 1, left, name, colour_index)
            left += width

    draw(rows, 0, 0.0, "", 0)
    depth = max((len(path) for path, _ in rows), default=0)
    return _picture(title, ", ".join(texts), 8 + depth * _STEP, parts)


def roofline(
    title: str, rows: Mapping[str, tuple[float, float, float]], peak: float, rates: Mapping[str, float]
) -> str:
    """Return an SVG chart with points below the roofs of a machine, on logarithmic axes.

    `rows` gives, for each point's label, its operations per byte, its GFLOP/s, and its share of the time from 0 to 1,
    which is the point's area. `peak` is in GFLOP/s; `rates` gives the GB/s of each level of the memory by its name.
    """
    bottom, left = 300, 60
    # The names of the roofs stand below the axis, where no roof is.
    legend = bottom + 52
    ridges = [peak / rate for rate in rates.values()]
    across = [*ridges, *(row[0] for row in rows.values())]
    up = [peak, *(row[1] for row in rows.values())]
    low_x, high_x = 10 ** math.floor(math.log10(min(across))), 10 ** math.ceil(math.log10(max(across)) + 0.01)
    low_y, high_y = 10 ** math.floor(math.log10(min(up))), 10 ** math.ceil(math.log10(max(up)) + 0.01)

    def x_of(value: float) -> float:
        return left + (_NARROW - left - 20) * math.log(value / low_x) / math.log(high_x / low_x)

    def y_of(value: float) -> float:
        return bottom - (bottom - 20) * math.log(value / low_y) / math.log(high_y / low_y)

    parts = [f'<path class="axis" d="M{left} 20V{bottom}H{_NARROW - 20}"/>']
    parts += [_tick(left, 14, "GFLOP/s"), _tick(_NARROW - 20, bottom + 32, "operations per byte", "end")]
    for value in _powers(low_x, high_x):
        parts.append(_tick(x_of(value), bottom + 16, f"{value:g}", "middle"))
    for value in _powers(low_y, high_y):
        parts.append(_tick(left - 6, y_of(value) + 4, f"{value:g}", "end"))
    for index, (name, rate) in enumerate(rates.items()):
        start = max(low_x, low_y / rate)
        path = f"M{x_of(start):.1f} {y_of(start * rate):.1f}L{x_of(peak / rate):.1f} {y_of(peak):.1f}H{_NARROW - 20}"
        colour = COLOURS[index + 1]
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{left}" y="{legend - 10 + 18 * index}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(left + 18, legend + 18 * index, name))
        parts.append(_figure(left + 200, legend + 18 * index, rate, f"{rate:.3g} GB/s", "end"))
    parts.append(_figure(_NARROW - 20, y_of(peak) - 6, peak, f"{peak:.3g} GFLOP/s", "end"))
    for name, (intensity, gflops, share) in rows.items():
        radius = max(2.0, 20 * math.sqrt(share))
        parts.append(
            f'<circle cx="{x_of(intensity):.1f}" cy="{y_of(gflops):.1f}" r="{radius:.1f}" fill="{COLOURS[0]}" '
            f'fill-opacity=".55" stroke="{COLOURS[0]}"><title>{escape(name)}: {gflops:.3g} GFLOP/s at '
            f"{intensity:.3g} operations per byte</title></circle>"
        )
    slowest = sorted(rows.items(), key=lambda item: -item[1][2])[:_DESCRIBED]
    texts = [f"{name} {gflops:.3g} GFLOP/s at {intensity:.3g}" for name, (intensity, gflops, _) in slowest]
    roofs = [f"{name} {rate:.3g} GB/s" for name, rate in rates.items()]
    description = f"peak {peak:.3g} GFLOP/s; {', '.join(roofs)}; {'; '.join(texts)}"
    return _picture(title, description, legend + 18 * len(rates), parts, _NARROW)


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten from `low` to `high`."""
    return [10.0**exponent for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def standalone(chart: str) -> str:
    """Return a chart as a file of its own, with its style."""
    head, _, rest = chart.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}\n'


def _picture(title: str, description: str, height: float, parts: Sequence[str], width: int = _WIDTH) -> str:
    kind = "chart narrow" if width == _NARROW else "chart"
    return (
        f'<svg class="{kind}" role="img" viewBox="0 0 {width} {height:.0f}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _shorten(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: max(1, length - 1)]}…"


def _cut(name: str, length: int, share: float) -> str:
    """A name of at most `length` letters, of which `share` are its first ones; its end tells neighbours apart."""
    if len(name) <= length:
        return name
    first = int((length - 1) * share)
    return f"{name[:first]}…{name[len(name) - max(1, length - 1 - first) :]}"


def _figure(x: float, y: float, value: float, text: str, anchor: str = "start") -> str:
    """A figure of the page's data: `value` is the exact one."""
    return f'<text data-value="{value!r}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick(x: float, y: float, text: str, anchor: str = "start") -> str:
    """A mark of an axis."""
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def wave(title: str, parts: Sequence[Sequence[float]]) -> str:
    """Return a small chart of a waveform; each of `parts`, in order, is its lowest and its highest value."""
    low, high = min(part[0] for part in parts), max(part[1] for part in parts)
    scale, step = 80 / ((high - low) or 1.0), 160 / len(parts)
    path = "".join(
        f"M{index * step:.1f} {85 - (least - low) * scale:.1f}V{84 - (most - low) * scale:.1f}"
        for index, (least, most) in enumerate(parts)
    )
    return (
        f'<svg class="chart small" role="img" viewBox="0 0 160 90"><title>{escape(title)}</title>'
        f'<path d="{path}" stroke="{COLOURS[0]}" fill="none"/></svg>'
    )
